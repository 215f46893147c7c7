"""Recurrent hybrids in the GPU decoder: states of any node, whatever it shares its pass with and however it is read."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.offer import Form
from forerun.core.tree import topology_of
from forerun.core.types import Needs, TreeBatch, TreeForm, Verdict
from forerun.models.config import DecoderConfig
from forerun.models.cuda import states as states_module
from forerun.models.cuda.hybrid import EACH, CudaHybrid
from forerun.models.cuda.network import Run
from forerun.models.cuda.plan import MAX_ROWS, Size
from forerun.models.cuda.special import Recurrent
from forerun.models.cuda.states import Links, Nodes, StatePool, windows_of
from forerun.models.hybrid.mixers import Convolution, DeltaNet, Mamba2
from forerun.models.hybrid.rows import RowLinear
from forerun.models.pages import PAGE
from forerun.testing import FakeSeq, check_target, extend, random_tree, random_verdict
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from tests.gpu.test_following import CHAIN, WIDE, Forms, Watched, plain_texts, requests, write
from tests.gpu.test_following import make as make_following
from tests.gpu.test_plain_rounds import _engine, _requests, _write
from tests.gpu.tiny import VOCAB, fused_on_a_cpu, need_cuda, where_kernels_run
from tests.models.tiny_checkpoints import make_reference, reference_logits

KINDS = ["lfm2", "qwen3_next", "qwen3_5", "granite4", "lfm2_moe"]
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TOLERANCE = 2e-3  # of logits that a wrong state moves by several
MORE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_5": {"attention_bias": False},
    "granite4": {"shared_intermediate_size": 32},
    "lfm2_moe": {"moe_intermediate_size": 32, "num_dense_layers": 2, "num_experts": 8},
}
_known: dict[str, tuple[Any, DecoderConfig, dict[str, Tensor]]] = {}


def reference(name: str) -> tuple[Any, DecoderConfig, dict[str, Tensor]]:
    if name not in _known:
        model = make_reference(name, {**SIZES, **MORE.get(name, {})})
        values = {**model.config.to_dict(), "model_type": model.config.model_type}
        _known[name] = model, DecoderConfig.from_hf(values), dict(model.state_dict())
    return _known[name]


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CudaHybrid:
    config = reference(name)[1]
    weights = {key: one.clone() for key, one in reference(name)[2].items()}  # tests change them
    return CudaHybrid(
        config, weights, dtype=dtype, device=device, kv_slots=20_000, greedy_walk=device_walk(torch.device(device)),
        sampling=SampledTokens(),
    )  # fmt: skip


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers(name: str) -> None:
    model, target = reference(name)[0], make(name)
    tokens = random.Random(1).choices(range(VOCAB), k=150)
    wanted = reference_logits(model, tokens)
    for cached in (1, 70, 149):
        seq = FakeSeq(cached, tokens[:cached], max_length=400)
        target.prefill([seq], Needs())
        got = target.score([seq], TreeBatch.chains([tokens[cached - 1 :]]), Needs()).required_logits
        torch.testing.assert_close(got, wanted[cached - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_hybrids_are_targets(name: str) -> None:
    check_target(lambda: make(name), vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=9, atol=TOLERANCE)


def on_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> CudaHybrid:
    """On a GPU in bfloat16, or on a CPU in Triton's interpreter."""
    device = where_kernels_run()
    if device.type == "cuda":
        return make(name, torch.bfloat16, "cuda")
    target = make(name)
    assert fused_on_a_cpu(target, monkeypatch) is target
    return target


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_hybrids_are_targets_to_the_bit_on_a_gpu(name: str) -> None:
    need_cuda()
    check_target(lambda: make(name, torch.bfloat16, "cuda"), vocab_size=VOCAB, needs=Needs((-1, 1)), nodes=20, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_captured_texts_are_those_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_cuda()
    target, some = willing(name, torch.bfloat16, "cuda"), requests(9, 3)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    texts, accepted = write(make_following(target, Forms([CHAIN, WIDE, None], 6), follows=True), some, 5)
    assert texts == wanted
    assert watched.followed > 10
    assert sum(map(sum, accepted)) > 10
    assert _write(_engine(target, "ngram"), _requests()) == _write(_engine(target, follows=False), _requests())


@pytest.mark.gpu
def test_a_convolution_has_the_bits_of_its_own_path() -> None:
    """Of a tree's node, of a chain that is read in two pieces, beside others."""
    device, channels, taps, layers, layer = where_kernels_run(), 40, 4, 2, 1
    from forerun.models.cuda.kernels import recurrent as kernels

    draws, parents = torch.Generator().manual_seed(1), [-1, 0, 1, 1, 0, 4, 5, 6, 3]
    nodes, dtype = len(parents), torch.float32 if device.type == "cpu" else torch.bfloat16
    sums = torch.randn(2, nodes, 3 * channels, generator=draws).to(device)
    factors, weights = torch.rand(nodes, generator=draws), torch.randn(taps, channels, generator=draws)
    bias = torch.randn(channels, generator=draws)
    start = torch.randn(taps - 1, channels, generator=draws).to(device, dtype)
    factors, weights, bias = (one.to(device) for one in (factors, weights, bias))
    states = torch.zeros(9, layers, taps - 1, channels, dtype=dtype, device=device)

    def run(rows: list[int], above: list[int], keeps: list[int]) -> tuple[Tensor, Tensor]:
        """Outputs and inputs of some rows; parents below 0 are places."""
        given, factor = sums[:, rows].contiguous(), factors[rows].contiguous()
        links = torch.full((4, 16), -1, dtype=torch.int32)
        links[0, : len(rows)], links[1, : len(rows)] = torch.tensor(above), torch.tensor(keeps)
        found, joined = (torch.zeros(len(rows), channels, dtype=dtype, device=device) for _ in range(2))
        kernels.short_conv[len(rows), 2](
            given, factor, given, links.to(device), weights, bias, joined, states, found, len(rows), 1e-6, 0, 16,
            states.stride(0), layer, C=channels, BLOCK=32, K=taps, UP=1 << (taps - 1).bit_length(), WIDTH=64,
            PIECES=0, PARTS=2, BIAS=True, PDL=False,
        )  # fmt: skip
        return found, joined

    states[3, layer] = start
    found, joined = run([*range(nodes)], [-4 if one < 0 else one for one in parents], [-1] * nodes)
    whole = torch.zeros_like(states)
    whole[:, layer] = states[:, layer]
    paths = topology_of(tuple(parents)).paths
    above = torch.tensor([-4 if one < 0 else one for one in parents], device=device)
    windows = windows_of(joined, above, whole[:, layer])
    behind = (sums.sum(0) * factors[:, None])[:, channels : 2 * channels]
    wanted = behind * ((windows.float() * weights).sum(1) + bias)
    torch.testing.assert_close(found.float(), wanted, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0.02)
    for node, path in enumerate(paths):
        states.zero_()
        states[3, layer] = start
        for first, end, before, after in ((0, len(path) // 2, 3, 5), (len(path) // 2, len(path), 5, 6)):
            before = 3 if first == 0 else before
            if first < end:
                some = list(path[first:end])
                keeps = [-1] * (len(some) - 1) + [after]
                alone, _ = run(some, [-1 - before, *range(len(some) - 1)], keeps)
        assert torch.equal(alone[-1], found[node])
        assert torch.equal(states[6, layer], windows[node, 1:])
    states.zero_()
    states[3, layer] = start
    kept = torch.tensor([3, 8, 7], device=device), torch.tensor([4, -1, 8], device=device)
    both = torch.stack((torch.zeros_like(joined), joined))
    numbers = above.int()
    kernels.keep_inputs[3, layers, 2](
        both, numbers, *kept, states, both.stride(0), states.stride(0), C=channels, BLOCK=32, K=taps
    )
    assert torch.equal(states[4, layer], windows[3, 1:])
    assert torch.equal(states[8, layer], windows[7, 1:])
    assert not states[[0, 1, 2, 5, 6, 7]].any()


class Alone:
    """One recurrent layer of a model without its products: rows are what the first one gives."""

    def __init__(self, name: str) -> None:
        device = where_kernels_run()
        from forerun.models.cuda.steps.finish import HandedOn, Sums
        from forerun.models.cuda.steps.recurrent import RecurrentSteps

        self.dtype, draws = torch.float32 if device.type == "cpu" else torch.bfloat16, torch.Generator().manual_seed(2)
        config = DecoderConfig.from_hf({"model_type": name, **MEMORIES[name], **_TINY})
        recurrent = config.recurrent
        assert recurrent is not None

        def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=draws).to(device, dtype)

        delta, heads = recurrent.kind == "delta_net", recurrent.value_heads
        pool, values = StatePool(config, self.dtype, device), heads * recurrent.value_dim
        convolution = Convolution(some(pool.channels, 1, recurrent.kernel), some(pool.channels))
        none, steps = RowLinear(torch.empty(0, 0)), 2 * heads if delta else heads
        norm = some(recurrent.value_dim if delta else values, dtype=self.dtype)
        memory = (DeltaNet if delta else Mamba2)(
            recurrent, none, convolution, -some(heads).exp(), some(heads), norm, none, config.norm_eps, steps
        )
        if isinstance(memory, Mamba2):
            memory.skip = some(heads)
        layer = sum(recurrent.layers) - 1
        self.memory, self.pool, self.own = memory, pool, Recurrent(layer, convolution.weight, convolution.bias, memory)
        self.steps, self.sums = RecurrentSteps.__new__(RecurrentSteps), Sums
        self.rows, self.factors = some(NODES, pool.channels + values + steps), some(NODES).exp()
        self.start = some(*pool.inputs.shape[1:], dtype=self.dtype), some(*pool.memories.shape[1:])
        found = torch.zeros(MAX_ROWS, values, dtype=self.dtype, device=device)
        buffers = SimpleNamespace(states=pool, ints=torch.arange(MAX_ROWS, device=device).int(), found=found)
        model = SimpleNamespace(config=config, layers=[SimpleNamespace(recurrent=self.own)])
        inverses = torch.zeros(MAX_ROWS, device=device)
        given: dict[str, Any] = {"model": model, "buffers": buffers, "inverses": inverses, "squares": inverses[:, None]}
        given |= {"wide": None, "pdl": False, "width": config.width, "no_skip": torch.zeros(heads, device=device)}
        given |= {"norms_by_tile": HandedOn(inverses, given["squares"], pdl=False)}
        given |= {"read": torch.zeros(MAX_ROWS, values, device=device)}
        vars(self.steps).update(given)
        self.begin()

    def begin(self) -> None:
        """A sequence's state lies in place 3."""
        self.pool.inputs.zero_()
        self.pool.memories.zero_()
        self.pool.inputs[3], self.pool.memories[3] = self.start

    def run(self, rows: list[int], links: Links) -> Tensor:
        count = len(rows)
        self.pool.send(links.ints)
        given = self.rows[rows]
        self.steps._made = self.sums(torch.stack((given / 2, given / 2)), 2, count)
        self.steps.inverses[:count] = self.factors[rows]
        run = Run.of(Size(count, 1, 1), torch.zeros(8 * MAX_ROWS, dtype=torch.int32, device=given.device))
        self.steps._remember(run, self.own, self.memory)
        return self.steps.buffers.found[:count].clone()

    def by_hand(self, path: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """What the last row of a path gives, and the state behind it."""
        memory, channels = self.memory, self.pool.channels
        made = (self.rows * self.factors[:, None])[path].to(self.dtype)
        joined, gates, steps = torch.split(made, [channels, memory.values, memory.steps], -1)
        inputs, state = (one[self.own.index] for one in self.start)
        windows = torch.cat((inputs, joined)).unfold(0, len(self.own.taps), 1).transpose(1, 2)
        assert self.own.bias is not None
        mixed = ((windows.float() * self.own.taps).sum(1) + self.own.bias).to(self.dtype)
        for row in memory.prepare(mixed, steps):
            state, found = memory.step(state, row)
        return memory.finish(found[None].to(self.dtype), gates[-1:])[0], windows[-1, 1:], state


NODES, PARENTS_OF = 9, (-1, 0, 1, 1, 0, 4, 5, 6, 3)
_TINY = {
    "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 20, "mamba_expand": 5, "mamba_d_state": 12, "mamba_n_groups": 2,
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 16,
}  # fmt: skip
MEMORIES = {"qwen3_5_text": _DELTA, "granitemoehybrid": _MAMBA}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MEMORIES)
def test_memories_are_those_of_the_formulas_and_have_the_bits_of_their_path(name: str) -> None:
    """Of a tree's node, of a chain that is read in two pieces beside another, and of what is kept after the pass."""
    alone, paths = Alone(name), topology_of(PARENTS_OF).paths
    pool, layer = alone.pool, alone.own.index
    free = [pool.take() for _ in range(8)]
    before = next(place for place in free if place.number == 3)
    tree = Links()
    tree.add_tree(0, PARENTS_OF, before)
    found = alone.run([*range(NODES)], tree)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if alone.dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    rows, places = (torch.tensor(one, device=found.device) for one in ([3, 8, 7], [5, -1, 6]))
    alone.steps.keep_states(pool.trace(NODES), rows, places)
    kept = {
        node: (pool.inputs[place, layer].clone(), pool.memories[place, layer].clone())
        for node, place in ((3, 5), (7, 6))
    }
    for node, path in enumerate(paths):
        wanted, inputs, memory = alone.by_hand(list(path))
        torch.testing.assert_close(found[node], wanted, **tolerance)
        alone.begin()
        middle, place = len(path) // 2, before
        for some, into in ((path[:middle], free[6]), (path[middle:], free[7])):
            if some:
                links = Links()
                links.add_chain(2, len(some), place)  # behind two rows of another's
                links.add_chain(0, 2, free[0])
                links.keep(1 + len(some), into)
                got, place = alone.run([5, 1, *some], links), into
        assert torch.equal(got[-1], found[node])
        torch.testing.assert_close(pool.memories[free[7].number, layer], memory, **tolerance)
        assert torch.equal(pool.inputs[free[7].number, layer], inputs)
        if node in kept:
            assert torch.equal(kept[node][0], inputs)
            assert torch.equal(kept[node][1], pool.memories[free[7].number, layer])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_kernels_agree_with_the_plain_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, plain, rng = on_kernels(name, monkeypatch), make(name), random.Random(1)
    seqs = [FakeSeq(b, rng.choices(range(VOCAB), k=n), max_length=400) for b, n in enumerate((9, 1, 30))]
    for one in (target, plain):
        one.prefill(seqs, Needs())
    for _ in range(3):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 6) for seq in seqs], device=target.device)
        got, wanted = (one.score(seqs, trees, Needs()).required_logits.cpu() for one in (target, plain))
        off = (got - wanted).abs().amax(-1)
        if target.device.type == "cpu":
            assert off.max() < 1e-3
        else:  # in 16 bits a router's near ties fall otherwise and change whole rows: so they do in torch's own
            assert off.median() < 0.6
        verdict = random_verdict(rng, trees, VOCAB)
        for one in (target, plain):
            one.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)


def willing(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CudaHybrid:
    """Says few different tokens, so that much of what is drafted is accepted."""
    target = make(name, dtype, device)
    target.model.head[5:] = 0.0
    target.model.head[1] = 0.0
    return target


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("forms", [[CHAIN], [WIDE], [CHAIN, WIDE, None]])
def test_texts_are_those_of_plain_decoding_where_rounds_follow_unread_ones(
    forms: list[Form | None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, some = willing(name), requests(9, 3)
    wanted, watched = plain_texts(target, some), Watched(monkeypatch)
    texts, accepted = write(make_following(target, Forms(forms, 6), follows=True), some, 5)
    assert texts == wanted
    assert watched.followed > 10
    assert sum(map(sum, accepted)) > 10, "something is accepted"
    assert not target._written
    kept = sum(len(state) for state in target._states._kept.values())
    assert target.places.free == target.places.size - 1 - kept, "places that nobody gives back"


def wrong_end(self: CudaHybrid, form: TreeForm) -> None:
    """States behind roots, whatever was accepted."""
    rows = torch.arange(0, form.rows, form.nodes)
    self._keep(self.places.trace(form.rows), rows, self.places.links[3, : form.trees])


def not_rolled_back(self: CudaHybrid, seqs: Any, trees: TreeBatch, verdict: Verdict) -> None:
    """Of every tree the state behind its last node, with the accepted path's keys and values."""
    for seq, size, path in zip(seqs, trees.sizes(), verdict.to_host()[0], strict=True):
        made = self._states.nodes[seq.id][0][0]
        if isinstance(made, Nodes):
            self._make_states(made.trace, [(made, size - 1)])
            made[[0, *path][-1]] = made[size - 1]
    commit(self, seqs, trees, verdict)


commit = CudaHybrid.commit


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_a_device_that_keeps_wrong_states_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, some = make(name), requests(9, 3)
    target.model.head[9:] = 0.0
    wanted = plain_texts(target, some)
    monkeypatch.setattr(CudaHybrid, "_decided", wrong_end)
    assert write(make_following(target, Forms([WIDE], 6), follows=True), some, 5)[0] != wanted


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_not_rolled_back_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaHybrid, "commit", not_rolled_back)
    with pytest.raises(AssertionError):
        check_target(lambda: make(name), vocab_size=VOCAB, nodes=9, atol=TOLERANCE)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_turns_start_where_texts_ended_and_pages_are_found_with_their_states(name: str) -> None:
    target, plain, rng = make(name), make(name), random.Random(5)
    seqs = [
        FakeSeq(b, rng.choices(range(VOCAB), k=n), max_length=400, cache_salt="") for b, n in enumerate((50, 61, 3))
    ]
    target.prefill(seqs, Needs())
    for _ in range(6):
        trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 7) for seq in seqs])
        target.score(seqs, trees, Needs())
        verdict = random_verdict(rng, trees, VOCAB)
        target.commit(seqs, trees, verdict)
        extend(seqs, trees, verdict)
    for seq in seqs:
        target.release(seq)
    for seq in seqs:
        for tokens in (seq.tokens, seq.tokens[: PAGE + 1], seq.tokens[: PAGE - 1]):
            again = FakeSeq(seq.id + 10, [*tokens, 5], max_length=400, cache_salt="")
            target.prefill([again], Needs())
            whole = PAGE if len(tokens) > PAGE else 0
            assert target.reused_tokens(again) == (len(tokens) - 1 if tokens == seq.tokens else whole)
            fresh = FakeSeq(99, again.tokens, max_length=400)
            plain.prefill([fresh], Needs())
            root = TreeBatch.chains([[5]])
            got, wanted = (
                one.score([own], root, Needs()).required_logits for one, own in ((target, again), (plain, fresh))
            )
            torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)
            target.kv.release(again.id)
            plain.release(fresh)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("name", KINDS)
def test_plain_rounds_follow_unread_ones_and_look_ups_are_rolled_back(name: str, drafter: str) -> None:
    target = willing(name)
    wanted = _write(_engine(target, follows=False), _requests())
    assert target.plain.followed == 0
    assert _write(_engine(target, drafter), _requests()) == wanted
    assert target.plain.followed > 20 or drafter != "none"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("forms", [[None], [CHAIN, WIDE, None]])
def test_texts_wait_for_places_and_what_is_kept_for_others_makes_room(
    forms: list[Form | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plain_texts(willing("lfm2"), requests(9, 3))
    monkeypatch.setattr(states_module, "MOST_PLACES", 2 * EACH + 2)
    monkeypatch.setattr(states_module, "FEWEST_PLACES", 1)
    target, most, begin = willing("lfm2"), 0, CudaHybrid._begin

    def begun(self: CudaHybrid, *given: Any) -> None:
        nonlocal most
        begin(self, *given)
        most = max(most, self.kv.sequences)

    monkeypatch.setattr(CudaHybrid, "_begin", begun)
    assert write(make_following(target, Forms(forms, 6), follows=True), requests(9, 3), 5)[0] == wanted
    assert most == 2


def test_more_texts_than_places_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "MOST_PLACES", 3)
    monkeypatch.setattr(states_module, "FEWEST_PLACES", 1)
    target = make("lfm2")
    seqs = [FakeSeq(b, [5, 6, 7], max_length=400) for b in range(3)]
    assert not target.has_room(3)
    with pytest.raises(InvalidInput, match="all 3 places for states"):
        target.prefill(seqs, Needs())
    for seq in seqs:
        target.release(seq)
    assert target.places.free == 2


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_passes_between_another_and_its_verdict_change_no_state(name: str) -> None:
    """Captures in mid-text run passes over padding, in the same buffers."""
    target, plain, rng = make(name), make(name), random.Random(7)
    seqs = [FakeSeq(b, rng.choices(range(VOCAB), k=n), max_length=400) for b, n in enumerate((50, 9))]
    target.prefill(seqs, Needs())
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 9) for seq in seqs])
    target.score(seqs, trees, Needs())
    target.rehearse(TreeForm(8, 4, 2), Needs(), 300)
    verdict = random_verdict(rng, trees, VOCAB)
    target.commit(seqs, trees, verdict)
    extend(seqs, trees, verdict)
    roots = TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
    got = target.score(seqs, roots, Needs()).required_logits.clone()
    plain.prefill(seqs, Needs())
    torch.testing.assert_close(got, plain.score(seqs, roots, Needs()).required_logits, atol=TOLERANCE, rtol=0)
