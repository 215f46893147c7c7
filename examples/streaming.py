"""Text as it is written, one event per round: accepted tokens in green, the target's own plain.

An event's text may lag behind its tokens (half a character, the beginning of a stop string), so this example
colours by token; the command line colours by character.
"""

import sys

from forerun import LLM

GREEN, PLAIN = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[", "]")

llm = LLM.load("smollm2")
question = "Repeat this list twice: red, green, blue, red, green, blue."

stream = llm.stream_chat(question, max_tokens=40, budget=6)
text = ""
for event in stream:
    drafted = llm.tokenizer.decode(list(event.tokens[: event.accepted]))
    own = llm.tokenizer.decode(list(event.tokens[event.accepted :]))
    print(f"{GREEN}{drafted}{PLAIN}{own}" if drafted else own, end="", flush=True)
    text += event.text

answer = stream.completion  # what chat() would have returned
print(f"\n{answer.tokens} tokens, {answer.tokens_per_round:.2f} tokens per round, {answer.finish_reason}")
print("the events' texts join to the whole:", text == answer.text)
