"""Tables and figures of README and documentation, from `results/*.json` alone."""
