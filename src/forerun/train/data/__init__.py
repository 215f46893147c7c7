"""Training data: prompts, the target's own answers to them, and shards on disk."""
