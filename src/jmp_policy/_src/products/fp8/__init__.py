"""How products of float8 operands are computed, scaled and differentiated."""
