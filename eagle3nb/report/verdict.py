"""What a run came to: its verdict, the sentence that says why, its headline figures, its checks."""

from pathlib import Path
from statistics import quantiles
from typing import Any

from eagle3nb import stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json
from eagle3nb.params import STAGES

AGREEING_ROUNDS = 1.3  # rounds that differ by more were disturbed: on a quiet machine they lie within a few percent
SMALL_VERIFIER = 1_000_000_000  # parameters; what holds below says little about large verifiers


def summary(run_dir: Path | str) -> tuple[dict[str, Any], str, str]:
    """(``run.json``, verdict, sentence) of a run directory."""
    run = read_json(Path(run_dir) / "run.json")
    if run is None:
        raise Refused(f"{run_dir} has no run.json: this is no run directory")
    return run, *judge(run, checks(run_dir, run))


def reached(run: dict[str, Any]) -> list[str]:
    """The stages of a run that were begun; what a later one left, an earlier attempt made from something else."""
    return [entry["name"] for entry in run["stages"] if entry["status"] != "pending"]


def results(run_dir: Path | str, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """``result.json`` of every stage; empty where there is none, or none of this run."""
    names = reached(run)
    return {
        name: read_json(stage.folder(run_dir, name) / "result.json", {}) if name in names else {} for name in STAGES
    }


def checks(run_dir: Path | str, run: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks of all stages that left some, each with its ``stage`` and what it is shown as (``shown``)."""
    found, params = [], read_json(Path(run_dir) / "params.json", {})
    for name in reached(run):
        # A check may have been allowed after it was written: then the stage is cached as it is.
        allowed = params.get(name, {}).get("allow", [])
        for check in read_json(stage.folder(run_dir, name) / "checks.json", []):
            let = check["verdict"] == "fail" and (check.get("allowed") or check["id"] in allowed)
            shown = "allowed" if let else check["verdict"]
            empty = {"title": "", "observed": None, "expected": None, "advice": None}
            found.append(empty | check | {"stage": name, "shown": shown})
    return found


def judge(run: dict[str, Any], found: list[dict[str, Any]] = ()) -> tuple[str, str]:
    """PASS, FAIL or INCOMPLETE, and the sentence that says why. A failed check that was not allowed is FAIL."""
    headline = run.get("headline") or {}
    failed_stage = next((s for s in run["stages"] if s["status"] == "failed"), None)
    failed = [check for check in found if check["shown"] == "fail"]
    stopped = f"The stage {failed_stage['name']} failed: {failed_stage.get('error')}" if failed_stage else ""
    if failed:
        first = failed[0]
        more = f" So did {len(failed) - 1} more." if len(failed) > 1 else ""
        return "FAIL", (
            f"The check {first['id']} failed: observed {first['observed']}, expected {first['expected']}.{more}"
            # A stage that stopped because of the check says nothing new.
            + (f" {stopped}" if stopped and first["id"] not in stopped else "")
            + (f" {_served(headline)}" if headline else "")
        )
    if failed_stage:
        return "FAIL", stopped
    if not headline:
        left = [s["name"] for s in run["stages"] if s["status"] not in stage.FINISHED]
        inside = next((s["name"] for s in run["stages"] if s["status"] == "interrupted"), None)
        return "INCOMPLETE", (f"Stopped in {inside}. " if inside else "") + f"Still to be run: {', '.join(left)}."
    allowed = [check["id"] for check in found if check["shown"] == "allowed"]
    note = f" Let through although it failed: {', '.join(allowed)}." if allowed else ""
    return "PASS" if headline["lossless"] else "FAIL", _served(headline) + note


def _served(headline: dict[str, Any]) -> str:
    speed, total = headline["speedup_rounds"], headline["prompts"]
    slower = ", slower than without it" if headline["speedup"] < 1 else ""
    if max(speed) > AGREEING_ROUNDS * min(speed):
        slower += "; these rounds disagree too much to be relied on"
    timed = headline.get("speed_prompts")
    spread = _middle_half(headline)
    same = (
        "every output is identical to the one without the draft"
        if headline["lossless"]
        else f"only {headline['identical_outputs']} of {total} outputs are identical to those without the draft"
    )
    return (
        f"The draft yields {headline['acceptance_length']:.2f} tokens per verifier step on {total} held-out prompts"
        f"{f' (middle half of them {spread})' if spread else ''} and {headline['speedup']:.2f} times the speed"
        f"{f' on {timed} of them' if timed else ''} ({min(speed):.2f} to {max(speed):.2f} in {len(speed)} rounds"
        f"{slower}); {same}."
    )


def _middle_half(headline: dict[str, Any]) -> str:
    values = [value for value in headline.get("acceptance_by_prompt", []) if value is not None]
    if len(values) < 4:
        return ""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{low:.2f} to {high:.2f}"


def figures(headline: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, note) of the headline figures."""
    if not headline:
        return []
    k, speed = headline["num_speculative_tokens"], headline["speedup_rounds"]
    positions = " / ".join(f"{share:.3f}" for share in headline["acceptance_by_position"])
    spread = _middle_half(headline)
    note = f"tokens per step, {k} draft tokens" + (f"; middle half of prompts {spread}" if spread else "")
    return [
        ("acceptance length", f"{headline['acceptance_length']:.2f}", note),
        ("accepted by position", positions, "share of drafts"),
        ("speed-up", f"{headline['speedup']:.2f}×", f"{min(speed):.2f} to {max(speed):.2f}"),
        ("without draft", f"{headline['baseline_tokens_per_s']:.1f}", "tokens/s"),
        ("with draft", f"{headline['spec_tokens_per_s']:.1f}", "tokens/s"),
        ("identical outputs", f"{headline['identical_outputs']}/{headline['prompts']}", "against no draft, greedy"),
    ]


def headline_lines(run: dict[str, Any]) -> list[str]:
    """The figures of a run as lines of text."""
    return [f"  {label:<22}{value}  ({note})" for label, value, note in figures(run.get("headline", {}))]


def verifier_size(preflight: dict[str, Any]) -> int | None:
    """Parameters of the verifier; of runs that did not count them, the checkpoint's bytes over two (bf16)."""
    if not preflight:
        return None
    return preflight.get("parameters") or sum(count for _, count in preflight["identity"]["weights"]) // 2


def verifier_kind(preflight: dict[str, Any]) -> str:
    """What a reader must know of the verifier before any figure: that it is small, or was never trained; else empty."""
    count = verifier_size(preflight)
    words = [
        *(["random verifier"] if preflight.get("untrained") else []),
        *(["small verifier"] if count is not None and count < SMALL_VERIFIER else []),
    ]
    return ", ".join(words)
