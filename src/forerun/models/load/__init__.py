"""Checkpoints: find them, open them (GGUF or safetensors), and the tokenizers and chat templates they carry."""
