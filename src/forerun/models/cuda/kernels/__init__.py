"""Triton kernels of the GPU decoder. Importing a module here imports Triton."""
