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

# One of them is in every draft's config, and none in a verifier's.
DRAFT_FIELDS = {"transformer_layer_config", "eagle_config", "draft_vocab_size"}
# What ``--against`` may bring.
BROUGHT = (
    "rows", "heldout", "layer_ids", "mapping", "counts", "draft", "other_draft", "declared", "checksums", "verifier",
)  # fmt: skip


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
        odd = sorted(set(self.store.scan.dtypes) - {"BF16", "F16", "F32", "F64"})
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


def of_run(
    run_dir: Path | str,
    verifier: Verifier | None = None,
    deep: bool = False,
    trust_remote_code: bool | None = None,
) -> Artefacts:
    """Everything a run directory holds so far; ``trust_remote_code`` overrules what its files say."""
    run_dir = Path(run_dir)
    a = Artefacts(run_dir, "a run directory", deep=deep)
    a.run_dir = run_dir
    for name in stage.READS:
        if path := reading.inside(run_dir, f"{stage.label(name)}/result.json"):
            a.of_run[name] = json_object(path)
    if verifier is None and "preflight" in a.of_run:
        verifier = stage.verifier(run_dir, trust_remote_code=trust_remote_code)
    a.verifier = verifier
    prepared, mapping = (stage.folder(run_dir, name) for name in ("prepare_data", "build_vocab_mapping"))
    if "prepare_data" in a.of_run:
        a._rows, a.heldout = (reading.TokenRows(_part(run_dir, prepared / name)) for name in ("rows", "heldout"))
    store = stage.folder(run_dir, "extract_hidden_states") / "store"
    if "extract_hidden_states" in a.of_run:
        a.store = StoreFiles(_part(run_dir, store))
    if "build_vocab_mapping" in a.of_run:
        a.mapping, a._counts = mapping_in(_part(run_dir, mapping)), reading.inside(mapping, "token_freq.pt")
    if "train" in a.of_run:
        best = str(a.of_run["train"].get("best_checkpoint"))
        a.draft = draft_in(_part(run_dir, stage.folder(run_dir, "train") / best))
    a.served = a.of_run.get("evaluate")
    wanted = ("acceptance_length", "acceptance_by_position", "identical_outputs", "prompts")
    if a.served and (lost := [name for name in wanted if name not in a.served]):
        raise Refused(f"{stage.folder(run_dir, 'evaluate')}/result.json: no {', '.join(lost)} in it; evaluate again")
    return a


def _part(run_dir: Path, folder: Path) -> Path:
    """A folder of a run; `Refused` where a link or a name leads out of it."""
    if reading.leads_away(folder, run_dir):
        raise Refused(f"{folder}: leads out of the run directory; it was not followed")
    return folder


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


def identify(
    path: Path, verifier: Verifier | None = None, deep: bool = False, trust_remote_code: bool | None = None
) -> Artefacts:
    """Find out what ``path`` is and open it; `Refused` where it is nothing that is known here."""
    if not (path.is_file() or path.is_dir()):
        raise Refused(f"{path}: no such file or directory" if not path.exists() else f"{path}: no ordinary file")
    if path.is_dir():
        return _identify_folder(path, verifier, deep, trust_remote_code)
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
        if not DRAFT_FIELDS & set(config):
            raise Refused(f"{path}: no draft config (no {', '.join(sorted(DRAFT_FIELDS))} in it)")
        return a
    if path.suffix in (".npy", ".pt"):
        return _identify_tensor(path, a)
    raise Refused(
        f"{path}: wanted a run, a store, a sample, t2d/d2t, token counts, a draft config or a draft checkpoint"
    )


def _identify_folder(path: Path, verifier: Verifier | None, deep: bool, trust_remote_code: bool | None) -> Artefacts:
    a = Artefacts(path, "", verifier, deep)
    found = []
    if (path / "run.json").is_file() or (path / stage.label("preflight")).is_dir():
        return of_run(path, verifier, deep, trust_remote_code)
    if (path / "store.json").is_file() or (path / "hidden_states").is_dir():
        found.append("a sample store")
        if not (path / "hidden_states").is_dir():
            raise Refused(f"{path}: a store.json, but no directory hidden_states beside it")
        a.store = StoreFiles(path)
    if any((path / f"{name}{suffix}").is_file() for name in ("t2d", "d2t") for suffix in (".npy", ".pt")):
        found.append("a vocabulary pair")
        a.mapping = mapping_in(path)
        a._counts = reading.inside(path, "token_freq.pt")
        if result := reading.inside(path, "result.json"):
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
    weights = weights or reading.inside(folder, "model.safetensors")
    if weights is None:
        there = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        what = f"found {', '.join(there[:3])}" if there else "found no weights (its config alone: name config.json)"
        raise Refused(f"{folder}: wanted a draft checkpoint with model.safetensors, {what}")
    draft = Draft(config, weights, str(folder))
    if not DRAFT_FIELDS & set(config) and not any(name.startswith("fc.") for name in draft.header):
        raise Refused(f"{folder}: no draft checkpoint (no fc among its tensors, and its config.json is no draft's)")
    return draft


def add(a: Artefacts, other: Path, trust_remote_code: bool | None = None) -> set[str]:
    """Take what ``--against`` names as what the artefact is compared with; the names of what that brings."""
    _ = a.subjects  # from here on nothing becomes a subject
    before = {name for name in BROUGHT if a.has(name)}
    b = identify(other, a.verifier, trust_remote_code=trust_remote_code)
    if b.store and b.store.only:
        raise Refused(f"{other}: one sample file is nothing to compare with; give its store")
    if a.store and a.store.only and b.store:
        a.store.home = b.store
    if a.draft is None:
        a.draft = b.draft
    else:
        a.other_draft = b.draft
    a.verifier = a.verifier or b.verifier
    if a._layer_ids is None:
        ids = b.layer_ids
        if ids is None and b.draft and isinstance(b.draft.layer_ids, list) and a.verifier:
            ids = [*b.draft.layer_ids, a.verifier.num_layers]
        a._layer_ids = ids
    if a.mapping is None:
        a.mapping = b.mapping or (_mapping_of(b.draft) if b.draft else None)
    a._counts = a._counts or b._counts
    a._rows = a._rows or b.rows
    a.heldout = a.heldout or b.heldout
    a.of_run = b.of_run | a.of_run
    return {name for name in BROUGHT if a.has(name)} - before


def _mapping_of(draft: Draft) -> Mapping | None:
    """The mapping that a checkpoint carries itself."""
    names = draft.header if draft.weights else {}
    t2d, d2t = (draft.tensor(name) if name in names else None for name in ("t2d", "d2t"))
    return Mapping(t2d, d2t, draft.where) if d2t is not None else None
