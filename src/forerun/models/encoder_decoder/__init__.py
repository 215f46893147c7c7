"""Encoder-decoder targets: the T5 and Marian families, with tree attention in the decoder."""
