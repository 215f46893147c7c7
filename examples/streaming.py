"""Text as it is written, one event per round: accepted tokens in green, the target's own plain.

An event's text may lag behind its tokens (half a character, the beginning of a stop string), so this example
colours by token; the command line colours by character.
"""

import sys

from forerun import LLM, Completion, SamplingParams

GREEN, PLAIN = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[", "]")

llm = LLM.load("smollm2")
prompt = [{"role": "user", "content": "Repeat this list twice: red, green, blue, red, green, blue."}]

for step in llm.stream(prompt, SamplingParams(max_tokens=40), budget=6):
    if isinstance(step, Completion):  # the last thing that a stream yields
        print(f"\n{step.tokens} tokens, {step.tokens_per_round:.2f} tokens per round, {step.finish_reason}")
        break
    drafted = llm.tokenizer.decode(list(step.tokens[: step.accepted]))
    own = llm.tokenizer.decode(list(step.tokens[step.accepted :]))
    print(f"{GREEN}{drafted}{PLAIN}{own}" if drafted else own, end="", flush=True)
