"""``report.html`` of a run, also of one that failed or is not finished: verdict first, then what it rests on."""

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from eagle3nb import child, stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, shown, write_text
from eagle3nb.params import STAGES
from eagle3nb.report import page
from eagle3nb.report import verdict as verdicts

# The plots that prove something, in order: stage, plot, title, how to read it.
PLOTS = (
    ("train", "live", "Loss, up to where it stopped", "Falls quickly, then slowly."),
    ("train", "loss", "Loss", "Falls quickly, then slowly; validation follows training."),
    ("train", "loss_by_position", "Validation loss by draft position", "Falling; later positions are harder."),
    (
        "train", "accuracy", "Validation accuracy by draft position",
        "Rising; each further position lower by a similar factor.",
    ),
    (
        "evaluate", "predicted_against_served", "Acceptance by position, predicted against served",
        "Predicted: validation’s share times the coverage of the draft vocabulary. Within 0.04 and chance of each "
        "other where training saw the states that serving gives.",
    ),
    ("evaluate", "acceptance_by_kind", "Acceptance length by kind of prompt", "Tokens per verifier step; all above 1."),
    ("build_vocab_mapping", "coverage", "Coverage by the draft vocabulary", "Nearly flat at the chosen size."),
    (
        "extract_hidden_states", "layer_norms", "Hidden states of one sample",
        "Root mean square per layer: fairly flat lines, deeper layers above; the first position may stand out.",
    ),
)  # fmt: skip
NOTES = "# Notes\n\nWhat this run was for, and what you make of it. `eagle3nb report` with this run puts it in.\n"


def start_notes(run_dir: Path) -> None:
    """Leave ``notes.md`` for the author, once."""
    if not (run_dir / "notes.md").exists():
        write_text(run_dir / "notes.md", NOTES)


def write(run_dir: Path | str) -> Path:
    """Write ``report.html`` of a run directory; returns its path."""
    from markupsafe import Markup

    run_dir = Path(run_dir)
    run, verdict, sentence = verdicts.summary(run_dir)
    results = verdicts.results(run_dir, run)
    params = read_json(run_dir / "params.json", {})
    kind = verdicts.verifier_kind(results["preflight"])
    stopped = next((s for s in run["stages"] if s["status"] in ("failed", "interrupted", "running")), None)
    found = verdicts.checks(run_dir, run)
    log = stage.folder(run_dir, stopped["name"]) / "log.txt" if stopped else None
    strips = _strips(run_dir, results["evaluate"])
    body = page.render(
        "report.html.j2",
        run=run, verdict=verdict, sentence=sentence, kind=kind, figures=verdicts.figures(run.get("headline", {})),
        stopped=stopped, tail=page.plain(child.tail(log)) if log else "",
        here=shown(run_dir), quoted=shlex.quote(shown(run_dir)),
        quoted_params=shlex.quote(shown(run_dir / "params.json")), 
        bridges=_bridges(found), counts=_counts(found), notes=Markup(_notes(run_dir)),
        stages=[_stage(run_dir, entry) for entry in run["stages"]],
        sections={name: _parameters(name, params.get(name, {}), run) for name in STAGES},
        artefacts=_artefacts(run_dir, results, params), made=_made(run, results, params),
        plots=list(_plots(run_dir, run)), strips=[Markup(page.tilde(str(s))) for s in strips],
        legend=Markup(_legend()) if strips else "", limits=_limits(run, results, params, found, kind),
    )  # fmt: skip
    target = run_dir / "report.html"
    write_text(target, page.page(f"{run['name']}: {verdict}" + (f" ({kind})" if kind else ""), body))
    return target


# ---- checks and notes ----------------------------------------------------------------------------------------


def _counts(found: list[dict[str, Any]]) -> str:
    """``12 passed, 1 warning`` of some checks."""
    words = {
        "fail": "failed",
        "allowed": "failed but let through",
        "warn": "warning",
        "pass": "passed",
        "skip": "skipped",
    }
    counts = {shown: sum(check["shown"] == shown for check in found) for shown in words}
    plural = {**words, "warn": "warnings"}
    return ", ".join(f"{n} {(words if n == 1 else plural)[shown]}" for shown, n in counts.items() if n)


def _bridges(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per stage with checks: those to look at (failed, let through, warning) and the quiet ones."""
    loud = ("fail", "allowed", "warn")
    return [
        {
            "label": stage.label(name),
            "counts": _counts(mine),
            "loud": sorted((c for c in mine if c["shown"] in loud), key=lambda c: loud.index(c["shown"])),
            "quiet": (quiet := [c for c in mine if c["shown"] not in loud]),
            "quiet_counts": _counts(quiet),
        }
        for name in STAGES
        if (mine := [check for check in found if check["stage"] == name])
    ]


def _notes(run_dir: Path) -> str:
    """The author's notes as HTML; empty where nothing has been written. Raw HTML is escaped, pictures become links."""
    import mistune

    file = run_dir / "notes.md"
    text = file.read_text(errors="replace") if file.is_file() else ""
    if not text.strip() or text == NOTES:
        return ""

    class Renderer(mistune.HTMLRenderer):
        def heading(self, text: str, level: int, **attributes: Any) -> str:
            return super().heading(text, min(6, level + 2), **attributes)  # the page has its own first two levels

        def image(self, text: str, url: str, title: str | None = None) -> str:
            return self.link(text or url, url, title)  # a picture would be a request

    markdown = mistune.create_markdown(renderer=Renderer(escape=True), plugins=["table", "strikethrough", "url"])
    return markdown(page.tilde(text))


# ---- stages, parameters, artefacts ---------------------------------------------------------------------------


def _stage(run_dir: Path, entry: dict[str, Any]) -> dict[str, Any]:
    label = stage.label(entry["name"])
    html = f"{label}/{label}.html"
    nothing = {"name": entry["name"], "status": "pending", "seconds": None, "peak_rss_mib": None, "error": None}
    if entry["status"] == "pending":
        return nothing | {"label": label, "link": "", "exit": None}
    return nothing | {"exit": None} | entry | {"label": label, "link": html if (run_dir / html).is_file() else ""}


def _parameters(name: str, values: dict[str, Any], run: dict[str, Any]) -> list[dict[str, str]]:
    """Each field with its value and where that comes from: the command line, the params file, or the default."""
    overrides = {override.partition("=")[0].strip() for override in run.get("overrides", [])}
    rows = []
    for field, info in STAGES[name].model_fields.items():
        if field == "run_dir" or field not in values:
            continue
        over = any(key == f"{name}.{field}" or key.startswith(f"{name}.{field}.") for key in overrides)
        origin = "command line" if over else "default" if values[field] == info.default else "params file"
        text, default = page.compact(values[field]), page.compact(info.default)
        rows.append({"field": field, "value": text, "default": default, "origin": origin, "about": info.description})
    return rows


def _artefacts(run_dir: Path, results: dict[str, dict], params: dict[str, Any]) -> list[dict[str, Any]]:
    """What went in and came out: ``what``, ``name``, ``bytes``, ``sha256`` (of what ``of`` says)."""
    rows: list[dict[str, Any]] = []

    def add(what: str, name: Any, count: int | None = None, sha256: str | None = None, of: str = "") -> None:
        rows.append({"what": what, "name": str(name), "bytes": count, "sha256": sha256 or "", "of": of})

    if found := results["preflight"]:
        identity = found["identity"]
        sizes = found.get("sizes", {})
        add("verifier", found["verifier"]["name"], sizes.get("weights"), identity["config_sha256"], "config.json")
        add("tokenizer", found["verifier"]["path"], sizes.get("tokenizer"), identity["tokenizer_sha256"], "file")
        given, own = params.get("prepare_data", {}).get("chat_template"), identity["chat_template_sha256"]
        if given:
            file = results["prepare_data"].get("chat_template_file") or {}
            add("chat template", given, file.get("bytes"), file.get("sha256"), "file")
        else:
            add("chat template", "the tokenizer’s own", sizes.get("chat_template"), own, "its text")
    if found := results["prepare_data"]:
        for source, file in found.get("sources", {}).items():
            add("data", source, file["bytes"], file["sha256"], "file")
        rows_of = f"{found['rows']:,} rows, {found['heldout_rows']:,} held out"
        add("prepared rows", rows_of, found.get("rows_bytes"), found["rows_sha256"], "rows")
    if found := results["extract_hidden_states"]:
        name = f"{found['store_samples']:,} samples, {found['store_tokens']:,} tokens, layers {found['layer_ids']}"
        add("store", name, found["store_bytes"], found["store_fingerprint"], "store.json")
    for file, sha256 in results["build_vocab_mapping"].get("sha256", {}).items():
        path = stage.folder(run_dir, "build_vocab_mapping") / file
        add("mapping", file, path.stat().st_size if path.is_file() else None, sha256, "file")
    if found := results["train"]:
        path = Path(stage.label("train")) / found["best_checkpoint"]
        add("checkpoint", path, found["checkpoint_bytes"], found["checkpoint_sha256"], "model.safetensors")
    if (found := results["evaluate"]) and params.get("evaluate", {}).get("checkpoint"):
        size, sha256 = found.get("checkpoint_bytes"), found.get("checkpoint_sha256")
        add("served instead", found["checkpoint"], size, sha256, "model.safetensors")
    return rows


def _made(run: dict[str, Any], results: dict[str, dict], params: dict[str, Any]) -> dict[str, Any]:
    made, preflight = run.get("made_with", {}), results["preflight"]
    machine = preflight.get("machine", {})
    return {
        "commit": made.get("commit"),
        "changed": made.get("changed", []),
        "commands": run.get("commands") or [run["command"]],
        "machine": dict(_with_unit(k, v) for k, v in machine.items() if v not in ([], None)),
        "versions": preflight.get("versions", {}),
        "packages": made.get("packages", {}),
        "seeds": {name: params[name]["seed"] for name in STAGES if "seed" in params.get(name, {})},
    }


def _with_unit(key: str, value: Any) -> tuple[str, str]:
    """``memory_gb``, 25.3 as ``memory``, ``25.3 GB``."""
    words = {True: "yes", False: "no"}.get(value) if isinstance(value, bool) else page.compact(value)
    name = key.replace("_", " ")
    return (name.removesuffix(" gb"), f"{words} GB") if name.endswith(" gb") else (name, words)


# ---- evidence and limits -------------------------------------------------------------------------------------


def _plots(run_dir: Path, run: dict[str, Any]) -> Any:
    """The plots of finished stages, and what a stopped one had drawn since the run began."""
    began = datetime.fromisoformat(run["started"]).timestamp()
    status = {entry["name"]: entry["status"] for entry in run["stages"]}
    for name, plot, title, reading in PLOTS:
        png, finished = stage.folder(run_dir, name) / "plots" / f"{plot}.png", status[name] in stage.FINISHED
        if status[name] == "pending" or not png.is_file() or (finished and plot == "live"):
            continue
        if finished or png.stat().st_mtime >= began:
            data = png.with_suffix(".json")
            link = str(data.relative_to(run_dir)) if data.is_file() else ""
            yield {"title": title, "reading": reading, "link": link, **page.picture(png)}


def _strips(run_dir: Path, evaluated: dict[str, Any]) -> list[str]:
    """The recorded responses of a finished evaluation, as `eagle3nb.show.steps` draws them."""
    found = read_json(stage.folder(run_dir, "evaluate") / "responses.json", []) if evaluated else []
    recorded = [response for response in found if "texts" in response]
    if not recorded:
        return []
    from eagle3nb import show

    return [show.steps(response, evaluated["num_speculative_tokens"]).markup for response in recorded]


def _legend() -> str:
    from eagle3nb import show

    return show.STRIP_LEGEND


def _limits(
    run: dict[str, Any], results: dict[str, dict], params: dict[str, Any], found: list[dict[str, Any]], kind: str
) -> list[str]:
    """What this run does not say, as sentences."""
    said = []
    if kind:
        count = verdicts.verifier_size(results["preflight"])
        said.append(
            f"{kind.capitalize()} ({count / 1e6:,.0f} million parameters): the figures show that the chain works, "
            "not what a draft of a large verifier would reach."
        )
    if other := _made_elsewhere(run):
        said.append(f"Made by another state of the code than the one recorded: {other}.")
    if left := [entry["name"] for entry in run["stages"] if entry["status"] not in stage.FINISHED]:
        said.append(f"Not finished: {', '.join(left)}. Nothing is known of what they would have shown.")
    without = [
        s["name"]
        for s in run["stages"]
        if s["status"] in stage.FINISHED and all(c["stage"] != s["name"] for c in found)
    ]
    if without:
        said.append(f"No checks were recorded for {', '.join(without)}.")
    for check in found:
        if check["shown"] == "skip":
            reason = f": {check['observed']}" if check["observed"] else ""
            said.append(f"Skipped: {check['title'] or check['id']} ({check['id']}){reason}.")
    if (figures_of := results["evaluate"]) and (settings := params.get("evaluate")):
        timed = figures_of.get("speed_prompts", settings["speed_prompts"])
        at_once = _count(figures_of["concurrency"], "request")
        said.append(
            f"Acceptance was measured on {figures_of['prompts']} prompts, speed on {timed} of them at "
            f"{at_once} at once in {settings['rounds']} rounds, up to "
            f"{settings['max_new_tokens']} new tokens each; other prompts, longer answers and other loads were not."
        )
        said.append("Only greedy decoding was measured; with sampling the acceptance differs.")
    if results["train"]:
        said.append("One training, with one seed: the spread over seeds is not known.")
    if results["preflight"]:
        said.append("The verifier’s weights are identified by their sizes and its config, not by a hash of every byte.")
    if changed := run.get("made_with", {}).get("changed"):
        said.append(
            f"The checkout had {_count(len(changed), 'uncommitted change')}: the commit alone does not give this code."
        )
    return said


def _made_elsewhere(run: dict[str, Any]) -> str:
    """The kept stages that another commit made, each with that commit."""
    now = run.get("made_with", {}).get("commit")
    kept = ((s["name"], s.get("commit")) for s in run["stages"] if s["status"] == "cached")
    return ", ".join(f"{name} ({commit[:12]})" for name, commit in kept if commit and now and commit != now)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def load(run_dir: Path | str) -> dict[str, Any]:
    """What a comparison needs of a run: ``run``, ``verdict``, ``sentence``, ``results``, ``params``, ``folder``."""
    run_dir = Path(run_dir)
    run, verdict, sentence = verdicts.summary(run_dir)
    params = read_json(run_dir / "params.json")
    if params is None:
        raise Refused(f"{run_dir} has no params.json: this is no complete run directory")
    results = verdicts.results(run_dir, run)
    return {
        "run": run, "verdict": verdict, "sentence": sentence, "results": results, "params": params, "folder": run_dir,
        "kind": verdicts.verifier_kind(results["preflight"]),
    }  # fmt: skip
