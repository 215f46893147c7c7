"""Builds engines: the only room that knows which targets, drafters, verifiers and controllers exist."""
