"""Benchmarks: prompts, an alternating runner, ratios with 95% intervals, and facts about the machine."""
