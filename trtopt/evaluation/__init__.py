"""Engines and models compared and timed: verify(), and what bench() measures by."""
