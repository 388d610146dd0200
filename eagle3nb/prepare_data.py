"""Stage 01: chat data to token rows with a loss mask.

In: JSONL files, ``datasets`` directories or hub ids with ``messages``, ``conversations`` (ShareGPT) or pre-tokenised
rows. Out (``01_prepare_data/``): ``rows/`` and ``heldout/``, arrow datasets with

==================  =====================================================================================
``input_ids``       tokens of prompt and response; of the prompt alone where the response is to be generated
``loss_mask``       same length: 1 = response token (the end-of-turn token included), 0 = prompt
``max_new_tokens``  tokens still to be generated for this row; 0 where the response is given
``prompt_tokens``   where the response begins
``kind``, ``id``    from the source, where it has them
==================  =====================================================================================

One row per assistant turn. The mask comes from the boundary between the template's prompt (with its generation
prompt) and its continuation, and the two are compared token by token.
"""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3nb import stage
from eagle3nb.chat_template import ChatTemplate
from eagle3nb.conversations import local_path, read_source, turns_of
from eagle3nb.errors import Refused
from eagle3nb.files import folder_bytes, sha256_file, sha256_json
from eagle3nb.params import PrepareData
from eagle3nb.verifier import Verifier


def run(params: PrepareData) -> dict[str, Any]:
    """Run the stage; returns (and writes) its ``result.json``."""
    with stage.running("prepare_data", params) as here:
        verifier = stage.verifier(params.run_dir)
        heldout, heldout_counts = _build(params, verifier, params.heldout, params.max_heldout, "heldout", set())
        prompts = {tuple(row["input_ids"][: row["prompt_tokens"]]) for row in heldout}
        rows, counts = _build(params, verifier, params.train, params.max_samples, params.responses, prompts)
        save(rows, here.folder / "rows")
        save(heldout, here.folder / "heldout")
        return here.finish(
            rows=len(rows),
            heldout_rows=len(heldout),
            rows_sha256=sha256_json(rows),
            rows_bytes=folder_bytes(here.folder / "rows"),
            sources={
                source: _of_file(path)
                for source in [*params.train, *params.heldout]
                if (path := local_path(source)).is_file()
            },
            responses=params.responses,
            tokens=sum(len(row["input_ids"]) for row in rows),
            response_tokens=sum(sum(row["loss_mask"]) for row in rows),
            tokens_to_generate=sum(row["max_new_tokens"] for row in rows),
            longest_row=max(len(row["input_ids"]) + row["max_new_tokens"] for row in rows),
            counts=counts,
            heldout_counts=heldout_counts,
            kinds=dict(Counter(row["kind"] for row in rows)),
            system_prompt=params.system_prompt,
            chat_template=params.chat_template,
            chat_template_file=_of_file(Path(params.chat_template)) if params.chat_template else None,
            chat_template_kwargs=params.chat_template_kwargs,
            seed=params.seed,
        )


def _of_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def save(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write rows as an arrow dataset, in place of what was there."""
    from datasets import Dataset

    shutil.rmtree(folder, ignore_errors=True)
    Dataset.from_list(rows).save_to_disk(folder)


def chat_template(params: PrepareData, verifier: Verifier) -> ChatTemplate:
    """The chat template as the parameters want it."""
    return ChatTemplate(verifier, params.chat_template, params.chat_template_kwargs, params.system_prompt)


def _build(
    params: PrepareData, verifier: Verifier, sources: list[str], limit: int | None, mode: str, known: set
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Rows of all sources in a seeded order, and what became of the ones that are not there."""
    counts: Counter[str] = Counter()
    template = chat_template(params, verifier)
    groups: list[list[dict[str, Any]]] = []
    for source in sources:
        found = 0
        for number, record in enumerate(read_source(source)):
            found += 1
            counts["conversations"] += 1
            rows = []
            for row in rows_of(record, template, params, mode, counts, f"{source} row {number}"):
                prompt = tuple(row["input_ids"][: row["prompt_tokens"]])
                key = prompt if row["max_new_tokens"] else tuple(row["input_ids"])
                if key in known:
                    counts["dropped: duplicate or held-out prompt"] += 1
                    continue
                known.add(key)
                row["id"] = str(record.get("id", f"{source}-{number}"))
                row["kind"] = str(record.get("kind", "all"))
                rows.append(row)
            if rows:
                groups.append(rows)
        if not found:
            raise Refused(f"source {source} is empty; give one with at least one conversation")
    # Turns of one conversation stay together, so that none trains what another validates.
    if mode != "heldout":
        random.Random(params.seed).shuffle(groups)
    rows = [row for group in groups for row in group][:limit]
    counts["rows"] = len(rows)
    if not rows:
        reasons = ", ".join(f"{n} x {why}" for why, n in counts.items() if why.startswith("dropped"))
        raise Refused(f"no row is left of {', '.join(sources)}: {reasons or 'nothing in them'}")
    return rows, dict(counts)


# ---- rows --------------------------------------------------------------------------------------------------


def rows_of(
    record: dict[str, Any], template: ChatTemplate, params: PrepareData, mode: str, counts: Counter, where: str
) -> Iterator[dict[str, Any]]:
    """Rows of one record; ``mode`` is ``given``, ``generate`` or ``heldout`` (the last prompt alone)."""
    turns = turns_of(record)
    if turns is None:
        yield from _pretokenised(record, template, params, mode, counts, where)
        return
    if not any(turn["role"] == "user" for turn in turns):
        counts["dropped: no user turn"] += 1
        return
    own = turns[0]["role"] == "system"
    turns = template.with_system_prompt(turns)
    assistants = [k for k, turn in enumerate(turns) if turn["role"] == "assistant" and k > 0]
    if mode != "given" and turns[-1]["role"] == "user":
        assistants.append(len(turns))
    if mode == "heldout":
        assistants = assistants[-1:]
    if not assistants:
        counts["dropped: no assistant turn"] += 1
    for k in assistants:
        row = _row(turns, k, template, params, mode, counts)
        if row:
            if own:
                counts["rows with a system prompt of their own"] += 1
            yield row


def _row(
    turns: list[dict], k: int, template: ChatTemplate, params: PrepareData, mode: str, counts: Counter
) -> dict[str, Any] | None:
    """The row whose response is turn ``k``, or None (counted) where it cannot be used."""
    prompt = template.ids(turns[:k], prompt=True)
    if len(prompt) >= params.seq_len:
        counts["dropped: prompt longer than seq_len"] += 1
        return None
    if mode != "given":
        budget = min(params.max_new_tokens, params.seq_len - len(prompt))
        return _as_row(prompt, len(prompt), budget)
    full = template.ids(turns[: k + 1], prompt=False)
    if full[: len(prompt)] != prompt:
        counts["dropped: prompt is no prefix of the conversation"] += 1
        return None
    # What the template writes after the end of turn (a newline, say) is never generated: cut it off.
    ends = template.verifier.eos_token_ids
    end = next((i for i in range(len(full) - 1, len(prompt) - 1, -1) if full[i] in ends), len(full) - 1)
    full = full[: end + 1]
    if len(full) > params.seq_len:
        counts["truncated to seq_len"] += 1
        full = full[: params.seq_len]
    return _as_row(full, len(prompt), 0)


def _pretokenised(
    record: dict[str, Any], template: ChatTemplate, params: PrepareData, mode: str, counts: Counter, where: str
) -> Iterator[dict[str, Any]]:
    ids, mask = record.get("input_ids"), record.get("loss_mask")
    if ids is None or mask is None:
        found = ", ".join(map(str, record)) or "nothing"
        raise Refused(f"{where}: wanted messages, conversations, or input_ids and loss_mask; found {found}")
    ids, mask = list(map(int, ids)), list(map(int, mask))
    if len(ids) != len(mask):
        raise Refused(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask values")
    if ids and not 0 <= min(ids) <= max(ids) < template.verifier.vocab_size:
        raise Refused(
            f"{where}: token id {max(ids)} is outside the verifier's vocabulary of {template.verifier.vocab_size}"
        )
    if 1 not in mask:
        counts["dropped: loss mask all zero"] += 1
        return
    start = mask.index(1)
    if mode != "given":
        if start >= params.seq_len:
            counts["dropped: prompt longer than seq_len"] += 1
            return
        yield _as_row(ids[:start], start, min(params.max_new_tokens, params.seq_len - start))
        return
    if len(ids) > params.seq_len:
        counts["truncated to seq_len"] += 1
        ids, mask = ids[: params.seq_len], mask[: params.seq_len]
    if 1 not in mask:
        counts["dropped: prompt longer than seq_len"] += 1
        return
    yield _as_row(ids, start, 0) | {"loss_mask": mask}


def _as_row(ids: list[int], prompt_tokens: int, max_new_tokens: int) -> dict[str, Any]:
    mask = [0] * prompt_tokens + [1] * (len(ids) - prompt_tokens)
    return {
        "input_ids": ids,
        "loss_mask": mask,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
    }


# ---- reading what the stage left ---------------------------------------------------------------------------


def load(run_dir: Path | str) -> tuple[Any, Any]:
    """(training rows, held-out rows) of a run, as datasets."""
    from datasets import load_from_disk

    here = stage.folder(run_dir, "prepare_data")
    return load_from_disk(str(here / "rows")), load_from_disk(str(here / "heldout"))


def row_lengths(rows: Any) -> list[int]:
    """Tokens per row, those still to be generated included."""
    return [len(ids) + new for ids, new in zip(rows["input_ids"], rows["max_new_tokens"], strict=True)]
