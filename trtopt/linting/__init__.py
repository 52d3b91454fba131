"""Find what is wrong with a model, and what will be: check()."""
