"""One self-contained page: the frame around every body, what templates need, notebooks as HTML."""

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from eagle3nb import child
from eagle3nb.files import read_json, write_text
from eagle3nb.text import visible

TEMPLATES = Path(__file__).parent.parent / "templates"
GENERATOR = '<meta name="generator" content="eagle3nb">'


@cache
def environment() -> Any:
    """Jinja2 with escaping and the filters of the templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_harmless
    )
    found.trim_blocks = found.lstrip_blocks = True
    found.filters |= {"duration": child.duration, "size": size, "number": number, "moment": moment}
    return found


def _harmless(value: Any) -> Any:
    """Texts from models, data and errors, with direction marks and the like made visible."""
    from markupsafe import Markup

    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\t".join(visible(part) for part in value.split("\t"))


def render(template: str, **values: Any) -> str:
    """A template with values; paths below the home directory are written with ``~``."""
    return environment().get_template(template).render(**tilde(values))


def page(title: str, body: str, *, script: str = "", highlight: bool = False) -> str:
    """A whole page around ``body`` (trusted HTML). The browser is told to load nothing from anywhere.

    ``script`` is allowed by its hash; ``highlight`` adds the styles of code cells.
    """
    from markupsafe import Markup

    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    if script:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=title, body=Markup(body), script=Markup(script), policy=policy, generator=Markup(GENERATOR),
            highlight=Markup(_highlight() if highlight else ""),
        )
    )  # fmt: skip


@cache
def _highlight() -> str:
    from pygments.formatters import HtmlFormatter

    light, dark = (
        HtmlFormatter(style=s, nobackground=True).get_style_defs(".highlight") for s in ("vs", "github-dark")
    )
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}"


def export_notebook(path: Path) -> Path:
    """Write a stage's executed notebook as one self-contained HTML file beside it, with a way back to the report."""
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    settings = Config()
    settings.TagRemovePreprocessor.enabled = True
    settings.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
    exporter = HTMLExporter(config=settings, template_name="basic")
    notebook = nbformat.from_dict(tilde(nbformat.read(path, as_version=4)))
    body, _ = exporter.from_notebook_node(notebook)
    target = path.with_suffix(".html")
    back = '<nav><a href="../report.html">Report of this run</a></nav>'
    write_text(target, page(f"{path.stem}, {path.parent.parent.name}", back + body, highlight=True))
    return target


def tilde(value: Any) -> Any:
    """``value`` with the home directory in every text inside written as ``~``."""
    from markupsafe import Markup

    if isinstance(value, dict):
        return {key: tilde(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(tilde(part) for part in value)
    if isinstance(value, str) and not isinstance(value, Markup):
        return _home_pattern().sub(r"\1~", value) if len(value) < 1_000_000 else value
    return value


@cache
def _home_pattern() -> re.Pattern:
    home = str(Path.home())
    # Only as the beginning of a path: not inside another one, nor in the base64 text of a picture. A colour of the
    # terminal ends in a letter.
    before = r"(^|[^\w.+/~-]|\x1b\[[\d;]*m|\bfile://)"
    return re.compile(rf"{before}{re.escape(home)}(?![\w+=-]|\.\w)") if len(home) > 1 else re.compile(r"(?!)()")


_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")


def plain(log: str) -> str:
    """A log without the colours, links and padding that are meant for a terminal."""
    lines = (_ESCAPES.sub("", line).rstrip() for line in log.splitlines())
    return "\n".join(
        "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line) for line in lines
    )


def picture(png: Path) -> dict[str, Any]:
    """A saved plot to be put into a page: its bytes as base64, its alternative text, the data behind it."""
    saved = read_json(png.with_suffix(".json"), {})
    return {
        "png": base64.b64encode(png.read_bytes()).decode(),
        "alt": saved.get("alt", png.stem),
        "table": _figures_of(saved.get("data", {})),
    }


def _figures_of(data: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of a plot as a table: of curves their ends and range, of bars every one."""
    if not data or not all(isinstance(series, dict) for series in data.values()):
        return None
    if all(series.keys() == {"x", "y"} for series in data.values()):
        rows = [
            [name, len(y), y[0], y[-1], min(y), max(y), sum(y) / len(y)]
            for name, series in data.items() if (y := series["y"])
        ]  # fmt: skip
        return {"heads": ["", "points", "first", "last", "smallest", "largest", "mean"], "rows": rows}
    labels = list(dict.fromkeys(label for series in data.values() for label in series))
    rows, heads = [[label, *(series.get(label) for series in data.values())] for label in labels], ["", *data]
    if len(data) == 2:
        heads.append("difference")
        rows = [[*row, row[2] - row[1] if None not in row else None] for row in rows]
    return {"heads": heads, "rows": rows}


def number(value: Any) -> str:
    """A number as people read it; ``–`` for none."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(count: int | None) -> str:
    """Bytes in decimal units."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{value:.3g} {unit}"


def moment(iso: str | None) -> str:
    """``2026-11-29 22:07 UTC`` of an ISO time in UTC."""
    return f"{iso[:10]} {iso[11:16]} UTC" if iso else ""


def compact(value: Any) -> str:
    """A parameter's value as it would stand in a params file."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
