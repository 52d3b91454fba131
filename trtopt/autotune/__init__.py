"""build() as users call it: candidates, and which is kept."""
