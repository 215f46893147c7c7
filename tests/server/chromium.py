"""A headless Chromium driven over a pipe by its DevTools protocol: pages, keys, screenshots. No packages needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
_SHIFT = 8
_CONTRAST = """(selector) => {
  const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(rgb[i] / 255), 0);
  const node = document.querySelector(selector);
  let back = node;
  while (back.parentElement && (parts(getComputedStyle(back).backgroundColor)[3] ?? 1) === 0) back = back.parentElement;
  const [a, b] = [getComputedStyle(node).color, getComputedStyle(back).backgroundColor].map((c) => light(parts(c)));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


class Chromium:
    """One browser with one page."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        (from_us, to_it), (from_it, to_us) = os.pipe(), os.pipe()
        command = [
            BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # the browser reads orders on descriptor 3 and answers on 4
        wired = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", *command]
        self._process = subprocess.Popen(
            wired, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        self._orders, self._answers = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb", 0)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []  # that the page's scripts raised
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for area in ("Page", "Runtime"):
            self._call(f"{area}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._orders.close()
        self._answers.close()

    def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """The window's size, and light or dark."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.ask(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"not within {seconds} s: {script}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": _SHIFT * shift}
        said = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **code, **said)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def hover(self, selector: str) -> None:
        """The pointer over the middle of the first element that matches."""
        script = f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
        x, y = self.ask(script + " return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def contrast(self, selector: str) -> float:
        """Between an element's text and what lies behind it, as WCAG counts it: 4.5 can be read."""
        found: float = self.ask(f"({_CONTRAST})({selector!r})")
        return found

    def picture(self, file: Path) -> None:
        self._call("Emulation.setScrollbarsHidden", hidden=True)
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        self._orders.write(json.dumps(order).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                found: dict[str, Any] = message["result"]
                return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = self._answers.read(1 << 16)
            assert more, "the browser has gone away"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found
