"""Drafters that look continuations up: n-gram, suffix, recycling, lookahead."""
