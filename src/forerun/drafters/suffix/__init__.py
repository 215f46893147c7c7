"""The suffix drafter: continuations of the longest match, in the request, in past outputs and in a corpus."""
