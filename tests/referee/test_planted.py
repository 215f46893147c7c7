"""Every planted bug is found by its check, in process and over a socket; a right engine passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.core.errors import InvalidInput
from forerun.referee import suite
from forerun.referee.ask import Answer, Ask, Mode, symbol_ids
from forerun.referee.planted import BUGS, Planted
from forerun.referee.suite import Budget, Report, chosen_checks, run_suite
from forerun.referee.tables import Pair
from forerun.referee.targets import UrlTarget
from tests.referee.planted_server import serve

OVER_A_SOCKET = (
    "argmax_as_drawn",
    "batch_rows_mixed",
    "min_p_ignored",
    "grammar_not_rolled_back",
    "logprobs_of_drafter",
)


def judged(engine: object, pair: Pair, only: str, tokens: int | None = None, seed: int = 0) -> Report:
    """One check with the tokens and the false alarms that it has in a run of all."""
    whole = chosen_checks()
    bets = sum(each.bets for each in whole)
    if tokens is None:  # what the other checks leave of the default budget, by shares
        share = next(each.share for each in whole if each.name == only)
        tokens = max(2000, int(54_000 * share / sum(each.share for each in whole)))
    return run_suite(
        engine,  # type: ignore[arg-type]
        pair,
        Budget(tokens, 120),
        [replace(each) for each in chosen_checks([only])],
        seed,
        false_alarms=1e-3 / bets,
    )


@contextmanager
def served(engine: Planted) -> Iterator[UrlTarget]:
    server = serve(engine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield UrlTarget(url, ids=symbol_ids(engine.pair.target), off={"speculative": "off"})
    finally:
        server.shutdown()
        server.server_close()


def test_every_bug_has_its_check() -> None:
    assert {name for name, _ in BUGS.values()} <= {each.name for each in chosen_checks()}
    assert len(BUGS) >= 15


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(pair: Pair, bug: str) -> None:
    report = judged(Planted(pair, frozenset([bug])), pair, BUGS[bug][0])
    assert [each.name for each in report.failed] == [BUGS[bug][0]]
    finding = report.failed[0].finding
    assert finding.p_value is not None or finding.counterexample
    assert finding.command


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_penalties_of_a_rounds_first_token_are_found_with_other_seeds(pair: Pair, seed: int) -> None:
    """The smallest of the planted biases; half of the tokens that the check has at the default budget must do."""
    report = judged(Planted(pair, frozenset(["penalties_from_root"]), seed=seed), pair, "law.frequency", 2800, seed)
    assert [each.finding.detail.partition(":")[0] for each in report.failed] == ["the penalty misses the last tokens"]


@pytest.mark.parametrize("name", sorted({check for check, _ in BUGS.values()}))
def test_a_right_engine_passes(pair: Pair, name: str) -> None:
    report = judged(Planted(pair, seed=3), pair, name, tokens=2000)
    assert [(each.name, each.status) for each in report.results] == [(name, "pass")]


@pytest.mark.parametrize("bug", OVER_A_SOCKET)
def test_a_planted_bug_is_found_over_a_socket(pair: Pair, bug: str) -> None:
    with served(Planted(pair, frozenset([bug]))) as target:
        report = judged(target, pair, BUGS[bug][0])
    assert [each.name for each in report.failed] == [BUGS[bug][0]]
    assert report.failed[0].finding.command.startswith(f"curl -s {target.url}/completions ")


@pytest.mark.slow
def test_a_right_server_passes(pair: Pair) -> None:
    with served(Planted(pair)) as target:
        report = run_suite(target, pair, Budget(9000, 100), chosen_checks())
    assert report.failed == []
    cheap = [each.name for each in chosen_checks() if not each.share]
    assert len(cheap) >= 14
    assert [each.name for each in report.results if each.status != "pass" and each.name in cheap] == []


def test_a_slow_engine_is_asked_for_its_laws_before_the_time_is_spent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own: half a second for every batch of requests."""

    class Slow(Planted):
        now = 0.0

        def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
            self.now += 0.5
            return super().answer(asks, mode)

    engine = Slow(pair)
    monkeypatch.setattr(suite, "time", SimpleNamespace(monotonic=lambda: engine.now))
    report = run_suite(
        engine, pair, Budget(30_000, 100), [each for each in chosen_checks() if each.name != "speed.load"]
    )
    assert report.failed == []
    done = {each.name for each in report.results if each.status == "pass"}
    assert {each.name for each in chosen_checks(["greedy", "law"])} <= done
    assert any(each.status == "skip" for each in report.results), "the time did not run out"


def test_what_an_engine_refuses_is_skipped(pair: Pair) -> None:
    with served(Planted(pair)) as target:
        report = run_suite(
            replace(target, url="http://127.0.0.1:9/v1"), pair, Budget(500, 5), chosen_checks(["greedy.alone"])
        )
        assert [each.status for each in report.results] == ["fail"]
        assert "does not answer" in report.results[0].finding.detail
        alone = replace(target, off=None)
        report = run_suite(alone, None, Budget(2000, 20), chosen_checks(["greedy.on_off", "law.top_k"]))
    assert [each.status for each in report.results] == ["skip", "skip"]


@pytest.mark.parametrize(("bug", "status"), [("", "pass"), ("accepts_nothing", "fail")])
def test_drafting_figures_are_read_from_the_servers_counters(pair: Pair, bug: str, status: str) -> None:
    """As vLLM gives them: nothing in the answers, totals in /metrics."""
    server, totals = serve(Planted(pair, frozenset([bug] if bug else ()))), [0, 0]

    class Counting(server.RequestHandlerClass):  # type: ignore[misc, name-defined]
        def do_GET(self) -> None:
            if self.path != "/metrics":
                return super().do_GET()
            names = ("num_draft_tokens", "num_accepted_tokens")
            lines = [f'vllm:spec_decode_{n}_total{{engine="0"}} {v:.1f}' for n, v in zip(names, totals, strict=True)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(["# TYPE of_counters counter", *lines, ""]).encode())
            self.close_connection = True
            return None

        def _send(self, status: int, body: dict[str, Any]) -> None:
            figures = body.pop("metrics", {}).get("speculative_decoding", {})
            totals[0] += figures.get("num_draft_tokens", 0)
            totals[1] += figures.get("num_accepted_draft_tokens", 0)
            super()._send(status, body)

    server.RequestHandlerClass = Counting
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        target = UrlTarget(f"http://127.0.0.1:{server.server_address[1]}", ids=symbol_ids(pair.target))
        report = judged(target, pair, "metrics.acceptance")
    finally:
        server.shutdown()
        server.server_close()
    assert [each.status for each in report.results] == [status], report.results[0].finding.detail


def test_an_unknown_bug_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidInput, match="no planted bug 'nosuch'"):
        Planted(pair, frozenset(["nosuch"]))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_by_the_whole_suite(pair: Pair, bug: str) -> None:
    report = run_suite(Planted(pair, frozenset([bug])), pair)
    assert report.failed
    assert report.seconds < 180
