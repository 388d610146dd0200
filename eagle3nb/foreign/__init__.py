"""What other tools left: samples, vocabulary mappings and drafts, turned into this workbook's own forms.

Conventions are measured, or asked for, never taken from the format. The source is only read.
"""

from pathlib import Path

from eagle3nb.errors import Refused
from eagle3nb.files import json_file
from eagle3nb.foreign.drafts import import_draft
from eagle3nb.foreign.samples import Convention, Source, format_of, import_samples, load, measure, source
from eagle3nb.foreign.vocabulary import import_vocabulary

__all__ = [
    "Convention", "Source", "check_destination", "import_draft", "import_samples", "import_vocabulary", "kind_of",
    "measure", "source",
]  # fmt: skip


def check_destination(path: Path, dest: Path, kind: str) -> None:
    """`Refused` where writing to ``dest`` would touch the source or what somebody else left there."""
    here, there = path.resolve(), dest.resolve()
    if there in (here, here.parent) or (path.is_dir() and there.is_relative_to(here)):
        raise Refused(f"{dest}: lies in the source {path}, which is only read; give another directory")
    if dest.exists() and not dest.is_dir():
        raise Refused(f"{dest}: is a file; give a new directory")
    goes_on = kind == "samples" and (dest / "store.json").is_file()
    if dest.is_dir() and any(dest.iterdir()) and not goes_on:
        raise Refused(f"{dest}: is not empty; give a new directory")


def kind_of(path: Path) -> str:
    """What there is to import: ``samples``, ``vocabulary`` or ``draft``."""
    if path.is_dir():
        if any((path / f"{n}{s}").is_file() for n in ("t2d", "d2t") for s in (".npy", ".pt")):
            return "vocabulary"
        return "draft" if (path / "config.json").is_file() else "samples"
    if path.suffix == ".json":
        return "draft" if isinstance(json_file(path), dict) else "vocabulary"
    if path.suffix in (".npy", ".pt") and (path.suffix == ".npy" or format_of(load(path)) is None):
        return "vocabulary"
    raise Refused(f"{path}: wanted a directory of samples, a mapping, token counts, a list of ids or a draft config")
