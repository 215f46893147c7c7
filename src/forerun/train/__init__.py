"""Training drafters for a target: data that the target wrote itself, recipes, one loop."""
