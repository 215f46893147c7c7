"""Which forms of drafts pay: a head's trees along real texts, recorded once, and rounds with a GPU's times."""
