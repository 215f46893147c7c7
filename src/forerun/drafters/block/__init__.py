"""Block drafters: one pass drafts a whole block from mask tokens (DFlash, and DSpark's Markov and confidence heads)."""
