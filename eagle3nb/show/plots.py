"""Pictures with alternative text and their data: lines, bars, points, what training and hidden states look like."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from eagle3nb.files import atomic_path, read_jsonl, write_json
from eagle3nb.show.tables import number
from eagle3nb.text import visible

# Paul Tol's bright scheme, its yellow darker: it must stand out from white. After six lines they come again, dashed.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#997700", "#66ccee", "#aa3377")
LINES, HATCHES = ("-", "--", ":"), ("", "//", "..")


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
