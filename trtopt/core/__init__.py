"""What every stage stands on: errors, files, progress, the values that pass between stages."""
