"""A host's faults and the commands that help, layers timed, reports: `doctor()`, `profile()`, `report()`."""
