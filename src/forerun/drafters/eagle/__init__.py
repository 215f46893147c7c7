"""EAGLE heads: a transformer layer, or a few, that draft from the target's hidden states."""
