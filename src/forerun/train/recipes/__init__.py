"""Recipes: how each kind of drafter is trained (inputs, losses) and written."""
