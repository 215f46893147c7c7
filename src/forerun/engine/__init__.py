"""The engine: the decoding loop, its sequences, statistics and driver. Knows protocols only."""
