"""How long `forerun serve` takes from its start until /ready says yes: `python -m forerun.bench.serve.start`.

The first start of a model on a machine times its passes and keeps them; what counts are the later ones. Shows wall time
and CPU seconds of both processes, which a busy machine changes less. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from forerun.bench.machine import cores, is_busy, load_average, machine_facts
from forerun.errors import InvalidInput

PATIENCE = 300.0  # seconds after which a server that is not ready is given up


def main(words: Sequence[str] | None = None) -> int:
    """Start it a few times and say the median."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.serve.start")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--starts", type=int, default=3, help="beside a first one, which is not counted")
    flags = parser.parse_args(words)
    busy = is_busy(load_average(), cores())
    starts = [start(flags.model) for _ in range(flags.starts + 1)][1:]
    document = {
        "what": "serve-start", "model": flags.model, "starts": len(starts), "machine": machine_facts(),
        "seconds": round(median(wall for wall, _ in starts), 3),
        "cpu_seconds": round(median(cpu for _, cpu in starts), 3), "busy_before": busy,
    }  # fmt: skip
    print(json.dumps(document))
    return 0


def start(model: str) -> tuple[float, float]:
    """Seconds from the start of the process to its first yes, and the CPU seconds that it had used by then."""
    port = _free_port()
    command = [sys.executable, "-m", "forerun", "serve", model, "--port", str(port)]
    began = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not _is_ready(f"http://127.0.0.1:{port}/ready"):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                    raise InvalidInput(f"`{' '.join(command[1:])}` did not get ready; run it to see why")
                time.sleep(0.01)
            return time.perf_counter() - began, sum(map(_cpu_seconds, [process.pid, *_children(process.pid)]))
        finally:
            process.send_signal(signal.SIGTERM)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _children(process: int) -> list[int]:
    """Processes that it has started: the engine's; none where the system does not say."""
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _cpu_seconds(process: int) -> float:
    """Of a process and its threads so far; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
