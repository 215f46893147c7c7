"""Verification: logits become laws (warp), and drafted tokens are accepted or rejected (verifiers)."""
