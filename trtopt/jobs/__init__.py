"""Many calibrations at once: models × data sets × methods, in shards, on a pool of processes or a Ray cluster."""
