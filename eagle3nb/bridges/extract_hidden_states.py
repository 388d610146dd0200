"""The sample store: are these the states of these tokens, at these layers, before the final norm, and whole?"""

import torch

from eagle3nb.bridges.agreement import AGREES, BROKEN
from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.registry import Finding, check
from eagle3nb.samples import CONVENTION, FORMAT

BRIDGE = "extract_hidden_states"
# Share of response tokens that are the verifier's own first choice. Its own greedy answers: SmolLM2 0.974 to 0.997,
# tiny Llama 1.000; random tokens 0.00.
ON_POLICY = 0.9
# Relative distance to the reference forward (float32, transformers). Measured on the right layer: SmolLM2 0.002
# (float32 engine) to 0.016 (bfloat16), tiny Llama 0.002; neighbours 0.02 (middle layers, SmolLM2) to 0.9.
SAME, NOTHING_LIKE_IT = 0.05, 0.6
NEARLY = 1.5  # a layer this much farther than the nearest may still be meant; healthy: SmolLM2 19 times, tiny Llama 100
# Spread of a layer's values over the positions, by their size. Healthy, smallest: SmolLM2 0.92, tiny Llama 0.76; a
# constant layer: 0.
CONSTANT = 1e-6


@check(
    "samples.declared",
    "store.json declares what the tensors mean",
    bridge=BRIDGE,
    needs=("store", "declared"),
    why="sgl-project/sglang#25454: layer ids mean inputs to one tool and outputs to another; undeclared, they "
    "were read wrongly.",
    remedy="write the store with extract_hidden_states, or import it with measured conventions",
)
def declared(a: Artefacts) -> Finding:
    """Format, layer convention and norm state of store.json, and whether the store was finished."""
    info = a.declared
    wanted = {"format": FORMAT, "convention": CONVENTION, "last_layer": "before final norm"}
    wrong = [f"{key} = {info.get(key)!r}" for key, value in wanted.items() if info.get(key) != value]
    if info.get("count") is None:
        wrong.append("count is empty: the extraction was not finished")
    elif info["count"] != a.store.home.count:
        wrong.append(f"count = {info['count']}, but there are {a.store.home.count:,} rows")
    if a.layer_ids is None:
        wrong.append(f"layer_ids = {info.get('layer_ids')!r}")
    return Finding("fail" if wrong else "pass", "; ".join(wrong) or f"layers {a.layer_ids}", f"{FORMAT}; {CONVENTION}")


@check(
    "samples.verifier",
    "The store was made with this verifier",
    bridge=BRIDGE,
    needs=("store", "declared", "verifier"),
    why="NVIDIA/Model-Optimizer#300: states were dumped with another chat template than training used.",
    remedy="give the verifier the store was made with, or extract anew",
)
def verifier(a: Artefacts) -> Finding:
    """Hashes of config, tokenizer and chat template, and the weight files, as the store declares them."""
    stored, given = a.declared.get("verifier") or {}, a.verifier.identity()
    differ = [key.removesuffix("_sha256") for key, value in given.items() if stored.get(key) != value]
    observed = f"differs in {', '.join(differ)}" if differ else "the same"
    return Finding("fail" if differ else "pass", observed, "same config, tokenizer, chat template and weight files")


@check(
    "samples.readable",
    "Every sample file can be read",
    bridge=BRIDGE,
    needs=("store",),
    why="NVIDIA/Model-Optimizer#2080: a killed run left a file cut short at its final name, and resuming "
    "skipped it for good.",
    remedy="delete those files and run extract_hidden_states again: it makes what is missing",
)
def readable(a: Artefacts) -> Finding:
    """Headers of all files against their lengths; links that leave the directory are not followed."""
    cases = a.store.scan.unreadable
    observed = (
        f"{cases.count:,} of {a.store.scan.files:,} files: {cases}" if cases.count else f"{a.store.scan.files:,} files"
    )
    return Finding("fail" if cases.count or not a.store.scan.files else "pass", observed, "whole safetensors files")


@check(
    "samples.complete",
    "Every row has its sample, every sample its row",
    bridge=BRIDGE,
    needs=("store", "headers", "rows"),
    why="vllm-project/speculators#279: samples were told apart by offset, not by request, and pairs got out of step.",
    remedy="run extract_hidden_states again: it makes what is missing",
)
def complete(a: Artefacts) -> Finding:
    """File numbers against the rows of the dataset."""
    cases = a.store.scan.unmatched
    return Finding(
        "fail" if cases.count else "pass", str(cases) or f"{len(a.rows):,} rows and files", "one file per row"
    )


@check(
    "samples.columns",
    "One column per auxiliary layer, and one for the last state",
    bridge=BRIDGE,
    needs=("store", "headers", "layer_ids"),
    why="vllm-project/speculators#313: what stood in the last place was not the state the trainer takes for "
    "its targets.",
    remedy="capture the auxiliary layers and, last, the state before the final norm",
)
def columns(a: Artefacts) -> Finding:
    """Columns of hidden_states against the declared layer ids."""
    ids, found = a.layer_ids, sorted(a.store.scan.columns)
    layers = a.verifier.num_layers if a.verifier else ids[-1]
    expected = f"{len(ids)} columns for layers {ids}"
    if ids[-1] != layers:
        return Finding(
            "fail", f"the last declared layer is {ids[-1]}: the last state (id {layers}) is missing", expected
        )
    if found == [len(ids)]:
        return Finding("pass", f"{found[0]} columns for layers {ids}", expected)
    if found == [len(ids) - 1]:
        why = f"{found[0]} columns, as many as auxiliary layers ({ids[:-1]}): the last state is missing"
        return Finding("fail", why, expected)
    return Finding("fail", f"{' and '.join(map(str, found)) or 'no'} columns", expected)


@check(
    "samples.hidden_size",
    "States are as wide as the verifier",
    bridge=BRIDGE,
    needs=("store", "headers", "verifier"),
    why="verl-project/verl-SpeCo#66: sizes were cut to fit, and neither loss nor accuracy showed it.",
    remedy="give the verifier the store was made with",
)
def hidden_size(a: Artefacts) -> Finding:
    """Last dimension of hidden_states against the verifier's hidden size."""
    found = sorted(a.store.scan.hidden_sizes)
    good = found == [a.verifier.hidden_size]
    return Finding("pass" if good else "fail", ", ".join(map(str, found)) or "none", str(a.verifier.hidden_size))


@check(
    "samples.dtype",
    "States are bfloat16 (or float32)",
    bridge=BRIDGE,
    needs=("store", "headers"),
    why="QwenLM/Qwen3#826: in float16 a bfloat16 model's activations overflowed after its first layer.",
    remedy="store bfloat16: float16 ends at 65504, and the largest activations of such models lie beyond",
)
def dtype(a: Artefacts) -> Finding:
    """Dtype of hidden_states in every header."""
    found = ", ".join(f"{name} in {n:,}" for name, n in a.store.scan.dtypes.most_common()) or "none"
    good = set(a.store.scan.dtypes) <= {"BF16", "F32"} and a.store.scan.dtypes
    return Finding("pass" if good else "fail", found, "BF16 or F32")


@check(
    "samples.length",
    "As many states as tokens",
    bridge=BRIDGE,
    needs=("store", "headers"),
    why="vllm-project/vllm#44485: with prefix caching, states covered only the tokens computed in that pass.",
    remedy="extract with prefix caching off",
)
def length(a: Artefacts) -> Finding:
    """First dimension of hidden_states against token_ids and the row."""
    cases = a.store.scan.lengths
    return Finding(
        "fail" if cases.count else "pass", f"{cases.count:,} samples: {cases}" if cases.count else "all", "equal"
    )


@check(
    "samples.token_ids",
    "Each sample's token ids are its row's",
    bridge=BRIDGE,
    needs=("store", "headers", "rows"),
    why="vllm-project/speculators#279: samples got the states of other requests.",
    remedy="extract those samples anew: they belong to other rows",
)
def token_ids(a: Artefacts) -> Finding:
    """token_ids of every file against input_ids of the row of the same number."""
    cases = a.store.scan.token_ids
    observed = f"{cases.count:,} samples of other tokens: {cases}" if cases.count else "all equal"
    return Finding("fail" if cases.count else "pass", observed, "equal")


@check(
    "samples.vocabulary",
    "All token ids can come from the verifier's tokenizer",
    bridge=BRIDGE,
    needs=("store", "headers", "verifier"),
    why="InternRobotics/PointLLM#46: ids beyond the embedding's rows ended in a device-side assert.",
    remedy="tokenise with the verifier's own tokenizer",
)
def vocabulary(a: Artefacts) -> Finding:
    """Lowest and highest token id against the tokenizer; rows of the embedding beyond it are padding."""
    tokens, rows = len(a.verifier.tokenizer), a.verifier.vocab_size
    low, high = a.store.scan.low, a.store.scan.high
    for ids, _ in a.store.rows or ():
        if len(ids):
            low, high = min(low, int(ids.min())), max(high, int(ids.max()))
    expected = f"0 to {tokens - 1}"
    if low < 0 or high >= rows:
        return Finding("fail", f"{low} to {high}: outside the vocabulary of {rows:,}", expected)
    if high >= tokens:
        return Finding(
            "fail", f"{low} to {high}: a padding row of the embedding; the tokenizer has no such token", expected
        )
    return Finding("pass", f"{low} to {high}", expected)


@check(
    "samples.finite",
    "No NaN, no Inf",
    bridge=BRIDGE,
    needs=("store", "states"),
    why="vllm-project/speculators#615: NaN states came out of the connector, and training went on.",
    remedy="extract those samples anew, in bfloat16 or float32",
)
def finite(a: Artefacts) -> Finding:
    """Values that are not finite: in some samples, or with --deep in all."""
    if a.deep:
        cases, where = a.store.every_byte.broken, f"all {a.store.every_byte.files:,} samples that can be read"
    else:
        from eagle3nb.bridges.store import Cases

        cases, some = Cases(), a.store.some(16)
        for i in some:
            if bad := int((~a.store.sample(i)[0].isfinite()).sum()):
                cases.add(f"hs_{i}: {bad:,} values")
        where = f"{len(some)} of {a.store.scan.files:,} samples"
        if not some:
            return Finding("skip", "no sample that fits its row can be read", "none")
    observed = f"{cases.count:,} samples with NaN or Inf: {cases}" if cases.count else f"none in {where}"
    return Finding("fail" if cases.count else "pass", observed, "none")


@check(
    "samples.constant",
    "No layer is zero or constant",
    bridge=BRIDGE,
    needs=("store", "states"),
    why="vllm-project/vllm#46301: unwritten cache slots were read, the states were zeros, and acceptance was about 0%.",
    remedy="extract anew; look at how the engine hands its states over",
)
def constant(a: Artefacts) -> Finding:
    """Per column of some samples: largest value, and spread over the positions."""
    wrong, some = {}, a.store.some(8)
    for i in some:
        states = a.store.sample(i)[0].float()
        for c in range(states.shape[1]):
            layer = states[:, c]
            if not layer.numel() or not bool(layer.isfinite().all()):
                continue  # no token, or samples.finite says so
            top = float(layer.abs().max())
            if top == 0:
                wrong.setdefault(f"column {c} is all zero", i)
            elif len(layer) > 1 and float((layer - layer[:1]).abs().max()) <= CONSTANT * top:
                wrong.setdefault(f"column {c} is the same at every position", i)
    if not some:
        return Finding("skip", "no sample that fits its row can be read", "none")
    text = "; ".join(f"{why} (hs_{i})" for why, i in wrong.items())
    return Finding("fail" if wrong else "pass", text or f"none in {len(some)} samples", "none")


@check(
    "samples.checksum",
    "Bytes are those that were written",
    bridge=BRIDGE,
    needs=("store", "headers", "checksums", "deep"),
    why="osaurus-ai/vmlx-swift#217: shards shorter than they should be loaded without an error, as zeros or leftovers.",
    remedy="copy or extract those samples anew",
)
def checksum(a: Artefacts) -> Finding:
    """SHA-256 of every sample file against samples.jsonl."""
    found = a.store.every_byte
    parts = [f"{found.changed.count:,} files changed: {found.changed}"] if found.changed.count else []
    parts += [f"{found.unlisted.count:,} files are not listed: {found.unlisted}"] if found.unlisted.count else []
    observed = "; ".join(parts) or f"all {found.files:,} files that can be read"
    return Finding("fail" if parts else "pass", observed, "equal to samples.jsonl")


# ---- meaning -------------------------------------------------------------------------------------------------


@check(
    "samples.target_agreement",
    "The last states predict the next tokens",
    bridge=BRIDGE,
    needs=("store", "states", "verifier"),
    why="vllm-project/speculators#313: targets went to lm_head without the final norm; with it acceptance "
    "rose from 25% to 40%.",
    remedy="extract anew; see samples.last_state, samples.shift and samples.layers for what is wrong",
)
def target_agreement(a: Artefacts) -> Finding:
    """Share of response positions whose next token is argmax(lm_head(final_norm(h))); the mistake that restores it."""
    found = a.agreement
    observed = f"{found.share:.3f} of {found.positions} positions"
    expected = f"{AGREES} and more on the verifier's own greedy answers"
    if not found.positions:
        return Finding("skip", "no response tokens in the samples looked at", expected)
    if found.cause:
        return Finding("fail", f"{observed}; {found.restored:.3f} if {found.cause}", expected)
    if found.share >= AGREES:
        return Finding("pass", observed, expected)
    if _greedy(a):
        verdict = "fail" if found.share < BROKEN else "warn"
        return Finding(verdict, f"{observed}, and no known mistake explains it", expected)
    return Finding(
        "skip", f"{observed}: these answers are not the verifier's own greedy ones, so this proves nothing", expected
    )


def _greedy(a: Artefacts) -> bool:
    """Whether the store declares that the verifier wrote the answers itself, greedily."""
    info = a.declared or {}
    return info.get("responses") == "generate" and info.get("temperature") == 0


@check(
    "samples.last_state",
    "The last column is the final state before the final norm",
    bridge=BRIDGE,
    needs=("store", "states", "verifier"),
    why="vllm-project/speculators#313: states from one library were after the final norm, those from another "
    "before it.",
    remedy="capture the input of the final norm; the trainer applies the norm itself",
)
def last_state(a: Artefacts) -> Finding:
    """What the last column is, by a reference forward; without one, the reading that restores agreement."""
    expected = "the final state before the final norm"
    imported = (a.declared or {}).get("imported") or {}
    if a.reference is not None and not str(imported.get("size_of_last_state")).startswith("lost"):
        ref = a.reference
        _, candidate, distance = _best(ref, len(ref.over_samples[1]) - 1)
        observed = f"{ref.name(candidate)} (distance {distance:.3f})"
        if distance > NOTHING_LIKE_IT:
            return Finding(
                "skip", f"no layer is near ({distance:.2f}): see samples.other_sample, samples.shift", expected
            )
        return Finding("pass" if candidate == ref.num_layers else "fail", observed, expected)
    found = a.agreement
    if found.cause_id in ("last_state", "column"):
        return Finding("fail", f"agreement {found.share:.2f}, but {found.restored:.2f} if {found.cause}", expected)
    if found.share >= AGREES:
        return Finding("pass", f"agreement {found.share:.3f} with the final norm applied once", expected)
    return Finding("skip", f"agreement {found.share:.3f}; {a.why_missing('reference')}", expected)


@check(
    "samples.layers",
    "Each column is the layer it is declared to be",
    bridge=BRIDGE,
    needs=("store", "states", "verifier", "layer_ids", "reference"),
    why="sgl-project/sglang#25454: the auxiliary layers were captured one off, at a cost of about 0.10 in "
    "acceptance length.",
    remedy="capture the input of layer k for id k; ids of tools that count outputs are one less for the same state",
)
def layers(a: Artefacts) -> Finding:
    """Every auxiliary column against the input of every layer in a reference forward: the nearest one is what it is."""
    ref, wrong, right = a.reference, [], []
    columns = ref.over_samples.shape[1]
    if columns != len(a.layer_ids):
        return Finding(
            "skip", f"{columns} columns for layers {a.layer_ids}: see samples.columns", str(a.layer_ids[:-1])
        )
    for c, declared_id in enumerate(a.layer_ids[:-1]):
        if not 0 <= declared_id <= ref.num_layers:
            wrong.append(f"column {c} is declared as layer {declared_id}, which cannot be")
            continue
        shift, candidate, distance = _best(ref, c)
        there = float(ref.over_samples[shift, c, declared_id])
        if distance > NOTHING_LIKE_IT:
            return Finding(
                "skip", f"column {c} is near no layer ({distance:.2f}): see samples.other_sample", str(a.layer_ids)
            )
        if candidate != declared_id and not (there <= SAME and there < NEARLY * distance):
            off = candidate - declared_id
            far = "one layer" if abs(off) == 1 else f"{abs(off)} layers"
            how = f"captured {far} too {'late' if off > 0 else 'early'}"
            if distance > SAME:
                how = "nearest, but not near: states of other weights?"
            wrong.append(
                f"column {c}, declared layer {declared_id}, is {ref.name(candidate)} "
                f"(distance {distance:.3f}, to {declared_id}: {there:.3f}): {how}"
            )
        right.append(f"{declared_id}: {there:.4f}")
    expected = f"nearest layers {a.layer_ids[:-1]}"
    return Finding("fail" if wrong else "pass", "; ".join(wrong) or f"distances {', '.join(right)}", expected)


@check(
    "samples.shift",
    "State p belongs to token p",
    bridge=BRIDGE,
    needs=("store", "states", "verifier"),
    why="verl-project/verl-SpeCo#18: states and tokens were paired one position off.",
    remedy="store the state at the position of the token that went in, without a shift: the trainer shifts itself",
)
def shift(a: Artefacts) -> Finding:
    """Distance to a reference forward at shifts of -1, 0 and +1; without one, the shift that restores agreement."""
    if a.reference is not None:
        table = a.reference.over_samples.min(-1).values  # (shifts, columns)
        best = int(table.median(1).values.argmin())
        if float(table[best].median()) > NOTHING_LIKE_IT:
            return Finding(
                "skip", "no shift brings the states near the reference: see samples.other_sample", "no shift"
            )
        observed = {0: "states are one position late", 1: "no shift", 2: "states are one position early"}[best]
        return Finding("pass" if best == 1 else "fail", observed, "no shift")
    found = a.agreement
    if found.cause_id == "shift":
        return Finding("fail", f"agreement {found.share:.2f}, but {found.restored:.2f} if {found.cause}", "no shift")
    if found.share >= AGREES:
        return Finding("pass", f"agreement {found.share:.3f} without a shift", "no shift")
    return Finding("skip", f"agreement {found.share:.3f}; {a.why_missing('reference')}", "no shift")


@check(
    "samples.other_sample",
    "States are those of the sample's own tokens",
    bridge=BRIDGE,
    needs=("store", "states", "verifier"),
    why="vllm-project/speculators#279: with batches, states were cut out by offset and went to other samples.",
    remedy="extract those samples anew",
)
def other_sample(a: Artefacts) -> Finding:
    """Samples whose states predict another row's tokens, or are like no layer of a reference forward on their own."""
    wrong = [f"hs_{i} holds the states of row {k}" for i, k in a.agreement.other_samples]
    if a.reference is not None:
        nearest = a.reference.distance.amin(dim=(1, 3)).median(-1).values  # per sample, over shifts and candidates
        known = {i for i, _ in a.agreement.other_samples}
        for i, distance in zip(a.reference.samples, nearest.tolist(), strict=True):
            if distance > NOTHING_LIKE_IT and i not in known:
                wrong.append(f"hs_{i} is like no layer of its tokens (distance {distance:.2f})")
    if wrong:
        return Finding("fail", "; ".join(wrong[:3]), "their own")
    if a.reference is None and a.agreement.share < ON_POLICY:
        return Finding("skip", f"agreement {a.agreement.share:.3f} and {a.why_missing('reference')}", "their own")
    return Finding("pass", f"{len(a.agreement.by_sample)} samples looked at", "their own")


@check(
    "samples.growth",
    "The residual stream grows with depth",
    bridge=BRIDGE,
    needs=("store", "states", "layer_ids"),
    why="vllm-project/speculators#313: a normed last state is smaller than the layers before it, which needs "
    "no verifier to see.",
    remedy="look at samples.last_state and samples.layers; columns may stand in the wrong order",
)
def growth(a: Artefacts) -> Finding:
    """Median RMS per column, first position left out: what can be known of the layers without the verifier."""
    some = [a.store.sample(i)[0][1:].float() for i in a.store.some(8)]
    some = [s for s in some if len(s)]
    if not some:
        return Finding("skip", "no sample of two tokens", "rising")
    rms = torch.stack([s.pow(2).mean(-1).sqrt().median(0).values for s in some]).median(0).values.tolist()
    observed = " < ".join(f"{value:.3g}" for value in rms)
    if rms == sorted(rms):
        return Finding("pass", observed, "rising from column to column")
    observed = ", ".join(f"{value:.3g}" for value in rms)
    # With a reference the columns are known for what they are, and some models do shrink: a hint, no proof.
    return Finding("skip" if a.reference is not None else "warn", observed, "rising from column to column")


@check(
    "data.on_policy",
    "The answers are what the verifier would write",
    bridge=BRIDGE,
    needs=("store", "states", "verifier", "rows"),
    why="sgl-project/SpecForge#192: answers regenerated by the verifier gave longer acceptance than the ones "
    "in the data.",
    remedy="set prepare_data.responses to generate: a draft learns to foresee its verifier, not somebody else's "
    "answers",
)
def on_policy(a: Artefacts) -> Finding:
    """Share of response tokens that are the verifier's own first choice, by its stored last states."""
    found = a.agreement
    share = found.restored if found.cause else found.share
    if _greedy(a):
        told = f"the verifier wrote them itself, greedily (store.json); {share:.3f} of {found.positions} tokens"
        return Finding("pass", told, f"{ON_POLICY} and more")
    if not found.positions:
        return Finding("skip", "no response tokens in the samples looked at", f"{ON_POLICY} and more")
    observed = f"{share:.3f} of {found.positions} response tokens"
    return Finding("pass" if share >= ON_POLICY else "warn", observed, f"{ON_POLICY} and more")


def _best(ref: object, column: int) -> tuple[int, int, float]:
    """(shift, candidate, distance) nearest to a column over all shifts."""
    table = ref.over_samples[:, column]
    k = int(table.argmin())
    return k // table.shape[1], k % table.shape[1], float(table.flatten()[k])
