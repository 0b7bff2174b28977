"""What a traced function computes in which precision."""
