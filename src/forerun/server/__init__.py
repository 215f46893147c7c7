"""An OpenAI-compatible HTTP server: needs the extra `forerun[serve]`."""
