"""Target agreement: do the last states, through the verifier's final norm and lm_head, give the tokens that follow?

Where they do not, a small set of known mistakes is tried, and the one that restores the agreement is the diagnosis.
"""

from dataclasses import dataclass
from typing import Any

import torch

from eagle3nb.verifier import GEMMA_STYLE_NORM, Verifier

SAMPLES, POSITIONS = 16, 768  # samples looked at, response positions in all at most
ROWS = 16384  # rows of lm_head at a time: 163840 x 7168 in float32 at once would be 4.7 GB
LOW = 0.9  # below it other readings are tried; healthy greedy data give 0.985 or more (see extract_hidden_states.py)
RESTORED = 0.15  # an explanation counts when it gives so much more than the plain reading


@dataclass
class Agreement:
    """``share``: of response positions whose next token is the argmax. ``cause``: what restores it, in words."""

    share: float
    by_sample: dict[int, float]
    positions: int
    cause: str = ""
    cause_id: str = ""  # last_state, shift, final_norm, column
    restored: float = 0.0
    other_samples: tuple[tuple[int, int], ...] = ()  # (sample, the row its states belong to)


class Head:
    """The verifier's final norm and lm_head, loaded alone."""

    def __init__(self, verifier: Verifier):
        self.weight, self.norm = verifier.weight("lm_head"), verifier.weight("norm").float()
        self.gemma, self.eps = verifier.config.model_type in GEMMA_STYLE_NORM, verifier.norm_eps

    def final_norm(self, hidden: torch.Tensor, plus_one: bool = False) -> torch.Tensor:
        """[n, hidden] before the norm -> after it; ``plus_one`` takes the other convention for its weight."""
        weight = self.norm + 1 if self.gemma != plus_one else self.norm
        hidden = hidden.float()
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def predict(self, normed: torch.Tensor) -> torch.Tensor:
        """[n, hidden] after the norm -> [n] token ids."""
        best = torch.full((len(normed),), -torch.inf)
        token = torch.zeros(len(normed), dtype=torch.long)
        for start in range(0, len(self.weight), ROWS):
            value, index = (normed @ self.weight[start : start + ROWS].float().T).max(-1)
            better = value > best
            best, token = torch.where(better, value, best), torch.where(better, index + start, token)
        return token


def measure(a: Any) -> Agreement:
    """Agreement of up to `SAMPLES` samples of ``a.store``, and the diagnosis where it is low."""
    head, loaded, left = Head(a.verifier), {}, POSITIONS
    for i in a.store.some(SAMPLES):
        states, ids = a.store.sample(i)
        mask = a.store.mask(i)
        n = min(len(states), len(ids), len(mask))
        at = mask[1:n].nonzero().flatten()[: max(8, POSITIONS // SAMPLES)]  # predicted from the position before
        if len(at) and left > 0:
            loaded[i], left = (states[:n], ids[:n], at), left - len(at)
    hits = {i: (head.predict(head.final_norm(s[at, -1])) == ids[at + 1]) for i, (s, ids, at) in loaded.items()}
    positions = sum(len(h) for h in hits.values())
    share = sum(int(h.sum()) for h in hits.values()) / max(1, positions)
    result = Agreement(share, {i: float(h.float().mean()) for i, h in hits.items()}, positions)
    if share < LOW and positions:
        _diagnose(result, head, loaded)
    if a.rows is not None:
        result.other_samples = tuple(_other_samples(result, head, loaded, a.rows))
    return result


def _diagnose(result: Agreement, head: Head, loaded: dict) -> None:
    """Try the known mistakes; keep the one that restores most."""
    some = dict(list(loaded.items())[:6])
    columns = next(iter(some.values()))[0].shape[1]
    readings = {
        ("last_state", "the last state is already after the final norm"): lambda s, at: s[at, -1].float(),
        ("final_norm", "the final norm multiplies by 1 + w"): lambda s, at: head.final_norm(s[at, -1], plus_one=True),
        ("shift", "the states are one position late: state p + 1 belongs to token p"): lambda s, at: head.final_norm(
            s[(at + 1).clamp(max=len(s) - 1), -1]
        ),
        ("shift", "the states are one position early: state p - 1 belongs to token p"): lambda s, at: head.final_norm(
            s[(at - 1).clamp(min=0), -1]
        ),
    }
    for c in range(columns - 1):
        text = f"column {c} is the last state, not column {columns - 1}"
        readings["column", text] = lambda s, at, c=c: head.final_norm(s[at, c])
    plain = _share(head, some, lambda s, at: head.final_norm(s[at, -1]))
    found = {key: _share(head, some, reading) for key, reading in readings.items()}
    (cause_id, cause), best = max(found.items(), key=lambda item: item[1])
    if best > plain + RESTORED:
        result.cause_id, result.cause, result.restored = cause_id, cause, best


def _share(head: Head, loaded: dict, reading: Any) -> float:
    hits = [head.predict(reading(s, at)) == ids[at + 1] for s, ids, at in loaded.values()]
    return float(torch.cat(hits).float().mean())


def _other_samples(result: Agreement, head: Head, loaded: dict, rows: Any) -> Any:
    """Samples whose states predict another row's tokens much better than their own."""
    usual = sorted(result.by_sample.values())[len(result.by_sample) // 2]
    for i, own in result.by_sample.items():
        if own > usual - RESTORED * 2 or result.cause:
            continue
        states, _, _ = loaded[i]
        predicted = head.predict(head.final_norm(states[:-1, -1])).numpy()
        best, belongs = own, None
        for k, (ids, mask) in zip(range(20_000), rows, strict=False):
            n = min(len(ids) - 1, len(predicted))
            at = mask[1 : n + 1] == 1
            if k != i and at.any():
                share = float((predicted[:n][at] == ids[1 : n + 1][at]).mean())
                if share > best:
                    best, belongs = share, k
        if belongs is not None and best > own + RESTORED * 2:
            yield i, belongs
