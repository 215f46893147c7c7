"""docs/serving.md and deploy/ against the real command, application and metrics."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from forerun.cli.app import app
from tests.readme.pages import ROOT, blocks
from tests.server.conftest import Running

PAGE = ROOT / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
HIDDEN = {"/", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/page/{name}"}  # not in the schema


def serve_command() -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands["serve"]


def test_every_flag_is_there_and_no_other() -> None:
    real = {option for parameter in serve_command().params for option in parameter.opts if option.startswith("--")}
    assert set(re.findall(r"^\| `(--[\w-]+)` \|", TEXT, re.MULTILINE)) == real - {"--help"}


def test_defaults_are_the_real_ones() -> None:
    said = dict(re.findall(r"^\| `(--[\w-]+)` \| ([\d.]+) \|", TEXT, re.MULTILINE))
    real = {parameter.opts[0]: parameter.default for parameter in serve_command().params}
    assert len(said) >= 5
    for flag, value in said.items():
        assert str(real[flag]).removesuffix(".0") == value, flag


def test_every_endpoint_is_there_and_no_other(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()["paths"]
    real = {f"{method.upper()} {path}" for path, methods in schema.items() for method in methods}
    told = set(re.findall(r"`((?:GET|POST) /[^`]*)`", TEXT))
    assert {route for route in told if route.split()[1] not in HIDDEN} == real
    for route in told:
        method, path = route.split()
        status = http.request(
            method, path.replace("{name}", "smollm2"), json={} if method == "POST" else None
        ).status_code
        needs_key = "lora" in path or path in ("/sleep", "/wake_up", "/is_sleeping")  # the admin's
        assert status in (200, 400, 403 if needs_key else 200), route


def test_the_curl_body_and_the_python_block_run(
    http: httpx.Client, served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    curl = next(block for block in blocks(PAGE, "sh") if block.startswith("curl"))
    body = json.loads(re.search(r"-d '(.*)'", curl)[1])  # type: ignore[index]
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    program = blocks(PAGE, "python")[0].replace("http://127.0.0.1:8000", served.url)
    exec(compile(program, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_dashboard_shows_metrics_that_are_there(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a b a b a", "max_tokens": 8})
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)", http.get("/metrics").text, re.MULTILINE))
    there = {name for name in types if not name.endswith("_created")}
    board = json.loads((ROOT / "docs" / "deploy" / "grafana-dashboard.json").read_text())
    shown = {name for panel in board["panels"] for target in panel["targets"] for name in
             re.findall(r"forerun:\w+", target["expr"])}  # fmt: skip
    plain = {re.sub(r"_bucket$", "", name) for name in shown}
    assert plain - there == set(), "every metric shown is there"
    assert there - plain == {"forerun:info"}, "and every metric that is there is shown"
    told = set(re.findall(r"^\| `(forerun:\w+)` \|", TEXT, re.MULTILINE))
    assert told == {name.removesuffix("_total") for name in there}, "the table of metrics is whole"


@pytest.mark.parametrize("name", ["Dockerfile", "forerun.service"])
def test_deployed_commands_have_real_flags(name: str) -> None:
    text = Path(ROOT / "docs" / "deploy" / name).read_text()
    line = next(line for line in text.splitlines() if line.startswith(("ENTRYPOINT", "ExecStart")))
    real = {option for parameter in serve_command().params for option in parameter.opts}
    used = re.findall(r"--[\w-]+", line)
    assert used
    assert set(used) <= real


def test_the_container_is_built_from_what_there_is(http: httpx.Client) -> None:
    lines = (ROOT / "docs" / "deploy" / "Dockerfile").read_text().splitlines()
    (install,) = (line for line in lines if "pip install" in line)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"\[(\w+)\]", install) == ["serve"]
    assert "serve" in extras
    assert (ROOT / re.search(r"-c (\S+)", install)[1]).is_file()  # type: ignore[index]
    (pull,) = (line for line in lines if "models pull" in line)
    group: Any = typer.main.get_command(app)
    command = group.commands["models"].commands["pull"]
    flags = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"--[\w-]+", pull)) <= flags
    (check,) = (line for line in lines if line.startswith("HEALTHCHECK"))
    assert http.get(re.search(r"127\.0\.0\.1:8000(/\w+)", check)[1]).status_code == 200  # type: ignore[index]
    (probe,) = (line for line in lines if "n.available" in line)
    exec(re.search(r'-c "(.*)"', probe)[1], {})  # type: ignore[index]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for needed in (
        "src",
        "docs",
        "README.md",
        "LICENSE",
        "setup.py",
        "pyproject.toml",
        "constraints.txt",
        "MANIFEST.in",
    ):
        assert (ROOT / needed).exists()
        assert needed not in ignored
