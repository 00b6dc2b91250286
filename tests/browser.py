"""Chromium without a window, driven over its DevTools protocol through two pipes; nothing is installed for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LONG_S = 60.0  # on a machine that does much else


def find_chromium() -> str | None:
    """Where it is; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page."""

    def __init__(self, profile: Path, *, width: int = 1400, height: int = 900) -> None:
        program = find_chromium()
        assert program is not None
        to_read, to_write = os.pipe(), os.pipe()

        def take_pipes() -> None:  # the protocol's are 3 and 4
            ours = os.dup(to_read[0]), os.dup(to_write[1])
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        options = (
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage", "--mute-audio"),
            *("--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--window-size={width},{height}"),
            f"--user-data-dir={profile}",
        )
        self._process = subprocess.Popen(
            [program, *options, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=take_pipes,
            start_new_session=True,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._out, self._in = to_read[1], to_write[0]
        self._text, self._count = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the protocol, and wait for the answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._count:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                found: dict[str, Any] = answer["result"]
                return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._text:
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._text += piece
        line, _, self._text = self._text.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, code: str) -> None:
        """Wait until an expression is true in the page."""
        until = time.monotonic() + LONG_S
        while not self._is_true(code):
            if time.monotonic() > until:
                shown = self.evaluate("document.body ? document.body.innerText.slice(0, 2000) : ''")
                raise AssertionError(f"{code} did not become true; the page shows:\n{shown}\n{self.find_errors()}")
            time.sleep(0.05)

    def _is_true(self, code: str) -> bool:
        try:
            return bool(self.evaluate(f"!!({code})"))
        except RuntimeError:  # a page that is being loaded has no body, or is another by now
            return False

    def click(self, code: str) -> None:
        """Click, with the mouse, into the middle of the element that an expression gives."""
        box = self.evaluate(
            f"(async () => {{ const e = {code}; e.scrollIntoView({{block: 'center'}}); "
            "for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame); "  # clicks go to what was painted
            "const b = e.getBoundingClientRect(); return {x: b.left + b.width / 2, y: b.top + b.height / 2}; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def set_size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Another window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def take_picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def find_errors(self) -> list[str]:
        """What the page's console says went wrong: exceptions, what the policy forbade, requests that failed."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                entry = event["params"]["entry"]
                found.append(f"{entry['text']} {entry.get('url', '')}")
        return found

    def close(self) -> None:
        """End it, and all of its processes."""
        try:
            self._session = None
            self.call("Browser.close")
        except (RuntimeError, OSError):
            pass
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
