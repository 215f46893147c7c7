"""The shortest use: load, ask, read. The first run fetches the model: forerun models pull smollm2."""

from forerun import LLM, SamplingParams

llm = LLM.load("smollm2", drafter="ngram")  # n-gram lookup needs no second model

answer = llm.chat("Name three colours.", SamplingParams(max_tokens=24))
print(answer.text)
print(f"{answer.tokens} tokens in {answer.rounds} rounds, exact: {answer.exact}")

# A seed makes the text a function of the seed alone, whatever drafts: here with drafting and without.
params = SamplingParams(max_tokens=24, temperature=0.8, seed=7)
drafted = llm.chat("Name three colours.", params)
plain = llm.chat("Name three colours.", params, drafter="none")
print("the same text without drafting:", drafted.text == plain.text)
