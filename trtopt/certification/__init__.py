"""An engine held against itself and against the model as given: `certify()`."""
