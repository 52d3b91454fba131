"""Shared ground of every stage: errors, files, progress, the values that pass between stages."""
