"""Audits a traced function: what it computes in which precision."""
