"""Several runs in one page: what differs in their parameters, their figures side by side, their curves overlaid."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3nb import stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_text
from eagle3nb.params import STAGES
from eagle3nb.report import page
from eagle3nb.report.run import load
from eagle3nb.report.verdict import reached

Reader = Callable[[dict[str, Any]], Any]


def _of(name: str, key: str, k: int | None = None) -> Reader:
    """Reads ``key`` of a stage's ``result.json``, or its k-th part."""

    def read(run: dict[str, Any]) -> Any:
        value = run["results"][name].get(key)
        return value if k is None else value[k] if value and k < len(value) else None

    return read


def _of_stage(name: str, key: str) -> Reader:
    """Reads ``key`` of a stage's entry in ``run.json``."""
    return lambda run: next((entry.get(key) for entry in run["run"]["stages"] if entry["name"] == name), None)


def _peak(run: dict[str, Any]) -> int | None:
    return max((entry.get("peak_rss_mib") or 0 for entry in run["run"]["stages"]), default=0) or None


# (label, how it is read from what `load` gives, format)
FIGURES: tuple[tuple[str, Reader, str], ...] = (
    ("acceptance length", _of("evaluate", "acceptance_length"), ".2f"),
    ("acceptance length in validation", _of("train", "predicted_acceptance_length"), ".2f"),
    *((f"accepted at position {k}", _of("evaluate", "acceptance_by_position", k), ".3f") for k in range(8)),
    ("speed-up", _of("evaluate", "speedup"), ".2f"),
    ("without draft, tokens/s", _of("evaluate", "baseline_tokens_per_s"), ".1f"),
    ("with draft, tokens/s", _of("evaluate", "spec_tokens_per_s"), ".1f"),
    ("identical outputs", _of("evaluate", "identical_outputs"), ",.0f"),
    ("prompts", _of("evaluate", "prompts"), ",.0f"),
    ("training samples", _of("extract_hidden_states", "store_samples"), ",.0f"),
    ("training steps", _of("train", "steps"), ",.0f"),
    ("last training loss", _of("train", "final_train_loss"), ".3f"),
    ("vocabulary coverage", _of("build_vocab_mapping", "coverage"), ".4f"),
    *((f"{n}, seconds", _of_stage(n, "seconds"), ",.0f") for n in ("extract_hidden_states", "train", "evaluate")),
    ("peak memory, MiB", _peak, ",.0f"),
)
# Overlaid: stage, plot, the one of its series, title, x, y, scale of x
CURVES = (
    ("train", "accuracy", "position 0", "Validation accuracy at position 0", "epoch", "share right", False),
    ("train", "loss", "validation", "Validation loss", "step", "loss", False),
    ("train", "loss", "training", "Training loss", "step", "loss", False),
    ("build_vocab_mapping", "coverage", "response tokens", "Coverage", "draft vocabulary size", "share covered", True),
)


def compare(run_dirs: list[Path], out: Path | None = None) -> Path:
    """Write the comparison (``compare.html`` beside the first run by default); differences are to the first run."""
    target = Path(out) if out else Path(run_dirs[0]).resolve().parent / "compare.html"
    if target.name == "report.html" or (target.is_file() and page.GENERATOR not in target.read_text(errors="replace")):
        raise Refused(f"{target}: another page, which would be lost; give another name with --out")
    if target.is_dir():
        raise Refused(f"--out {target}: a directory; give the name of a file, e.g. {target}/compare.html")
    runs = [load(folder) for folder in run_dirs]
    for k, run in enumerate(runs):
        report = run["folder"] / "report.html"
        run["link"] = os.path.relpath(report, target.resolve().parent) if report.is_file() else ""
        run["letter"] = chr(ord("A") + k) if k < 26 else str(k + 1)
    body = page.render(
        "compare.html.j2",
        runs=[{k: run[k] for k in ("run", "verdict", "sentence", "kind", "link", "letter")} for run in runs],
        figures=list(_figures(runs)), parameters=list(_parameters(runs)), inputs=list(_inputs(runs)),
        plots=list(_overlays(runs, target.resolve().parent)),
    )  # fmt: skip
    write_text(target, page.page("Comparison of runs", body))
    return target


def _figures(runs: list[dict[str, Any]]) -> Any:
    for label, read, digits in FIGURES:
        values = [read(run) for run in runs]
        if all(value is None for value in values):
            continue
        cells = []
        for value in values:
            text = "–" if value is None else format(value, digits)
            difference = ""
            if cells and None not in (value, values[0]):
                same = format(value, digits) == format(values[0], digits)
                difference = "=" if same else format(value - values[0], f"+{digits}").replace("-", "−")
            cells.append({"text": text, "difference": difference})
        yield {"label": label, "cells": cells}


def _parameters(runs: list[dict[str, Any]]) -> Any:
    """The fields that are not the same in all runs."""
    for name in STAGES:
        for field in STAGES[name].model_fields:
            values = [run["params"].get(name, {}).get(field) for run in runs]
            if field != "run_dir" and any(value != values[0] for value in values):
                yield {"key": f"{name}.{field}", "values": [page.compact(value) for value in values]}


def _inputs(runs: list[dict[str, Any]]) -> Any:
    """What went in beside the parameters, and whether it is the same."""
    readers = {
        "verifier (config)": lambda r: r["results"]["preflight"].get("identity", {}).get("config_sha256"),
        "prepared rows": lambda r: r["results"]["prepare_data"].get("rows_sha256"),
        "hidden states": lambda r: r["results"]["extract_hidden_states"].get("store_fingerprint"),
        "checkpoint": lambda r: r["results"]["train"].get("checkpoint_sha256"),
        "commit": lambda r: r["run"].get("made_with", {}).get("commit"),
        "machine": lambda r: r["results"]["preflight"].get("machine", {}).get("cpu"),
    }
    for label, read in readers.items():
        values = [read(run) for run in runs]
        if any(values):
            yield {"label": label, "same": all(v == values[0] for v in values), "values": [v or "–" for v in values]}


def _overlays(runs: list[dict[str, Any]], here: Path) -> Any:
    from eagle3nb import show

    with tempfile.TemporaryDirectory() as folder:
        for name, plot, series, title, x, y, log_x in CURVES:
            lines, links = {}, []
            for run in runs:
                file = f"plots/{plot}.json"
                found = read_json(stage.folder(run["folder"], name) / file, {}).get("data", {}).get(series)
                if found and name in reached(run["run"]):
                    lines[run["letter"]] = (found["x"], found["y"])
                    links.append((run["letter"], _link(run, name, file, here)))
            if lines:
                key = f"{plot}-{series}".replace(" ", "-")
                few = max(len(xs) for xs, _ in lines.values()) < 20
                show.curves(Path(folder), key, lines, title, x, y, log_x=log_x, markers=few)
                yield {"title": title, "links": links, **page.picture(Path(folder) / "plots" / f"{key}.png")}
        served = {run["letter"]: run["results"]["evaluate"].get("acceptance_by_position") for run in runs}
        groups = {k: {f"position {i}": v for i, v in enumerate(values)} for k, values in served.items() if values}
        if groups:
            title = "Accepted share by draft position"
            show.bars(Path(folder), "served", groups, title, "share of drafts")
            letters = {run["letter"]: run for run in runs}
            links = [(letter, _link(letters[letter], "evaluate", "result.json", here)) for letter in groups]
            yield {"title": title, "links": links, **page.picture(Path(folder) / "plots" / "served.png")}


def _link(run: dict[str, Any], name: str, file: str, here: Path) -> str:
    return os.path.relpath((stage.folder(run["folder"], name) / file).resolve(), here)
