"""Products with weights of every format as CUDA kernels that are compiled ahead of time and loaded by the driver."""
