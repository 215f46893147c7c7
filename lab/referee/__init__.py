"""The referee, run against real engines, against itself with planted bugs, and against engines without any."""
