"""Stage 03: which of the verifier's tokens the draft can propose.

Out (``03_build_vocab_mapping/``), ``V`` the verifier's vocabulary, ``D`` the draft's:

==========================  ==================================================================================
``t2d.npy``, ``t2d.pt``     bool [V]: the token is in the draft vocabulary
``d2t.npy``, ``d2t.pt``     int64 [D]: OFFSETS; draft token i is verifier token ``i + d2t[i]`` (not ``d2t[i]``)
``token_freq.pt``           ``{token id: count}`` of the response tokens (loss mask 1)
==========================  ==================================================================================
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3nb import stage
from eagle3nb.bridges import reading
from eagle3nb.bridges.artefacts import counts_of
from eagle3nb.errors import Refused
from eagle3nb.files import atomic_path, sha256_file
from eagle3nb.params import BuildVocabMapping
from eagle3nb.samples import Store


def run(params: BuildVocabMapping) -> dict[str, Any]:
    """Run the stage; returns (and writes) its ``result.json``."""
    with stage.running("build_vocab_mapping", params) as here:
        verifier = stage.verifier(params.run_dir)
        store = Store(stage.folder(params.run_dir, "extract_hidden_states") / "store")
        counts = load_counts(params.counts, verifier.vocab_size) if params.counts else count_responses(store)
        kept = list(dict.fromkeys([*verifier.special_token_ids, *params.keep_token_ids]))
        t2d, d2t = build(counts, params.draft_vocab_size, verifier.vocab_size, kept)
        save(here.folder, t2d, d2t, counts)
        total = sum(counts.values())
        return here.finish(
            draft_vocab_size=params.draft_vocab_size,
            verifier_vocab_size=verifier.vocab_size,
            counted_from=params.counts or "store",
            store_fingerprint=store.fingerprint(),
            response_tokens=total,
            distinct_tokens=len(counts),
            kept_special=kept,
            filler=int(
                sum(1 for token in t2d.nonzero().flatten().tolist() if token not in counts and token not in kept)
            ),
            coverage=sum(n for token, n in counts.items() if t2d[token]) / total,
            coverage_curve=coverage_curve(counts),
            sha256={name: sha256_file(here.folder / name) for name in ("t2d.npy", "d2t.npy")},
        )


def count_responses(store: Store) -> dict[int, int]:
    """``{token id: count}`` over the response tokens of a store."""
    counts: Counter[int] = Counter()
    for tokens in store.responses():
        counts.update(tokens.tolist())
    return dict(sorted(counts.items()))


def load_counts(path: Path | str, vocab_size: int) -> dict[int, int]:
    """Token counts made elsewhere: a ``.pt`` file with a dict ``{id: count}`` or a 1-D tensor of counts by id."""
    path = Path(path)
    if not path.is_file():
        raise Refused(f"build_vocab_mapping.counts: no such file {path}")
    try:
        found = reading.torch_file(path)
    except Refused as error:
        why = str(error).removeprefix(f"{path}: ")
        raise Refused(f"{path}: not a file of token counts that loads safely ({why})") from error
    counts = counts_of(found, path)
    if not counts:
        raise Refused(f"{path}: all counts are zero")
    if min(counts) < 0 or max(counts) >= vocab_size or min(counts.values()) < 0:
        raise Refused(
            f"{path}: token ids from {min(counts)} to {max(counts)}, smallest count {min(counts.values())}; wanted ids "
            f"below the verifier's vocabulary of {vocab_size} and no negative count (counts of another verifier?)"
        )
    return counts


def build(
    counts: dict[int, int], draft_vocab_size: int, vocab_size: int, kept: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``t2d`` bool [V] and ``d2t`` int64 [D] by speculators' own function, with ``kept`` tokens always in.

    The function takes the most frequent tokens and, when fewer were seen than asked for, fills up with the lowest
    ids. The kept tokens are put in front by their count, which changes nothing else.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    if draft_vocab_size > vocab_size:
        raise Refused(
            f"build_vocab_mapping.draft_vocab_size = {draft_vocab_size}: the verifier has only {vocab_size} tokens"
        )
    outside = [token for token in kept if not 0 <= token < vocab_size]
    if outside or len(kept) > draft_vocab_size:
        raise Refused(
            f"build_vocab_mapping: {len(kept)} tokens must be kept (ids {kept[:5]}...), of which {len(outside)} lie "
            f"outside the vocabulary of {vocab_size}; draft_vocab_size = {draft_vocab_size} must hold them all"
        )
    first = max(counts.values(), default=0) + 1
    wanted = counts | dict.fromkeys(kept, first)
    d2t, t2d = build_vocab_mappings_from_distribution(wanted, draft_vocab_size, vocab_size)
    return t2d, d2t


def coverage_curve(counts: dict[int, int]) -> list[tuple[int, float]]:
    """(size, share of response tokens covered by the ``size`` most frequent ones), sizes doubling."""
    ordered = np.cumsum(sorted(counts.values(), reverse=True))
    sizes = [2**k for k in range(4, 20) if 2**k < len(ordered)] + [len(ordered)]
    return [(size, float(ordered[size - 1] / ordered[-1])) for size in sizes]


def save(folder: Path, t2d: torch.Tensor, d2t: torch.Tensor, counts: dict[int, int] | None) -> None:
    """Write both tensors as ``.npy`` and ``.pt``, and the counts where they are known."""
    for name, tensor in (("t2d", t2d), ("d2t", d2t)):
        with atomic_path(folder / f"{name}.npy") as temporary, open(temporary, "wb") as handle:
            np.save(handle, tensor.numpy())
        with atomic_path(folder / f"{name}.pt") as temporary:
            torch.save(tensor, temporary)
    if counts is not None:
        with atomic_path(folder / "token_freq.pt") as temporary:
            torch.save(counts, temporary)
