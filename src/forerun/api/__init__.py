"""What users hold: LLM, AsyncLLM, their calls, streams and completions, and `wrap` for transformers models."""
