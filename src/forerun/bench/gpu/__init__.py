"""The benchmark of a GPU: seconds per pass, rounds, whole answers, bitwise equality."""
