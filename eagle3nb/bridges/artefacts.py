"""What is checked: an artefact and everything that can be known beside it, found lazily and read with care."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3nb import stage
from eagle3nb.bridges import reading
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.chat_template import ChatTemplate
from eagle3nb.errors import Refused
from eagle3nb.files import json_object
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
        return self.store.rows if self.store else self._rows

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
    if isinstance(value, torch.Tensor) and value.dim() == 1 and not value.is_floating_point():
        return {i: n for i, n in enumerate(value.tolist()) if n}
    if isinstance(value, dict):
        try:
            return {int(token): int(n) for token, n in value.items() if int(n)}
        except (TypeError, ValueError):
            raise Refused(f"{where}: wanted {{token id: count}}, found other keys or values") from None
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


def of_run(run_dir: Path | str, verifier: Verifier | None = None, deep: bool = False) -> Artefacts:
    """Everything a run directory holds so far."""
    run_dir = Path(run_dir)
    a = Artefacts(run_dir, "a run directory", deep=deep)
    a.run_dir = run_dir
    for name in stage.READS:
        path = stage.folder(run_dir, name) / "result.json"
        if path.is_file():
            a.of_run[name] = json_object(path)
    a.verifier = verifier or (stage.verifier(run_dir) if "preflight" in a.of_run else None)
    prepared, mapping = (stage.folder(run_dir, name) for name in ("prepare_data", "build_vocab_mapping"))
    if "prepare_data" in a.of_run:
        a._rows, a.heldout = reading.TokenRows(prepared / "rows"), reading.TokenRows(prepared / "heldout")
    store = stage.folder(run_dir, "extract_hidden_states") / "store"
    if "extract_hidden_states" in a.of_run:
        a.store = StoreFiles(store)
    if "build_vocab_mapping" in a.of_run:
        a.mapping, a._counts = mapping_in(mapping), mapping / "token_freq.pt"
    if "train" in a.of_run:
        a.draft = draft_in(stage.folder(run_dir, "train") / str(a.of_run["train"].get("best_checkpoint")))
    a.served = a.of_run.get("evaluate")
    return a


def of_parts(
    folder: Path,
    verifier: Verifier,
    *,
    store: StoreFiles | None = None,
    mapping: Mapping | None = None,
    counts: Path | None = None,
    draft: Draft | None = None,
    layer_ids: list[int] | None = None,
) -> Artefacts:
    """Artefacts that were found one by one; ``layer_ids`` are those of a store that does not declare them."""
    a = Artefacts(folder, "found artefacts", verifier)
    a.store, a.mapping, a.draft, a._counts, a._layer_ids = store, mapping, draft, counts, layer_ids
    return a


def identify(path: Path, verifier: Verifier | None = None, deep: bool = False) -> Artefacts:
    """Find out what ``path`` is and open it; `Refused` where it is nothing that is known here."""
    if not (path.is_file() or path.is_dir()):
        raise Refused(f"{path}: no such file or directory" if not path.exists() else f"{path}: no ordinary file")
    if path.is_dir():
        return _identify_folder(path, verifier, deep)
    a = Artefacts(path, "", verifier, deep)
    if path.suffix == ".safetensors":
        header = reading.safetensors_header(path)
        if "hidden_states" in header:
            a.kind, a.store = "one sample file", StoreFiles(path.parent, only=path)
            return a
        if (path.parent / "config.json").is_file() and any(name.startswith("fc.") for name in header):
            a.kind, a.draft = "a draft checkpoint", draft_in(path.parent, path)
            return a
        raise Refused(
            f"{path}: neither a sample (hidden_states) nor a draft checkpoint (fc) with its config.json beside it"
        )
    if path.suffix == ".json":
        config = json_object(path)
        a.kind, a.draft = "a draft config", Draft(config, None, str(path))
        if not ({"transformer_layer_config", "eagle_config", "draft_vocab_size"} & set(config)):
            raise Refused(
                f"{path}: no draft config (no transformer_layer_config, eagle_config or draft_vocab_size in it)"
            )
        return a
    if path.suffix in (".npy", ".pt"):
        return _identify_tensor(path, a)
    raise Refused(
        f"{path}: wanted a run, a store, a sample, t2d/d2t, token counts, a draft config or a draft checkpoint"
    )


def _identify_folder(path: Path, verifier: Verifier | None, deep: bool) -> Artefacts:
    a = Artefacts(path, "", verifier, deep)
    found = []
    if (path / "run.json").is_file() or (path / stage.label("preflight")).is_dir():
        return of_run(path, verifier, deep)
    if (path / "store.json").is_file() or (path / "hidden_states").is_dir():
        found.append("a sample store")
        if not (path / "hidden_states").is_dir():
            raise Refused(f"{path}: a store.json, but no directory hidden_states beside it")
        a.store = StoreFiles(path)
    if any((path / f"{name}{suffix}").is_file() for name in ("t2d", "d2t") for suffix in (".npy", ".pt")):
        found.append("a vocabulary pair")
        a.mapping = mapping_in(path)
        counts = path / "token_freq.pt"
        a._counts = counts if counts.is_file() else None
        result = path / "result.json"
        if result.is_file():
            a.of_run["build_vocab_mapping"] = json_object(result)
    if (path / "config.json").is_file():
        found.append("a draft checkpoint")
        a.draft = draft_in(path)
    if not found:
        raise Refused(f"{path}: wanted a run, a store (hidden_states/), t2d/d2t files or a draft checkpoint in it")
    a.kind = " and ".join(found)
    return a


def _identify_tensor(path: Path, a: Artefacts) -> Artefacts:
    value = reading.tensor_file(path)
    if isinstance(value, dict) and {"t2d", "d2t"} & set(value):
        a.kind, a.mapping = "a vocabulary pair in one file", _pair(value.get("t2d"), value.get("d2t"), path)
    elif path.stem in ("t2d", "d2t"):
        other = path.with_stem("d2t" if path.stem == "t2d" else "t2d")
        a.kind = "a vocabulary pair" if other.is_file() else f"{path.stem} without its other half"
        a.mapping = mapping_in(path.parent, path.suffix)
    else:
        a.kind, a._counts = "token counts", path
        _ = a.counts  # refuses what is none
    return a


def mapping_in(folder: Path, suffix: str | None = None) -> Mapping:
    """The vocabulary pair of a folder: ``.npy`` as the trainer reads it, else ``.pt``."""
    parts: dict[str, torch.Tensor | None] = {}
    for name in ("t2d", "d2t"):
        paths = [reading.inside(folder, f"{name}{s}") for s in ((suffix,) if suffix else (".npy", ".pt"))]
        found = [(p, reading.tensor_file(p)) for p in paths if p]
        for path, other in found[1:]:
            if isinstance(other, torch.Tensor) and not torch.equal(other, found[0][1]):
                raise Refused(f"{folder}: {found[0][0].name} and {path.name} disagree; keep the one you mean")
        parts[name] = found[0][1] if found else None
    return _pair(parts["t2d"], parts["d2t"], folder)


def _pair(t2d: Any, d2t: Any, where: Path) -> Mapping:
    for name, value in (("t2d", t2d), ("d2t", d2t)):
        if value is not None and not isinstance(value, torch.Tensor):
            raise Refused(f"{where}: {name} is a {type(value).__name__}; wanted a tensor")
    if t2d is None and d2t is None:
        raise Refused(f"{where}: neither t2d nor d2t in it")
    return Mapping(t2d, d2t, str(where))


def draft_in(folder: Path, weights: Path | None = None) -> Draft:
    """The draft checkpoint of a folder: its config and, where it is there, its safetensors file."""
    config = json_object(reading.inside(folder, "config.json") or folder / "config.json")
    draft = Draft(config, weights or reading.inside(folder, "model.safetensors"), str(folder))
    if draft.weights is None and not ({"transformer_layer_config", "eagle_config", "draft_vocab_size"} & set(config)):
        raise Refused(f"{folder}: no draft checkpoint (no model.safetensors, and its config.json is no draft's)")
    return draft


def add(a: Artefacts, other: Path) -> None:
    """Take what ``--against`` names as what the artefact is compared with."""
    if other.is_file() and other.suffix == ".json":
        b = Artefacts(other, "a draft config")
        b.draft = Draft(json_object(other), None, str(other))
    else:
        b = identify(other)
    _ = a.subjects  # from here on nothing becomes a subject
    a.verifier = a.verifier or b.verifier
    if a._layer_ids is None:
        ids = b.layer_ids
        if ids is None and b.draft and isinstance(b.draft.layer_ids, list) and a.verifier:
            ids = [*b.draft.layer_ids, a.verifier.num_layers]
        a._layer_ids = ids
    if a.mapping is None:
        a.mapping = b.mapping
    a._counts = a._counts or b._counts
    a._rows = a._rows or b.rows
    a.heldout = a.heldout or b.heldout
    a.of_run = b.of_run | a.of_run
