"""Measurements: prompts, an alternating runner, ratios with their spread, and what the machine was."""
