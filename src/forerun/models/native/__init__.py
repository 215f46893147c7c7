"""Our decoder on a CPU, in C: quantised weights, passes whose rows have the same bits in any company."""
