"""EAGLE heads: one transformer layer that runs ahead on the target's own features."""
