"""Controllers: how much to draft, per sequence and round."""
