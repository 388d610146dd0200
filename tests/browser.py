"""A headless Chromium driven through its debugging protocol: opens files, listens, measures, takes pictures."""

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "google-chrome")


class Page:
    """One tab. ``console`` and ``requests`` hold what a page logged and what it asked the network for."""

    def __init__(self, connection: Any):
        self.connection, self.count = connection, 0
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer; events on the way are taken down."""
        self.count += 1
        self.connection.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while (message := json.loads(self.connection.recv())).get("id") != self.count:
            self._event(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def _event(self, message: dict[str, Any]) -> None:
        found = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(found["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(found["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(found["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(found["request"]["url"])

    def open(self, file: Path, *, width: int = 1000, dark: bool = False, media: str = "") -> "Page":
        """Load a file from disk; afterwards ``console`` and ``requests`` are those of this page."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.console.clear(), self.requests.clear()
        url = Path(file).resolve().as_uri()
        self.send("Page.navigate", url=url)
        deadline = time.monotonic() + 30
        while self.js("document.readyState") != "complete" or self.js("location.href") != url:
            assert time.monotonic() < deadline, f"{url} is not loaded"
            time.sleep(0.05)
        # Two frames later all that a page does on its own at the start has been done.
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        return self

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)
            text = {}

    def picture(self, target: Path, limit: int = 20000) -> None:
        """A PNG of the whole page."""
        height = min(limit, self.js("document.documentElement.scrollHeight"))
        width = self.js("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(target).write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True)["data"])


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """A browser for some pages; an error where none is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program, f"these tests need a browser: none of {', '.join(NAMES)} is on the PATH (apt-get install chromium)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
                f"--user-data-dir={profile}", "--remote-debugging-port=0", "--remote-allow-origins=*", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield Page(websocket.create_connection(_address(Path(profile), process), timeout=60))
        finally:
            process.terminate()
            process.wait(20)


def _address(profile: Path, process: subprocess.Popen) -> str:
    """The debugging address of the browser's first tab."""
    import urllib.request

    deadline, port_file = time.monotonic() + 60, profile / "DevToolsActivePort"
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, IndexError, ValueError, StopIteration):
            port = int(port_file.read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                tabs = json.load(answer)
            return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        time.sleep(0.1)
    raise RuntimeError(f"the browser did not start (exit code {process.poll()})")
