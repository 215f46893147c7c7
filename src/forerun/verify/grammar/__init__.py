"""Structured output: what an answer must match is compiled (`compiled`) and becomes part of the law (`law`)."""
