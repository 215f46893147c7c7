"""How each kind of drafter is trained: inputs, losses and what is written."""
