"""Drafters that run a second model, or some layers of the target."""
