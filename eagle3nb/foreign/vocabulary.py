"""Vocabulary mappings in any form, lists of ids and token counts, turned into ``t2d`` and ``d2t`` of offsets."""

from pathlib import Path
from typing import Any

import torch

from eagle3nb import build_vocab_mapping
from eagle3nb.bridges import reading
from eagle3nb.bridges.opening import mapping_in
from eagle3nb.errors import Refused
from eagle3nb.files import json_file
from eagle3nb.verifier import Verifier

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def import_vocabulary(path: Path, dest: Path, verifier: Verifier, draft_vocab_size: int | None = None) -> str:
    """Write ``t2d``/``d2t`` (and counts) out of a foreign mapping, list of ids or token counts; says what it was."""
    value = _vocabulary_value(path, verifier.vocab_size)
    if isinstance(value, tuple):
        what, ids = value
        return _write_mapping(dest, ids, verifier, f"{path.name}: {what}")
    counts = build_vocab_mapping.load_counts(path, verifier.vocab_size)
    if draft_vocab_size is None:
        raise Refused(f"{path}: token counts; say how many tokens the draft shall have (--draft-vocab-size)")
    t2d, d2t = build_vocab_mapping.build(counts, draft_vocab_size, verifier.vocab_size, verifier.special_token_ids)
    build_vocab_mapping.save(dest, t2d, d2t, counts)
    return f"{path.name}: token counts; {draft_vocab_size:,} tokens chosen"


def _vocabulary_value(path: Path, vocabulary: int) -> Any:
    """(what it is, verifier ids) of a mapping, or the value of a file of counts."""
    if path.is_dir():
        mapping_in(path)  # refuses two forms that disagree
        files = [p for n in ("t2d", "d2t") for s in (".npy", ".pt") if (p := path / f"{n}{s}").is_file()]
        if not files:
            raise Refused(f"{path}: no t2d or d2t in it")
        path = files[0]
    value = json_file(path) if path.suffix == ".json" else reading.tensor_file(path)
    if isinstance(value, dict) and {"t2d", "d2t"} & set(value):
        return _ids_of(value.get("t2d"), value.get("d2t"), path, vocabulary)
    if path.stem in ("t2d", "d2t"):
        other = [path.with_stem(n) for n in ("t2d", "d2t")]
        return _ids_of(*(reading.tensor_file(p) if p.is_file() else None for p in other), path, vocabulary)
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        return _ids_of(value, None, path, vocabulary)
    if isinstance(value, list):
        if not value or not all(type(i) is int and 0 <= i < vocabulary for i in value):
            raise Refused(f"{path}: a list of other things than ids of the verifier, from 0 to {vocabulary - 1}")
        return "a list of verifier ids", torch.tensor(sorted(set(value)))
    return value


def _ids_of(t2d: Any, d2t: Any, path: Path, vocabulary: int) -> tuple[str, torch.Tensor]:
    """Verifier ids of a pair: by t2d, which cannot be misread; by d2t alone only where one reading is possible."""
    for name, value in (("t2d", t2d), ("d2t", d2t)):
        good = value is None or (isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in WHOLE)
        if not good:
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise Refused(f"{path}: {name} is {found}; wanted one row of whole numbers")
    if t2d is not None:
        if len(t2d) != vocabulary:
            raise Refused(
                f"{path}: t2d has {len(t2d):,} entries; the verifier has {vocabulary:,} tokens: of another one?"
            )
        ids = t2d.bool().nonzero().flatten()
        if d2t is None:
            return "t2d", ids
        d2t = d2t.long()
        if len(d2t) != len(ids):
            raise Refused(
                f"{path}: t2d selects {len(ids):,} tokens, d2t has {len(d2t):,} entries: two different builds"
            )
        if torch.equal(ids, d2t + torch.arange(len(d2t))):
            return "t2d and d2t of offsets", ids
        if torch.equal(ids, d2t.sort().values):
            return "t2d and d2t of ids (offsets were wanted; written so)", ids
        raise Refused(f"{path}: t2d and d2t are of different builds; rebuild them from the token counts")
    d2t = d2t.long()
    targets = d2t + torch.arange(len(d2t))
    if not bool((targets[1:] > targets[:-1]).all()):
        raise Refused(f"{path}: d2t alone, whose i + d2t[i] are not rising: no offsets; give t2d beside it")
    if bool((d2t[1:] > d2t[:-1]).all()):
        raise Refused(f"{path}: d2t alone, which can be read as ids and as offsets; give t2d beside it")
    return "d2t of offsets", targets


def _write_mapping(dest: Path, ids: torch.Tensor, verifier: Verifier, what: str) -> str:
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= verifier.vocab_size:
        top = int(ids.max()) if len(ids) else -1
        raise Refused(
            f"{what}: ids up to {top}; wanted ids below {verifier.vocab_size}: a mapping of another verifier?"
        )
    t2d = torch.zeros(verifier.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    build_vocab_mapping.save(dest, t2d, ids - torch.arange(len(ids)), None)
    return f"{what}; {len(ids):,} of {verifier.vocab_size:,} tokens"
