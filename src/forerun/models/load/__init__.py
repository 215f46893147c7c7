"""Checkpoints: find them, open them (GGUF or safetensors), and their tokenizers and chat templates."""
