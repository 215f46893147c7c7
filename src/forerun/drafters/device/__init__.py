"""Drafting on a GPU: heads and draft models whose trees never leave the device."""
