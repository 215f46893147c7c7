"""Kernels before they are launched: compiled together, in processes of their own, found on disk, captured later."""
