"""LoRA adapters beside a base: their law is that of the merged weights, in any company, drafted or not.

The oracle is transformers' model whose weights were merged here, by the formula W + scale * up @ down.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from threading import Event, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnknownName, UnsupportedModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, PlainSeq, Request, TreeBatch
from forerun.engine.driver import Driver
from forerun.engine.engine import Engine
from forerun.models.adapters import _DOWN, _UP, Adapter, AdapterPool, is_another_model
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.native import library
from forerun.models.native.target import NativeAdapter, NativeDecoder, adapters_of
from forerun.models.native.weights import Mode
from tests.models.tiny_checkpoints import VOCAB, make_reference, reference_logits, save

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernels")
LAW = ("llama3.1", "llama-biases", "mistral", "qwen3", "glm4", "smollm3", "phi3", "qwen3_moe")
PROMPTS = [[5, 9, 2, 5, 9, 2, 7], [11, 3, 11, 3, 11, 3], [40, 41, 42, 43, 40, 41, 42]]


class Tiny:
    """A random model of a family, its weights on disk, and adapters for it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder, self.reference = folder, make_reference(family)
        self.config, self.weights = save(self.reference, folder / "base")

    def native(self, mode: Mode = "float32", kv_slots: int | None = None) -> NativeDecoder:
        return NativeDecoder(DecoderConfig.from_hf(self.config), self.weights, mode=mode, kv_slots=kv_slots)

    def adapter(self, seed: int, rank: int = 4, only: str = "", dtype: torch.dtype = torch.bfloat16) -> Adapter:
        """Random changes of every projection that is no expert's; numbers as a checkpoint of this type holds them."""
        dice = torch.Generator().manual_seed(seed)
        wanted = re.compile(r".*(self_attn|mlp)\.\w+_proj\.weight")
        names = [name for name in self.weights if wanted.fullmatch(name) and "expert" not in name and only in name]
        pairs = {}
        for name in names:
            outputs, inputs = self.weights[name].shape
            down, up = torch.randn(rank, inputs, generator=dice), torch.randn(outputs, rank, generator=dice)
            pairs[name] = (down / inputs**0.5).to(dtype).float(), (0.3 * up).to(dtype).float()
        assert pairs
        return Adapter("base", rank, 0.5, pairs)

    def written(self, seed: int, rank: int = 4) -> str:
        folder = self.folder / f"adapter{seed}-{rank}"
        self.adapter(seed, rank).write(folder)
        return str(folder)

    def merged(self, adapter: Adapter) -> Any:
        model = make_reference_like(self.reference)
        state = dict(model.named_parameters())
        with torch.no_grad():
            for name, (down, up) in adapter.changes.items():
                state[name].add_(adapter.scale * up @ down)
        return model


def make_reference_like(model: Any) -> Any:
    other = type(model)(model.config).float().eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


def logits_of(target: NativeDecoder, tokens: list[int], adapter: Any, cached: int = 3, seq_id: int = 7) -> Tensor:
    seq = PlainSeq(seq_id, tokens[: cached + 1], adapter=adapter)
    target.prefill([seq], Needs())
    logits = target.score([seq], TreeBatch.chains([tokens[cached:]]), Needs()).logits
    target.release(seq)
    assert logits is not None
    return logits


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("family", LAW)
def test_the_law_of_an_adapter_is_that_of_merged_weights(family: str, tmp_path: Path) -> None:
    made, tokens = Tiny(family, tmp_path), [5, 9, 2, 33, 7, 1, 8, 60, 12]
    target = made.native()
    for seed, rank in ((1, 4), (2, 7)):
        adapter = made.adapter(seed, rank)
        loaded = target.load_adapter("a", seed, adapter)
        wanted = reference_logits(made.merged(adapter), tokens)[3:]
        torch.testing.assert_close(logits_of(target, tokens, loaded), wanted, rtol=2e-4, atol=2e-4)
    plain = reference_logits(made.reference, tokens)[3:]
    torch.testing.assert_close(logits_of(target, tokens, None), plain, rtol=2e-4, atol=2e-4)
    assert float((wanted - plain).abs().max()) > 0.05, "negative control: the adapter changes the law"


def test_numbers_of_float32_are_rounded_to_two_bytes(tiny: Tiny) -> None:
    """The law is that of changes whose numbers have 11 significant bits, and close to that of their own."""
    tokens, target = [5, 9, 2, 33, 7, 1, 8], tiny.native()
    adapter = tiny.adapter(1, dtype=torch.float32)
    rounded = {name: (a.half().float(), b.half().float()) for name, (a, b) in adapter.changes.items()}
    found = logits_of(target, tokens, target.load_adapter("a", 1, adapter))
    exact = reference_logits(tiny.merged(adapter), tokens)[3:]
    near = reference_logits(tiny.merged(replace(adapter, changes=rounded)), tokens)[3:]
    torch.testing.assert_close(found, near, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(found, exact, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("power", [-30, 0, 12])
def test_small_and_large_numbers_are_as_exact(tiny: Tiny, power: int) -> None:
    """`down` times a power of two and `up` divided by it: the same law."""
    tokens, target, one = [5, 9, 2, 33, 7, 1, 8], tiny.native(), tiny.adapter(1)
    other = {name: (a * 2.0**power, b * 2.0**-power) for name, (a, b) in one.changes.items()}
    found = [
        logits_of(target, tokens, target.load_adapter("a", 1, each)) for each in (one, replace(one, changes=other))
    ]
    assert torch.equal(found[0], found[1])


def test_every_path_has_the_same_bits(tmp_path: Path) -> None:
    """Instructions of this machine, threads and rows of the same adapter side by side change nothing."""
    made, texts = Tiny("llama-biases", tmp_path), [[5, 9, 2, 33, 7, 1, 8, 60, 12, 4, 3], PROMPTS[0], PROMPTS[0]]
    adapters = {seed: made.adapter(seed, rank) for seed, rank in ((1, 3), (2, 24))}
    found, before, threads = [], library.isa(), torch.get_num_threads()
    try:
        for path in [name for name, here in library.paths().items() if here]:
            assert library.library().fr_choose(path.encode()) == 0
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                target = made.native()
                own = [target.load_adapter("a", seed, adapters[seed]) for seed in (1, 2, 2)]
                seqs = [PlainSeq(i, text[:4], adapter=own[i]) for i, text in enumerate(texts)]
                target.prefill(seqs, Needs())
                found.append(target.score(seqs, TreeBatch.chains([text[3:] for text in texts]), Needs()).logits)
    finally:
        library.library().fr_choose(before.encode())
        torch.set_num_threads(threads)
    assert found[0] is not None
    assert all(torch.equal(each, found[0]) for each in found if each is not None)
    assert not torch.equal(found[0][-4:], found[0][:4])


@pytest.mark.parametrize("only", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_each_projection_alone(tiny: Tiny, only: str) -> None:
    adapter, tokens = tiny.adapter(3, only=only), [5, 9, 2, 33, 7, 1, 8]
    target = tiny.native()
    found = logits_of(target, tokens, target.load_adapter("a", 1, adapter))
    torch.testing.assert_close(found, reference_logits(tiny.merged(adapter), tokens)[3:], rtol=2e-4, atol=2e-4)
    assert not torch.allclose(found, logits_of(target, tokens, None), atol=1e-3)


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "q8"])
def test_rows_have_the_same_bits_in_any_company(tiny: Tiny, mode: Mode) -> None:
    target = tiny.native(mode)
    own = [None, *[target.load_adapter(str(seed), seed, tiny.adapter(seed, rank)) for seed, rank in ((1, 4), (2, 16))]]
    alone = [logits_of(target, prompt, adapter, len(prompt) - 1) for prompt, adapter in zip(PROMPTS, own, strict=True)]
    seqs = [
        PlainSeq(i, list(prompt), adapter=adapter) for i, (prompt, adapter) in enumerate(zip(PROMPTS, own, strict=True))
    ]
    target.prefill(seqs, Needs())
    chains = TreeBatch.chains([[prompt[-1], 5, 6, 7] for prompt in PROMPTS])
    together = target.score(seqs, chains, Needs()).logits
    assert together is not None
    for i, each in enumerate(alone):
        assert torch.equal(together[4 * i], each[-1])


def engine_of(tiny: Tiny, drafter: str, adapters: dict[str, str], mode: Mode = "float32") -> Engine:
    config = EngineConfig(max_batch=4, adapters=adapters)
    layers = "2" if "layer_skip" in drafter else None
    speculative = SpeculativeConfig(drafter, budget=4, controller="fixed", draft_layers=layers)
    return make_engine(tiny.native(mode), frozenset(), speculative, config)


def write(engine: Engine, asked: list[tuple[list[int], str | None]], **options: Any) -> list[list[int]]:
    params = SamplingParams(24 if len(asked[0][0]) < 40 else 1, **options)
    ids = [engine.submit(Request(tuple(prompt), params, adapter=adapter)) for prompt, adapter in asked]
    texts: dict[int, list[int]] = {one: [] for one in ids}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    return [texts[one] for one in ids]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "layer_skip", "ngram>layer_skip"])
def test_texts_of_a_mixed_batch_are_those_of_each_adapter_alone(tiny: Tiny, drafter: str, options: Any) -> None:
    adapters = {"one": tiny.written(1), "two": tiny.written(2, 16)}
    asked = [(prompt, name) for prompt in PROMPTS for name in (None, "one", "two")]
    plain = engine_of(tiny, "none", adapters)
    alone = [write(plain, [each], **options)[0] for each in asked]
    drafted = engine_of(tiny, drafter, adapters)
    assert write(drafted, asked, **options) == alone
    assert drafted.stats.drafted > 0
    assert len({tuple(text) for text in alone[:3]}) == 3, "negative control: adapters write other texts"


def test_prompts_are_shared_within_an_adapter_only(tiny: Tiny) -> None:
    engine, prompt = engine_of(tiny, "none", {"one": tiny.written(1), "two": tiny.written(2)}), [7] * 30 + [9] * 33
    found = []
    for name in (None, "one", "two", "one", None):
        write(engine, [(prompt, name)], temperature=0.0)
        found.append(engine.stats.reused)
    reused = [after - before for before, after in zip([0, *found], found, strict=False)]
    assert reused[:3] == [0, 0, 0]
    assert min(reused[3:]) > 0
    assert engine.adapters is not None
    folder = tiny.written(3)
    engine.adapters.remove("one")
    engine.adapters.add("one", folder)  # another one of the same name
    write(engine, [(prompt, "one")], temperature=0.0)
    assert engine.stats.reused == found[-1]


def test_an_adapter_that_is_unloaded_serves_its_texts_to_the_end(tiny: Tiny) -> None:
    engine = engine_of(tiny, "ngram", {"one": tiny.written(1)})
    wanted = write(engine, [(PROMPTS[0], "one")], temperature=0.0)[0]
    assert engine.adapters is not None
    engine.submit(Request(tuple(PROMPTS[0]), SamplingParams(24, temperature=0.0), adapter="one"))
    text = [token for event in engine.step() for token in event.tokens]
    engine.adapters.remove("one")
    with pytest.raises(UnknownName, match="unknown adapter 'one'; served: none"):
        engine.submit(Request((1, 2), adapter="one"))
    while engine.busy:
        text += [token for event in engine.step() for token in event.tokens]
    assert text == wanted


def test_the_longest_unused_are_evicted_and_read_again(tiny: Tiny) -> None:
    folders = [tiny.written(seed) for seed in (1, 2, 3)]
    target = tiny.native()
    size = target.load_adapter("x", 1, tiny.adapter(1)).nbytes
    pool = AdapterPool(target, limit=2 * size)
    for name, folder in zip("abc", folders, strict=True):
        pool.add(name, folder)
    assert (pool.names, pool.loaded) == (["a", "b", "c"], ["b", "c"])
    first = pool.get("a").key
    assert pool.loaded == ["c", "a"]
    assert pool.get("a").key == first
    pool.get("c"), pool.get("b")
    held = pool.get("a")
    assert held.key != first
    pool.get("c"), pool.get("b")
    assert pool.loaded == ["c", "b"]
    assert pool.get("a") is held, "one that a sequence holds is not read again"


class SlowReader(NativeDecoder):
    """Reads adapters when it is told to, and notes who does."""

    def __init__(self, tiny: Tiny) -> None:
        super().__init__(DecoderConfig.from_hf(tiny.config), tiny.weights, mode="float32", kv_slots=None)
        self.readers, self.may_read = list[str](), Event()
        self.may_read.set()

    def load_adapter(self, name: str, key: int, adapter: Adapter) -> NativeAdapter:
        self.readers.append(current_thread().name)
        assert self.may_read.wait(60)
        return super().load_adapter(name, key, adapter)


def test_an_evicted_adapter_is_read_beside_the_rounds_of_others(tiny: Tiny) -> None:
    target = SlowReader(tiny)
    folders = {name: tiny.written(i) for i, name in enumerate("ab")}
    config = EngineConfig(max_batch=4, adapters=folders, adapter_memory=1000)
    engine = make_engine(target, frozenset(), SpeculativeConfig("none", controller="fixed"), config)
    driver, params = Driver(engine), SamplingParams(8, temperature=0.0)
    assert isinstance(engine.adapters, AdapterPool)
    assert engine.adapters.loaded == ["b"]
    target.may_read.clear()
    with ThreadPoolExecutor(1, "asks") as pool:
        late = pool.submit(driver.write, [Request((1, 2, 3), params, adapter="a")])
        until = time.monotonic() + 60
        while not target.readers[-1].startswith("asks") and time.monotonic() < until:
            time.sleep(0.01)
        (other,) = driver.write([Request((1, 2, 3), params, adapter="b")])
        assert other.finished == "length", "another text is written while that adapter is read"
        assert not late.done()
        target.may_read.set()
        text = list(late.result()[0].tokens)
    assert text == list(driver.write([Request((1, 2, 3), params, adapter="a")])[0].tokens) != list(other.tokens)
    assert sum(name.startswith("asks") for name in target.readers) == 1


class Trap:
    """What must never be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("an adapter was unpickled",)


def test_what_lies_beside_an_adapter_and_how_it_began_do_not_matter(tiny: Tiny, tmp_path: Path) -> None:
    """Trainers write the base's config.json there too; a Gaussian beginning changes no weight of the base."""
    file = Path(copytree(tiny.written(1), tmp_path / "beside")) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "gaussian"}))
    (file.parent / "config.json").write_text("{}")
    pool = AdapterPool(tiny.native())
    pool.add("one", str(file.parent))
    assert pool.loaded == ["one"]


@pytest.mark.parametrize(
    ("said", "served", "another"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "/m/Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf", True),
        ("meta-llama/Meta-Llama-3-8B", "/hub/models--meta-llama--Llama-3.1-8B/snapshots/1b7c0f3b", True),
        ("meta-llama/Llama-3.1-8B", "/hub/models--unsloth--Meta-Llama-3.1-8B-bnb-4bit/snapshots/9b5a7c", False),
        ("HuggingFaceTB/SmolLM2-135M", "C:\\m\\SmolLM2-135M-Instruct.Q4_1.gguf", False),
        ("SmolLM2-135M", "SmolLM2-360M", True),
        ("/home/me/checkpoint-500", "/m/SmolLM2-135M", False),  # such a name says nothing
        ("Qwen/Qwen2.5-1.5B", "/m/final", False),
        ("Qwen/Qwen2.5-1.5B", "", False),
    ],
)
def test_only_names_that_cannot_be_of_one_model_tell_models_apart(said: str, served: str, another: bool) -> None:
    assert is_another_model(said, served) == is_another_model(served, said) == another


def test_an_adapter_that_names_another_base_is_told_about_once(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(copytree(tiny.written(1), tiny.folder / "names"))
    settings = json.loads((folder / "adapter_config.json").read_text())
    for base, lines in (("Qwen/Qwen3-0.6B", 0), ("Qwen/Qwen3-Coder-0.6B", 1)):
        (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
        pool = AdapterPool(tiny.native(), limit=1, base="/models/Qwen3-0.6B-Instruct")
        caplog.clear()
        for name, where in (("one", str(folder)), ("other", tiny.written(2))):
            pool.add(name, where)
        assert pool.loaded == ["other"]
        pool.get("one")  # is read again
        assert [record.getMessage().count(base) for record in caplog.records] == [1] * lines


def test_the_scale_is_alpha_over_the_rank_or_over_its_root(tiny: Tiny, tmp_path: Path) -> None:
    tiny.adapter(1, rank=4).write(tmp_path)
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"lora_alpha": 6}
    for rooted, scale in ((False, 1.5), (True, 3.0)):
        file.write_text(json.dumps(settings | {"use_rslora": rooted}))
        assert Adapter.read(tmp_path).scale == scale


def test_rows_of_later_layers_and_of_another_target(tiny: Tiny) -> None:
    target, other = tiny.native(), tiny.native()
    loaded = target.load_adapter("one", 1, tiny.adapter(1))
    seqs = [PlainSeq(1, [1, 2, 3]), PlainSeq(2, [1, 2, 3], adapter=loaded)]
    spans: Any = [SimpleNamespace(nodes=2)] * 2
    assert list(adapters_of(target.config, spans, seqs, 1) or ()) == [0, 0, loaded.at(1), loaded.at(1)]
    assert loaded.at(1) > loaded.at(0)
    with pytest.raises(InvalidInput, match="'one' was loaded by another target"):
        logits_of(other, [5, 9, 2, 33], loaded)


def test_an_adapter_that_is_removed_while_it_is_read_again_is_served_no_more(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, read = AdapterPool(tiny.native(), limit=1), AdapterPool._read
    for name, seed in (("one", 1), ("other", 2)):
        pool.add(name, tiny.written(seed))

    def removed_meanwhile(self: AdapterPool, name: str, folder: Path) -> object:
        pool.remove("one")
        return read(self, name, folder)

    monkeypatch.setattr(AdapterPool, "_read", removed_meanwhile)
    with pytest.raises(UnknownName, match="unknown adapter 'one'; served: other"):
        pool.get("one")
    assert pool.loaded == ["other"]


def test_an_evicted_adapter_whose_folder_has_gone_is_named(tiny: Tiny, tmp_path: Path) -> None:
    pool = AdapterPool(tiny.native(), limit=1)
    folder = copytree(tiny.written(1), tmp_path / "gone")
    for name, where in (("gone", str(folder)), ("other", tiny.written(2))):
        pool.add(name, where)
    rmtree(folder)
    with pytest.raises(ModelNotFound, match="gone holds no adapter"):
        pool.get("gone")
    pool.remove("gone")
    assert pool.names == ["other"]


def test_adapters_that_cannot_be_served_are_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    pool, good = AdapterPool(tiny.native()), tiny.written(1)
    pool.add("good", good)
    other = Tiny("llama2", tmp_path / "other")
    other.adapter(1).write(tmp_path / "another")
    tiny.adapter(1, rank=300).write(tmp_path / "large")
    head = Adapter("base", 2, 1.0, {"lm_head.weight": (torch.ones(2, 32), torch.ones(VOCAB, 2))})
    head.write(tmp_path / "head")
    damaged = tmp_path / "damaged"
    tiny.adapter(1).write(damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"no tensors")
    strange = tmp_path / "strange"
    tiny.adapter(1).write(strange)
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1, 1)}, strange / "adapter_model.safetensors")
    torch_only = AdapterPool(
        Decoder(DecoderConfig.from_hf(tiny.config), tiny.weights, dtype=torch.float32, device="cpu", kv_slots=None)
    )
    for used, name, folder, kind, said in (
        (pool, "good", good, InvalidInput, "served already"),
        (pool, "x", str(tmp_path), ModelNotFound, "holds no adapter"),
        (pool, "x", str(tmp_path / "another"), DamagedFile, "another model's"),
        (pool, "x", str(tmp_path / "large"), UnsupportedModel, "256 is the most"),
        (pool, "x", str(tmp_path / "head"), UnsupportedModel, "load the adapter's folder as a model"),
        (pool, "x", str(damaged), DamagedFile, "is damaged"),
        (pool, "x", str(strange), DamagedFile, "no two matrices"),
        (torch_only, "x", good, UnsupportedModel, "our own CPU or GPU decoder"),
    ):
        with pytest.raises(kind, match=said) as refused:
            used.add(name, folder)
        assert "\n" not in str(refused.value)
        assert used.names == (["good"] if used is pool else [])


def test_folders_of_which_the_law_would_be_another_are_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    written, weights = tmp_path / "written", dict[str, dict[str, Tensor]]()
    tiny.adapter(1).write(written)
    whole = load_file(written / "adapter_model.safetensors")
    up = next(name for name in whole if name.endswith(f"0.self_attn.q_proj{_UP}"))
    stem, layer = up.removesuffix(_UP), "layers.0."
    pair = {end: whole[stem + end].clone() for end in (_DOWN, _UP)}
    weights["nan"] = whole | {up: torch.full_like(whole[up], torch.nan)}
    weights["twice"] = whole | {stem.removeprefix("base_model.model.") + end: each for end, each in pair.items()}
    weights["zeros"] = whole | {stem.replace(layer, "layers.00.") + end: each for end, each in pair.items()}
    weights["digits"] = whole | {stem.replace(layer, f"layers.{'9' * 5000}.") + end: each for end, each in pair.items()}
    weights["nothing"] = {}
    for name, tensors in weights.items():
        save_file(tensors, copytree(written, tmp_path / name) / "adapter_model.safetensors")
    settings = {"alpha": {"lora_alpha": 1e300}, "pissa": {"init_lora_weights": "pissa_niter_16"},
                "alora": {"alora_invocation_tokens": [1]}, "qalora": {"use_qalora": True}}  # fmt: skip
    for name, changed in settings.items():
        file = copytree(written, tmp_path / name) / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    pickled = copytree(written, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save(Trap(), pickled / "adapter_model.bin")
    trap = copytree(written, tmp_path / "trap")
    torch.save(Trap(), trap / "adapter_model.safetensors")
    pool = AdapterPool(tiny.native())
    for name, kind, said in (
        ("~nobody-of-this-name/x", ModelNotFound, "holds no adapter"),
        ("nan", DamagedFile, "numbers that are not finite"),
        ("alpha", DamagedFile, "numbers that are not finite"),
        ("twice", DamagedFile, "twice"),
        ("zeros", UnsupportedModel, "only projections"),
        ("digits", UnsupportedModel, "only projections"),
        ("nothing", DamagedFile, "changes nothing"),
        ("pissa", UnsupportedModel, "init_lora_weights"),
        ("alora", UnsupportedModel, "alora_invocation_tokens"),
        ("qalora", UnsupportedModel, "use_qalora"),
        ("pickled", DamagedFile, "is damaged"),
        ("trap", DamagedFile, "is damaged"),
    ):
        with pytest.raises(kind, match=said) as refused:
            pool.add("x", name if name.startswith("~") else str(tmp_path / name))
        assert "\n" not in str(refused.value)
        assert pool.names == []
    pool.add("x", str(written))
