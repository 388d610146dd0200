"""From a path to `Artefacts`: what is it, what lies beside it, and what is it compared with?"""

from pathlib import Path
from typing import Any

import torch

from eagle3nb import stage
from eagle3nb.bridges import reading
from eagle3nb.bridges.artefacts import Artefacts, Draft, Mapping
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.errors import Refused
from eagle3nb.files import json_object
from eagle3nb.verifier import Verifier

# One of them is in every draft's config, and none in a verifier's.
DRAFT_FIELDS = {"transformer_layer_config", "eagle_config", "draft_vocab_size"}
# What ``--against`` may bring.
BROUGHT = (
    "rows", "heldout", "layer_ids", "mapping", "counts", "draft", "other_draft", "declared", "checksums", "verifier",
)  # fmt: skip


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
        try:
            a.draft = draft_in(_part(run_dir, stage.folder(run_dir, "train") / best))
        except (OSError, ValueError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(
                f"{run_dir}: best_checkpoint of train is no path that can be opened ({error})"[:300]
            ) from None
    a.served = a.of_run.get("evaluate")
    wanted = ("acceptance_length", "acceptance_by_position", "identical_outputs", "prompts")
    if a.served and (lost := [name for name in wanted if name not in a.served]):
        raise Refused(f"{stage.folder(run_dir, 'evaluate')}/result.json: no {', '.join(lost)} in it; evaluate again")
    return a


def _done(run_dir: Path) -> set[str]:
    """The stages that run.json has as finished."""
    file = reading.inside(run_dir, "run.json")
    entries = json_object(file).get("stages") if file else None
    known = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    return {
        name for name in stage.READS if any(e.get("name") == name and e.get("status") in stage.FINISHED for e in known)
    }


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
        a = of_run(path, verifier, deep, trust_remote_code)
        for name in sorted(_done(path) - set(a.of_run)):
            where = stage.folder(path, name) / "result.json"
            raise Refused(f"{where} is missing, though run.json says that {name} is done; run it again")
        return a
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
