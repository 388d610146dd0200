"""What other tools left: samples, vocabulary mappings and drafts, turned into this workbook's own forms.

Conventions are measured, or asked for, never taken from the format. The source is only read.
"""

from pathlib import Path

from eagle3nb.bridges import reading
from eagle3nb.errors import Refused
from eagle3nb.foreign.drafts import import_draft
from eagle3nb.foreign.samples import Convention, Source, format_of, import_samples, load, measure, source
from eagle3nb.foreign.vocabulary import import_vocabulary

__all__ = [
    "Convention", "Source", "import_draft", "import_samples", "import_vocabulary", "kind_of", "measure", "source",
]  # fmt: skip


def kind_of(path: Path) -> str:
    """What there is to import: ``samples``, ``vocabulary`` or ``draft``."""
    if path.is_dir():
        if any((path / f"{n}{s}").is_file() for n in ("t2d", "d2t") for s in (".npy", ".pt")):
            return "vocabulary"
        return "draft" if (path / "config.json").is_file() else "samples"
    if path.suffix == ".json":
        return "draft" if isinstance(reading.json_file(path), dict) else "vocabulary"
    if path.suffix in (".npy", ".pt") and (path.suffix == ".npy" or format_of(load(path)) is None):
        return "vocabulary"
    raise Refused(f"{path}: wanted a directory of samples, a mapping, token counts, a list of ids or a draft config")
