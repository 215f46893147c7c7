"""Warping and verification: the only place where a law is made, and the only place where one is kept."""
