"""Run a child process and watch it: log to a file, progress to one updating line, peak memory, clean stop.

Whatever loads vLLM or trains runs in a child, so that the kernel survives its crash and the memory comes back.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_json

TAIL_LINES = 20
HEADLESS_SECONDS = 30  # without a screen, one plain line at most this often


class ChildFailed(RuntimeError):
    """A child ended with an error; the message is one line, the log's tail is in ``tail``."""

    def __init__(self, message: str, tail: str):
        super().__init__(message)
        self.tail = tail

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows in place of a traceback: the end of the child's log, then the cause."""
        return [self.tail, f"ChildFailed: {self}"]


class Stopped(KeyboardInterrupt):
    """The user stopped a child; the message says how to go on."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows in place of a traceback."""
        return [f"Stopped: {self}"]


def run(
    module: str,
    job: dict[str, Any],
    folder: Path,
    *,
    launcher: list[str] | None = None,
    on_poll: Callable[[], None] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run ``python -m MODULE folder/job.json`` to its end and return its ``done.json``.

    ``launcher`` replaces ``python`` (torchrun); ``on_poll`` is called about twice a second (live curves);
    ``quiet`` draws no progress line.
    Output goes to ``folder/log.txt``; ``folder/child.json`` gets seconds, peak memory (MiB, summed over the child's
    processes), exit code and signal. Raises `ChildFailed` with the cause in one line, or `Stopped` after an interrupt,
    when the child has ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("done.json", "progress.json", "child.json"):
        (folder / old).unlink(missing_ok=True)
    write_json(folder / "job.json", job)
    log = folder / "log.txt"
    command = [*(launcher or [sys.executable]), "-m", module, str(folder / "job.json")]
    started, peak = time.time(), 0.0
    line = None if quiet else ProgressLine(folder / "progress.json")
    with open(log, "a") as output:
        output.write(f"\n==== {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC  {module}\n")
        output.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=_environment()
        )
    write_json(folder / "child.json", {"pid": process.pid})
    try:
        while process.poll() is None:
            peak = max(peak, _memory_mib(process.pid))
            if line:
                line.draw()
            if on_poll:
                on_poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
    except KeyboardInterrupt:
        _stop(process)
        raise Stopped(f"{module} was interrupted; what is complete is kept: run this again to go on") from None
    finally:
        if process.poll() is None:
            _stop(process)
        code = process.returncode
        record = {"seconds": round(time.time() - started, 2), "peak_rss_mib": round(peak), "exit": code}
        if code and code < 0:
            record["signal"] = signal.Signals(-code).name
        write_json(folder / "child.json", record)
        if line:
            line.close()
    done = read_json(folder / "done.json")
    if code or done is None:
        raise ChildFailed(_cause(module, log, record), tail(log))
    return done | {"child_seconds": record["seconds"], "peak_rss_mib": record["peak_rss_mib"]}


def _environment() -> dict[str, str]:
    """The child finds this very package also when the kernel's working directory is elsewhere."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _memory_mib(pid: int) -> float:
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total / 2**20


def _stop(process: subprocess.Popen, patience: float = 60.0) -> None:
    """Interrupt the child's whole group, give it time to put things away, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    if not log.is_file():
        return ""
    with open(log, "rb") as handle:
        handle.seek(max(0, log.stat().st_size - 200_000))
        return "\n".join(handle.read().decode(errors="replace").splitlines()[-lines:])


def _cause(module: str, log: Path, record: dict[str, Any]) -> str:
    end = tail(log, 200).rpartition("====")[2].splitlines()
    own = [text.removeprefix("eagle3nb: ") for text in end if text.startswith("eagle3nb: ")]
    if own:
        return own[-1]
    how = f"was killed by {record['signal']}" if "signal" in record else f"ended with exit code {record['exit']}"
    hint = "; out of memory?" if record.get("signal") == "SIGKILL" else ""
    errors = [text.strip() for text in end if "Error" in text and not text.startswith(" ")]
    last = f": {errors[-1][:300]}" if errors else ""
    return f"{module} {how}{hint}{last} (log: {log})"


class ProgressLine:
    """One line for a child's ``progress.json``: an updating output in a notebook, plain lines elsewhere."""

    def __init__(self, path: Path):
        self.path, self.last, self.handle, self.started = path, 0.0, None, time.monotonic()
        self.notebook = _in_notebook()

    def draw(self) -> None:
        now = time.monotonic()
        every = 1.0 if self.notebook or sys.stdout.isatty() else HEADLESS_SECONDS
        if now - self.last < every:
            return
        self.last = now
        text = describe(read_progress(self.path), now - self.started)
        if self.notebook:
            from IPython.display import display

            if self.handle is None:
                self.handle = display({"text/plain": text}, raw=True, display_id=True)
            else:
                self.handle.update({"text/plain": text}, raw=True)
        elif sys.stdout.isatty():
            print(f"\r\x1b[K{text}", end="", flush=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.handle is not None or not self.notebook:
            self.last = 0.0
            self.draw()
        if not self.notebook and sys.stdout.isatty():
            print()


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return get_ipython() is not None


def read_progress(path: Path) -> dict[str, Any]:
    """A child's last progress; empty before its first word."""
    with contextlib.suppress(ValueError, OSError):
        return read_json(path, {})
    return {}


def describe(state: dict[str, Any], seconds: float) -> str:
    """One progress line: phase, count, rate, time so far and left."""
    parts = [state.get("phase", "starting")]
    done, total = state.get("done", 0), state.get("total", 0)
    if total:
        parts.append(f"{done}/{total} {state.get('unit', 'samples')}")
    if state.get("tokens"):
        parts.append(f"{state['tokens']:,} tokens")
    if state.get("tokens_per_s"):
        parts.append(f"{state['tokens_per_s']:.0f} tokens/s")
    elif done and state.get("seconds"):
        parts.append(f"{done / state['seconds']:.3g} {state.get('unit', 'samples')}/s")
    parts += [f"{name} {value:.4g}" for name, value in state.get("figures", {}).items()]
    parts.append(f"{duration(seconds)} so far")
    if done and total and done < total and state.get("seconds"):
        parts.append(f"{duration(state['seconds'] / done * (total - done))} left")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def refuse_if_no_module(name: str) -> None:
    """``Refused`` where a package that a child needs is not installed."""
    import importlib.util

    if importlib.util.find_spec(name) is None:
        raise Refused(f"the package {name} is not installed in this environment; run `make setup`")
