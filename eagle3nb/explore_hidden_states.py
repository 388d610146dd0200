"""What ``notebooks/explore_hidden_states.ipynb`` shows of a sample store: of any size, since only slices are read.

Layers are named by their ids in ``store.json``. Everything here takes a `View`: one sample, some of its positions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from eagle3nb import stage, verifier
from eagle3nb.errors import Refused
from eagle3nb.params import Count, Int, NotebookParams
from eagle3nb.samples import Store
from eagle3nb.text import quoted

VOCABULARY_PART = 8192  # rows of the lm_head multiplied at once

Place = Annotated[Int, Field(ge=0)]


class ExploreHiddenStates(NotebookParams):
    """Parameters of the notebook."""

    store: str | None = Field(None, description="sample store to look at (None: the run's)")
    verifier: str | None = Field(None, description="hub id, local directory or package:NAME (None: the run's)")
    sample: Place = Field(0, description="number of the sample to look at")
    first: Place = Field(0, description="first position to look at")
    positions: Count = Field(256, description="positions to look at, at most")
    layer_id: Int | None = Field(None, description="layer of the projection and the outliers (None: the last)")
    spread: Count = Field(16, description="samples that figures over several samples read")


@dataclass
class View:
    """One sample of a store, positions ``first`` to ``first + positions``."""

    store: Store
    verifier: verifier.Verifier
    dataset: Any
    settings: ExploreHiddenStates
    layer_ids: list[int]
    layer_id: int

    @property
    def rows(self) -> slice:
        return slice(self.settings.first, self.settings.first + self.settings.positions)

    def row(self) -> tuple[list[int], list[int]]:
        """Token ids and loss mask of the positions looked at."""
        row = self.dataset[self.settings.sample]
        return row["input_ids"][self.rows].tolist(), row["loss_mask"][self.rows].tolist()

    def states(self, layer_id: int | None = None) -> torch.Tensor:
        """Their states: [n, layers, hidden], or [n, hidden] of one layer."""
        column = None if layer_id is None else self.layer_ids.index(layer_id)
        return self.store.hidden_states(self.settings.sample, self.rows, column)


def view(settings: ExploreHiddenStates) -> View:
    """Open the store; ``Refused`` where it does not hold what the settings ask for."""
    store = Store(settings.store or stage.folder(settings.run_dir, "extract_hidden_states") / "store")
    info, name = store.info, settings.verifier
    found = verifier.resolve(name) if name else stage.verifier(settings.run_dir)
    if found.hidden_size != info["hidden_size"]:
        raise Refused(
            f"{store.folder} holds states of {info['hidden_size']} numbers, the verifier {found.name} has "
            f"{found.hidden_size}; set verifier to the one the store was made with"
        )
    if settings.sample >= info["count"]:
        raise Refused(f"sample = {settings.sample}: the store has samples 0 to {info['count'] - 1}")
    seq = store.shape(settings.sample)[0]
    if settings.first >= seq:
        raise Refused(f"first = {settings.first}: sample {settings.sample} has positions 0 to {seq - 1}")
    layer_id = info["layer_ids"][-1] if settings.layer_id is None else settings.layer_id
    if layer_id not in info["layer_ids"]:
        raise Refused(f"layer_id = {layer_id}: the store has the layers {info['layer_ids']}")
    return View(store, found, store.dataset(), settings, info["layer_ids"], layer_id)


def summary(view: View) -> dict[str, Any]:
    """What the store holds, from its declaration and the lengths of its samples."""
    info, shape = view.store.info, view.store.shape(view.settings.sample)
    lengths = np.asarray(view.dataset.with_format("numpy")["seq_len"][:])
    gb = info["tokens"] * len(info["layer_ids"]) * info["hidden_size"] * 2 / 1e9
    return {
        "store": Path(view.store.folder).name,
        "samples": info["count"],
        "tokens": info["tokens"],
        "tokens per sample": f"{lengths.min()} to {lengths.max()}, median {int(np.median(lengths))}",
        "layer ids": info["layer_ids"],
        "last layer": info["last_layer"],
        "GB": round(gb, 2),
        f"sample {view.settings.sample}": f"[{shape[0]} positions, {shape[1]} layers, {shape[2]}]",
        "bytes read for the positions shown": view.states().nbytes,
    }


def neighbours(view: View, count: int = 8) -> list[tuple[Any, ...]]:
    """(number, tokens, response tokens, start of the response) of the chosen sample and those after it."""
    start, tokenizer = view.settings.sample, view.verifier.tokenizer
    out = []
    for i in range(start, min(start + count, len(view.dataset))):
        row = view.dataset[i]
        response = row["input_ids"][row["loss_mask"].bool()]
        out.append((i, int(row["seq_len"]), len(response), repr(tokenizer.decode(response[:16]))))
    return out


def rms(states: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension, float32."""
    return states.float().pow(2).mean(-1).sqrt()


def growth(view: View, rows: int = 64) -> list[tuple[Any, ...]]:
    """(layer id, median RMS, growth against the layer before it, RMS at position 0) over ``spread`` samples.

    Reads the first ``rows`` positions of each. Position 0 is kept apart: it is an attention sink.
    """
    count = len(view.dataset)
    chosen = sorted({round(k) for k in np.linspace(0, count - 1, min(view.settings.spread, count))})
    sizes = [rms(view.store.hidden_states(i, slice(0, rows))) for i in chosen]  # of [n, layers]
    inner = torch.cat([size[1:] for size in sizes]).median(0).values.tolist()
    sink = torch.stack([size[0] for size in sizes]).median(0).values.tolist()
    before = [None, *inner[:-1]]
    return [
        (f"layer {layer}", here, here / last if last else None, zero)
        for layer, here, last, zero in zip(view.layer_ids, inner, before, sink, strict=True)
    ]


def similarity(view: View) -> list[tuple[Any, ...]]:
    """Per layer: mean cosine of the same position in each layer, then of different positions within the layer."""
    states = _without_sink(view, view.states().float())
    unit = torch.nn.functional.normalize(states, dim=-1)  # [n, layers, hidden]
    between = torch.einsum("nlh,nmh->lm", unit, unit) / len(unit)
    pairs = max(1, len(unit) * (len(unit) - 1))
    within = (unit.sum(0).pow(2).sum(-1) - unit.pow(2).sum((0, 2))) / pairs
    return [
        (f"layer {layer}", *between[k].tolist(), float(within[k])) for k, layer in enumerate(view.layer_ids)
    ]  # fmt: skip


def _without_sink(view: View, states: torch.Tensor) -> torch.Tensor:
    return states[1:] if view.settings.first == 0 and len(states) > 1 else states


def projection(view: View) -> tuple[dict[str, list], dict[str, tuple[float, float]], float]:
    """Principal components of the layer's states, position 0 left out.

    Returns points per group (prompt, response), the eight farthest points by position, and the share of the variance
    that the two axes carry.
    """
    states, (_, mask) = _without_sink(view, view.states(view.layer_id).float()), view.row()
    start = len(mask) - len(states)
    centred = states - states.mean(0)
    # Eigenvectors of the n x n products: far fewer numbers than channels.
    energy, vectors = torch.linalg.eigh(centred @ centred.T)  # rising
    energy = energy.clamp_min(0)
    points = (vectors * energy.sqrt()).flip(-1)[:, :2]
    points = torch.nn.functional.pad(points, (0, 2 - points.shape[1]))  # [n, 2], also of one position
    share = float(energy[-2:].sum() / energy.sum().clamp_min(1e-30))
    groups = {
        name: [tuple(p) for p, m in zip(points.tolist(), mask[start:], strict=True) if m == wanted]
        for name, wanted in (("prompt", 0), ("response", 1))
    }
    far = points.norm(dim=-1).topk(min(8, len(points))).indices.tolist()
    labels = {str(view.settings.first + start + k): tuple(points[k].tolist()) for k in far}
    return {name: found for name, found in groups.items() if found}, labels, share


def outlier_channels(view: View, count: int = 8) -> list[tuple[Any, ...]]:
    """(channel, RMS over the positions, times the median channel, share of the layer's energy), largest first."""
    energy = _without_sink(view, view.states(view.layer_id).float()).pow(2).mean(0)  # [hidden]
    share = energy / energy.sum().clamp_min(1e-30)
    return [(k, size, times, float(share[k])) for k, size, times in _largest(energy.sqrt(), count)]


def outlier_positions(view: View, count: int = 8) -> list[tuple[Any, ...]]:
    """(position, token, RMS, times the median position), largest first."""
    ids, tokenizer = view.row()[0], view.verifier.tokenizer
    found = _largest(rms(view.states(view.layer_id)), count)
    return [(view.settings.first + k, quoted(tokenizer, ids[k]), size, times) for k, size, times in found]


def _largest(sizes: torch.Tensor, count: int) -> list[tuple[int, float, float | None]]:
    """(index, size, times the median size) of the largest ones."""
    median, found = float(sizes.median()), sizes.topk(min(count, len(sizes)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [(k, size, size / median if median else None) for k, size in pairs]


def predictions(view: View, count: int = 16, top: int = 3) -> list[tuple[Any, ...]]:
    """(position, token, real next token, ✓ or ✗, the verifier's ``top`` predictions) at response positions.

    The last layer's states through the verifier's final norm and lm_head.
    """
    ids, mask = view.row()
    places = [k for k in range(len(ids) - 1) if mask[k + 1]][:count]
    if not places:
        return []
    hidden = view.verifier.final_norm(view.states(view.layer_ids[-1])[places])  # [n, hidden]
    values, tokens, total = _top(view.verifier, hidden, top)
    tokenizer, out = view.verifier.tokenizer, []
    for row, k in enumerate(places):
        chances = (values[row] - total[row]).exp().tolist()
        best = tokens[row].tolist()
        guesses = (f"{quoted(tokenizer, t)} {chance:.2f}" for t, chance in zip(best, chances, strict=True))
        right = "✓" if best[0] == ids[k + 1] else "✗"
        place, next_one = quoted(tokenizer, ids[k]), quoted(tokenizer, ids[k + 1])
        out.append((view.settings.first + k, place, next_one, right, *guesses))
    return out


def _top(
    verifier: verifier.Verifier, hidden: torch.Tensor, top: int, candidates: int = 32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, token ids) [n, top] and the log of the normaliser [n].

    All logits in the lm_head's own dtype first, part by part, then the best candidates again in float32. The head is
    opened anew for every part: one mapping kept open would hold each page that was read in memory.
    """
    rough, tokens = hidden.new_empty(len(hidden), 0), torch.empty(len(hidden), 0, dtype=torch.long)
    total = hidden.new_full((len(hidden),), -torch.inf)
    for start in range(0, verifier.vocab_size, VOCABULARY_PART):
        part = verifier.weight("lm_head")[start : start + VOCABULARY_PART]
        logits = (hidden.to(part.dtype) @ part.T).float()
        total = torch.logaddexp(total, logits.logsumexp(-1))
        ids = torch.arange(start, start + len(part)).expand(len(hidden), -1)
        rough, tokens = torch.cat([rough, logits], 1), torch.cat([tokens, ids], 1)
        rough, order = rough.topk(min(candidates, rough.shape[1]))
        tokens = tokens.gather(1, order)
    exact = torch.einsum("nh,nch->nc", hidden, verifier.weight("lm_head")[tokens].float())
    rest = total + (1 - (rough - total[:, None]).exp().sum(-1)).clamp_min(1e-6).log()
    values, order = exact.topk(min(top, exact.shape[1]))
    return values, tokens.gather(1, order), torch.logaddexp(rest, exact.logsumexp(-1))
