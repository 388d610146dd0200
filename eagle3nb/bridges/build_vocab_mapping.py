"""The vocabulary mapping: is it one pair, of this verifier, of these data, with what the draft must be able to say?"""

import numpy as np
import torch

from eagle3nb.bridges.artefacts import Artefacts, count_responses
from eagle3nb.bridges.registry import Finding, check

BRIDGE = "build_vocab_mapping"
# Share of the response tokens of unseen rows (every tenth) that the draft vocabulary holds; each draft position loses
# the rest. Measured: SmolLM2 0.83 at 2048 draft tokens, 0.88 at 4096, 0.92 at 8192; tiny Llama 0.93 at 512 of 1024. A
# mapping of other data or of the lowest ids: below 0.5.
COVERS, HARDLY = 0.75, 0.6
# Share of the draft tokens that were never seen. Measured: SmolLM2 at 4096 none, at 8192 0.21 (no better draft); tiny
# Llama 0.03. Below a tenth they cost less time than one run differs from the next.
FILLER = 0.1


@check(
    "vocab.form",
    "t2d is bool [V], d2t int64 [D]",
    bridge=BRIDGE,
    needs=("mapping",),
    why="SafeAILab/EAGLE#248: t2d selected 1746 tokens where the draft's vocabulary had 32000.",
    remedy="build the mapping anew (build_vocab_mapping); never edit one half",
)
def form(a: Artefacts) -> Finding:
    """Dtypes, dimensions and lengths of both tensors."""
    t2d, d2t, wrong = a.mapping.t2d, a.mapping.d2t, []
    for name, tensor, wanted in (("t2d", t2d, torch.bool), ("d2t", d2t, torch.int64)):
        if tensor is None:
            wrong.append(f"no {name}")
        elif tensor.dim() != 1 or tensor.dtype != wanted:
            wrong.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
    vocabulary = a.verifier.vocab_size if a.verifier else None
    if t2d is not None and vocabulary and t2d.numel() != vocabulary:
        wrong.append(f"t2d has {t2d.numel()} entries, the verifier {vocabulary} tokens: a mapping of another verifier")
    expected = f"t2d bool [{vocabulary or 'V'}], d2t int64 [D]"
    return Finding(
        "fail" if wrong else "pass", "; ".join(wrong) or f"t2d [{t2d.numel()}], d2t [{d2t.numel()}]", expected
    )


@check(
    "vocab.offsets",
    "d2t holds offsets, not ids",
    bridge=BRIDGE,
    needs=("mapping",),
    why="sgl-project/SpecForge#272: it had to be asked why d2t does not hold ids; whoever writes ids there drafts "
    "other tokens.",
    remedy="write d2t[i] = id - i: the verifier token of draft token i is i + d2t[i]",
)
def offsets(a: Artefacts) -> Finding:
    """Whether d2t read as ids fits t2d, or rises at every step like ids (offsets of sorted ids may stand still)."""
    t2d, d2t = a.mapping.t2d, a.mapping.d2t
    expected = "i + d2t[i] are the verifier tokens, in rising order"
    if d2t is None or d2t.numel() < 2 or d2t.is_floating_point():
        return Finding("skip", "no d2t to look at", expected)
    d2t = d2t.flatten().long()
    ids = torch.arange(d2t.numel())
    chosen = t2d.flatten().bool().nonzero().flatten() if t2d is not None else None
    if chosen is not None and len(chosen) == len(d2t) and torch.equal(ids + d2t, chosen):
        return Finding("pass", f"offsets from {int(d2t.min())} to {int(d2t.max())}", expected)
    if torch.equal(d2t, ids):
        return Finding("skip", "d2t is 0, 1, 2, ...: see vocab.arange", expected)
    if chosen is not None and len(chosen) == len(d2t) and torch.equal(d2t, chosen):
        return Finding("fail", "d2t holds the ids that t2d selects, not their offsets", expected)
    if bool((d2t[1:] > d2t[:-1]).all()) and int(d2t[0]) >= 0:
        return Finding(
            "fail",
            f"d2t rises at every step, from {int(d2t[0])} to {int(d2t[-1])}: these are ids, not offsets",
            expected,
        )
    return Finding("pass", f"offsets from {int(d2t.min())} to {int(d2t.max())}", expected)


@check(
    "vocab.arange",
    "d2t is not 0, 1, 2, ...",
    bridge=BRIDGE,
    needs=("mapping",),
    why="verl-project/verl-SpeCo#67: d2t was 0, 1, 2, ... by default, where servers read offsets: draft id i meant "
    "verifier id 2i.",
    remedy="write d2t[i] = id - i; the identity is d2t = 0, 0, 0, ...",
)
def arange(a: Artefacts) -> Finding:
    """Whether d2t[i] = i: meant as the identity, and read as twice that."""
    d2t = a.mapping.d2t
    if d2t is None or d2t.numel() < 2 or d2t.is_floating_point():
        return Finding("skip", "no d2t to look at", "offsets")
    if torch.equal(d2t.flatten().long(), torch.arange(d2t.numel())):
        return Finding("fail", "d2t is 0, 1, 2, ...: read as offsets, draft token i means verifier token 2i", "offsets")
    return Finding("pass", "no", "offsets")


@check(
    "vocab.pair",
    "t2d and d2t are of one build",
    bridge=BRIDGE,
    needs=("mapping",),
    why="SafeAILab/EAGLE#248: the two halves of a mapping did not fit together, and neither did the distributions.",
    remedy="build both anew from the same counts; speculators reads t2d in training, vLLM only d2t",
)
def pair(a: Artefacts) -> Finding:
    """nonzero(t2d) == arange + d2t."""
    t2d, d2t = a.mapping.t2d, a.mapping.d2t
    expected = "t2d selects exactly the tokens i + d2t[i]"
    if t2d is None or d2t is None:
        return Finding("skip", f"no {'t2d' if t2d is None else 'd2t'}", expected)
    chosen, targets = t2d.flatten().bool().nonzero().flatten(), a.mapping.targets
    if len(chosen) != len(targets):
        return Finding("fail", f"t2d selects {len(chosen):,} tokens, d2t has {len(targets):,} entries", expected)
    if torch.equal(chosen, targets):
        return Finding("pass", f"{len(chosen):,} tokens", expected)
    if torch.equal(chosen, d2t.flatten().long()):
        return Finding("pass", "the same tokens, but d2t holds them as ids: see vocab.offsets", expected)
    if torch.equal(d2t.flatten().long(), torch.arange(len(d2t))):
        return Finding("skip", "d2t is no mapping: see vocab.arange", expected)
    both = len(set(chosen.tolist()) & set(targets.tolist()))
    return Finding("fail", f"{both:,} of {len(chosen):,} tokens are in both: two different builds", expected)


@check(
    "vocab.range",
    "All draft tokens are different verifier tokens",
    bridge=BRIDGE,
    needs=("mapping", "verifier"),
    why="verl-project/verl-SpeCo#67: ids taken for offsets pointed beyond the verifier's vocabulary.",
    remedy="build the mapping anew for this verifier",
)
def in_range(a: Artefacts) -> Finding:
    """Lowest and highest verifier token a draft token stands for, and whether two stand for the same."""
    targets, vocabulary = a.mapping.targets, a.verifier.vocab_size
    outside = int(((targets < 0) | (targets >= vocabulary)).sum())
    twice = len(targets) - len(targets.unique())
    observed = f"{int(targets.min())} to {int(targets.max())}" if len(targets) else "no token"
    expected = f"0 to {vocabulary - 1}, each once"
    if outside and a.mapping.d2t is not None and _ids_not_offsets(a):
        return Finding("skip", f"{outside:,} beyond the vocabulary, as d2t holds ids: see vocab.offsets", expected)
    if outside:
        return Finding("fail", f"{observed}: {outside:,} tokens beyond the vocabulary of {vocabulary:,}", expected)
    if twice:
        return Finding("fail", f"{twice:,} draft tokens stand for a token that another one stands for", expected)
    return Finding("pass" if len(targets) else "fail", observed, expected)


def _ids_not_offsets(a: Artefacts) -> bool:
    return "fail" in (offsets(a).verdict, arange(a).verdict)


@check(
    "vocab.special",
    "The draft can propose the end of a turn",
    bridge=BRIDGE,
    needs=("mapping", "verifier"),
    why="without it every draft misses at the end of a turn, and a served draft never proposes to stop (seen "
    "in review, no public report).",
    remedy="keep the verifier's special tokens (build_vocab_mapping does)",
)
def special(a: Artefacts) -> Finding:
    """End-of-turn tokens of the verifier, and special tokens that its answers hold, in the draft vocabulary."""
    if _two_builds(a):
        return Finding("skip", "t2d and d2t do not fit together: see vocab.pair", "one mapping")
    known = set(_chosen(a).tolist())
    needed = set(a.verifier.eos_token_ids)
    if a.rows is not None:
        seen = a.response_counts
        needed |= {t for t in a.verifier.special_token_ids if t < len(seen) and seen[t]}
    missing = sorted(needed - known)
    names = ", ".join(f"{t} {a.verifier.tokenizer.decode([t])!r}" for t in missing[:5])
    return Finding(
        "fail" if missing else "pass", f"missing: {names}" if missing else f"{len(needed)} there", "all there"
    )


@check(
    "vocab.filler",
    "Draft tokens were seen in responses",
    bridge=BRIDGE,
    needs=("mapping", "verifier", "counts"),
    why="verl-project/verl-SpeCo#66: without counts the draft vocabulary silently became the lowest ids.",
    remedy="lower build_vocab_mapping.draft_vocab_size to the tokens that were seen, or count more data",
)
def filler(a: Artefacts) -> Finding:
    """Draft tokens with a count of zero that are no special tokens: the lowest ids, filled up, they only cost time."""
    if _two_builds(a):
        return Finding("skip", "t2d and d2t do not fit together: see vocab.pair", "one mapping")
    special_ids, chosen = _always_kept(a), _chosen(a).tolist()
    empty = [t for t in chosen if not a.counts.get(t) and t not in special_ids]
    left_out = sum(1 for t in a.counts.keys() - set(chosen) if 0 <= t < a.verifier.vocab_size)
    if not empty:
        return Finding("pass", f"none of {len(chosen):,}", "none")
    observed = f"{len(empty):,} of {len(chosen):,} were never seen"
    if left_out:
        text = f"{observed}, though {left_out:,} that were are left out: it was built from other counts"
        return Finding("fail", text, "none")
    verdict = "warn" if len(empty) > FILLER * len(chosen) else "pass"
    return Finding(verdict, f"{observed}: only {len(a.counts):,} different tokens were", f"at most {FILLER:.0%}")


@check(
    "vocab.frequent",
    "The most frequent response tokens are in",
    bridge=BRIDGE,
    needs=("mapping", "verifier", "rows"),
    why="MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark#43: a draft vocabulary ranked on another corpus made "
    "Spanish drafts so poor that it was rolled back.",
    remedy="build the mapping from the responses it will be trained on",
)
def frequent(a: Artefacts) -> Finding:
    """Coverage of the response tokens against the best that as many tokens could cover, special ones among them."""
    if _two_builds(a):
        return Finding("skip", "t2d and d2t do not fit together: see vocab.pair", "one mapping")
    counts = torch.from_numpy(a.response_counts)
    chosen = _chosen(a)
    inside = chosen[(chosen >= 0) & (chosen < len(counts))].unique()
    got, total = int(counts[inside].sum()), max(1, int(counts.sum()))
    # Special tokens that are always kept take the place of as many others: of 0.05 where there are only 128 in all.
    kept = torch.tensor(sorted(_always_kept(a) & set(inside.tolist())), dtype=torch.long)
    others = counts.clone()
    others[kept] = 0
    best = int(counts[kept].sum() + others.sort(descending=True).values[: len(chosen) - len(kept)].sum())
    observed = f"{got / total:.3f} of {total:,} response tokens"
    good = got >= best - 0.02 * total
    return Finding("pass" if good else "fail", observed, f"{best / total:.3f}, what the most frequent ones would cover")


@check(
    "vocab.coverage",
    "Unseen responses are covered too",
    bridge=BRIDGE,
    needs=("mapping", "verifier", "rows"),
    why="MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark#43: tokens missing from a draft vocabulary are missed "
    "by every draft.",
    remedy="raise build_vocab_mapping.draft_vocab_size, or train on more data of that kind",
)
def coverage(a: Artefacts) -> Finding:
    """Every tenth row taken as unseen: its share covered by as many of the others' most frequent tokens."""
    n, size = len(a.rows), len(_chosen(a))
    if n < 20:
        return Finding("skip", f"{n} rows are too few to hold some out", f"{COVERS:.0%} and more")
    unseen = count_responses(a.rows, a.verifier.vocab_size, range(0, n, 10))
    seen = a.response_counts - unseen
    top = np.argsort(-seen, kind="stable")[:size]
    top = top[seen[top] > 0]
    share = unseen[top].sum() / max(1, unseen.sum())
    observed = f"{share:.3f} of the response tokens of {len(range(0, n, 10))} rows"
    verdict = "pass" if share >= COVERS else "warn" if share >= HARDLY else "fail"
    return Finding(verdict, observed, f"{COVERS:.0%} and more")


@check(
    "vocab.source",
    "The tokens were counted in this store",
    bridge=BRIDGE,
    needs=("counts", "rows", "verifier"),
    why="vllm-project/speculators#1081: mappings left in the data folder were picked up by later runs of other data.",
    remedy="run build_vocab_mapping again; counts from elsewhere belong in build_vocab_mapping.counts",
)
def source(a: Artefacts) -> Finding:
    """The counts beside the mapping against a recount of the store, and the store's fingerprint in its record."""
    result = a.mapping_result or {}
    expected = "counts of this store's responses"
    if result.get("counted_from", "store") != "store":
        return Finding(
            "warn",
            f"counts from elsewhere: {result['counted_from']}",
            expected,
            "see vocab.frequent for whether they fit",
        )
    now = {int(t): int(a.response_counts[t]) for t in np.flatnonzero(a.response_counts)}
    if now != a.counts:
        total = sum(now.values())
        return Finding(
            "fail", f"{sum(a.counts.values()):,} tokens were counted, the store has {total:,}: other data", expected
        )
    declared = a.store.declared if a.store else None
    if declared and result.get("store_fingerprint"):
        from eagle3nb.samples import Store

        if Store(a.store.folder).fingerprint() != result["store_fingerprint"]:
            return Finding("fail", "the same counts, but the store has changed since", expected)
    return Finding("pass", f"{sum(now.values()):,} tokens, as counted", expected)


@check(
    "vocab.counts",
    "Token counts are counts of this verifier's tokens",
    bridge=BRIDGE,
    needs=("counts", "verifier"),
    why="a tensor of counts where a table was wanted, or of another vocabulary, was taken without a word by "
    "older pipelines.",
    remedy="count again with the verifier's tokenizer",
)
def counts(a: Artefacts) -> Finding:
    """Ids and counts: none negative, none beyond the vocabulary, some above zero."""
    ids, vocabulary = a.counts.keys(), a.verifier.vocab_size
    expected = f"ids from 0 to {vocabulary - 1}, positive counts"
    if not ids:
        return Finding("fail", "all counts are zero", expected)
    observed = f"{len(ids):,} ids from {min(ids)} to {max(ids)}, {sum(a.counts.values()):,} tokens"
    good = min(ids) >= 0 and max(ids) < vocabulary and min(a.counts.values()) > 0
    return Finding("pass" if good else "fail", observed, expected)


def _always_kept(a: Artefacts) -> set[int]:
    """Special tokens of the verifier, and what the stage was told to keep."""
    return set(a.verifier.special_token_ids) | set((a.mapping_result or {}).get("kept_special") or [])


def _two_builds(a: Artefacts) -> bool:
    return pair(a).verdict == "fail"


def _chosen(a: Artefacts) -> torch.Tensor:
    """Verifier tokens in the draft vocabulary: by t2d where it is there, as the trainer takes it."""
    if a.mapping.t2d is not None and a.mapping.t2d.numel() == a.verifier.vocab_size:
        return a.mapping.t2d.flatten().bool().nonzero().flatten()
    return a.mapping.targets
