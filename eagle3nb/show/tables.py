"""Tables of anything: configs, tensors, tokens with their mask, checks; each also as text for a terminal."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from eagle3nb.text import token_text, visible

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
