"""Stage 05: serve the verifier with and without the draft, on held-out prompts, greedy, and measure.

Every engine runs in a child process of its own. Acceptance and identity of the outputs are measured on all held-out
prompts; speed on some of them, in turns (without, with, without, with ...), each turn in a fresh engine, so that a
machine that grows slower is not taken for a slow draft.

Acceptance length = tokens per verifier step = 1 + accepted draft tokens / drafts, by vLLM's own counters.
"""

from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from eagle3nb import child, draft, stage
from eagle3nb.files import read_json, sha256_file, write_json
from eagle3nb.params import Evaluate
from eagle3nb.text import token_text

RECORDED_PROMPTS = 5  # prompts for which the draft's proposals are kept, each of another kind where there are so many


def run(params: Evaluate) -> dict[str, Any]:
    """Run the stage; returns (and writes) its ``result.json``."""
    from datasets import load_from_disk

    child.refuse_if_no_module("vllm")
    with stage.running("evaluate", params) as here:
        checkpoint = draft.of_run(params.run_dir, params.checkpoint)
        heldout = load_from_disk(str(stage.folder(params.run_dir, "prepare_data") / "heldout"))
        rows = [heldout[i] for i in range(min(len(heldout), params.max_prompts or len(heldout)))]
        numbers = params.num_speculative_tokens
        numbers = numbers if isinstance(numbers, list) else [numbers]
        measured = _measure(params, rows, [0, *numbers], str(checkpoint), here.folder)
        base, drafts = measured[0], {k: measured[k] for k in numbers}
        tokenizer = stage.verifier(params.run_dir).tokenizer
        figures = {k: _compare(base, drafts[k], rows) for k in numbers}
        best = max(figures, key=lambda k: figures[k]["speedup"])
        write_json(here.folder / "responses.json", _responses(rows, base, drafts, tokenizer))
        coverage = _coverage(checkpoint, [r["tokens"] for r in base["quality"]["responses"]])
        weights = checkpoint / "model.safetensors"
        return here.finish(
            **{key: value for key, value in figures[best].items()},
            num_speculative_tokens=best,
            prompts=len(rows),
            speed_prompts=min(len(rows), params.speed_prompts),
            by_num_speculative_tokens=figures,
            predicted_acceptance_by_position=_predicted(params, coverage),
            draft_vocab_coverage=coverage,
            checkpoint=params.checkpoint or str(checkpoint.relative_to(here.folder.parent)),
            checkpoint_bytes=weights.stat().st_size,
            checkpoint_sha256=sha256_file(weights),
            concurrency=params.concurrency,
            dtype=base["turns"][0]["dtype"],
            peak_rss_mib=max(turn["peak_rss_mib"] for m in measured.values() for turn in m["turns"]),
        )


def _predicted(params: Evaluate, coverage: float) -> list[float] | None:
    if params.checkpoint:
        return None
    found = stage.result(params.run_dir, "train")["predicted_acceptance_by_position"]
    return draft.served_acceptance(found, coverage)


def _coverage(checkpoint: Path, responses: list[list[int]]) -> float:
    """Share of the responses' tokens that the draft can propose; 1.0 without a d2t (the whole vocabulary)."""
    offsets = draft.tensors(checkpoint).get("d2t")
    tokens = torch.tensor([token for response in responses for token in response])
    if offsets is None or not len(tokens):
        return 1.0
    return float(torch.isin(tokens, torch.arange(len(offsets)) + offsets).float().mean())


def _measure(
    params: Evaluate, rows: list[dict], numbers: list[int], checkpoint: str, folder: Any
) -> dict[int, dict[str, Any]]:
    """Per number of draft tokens (0: without the draft): quality once and ``rounds`` timed turns."""
    verifier = stage.verifier(params.run_dir).complete()
    prompts = [row["input_ids"][: row["prompt_tokens"]] for row in rows]
    measured: dict[int, dict[str, Any]] = {number: {"turns": []} for number in numbers}
    for turn in range(params.rounds):
        for number in numbers:
            label = f"{number} draft tokens" if number else "without draft"
            job = {
                "label": f"round {turn + 1} of {params.rounds}, {label}",
                "verifier_path": str(verifier.path),
                "trust_remote_code": verifier.trust_remote_code,
                "uses_mla": verifier.uses_mla,
                "draft": checkpoint if number else None,
                "num_speculative_tokens": number,
                "prompts": prompts,
                "speed_prompts": params.speed_prompts,
                "max_new_tokens": params.max_new_tokens,
                "max_model_len": max(map(len, prompts)) + params.max_new_tokens + number + 1,
                "measure_quality": turn == 0,
                "record": recorded(rows) if turn == 0 else [],
                "concurrency": params.concurrency,
                "max_num_seqs": params.max_num_seqs,
                "dtype": params.dtype,
                "seed": params.seed,
                "single_process": stage.single_process(params.single_process),
                "engine_args": {"max_num_seqs": params.max_num_seqs} | params.engine_args,
            }
            done = child.run("eagle3nb.engine.evaluate", job, folder)
            if turn == 0:
                measured[number]["quality"] = {"responses": done.pop("responses"), "counters": done.pop("counters")}
            measured[number]["turns"].append(done)
    return measured


def _compare(base: dict[str, Any], with_draft: dict[str, Any], rows: list[dict]) -> dict[str, Any]:
    """All figures of one draft setting against the engine without it."""
    counters = with_draft["quality"]["counters"]
    drafts = counters.get("drafts", 0)
    by_position = [n / drafts if drafts else 0.0 for n in counters.get("accepted_tokens_per_pos", [])]
    plain, drafted = base["quality"]["responses"], with_draft["quality"]["responses"]
    different = [i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a["tokens"] != b["tokens"]]
    base_speed = [turn["tokens_per_s"] for turn in base["turns"]]
    draft_speed = [turn["tokens_per_s"] for turn in with_draft["turns"]]
    ratios = [b / a for a, b in zip(base_speed, draft_speed, strict=True)]
    return {
        "acceptance_length": 1 + sum(by_position),
        "acceptance_by_position": by_position,
        "acceptance_by_kind": _by_kind(drafted, rows),
        "acceptance_by_prompt": [mean(r["steps"][1:]) if r["steps"][1:] else None for r in drafted],
        "drafts": drafts,
        "baseline_tokens_per_s": mean(base_speed),
        "spec_tokens_per_s": mean(draft_speed),
        "speedup": mean(ratios),
        "speedup_rounds": ratios,
        "baseline_rounds": base_speed,
        "spec_rounds": draft_speed,
        "lossless": not different,
        "identical_outputs": len(plain) - len(different),
        "different_prompts": different,
    }


def _by_kind(responses: list[dict], rows: list[dict]) -> dict[str, dict[str, float]]:
    """Tokens per step for each kind of prompt; the first step of a response has no draft and is left out."""
    steps: dict[str, list[int]] = defaultdict(list)
    prompts: dict[str, int] = defaultdict(int)
    for response, row in zip(responses, rows, strict=True):
        steps[row["kind"]] += response["steps"][1:]
        prompts[row["kind"]] += 1
    return {
        kind: {"acceptance_length": mean(sizes) if sizes else None, "steps": len(sizes), "prompts": prompts[kind]}
        for kind, sizes in sorted(steps.items())
    }


def recorded(rows: list[dict]) -> list[int]:
    """The prompts whose draft steps are kept: the first of each kind, then the first of all."""
    kinds = [row["kind"] for row in rows]
    firsts = [i for i, kind in enumerate(kinds) if kinds.index(kind) == i]
    return list(dict.fromkeys([*firsts, *range(len(rows))]))[:RECORDED_PROMPTS]


def _responses(
    rows: list[dict], base: dict[str, Any], drafts: dict[int, dict[str, Any]], tokenizer: Any
) -> list[dict[str, Any]]:
    """What was asked and answered: per prompt the tokens without the draft, and tokens and step sizes with it.

    Recorded prompts also have ``drafts`` (the draft's tokens per step), the prompt's ``text`` and ``texts``
    (``{token id: text}``), so that they can be read without the tokenizer.
    """
    found, shown = [], recorded(rows)
    for i, row in enumerate(rows):
        with_draft = {k: measured["quality"]["responses"][i] for k, measured in drafts.items()}
        prompt = row["input_ids"][: row["prompt_tokens"]]
        response = {
            "id": row["id"],
            "kind": row["kind"],
            "prompt": prompt,
            "without_draft": base["quality"]["responses"][i]["tokens"],
            "with_draft": with_draft,
        }
        if i in shown:
            answers = with_draft.values()
            seen = {t for a in answers for ids in (a["tokens"], *(a.get("drafts") or [])) for t in ids}
            response["text"] = tokenizer.decode(prompt)
            response["texts"] = {token: token_text(tokenizer, token) for token in sorted(seen)}
        found.append(response)
    return found


def responses(run_dir: Any) -> list[dict[str, Any]]:
    """What `_responses` wrote for a run."""
    return read_json(stage.folder(run_dir, "evaluate") / "responses.json")
