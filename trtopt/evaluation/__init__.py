"""Engines and models compared and timed: verify() and bench()."""
