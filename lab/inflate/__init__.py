"""Small models and their heads at the cost of larger shapes: the same tokens and acceptance, the large model's time."""
