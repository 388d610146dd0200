"""Files that are either complete or absent: atomic writes, JSON, hashes.

Everything a stage leaves behind goes through here. A write goes to a temporary name in the same folder, is
flushed to the disk, then renamed: whoever sees the final name sees the whole file, also after a crash.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3nb.errors import Refused

JSON_LIMIT = 64 * 2**20  # bytes of a JSON file from elsewhere; the largest index known has some MiB


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the block succeeds, else remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path | str, default: Any = None) -> Any:
    """The JSON value in ``path``, or ``default`` where there is no such file; ``Refused`` where it is no JSON."""
    path = Path(path)
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Refused(f"{path}: no valid JSON ({error}); write it anew or restore it") from None


def json_file(path: Path | str, what: str = "a JSON value") -> Any:
    """The value of a JSON file from elsewhere; ``Refused`` where it is missing, absurdly large or none."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise Refused(f"{path}: wanted {what}, found no ordinary file")
        if path.stat().st_size > JSON_LIMIT:
            raise Refused(f"{path}: {path.stat().st_size:,} bytes of JSON; wanted at most {JSON_LIMIT:,}")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:150] or type(error).__name__
        raise Refused(f"{path}: wanted {what}, found none that can be read ({why})") from None


def json_object(path: Path | str, what: str = "a JSON object") -> dict[str, Any]:
    """The value of a JSON file from elsewhere that must be an object."""
    value = json_file(path, what)
    if not isinstance(value, dict):
        raise Refused(f"{path}: wanted {what}, found a JSON {type(value).__name__}")
    return value


def read_jsonl(path: Path | str) -> list[dict]:
    """The rows of a JSON-lines file; a last line cut off by a crash is left out, a missing file is empty."""
    path = Path(path)
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def shown(path: Path) -> str:
    """A path as the user would type it: relative to here where it lies below."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def move_aside(path: Path) -> Path | None:
    """Rename ``path`` to ``<name>.old-<k>`` and return the new path; None where there is nothing to move."""
    if not path.exists():
        return None
    k = 1
    while (target := path.with_name(f"{path.name}.old-{k}")).exists():
        k += 1
    path.rename(target)
    return target


def folder_bytes(path: Path) -> int:
    """Bytes of all plain files below ``path`` (links are not followed)."""
    return sum(f.lstat().st_size for f in path.rglob("*") if f.is_file() and not f.is_symlink())


def in_locked_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make ``folder`` once, however many processes ask: ``make(temporary)`` fills it, then it is renamed."""
    import filelock

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(str(folder) + ".lock"):
        if not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            make(temporary)
            temporary.rename(folder)
    return folder
