"""Other engines on our weights and prompts: transformers on a GPU, and vLLM."""
