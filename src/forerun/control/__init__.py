"""Controllers decide how much drafting is worth."""
