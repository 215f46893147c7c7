"""The one loop and what it needs around it. Knows protocols only."""
