"""What people look at: tables, tensors, tokens and curves, the same in JupyterLab, under papermill and in HTML.

Everything is a plain HTML table or a PNG, so it survives export. Text from models and data is escaped: tokens are
untrusted. `save_plot` leaves the picture and the numbers behind it in the stage's ``plots/``.
"""

import html
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from eagle3nb.files import atomic_path, read_jsonl, write_json
from eagle3nb.text import token_text, visible

# Paul Tol's bright scheme, its yellow darker: it must stand out from white. After six lines they come again, dashed.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#997700", "#66ccee", "#aa3377")
LINES, HATCHES = ("-", "--", ":"), ("", "//", "..")
PRINTED = "print-color-adjust:exact;-webkit-print-color-adjust:exact"  # a colour that means something, on paper too
RESPONSE = "rgba(34, 136, 51, 0.25)"
WORDY = 40  # characters; longer cells are prose
CELL = "padding:2px 10px;text-align:{align};vertical-align:top;border:0"


class Html:
    """A piece of HTML that Jupyter renders; its text is what a terminal prints."""

    def __init__(self, markup: str, text: str = ""):
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def number(value: Any) -> str:
    """A value as people read it: four significant digits, thousands apart, lists and dicts as JSON."""
    if isinstance(value, bool) or value is None:
        return "–" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
    if isinstance(value, (list, tuple, dict)):
        shown = [number(v) for v in value] if isinstance(value, (list, tuple)) else value
        return "[" + ", ".join(shown) + "]" if isinstance(shown, list) else json.dumps(value, default=str)
    return str(value)


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], caption: str = "") -> Html:
    """A table; columns of numbers to the right, everything escaped."""
    rows = [list(row) for row in rows]
    right = {
        k for row in rows for k, cell in enumerate(row) if isinstance(cell, (int, float)) and not isinstance(cell, bool)
    }

    def line(cells: Sequence[Any]) -> str:
        out = ""
        for k, cell in enumerate(cells):
            to_the_right = k in right and (cell is None or isinstance(cell, (int, float)))
            style = CELL.format(align="right" if to_the_right else "left")
            shown = visible(number(cell)) if not isinstance(cell, Html) else ""
            style += ";min-width:16em" if len(shown) > WORDY else ""  # on a narrow page: scrolled to, not squeezed
            out += f'<td style="{style}">{cell.markup if isinstance(cell, Html) else html.escape(shown)}</td>'
        return f"<tr>{out}</tr>"

    head = "".join(
        f'<th style="{CELL.format(align="right" if k in right else "left")};font-weight:600">{html.escape(h)}</th>'
        for k, h in enumerate(headers)
    )
    body = "".join(line(row) for row in rows)
    title = (
        f'<caption style="text-align:left;padding:4px 10px;opacity:.75">{html.escape(caption)}</caption>'
        if caption
        else ""
    )
    markup = (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:13px">{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    text = "\n".join("  ".join(number(c) if not isinstance(c, Html) else repr(c) for c in row) for row in rows)
    return Html(markup, text)


def config(
    first: Mapping[str, Any], second: Mapping[str, Any] | None = None, names: tuple[str, str] = ("", "")
) -> Html:
    """Fields of one config, or of two side by side with a mark where they differ."""
    if second is None:
        return table([(key, number(value)) for key, value in first.items()], ("field", "value"))
    keys = dict.fromkeys([*first, *second])
    rows = [
        (k, number(first.get(k)), number(second.get(k)), "" if first.get(k) == second.get(k) else "≠") for k in keys
    ]
    return table(rows, ("field", *names, ""))


def tensors(named: Mapping[str, torch.Tensor] | torch.Tensor) -> Html:
    """One line per tensor: shape, dtype, MiB, range, mean, std, and NaN, Inf or all zeros in words."""
    if isinstance(named, torch.Tensor):
        named = {"tensor": named}
    headers = ("name", "shape", "dtype", "MiB", "min", "max", "mean", "std", "remarks")
    return table([_tensor_line(name, tensor) for name, tensor in named.items()], headers)


def _tensor_line(name: str, tensor: torch.Tensor) -> list[Any]:
    mib = tensor.numel() * tensor.element_size() / 2**20
    line = [name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."), float(f"{mib:.3g}")]
    if not tensor.numel():
        return [*line, None, None, None, None, "empty"]
    values = tensor.float()
    finite = values[values.isfinite()]
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    remarks = [text for text, bad in ((f"{nans} NaN", nans), (f"{infs} Inf", infs)) if bad]
    if not bool((values != 0).any()):
        remarks.append("all zeros")
    if tensor.dtype == torch.bool:
        remarks.append(f"{int(values.sum()):,} true")
    if not finite.numel():
        return [*line, None, None, None, None, ", ".join(remarks)]
    std = float(finite.std()) if finite.numel() > 1 else 0.0
    return [*line, float(finite.min()), float(finite.max()), float(finite.mean()), std, ", ".join(remarks)]


def tokens(tokenizer: Any, ids: Sequence[int], mask: Sequence[int], caption: str = "") -> Html:
    """Decoded tokens, one box each; those with mask 1 (response, trained on) in green. Hover shows id and position."""
    boxes = []
    for position, (token, masked) in enumerate(zip(ids, mask, strict=True)):
        shown = html.escape(visible(token_text(tokenizer, token))).replace("\n", "⏎<br>")
        colour = RESPONSE if masked else "transparent"
        boxes.append(
            f'<span title="position {position}, id {token}, mask {int(masked)}" style="background:{colour};'
            f'{PRINTED};border-right:1px solid rgba(128,128,128,.3);unicode-bidi:isolate">{shown}</span>'
        )
    note = f"{len(ids)} tokens, {int(sum(mask))} of them response (green)"
    title = html.escape(f"{caption}: {note}" if caption else note)
    markup = (
        f'<div style="font-size:13px;opacity:.75">{title}</div><div style="font-family:monospace;font-size:13px;'
        f'white-space:pre-wrap;line-height:1.6;max-width:900px">{"".join(boxes)}</div>'
    )
    return Html(markup, f"{note}\n{tokenizer.decode(ids)}")


# Badges carry their own background, so they read alike in light and dark themes; skip is grey: it is no pass.
VERDICTS = {"fail": "#cc3311", "warn": "#b8620a", "pass": "#228833", "skip": "#6e6e6e"}


def checks(entries: Iterable[Mapping[str, Any]]) -> Html:
    """The entries of a ``checks.json`` as a table, the worst verdict first; advice only where it is needed."""
    order = list(VERDICTS)
    entries = sorted(entries, key=lambda entry: order.index(entry["verdict"]))
    rows = [
        (
            Html(f'<span title="{html.escape(entry["title"])}">{html.escape(entry["id"])}</span>', entry["id"]),
            _verdict(entry),
            number(entry["observed"]),
            number(entry["expected"]),
            entry["advice"] if entry["verdict"] != "pass" else "",
        )
        for entry in entries
    ]
    counts = {verdict: sum(entry["verdict"] == verdict for entry in entries) for verdict in order}
    caption = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no checks"
    return table(rows, ("check", "verdict", "observed", "expected", "advice"), caption)


def checks_text(entries: Iterable[Mapping[str, Any]], width: int = 100) -> str:
    """The same table for a terminal: bridge by bridge; what needs a look has more lines; long text is cut."""
    lines, bridge = [], None
    for entry in entries:
        if entry["bridge"] != bridge:
            bridge = entry["bridge"]
            lines.append(f"\n{bridge.replace('_', ' ')}")
        verdict = "fail (allowed)" if entry.get("allowed") else entry["verdict"]
        observed, expected = (visible(str(entry[key])) for key in ("observed", "expected"))
        quiet = f" (wanted: {expected[: width // 2]})" if entry["verdict"] in ("pass", "skip") and expected else ""
        lines.append(f"  {verdict:<5} {entry['id']:<26} {observed[:width]}{quiet}")
        if entry["verdict"] in ("fail", "warn"):
            lines += [f"        wanted: {expected[: 2 * width]}", f"        advice: {entry['advice'][: 2 * width]}"]
            if len(observed) > width:
                lines.insert(-2, f"        found:  {observed[: 4 * width]}")
    counts = {v: sum(entry["verdict"] == v for entry in entries) for v in VERDICTS}
    total = ", ".join(f"{n} {v}" for v, n in counts.items() if n) or "no check applies"
    return "\n".join([*lines, "", total])


def _verdict(entry: Mapping[str, Any]) -> Html:
    mark = badge(entry["verdict"])
    return Html(f"{mark.markup} allowed", f"{mark} (allowed)") if entry.get("allowed") else mark


def badge(verdict: str) -> Html:
    """A verdict (fail, warn, pass, skip) as a coloured word."""
    style = f"background:{VERDICTS[verdict]};{PRINTED};color:#fff;border-radius:3px;padding:0 6px;font-weight:600"
    return Html(f'<span style="{style}">{verdict}</span>', verdict)


# ---- pictures ------------------------------------------------------------------------------------------------


class Picture:
    """A PNG with alternative text; Jupyter embeds it."""

    def __init__(self, png: bytes, alt: str):
        self.png, self.alt = png, alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        return {"image/png": self.png, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}

    def __repr__(self) -> str:
        return self.alt


def save_plot(figure: Any, folder: Path | None, name: str, alt: str, data: Any) -> Picture:
    """Write ``plots/<name>.png`` and ``.json`` (``alt``, the data) below ``folder``; returns the picture.

    With ``folder`` None nothing is written: who only looks at a run leaves nothing in it.
    """
    if folder is None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        plt.close(figure)
        return Picture(buffer.getvalue(), alt)
    path = folder / "plots" / f"{name}.png"
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    write_json(path.with_suffix(".json"), {"alt": alt, "data": data})
    return Picture(path.read_bytes(), alt)


def _plain(text: str) -> str:
    """Text for a picture: matplotlib would set what stands between dollar signs as mathematics."""
    return visible(text).replace("$", r"\$")


def _axes(title: str, x: str, y: str, width: float = 7.0) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(width, 3.2))
    axes.set_title(_plain(title), fontsize=11, loc="left")
    axes.set_xlabel(_plain(x))
    axes.set_ylabel(_plain(y))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def curves(
    folder: Path | None, name: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str,
    x: str, y: str, *, log_x: bool = False, log_y: bool = False, markers: bool = False,
    mark: tuple[str, float] | None = None,
) -> Picture:  # fmt: skip
    """Lines over a common x axis: ``series`` is ``{label: (xs, ys)}``, ``mark`` a place on that axis and its name."""
    figure, axes = _axes(title, x, y)
    for k, (label, (xs, ys)) in enumerate(series.items()):
        look = {"color": COLOURS[k % 6], "linestyle": LINES[k // 6 % 3], "marker": "o" if markers else None}
        axes.plot(xs, ys, label=_plain(label), linewidth=1.5, markersize=4, **look)
    if log_x:
        axes.set_xscale("log")
    elif all(float(place).is_integer() for xs, _ in series.values() for place in xs):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if mark:
        axes.axvline(mark[1], color="#888888", linewidth=1, linestyle="--", label=_plain(mark[0]))
    if log_y and any(max(ys, default=0) > 0 for _, ys in series.values()):
        axes.set_yscale("log")
    if len(series) > 1 or mark:
        axes.legend(frameon=False, fontsize=9)
    ends = "; ".join(
        f"{label} from {number(float(ys[0]))} to {number(float(ys[-1]))}"
        for label, (_, ys) in series.items()
        if len(ys)
    )
    ends += f"; {mark[0]} at {number(mark[1])}" if mark else ""
    data = {label: {"x": list(map(float, xs)), "y": list(map(float, ys))} for label, (xs, ys) in series.items()}
    return save_plot(figure, folder, name, f"{title}: {y} over {x}; {ends}", data)


def bars(folder: Path | None, name: str, groups: Mapping[str, Mapping[str, float]], title: str, y: str) -> Picture:
    """Grouped bars: ``groups`` is ``{series: {label: value}}``."""
    labels = list(dict.fromkeys(label for values in groups.values() for label in values))
    figure, axes = _axes(title, "", y)
    width = 0.8 / len(groups)
    for k, (series, values) in enumerate(groups.items()):
        places = [i + (k - (len(groups) - 1) / 2) * width for i in range(len(labels))]
        look = {"color": COLOURS[k % 6], "hatch": HATCHES[k // 6 % 3]}
        axes.bar(places, [values.get(label, 0) for label in labels], width, label=_plain(series), **look)
    crowded = len(labels) > 5 or len(labels) * max(map(len, labels), default=0) > 60
    turned = {"rotation": 30, "ha": "right"} if crowded else {}
    axes.set_xticks(range(len(labels)), list(map(_plain, labels)), **turned)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=9)
    alt = f"{title}: " + "; ".join(
        f"{s} " + ", ".join(f"{k} {number(v)}" for k, v in vs.items()) for s, vs in groups.items()
    )
    return save_plot(figure, folder, name, alt, {s: dict(vs) for s, vs in groups.items()})


def scatter(
    folder: Path | None, name: str, groups: Mapping[str, Sequence[tuple[float, float]]], title: str, x: str, y: str,
    labels: Mapping[str, tuple[float, float]] | None = None,
) -> Picture:  # fmt: skip
    """Points in the plane: ``groups`` is ``{label: [(x, y), ...]}``; ``labels`` are written beside their places."""
    figure, axes = _axes(title, x, y)
    for k, (label, points) in enumerate(groups.items()):
        name_of = f"{_plain(label)} ({len(points)})"
        axes.scatter(*zip(*points, strict=True), color=COLOURS[k % 6], label=name_of, s=14, alpha=0.7)
    for text, place in (labels or {}).items():
        axes.annotate(_plain(text), place, fontsize=8, xytext=(3, 3), textcoords="offset points")
    axes.legend(frameon=False, fontsize=9)
    alt = f"{title}: " + ", ".join(f"{len(points)} points {label}" for label, points in groups.items())
    return save_plot(figure, folder, name, alt, {label: list(map(list, points)) for label, points in groups.items()})


def layer_norms(folder: Path | None, hidden_states: torch.Tensor, layer_ids: Sequence[int], first: int = 0) -> Picture:
    """RMS of each captured layer over the positions from ``first`` on; ``hidden_states`` [n, layers, hidden]."""
    rms = hidden_states.float().pow(2).mean(-1).sqrt()  # [n, layers]
    positions = list(range(first, first + rms.shape[0]))
    series = {f"layer {layer}": (positions, rms[:, k].tolist()) for k, layer in enumerate(layer_ids)}
    return curves(folder, "layer_norms", series, "RMS of the hidden states", "position", "RMS", log_y=True)


class Live:
    """One output that is drawn anew at most every ``seconds`` by ``make``; with ``last`` whatever the time."""

    def __init__(self, make: Any, seconds: float = 5.0):
        import time

        self.make, self.seconds, self.clock, self.last, self.handle = make, seconds, time.monotonic, 0.0, None

    def __call__(self, last: bool = False) -> None:
        if not last and self.clock() - self.last < self.seconds:
            return
        self.last = self.clock()
        picture = self.make()
        if picture is None:
            return
        from IPython.display import display

        if self.handle is None:
            self.handle = display(picture, display_id=True)
        else:
            self.handle.update(picture)


def training(folder: Path, name: str) -> Picture | None:
    """Loss per step and per validation from ``metrics.jsonl``; None before the first step."""
    rows = read_jsonl(folder / "metrics.jsonl")
    steps = [(row["step"], row["train"]["loss"]) for row in rows if "train" in row]
    if not steps:
        return None
    series = {"training": tuple(zip(*steps, strict=True))}
    # A validation's step is the number of steps before it.
    points = [(row["step"], row["val"]["loss_epoch"]) for row in rows if "val" in row]
    if points:
        series["validation"] = tuple(zip(*points, strict=True))
    return curves(folder, name, series, "Loss", "step", "loss")


def accuracy(folder: Path, validations: list[dict[str, Any]]) -> Picture:
    """Validation accuracy per draft position over the epochs (``full_acc_k``)."""
    title = "Validation accuracy by draft position"
    return _by_position(folder, "accuracy", validations, r"full_acc_(\d+)_epoch", title, "share right")


def loss_by_position(folder: Path, validations: list[dict[str, Any]]) -> Picture:
    """Validation loss per draft position over the epochs (``loss_k``)."""
    title = "Validation loss by draft position"
    return _by_position(folder, "loss_by_position", validations, r"loss_(\d+)_epoch", title, "loss")


def _by_position(folder: Path, name: str, validations: list[dict], pattern: str, title: str, y: str) -> Picture:
    found = [match for key in validations[-1]["val"] if (match := re.fullmatch(pattern, key))]
    epochs = [row["epoch"] + 1 for row in validations]
    series = {f"position {m[1]}": (epochs, [row["val"][m[0]] for row in validations]) for m in found}
    return curves(folder, name, series, title, "epoch", y, markers=True)


# Of the strip of `steps`; in rgba, as the page below may be light or dark.
STRIP_STYLE = (
    """
.e3-strip { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 900px; }
.e3-strip span { unicode-bidi: isolate; padding: 1px 0; }
.e3-accepted { background: rgba(34, 136, 51, .28); """
    + PRINTED
    + """; }
.e3-missed { border-bottom: 2px solid rgba(204, 51, 17, .75); }
.e3-step { border-left: 1px solid rgba(128, 128, 128, .45); }
.e3-note { font-size: 13px; margin: .6em 0 .2em; } .e3-steps { overflow-x: auto; font-size: 13px; }
.e3-steps table { border-collapse: collapse; } .e3-steps :is(th, td) { padding: 1px 10px; text-align: left; }
.e3-steps td:first-child { text-align: right; }
.e3-steps code { unicode-bidi: isolate; white-space: pre; margin-right: .5em; }
td .e3-rejected { opacity: .75; } .e3-prompt { opacity: .75; white-space: pre-wrap; font-size: 13px; }
"""
)
STRIP_LEGEND = (
    '<span class="e3-accepted">green</span>: draft tokens that were accepted; plain: the verifier’s own tokens; '
    '<span class="e3-missed">underlined in red</span>: the verifier’s own token in place of a rejected draft '
    "(hover, or open the list of steps)"
)


def draft_steps(response: Mapping[str, Any], num_speculative_tokens: int) -> list[dict[str, list[str]]]:
    """Per verifier step the texts of ``accepted`` draft tokens, the verifier's ``own`` and ``rejected`` draft tokens.

    ``response`` is a recorded one of ``responses.json``. Where the draft's tokens are not known, accepted ones follow
    from the step's size, and ``rejected`` is empty.
    """
    answer = response["with_draft"][str(num_speculative_tokens)]
    drafts, found, start = answer.get("drafts"), [], 0

    def texts(ids: Iterable[int]) -> list[str]:
        return [response["texts"][str(token)] for token in ids]

    for k, size in enumerate(answer["steps"]):
        step = answer["tokens"][start : start + size]
        draft = drafts[k] if drafts else step[:-1]
        same = 0
        while same < min(len(step), len(draft)) and step[same] == draft[same]:
            same += 1
        rejected = draft[same:] if same < len(step) else []  # a response may end inside accepted tokens
        found.append({"accepted": texts(step[:same]), "own": texts(step[same:]), "rejected": texts(rejected)})
        start += size
    return found


def steps(response: Mapping[str, Any], num_speculative_tokens: int) -> Html:
    """A recorded response as a strip of tokens, one group per verifier step, and the same as a list of steps."""
    rows = draft_steps(response, num_speculative_tokens)
    boxes, lines = [], []
    for k, row in enumerate(rows, 1):
        title = f"step {k}: {len(row['accepted'])} accepted"
        if row["rejected"]:
            title += ", rejected " + " ".join(f"«{_one_line(text)}»" for text in row["rejected"])
        inside = "".join(f'<span class="e3-accepted">{_in_strip(text)}</span>' for text in row["accepted"])
        missed = ' class="e3-missed"' if row["rejected"] else ""
        inside += "".join(f"<span{missed}>{_in_strip(text)}</span>" for text in row["own"])
        boxes.append(f'<span class="e3-step" title="{html.escape(title)}">{inside}</span>')
        cells = [
            "".join(f'<code class="e3-{name}">{html.escape(_one_line(text))}</code>' for text in row[name])
            for name in ("accepted", "own", "rejected")
        ]
        lines.append(f"<tr><td>{k}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    accepted, rejected = (sum(len(row[name]) for row in rows) for name in ("accepted", "rejected"))
    total = sum(len(row["accepted"]) + len(row["own"]) for row in rows)
    note = (
        f"{response['id']} ({response['kind']}): {total} tokens in {len(rows)} steps, "
        f"{accepted} draft token{'' if accepted == 1 else 's'} accepted"
    )
    note += f", {rejected} rejected" if rejected else ""
    prompt = f'<div class="e3-prompt">{_in_strip(response["text"])}</div>' if "text" in response else ""
    heads = "".join(f"<th>{h}</th>" for h in ("step", "accepted draft", "verifier’s own", "rejected draft"))
    markup = (
        f'<style>{STRIP_STYLE}</style><div class="e3-note">{html.escape(visible(note))}</div>'
        f'<div class="e3-strip">{"".join(boxes)}</div>'
        f'<details><summary class="e3-note">Prompt, and step by step</summary>{prompt}'
        f'<div class="e3-steps" tabindex="0"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )
    return Html(markup, note)


def _in_strip(text: str) -> str:
    return html.escape(visible(text)).replace("\n", "⏎<br>")


def _one_line(text: str) -> str:
    """A token in a list: spaces and line ends as signs."""
    return visible(text).replace("\n", "⏎").replace(" ", "·")
