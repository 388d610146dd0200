"""What ``notebooks/explore_draft.ipynb`` shows: a draft's proposals step by step, and where and why they miss.

The models run in a child process (`eagle3nb.engine.explore_draft`); here its result is counted and compared with what
vLLM served in the same run.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from eagle3nb import child, draft, prepare_data, stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json
from eagle3nb.params import Count, Int, NotebookParams, PrepareData
from eagle3nb.text import quoted, token_text

WHY = {
    "first": "no draft yet",
    "all": "all accepted",
    "wrong": "wrong guess",
    "outside": "token outside the draft vocabulary",
    "end": "the response ended",
}


class ExploreDraft(NotebookParams):
    """Parameters of the notebook."""

    checkpoint: str | None = Field(None, description="draft checkpoint (None: the best one of the train stage)")
    prompts: list[str] = Field([], description="your own prompts; the verifier answers them")
    samples: list[Int] = Field([], description="or samples of the store; only the draft is loaded")
    heldout: Count = Field(8, description="or so many held-out prompts, with the responses that were served")
    num_speculative_tokens: Count = Field(3, description="draft tokens a step")
    max_new_tokens: Count = Field(96, description="tokens of a response to your own prompts, at most")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="of both models (auto: float32 on a CPU, bfloat16 on a GPU)"
    )


def run(settings: ExploreDraft) -> dict[str, Any]:
    """Run the models over the chosen responses, in a child; leaves nothing in the run directory.

    Returns ``responses`` (``name``, ``tokens``, ``prompt_tokens``, ``agreement``, ``steps``: see the child's ``walk``).
    """
    child.refuse_if_no_module("speculators")
    verifier, chosen = stage.verifier(settings.run_dir), _chosen(settings)
    job = {
        "checkpoint": str(draft.of_run(settings.run_dir, settings.checkpoint)),
        "verifier_path": str(verifier.path),
        "trust_remote_code": verifier.trust_remote_code,
        "eos_token_ids": verifier.eos_token_ids,
        "store": str(stage.folder(settings.run_dir, "extract_hidden_states") / "store"),
        "prompts": [prompt for _, prompt, _ in chosen],
        "responses": [response for _, _, response in chosen],
        "samples": [] if settings.prompts else settings.samples,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": settings.dtype,
    }
    folder = Path(tempfile.mkdtemp(prefix="eagle3nb-"))  # kept only where the child fails: its log is there
    try:
        done = child.run("eagle3nb.engine.explore_draft", job, folder)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    names = [name for name, _, _ in chosen] or [f"sample {i}" for i in settings.samples]
    for name, response in zip(names, done["responses"], strict=True):
        response["name"] = name
    return done | {key: job[key] for key in ("checkpoint", "num_speculative_tokens")}


def _chosen(settings: ExploreDraft) -> list[tuple[str, list[int], list[int] | None]]:
    """(name, prompt, response or None where the verifier is to write it); empty where samples are looked at."""
    if settings.prompts:
        own = (read_json(Path(settings.run_dir) / "params.json") or {}).get("prepare_data", {})
        template = prepare_data.chat_template(PrepareData(**own), stage.verifier(settings.run_dir))
        turns = [[{"role": "user", "content": prompt}] for prompt in settings.prompts]
        return [
            (prompt[:40], template.ids(template.with_system_prompt(turn), prompt=True), None)
            for prompt, turn in zip(settings.prompts, turns, strict=True)
        ]
    if settings.samples:
        return []
    served = read_json(stage.folder(settings.run_dir, "evaluate") / "responses.json")
    if served:
        return [(row["id"], row["prompt"], row["without_draft"]) for row in served[: settings.heldout]]
    _, heldout = prepare_data.load(settings.run_dir)
    rows = heldout.select(range(min(settings.heldout, len(heldout))))
    if not len(rows):
        raise Refused(f"{settings.run_dir} has no held-out prompts; give prompts or samples")
    return [(row["id"], row["input_ids"][: row["prompt_tokens"]], None) for row in rows]


def acceptance(result: dict[str, Any]) -> dict[str, Any]:
    """Figures over all responses: drafts, accepted share by position, acceptance length."""
    steps, k = _drafted(result), result["num_speculative_tokens"]
    by_position = [sum(_accepted(step) > p for step in steps) / max(1, len(steps)) for p in range(k)]
    agreements = [r["agreement"] for r in result["responses"] if r["agreement"] is not None]
    return {
        "responses": len(result["responses"]),
        "drafts": len(steps),
        "acceptance_length": 1 + sum(by_position),
        "acceptance_by_position": by_position,
        "verifier agrees with the responses": sum(agreements) / len(agreements) if agreements else None,
        "dtype": result["dtype"],
    }


def _accepted(step: dict[str, Any]) -> int:
    return len(step["proposed"]) - (step["why"] != "all")


def _drafted(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for response in result["responses"] for step in response["steps"][1:]]


def misses(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(draft position, drafts that got there, and of these the shares accepted, wrong, outside, ended)."""
    steps, out = _drafted(result), []
    for position in range(result["num_speculative_tokens"]):
        there = [step for step in steps if len(step["proposed"]) > position]
        accepted = sum(_accepted(step) > position for step in there)
        ended = Counter(step["why"] for step in there if len(step["proposed"]) == position + 1)
        shares = (
            n / len(there) if there else None for n in (accepted, *(ended[w] for w in ("wrong", "outside", "end")))
        )
        out.append((position, len(there), *shares))
    return out


def reasons(result: dict[str, Any]) -> dict[str, float]:
    """Share of all drafts by what ended them."""
    steps = _drafted(result)
    count = Counter(step["why"] for step in steps)
    return {WHY[why]: count[why] / max(1, len(steps)) for why in ("all", "wrong", "outside", "end")}


def ranks(result: dict[str, Any]) -> dict[str, float]:
    """Where the right token stood in the draft's list when its guess was wrong: share of the wrong guesses."""
    found = [step["rank"] + 1 for step in _drafted(result) if step["why"] == "wrong"]
    edges = {
        "2nd": (2, 2),
        "3rd to 5th": (3, 5),
        "6th to 20th": (6, 20),
        "21st to 100th": (21, 100),
        "later": (101, 10**9),
    }
    return {name: sum(low <= r <= high for r in found) / max(1, len(found)) for name, (low, high) in edges.items()}


def step_rows(tokenizer: Any, response: dict[str, Any], count: int = 30) -> list[tuple[Any, ...]]:
    """(step, last token, what the draft proposed, what the verifier wrote, accepted, why it ended) of a response."""
    tokens, out = response["tokens"], []
    for number, step in enumerate(response["steps"][:count]):
        at, size = step["at"], step["size"]
        proposed = " ".join(quoted(tokenizer, t) for t in step["proposed"])
        wrote = " ".join(quoted(tokenizer, t) for t in tokens[at : at + size])
        why = WHY[step["why"]] + (f" (right one was its choice {step['rank'] + 1})" if step["why"] == "wrong" else "")
        out.append((number, quoted(tokenizer, tokens[at - 1]), proposed, wrote, size - 1, why))
    return out


def missed_tokens(tokenizer: Any, result: dict[str, Any], why: str, count: int = 12) -> list[tuple[Any, ...]]:
    """(token that the verifier wrote, how often the draft missed it for the reason ``why``), most frequent first."""
    found: Counter[int] = Counter()
    for response in result["responses"]:
        for step in response["steps"]:
            if step["why"] == why:
                found[response["tokens"][step["at"] + len(step["proposed"]) - 1]] += 1
    return [(quoted(tokenizer, token), n) for token, n in found.most_common(count)]


def against_served(result: dict[str, Any], run_dir: Path | str) -> dict[str, Any] | None:
    """The same responses as vLLM served them: tokens per step here and there, and how many steps are the same.

    A step is the same where it begins and ends at the same tokens. None where the evaluation did not serve these
    responses with this checkpoint and as many draft tokens.
    """
    evaluated = read_json(stage.folder(run_dir, "evaluate") / "result.json")
    if not evaluated or (Path(run_dir) / evaluated["checkpoint"]).resolve() != Path(result["checkpoint"]).resolve():
        return None
    served = read_json(stage.folder(run_dir, "evaluate") / "responses.json") or []
    number = str(result["num_speculative_tokens"])
    there = {row["id"]: row["with_draft"].get(number) for row in served}
    ours, theirs, same, compared = [], [], 0, 0
    for response in result["responses"]:
        drafted = there.get(response["name"])
        own = response["tokens"][response["prompt_tokens"] :]
        if drafted is None or drafted["tokens"] != own:
            continue
        sizes = [step["size"] for step in response["steps"]]
        compared += 1
        ours += sizes[1:]
        theirs += drafted["steps"][1:]
        same += len(_spans(sizes) & _spans(drafted["steps"])) - 1
    if not theirs:
        return None
    return {
        "responses": compared,
        "tokens per step here": sum(ours) / len(ours),
        "tokens per step served by vLLM": sum(theirs) / len(theirs),
        "steps here": len(ours),
        "steps served by vLLM": len(theirs),
        "steps that are the same": same / len(theirs),
    }


def _spans(sizes: list[int]) -> set[tuple[int, int]]:
    """(begin, end) of steps of these sizes."""
    out, start = set(), 0
    for size in sizes:
        out.add((start, start + size))
        start += size
    return out


def as_served(tokenizer: Any, response: dict[str, Any], num_speculative_tokens: int) -> dict[str, Any]:
    """A response in the form of the evaluation's ``responses.json``, for `show.steps`."""
    drafted = {
        "tokens": response["tokens"][response["prompt_tokens"] :],
        "steps": [step["size"] for step in response["steps"]],
        "drafts": [step["proposed"] for step in response["steps"]],
    }
    seen = {*drafted["tokens"], *(token for draft in drafted["drafts"] for token in draft)}
    return {
        "id": response["name"],
        "kind": "step by step",
        "text": tokenizer.decode(response["tokens"][: response["prompt_tokens"]]),
        "texts": {str(token): token_text(tokenizer, token) for token in seen},
        "with_draft": {str(num_speculative_tokens): drafted},
    }
