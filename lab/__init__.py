"""The laboratory: benchmarks of Forerun itself, its simulated device and its comparisons; not installed.

`python -m lab` lists the commands.
"""
