"""An engine file: its manifest, what is in it."""
