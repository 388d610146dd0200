"""A real JupyterLab, driven through headless Chromium's remote debugging websocket."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode
from pathlib import Path

import websocket
from conftest import ROOT

CHROMIUM = next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)
TOKEN = "for-tests"
QUIET = {  # no pop-ups that ask for news
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}


def wait(condition, seconds: float = 180.0, what: str = "the condition"):
    """The first true value of ``condition()``."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come true in {seconds:.0f} s"
        time.sleep(0.2)
    return value


class Lab:
    """``with Lab(folder) as lab: lab.open("a.ipynb"); lab.run_all()``: notebooks below ``folder`` in one tab."""

    def __init__(self, folder: Path, scratch: Path, theme: str = "JupyterLab Light"):
        self.folder, self.scratch, self.theme = folder, scratch, theme
        self.number, self.processes = 0, []

    def __enter__(self) -> "Lab":
        assert CHROMIUM, "this test drives JupyterLab in Chromium: install the package chromium"
        try:
            self._start_jupyterlab()
            self._start_chromium()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, command: list[str], **environment: str) -> None:
        with open(self.scratch / f"{Path(command[0]).name}-{len(self.processes)}.log", "w") as log:
            self.processes.append(
                subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=os.environ | environment)
            )

    def _start_jupyterlab(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        settings = self.scratch / "settings"
        themes = {"apputils-extension/themes": {"theme": self.theme, "adaptive-theme": False}}
        for name, values in (QUIET | themes).items():
            path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        self._start(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={self.url.split(':')[-1]}",
                f"--ServerApp.root_dir={self.folder}", f"--IdentityProvider.token={TOKEN}",
                "--LabApp.expose_app_in_browser=True", f"--LabApp.user_settings_dir={settings}",
                f"--LabApp.workspaces_dir={self.scratch / 'workspaces'}",
            ],
            PYTHONPATH=str(ROOT), JUPYTER_CONFIG_DIR=str(self.scratch / "config"),
        )  # fmt: skip
        wait(self._answers, what="JupyterLab")

    def _answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/api?token={TOKEN}", timeout=5).read())
        except OSError:
            return False

    def _start_chromium(self) -> None:
        profile = self.scratch / "profile"
        self._start(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                "--window-size=1200,1000", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            ]
        )  # fmt: skip
        ports = profile / "DevToolsActivePort"
        port = wait(lambda: ports.is_file() and ports.read_text().split(), what="Chromium")[0]
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list"))
        page = next(page for page in pages if page["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], suppress_origin=True, timeout=300)
        self.call("Page.enable")

    def call(self, method: str, **parameters):
        """One command of the DevTools protocol."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while (answer := json.loads(self.socket.recv())).get("id") != self.number:
            if answer.get("method") == "Page.javascriptDialogOpening":  # "leave the page?"
                self.socket.send(
                    json.dumps({"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}})
                )
        assert "error" not in answer, answer
        return answer["result"]

    def js(self, expression: str):
        """The value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, name: str) -> None:
        """Open a notebook and wait for its kernel."""
        self.call("Page.navigate", url=f"{self.url}/lab/tree/{name}?reset&token={TOKEN}")
        self.widget = f"[...jupyterapp.shell.widgets('main')].find(w => w.context?.path === {json.dumps(name)})"
        there = f"!!(window.jupyterapp && {self.widget}?.sessionContext?.session?.kernel)"
        wait(lambda: self.js(there), what=f"{name} in JupyterLab")
        self.js(f"jupyterapp.shell.activateById({self.widget}.id)")
        self.js(f"{self.widget}.sessionContext.ready")

    def execute(self, command: str, wait: bool = True) -> None:
        """One of JupyterLab's own commands."""
        done = "done" if wait else "null"
        self.js(f"(() => {{ const done = jupyterapp.commands.execute('{command}'); return {done} }})()")

    def notebook(self) -> dict:
        """The notebook as it stands in the page, outputs included."""
        return self.js(f"{self.widget}.context.model.toJSON()")

    def shutdown(self) -> None:
        """Stop the kernel of the open notebook."""
        self.js(f"{self.widget}.sessionContext.shutdown()")

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(b64decode(self.call("Page.captureScreenshot")["data"]))
