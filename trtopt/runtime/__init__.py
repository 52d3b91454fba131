"""Running engines: the CUDA device layer, slots and what they need."""
