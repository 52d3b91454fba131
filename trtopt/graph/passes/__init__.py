"""Graph to graph: one pass, one file."""
