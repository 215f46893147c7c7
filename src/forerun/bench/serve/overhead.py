"""What the HTTP layer costs one client over `LLM.generate`: `python -m forerun.bench.serve.overhead`.

Both write the same texts, alternating, whole answers timed: a server and a client in processes of their own, and
the library here. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median
from time import perf_counter
from typing import Any

from forerun.bench.machine import cores, is_busy, load_average
from forerun.bench.serve.command import serving
from forerun.bench.suites import load_suite
from forerun.llm import LLM

_CLIENT = """
import json, sys, time, urllib.request
url = sys.argv[1]
for line in sys.stdin:
    request = urllib.request.Request(url, line.encode(), {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        text = json.loads(response.read())["choices"][0]["message"]["content"]
    print(json.dumps([time.perf_counter() - started, text]), flush=True)
"""


def main() -> int:
    """Measure and say it."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.serve.overhead")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    flags = parser.parse_args()
    busy = is_busy(load_average(), cores())
    llm = LLM.load(flags.model)
    with serving(flags.model, "") as url:
        ratios, equal = _measure(llm, f"{url}/v1/chat/completions", flags)
    document = {
        "what": "serve-overhead", "ratio_median": round(median(ratios), 4), "equal": equal, "pairs": len(ratios),
        "busy_before": busy,
    }  # fmt: skip
    print(json.dumps(document))
    return 0 if equal else 1


def _measure(llm: LLM, url: str, flags: argparse.Namespace) -> tuple[list[float], bool]:
    """Seconds by HTTP over seconds by the library, pair by pair; and whether all texts were equal."""
    items = load_suite(None)[:: max(1, len(load_suite(None)) // flags.prompts)][: flags.prompts]
    ratios, equal = [], True
    with subprocess.Popen(
        [sys.executable, "-c", _CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        for _ in range(flags.repeats):
            for item in items:
                body: dict[str, Any] = {"messages": list(item.messages), "max_tokens": flags.max_tokens}
                client.stdin.write(json.dumps({**body, "temperature": 0}) + "\n")
                client.stdin.flush()
                by_http, text = json.loads(client.stdout.readline())
                started = perf_counter()
                own = llm.chat(list(item.messages), max_tokens=flags.max_tokens, temperature=0)
                ratios.append(by_http / (perf_counter() - started))
                equal = equal and own.text == text
        client.stdin.close()
    return ratios, equal


if __name__ == "__main__":
    sys.exit(main())
