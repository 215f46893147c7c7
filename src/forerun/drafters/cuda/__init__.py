"""Draft models that draft on the GPU, without the host between their tokens."""
