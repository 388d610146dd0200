"""The data: what is trained on, what is held out, and where the loss mask lies on it.

The mask checks run wherever there are responses: on given ones before the extraction, on generated ones after it.
"""

from functools import lru_cache

import numpy as np

from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.registry import Finding, check
from eagle3nb.bridges.store import Cases

MASK = ("prepare_data", "extract_hidden_states")
# Share of the responses without an end of turn. Generated answers may well be cut (SmolLM2 at 128 new tokens 0.55 to
# 0.62, tiny Llama at 24: 0.9 and more), so only given ones are judged: a third was reported as broken (data.truncated).
CUT_WARN, CUT_FAIL = 0.25, 0.75


# ---- data ----------------------------------------------------------------------------------------------------


@check(
    "data.duplicates",
    "No row stands twice",
    bridge="prepare_data",
    needs=("rows",),
    why="huggingface/datasets#4261: every split of a public dataset held duplicates, some of them across splits.",
    remedy="drop the duplicates (prepare_data does)",
)
def duplicates(a: Artefacts) -> Finding:
    """Rows whose token ids are those of an earlier row."""
    seen, cases = set(), Cases()
    for i, (ids, _) in enumerate(a.rows):
        key = hash(ids.tobytes())
        if key in seen:
            cases.add(f"row {i}")
        seen.add(key)
    if cases.count:
        return Finding("fail", f"{cases.count:,} of {len(a.rows):,} rows stand there already: {cases}", "none")
    return Finding("pass", f"{len(a.rows):,} different rows", "none twice")


@check(
    "data.heldout_overlap",
    "No held-out prompt is trained on",
    bridge="prepare_data",
    needs=("rows", "heldout"),
    why="thunlp/UltraChat#18: a usual training corpus for drafts holds questions of benchmarks that drafts "
    "are measured on.",
    remedy="remove those rows from the training data, or hold out others: the acceptance would be flattered",
)
def heldout_overlap(a: Artefacts) -> Finding:
    """Training rows that begin with the tokens of a held-out prompt."""
    prompts = [a.heldout.ids(i)[: a.heldout.value("prompt_tokens", i)].tobytes() for i in range(len(a.heldout))]
    lengths, known = {len(p) for p in prompts}, set(prompts)
    cases = Cases()
    for i, (ids, _) in enumerate(a.rows):
        data = ids.tobytes()
        if any(data[:n] in known for n in lengths if n <= len(data)):
            cases.add(f"row {i}")
    if cases.count:
        return Finding("fail", f"{cases.count:,} training rows begin with a held-out prompt: {cases}", "none")
    return Finding("pass", f"none of {len(prompts)} held-out prompts", "none")


@check(
    "data.truncated",
    "Few responses are cut off",
    bridge=MASK,
    needs=("answered", "verifier"),
    why="vllm-project/speculators#835: a third of the rows were cut at the token limit, and the report said none was.",
    remedy="raise prepare_data.seq_len (or max_new_tokens): a draft that never sees an end of turn does not learn it",
)
def truncated(a: Artefacts) -> Finding:
    """Share of rows whose last token is a response token but no end of turn."""
    ends = np.array(a.verifier.eos_token_ids)
    cut = sum(1 for ids, mask in a.answered if len(ids) and mask[-1] == 1 and ids[-1] not in ends)
    share, generated = cut / max(1, len(a.answered)), (a.declared or {}).get("responses") == "generate"
    generated = generated or "imported" in (a.declared or {})  # then nobody knows
    observed = f"{share:.0%} of {len(a.answered):,} rows" + (" (generated, cut at max_new_tokens)" if generated else "")
    if share > CUT_FAIL and not generated:
        return Finding("fail", observed, f"at most {CUT_FAIL:.0%}")
    if share > CUT_WARN and not generated:
        return Finding("warn", observed, f"at most {CUT_WARN:.0%}")
    if share == 1 and len(a.answered) > 20:
        return Finding("warn", observed + ": no end of turn in any of them", "some that end")
    return Finding("pass", observed, "known; generated answers may be cut")


# ---- loss mask ----------------------------------------------------------------------------------------------


@check(
    "mask.values",
    "The loss mask is 0 or 1, one value per token",
    bridge=MASK,
    needs=("answered",),
    why="sgl-project/SpecForge#885: ids, targets and mask went through different shifts and no longer "
    "belonged together.",
    remedy="build the mask anew from the chat template",
)
def values(a: Artefacts) -> Finding:
    """Values other than 0 and 1, and masks of another length than their tokens."""
    cases = Cases()
    for i, (ids, mask) in enumerate(a.answered):
        if len(ids) != len(mask):
            cases.add(f"row {i}: {len(mask)} mask values for {len(ids)} tokens")
        elif len(mask) and not np.isin(mask, (0, 1)).all():
            cases.add(f"row {i}: values {mask.min()} to {mask.max()}")
    return Finding(
        "fail" if cases.count else "pass", str(cases) or f"{len(a.answered):,} rows", "0 and 1, as many as tokens"
    )


@check(
    "mask.all_ones",
    "Prompts carry no loss",
    bridge=MASK,
    needs=("answered",),
    why="karpathy/nanochat#582: a rewrite lost the mask, and prompts and special tokens were trained on.",
    remedy="build the mask anew from the chat template",
)
def all_ones(a: Artefacts) -> Finding:
    """Rows whose mask is 1 at every token, the prompt's included."""
    cases = Cases()
    for i, (_, mask) in enumerate(a.answered):
        if len(mask) and (mask == 1).all():
            cases.add(f"row {i}")
    if cases.count:
        return Finding("fail", f"the mask of {cases.count:,} rows is 1 throughout: {cases}", "0 on the prompt")
    return Finding("pass", "none", "no row")


@check(
    "mask.all_zeros",
    "Every row has response tokens",
    bridge=MASK,
    needs=("answered",),
    why="marin-community/marin#7237: templates without marks for the assistant's turn gave masks of zeros, "
    "and nothing was trained.",
    remedy="build the mask anew from the chat template; drop rows without a response",
)
def all_zeros(a: Artefacts) -> Finding:
    """Rows whose mask is 0 at every token."""
    cases = Cases()
    for i, (_, mask) in enumerate(a.answered):
        if not (mask == 1).any():
            cases.add(f"row {i}")
    if cases.count:
        return Finding(
            "fail", f"the mask of {cases.count:,} of {len(a.answered):,} rows is 0 throughout: {cases}", "none"
        )
    return Finding("pass", "none", "no row")


@check(
    "mask.start",
    "The mask begins right after what opens the assistant's turn",
    bridge=MASK,
    needs=("answered", "verifier"),
    why="huggingface/trl#1184: a template's mark was tokenised differently at the start of a conversation, and masks "
    "began in the wrong place.",
    remedy="build the mask anew from the chat template, as prepare_data does",
)
def start(a: Artefacts) -> Finding:
    """The tokens before each place where the mask turns from 0 to 1, against the template's generation prompt."""
    return _begins(a, "after its first tokens")


@check(
    "mask.shift",
    "The mask is not shifted by a token",
    bridge=MASK,
    needs=("answered", "verifier"),
    why="sgl-project/SpecForge#885: inputs were shifted by one and the mask was not, so the first response "
    "token had no loss.",
    remedy="store mask and tokens position by position, without a shift: the trainer shifts both itself",
)
def mask_shift(a: Artefacts) -> Finding:
    """Masks that begin one token before or after the place right behind the generation prompt."""
    return _begins(a, "one token early", "one token late")


@check(
    "mask.user_turn",
    "The user's words carry no loss",
    bridge=MASK,
    needs=("answered", "verifier"),
    why="huggingface/transformers#47326: a span's end was taken for none, and later turns of the user were marked as "
    "the assistant's.",
    remedy="build the mask anew from the chat template: only what the assistant wrote carries loss",
)
def user_turn(a: Artefacts) -> Finding:
    """Masks that begin before the assistant's turn, in the user's."""
    return _begins(a, "before the assistant's turn, in the user's")


def _begins(a: Artefacts, *faults: str) -> Finding:
    """Where masks begin, against the places right after the generation prompt; only ``faults`` count."""
    opener, places, found = _misplaced(a)
    wrong = {why: cases for why, cases in found.items() if why in faults}
    expected = f"right after {a.verifier.tokenizer.decode(opener)!r}"
    if wrong:
        text = "; ".join(f"begins {why}: {cases.count:,} of {places:,} ({cases})" for why, cases in wrong.items())
        return Finding("fail", text, expected)
    return Finding("pass", f"all {places:,}", expected)


@lru_cache(maxsize=1)  # three checks ask for it, one after the other
def _misplaced(a: Artefacts) -> tuple[list[int], int, dict[str, Cases]]:
    """The generation prompt, how many masked stretches there are, and those that do not begin behind it, by how."""
    opener, places, wrong = a.template.generation_prompt(), 0, {}
    for i, (ids, mask) in enumerate(a.answered):
        if not _plain(ids, mask):
            continue
        good = _after(ids, np.array(opener))
        for p in _rises(mask):
            places += 1
            if p in good:
                continue
            early, late = p + 1 in good, p - 1 in good
            later = any(g > p for g in good)
            text = (
                "one token early" if early else "one token late" if late
                else "before the assistant's turn, in the user's" if later else "after its first tokens"
            )  # fmt: skip
            wrong.setdefault(text, Cases()).add(f"row {i} at token {p}")
    return opener, places, wrong


@check(
    "mask.end",
    "The mask ends with the end-of-turn token",
    bridge=MASK,
    needs=("answered", "verifier"),
    why="huggingface/trl#5988: the end-of-turn token lay outside the assistant's mask, and the model never "
    "learned to stop.",
    remedy="build the mask anew: the end-of-turn token carries loss, what the template writes after it does not",
)
def end(a: Artefacts) -> Finding:
    """The last token of each masked stretch: an end of turn, or the end of a row that was cut off."""
    ends, opener = np.array(a.verifier.eos_token_ids), np.array(a.template.generation_prompt())
    before, after, places = Cases(), Cases(), 0
    for i, (ids, mask) in enumerate(a.answered):
        if not _plain(ids, mask):
            continue
        begins = _after(ids, opener)
        for first, last in _stretches(mask):
            if not {first - 1, first, first + 1} & begins:
                continue  # it does not begin where it should: mask.start or mask.user_turn says so
            places += 1
            inside = np.isin(ids[first:last], ends)  # without the last token
            if inside.any():
                after.add(f"row {i}: {last - first - int(inside.argmax())} tokens")
            elif ids[last] not in ends and last + 1 < len(ids):
                before.add(f"row {i}: {'one token' if ids[last + 1] in ends else 'some tokens'}")
    expected = "at an end-of-turn token, or where the row is cut off"
    if before.count or after.count:
        parts = [f"ends before it in {before.count:,} of {places:,} ({before})"] if before.count else []
        parts += [f"ends after it in {after.count:,} of {places:,} ({after})"] if after.count else []
        return Finding("fail", "; ".join(parts), expected)
    return Finding("pass", f"all {places:,}", expected)


@check(
    "mask.template",
    "Rows open as the recorded chat template and system prompt do",
    bridge=MASK,
    needs=("rows", "verifier"),
    why="sgl-project/SpecForge#296: the template was rendered in one mode for training and in another where "
    "the answers were made.",
    remedy="prepare the data with the chat template and system prompt that will be served",
)
def template(a: Artefacts) -> Finding:
    """The first tokens of every row against what the template writes before the first user's words."""
    opening = np.array(a.template.opening())
    own = ((a.prepared or {}).get("counts") or {}).get("rows with a system prompt of their own", 0)
    cases = Cases()
    for i, (ids, _) in enumerate(a.rows):
        if not np.array_equal(ids[: len(opening)], opening):
            cases.add(f"row {i} opens with {a.verifier.tokenizer.decode(ids[: max(8, len(opening))].tolist())!r}"[:160])
    text = a.verifier.tokenizer.decode(opening.tolist())
    expected = f"{text!r}" + (f", but for {own} rows with a system prompt of their own" if own else "")
    if cases.count > own:
        return Finding("fail", f"{cases.count:,} of {len(a.rows):,} rows open otherwise: {cases}", expected)
    return Finding("pass", f"all {len(a.rows):,} rows", expected)


def _plain(ids: np.ndarray, mask: np.ndarray) -> bool:
    """Whether a mask has both 0 and 1 and nothing else, one per token; where not, other checks say so."""
    return len(ids) == len(mask) > 0 and bool(np.isin(mask, (0, 1)).all()) and not (mask == mask[0]).all()


def _rises(mask: np.ndarray) -> np.ndarray:
    """Positions where the mask turns from 0 to 1, the first token included."""
    return np.flatnonzero(np.diff(mask, prepend=0) == 1)


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, last) of every masked stretch."""
    falls = np.flatnonzero(np.diff(mask, append=0) == -1)
    return list(zip(_rises(mask).tolist(), falls.tolist(), strict=True))


def _after(ids: np.ndarray, opener: np.ndarray) -> set[int]:
    """Positions right after every occurrence of ``opener``."""
    n = len(opener)
    if len(ids) < n:
        return set()
    windows = np.lib.stride_tricks.sliding_window_view(ids, n)
    return set((np.flatnonzero((windows == opener).all(1)) + n).tolist())
