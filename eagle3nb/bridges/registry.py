"""The register of checks: what a check is, and how they are run.

Adding a check is adding one function to a bridge's module::

    @check(
        "vocab.filler", "No filler ids in the draft vocabulary", bridge="build_vocab_mapping",
        needs=("mapping", "counts"), why="...", remedy="...",
    )
    def filler(a: Artefacts) -> Finding:
        '''What it measures, in one sentence.'''

``needs`` names attributes of `Artefacts`, the subject first. Where the subject is not what is being checked, the check
is left out; where something else is missing it is skipped, and says what would be needed. A check that compares two
things (``between``) also applies where the other one is being checked and all that it needs is there.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from eagle3nb.errors import Refused, VerifierRefused

BRIDGES = ("preflight", "prepare_data", "extract_hidden_states", "build_vocab_mapping", "train", "evaluate")
WANTED = {
    "verifier": "the verifier (--verifier V)",
    "heldout": "held-out rows (a run directory)",
    "layer_ids": "auxiliary layer ids (store.json, or --against a draft config or run)",
    "rows": "the token rows (the arrow dataset beside the hidden states)",
    "store": "the sample store (--against STORE)",
    "headers": "sample files that can be read",
    "states": "states that can be computed with",
    "other_draft": "another draft config or checkpoint (--against)",
    "mapping": "the vocabulary mapping (--against a run or a draft checkpoint)",
    "mapping_result": "the record of the stage that built the mapping (a run directory)",
    "counts": "token counts (token_freq.pt)",
    "prepared": "the record of the stage that prepared the data (a run directory)",
    "predicted": "the validation figures (a run directory)",
    "checksums": "checksums (samples.jsonl of the store)",
    "reference": "a reference forward of the verifier",
    "deep": "--deep: it reads every byte",
    "tensors": "the checkpoint's tensors (this is a config alone)",
    "declared": "store.json",
    "answered": "rows with responses",
    "draft": "a draft config or checkpoint",
    "served": "the record of the evaluation (a run directory)",
}


@dataclass(frozen=True)
class Finding:
    """What a check found: verdict, what was measured, what is healthy, what to do."""

    verdict: str
    observed: str
    expected: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """One registered check. ``measures`` is its function's docstring."""

    id: str
    title: str
    bridges: tuple[str, ...]
    needs: tuple[str, ...]
    between: tuple[str, ...]
    why: str
    remedy: str
    measures: str
    function: Callable[[Any], Finding]


CHECKS: dict[str, Check] = {}


def check(
    id: str,
    title: str,
    *,
    bridge: str | tuple[str, ...],
    needs: Iterable[str],
    between: Iterable[str] = (),
    why: str,
    remedy: str,
) -> Callable[[Callable[[Any], Finding]], Callable[[Any], Finding]]:
    """Register a function as a check: see the module's docstring."""

    def register(function: Callable[[Any], Finding]) -> Callable[[Any], Finding]:
        bridges = (bridge,) if isinstance(bridge, str) else bridge
        if id in CHECKS or not set(bridges) <= set(BRIDGES):
            raise ValueError(f"check {id} is registered twice or belongs to no bridge ({bridge})")
        measures = " ".join((function.__doc__ or "").split())
        CHECKS[id] = Check(id, title, bridges, tuple(needs), tuple(between), why, remedy, measures, function)
        return function

    return register


def run(artefacts: Any, bridges: Iterable[str] = BRIDGES, allow: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Run the checks that apply to these artefacts; the entries of ``checks.json``, in the order of the bridges.

    An entry of a fail that ``allow`` names carries ``"allowed": true``.
    """
    entries = []
    for one in sorted(CHECKS.values(), key=lambda c: BRIDGES.index(c.bridges[-1])):
        here = [bridge for bridge in one.bridges if bridge in bridges]
        if not here or not _applies(one, artefacts):
            continue
        started = time.monotonic()
        finding = _measure(one, artefacts)
        bad = finding.verdict in ("warn", "fail")
        entry = {
            "id": one.id, "title": one.title, "bridge": here[-1], "verdict": finding.verdict,
            "observed": finding.observed, "expected": finding.expected,
            "advice": (finding.advice or one.remedy) if bad else finding.advice,
            "seconds": round(time.monotonic() - started, 3),
        }  # fmt: skip
        if finding.verdict == "fail" and one.id in allow:
            entry["allowed"] = True
        entries.append(entry)
    return entries


def _applies(one: Check, artefacts: Any) -> bool:
    if one.needs[0] in artefacts.subjects:
        return True
    return bool(artefacts.subjects & set(one.between)) and all(artefacts.has(name) for name in one.needs)


def _measure(one: Check, artefacts: Any) -> Finding:
    missing = [name for name in one.needs if not artefacts.has(name)]
    if missing:
        why = artefacts.why_missing(missing[0]) or f"needs {WANTED[missing[0]]}"
        return Finding("skip", why, one.title, "")
    try:
        return one.function(artefacts)
    except VerifierRefused as error:
        verdict = "fail" if "verifier" in artefacts.subjects else "skip"
        return Finding(verdict, str(error), "a verifier that can be read", "give the whole checkpoint")
    except Refused as error:
        return Finding("fail", str(error), "something that can be read", "")
    except Exception as error:  # a stranger's file in a form nobody thought of: never a traceback, and never a pass
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Finding("fail", f"could not be measured ({why})", one.title, "look at the file by hand")


def failures(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fails that nobody allowed."""
    return [entry for entry in entries if entry["verdict"] == "fail" and not entry.get("allowed")]
