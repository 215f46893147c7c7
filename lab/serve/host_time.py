"""The host's time under load, as a server's /metrics tells it: CPU seconds by thread, and what rounds took.

CPU seconds hardly change on a machine that others use. With `--front thread` the engine's thread and the front's share
one interpreter, so what the front spends the engine may have to wait for.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping

from lab.serve.stream_client import Endpoint

Counts = dict[str, float]
PARTS = ("prompt", "draft", "pass", "verdict", "host")  # as forerun.engine.stats books them
_NAMES = {
    'forerun:cpu_seconds_total{model_name="%s",thread="engine"}': "engine",
    'forerun:cpu_seconds_total{model_name="%s",thread="front"}': "front",
    'forerun:cpu_seconds_total{model_name="%s",thread="others"}': "others",
    'forerun:generation_tokens_total{model_name="%s"}': "tokens",
    'forerun:rounds_total{model_name="%s"}': "rounds",
    **{f'forerun:round_seconds_total{{model_name="%s",part="{part}"}}': part for part in PARTS},
}


def read_host(endpoint: Endpoint) -> Counts:
    """What the server has counted so far; empty where it is not one of ours."""
    asked = urllib.request.Request(f"{endpoint.base}/metrics", headers=dict(endpoint.headers))
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError, ValueError):
        return {}
    wanted = {name % endpoint.model: short for name, short in _NAMES.items()}
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {wanted[name]: float(value) for name, _, value in pairs if name in wanted}


def host_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Per token of a run: microseconds of CPU by thread; per round: milliseconds of its thread, and by part."""
    spent = {name: after[name] - before[name] for name in after if name in before}
    if len(spent) < len(_NAMES) or spent["tokens"] <= 0 or spent["rounds"] <= 0:
        return {}
    token, a_round = 1e6 / spent["tokens"], 1e3 / spent["rounds"]
    return {
        **{f"{name}_us_per_token": round(spent[name] * token, 2) for name in ("engine", "front", "others")},
        "engine_cpu_ms_per_round": round(spent["engine"] * a_round, 3),
        **{f"{part}_ms_per_round": round(spent[part] * a_round, 3) for part in PARTS},
        "tokens_per_round": round(spent["tokens"] / spent["rounds"], 2),
    }
