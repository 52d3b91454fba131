"""What is wrong with a model, and what will be: check()."""
