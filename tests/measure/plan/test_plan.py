"""The planner: files it reads, what it simulates, and what it advises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.measure.plan import advice
from forerun.measure.plan.advice import (
    PLAIN,
    Ask,
    Load,
    Memory,
    Point,
    Profile,
    best_batch,
    built_in,
    capacity,
    plan,
    poisson,
    read_profile,
    simulate,
)
from forerun.measure.plan.measure import prompt_square
from forerun.models import pages
from forerun.models.config import DecoderConfig
from forerun.models.slots import GPU_SHARE, slot_bytes


def point(setup: str, batch: int, round_seconds: float, tokens: float = 1.0, error: float = 0.0) -> Point:
    return Point(setup, batch, round_seconds / (batch * tokens), 1e-4, tokens, error, 100.0)


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FLAT = Profile("m", "x", "made up", tuple(point(PLAIN, b, 0.01) for b in (1, 4, 8)))
TWICE = replace(FLAT, points=(*FLAT.points, *(point("head", b, 0.01, 2.0) for b in (1, 4, 8))))


def test_one_request_alone_takes_its_prompt_and_its_rounds() -> None:
    found = simulate(FLAT, PLAIN, [Ask(3.0, 200, 50)], 8)
    assert found.seconds == pytest.approx(200e-4 + 50 * 0.01)
    assert found.ttft(0.99) == pytest.approx(200e-4 + 0.01)
    assert found.tokens == 50
    assert simulate(TWICE, "head", [Ask(0.0, 200, 50)], 8).seconds == pytest.approx(200e-4 + 25 * 0.01)


def test_requests_at_once_share_rounds_up_to_the_batch_and_wait_beyond() -> None:
    eight = simulate(FLAT, PLAIN, [Ask(0.0, 1, 50)] * 8, 8)
    assert eight.seconds == pytest.approx(0.5, rel=0.01)
    nine = simulate(FLAT, PLAIN, [Ask(0.0, 1, 50)] * 9, 8)
    assert nine.seconds == pytest.approx(1.0, rel=0.01)
    assert nine.ttft(0.99) == pytest.approx(0.51, rel=0.02)  # the ninth waited for a place
    assert nine.ttft(0.5) < 0.02


def test_a_slower_machine_and_a_longer_context_take_longer() -> None:
    asks = poisson(5.0, 50, 100, 40)
    assert simulate(FLAT, PLAIN, asks, 8, slower=2.0).mean_tpot > 1.9 * simulate(FLAT, PLAIN, asks, 8).mean_tpot
    long = replace(FLAT, context_seconds=1e-5)
    assert long.round_seconds(PLAIN, 4, 100.0) == pytest.approx(0.01)
    assert long.round_seconds(PLAIN, 4, 1100.0) == pytest.approx(0.01 + 4 * 1000 * 1e-5)


def test_a_long_prompt_takes_more_for_every_token_than_a_short_one() -> None:
    square = replace(FLAT, prompt_square_seconds=1e-8)
    assert simulate(square, PLAIN, [Ask(0.0, 10_000, 1)], 8).seconds == pytest.approx(1.0 + 1.0 + 0.01)
    assert simulate(FLAT, PLAIN, [Ask(0.0, 10_000, 1)], 8).seconds == pytest.approx(1.0 + 0.01)
    load = Load(1, 10_000, 50)
    each = 1 / capacity(square, PLAIN, load, 8) - 1 / capacity(FLAT, PLAIN, load, 8)
    assert each == pytest.approx(1.0 / 50)  # a second more for every prompt, by its answer's tokens


@pytest.mark.parametrize(("tokens", "column"), [(128_000, "long"), (32_000, "middle")])
def test_prompts_of_an_8b_on_an_h200_take_what_was_measured(tokens: int, column: str) -> None:
    """In benchmarks/h200-long.json, by one constant for both lengths."""
    rows = json.loads((BENCHMARKS / "h200-long.json").read_text("utf-8"))["tables"]["16-bits"]["rows"]
    seconds = next(row[column] for row in rows if row["what"] == "prompt, s")
    profile = built_in("h200", "8b")
    assert profile.prompt_seconds(PLAIN, 1, tokens) == pytest.approx(seconds, rel=0.04)
    assert profile.prompt_seconds(PLAIN, 1, 300) == pytest.approx(300 * 2e-5, rel=0.02)


def test_prompts_beyond_what_was_measured_are_named_where_no_law_is_known() -> None:
    assert FLAT.guesses_prompts(2000)
    assert not FLAT.guesses_prompts(500)
    assert not replace(FLAT, prompt_square_seconds=1e-9).guesses_prompts(128_000)


MEMORY = Memory(10**9, 64 * 100 * 1000, {"auto": 1000, "fp8": 500})  # a hundred pages of 64 tokens


def test_memory_says_how_many_tokens_and_sequences_fit() -> None:
    assert (MEMORY.tokens(), MEMORY.tokens("fp8")) == (6400, 12_800)
    assert MEMORY.sequences(64) == 50  # a page of tokens, and one for drafts
    assert MEMORY.sequences(65) == 33
    assert MEMORY.sequences(65, "fp8") == 66
    assert MEMORY.sequences(10_000) == 0
    said = MEMORY.told([65])
    assert said[0] == "weights about 1.0 GB"
    assert said[1] == "kv_dtype auto: 1,000 bytes for a token, 6,400 tokens fit, or sequences: 33 of 65 tokens"
    assert "12,800 tokens fit, or sequences: 66 of 65" in said[2]
    unknown = replace(MEMORY, room=None, kv_dtype="fp8")
    assert unknown.sequences(65) is None
    assert unknown.told([65])[1] == "kv_dtype fp8: 500 bytes for a token"


def test_no_more_sequences_are_planned_for_than_fit() -> None:
    load = Load(rate=40, prompt=1000, answer=100)  # 18 pages and one
    fast = replace(FLAT, points=tuple(replace(each, prompt_seconds=0.0) for each in FLAT.points))
    assert best_batch(fast, PLAIN, load) == 8
    assert best_batch(replace(fast, memory=MEMORY), PLAIN, load) == 5
    assert best_batch(replace(fast, memory=replace(MEMORY, kv_dtype="fp8")), PLAIN, load) == 8
    fits = plan(replace(fast, memory=MEMORY), load)[0]
    assert fits.batch == 5
    assert fits.replicas.value > plan(fast, load)[0].replicas.value
    with pytest.raises(InvalidInput, match="7000 tokens do not fit the KV cache of x on m, which holds 6400"):
        plan(replace(fast, memory=MEMORY), Load(1, 6900, 100))


def test_sizes_of_pages_are_those_of_the_kv_cache() -> None:
    assert advice.PAGE == pages.PAGE


@pytest.mark.parametrize("kind", ["8b", "8b-fp8", "8b-int8", "8b-w4"])
def test_the_memory_of_the_built_in_8b_is_that_of_its_shape(kind: str) -> None:
    memory, gib = built_in("h200", kind).memory, 2**30
    assert memory is not None
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = DecoderConfig.from_hf({
        **shape, "model_type": "llama", "num_hidden_layers": 32, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
    })  # fmt: skip
    sizes = {"auto": slot_bytes(config, torch.bfloat16), "fp8": slot_bytes(config, torch.float8_e4m3fn)}
    assert memory.token_bytes == sizes
    assert memory.room == pytest.approx(GPU_SHARE * (139 * gib - memory.weights), rel=0.001)


def test_the_prompt_s_law_is_measured_with_a_short_and_a_long_one() -> None:
    """A clock that is told: 1 ms for a token and 1 us for a pair of tokens, halved."""
    sizes: list[int] = []

    def write(setup: Any, batch: int, prompts: Any, params: Any) -> Any:
        sizes.append(len(prompts[0]))
        return SimpleNamespace(parts={"prompt": 1e-3 * sizes[-1] + 5e-7 * sizes[-1] ** 2})

    def sweep(longest: int, gpu: bool) -> Any:
        engine = SimpleNamespace(max_length=longest, target=SimpleNamespace(can=SimpleNamespace(captures=gpu)))
        return SimpleNamespace(engine=engine, prompts=[(1, 2, 3), (4, 5)], write=write)

    assert prompt_square(sweep(100_000, gpu=False), 30_000) == pytest.approx(5e-7)
    assert prompt_square(sweep(100_000, gpu=True), 30_000) == pytest.approx(5e-7)
    assert prompt_square(sweep(1000, gpu=True), 30_000) == pytest.approx(5e-7)
    assert sizes == [511, 2047, 2048, 8192, 249, 999]


def test_throughput_is_what_comes_in_until_it_is_what_can_be_done() -> None:
    few = simulate(FLAT, PLAIN, poisson(2.0, 200, 10, 50), 8)
    assert few.tokens_per_second == pytest.approx(100, rel=0.2)
    many = simulate(FLAT, PLAIN, poisson(100.0, 200, 10, 50), 8)
    assert many.tokens_per_second == pytest.approx(capacity(FLAT, PLAIN, Load(1, 10, 50), 8), rel=0.1)


def test_replicas_follow_the_rate_and_drafting_that_pays_is_chosen() -> None:
    load = Load(rate=40, prompt=100, answer=100)
    best, other = plan(TWICE, load)
    assert (best.setup, other.setup) == ("head", PLAIN)
    assert best.replicas.value < other.replicas.value
    twice = plan(TWICE, replace(load, rate=80))[0]
    assert 1.6 < twice.replicas.value / best.replicas.value < 2.4
    assert best.gpu_hours.value == pytest.approx(best.replicas.value / (40 * 100 * 3600 / 1e6))
    assert best.reaches
    assert best.used <= 0.9


def test_drafting_that_does_not_pay_is_not_chosen() -> None:
    worse = replace(FLAT, points=(*FLAT.points, *(point("slow", b, 0.03, 2.0) for b in (1, 4, 8))))
    assert plan(worse, Load(40, 100, 100))[0].setup == PLAIN


@pytest.mark.parametrize("busiest", [8, 4])
def test_of_those_that_cost_as_much_the_one_that_answers_sooner_is_chosen(busiest: int) -> None:
    """As many replicas do for all; one that is faster with few at once is, though not with as many as fit."""
    quick = [point("quick", 1, 0.005), *(point("quick", b, 0.0102) for b in (4, busiest))]
    slow = [point("slow", b, 0.011) for b in (1, 4, 8)]
    best, *others = plan(replace(FLAT, points=(*slow, *FLAT.points, *quick)), Load(1, 100, 100))
    assert best.setup == "quick"
    assert best.capacity.value < others[0].capacity.value
    assert [each.setup for each in others] == [PLAIN, "slow"]
    assert best.gpu_hours == others[0].gpu_hours
    assert best.answer_seconds < others[0].answer_seconds < others[1].answer_seconds
    found = simulate(FLAT, PLAIN, poisson(1.0, 200, 100, 100), 8)
    assert others[0].answer_seconds == pytest.approx(found.ttft(0.5) + 99 * found.mean_tpot)


def test_a_cost_that_nobody_could_tell_from_another_counts_as_the_same() -> None:
    """Hundreds of replicas: one in a hundred more, and answers in half the time."""
    quick = [point("quick", 1, 0.004), point("quick", 4, 0.006), point("quick", 8, 0.01007)]
    profile = replace(FLAT, points=(*FLAT.points, *quick))
    best, plain = plan(profile, Load(1500, 100, 100))
    assert (best.setup, plain.setup) == ("quick", PLAIN)
    assert plain.replicas.value < best.replicas.value < 1.02 * plain.replicas.value
    assert best.answer_seconds < 0.9 * plain.answer_seconds


def test_intervals_come_from_those_of_the_points() -> None:
    wide = replace(FLAT, points=tuple(replace(each, error=0.3) for each in FLAT.points))
    found = plan(wide, Load(60, 100, 100))[0]
    assert found.replicas.low < found.replicas.value < found.replicas.high
    assert found.capacity.low == pytest.approx(0.7 * found.capacity.value)
    assert found.full_hours.low < found.full_hours.value < found.full_hours.high
    narrow = plan(FLAT, Load(60, 100, 100))[0]
    assert narrow.replicas.low == narrow.replicas.high


def test_a_batch_whose_tokens_come_too_late_is_not_taken() -> None:
    steep = replace(FLAT, points=(point(PLAIN, 1, 0.01), point(PLAIN, 8, 0.05)))
    assert best_batch(steep, PLAIN, Load(1, 10, 100, token_seconds=0.1)) == 8
    assert best_batch(steep, PLAIN, Load(1, 10, 100, token_seconds=0.02)) == 1
    assert not plan(steep, Load(1, 10, 100, token_seconds=0.001))[0].reaches


def test_only_measured_machines_are_built_in() -> None:
    with pytest.raises(InvalidInput, match="--gpu h200 --model 8b"):
        built_in("h100", "8b")


def sweep_row(**more: Any) -> dict[str, Any]:
    plain = {
        "batch": 1, "setup": PLAIN, "texts": 4, "prompt_tokens": 400, "tokens": 100, "seconds": 2.0,
        "tokens_per_s": 50.0, "interval": [45.0, 55.0], "tokens_per_round": 1.0, "ms_by_part": {"prompt": 400.0},
    }  # fmt: skip
    return {**plain, **more}


def test_files_of_batch_sweeps_and_of_our_own(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(
        json.dumps({"model": "smollm2", "machine": {"cpu": "two cores"}, "batches": {"rows": [sweep_row()]}})
    )
    found = read_profile(file)
    only = found.of(PLAIN)[0]
    assert (found.machine, found.model) == ("two cores", "smollm2")
    assert only.decode_seconds == pytest.approx(1.6 / 100)
    assert only.prompt_seconds == pytest.approx(0.4 / 400)
    assert only.error == pytest.approx(0.1)
    assert only.context == pytest.approx(112.5)
    own = tmp_path / "own.json"
    own.write_text(found.to_json())
    assert read_profile(own) == found
    more = replace(found, prompt_square_seconds=1e-9, memory=MEMORY)
    own.write_text(more.to_json())
    assert read_profile(own) == more


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"what": "forerun-profile"}', '{"what": "forerun-profile", "points": [{"a": 1}]}', "3"]
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises((InvalidInput, DamagedFile), match=r"x\.json"):
        read_profile(tmp_path / "x.json")


@pytest.mark.parametrize("wrong", [{"room": "x"}, {"room": -5}, {"token_bytes": {}}, {"token_bytes": {"auto": 0}}])
def test_a_memory_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    whole = json.loads(replace(FLAT, memory=MEMORY).to_json())
    (tmp_path / "x.json").write_text(json.dumps(whole))
    assert read_profile(tmp_path / "x.json").memory == MEMORY
    (tmp_path / "x.json").write_text(json.dumps({**whole, "memory": {**whole["memory"], **wrong}}))
    with pytest.raises(InvalidInput, match="whole numbers of bytes"):
        read_profile(tmp_path / "x.json")


def test_a_sweep_that_does_not_say_its_prompts_is_refused(tmp_path: Path) -> None:
    row = sweep_row()
    del row["prompt_tokens"]
    (tmp_path / "x.json").write_text(json.dumps([row]))
    with pytest.raises(InvalidInput, match="how long its prompts"):
        read_profile(tmp_path / "x.json")


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"prompt": 0}, {"answer": 0}, {"token_seconds": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Load(**{"rate": 1.0, "prompt": 1, "answer": 1, **wrong})
