"""Several texts at once through the engine, each with its own parameters, drafter, verifier and budget.

They share every pass of the target, join and leave between rounds, and do not influence each other's text.
"""

from forerun import LLM, Budget, Request, SamplingParams

llm = LLM.load("smollm2")


def ask(text: str) -> tuple[int, ...]:
    return llm.encode([{"role": "user", "content": text}])


greedy = SamplingParams(max_tokens=16)
seeded = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=1)  # auto = coupled: there is a seed
free = SamplingParams(max_tokens=12, temperature=1.0, stop=["\n"])
requests = {
    "plain": Request(ask("Name a river."), greedy, drafter="none"),
    "drafted": Request(ask("Name a river."), greedy, drafter="ngram", budget=Budget(4, depth=4)),
    "seeded": Request(ask("Name a mountain."), seeded),
    "block": Request(ask("Name a lake."), free, verifier="block"),
    "lossy": Request(ask("Name a sea."), free, verifier="typical"),
}
names = list(requests)
texts = dict.fromkeys(requests, "")

for place, event in llm.driver.stream(requests.values()):
    name = names[place]
    texts[name] += event.text
    if event.finished:
        print(f"{name} ({event.finished}): {texts[name]!r}")

assert texts["plain"] == texts["drafted"]
