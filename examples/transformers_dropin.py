"""For transformers users: wrap a model you already have and call `generate` as before.

The model here is tiny and random, so that nothing is downloaded. Yours is what `from_pretrained` gave you.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import forerun

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, **sizes)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(96, (2, 8))

fast = forerun.wrap(model)  # everything else is still the model's own: fast.config, fast(ids), ...

theirs = model.generate(ids, max_new_tokens=24, do_sample=False)
ours = fast.generate(ids, max_new_tokens=24, do_sample=False)
print("same token ids:", torch.equal(theirs, ours))

# The arguments that ask transformers to draft are understood too.
looked_up = fast.generate(ids, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=4)
helped = fast.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=model, num_assistant_tokens=3)
print("and with drafting:", torch.equal(theirs, looked_up), torch.equal(theirs, helped))

# Sampling follows torch's seed, and drafting does not change what it gives.
torch.manual_seed(1)
sampled = fast.generate(ids, max_new_tokens=24, do_sample=True, temperature=0.8)
torch.manual_seed(1)
again = fast.generate(ids, max_new_tokens=24, do_sample=True, temperature=0.8, prompt_lookup_num_tokens=4)
print("same seed, same text:", torch.equal(sampled, again))
