"""Target models: our own decoder, the transformers adapter, and what loads them."""
