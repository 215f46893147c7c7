"""The benchmark of this machine's CPU: speed over other engines, number formats, memory, text quality."""
