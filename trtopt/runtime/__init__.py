"""Running engines: the CUDA device layer, lanes and what they need."""
