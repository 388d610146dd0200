"""What a run is made with: the checkout's commit and its uncommitted changes, and every installed package."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def record() -> dict[str, Any]:
    """``commit`` (None outside a checkout), ``changed`` files of it, ``python`` and ``packages`` with versions."""
    inside = _git("rev-parse", "--show-toplevel")
    checkout = inside is not None and Path(inside.strip()).resolve() == ROOT.resolve()
    return {
        "commit": (_git("rev-parse", "HEAD") or "").strip() or None if checkout else None,
        "changed": [line[3:] for line in (_git("status", "--porcelain") or "").splitlines()] if checkout else [],
        "python": platform.python_version(),
        "packages": dict(
            sorted(
                {
                    d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]
                }.items(),
                key=lambda item: item[0].lower(),
            )
        ),
    }


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout if found.returncode == 0 else None
