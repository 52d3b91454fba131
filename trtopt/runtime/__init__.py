"""Running engines: the CUDA device layer and the executor."""
