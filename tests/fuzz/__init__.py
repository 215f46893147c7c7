"""Random loads: requests of every kind at any time, against each of them alone in a plain engine."""
