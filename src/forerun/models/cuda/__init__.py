"""Our decoder on a GPU: few large kernels, captured as CUDA graphs; a row never depends on its neighbours."""
