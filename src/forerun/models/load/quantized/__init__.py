"""Safetensors checkpoints with quantised weights: what their config says, their layouts, and the weights by name."""
