"""Chat data as it is found: files, ``datasets`` directories, hub ids, and the prompts that come with the package.

A record is one conversation: ``messages`` (``[{"role", "content"}]``), ``conversations`` (ShareGPT's ``[{"from",
"value"}]``), or pre-tokenised ``input_ids`` and ``loss_mask``; ``id`` and ``kind`` where it has them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3nb.errors import Refused

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def local_path(source: str) -> Path:
    """Where a source lies if it is a local one (that it exists is not said); ``Refused`` for an unknown built-in."""
    if not source.startswith("builtin:"):
        return Path(source).expanduser()
    file = Path(__file__).parent / "data" / f"{source.removeprefix('builtin:')}.jsonl"
    if not file.is_file():
        known = ", ".join(f"builtin:{f.stem}" for f in sorted(file.parent.glob("*.jsonl")))
        raise Refused(f"source {source}: unknown; known: {known}")
    return file


def read_source(source: str) -> Iterator[dict[str, Any]]:
    """The records of a source: ``builtin:NAME``, a JSONL/JSON/parquet file, a directory, or a hub id[@split]."""
    import datasets

    path = local_path(source)
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    try:
        if path.is_file():
            if path.stat().st_size == 0:
                return iter(())
            if path.suffix not in kinds:
                raise Refused(f"source {source}: {path.suffix or 'no'} suffix; wanted .jsonl, .json or .parquet")
            loaded = datasets.load_dataset(kinds[path.suffix], data_files=str(path), split="train", streaming=True)
        elif (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path), split="train", streaming=True)
        elif source.startswith((".", "/", "~")) or path.suffix in kinds:
            raise Refused(f"source {source}: no such file or directory")
        else:
            name, _, split = source.partition("@")
            loaded = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Refused:
        raise
    except Exception as error:  # datasets raises many types; the user needs the one line
        raise _unreadable(source, error) from error
    return _records(loaded, source)


def _unreadable(source: str, error: Exception) -> Refused:
    return Refused(f"source {source}: cannot be read ({' '.join(str(error).split())[:200]})")


def _records(loaded: Any, source: str) -> Iterator[dict[str, Any]]:
    try:
        yield from loaded
    except Exception as error:
        raise _unreadable(source, error) from error


def turns_of(record: dict[str, Any]) -> list[dict[str, str]] | None:
    """The turns of a record as ``{role, content}``; None for a pre-tokenised one."""
    if record.get("messages"):
        return [{"role": turn["role"], "content": turn["content"]} for turn in record["messages"]]
    if record.get("conversations"):
        turns = record["conversations"]
        return [{"role": SHAREGPT_ROLES.get(t["from"], t["from"]), "content": t["value"]} for t in turns]
    return None
