"""The child's side of a job: read it, report progress, leave ``done.json``; one line on stderr for bad input."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_json

PR_SET_PDEATHSIG = 1


class Progress:
    """Writes ``progress.json`` at most twice a second; the parent draws it."""

    def __init__(self, path: Path):
        self.path, self.last, self.state = path, 0.0, {}

    def __call__(self, *, force: bool = False, **state: Any) -> None:
        self.state = state
        now = time.monotonic()
        if force or now - self.last > 0.5:
            self.last = now
            self.flush()

    def flush(self) -> None:
        """Write the last word even if it was too early for it."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state))
        os.replace(temporary, self.path)


def die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies: a killed kernel leaves no engine behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_job(work: Callable[[dict[str, Any], Progress], dict[str, Any]]) -> None:
    """Run ``work(job, progress)`` for the job file named on the command line and write what it returns."""
    die_with_parent()
    main = os.environ.get("RANK", "0") == "0"  # of torchrun's processes one has the word
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, it would be ignored
    path = Path(sys.argv[1])
    job, progress = read_json(path), Progress(path.with_name("progress.json"))
    try:
        result = work(job, progress)
        if main:
            progress.flush()
    except Refused as error:
        sys.exit(f"eagle3nb: {error}")
    except OSError as error:
        if error.errno == 28:  # ENOSPC
            sys.exit(f"eagle3nb: the disk is full ({error.filename or path.parent}); free some space and run again")
        raise
    if main:
        write_json(path.with_name("done.json"), result)
