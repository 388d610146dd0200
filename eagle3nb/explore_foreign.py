"""What ``notebooks/explore_foreign.ipynb`` shows: a directory of older artefacts, before anything is built on it.

What lies there, what the samples are, what trainer and server will assume of the draft config, the vocabulary tensors,
the verifier's keys, and the checks that can be run on all of it.
"""

import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from eagle3nb import draft_config, foreign, stage, verifier
from eagle3nb.bridges import artefacts, opening, reading, registry
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.errors import Refused
from eagle3nb.files import json_object
from eagle3nb.params import Int, NotebookParams
from eagle3nb.verifier import Verifier

SAMPLES = 16  # foreign samples that are looked at
IGNORED = ("optimizer", "scheduler", "rng_state", "training_args")


class ExploreForeign(NotebookParams):
    """Parameters of the notebook."""

    path: str | None = Field(
        None, description="directory of artefacts: samples, t2d/d2t, draft config, checkpoint (None: the run's)"
    )
    verifier: str | None = Field(
        None, description="hub id, local directory, package:NAME or tiny:NAME (None: the run's)"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the verifier")
    layer_ids: list[Int] | None = Field(
        None, description="inputs of layers, where the verifier is too large to measure"
    )


@dataclass
class Found:
    """What lies in a directory. ``problems``: (file, the one line) of what could not be read."""

    folder: Path
    verifier: Verifier
    samples: foreign.Source | None = None
    mapping: artefacts.Mapping | None = None
    counts: Path | None = None
    config: Path | None = None
    checkpoint: Path | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """(kind of artefact, what was found) for a table."""
        samples = f"{len(self.samples):,} of {self.samples.form}" if self.samples else None
        here = {
            "samples": samples,
            "vocabulary mapping": self.mapping.where if self.mapping else None,
            "token counts": self.counts,
            "draft config": self.config,
            "draft checkpoint": self.checkpoint,
        }
        return [(kind, str(what) if what else "none") for kind, what in here.items()] + self.problems


def look(settings: ExploreForeign) -> Found:
    """Find the artefacts of a directory; what cannot be read is listed, not raised."""
    folder = Path(settings.path or settings.run_dir).expanduser()
    if not folder.is_dir():
        raise Refused(f"path = {folder}: no such directory")
    if settings.verifier is None:
        found = Found(folder, stage.verifier(settings.run_dir))
    else:
        found = Found(folder, verifier.resolve(settings.verifier, trust_remote_code=settings.trust_remote_code))
    try:
        found.samples = foreign.source(folder)
    except Refused as error:
        if "no samples in it" not in str(error):
            found.problems.append(("samples", str(error)))
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(word in path.name for word in IGNORED):
            _place(found, path)
    return found


def _place(found: Found, path: Path) -> None:
    try:
        if path.name in ("config.json", "draft_config.json") and found.config is None:
            config = json_object(path)
            if draft_config.is_legacy(config) or "speculators_model_type" in config:
                found.config = path
                if (path.parent / "model.safetensors").is_file():
                    found.checkpoint = path.parent
        elif path.stem in ("t2d", "d2t") and path.suffix in (".pt", ".npy") and found.mapping is None:
            found.mapping = opening.mapping_in(path.parent)
        elif path.suffix == ".pt" and "freq" in path.stem and found.counts is None:
            artefacts.counts_of(reading.torch_file(path), path)
            found.counts = path
    except Refused as error:
        found.problems.append((path.name, str(error)))


def sample(found: Found, i: int = 0) -> tuple[dict[str, torch.Tensor], list[int], list[int]]:
    """(tensors by name, token ids, loss mask) of one sample; the mask is all zero where the format has none."""
    if found.samples is None:
        return {}, [], []
    one = found.samples.sample(i, found.verifier.hidden_size)
    named = {"input_ids": one.ids} | ({} if one.mask is None else {"loss_mask": one.mask})
    named |= {f"column {c}": states for c, states in enumerate(one.columns)}
    return named, one.ids.tolist(), one.mask.tolist() if one.mask is not None else [0] * len(one.ids)


def convention(found: Found, settings: ExploreForeign) -> dict[str, Any]:
    """What the samples' columns are, measured; or the line that says what is needed to know it."""
    if found.samples is None:
        return {"samples": "none found"}
    try:
        known = foreign.measure(found.samples, found.verifier, settings.layer_ids)
    except Refused as error:
        return {"not known": str(error)}
    return {
        "columns are the inputs of layers": known.layer_ids[:-1],
        "last column": "after the final norm" if known.last_is_normed else "before the final norm",
        "known by": known.how,
    }


def assumed(found: Found, settings: ExploreForeign) -> list[tuple[str, Any, Any, Any, str]]:
    """(field, in the file, to speculators, to vLLM, remark) for the draft config; empty where there is none."""
    if found.config is None:
        return []
    mine = json_object(found.config)
    if draft_config.is_legacy(mine):
        layers = settings.layer_ids or found.verifier.default_layer_ids
        kind = list(getattr(found.verifier.config, "architectures", None) or [])
        made = draft_config.to_speculators(
            mine, verifier=found.verifier.name, verifier_architectures=kind, layers=layers
        )
        trainer, remarks = made.config, {name.rpartition(".")[2]: why for name, _, _, why in made.notes if why}
    else:
        trainer, remarks = mine, {}
    file, trainer = draft_config.flattened(mine), draft_config.flattened(trainer)
    server = {name: _to_vllm(name, file) for name in dict.fromkeys([*file, *VLLM_DEFAULTS])}
    names = dict.fromkeys([*file, *trainer, *VLLM_DEFAULTS])
    return [(n, file.get(n, "absent"), trainer.get(n, "–"), server.get(n, "–"), remarks.get(n, "")) for n in names]


# What vLLM 0.32 takes for a field that a draft config does not have.
VLLM_DEFAULTS = {
    "eagle_aux_hidden_state_layer_ids": "guessed: [2, n/2, n-3]",
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "draft_vocab_size": "the whole vocabulary",
}


def _to_vllm(name: str, file: dict[str, Any]) -> Any:
    return file[name] if file.get(name) is not None else VLLM_DEFAULTS.get(name, file.get(name))


def verdicts(found: Found, settings: ExploreForeign) -> list[dict[str, Any]]:
    """The entries of all checks that can be run; on foreign samples, on the first ones as they would be imported."""
    with tempfile.TemporaryDirectory(prefix="eagle3nb-foreign-") as place:
        return registry.run(_artefacts(found, settings, Path(place)))


def _artefacts(found: Found, settings: ExploreForeign, place: Path) -> artefacts.Artefacts:
    layers, store, draft = settings.layer_ids, found.samples.store if found.samples else None, None
    if found.samples is not None and store is None:
        first = dataclasses.replace(found.samples, paths=found.samples.paths[:SAMPLES])
        try:
            made = foreign.import_samples(first, place / "store", found.verifier, layer_ids=layers, say=lambda _: None)
            store = StoreFiles(made.folder)
        except Refused as error:
            found.problems.append(("samples", str(error)))
    if found.checkpoint is not None:
        draft = opening.draft_in(found.checkpoint)
    elif found.config is not None:
        draft = artefacts.Draft(json_object(found.config), None, str(found.config))
    return opening.of_parts(
        found.folder, found.verifier, store=store, mapping=found.mapping, counts=found.counts, draft=draft,
        layer_ids=[*layers, found.verifier.num_layers] if layers else None,
    )  # fmt: skip
