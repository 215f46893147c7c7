"""vLLM's tokens per second by batch size, on the prompts of our own batch sweep: run it where vLLM is installed.

    python -m lab gpu ... --write-prompts ids.jsonl
    python lab/peers/vllm_sweep.py MODEL ids.jsonl OUT.json [--head FOLDER --drafted 3] [--batches 1,8,32,64,128]

MODEL is `python -m lab inflate 8b MODEL`'s folder, FOLDER a head written by `forerun drafters export --to vllm`. One
engine serves all batch sizes: as many sequences run at once as asked for, all other prompts wait, as in our sweep. For
that vLLM's EngineCore needs one method more:

    def set_running(self, count): self.scheduler.max_num_running_reqs = count

OUT holds tokens, seconds and token ids by batch size. --turn: start, write OUT.ready, wait for OUT.go (one of several).
"""

import argparse
import json
import math
import time
from pathlib import Path

FEWEST, TOKENS = 24, 128


def spread(prompts: list[list[int]]) -> list[list[int]]:
    """The order of our own sweep: neighbours in the file are of one task, and should not share a batch."""
    count = len(prompts)
    step = next((n for n in range(round(0.618 * count), count) if math.gcd(n, count) == 1), 1)
    return [prompts[i * step % count] for i in range(count)]


def stop_ids(model: Path) -> list[int]:
    """Tokens that end a text, as the model's own files say."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (model / name).is_file():
            ids = json.loads((model / name).read_text()).get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--drafted", type=int, default=3)
    parser.add_argument("--batches", default="1,8,32,64,128")
    parser.add_argument("--texts-per-place", type=int, default=4, help="texts per place in the batch")
    parser.add_argument("--fewest", type=int, default=FEWEST, help="texts of a small batch")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a prompt and its answer")
    parser.add_argument("--kv-bytes", type=int, default=22 << 30)
    parser.add_argument("--turn", action="store_true")
    given = parser.parse_args()
    from vllm import LLM, SamplingParams

    sizes = [int(size) for size in given.batches.split(",")]
    lines = given.prompts.read_text().splitlines()
    prompts = spread([json.loads(line)["token_ids"] for line in lines if line.strip()])
    head = {"method": "eagle3", "model": str(given.head), "num_speculative_tokens": given.drafted}
    llm = LLM(
        str(given.model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=given.max_length, seed=0,
        max_num_seqs=max(sizes), gpu_memory_utilization=0.2, kv_cache_memory_bytes=given.kv_bytes,
        enable_prefix_caching=False, **({"speculative_config": head} if given.head else {}),
    )  # fmt: skip
    if given.turn:
        given.out.with_suffix(".ready").touch()
        while not given.out.with_suffix(".go").exists():
            time.sleep(0.2)

    def ask(some: list[list[int]], tokens: int) -> list[list[int]]:
        how = SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=stop_ids(given.model), detokenize=False)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in some], how, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    rows = []
    for batch in sizes:
        llm.llm_engine.engine_core.call_utility("set_running", batch)
        texts = [prompts[i % len(prompts)] for i in range(max(given.fewest, given.texts_per_place * batch))]
        ask(texts[: max(4, batch)], TOKENS)  # texts of twelve tokens left compiling to the timed part
        began = time.perf_counter()
        ids = ask(texts, TOKENS)
        seconds = time.perf_counter() - began
        tokens = sum(map(len, ids))
        rows.append({"batch": batch, "seconds": seconds, "tokens": tokens, "rate": tokens / seconds, "ids": ids})
        print(f"batch {batch}: {tokens / seconds:.0f} tokens/s, {len(texts)} texts", flush=True)
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
