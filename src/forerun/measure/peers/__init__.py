"""Other engines to compare with, behind the runner's own contender: transformers, llama.cpp, any OpenAI endpoint."""
