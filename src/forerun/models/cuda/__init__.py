"""Our decoder on a GPU: few, large kernels, captured as graphs, whose rows never depend on their neighbours."""
