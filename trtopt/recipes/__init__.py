"""Models and data sets by name, and the names of classes."""
