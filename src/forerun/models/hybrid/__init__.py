"""Decoders whose layers keep a recurrent state in the place of keys and values: a Target that rolls states back."""
