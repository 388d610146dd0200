"""What ``notebooks/explore_vocab_mapping.ipynb`` shows: what a draft vocabulary covers, and what another size would.

Nothing is extracted again: the counts of the training responses are on disk, and the held-out responses are those that
the evaluation served (or those given in the held-out data).
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from eagle3nb import build_vocab_mapping, prepare_data, stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json
from eagle3nb.params import Count, NotebookParams
from eagle3nb.samples import Store
from eagle3nb.text import quoted
from eagle3nb.verifier import Verifier


class ExploreVocabMapping(NotebookParams):
    """Parameters of the notebook."""

    sizes: list[Count] = Field([512, 1024, 2048, 4096, 8192, 16384, 32000], description="draft vocabulary sizes to try")
    other: str | None = Field(
        None, description="second mapping: a run, or a folder with t2d.npy or t2d.pt (None: this one at half its size)"
    )
    rows: Count = Field(10000, description="training rows counted by kind, at most")


@dataclass
class Vocabulary:
    """A run's mapping and what it is measured on. ``counts`` are ``{token id: count}``, ``t2d`` bool [V]."""

    verifier: Verifier
    t2d: torch.Tensor
    counts: dict[int, int]
    kept: list[int]
    training: dict[str, Counter]  # by kind
    heldout: dict[str, Counter]  # by kind; empty where no held-out response is known

    @property
    def special(self) -> list[int]:
        return self.verifier.special_token_ids

    @property
    def size(self) -> int:
        return int(self.t2d.sum())

    @property
    def heldout_counts(self) -> Counter:
        return sum(self.heldout.values(), Counter())


def load(settings: ExploreVocabMapping) -> Vocabulary:
    """Read a run's mapping, its counts, and its responses by kind of prompt."""
    run_dir, verifier = settings.run_dir, stage.verifier(settings.run_dir)
    kept = stage.result(run_dir, "build_vocab_mapping")["kept_special"]
    counts = torch.load(stage.folder(run_dir, "build_vocab_mapping") / "token_freq.pt", weights_only=True)
    rows, heldout_rows = prepare_data.load(run_dir)
    store = Store(stage.folder(run_dir, "extract_hidden_states") / "store")
    training: dict[str, Counter] = {}
    for kind, tokens, _ in zip(rows["kind"], store.responses(), range(settings.rows), strict=False):
        training.setdefault(kind, Counter()).update(tokens.tolist())
    served = read_json(stage.folder(run_dir, "evaluate") / "responses.json")
    answers = (
        [(row["kind"], row["without_draft"]) for row in served]
        if served
        else [(row["kind"], row["input_ids"][row["prompt_tokens"] :]) for row in heldout_rows]
    )
    heldout: dict[str, Counter] = {}
    for kind, tokens in answers:
        if tokens:
            heldout.setdefault(kind, Counter()).update(tokens)
    return Vocabulary(verifier, read_t2d(run_dir, verifier.vocab_size), counts, kept, training, heldout)


def read_t2d(place: Path | str, vocab_size: int) -> torch.Tensor:
    """``t2d`` [V] of a run or of a folder; ``Refused`` where there is none, or one of another vocabulary."""
    place = Path(place).expanduser()
    inside = stage.folder(place, "build_vocab_mapping")
    folder = inside if inside.is_dir() else place
    if (folder / "t2d.npy").is_file():
        t2d = torch.from_numpy(np.load(folder / "t2d.npy"))
    elif (folder / "t2d.pt").is_file():
        t2d = torch.load(folder / "t2d.pt", weights_only=True)
    else:
        raise Refused(f"{folder}: wanted t2d.npy or t2d.pt in it; give a run or a folder with a vocabulary mapping")
    if t2d.dim() != 1 or len(t2d) != vocab_size:
        raise Refused(
            f"{folder}: t2d has shape {list(t2d.shape)}, the verifier has {vocab_size} tokens (another one's?)"
        )
    return t2d.bool()


def coverage(counts: dict[int, int], t2d: torch.Tensor) -> float | None:
    """Share of the counted tokens that ``t2d`` holds; None where nothing was counted."""
    total = sum(counts.values())
    return sum(n for token, n in counts.items() if t2d[token]) / total if total else None


def resized(vocabulary: Vocabulary, size: int) -> torch.Tensor:
    """``t2d`` as the stage would build it at another size from the same counts; special tokens are always kept."""
    kept = vocabulary.kept if len(vocabulary.kept) <= size else vocabulary.special
    return build_vocab_mapping.build(vocabulary.counts, size, vocabulary.verifier.vocab_size, kept)[0]


def what_if(vocabulary: Vocabulary, sizes: list[int]) -> list[tuple[Any, ...]]:
    """(size, coverage of training and of held-out responses, filler ids, MiB of the draft's bf16 lm_head)."""
    heldout, known = vocabulary.heldout_counts, vocabulary.counts.keys() | set(vocabulary.kept)
    out = []
    for size in sorted({*sizes, vocabulary.size}):
        if not len(vocabulary.special) <= size <= vocabulary.verifier.vocab_size:
            continue
        t2d = resized(vocabulary, size)
        filler = sum(token not in known for token in t2d.nonzero().flatten().tolist())
        mib = size * vocabulary.verifier.hidden_size * 2 / 2**20
        out.append((size, coverage(vocabulary.counts, t2d), coverage(heldout, t2d), filler, mib))
    return out


def left_out(vocabulary: Vocabulary, count: int = 20) -> list[tuple[Any, ...]]:
    """(id, token, count in training, count in held-out) of tokens outside the draft vocabulary, most frequent first."""
    heldout = vocabulary.heldout_counts
    outside = {t: (vocabulary.counts.get(t, 0), heldout[t]) for t in vocabulary.counts.keys() | heldout.keys()}
    outside = {token: seen for token, seen in outside.items() if not vocabulary.t2d[token]}
    ordered = sorted(outside, key=lambda token: (-sum(outside[token]), token))[:count]
    return [(token, _text(vocabulary, token), *outside[token]) for token in ordered]


def by_kind(vocabulary: Vocabulary) -> list[tuple[Any, ...]]:
    """(kind, response tokens and coverage in training, the same held out, its most frequent tokens left out)."""
    out = []
    for kind in sorted(vocabulary.training.keys() | vocabulary.heldout.keys()):
        training, heldout = vocabulary.training.get(kind, Counter()), vocabulary.heldout.get(kind, Counter())
        missing = Counter({t: n for t, n in (training + heldout).items() if not vocabulary.t2d[t]})
        names = " ".join(f"{_text(vocabulary, t)}×{n}" for t, n in missing.most_common(5))
        figures = (
            training.total(), coverage(training, vocabulary.t2d), heldout.total(), coverage(heldout, vocabulary.t2d)
        )  # fmt: skip
        out.append((kind, *figures, names))
    return out


def special(vocabulary: Vocabulary) -> list[tuple[Any, ...]]:
    """(id, token, in the draft vocabulary, count in training, count held out) of tokens the verifier can emit."""
    heldout = vocabulary.heldout_counts
    return [
        (t, _text(vocabulary, t), bool(vocabulary.t2d[t]), vocabulary.counts.get(t, 0), heldout[t])
        for t in vocabulary.verifier.special_token_ids
    ]


def second(vocabulary: Vocabulary, settings: ExploreVocabMapping) -> tuple[str, torch.Tensor]:
    """(name, t2d) of the mapping to compare with."""
    if settings.other:
        return settings.other, read_t2d(settings.other, vocabulary.verifier.vocab_size)
    half = max(vocabulary.size // 2, len(vocabulary.special))
    return f"half the size ({half})", resized(vocabulary, half)


def compare(vocabulary: Vocabulary, other: torch.Tensor) -> list[tuple[Any, ...]]:
    """(tokens, how many, share of the training tokens, of the held-out ones, the most frequent) of each part."""
    mine, heldout = vocabulary.t2d, vocabulary.heldout_counts
    parts = {"in both": mine & other, "only in this one": mine & ~other, "only in the other": other & ~mine}
    out = []
    for name, part in parts.items():
        ids = part.nonzero().flatten().tolist()
        frequent = sorted(ids, key=lambda t: -(vocabulary.counts.get(t, 0) + heldout[t]))[:6]
        names = " ".join(_text(vocabulary, t) for t in frequent)
        out.append((name, len(ids), coverage(vocabulary.counts, part), coverage(heldout, part), names))
    return out


def _text(vocabulary: Vocabulary, token: int) -> str:
    return quoted(vocabulary.verifier.tokenizer, token)
