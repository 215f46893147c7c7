"""Kernels in Gluon for Hopper's copy engine and asynchronous tensor cores."""
