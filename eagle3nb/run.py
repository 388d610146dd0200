"""The runner: every stage's notebook through papermill, in order, with a record of what happened in ``run.json``.

A stage whose fingerprint and output still hold is ``cached``. A failed stage stops the run; running the same directory
again goes on from there. Papermill's own metadata is not trusted (a killed kernel marks its cells completed there).
"""

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from eagle3nb import __version__, child, provenance, report, stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, shown, write_json
from eagle3nb.params import STAGES, Params, apply_override, load, validate

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
HEADLINE = (
    "acceptance_length", "acceptance_by_position", "baseline_tokens_per_s", "spec_tokens_per_s", "speedup",
    "speedup_rounds", "lossless", "identical_outputs", "prompts", "speed_prompts", "num_speculative_tokens",
    "acceptance_by_prompt",
)  # fmt: skip


class StageFailed(RuntimeError):
    """A stage ended with an error; the message is one line."""


def run(
    params_file: str | None,
    *,
    overrides: list[str] = (),
    run_dir: str | None = None,
    runs_dir: str = "runs",
    first: str | None = None,
    last: str | None = None,
    say: Any = print,
) -> Path:
    """Run the stages from ``first`` to ``last`` (all by default); returns the run directory.

    Raises `Refused` before anything starts when the input is at fault, `StageFailed` when a stage ends with an error.
    """
    params = _params(params_file, overrides, run_dir)
    names = _chosen(first, last)
    missing = [stage.label(n) for n in names if not notebook(n).is_file()]
    if missing:
        raise Refused(f"no notebook {NOTEBOOKS / missing[0]}.ipynb: run from a checkout, installed with `make setup`")
    folder = Path(run_dir) if run_dir else _new_folder(Path(runs_dir), params.name)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with _only_one(folder):
        write_json(folder / "params.json", params.model_dump())
        record = Record(folder, params, params_file, overrides)
        report.start_notes(folder)
        list_here = folder.parent == Path(runs_dir).resolve()  # not in whatever folder --run-dir lies
        report.refresh(folder.parent, create=list_here)
        say(f"run directory {shown(folder)}")
        try:
            for name in names:
                _run_stage(name, params, record, say)
        except KeyboardInterrupt:
            record.close("interrupted")
            raise KeyboardInterrupt(going_on(folder)) from None
        except StageFailed:
            record.close("failed")
            raise
        else:
            record.close("done")
        finally:
            report.write(folder)
            report.refresh(folder.parent, create=list_here)
    return folder


def notebook(name: str) -> Path:
    """The notebook of a stage."""
    return NOTEBOOKS / f"{stage.label(name)}.ipynb"


def going_on(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"eagle3nb run --run-dir {shlex.quote(shown(folder))}"


def _params(params_file: str | None, overrides: list[str], run_dir: str | None) -> Params:
    if params_file:
        return load(params_file, overrides)
    return of_run_dir(run_dir, overrides)


def of_run_dir(run_dir: str | None, overrides: list[str] = ()) -> Params:
    """The parameters that a run directory was begun with."""
    found = read_json(Path(run_dir) / "params.json") if run_dir else None
    if found is None:
        raise Refused("give a params file, or --run-dir of a run to go on with")
    for override in overrides:
        apply_override(found, override)
    return validate(Params, found, f"{run_dir}/params.json")


def _chosen(first: str | None, last: str | None) -> list[str]:
    import difflib

    names = list(STAGES)
    for option, name in (("--from", first), ("--until", last)):
        if name is not None and name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.3)
            hint = f"nearest: {near[0]}" if near else f"stages: {', '.join(names)}"
            raise Refused(f"{option} {name}: unknown stage; {hint}")
    start, end = names.index(first) if first else 0, names.index(last) if last else len(names) - 1
    if start > end:
        raise Refused(f"--from {first} comes after --until {last}")
    return names[start : end + 1]


def _new_folder(runs_dir: Path, name: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    k, path = 1, runs_dir / f"{name}-{stamp}"
    while path.exists():
        k += 1
        path = runs_dir / f"{name}-{stamp}-{k}"
    return path


@contextlib.contextmanager
def _only_one(folder: Path) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Refused(f"another run is at work in {shown(folder)}; wait for it or use another --run-dir") from None
    try:
        yield
    finally:
        lock.release()


class Record:
    """``run.json``: what has been done, kept current."""

    def __init__(self, folder: Path, params: Params, params_file: str | None, overrides: list[str]):
        self.folder, self.started = folder, time.time()
        old = read_json(folder / "run.json", {})
        stages = {entry["name"]: entry for entry in old.get("stages", [])}
        # Without a params file the run goes on with its own parameters, earlier overrides among them.
        earlier = [] if params_file else [o for o in old.get("overrides", []) if o not in overrides]
        command = shlex.join(["eagle3nb", *sys.argv[1:]])
        self.value: dict[str, Any] = {
            "run_id": folder.name,
            "name": params.name,
            "params_file": params_file or old.get("params_file"),
            "overrides": [*earlier, *overrides],
            "command": command,
            "commands": [*old.get("commands", []), command],
            "made_with": provenance.record(),
            "version": __version__,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "status": "running",
            "stages": [stages.get(name, {"name": name, "status": "pending"}) for name in STAGES],
            "headline": {},
        }
        self.write()

    def write(self) -> None:
        write_json(self.folder / "run.json", self.value)

    def stage(self, name: str, **fields: Any) -> None:
        """Set the fields of one stage; what was known of an earlier attempt is forgotten."""
        k = list(STAGES).index(name)
        self.value["stages"][k] = {"name": name, **fields}
        self.write()

    def outdate(self, name: str) -> None:
        """What later stages left was made from what ``name`` is about to replace."""
        for entry in self.value["stages"][list(STAGES).index(name) + 1 :]:
            entry["status"] = "pending"

    def close(self, status: str) -> None:
        done = all(entry["status"] in stage.FINISHED for entry in self.value["stages"])
        self.value["status"] = ("done" if done else "incomplete") if status == "done" else status
        self.value["seconds"] = round(time.time() - self.started, 1)
        figures = read_json(stage.folder(self.folder, "evaluate") / "result.json", {}) if done else {}
        self.value["headline"] = {key: figures[key] for key in HEADLINE if key in figures}
        self.write()


def _run_stage(name: str, params: Params, record: Record, say: Any) -> None:
    fields = getattr(params, name).model_copy(update={"run_dir": str(record.folder)})
    folder = stage.folder(record.folder, name)
    position = f"{list(STAGES).index(name) + 1}/{len(STAGES)} {name}"
    if name != "preflight" and stage.is_done(name, fields):
        old = next(entry for entry in record.value["stages"] if entry["name"] == name)
        record.stage(name, **{k: v for k, v in old.items() if k not in ("name", "error")} | {"status": "cached"})
        say(f"{position}: cached")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old_file in ("child.json", "progress.json"):
        (folder / old_file).unlink(missing_ok=True)
    started = time.time()
    if name != "preflight":  # always run, and what it finds is mostly the same
        record.outdate(name)
    record.stage(name, status="running", started=datetime.now(UTC).isoformat(timespec="seconds"))
    error, status = None, "done"
    with Watcher(folder, position, say):
        try:
            _execute(notebook(name), folder / f"{stage.label(name)}.ipynb", fields.model_dump())
        except KeyboardInterrupt:
            _wait_for_child(folder)
            status, error = "interrupted", "interrupted"
        except StageFailed as failure:
            status, error = "failed", str(failure)
    if status == "done" and not (folder / "result.json").is_file():
        status, error = "failed", "the notebook ended without result.json"
    seconds = round(time.time() - started, 1)
    of_child = read_json(folder / "child.json", {})
    commit = record.value["made_with"].get("commit")
    record.stage(
        name, status=status, seconds=seconds, commit=commit, peak_rss_mib=of_child.get("peak_rss_mib"),
        child_seconds=of_child.get("seconds"), exit=of_child.get("signal", of_child.get("exit")), error=error,
    )  # fmt: skip
    if (folder / f"{stage.label(name)}.ipynb").is_file():
        report.export_notebook(folder / f"{stage.label(name)}.ipynb")
    if status == "interrupted":
        raise KeyboardInterrupt
    if status == "failed":
        where = f"notebook {shown(folder)}/{stage.label(name)}.ipynb"
        raise StageFailed(f"stage {name} failed: {error} ({where}; go on with: {going_on(record.folder)})")
    say(f"{position}: done in {child.duration(seconds)}")


def _execute(source: Path, target: Path, parameters: dict[str, Any]) -> None:
    """Run one notebook with papermill, in the user's working directory."""
    import logging

    import nbclient.exceptions
    import papermill
    from traitlets.config import Config

    logging.getLogger("papermill").setLevel(logging.ERROR)
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    # Sockets in the file system: nobody else on the machine can read or drive the kernel.
    with (
        tempfile.TemporaryDirectory(prefix="eagle3nb-", ignore_cleanup_errors=True) as sockets,
        _interrupts_for_the_kernel(),
    ):
        config = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        try:
            papermill.execute_notebook(
                str(source), str(target), parameters=parameters, kernel_name="python3", progress_bar=False,
                log_output=False, cwd=str(Path.cwd()), start_timeout=120, config=config,
            )  # fmt: skip
        except papermill.PapermillExecutionError as error:
            if error.ename in ("KeyboardInterrupt", "Stopped"):
                raise KeyboardInterrupt from error
            prefix = "" if error.ename in ("Refused", "ChildFailed") else f"{error.ename}: "
            raise StageFailed(prefix + " ".join(str(error.evalue).split())) from error
        except nbclient.exceptions.DeadKernelError as error:
            raise StageFailed("the notebook's kernel died (out of memory, or killed)") from error


@contextlib.contextmanager
def _interrupts_for_the_kernel() -> Any:
    """The first Ctrl-C goes to the notebook's kernel, whose cell then ends in order; a second one stops at once.

    A kernel is a session of its own, which the terminal does not reach.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        kernels = []
        with contextlib.suppress(psutil.Error):
            kernels = [p.pid for p in psutil.Process().children() if "ipykernel_launcher" in p.cmdline()]
        if not kernels:
            raise KeyboardInterrupt
        for pid in kernels:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGINT)

    signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_child(folder: Path, patience: float = 60.0) -> None:
    """After an interrupt the child puts its state away; it must be gone before the run directory is free again."""
    pid = (read_json(folder / "child.json") or {}).get("pid")
    if pid:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(patience)


class Watcher:
    """Draws the child's progress while papermill is at work: one updating line, or a plain one every 30 s."""

    def __init__(self, folder: Path, label: str, say: Any):
        self.folder, self.label, self.say = folder, label, say
        self.tty = sys.stdout.isatty() and say is print
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Watcher":
        self.started = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        self.thread.join()
        if self.tty:
            print("\r\x1b[K", end="", flush=True)

    def _work(self) -> None:
        wait = 1.0 if self.tty else child.HEADLESS_SECONDS
        while not self.stop.wait(wait):
            state = child.read_progress(self.folder / "progress.json")
            text = f"{self.label}: {child.describe(state, time.monotonic() - self.started)}"
            if self.tty:
                width = os.get_terminal_size().columns
                print(f"\r\x1b[K{text[: width - 1]}", end="", flush=True)
            else:
                self.say(text)
