"""A server under load: arrivals that do not wait for answers, times of first and later tokens, texts compared."""
