"""Layer identity: a few samples recomputed by a reference forward, each stored column matched against every layer."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from eagle3nb import child
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.errors import Refused
from eagle3nb.verifier import Verifier

SAMPLES, TOKENS = 3, 96  # samples recomputed, tokens of each at most
MEMORY_SHARE = 0.6  # of the free memory, for the weights in float32


@dataclass
class Reference:
    """Median relative distances ``|h - r| / |r|`` of the stored columns to the layers of a reference forward.

    ``distance`` [samples, 3 shifts, columns, num_layers + 2]: candidate k <= num_layers is the input of layer k (the
    last one of these before the final norm), candidate num_layers + 1 the state after the final norm. Shift s - 1:
    stored position p against reference position p + s - 1. Where nothing is stored the distance is infinite.
    """

    samples: list[int]
    distance: torch.Tensor
    num_layers: int

    @property
    def over_samples(self) -> torch.Tensor:
        """[3, columns, candidates]: the median sample."""
        return self.distance.median(0).values

    def nearest(self, column: int, shift: int = 1) -> tuple[int, float]:
        """(candidate, distance) nearest to a column at one shift (1: none)."""
        value, index = self.over_samples[shift, column].min(0)
        return int(index), float(value)

    def name(self, candidate: int) -> str:
        """A candidate in words."""
        if candidate > self.num_layers:
            return "the state after the final norm"
        if candidate == self.num_layers:
            return "the final state before the final norm"
        return f"the input of layer {candidate}"


def measure(verifier: Verifier, store: StoreFiles) -> Reference:
    """Run the reference in a child process; `Refused` with the reason where it cannot run here."""
    _check_memory(verifier)
    verifier.complete()
    child.refuse_if_no_module("transformers")
    samples = store.some(SAMPLES)
    if not samples:
        raise Refused("no sample that can be read")
    samples = [i for i in samples if store.tokens_are_known(i, verifier.vocab_size)]
    if not samples:
        raise Refused("token ids outside the vocabulary: see samples.vocabulary")
    with tempfile.TemporaryDirectory(prefix="eagle3nb-reference-") as folder:
        job = {
            "verifier_path": str(verifier.path),
            "trust_remote_code": verifier.trust_remote_code,
            "files": [str(store.path(i).resolve()) for i in samples],
            "tokens": TOKENS,
        }
        try:
            done = child.run("eagle3nb.engine.reference", job, Path(folder), quiet=True)
        except child.ChildFailed as error:
            raise Refused(f"the reference forward failed: {str(error)[:200]}") from None
    return Reference(samples, torch.tensor(done["distance"]), done["num_layers"])


def _check_memory(verifier: Verifier) -> None:
    """`Refused` where the verifier in float32 would not fit in the free memory."""
    on_disk = verifier.weights.total_bytes() or 0
    free = psutil.virtual_memory().available
    if 2 * on_disk > MEMORY_SHARE * free:
        raise Refused(
            f"the verifier does not fit: {2 * on_disk / 1e9:.0f} GB in float32, {free / 1e9:.0f} GB free; measured "
            "without it: agreement through lm_head, growth of the layers, what the store declares"
        )
