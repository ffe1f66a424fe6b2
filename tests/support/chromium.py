"""A headless Chromium controlled over a pipe, to look at our pages. It can only read files."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import runpy
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_BROWSER = runpy.run_path(str(Path(__file__).parents[2] / "requirements" / "browser.py"))
_SECONDS = 180.0
# Where a test that runs as root, or in a container, finds neither a sandbox nor much shared memory.
_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-extensions", "--mute-audio", "--hide-scrollbars"),
)


class Browser:
    """A client of Chromium's protocol: zero-terminated JSON, to descriptor 3 and from descriptor 4."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._number, self._rest, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)
        raise TimeoutError(f"Chromium did not answer {method}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._back], [], [], _SECONDS)[0]:
                raise TimeoutError("Chromium sends nothing")
            part = os.read(self._back, 1 << 16)
            if not part:
                raise RuntimeError(f"Chromium ended with {self._process.wait()}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, *, width: int = 1100, dark: bool = False) -> None:
        """Open a page in a new tab, whose events are kept from the beginning."""
        self._session, self.events = "", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        # The event names what was loaded: that of the empty page that a tab begins with may come late.
        loader = self.call("Page.navigate", url=path.resolve().as_uri())["loaderId"]
        until = time.monotonic() + _SECONDS
        while not any(_is_load(event, loader) for event in self.events):
            assert time.monotonic() < until, f"{path} was not loaded"
            self.events.append(self._read())

    def evaluate(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """Return what the page's console would show."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        asked = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]


def _is_load(event: dict[str, Any], loader: str) -> bool:
    params = event.get("params", {})
    return event.get("method") == "Page.lifecycleEvent" and (params["name"], params["loaderId"]) == ("load", loader)


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe, moved away from the descriptors that Chromium uses."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


@contextmanager
def browser() -> Iterator[Browser]:
    found = _BROWSER["find"]()
    if found is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("there is no Chromium: install one with `make browser` (root, apt), or name one in CHROMIUM")
    folder = tempfile.mkdtemp(prefix="chromium-")
    read_there, to = _pipe()
    back, write_there = _pipe()
    command = [found, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    # The shell puts the two ends where Chromium looks for them.
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{read_there} 4>&{write_there}', "bash", *command],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"HOME": folder},
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Browser(process, to, back)
    finally:
        os.close(to)
        os.close(back)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
