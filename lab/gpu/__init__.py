"""The benchmark of a GPU: passes, rounds and whole texts (`python -m lab gpu`)."""
