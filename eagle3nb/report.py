"""HTML for people: one self-contained page per executed notebook, and ``report.html`` for the run.

Made only from the JSON and plots that the stages left; nothing is computed anew and no request leaves the page.
"""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

from eagle3nb import child, stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_text
from eagle3nb.params import STAGES

TEMPLATES = Path(__file__).parent / "templates"
# The plots that belong on the run's front page, in order.
PLOTS = (
    ("train", "accuracy"),
    ("evaluate", "predicted_against_served"),
    ("evaluate", "acceptance_by_kind"),
    ("train", "loss"),
    ("build_vocab_mapping", "coverage"),
)


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)


def _page(title: str, body: str) -> str:
    from markupsafe import Markup
    from pygments.formatters import HtmlFormatter

    highlight = HtmlFormatter(style="tango", nobackground=True).get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark", nobackground=True).get_style_defs(".highlight")
    styles = f"{highlight}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    template = _environment().get_template("page.html.j2")
    return template.render(title=title, body=Markup(body), highlight=Markup(styles))


def export_notebook(path: Path) -> Path:
    """Write an executed notebook as one self-contained HTML file beside it."""
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    settings = Config()
    settings.TagRemovePreprocessor.enabled = True
    settings.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
    exporter = HTMLExporter(config=settings, template_name="basic")
    body, _ = exporter.from_filename(str(path))
    target = path.with_suffix(".html")
    write_text(target, _page(path.stem, body))
    return target


def write(run_dir: Path | str) -> Path:
    """Write ``report.html`` of a run, also of an unfinished one."""
    run_dir = Path(run_dir)
    run = read_json(run_dir / "run.json")
    if run is None:
        raise Refused(f"{run_dir} has no run.json: this is no run directory")
    verdict, sentence = judge(run)
    failed = next((s for s in run["stages"] if s["status"] in ("failed", "interrupted")), None)
    preflight = read_json(stage.folder(run_dir, "preflight") / "result.json", {})
    params = read_json(run_dir / "params.json", {})
    body = (
        _environment()
        .get_template("report.html.j2")
        .render(
            run={"overrides": [], "command": "", "params_file": None} | run,
            verdict=verdict,
            sentence=sentence,
            figures=_figures(run.get("headline", {})),
            stages=[_stage_row(run_dir, entry) for entry in run["stages"]],
            tail=child.tail(stage.folder(run_dir, failed["name"]) / "log.txt") if failed else "",
            again=f"eagle3nb run --run-dir {run_dir}",
            plots=list(_plots(run_dir)),
            params={
                name: {k: json.dumps(v) for k, v in params.get(name, {}).items() if k != "run_dir"} for name in STAGES
            },
            made_with=[
                *preflight.get("versions", {}).items(),
                *preflight.get("machine", {}).items(),
                *((key, preflight["verifier"][key]) for key in ("name", "trust_remote_code") if preflight),
            ],
        )
    )
    target = run_dir / "report.html"
    write_text(target, _page(f"{run['name']}: {verdict}", body))
    return target


def judge(run: dict[str, Any]) -> tuple[str, str]:
    """PASS, FAIL or INCOMPLETE, and the sentence that says why."""
    headline = run.get("headline") or {}
    failed = next((s for s in run["stages"] if s["status"] == "failed"), None)
    if failed:
        return "FAIL", f"The stage {failed['name']} failed: {failed.get('error')}"
    if not headline:
        left = [s["name"] for s in run["stages"] if s["status"] not in ("done", "cached")]
        return "INCOMPLETE", f"Still to be run: {', '.join(left)}."
    speed = headline["speedup_rounds"]
    slower = ", slower than without it" if headline["speedup"] < 1 else ""
    text = (
        f"The draft yields {headline['acceptance_length']:.2f} tokens per verifier step on {headline['prompts']} "
        f"held-out prompts and {headline['speedup']:.2f} times the speed ({min(speed):.2f} to {max(speed):.2f} in "
        f"{len(speed)} rounds{slower}); "
    )
    if headline["lossless"]:
        return "PASS", text + "every output is identical to the one without the draft."
    same = f"{headline['identical_outputs']} of {headline['prompts']}"
    return "FAIL", text + f"only {same} outputs are identical to those without the draft."


def _figures(headline: dict[str, Any]) -> list[tuple[str, str, str]]:
    if not headline:
        return []
    k, speed = headline["num_speculative_tokens"], headline["speedup_rounds"]
    positions = " / ".join(f"{share:.3f}" for share in headline["acceptance_by_position"])
    return [
        ("acceptance length", f"{headline['acceptance_length']:.2f}", f"tokens per step, {k} draft tokens"),
        ("accepted by position", positions, "share of drafts"),
        ("speed-up", f"{headline['speedup']:.2f}×", f"{min(speed):.2f} to {max(speed):.2f}"),
        ("without draft", f"{headline['baseline_tokens_per_s']:.1f}", "tokens/s"),
        ("with draft", f"{headline['spec_tokens_per_s']:.1f}", "tokens/s"),
        ("identical outputs", f"{headline['identical_outputs']}/{headline['prompts']}", "against no draft, greedy"),
    ]


def headline_lines(run: dict[str, Any]) -> list[str]:
    """The figures of a run as lines of text."""
    return [f"  {label:<22}{value}  ({note})" for label, value, note in _figures(run.get("headline", {}))]


def _stage_row(run_dir: Path, entry: dict[str, Any]) -> dict[str, str]:
    label = stage.label(entry["name"])
    memory = entry.get("peak_rss_mib")
    return {
        "label": label,
        "link": f"{label}/{label}.html" if (run_dir / label / f"{label}.html").is_file() else "",
        "status": entry["status"],
        "time": child.duration(entry["seconds"]) if "seconds" in entry else "",
        "memory": f"{memory:,} MiB" if memory else "",
        "error": entry.get("error") or "",
    }


def _plots(run_dir: Path) -> Any:
    for name, plot in PLOTS:
        png = stage.folder(run_dir, name) / "plots" / f"{plot}.png"
        if png.is_file():
            alt = read_json(png.with_suffix(".json"), {}).get("alt", plot)
            yield {"data": base64.b64encode(png.read_bytes()).decode(), "alt": alt}
