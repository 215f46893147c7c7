"""How long a server's engine takes from the start of its process until it writes, drafts, and has captured everything.

    python -m tests.gpu.start_times MODEL "$(date +%s.%N)"

Needs a GPU. Times are seconds since the second argument; of each text its seconds, tokens and tokens per round. A text
is written while captures wait, then one every second until nothing waits for one sequence. All must be the same.
"""

import asyncio
import logging
import sys
from time import time

from forerun import AsyncLLM

PROMPT, TOKENS = "Explain how a hash table works, with an example in Python.", 64


async def main(model: str, started: float) -> None:
    async with AsyncLLM(model) as llm:
        captures, texts, drafts = llm.llm.engine.captures, set[str](), False
        print(f"ready: {time() - started:.1f} s, {captures.missing} captures for one sequence wait", flush=True)
        while True:
            before, missing = time(), captures.missing
            done = await llm.chat(PROMPT, max_tokens=TOKENS, temperature=0.0)
            tokens, rounds = len(done.token_ids), llm.llm.engine.stats.rounds
            texts.add(done.text)
            accepted = llm.llm.engine.stats.accepted
            said = f"{time() - started:.1f} s: a text of {tokens} tokens in {time() - before:.2f} s"
            print(f"{said}; rounds so far {rounds}, accepted {accepted}, {missing} captures waited", flush=True)
            if accepted and not drafts:
                drafts = True
                print(f"first drafted text: {time() - started:.1f} s", flush=True)
            if not missing:
                break
            await asyncio.sleep(1.0)
        print(f"{len(texts)} different texts (1 is right)")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s", filename="start.log")
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
