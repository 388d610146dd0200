"""What is checked: an artefact and everything that can be known beside it, read when it is asked for.

`eagle3nb.bridges.opening` finds out what a path is and fills these in.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3nb.bridges import reading
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.chat_template import ChatTemplate
from eagle3nb.errors import Refused
from eagle3nb.verifier import Verifier


class Mapping:
    """A vocabulary pair: ``t2d`` (bool by verifier token) and ``d2t`` (offset by draft token), as they are on disk."""

    def __init__(self, t2d: torch.Tensor | None, d2t: torch.Tensor | None, where: str):
        self.t2d, self.d2t, self.where = t2d, d2t, where

    @property
    def size(self) -> int:
        """Draft tokens."""
        one = self.d2t if self.d2t is not None else self.t2d
        return int(one.numel()) if one is self.d2t else int(one.bool().sum())

    @cached_property
    def targets(self) -> torch.Tensor:
        """Verifier tokens the draft can propose, by d2t; by t2d where there is no d2t."""
        if self.d2t is not None:
            return torch.arange(self.d2t.numel()) + self.d2t.flatten().long()
        return self.t2d.flatten().bool().nonzero().flatten()


class Draft:
    """A draft config, with the tensors of its checkpoint where they are there; both known forms are read."""

    def __init__(self, config: dict[str, Any], weights: Path | None, where: str):
        self.config, self.weights, self.where = config, weights, where

    @cached_property
    def transformer(self) -> dict[str, Any]:
        """The decoder's config: nested in speculators' form, the config itself in the older one."""
        nested = self.config.get("transformer_layer_config")
        return nested if isinstance(nested, dict) else self.config

    def field(self, name: str) -> Any:
        """A field of EAGLE-3 itself: at the top, or in the older form's ``eagle_config``."""
        nested = self.config.get("eagle_config")
        if isinstance(nested, dict) and name in nested:
            return nested[name]
        return self.config.get(name)

    @property
    def layer_ids(self) -> Any:
        return self.field("eagle_aux_hidden_state_layer_ids")

    @property
    def hidden_size(self) -> int:
        return int(self.transformer.get("hidden_size") or 0)

    @property
    def vocab_size(self) -> int:
        """Draft vocabulary: the verifier's where the config names none."""
        return int(self.config.get("draft_vocab_size") or self.transformer.get("vocab_size") or 0)

    @cached_property
    def header(self) -> dict[str, reading.Entry]:
        return reading.safetensors_header(self.weights)

    def tensor(self, name: str) -> torch.Tensor:
        return reading.safetensors_tensor(self.weights, name)


class Artefacts:
    """All that is at hand for the checks; an attribute that is None is not there.

    ``kind`` says in words what the path was taken for. ``deep`` reads every byte of a store.
    """

    def __init__(self, path: Path, kind: str, verifier: Verifier | None = None, deep: bool = False):
        self.path, self.kind, self.verifier, self._deep = path, kind, verifier, deep
        self.run_dir: Path | None = None
        self.store: StoreFiles | None = None
        self.mapping: Mapping | None = None
        self.draft: Draft | None = None
        self.other_draft: Draft | None = None  # what a draft is compared with
        self.served: dict[str, Any] | None = None
        self.heldout: reading.TokenRows | None = None
        self._rows: reading.TokenRows | None = None
        self._layer_ids: Any = None
        self._counts: Any = None
        self.of_run: dict[str, dict[str, Any]] = {}  # stage -> its result.json
        self._why: dict[str, str] = {}

    @cached_property
    def subjects(self) -> frozenset[str]:
        """What is being checked; anything `add` brings in later is only compared with."""
        names = ("rows", "answered", "heldout", "store", "mapping", "counts", "draft", "served")
        found = {name for name in names if self.has(name)}
        return frozenset(found | ({"verifier"} if self.run_dir and self.has("verifier") else set()))

    def has(self, name: str) -> bool:
        """Whether an attribute is there."""
        return getattr(self, name) is not None

    def why_missing(self, name: str) -> str:
        """Why something could not be had, where it was tried."""
        return self._why.get(name, "")

    @property
    def headers(self) -> StoreFiles | None:
        """The store, where the headers of some samples can be read."""
        if self.store is None or self.store.unusable:
            self._why["headers"] = self.store.unusable if self.store else ""
            return None
        return self.store

    @property
    def states(self) -> StoreFiles | None:
        """The store, where its states are of a dtype that can be computed with."""
        if self.headers is None:
            self._why["states"] = self.why_missing("headers")
            return None
        odd = sorted(set(self.store.scan.dtypes) - set(reading.FLOATS))
        self._why["states"] = f"states are {', '.join(odd)}: see samples.dtype" if odd else ""
        return None if odd else self.store

    @property
    def deep(self) -> bool | None:
        return True if self._deep else None

    @property
    def declared(self) -> dict[str, Any] | None:
        return self.store.declared if self.store else None

    @property
    def checksums(self) -> Path | None:
        return self.store.checksums if self.store else None

    @property
    def rows(self) -> reading.TokenRows | None:
        """The token rows with their loss masks: the store's own, or the prepared ones."""
        return self.store.rows if self.store and self.store.rows is not None else self._rows

    @property
    def answered(self) -> reading.TokenRows | None:
        """The rows, where they hold responses: prepared rows whose responses are still to be generated do not."""
        waiting = not self.store and (self.prepared or {}).get("responses") == "generate"
        return None if waiting else self.rows

    @property
    def prepared(self) -> dict[str, Any] | None:
        return self.of_run.get("prepare_data")

    @property
    def mapping_result(self) -> dict[str, Any] | None:
        return self.of_run.get("build_vocab_mapping")

    @property
    def predicted(self) -> list[float] | None:
        return self.of_run.get("train", {}).get("predicted_acceptance_by_position")

    @property
    def layer_ids(self) -> list[int] | None:
        """Layer ids of the store's columns as declared: auxiliary ones and, last, the number of layers."""
        declared = (self.declared or {}).get("layer_ids") or self._layer_ids
        good = isinstance(declared, list) and declared and all(type(i) is int for i in declared)
        return declared if good else None

    @property
    def tensors(self) -> Any:
        return self.draft.header if self.draft and self.draft.weights else None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template as the data were prepared with; the verifier's own where that is not recorded."""
        known = self.prepared or {}
        return ChatTemplate(
            self.verifier, known.get("chat_template"), known.get("chat_template_kwargs"), known.get("system_prompt")
        )

    @cached_property
    def counts(self) -> dict[int, int] | None:
        """``{token id: count}`` as given; None where there is no such file."""
        if self._counts is None:
            return None
        return counts_of(reading.torch_file(self._counts), self._counts)

    @cached_property
    def response_counts(self) -> np.ndarray:
        """How often each token stands in a response (loss mask 1) of the rows, by token id."""
        return count_responses(self.rows, self.verifier.vocab_size if self.verifier else 0)

    @cached_property
    def reference(self) -> Any:
        """Distances of the stored layers to all layers of a reference forward; None (and why) where it cannot run."""
        from eagle3nb.bridges import reference

        if self.store is None or self.verifier is None:
            return None
        try:
            return reference.measure(self.verifier, self.store)
        except Refused as error:
            self._why["reference"] = str(error)
            return None

    @cached_property
    def agreement(self) -> Any:
        """How well the last states predict the next tokens, by reading: see `eagle3nb.bridges.agreement`."""
        from eagle3nb.bridges import agreement

        return agreement.measure(self)


def counts_of(value: Any, where: Path) -> dict[int, int]:
    """Token counts out of a loaded ``.pt`` file: a dict ``{id: count}`` or a 1-D integer tensor of counts by id."""
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in whole:
        return {i: n for i, n in enumerate(value.tolist()) if n}
    if isinstance(value, dict):
        try:
            found = {int(token): int(n) for token, n in value.items() if int(n)}
        except (TypeError, ValueError, OverflowError):
            raise Refused(f"{where}: wanted {{token id: count}}, found other keys or values") from None
        if any(abs(n) >= 2**62 for pair in found.items() for n in pair):
            raise Refused(f"{where}: wanted {{token id: count}}, found a number beyond 64 bits")
        return found
    shape = f" {list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
    raise Refused(f"{where}: wanted a dict of counts or a 1-D integer tensor, found {type(value).__name__}{shape}")


def count_responses(rows: reading.TokenRows, vocab_size: int, chosen: range | None = None) -> np.ndarray:
    """Counts [vocabulary] of the response tokens of rows; ids outside the vocabulary are left out."""
    counts = np.zeros(vocab_size, np.int64)
    wanted = set(chosen) if chosen is not None else None
    for i, (ids, mask) in enumerate(rows):
        if wanted is None or i in wanted:
            tokens = ids[: len(mask)][mask[: len(ids)] == 1]
            tokens = tokens[(tokens >= 0) & (tokens < vocab_size)]
            np.add.at(counts, tokens, 1)
    return counts
