"""`forerun models`, `drafters`, `doctor` and the flags themselves."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun import __version__
from forerun.cli import doctor, models
from forerun.cli.flags import HELP, PANELS, Settings
from forerun.core import registry
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.models.load.catalog import Progress, known_models
from tests.cli.conftest import Run, plain


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_an_empty_cache_says_how_to_fill_it(forerun: Run, cache: Path) -> None:
    listed = forerun("models")
    assert listed.code == 0
    assert "98 MB" in listed.out
    assert "Apache-2.0" in listed.out
    assert "forerun models pull smollm2" in listed.out
    absent = forerun("models", "path", "smollm2")
    assert absent.code == 2
    assert "forerun models pull smollm2" in absent.err


def test_models_that_a_head_comes_for_say_that_drafting_gains(forerun: Run, cache: Path) -> None:
    lines = {line.split()[0]: line for line in forerun("models").out.splitlines()}
    assert "drafting gains here" in lines["qwen-1.5b"]
    assert "drafting gains on a GPU" in lines["smollm2"]
    assert "drafting" not in lines["qwen-0.5b"] + lines["gemma-270m"]
    found = {model["name"]: model["drafting"] for model in json.loads(forerun("models", "--json", "-").out)}
    assert (found["qwen-1.5b"], found["gemma-270m"]) == ("drafting gains here", None)


def test_files_and_hub_models_are_listed(forerun: Run, cache: Path) -> None:
    (cache / "cache" / "models").mkdir(parents=True)
    mine = cache / "cache" / "models" / "mine.gguf"
    mine.write_bytes(b"x" * 3_000_000)
    snapshot = cache / "hub" / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert "org/name" not in forerun("models").out  # nothing to run yet
    (snapshot / "model.safetensors").write_bytes(b"")
    found = {model["name"]: model for model in json.loads(forerun("models", "--json", "-").out)}
    assert found["smollm2"]["path"] is None
    assert found[str(mine)]["size"] == 3_000_000
    assert (found["org/name"]["path"], found["org/name"]["about"]) == (str(snapshot), "from the hub")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "4-bit (AWQ, groups of 128, zero points)"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' cannot be read"),
    ],
)
def test_the_format_of_quantised_hub_models_is_said(
    config: dict[str, object], said: str, forerun: Run, cache: Path
) -> None:
    snapshot = cache / "hub" / "models--org--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"quantization_config": config}))
    (snapshot / "model.safetensors").write_bytes(b"")
    found = {model["name"]: model for model in json.loads(forerun("models", "--json", "-").out)}
    assert said in found["org/name"]["about"]


def test_pull_says_where_the_file_is_unless_quiet(forerun: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []

    def pull(name: str, progress: Progress) -> Path:
        progress(1, 2)
        pulled.append(name)
        return Path("there.gguf")

    monkeypatch.setattr(models, "pull_model", pull)
    assert forerun("models", "pull", "smollm2").out == "smollm2 is now on this machine: there.gguf\n"
    silent = forerun("models", "pull", "smollm2", "--quiet")
    assert (silent.code, silent.out, silent.err) == (0, "", "")
    assert pulled == ["smollm2", "smollm2"]

    present = [SimpleNamespace(name=model.name, path=Path("there.gguf")) for model in known_models()]
    monkeypatch.setattr(models, "known_models", lambda: present)
    monkeypatch.setattr(models, "find_known", lambda name: Path("there.gguf"))
    assert "is already on this machine: there.gguf" in forerun("models", "pull", "smollm2").out
    assert forerun("models", "pull", "smollm2", "--quiet").out == ""
    assert len(pulled) == 2


@pytest.mark.parametrize("command", ["pull", "path"])
def test_unknown_models_are_named(forerun: Run, cache: Path, command: str) -> None:
    ran = forerun("models", command, "nope")
    assert ran.code == 2
    assert ran.err.startswith("forerun: unknown model 'nope'")
    assert "smollm2" in ran.err


def test_drafters_are_described(forerun: Run) -> None:
    said = forerun("drafters").out.splitlines()
    lines = dict(line.split(maxsplit=1) for line in said if not line.startswith(("head ", "old name ")))
    assert list(lines) == ["auto", *registry.drafters.names()]
    assert any("head smollm2-135m-eagle3: eagle3 for SmolLM2-135M-Instruct" in line for line in said)
    assert lines["none"].startswith("No drafting")


def test_doctor_names_what_is_missing_and_how_to_get_it(forerun: Run, cache: Path) -> None:
    ran = forerun("doctor")
    assert ran.code == 1
    assert re.search(r"no model .* forerun models pull smollm2", ran.out)
    assert "works with a model of your own" in ran.out, "a user who brings one is not told that nothing works"
    assert "eagle3 (heads qwen2.5-coder-1.5b-eagle3, smollm2-135m-eagle3)" in " ".join(ran.out.split())
    document = json.loads(forerun("doctor", "--json", "-").out)
    assert document["ready"] is False
    found = {finding["about"]: finding for finding in document["findings"]}
    assert {"machine", "python", "torch", "transformers", "devices", "threads", "cache"} <= set(found)
    lacking = [one for one in document["findings"] if not one["ok"]]
    assert all(one["fix"] for one in lacking)
    assert "model" in [one["about"] for one in lacking if one["needed"]]


@pytest.mark.parametrize(
    ("why", "fix"), [("FORERUN_NATIVE=0 turns it off", "unset FORERUN_NATIVE"), ("it was not built", "gcc or clang")]
)
@pytest.mark.usefixtures("cache")
def test_doctor_says_how_to_get_the_kernels_back(monkeypatch: pytest.MonkeyPatch, why: str, fix: str) -> None:
    monkeypatch.setattr("forerun.models.native.library.why_not", lambda: why)
    found = next(finding for finding in doctor.examine() if finding.about == "native kernels")
    assert why in found.found
    assert (found.fix or "").startswith(fix)


def test_doctor_says_how_many_tokens_and_sequences_fit(smollm2_path: str) -> None:
    found = doctor._room(smollm2_path, "int8")
    assert found.ok
    told = r"kv_dtype (\w+): ([\d,]+) bytes for a token, ([\d,]+) tokens fit, or sequences: ([\d,]+) of 2,000, ([\d,]+)"
    first, other = re.findall(told, found.found)
    assert (first[0], other[0]) == ("int8", "auto")
    each, tokens, short, long = (int(figure.replace(",", "")) for figure in first[1:])
    assert each == 2 * 30 * 3 * (64 + 4)  # keys and values of 30 layers and 3 heads, with their scales
    assert 0.9 * tokens <= short * 2000 <= tokens
    assert "32,000" not in found.found, "the model reads 8,192 tokens"
    told_once = [finding for finding in doctor.examine("auto", smollm2_path) if finding.about == "KV tokens"]
    assert not told_once, "the named model's own line is all there is"
    assert 3 <= short / max(1, long) <= 6
    assert not doctor._room("no-such-model", "auto").ok
    assert "needs a GPU" in doctor._room(smollm2_path, "fp8").found


def test_doctor_knows_the_dependencies_of_the_project() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=~!; ]", requirement)[0] for requirement in requirements}

    extras = declared["optional-dependencies"]
    assert {extra: set(libraries) for extra, libraries in doctor.EXTRAS.items()} == {
        extra: names(requirements) for extra, requirements in extras.items() if extra not in ("dev", "docs")
    }
    assert {"torch", "typer", "rich", *doctor.NEEDED, *doctor.HANDY} == names(declared["dependencies"])


def test_version_and_help(forerun: Run) -> None:
    assert forerun("--version").out == f"forerun {__version__}\n"
    shown = plain(forerun("generate", "--help").out)
    assert all("--" + name.replace("_", "-") in shown for name in HELP)


@pytest.mark.parametrize("words", [(), ("generate",), ("data", "make"), ("train", "eagle3"), ("bench",)])
def test_help_shows_no_type_behind_flags_that_take_no_value(forerun: Run, words: tuple[str, ...]) -> None:
    shown = plain(forerun(*words, "--help").out)
    assert "bool" not in shown
    assert not words or "<str>" in shown, "values have a type"


def test_flags_are_fields_and_leave_defaults_alone() -> None:
    known = {field.name for owner in PANELS.values() for field in fields(owner)}
    assert set(HELP) - known == {"model", "quantization"}  # that says the same as dtype
    nothing: dict[str, object] = dict.fromkeys(HELP) | {"stop": []}
    defaults = Settings("smollm2", SamplingParams(), SpeculativeConfig(), EngineConfig())
    assert Settings.of(nothing) == defaults


def test_flags_that_imply_others() -> None:
    assert Settings.of({"budget": 3}).speculative == SpeculativeConfig(budget=3, controller="fixed")
    assert Settings.of({"draft_model": "x"}).speculative.drafter == "auto"
    assert Settings.of({"draft_model": "x", "drafter": "ngram"}).speculative.drafter == "ngram"
