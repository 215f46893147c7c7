"""Any causal language model of transformers as a target."""
