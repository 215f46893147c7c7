"""A server that speaks OpenAI's API, made of the standard library, measured and mis-measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from forerun.core.errors import InvalidInput
from forerun.measure.peers.process import endpoint_contender


class Server(BaseHTTPRequestHandler):
    """Lists one model and counts six tokens for every answer."""

    asked: ClassVar[list[dict[str, Any]]] = []
    models: ClassVar[list[dict[str, str]]] = [{"id": "tiny"}]

    def do_GET(self) -> None:
        self._answer(200, {"data": self.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["max_tokens"] > 100:
            self._answer(400, {"error": "too many"})
        else:
            self._answer(200, {"usage": {"completion_tokens": 6}})

    def _answer(self, code: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are silent."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "asked", [])
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_prompts_travel_as_ids_and_tokens_are_the_servers_count(url: str) -> None:
    contender = endpoint_contender(url, ignore_eos=True)
    written = contender.write([[1, 2, 3], [4]], 9)
    assert [len(text) for text in written.texts] == [6, 6]
    assert not contender.exact
    assert [row["prompt"] for row in Server.asked] == [[1, 2, 3], [4]]
    assert all((row["model"], row["ignore_eos"]) == ("tiny", True) for row in Server.asked)


def test_what_goes_wrong_is_said_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"answered 400.*too many"):
        endpoint_contender(url).write([[1]], 101)
    monkeypatch.setattr(Server, "models", [])
    with pytest.raises(InvalidInput, match="lists no model"):
        endpoint_contender(url)
    with pytest.raises(InvalidInput, match="does not answer"):
        endpoint_contender("http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match="is not a web address"):
        endpoint_contender("localhost:8000")
