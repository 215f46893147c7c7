"""The planted engine behind the OpenAI API, so that URL targets are tested over a socket as well."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from forerun.referee.ask import Answer, Ask, Mode, Refused, symbol_ids
from forerun.referee.planted import Planted
from forerun.referee.tables import Rules


def ask_from(body: Mapping[str, Any], ids: Mapping[str, int]) -> Ask:
    """An Ask from the fields of /v1/completions."""
    symbols = {str(i): symbol for symbol, i in ids.items()}
    names = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    bias = {symbols[token]: value for token, value in body.get("logit_bias", {}).items()}
    rules = Rules(body.get("temperature", 1.0), **{n: body[n] for n in names if n in body}, bias=bias)
    stop = body.get("stop") or ()
    form = body.get("response_format") or {}
    return Ask(
        body["prompt"],
        body.get("max_tokens", 16),
        rules,
        body.get("seed"),
        (stop,) if isinstance(stop, str) else tuple(stop),
        body.get("logprobs"),
        form.get("json_schema", {}).get("schema"),
    )


def as_body(done: Answer) -> dict[str, Any]:
    """An Answer as the JSON of /v1/completions."""
    logprobs = None
    if done.logprobs is not None:
        logprobs = {
            "tokens": [each.text for each in done.logprobs],
            "token_logprobs": [each.logprob for each in done.logprobs],
            "top_logprobs": [dict(each.top) for each in done.logprobs],
        }
    usage = {name: getattr(done, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    metrics = {
        "num_draft_tokens": done.drafted,
        "num_accepted_draft_tokens": done.accepted,
        "num_spec_steps": done.rounds,
    }
    choice = {"index": 0, "text": done.text, "finish_reason": done.finish, "logprobs": logprobs}
    return {"choices": [choice], "usage": usage, "metrics": {"speculative_decoding": metrics}}


def serve(engine: Planted, port: int = 0) -> ThreadingHTTPServer:
    """The engine behind the OpenAI API on this machine; the caller runs `serve_forever` and `shutdown`."""
    ids, under_way, lock = symbol_ids(engine.pair.target), [0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "table", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                under_way[0] += 1
            try:
                crowded = under_way[0] > 1
                mode: Mode = "off" if body.get("speculative") == "off" else "on"
                done = engine.one(ask_from(body, ids), mode, crowded)
                time.sleep(engine.seconds(done.rounds or 0, mode, crowded))
                self._send(200, as_body(done))
            except (Refused, KeyError, TypeError) as error:
                self._send(400, {"error": {"message": str(error)}})
            finally:
                with lock:
                    under_way[0] -= 1

        def _send(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # of connections: with the usual 5, concurrent ones are dropped

    return Server(("127.0.0.1", port), Handler)
