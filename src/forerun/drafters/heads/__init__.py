"""Drafters that run a trained head: Medusa, Hydra, MTP, EAGLE, block drafters, specdec."""
