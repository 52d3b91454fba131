"""Engines and models compared and timed: verify(), bench()."""
