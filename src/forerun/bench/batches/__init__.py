"""The batch sweep: tokens per second and time per token by number of sequences at once, with and without drafting."""
