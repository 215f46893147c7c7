"""Parsers: what a model thinks, says and calls, told apart in its text as that grows."""
