"""The nouns of a round and of a request: trees, verdicts, offers, settings, seeds and errors. Imports no other room."""
