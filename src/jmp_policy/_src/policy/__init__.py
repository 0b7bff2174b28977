"""Decides the precision of every module: policies, rules, which are active, casts at policy boundaries."""
