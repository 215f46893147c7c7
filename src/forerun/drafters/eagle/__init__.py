"""EAGLE heads: one transformer layer that drafts from the target's hidden states."""
