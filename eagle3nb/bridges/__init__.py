"""Bridges: what one stage leaves, proven before the next one spends time on it.

=========================  =========================================================================
`registry`                 what a check is; how checks are run
a module per bridge        the checks, named like the stage whose output they look at (train has two)
`opening`                  what a path is, and what lies beside it
`artefacts`                all that can be known of it
`reading`, `store`         files of strangers, read with care
`agreement`, `reference`   the two measurements behind the semantic checks
=========================  =========================================================================
"""

import difflib
from pathlib import Path
from typing import Any

from eagle3nb import stage
from eagle3nb.bridges import (
    build_vocab_mapping,
    evaluate,
    extract_hidden_states,
    preflight,
    prepare_data,
    train,
    train_config,
)
from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.opening import add, identify, of_run
from eagle3nb.bridges.registry import CHECKS, failures, run
from eagle3nb.errors import Refused
from eagle3nb.files import write_json
from eagle3nb.params import StageParams
from eagle3nb.verifier import Verifier

__all__ = ["CHECKS", "check_path", "cross", "failures", "stop_on_failure"]
# Importing a bridge's module registers its checks.
MODULES = (preflight, prepare_data, extract_hidden_states, build_vocab_mapping, train, train_config, evaluate)


def check_path(
    path: Path | str,
    verifier: Verifier | None = None,
    against: Path | str | None = None,
    deep: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Artefacts, list[dict[str, Any]]]:
    """What ``path`` is, and the entries of all checks that apply; `Refused` where it cannot be read.

    Code of a verifier that a run directory names is run only with ``trust_remote_code``.
    """
    if verifier is not None:
        _ = verifier.hidden_size, verifier.vocab_size, verifier.num_layers  # a verifier at all?
    artefacts = identify(Path(path), verifier, deep, trust_remote_code)
    brought = add(artefacts, Path(against), trust_remote_code) if against is not None else set()
    entries = run(artefacts)
    used = any(brought & {*CHECKS[e["id"]].needs, *CHECKS[e["id"]].between} for e in entries if e["verdict"] != "skip")
    if against is not None and not used and not failures(entries):
        raise Refused(f"--against {against}: nothing in it bears on {path} ({artefacts.kind})")
    return artefacts, entries


def cross(name: str, params: StageParams) -> list[dict[str, Any]]:
    """Run the checks of the bridge behind stage ``name``, write its ``checks.json`` and return the entries."""
    unknown = next((id for id in params.allow if id not in CHECKS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, CHECKS, 1, 0.3)
        raise Refused(f"{name}.allow: no check is called {unknown}" + (f"; nearest: {near[0]}" if near else ""))
    entries = run(of_run(params.run_dir), bridges=[name], allow=params.allow)
    write_json(stage.folder(params.run_dir, name) / "checks.json", entries)
    return entries


def stop_on_failure(entries: list[dict[str, Any]]) -> None:
    """`Refused` where a check failed that was not allowed: the next stage must not build on it."""
    bad = failures(entries)
    if bad:
        first = bad[0]
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise Refused(
            f"check {first['id']} failed: {first['observed']}; wanted {first['expected']}; {first['advice']}{more}"
        )
