"""`forerun quantize`: what it writes is the rounded checkpoint, for our loader, compressed-tensors and transformers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from forerun import LLM, SamplingParams
from forerun.cli import app
from forerun.cli.models import show_quality
from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.measure.quality import WINDOW, cut, input_sizes, read_conversations, windows_of
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.quantized import writing
from forerun.models.load.quantized.layouts import in_bytes, in_four_bits
from forerun.models.load.quantized.scheme import describe
from forerun.models.load.quantized.writing import Rounding, write_rounded
from forerun.models.load.weights import SafetensorsWeights
from forerun.referee.checkpoint import make_model
from forerun.referee.tables import make_pair
from tests.models import quantized_folders as made
from tests.models.tiny_checkpoints import _BASE, reference_logits, score_chain
from tests.models.tiny_folder import LETTERS, add_tokenizer, make_tiny_folder

KINDS: list[Rounding] = ["fp8", "int8", "w4"]
MODULE = "model.layers.1.mlp.down_proj"
TEXT = [3, 9, 27, 14, 5, 40, 33, 8, 21, 17, 2, 6]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def plain(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    made.write_plain(folder, made.make_model(family).to(dtype))
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    return folder


def quantise(folder: Path, kind: Rounding, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    out = folder / "out"
    write_rounded(open_checkpoint(str(plain(folder / "plain", family, dtype))), out, kind)
    return out


def rounded(weight: torch.Tensor, kind: Rounding) -> torch.Tensor:
    if kind == "w4":
        numbers, scales = in_four_bits(weight, 32)
        return ((numbers.float() - 8).unflatten(1, (-1, 32)) * scales.float()[..., None]).flatten(1)
    data, by_output = in_bytes(weight, kind, torch.bfloat16)
    return data.float() * by_output[:, None]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_loader_and_the_formats_own_library_read_the_rounded_weights(
    kind: Rounding, dtype: torch.dtype, tmp_path: Path
) -> None:
    out = quantise(tmp_path, kind, "qwen2", dtype)
    before, after = open_checkpoint(str(tmp_path / "plain")).weights, open_checkpoint(str(out)).weights
    settings = config_of(out)["quantization_config"]
    group: Any = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    library: Any = BaseCompressor.get_value_from_registry(settings["format"])
    parts = load_file(out / "model-00001-of-00001.safetensors")
    assert set(before) == set(after)
    for name in before:
        if not name.endswith("_proj.weight"):
            assert torch.equal(after[name], before[name]), name
            assert after[name].dtype == dtype
            continue
        assert torch.equal(after[name], rounded(before[name], kind)), name
        stem = name.removesuffix("weight")
        own = {key.removeprefix(stem): value for key, value in parts.items() if key.startswith(stem + "weight")}
        own["weight_scale"] = own["weight_scale"].float()
        assert torch.equal(library.decompress(own, group)["weight"].float(), after[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_nearest(kind: Rounding, tmp_path: Path) -> None:
    """Apart from our quantiser: no error is above half a step of the format."""
    out = quantise(tmp_path, kind)
    before, after = open_checkpoint(str(tmp_path / "plain")).weights, open_checkpoint(str(out)).weights
    scales = load_file(out / "model-00001-of-00001.safetensors")[f"{MODULE}.weight_scale"].float()
    weight, found = before[f"{MODULE}.weight"], after[f"{MODULE}.weight"]
    error, steps = (found - weight).abs(), scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    if kind == "fp8":  # 3 bits behind the point, and 2^-9 at least
        assert bool((error <= torch.maximum(weight.abs() / 16, steps * 2.0**-10) * 1.01).all())
    else:
        clipped = (found / steps).round() == (7 if kind == "w4" else 127)
        clipped |= (found / steps).round() == (-8 if kind == "w4" else -127)
        assert bool((error <= steps * 0.501)[~clipped].all())
        assert float(clipped.float().mean()) < 0.15
    assert 0 < float(error.mean()) < {"fp8": 0.005, "int8": 0.002, "w4": 0.02}[kind]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_folder_and_writes_our_text(kind: Rounding, family: str, tmp_path: Path) -> None:
    out = quantise(tmp_path, kind, family)
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    assert QuantizationConfig.model_validate(config_of(out)["quantization_config"]).format
    model(torch.tensor([TEXT]))  # the library widens the weights in the first pass
    weights = open_checkpoint(str(out)).weights
    for name, weight in model.state_dict().items():
        if name in weights:
            assert torch.equal(weight.float(), weights[name].float()), name
    for module in model.modules():
        module.quantization_enabled = False  # of rows, with fp8: ours stay as they are
    expected = model.generate(torch.tensor([TEXT]), max_new_tokens=24, do_sample=False, eos_token_id=1)[0, len(TEXT) :]
    with LLM(str(out), device="cpu", dtype="float32", drafter="ngram") as llm:
        found = llm.generate([TEXT], SamplingParams(max_tokens=24, temperature=0.0))[0].token_ids
    assert found == expected.tolist()


@pytest.mark.parametrize("family", ["llama-biases", "smollm2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_logits_of_every_shape_of_family_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Biases, tied embeddings, norms of queries, sandwich norms, and fused matrices."""
    make_tiny_folder(tmp_path / "plain", family)
    write_rounded(open_checkpoint(str(tmp_path / "plain")), tmp_path / "out", "int8")
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    decoder = Decoder(
        DecoderConfig.from_hf(checkpoint.config), checkpoint.weights, dtype=torch.float32, device="cpu", kv_slots=64
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    expected = reference_logits(model, TEXT)[1:]
    torch.testing.assert_close(score_chain(decoder, TEXT, 1, 64), expected, rtol=1e-4, atol=1e-4)


def test_groups_are_the_largest_that_divide_every_width(tmp_path: Path) -> None:
    settings = {**_BASE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)).float()
    made.write_plain(tmp_path / "plain", model)
    write_rounded(open_checkpoint(str(tmp_path / "plain")), tmp_path / "out", "w4")
    assert describe(config_of(tmp_path / "out")) == "4-bit (compressed-tensors, groups of 128)"
    assert describe(config_of(quantise(tmp_path / "narrow", "w4"))) == "4-bit (compressed-tensors, groups of 32)"


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_sharded_and_the_others_copied(
    kind: Rounding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantise(tmp_path / "one", kind)
    monkeypatch.setattr(writing, "SHARD_BYTES", 60_000)
    out = quantise(tmp_path / "many", kind)
    files = sorted(out.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all(file.stat().st_size < 60_000 + 5_000 for file in files)
    first, second = open_checkpoint(str(whole)).weights, open_checkpoint(str(out)).weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "many" / "plain" / name).read_bytes()


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, most, alive = SafetensorsWeights.__getitem__, [0], list[Any]()

    def counted(self: SafetensorsWeights, name: str) -> torch.Tensor:
        tensor = read(self, name)
        most[0] = max(most[0], 1 + sum(each() is not None for each in alive))
        alive.append(weakref.ref(tensor))
        return tensor

    folder = plain(tmp_path / "plain")
    monkeypatch.setattr(SafetensorsWeights, "__getitem__", counted)
    write_rounded(open_checkpoint(str(folder)), tmp_path / "out", "w4")
    assert len(alive) > 10
    assert most[0] <= 2  # the one that was just written is freed when the next was read


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    folder = plain(tmp_path / "plain")

    def stop(done: int, total: int) -> None:
        if done == total // 2:
            raise error

    with pytest.raises(error):
        write_rounded(open_checkpoint(str(folder)), tmp_path / "out", "int8", stop)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    (tmp_path / "out").mkdir()  # an empty folder is fine
    write_rounded(open_checkpoint(str(folder)), tmp_path / "out", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]
    assert (tmp_path / "out").stat().st_mode == folder.stat().st_mode
    with pytest.raises(InvalidInput, match="exists and is not an empty folder"):
        write_rounded(open_checkpoint(str(folder)), tmp_path / "out", "int8")


ENDED = """
import os, signal, sys
signal.signal(signal.{name}, signal.SIG_DFL)  # whoever runs the tests may have it ignored, as nohup does
from forerun.cli import app
from forerun.models.load.quantized import writing
writing._copy_others = lambda *_: os.kill(os.getpid(), signal.{name})
sys.argv = ["forerun", "quantize", {folder!r}, {out!r}, "--to", "int8", "--no-report"]
app.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_run_that_is_ended_from_outside_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Half of a large model is gigabytes, in a folder whose name begins with a dot."""
    folder = plain(tmp_path / "plain")
    code = ENDED.format(name=name, folder=str(folder), out=str(tmp_path / "out"))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"], ended.stderr
    assert ended.returncode == 128 + getattr(signal, name)


def change(folder: Path, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | settings))


def test_what_cannot_be_rounded_is_one_line(tmp_path: Path) -> None:
    def refusal(folder: Path, kind: Rounding = "w4", error: type[Exception] = UnsupportedModel) -> str:
        with pytest.raises(error) as found:
            write_rounded(open_checkpoint(str(folder)), tmp_path / "out", kind)
        assert "\n" not in str(found.value)
        assert not (tmp_path / "out").exists()
        return str(found.value)

    assert "is quantised already (FP8" in refusal(quantise(tmp_path / "a", "fp8"))
    make_model(tmp_path / "referee", make_pair(0), "float32", gguf=True)
    assert "is a GGUF file; quantize reads safetensors" in refusal(tmp_path / "referee" / "target.gguf")
    adapted = replace(open_checkpoint(str(tmp_path / "a" / "plain")), adapted_from="its-base")
    with pytest.raises(UnsupportedModel, match="is an adapter of its-base; merge them"):
        write_rounded(adapted, tmp_path / "out", "w4")
    seeing = plain(tmp_path / "seeing")
    tensors = load_file(seeing / "model.safetensors")
    save_file({**tensors, "vision_tower.a.weight": torch.ones(4, 4)}, seeing / "model.safetensors")
    assert "has more than a language model ('vision_tower.a.weight')" in refusal(seeing)
    other = plain(tmp_path / "other")
    change(other, model_type="mamba")
    assert "model_type='mamba' is not one of ours" in refusal(other)
    damaged = plain(tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors[f"{MODULE}.weight"][3, 5] = float("nan")
    save_file(tensors, damaged / "model.safetensors")
    assert f"'{MODULE}.weight' has values that are not finite" in refusal(damaged, error=DamagedFile)
    del tensors[f"{MODULE}.weight"]
    save_file(tensors, damaged / "model.safetensors")
    assert f"no weight '{MODULE}.weight'" in refusal(damaged, error=DamagedFile)


@pytest.mark.parametrize(("settings", "kind", "said"), [
    ({"intermediate_size": 44}, "w4", "is 44 wide, which is no multiple of 32 as w4 needs"),
    ({"intermediate_size": 46}, "int8", "is 46 wide, which is no multiple of 4 as int8 needs"),
    ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "fp8",
     "has experts"),
])  # fmt: skip
def test_widths_and_experts_that_cannot_be_written(
    settings: dict[str, Any], kind: Rounding, said: str, tmp_path: Path
) -> None:
    family = str(settings.get("model_type", "llama"))
    rest = {**_BASE, **{key: value for key, value in settings.items() if key != "model_type"}}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **rest)).float()
    model.save_pretrained(tmp_path / "plain")
    add_tokenizer(tmp_path / "plain", config_of(tmp_path / "plain"), LETTERS[1])
    with pytest.raises(UnsupportedModel, match=said):
        write_rounded(open_checkpoint(str(tmp_path / "plain")), tmp_path / "out", kind)
    if "experts" in said:
        with pytest.raises(UnsupportedModel, match=said):
            input_sizes(open_checkpoint(str(tmp_path / "plain")), ["abc def"])


def command(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr("sys.argv", ["forerun", "quantize", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(("agreement", "said"), [(0.68, "32% of the likeliest tokens are no longer"), (0.9, "")])
def test_many_changed_tokens_are_told(agreement: float, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"perplexity": 23.6, "agreement": agreement, "kl": 0.3}
    show_quality({"tokens": 5000, "window": 512, "original": figures, "rounded": figures}, "w4")
    printed = " ".join(capsys.readouterr().out.split())
    assert (said in printed) if said else ("no longer" not in printed)


def test_the_command_writes_measures_and_the_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prompts = plain(tmp_path / "plain"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc def ghi"}\n{"messages": [{"role": "user", "content": "the cat sat"}]}\n')
    kl = []
    for kind in KINDS:
        saved = tmp_path / f"{kind}.json"
        assert command(monkeypatch, folder, tmp_path / kind, "--to", kind, "--prompts", prompts, "--json", saved) == 0
        printed, document = capsys.readouterr().out, json.loads(saved.read_text())
        assert f"{tmp_path / kind}: 0 MB, " in printed.replace("\n", "")
        assert "same likeliest token" in printed
        assert "20 tokens say little about quality" in printed
        quality = document["quality"]
        assert quality["tokens"] == 20  # 11 of each prompt, less the first
        assert quality["original"]["kl"] == 0.0
        assert quality["original"]["agreement"] == 1.0
        kl.append(quality["rounded"]["kl"])
        with LLM(str(tmp_path / kind), device="cpu") as llm:
            assert llm.generate([TEXT], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids
    fp8, int8, w4 = kl
    assert 0 < int8 < fp8 < w4
    assert command(monkeypatch, folder, tmp_path / "quiet", "--to", "fp8", "--no-report", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert "quality" not in document
    assert document["bytes"] == sum(file.stat().st_size for file in (tmp_path / "quiet").iterdir())


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}? {{ m['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}assistant? {% endif %}"
)
CHATS = [
    [{"role": "user", "content": "abc def"}],
    [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "the cat"},
    ],
]


def with_template(folder: Path, template: str = TEMPLATE) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def test_prompts_are_read_as_users_send_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the chat template, with the recorded answer where there is one; as texts where there is no template."""
    folder, prompts = plain(tmp_path / "plain"), tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "abc def"}) + "\n" + json.dumps({"messages": CHATS[1]}) + "\n")
    bare = windows_of(open_checkpoint(str(folder)), read_conversations(prompts), WINDOW)
    letters = open_checkpoint(str(folder)).tokenizer()
    assert bare == [letters.encode("abc def"), letters.encode("be\n\nhi\n\nthe cat")]
    with_template(folder)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = [
        theirs.apply_chat_template(chat, add_generation_prompt=asks, return_dict=False)
        for chat, asks in zip(CHATS, (True, False), strict=True)
    ]
    checkpoint = open_checkpoint(str(folder))
    assert windows_of(checkpoint, read_conversations(prompts), WINDOW) == expected
    saved = tmp_path / "report.json"
    words = "--to", "w4", "--prompts", prompts, "--calibrate", prompts, "--json", saved
    assert command(monkeypatch, folder, tmp_path / "out", *words) == 0
    assert json.loads(saved.read_text())["quality"]["tokens"] == sum(len(ids) - 1 for ids in expected)
    write_rounded(checkpoint, tmp_path / "same", "w4", input_sizes=input_sizes(checkpoint, CHATS))
    files = [tmp_path / name / "model-00001-of-00001.safetensors" for name in ("out", "same")]
    assert files[0].read_bytes() == files[1].read_bytes()
    capsys.readouterr()


def test_mistakes_on_the_command_line_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, refusing = plain(tmp_path / "plain"), plain(tmp_path / "refusing")
    with_template(refusing, "{{ raise_exception('no prompts of yours') }}")
    for words, said in (
        ([folder, folder, "--to", "w4"], "is not an empty folder"),
        ([folder, tmp_path / "out", "--to", "int3"], "int3"),
        ([folder, tmp_path / "out"], "--to"),
        (["nosuch", tmp_path / "out", "--to", "w4"], "nosuch"),
        ([folder, tmp_path / "out", "--to", "w4", "--prompts", tmp_path / "absent"], "no prompts at"),
        ([folder, folder / "config.json" / "out", "--to", "w4"], "is a file"),
        ([refusing, tmp_path / "out", "--to", "w4", "--prompts", prompts_file(tmp_path)], "no prompts of yours"),
    ):
        assert command(monkeypatch, *words) == 2
        printed = capsys.readouterr().err
        assert said in printed
        assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def prompts_file(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": "abc def ghi and the rest of it"}\n{"prompt": "ab"}\n')
    return path


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "gemma2", "phi3", "olmo2"])
def test_sizes_of_inputs_are_what_transformers_multiplies(family: str, tmp_path: Path) -> None:
    make_tiny_folder(tmp_path / "plain", family)
    checkpoint, texts = open_checkpoint(str(tmp_path / "plain")), ["abc def ghi and the rest", "abcdefgh" * 9, "ab"]
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            seen[f"{name}.weight"] = []
            module.register_forward_hook(lambda _, given, out, into=seen[f"{name}.weight"]: into.append(given[0][0]))
    for text in texts:
        ids = checkpoint.tokenizer().encode(text)
        for part in cut(list(ids), WINDOW):
            model(torch.tensor([part[:-1]]))
    found = input_sizes(checkpoint, texts)
    assert found.keys() == seen.keys()
    for name, rows in seen.items():
        expected = torch.cat(rows).square().mean(0)
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-5, msg=name)


def test_scales_for_prompts_have_smaller_errors_of_what_is_multiplied(tmp_path: Path) -> None:
    """By definition: no group has a larger error than with the scales of the weights alone, and most rows a smaller."""
    weight, sizes = torch.randn(64, 128), torch.rand(128).pow(4) * 9
    error = []
    for given in (None, sizes, torch.ones(128)):
        numbers, scales = in_four_bits(weight, 32, given)
        wide = (torch.unflatten(numbers.float() - 8, 1, (-1, 32)) * scales.float()[..., None]).flatten(1)
        error.append(torch.unflatten((wide - weight).square() * sizes, 1, (-1, 32)).sum(2))
    alone, searched, even = error
    assert bool((searched <= alone * (1 + 1e-6)).all())
    assert float(searched.sum()) < 0.97 * float(alone.sum())
    assert torch.equal(even, alone)


def test_the_command_takes_prompts_to_choose_scales_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prompts = plain(tmp_path / "plain"), prompts_file(tmp_path)
    quiet = "--to", "w4", "--no-report"
    assert command(monkeypatch, folder, tmp_path / "alone", *quiet) == 0
    assert command(monkeypatch, folder, tmp_path / "by-prompts", *quiet, "--calibrate", prompts) == 0
    sizes = input_sizes(open_checkpoint(str(folder)), ["abc def ghi and the rest of it", "ab"])
    before, by_prompts = open_checkpoint(str(folder)).weights, open_checkpoint(str(tmp_path / "by-prompts")).weights
    alone = open_checkpoint(str(tmp_path / "alone")).weights
    for name, weights in sizes.items():
        ours, theirs = (float(((w[name] - before[name]).square() * weights).sum()) for w in (by_prompts, alone))
        assert ours < theirs, name
    capsys.readouterr()
    for to, calibrate, said in (
        ("fp8", prompts, "--calibrate is for w4"),
        ("w4", tmp_path / "absent", "no prompts at"),
    ):
        assert command(monkeypatch, folder, tmp_path / "out", "--to", to, "--calibrate", calibrate) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
