"""The benchmark of a GPU: seconds per pass, rounds, whole texts, equality of bits."""
