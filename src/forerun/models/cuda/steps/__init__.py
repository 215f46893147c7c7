"""The steps of a GPU pass: as Triton kernels, and in plain torch as their reference."""
