"""Kernels of our own: native ones for CPUs, built from the C files in native/."""
