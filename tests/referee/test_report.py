"""Reports in all forms, the command line, other targets and other checks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from forerun.cli.app import main
from forerun.referee.ask import Ask, Refused, symbol_ids
from forerun.referee.checkpoint import make_model
from forerun.referee.planted import Planted
from forerun.referee.report import as_document, as_html, as_junit
from forerun.referee.suite import CHECKS, Budget, Court, Finding, Report, check, chosen_checks, run_suite
from forerun.referee.tables import Pair, Rules
from forerun.referee.targets import CallableTarget, UrlTarget
from tests.referee.planted_server import as_body, ask_from, serve
from tests.referee.test_planted import served


@pytest.fixture(scope="module")
def report(pair: Pair) -> Report:
    """Of a broken engine."""
    checks = chosen_checks(["greedy.alone", "law.min_p", "law.top_k", "usage"])
    return run_suite(Planted(pair, frozenset(["min_p_ignored"])), pair, Budget(3000, 60), checks)


@pytest.fixture
def forerun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["forerun", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run


def test_the_document_has_everything(report: Report) -> None:
    document = json.loads(json.dumps(as_document(report)))
    assert document["passed"] is False
    by_name = {each["name"]: each for each in document["checks"]}
    assert by_name["greedy.alone"]["status"] == "pass"
    failed = by_name["law.min_p"]
    assert failed["status"] == "fail"
    assert failed["p_value"] == 0
    assert failed["counterexample"]["prompt"]
    assert failed["command"]
    assert by_name["law.top_k"]["bars"]
    assert by_name["law.top_k"]["trace"]


def test_junit_counts_failures(report: Report) -> None:
    suite = xml.fromstring(as_junit(report)).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("4", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "again:" in (failure.text or "")


def test_the_page_is_well_formed_and_has_plots(report: Report) -> None:
    page = as_html(report)
    assert page.count("<svg") == page.count("</svg>") >= 2
    assert "<script" not in page
    assert "http-equiv" not in page
    for svg in page.split("<svg")[1:]:
        xml.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
    assert "1 of 4 checks failed" in page


def test_a_url_is_checked_without_torch(pair: Pair, tmp_path: Path) -> None:
    """In a fresh interpreter in which importing torch raises."""
    folder = make_model(tmp_path / "table", pair).table.parent
    program = f"""
import sys
for name in ("torch", "transformers", "tokenizers", "httpx"):
    sys.modules[name] = None
from forerun.cli.app import main
sys.argv = ["forerun", "verify", URL, "--table", {str(folder)!r}, "--only", "greedy.alone", "--only", "law.top_k",
            "--tokens", "1500", "--html", {str(tmp_path / "r.html")!r}, "--junit", {str(tmp_path / "r.xml")!r},
            "--json", {str(tmp_path / "r.json")!r}]
main()
"""
    with served(Planted(pair)) as target:
        code = f"URL = {target.url!r}\n{program}"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert "2 checks passed" in ended.stdout
    document = json.loads((tmp_path / "r.json").read_text())
    assert [each["status"] for each in document["checks"]] == ["pass", "pass"]
    assert (tmp_path / "r.html").is_file()
    assert (tmp_path / "r.xml").is_file()


def test_a_failure_exits_with_one(pair: Pair, tmp_path: Path, forerun: Callable[..., int], capsys: Any) -> None:
    folder = make_model(tmp_path, pair).table.parent
    with served(Planted(pair, frozenset(["rejected_kv_kept"]))) as target:
        assert forerun("verify", target.url, "--table", str(folder), "--only", "greedy.alone") == 1
    said = capsys.readouterr().out
    assert "greedy.alone: alone: a greedy text is not the one due" in said
    assert "again: curl -s" in said


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"lost", "answered 500: lost"),
        (200, b'{"choices": [', "answered no JSON"),
        (200, b"\xff\xfe\x00", "answered no JSON"),
        (200, b"[1]", "no completion in the answer"),
        (200, b'{"choices": [{"text": null}]}', "text is None"),
        (200, b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "x"}}', "a count is 'x'"),
        (0, b"", "gave no answer within 0.3 s"),
    ],
)
def test_a_broken_server_fails_with_its_answer_and_a_command(pair: Pair, status: int, body: bytes, said: str) -> None:
    server, ended = serve(Planted(pair)), threading.Event()

    class Odd(server.RequestHandlerClass):  # type: ignore[misc, name-defined]
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if not status:
                ended.wait(20)
            self.send_response(status or 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server.RequestHandlerClass = Odd
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        target = UrlTarget(f"http://127.0.0.1:{server.server_address[1]}", ids=symbol_ids(pair.target), timeout=0.3)
        report = run_suite(target, pair, Budget(2000, 20), chosen_checks(["greedy.alone"]))
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
    finding = report.failed[0].finding
    assert said in finding.detail
    assert finding.command.startswith("curl -s http://127.0.0.1:")


def test_a_run_in_which_nothing_was_checked_is_no_pass(pair: Pair, forerun: Callable[..., int], capsys: Any) -> None:
    with served(Planted(pair)) as target:
        assert forerun("verify", target.url, "--only", "law.top_k") == 1
    assert "nothing was checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "target 'nosuch' is no URL, no folder and no module:function"),
        (["http://127.0.0.1:9", "--table", "nosuch"], "--table 'nosuch' has no table.json"),
        (["http://127.0.0.1:9", "--off", "{"], "--off '{' is no JSON"),
        (["http://127.0.0.1:9", "--only", "greedy.alon e"], "greedy.alon e"),
        (["no.such:function"], "cannot import the target 'no.such:function'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, forerun: Callable[..., int], capsys: Any) -> None:
    assert forerun("verify", *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_make_model_says_what_to_do_next(tmp_path: Path, forerun: Callable[..., int], capsys: Any) -> None:
    assert forerun("verify", "make-model", str(tmp_path / "made"), "--half", "--gguf") == 0
    assert "forerun verify http" in capsys.readouterr().out
    assert (tmp_path / "made" / "target.gguf").is_file()
    assert (tmp_path / "made" / "eagle3" / "config.json").is_file()


def test_a_callable_is_a_target(pair: Pair) -> None:
    engine, ids = Planted(pair), symbol_ids(pair.target)

    def function(fields: Mapping[str, Any]) -> Any:
        if "min_p" in fields:
            raise ValueError("no min_p here")
        return as_body(engine.one(ask_from(fields, ids), "on", False))

    target = CallableTarget(function, ids)
    checks = chosen_checks(["greedy.alone", "law.min_p", "law.bias", "greedy.on_off"])
    report = run_suite(target, pair, Budget(3000, 60), checks)
    found = {each.name: each.status for each in report.results}
    assert found == {"greedy.alone": "pass", "law.bias": "pass", "law.min_p": "skip", "greedy.on_off": "skip"}


def test_a_callable_may_return_text_alone(pair: Pair) -> None:
    engine, ids = Planted(pair), symbol_ids(pair.target)
    target = CallableTarget(lambda fields: engine.one(ask_from(fields, ids), "on", False).text, ids)
    report = run_suite(target, pair, Budget(3000, 60), chosen_checks(["greedy.alone", "law.temperature_1", "stop"]))
    assert [each.status for each in report.results] == ["pass"] * 3


def test_an_engine_that_raises_fails_one_check(pair: Pair) -> None:
    engine, ids = Planted(pair), symbol_ids(pair.target)

    def function(fields: Mapping[str, Any]) -> str:
        if "stop" in fields:
            raise ZeroDivisionError("lost")
        return engine.one(ask_from(fields, ids), "on", False).text

    report = run_suite(CallableTarget(function, ids), pair, checks=chosen_checks(["stop", "greedy.alone"]))
    assert [each.finding.detail for each in report.failed] == ["it raised ZeroDivisionError: lost"]
    assert {each.name: each.status for each in report.results} == {"stop.strings": "fail", "greedy.alone": "pass"}


def test_others_add_checks(pair: Pair) -> None:
    @check("mine.never", "fails always")
    def never(court: Court) -> Finding:
        asks = court.greedy_asks(1)
        return court.fail("not good enough", asks[0], court.ask(asks)[0].text, "better")

    try:
        report = run_suite(Planted(pair), pair, checks=chosen_checks(["mine"]))
    finally:
        del CHECKS["mine.never"]
    assert [each.finding.detail for each in report.failed] == ["not good enough"]


def test_the_fields_of_a_request_are_those_of_the_api(pair: Pair) -> None:
    ask = Ask("abc", 5, Rules(0.7, top_k=3, bias={"a": 2.0}), seed=4, stop=("x",), logprobs=2)
    ids = symbol_ids(pair.target)
    assert ask_from(ask.body(ids), ids) == ask
    target = UrlTarget("http://h:1", "m", ids, extra={"top_k": 0, "min_p": 0}, names={"top_k": "k"}, off={"x": 1})
    url, body = target._request(ask, "off")
    assert url == "http://h:1/v1"
    assert (body["k"], body["min_p"], body["x"], body["model"]) == (3, 0, 1, "m")
    assert target.command(ask).startswith("curl -s http://h:1/v1/completions ")
    llama = UrlTarget("http://h:1", "m", ids, names={"response_format": "json_schema"})
    assert llama._request(Ask("abc", schema={"type": "null"}), "on")[1]["json_schema"] == {"type": "null"}


def test_transformers_refuses_what_it_lacks(pair: Pair) -> None:
    from forerun.referee.targets import TransformersTarget

    bare = TransformersTarget.__new__(TransformersTarget)
    bare.ids = symbol_ids(pair.target)
    with pytest.raises(Refused, match="presence"):
        bare._options(Ask("abc", rules=Rules(presence_penalty=1.0)))
    ask = Ask("abc", rules=Rules(top_p=0.5, bias={"a": 1.0}), stop=("x",))
    assert bare._options(ask)["top_p"] == 0.5
    bare.model, bare.assistant, bare.tokens = "target", "draft", 5
    code = shlex.split(bare.command(ask))[2]
    assert eval(code.partition("answer([")[2].partition("], 'on')")[0]) == ask
