"""What precision a module computes in: policies, rules, which are active, casts at policy boundaries."""
