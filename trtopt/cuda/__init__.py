"""The only room that imports cuda-python: devices, memory, arrays of other libraries."""
