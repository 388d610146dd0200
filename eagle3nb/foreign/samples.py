"""Sample files of other tools, turned into a sample store.

======================  ====================================================================================
format                  one sample
======================  ====================================================================================
``speculators-0.3-v0``  ``.pt``: ``input_ids`` [s], ``loss_mask`` [s], ``hidden_state`` [s, 3h], ``target`` [s, h]
``speculators-0.3-v1``  ``.pt``: ``input_ids`` [s], ``loss_mask`` [s], ``hidden_states``: list of [s, h], last one last
``speculators-0.9``     this workbook's layout without ``store.json``
``specforge``           ``rows_*/data_*.ckpt[.gz]``: ``input_ids``, ``loss_mask``, ``aux_hidden_state`` [1, s, 3h],
                        ``hidden_state`` [1, s, h]
``modelopt``            ``.pt``: ``input_ids`` [s], ``aux_hidden_states`` [s, 3h], ``hidden_states`` [s, h]; no mask
======================  ====================================================================================

Which layer a column is and whether the last one has been through the final norm is measured, never taken from the
format: see `measure`. The source is only read.
"""

import gzip
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eagle3nb import conversations
from eagle3nb.bridges import agreement, reading, reference
from eagle3nb.bridges.agreement import AGREES
from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.extract_hidden_states import SAME
from eagle3nb.bridges.opening import of_parts
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.chat_template import ChatTemplate
from eagle3nb.errors import Refused
from eagle3nb.files import sha256_json
from eagle3nb.samples import Declaration, Store
from eagle3nb.verifier import Verifier

COLUMNS = 4  # of an ordinary EAGLE-3 sample
PROBES = 4  # samples that the conventions are measured on


@dataclass
class Sample:
    """Token ids [s], loss mask [s] (None: there is none), one tensor [s, hidden] per column, the last state last."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    columns: list[torch.Tensor]


# ---- reading one sample ----------------------------------------------------------------------------------------


def _v0(value: dict[str, Any], hidden: int) -> Sample:
    aux = value["hidden_state"].split(hidden, dim=-1)
    return Sample(value["input_ids"], value["loss_mask"], [*aux, value["target"]])


def _v1(value: dict[str, Any], hidden: int) -> Sample:
    return Sample(value["input_ids"], value["loss_mask"], list(value["hidden_states"]))


def _specforge(value: dict[str, Any], hidden: int) -> Sample:
    aux = value["aux_hidden_state"].squeeze(0).split(hidden, dim=-1)
    return Sample(value["input_ids"], value["loss_mask"], [*aux, value["hidden_state"].squeeze(0)])


def _modelopt(value: dict[str, Any], hidden: int) -> Sample:
    aux = value["aux_hidden_states"].split(hidden, dim=-1)
    return Sample(value["input_ids"], value.get("loss_mask"), [*aux, value["hidden_states"]])


# format -> (keys that tell it, reader)
FORMATS: dict[str, tuple[frozenset[str], Callable[[dict[str, Any], int], Sample]]] = {
    "speculators-0.3-v0": (frozenset(("input_ids", "loss_mask", "hidden_state", "target")), _v0),
    "speculators-0.3-v1": (frozenset(("input_ids", "loss_mask", "hidden_states")), _v1),
    "specforge": (frozenset(("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")), _specforge),
    "modelopt": (frozenset(("input_ids", "hidden_states", "aux_hidden_states")), _modelopt),
}
SPECULATORS_09 = "speculators-0.9"


def format_of(value: Any) -> str | None:
    """The format of one loaded sample, None where it is none that is known."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("hidden_states"), list | tuple):
        return "speculators-0.3-v1" if FORMATS["speculators-0.3-v1"][0] <= set(value) else None
    found = [name for name, (keys, _) in FORMATS.items() if keys <= set(value) and name != "speculators-0.3-v1"]
    return max(found, key=lambda name: len(FORMATS[name][0] & set(value)), default=None)


def load(path: Path) -> Any:
    """What a sample file holds; ``.gz`` is unpacked."""
    if path.suffix != ".gz":
        return reading.torch_file(path)
    with tempfile.NamedTemporaryFile(suffix=".pt") as plain:
        try:
            with gzip.open(path, "rb") as handle:
                while chunk := handle.read(2**20):
                    plain.write(chunk)
        except (OSError, EOFError) as error:
            raise Refused(f"{path}: cannot be unpacked ({error})") from None
        plain.flush()
        try:
            return reading.torch_file(plain.name)
        except Refused as error:
            raise Refused(str(error).replace(plain.name, str(path))) from None


def read(path: Path, form: str, hidden: int) -> Sample:
    """One sample file of a format, its tensors checked against each other and the verifier's hidden size."""
    value = load(path)
    found = format_of(value)
    if found != form:
        keys = ", ".join(map(str, value))[:80] if isinstance(value, dict) else type(value).__name__
        raise Refused(f"{path}: found {found or f'no known sample ({keys})'}, wanted {form} like the files before it")
    try:
        sample = FORMATS[form][1](value, hidden)
        sample.ids = sample.ids.flatten().long()
        sample.mask = None if sample.mask is None else sample.mask.flatten().long()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise Refused(f"{path}: no sample of {form} ({' '.join(str(error).split())[:100]})") from None
    n = len(sample.ids)
    for c, column in enumerate(sample.columns):
        if not isinstance(column, torch.Tensor) or column.dim() != 2 or list(column.shape) != [n, hidden]:
            shape = list(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
            raise Refused(f"{path}: column {c} is {shape}; wanted [{n} tokens, {hidden}] (the verifier's hidden size)")
    if sample.mask is not None and len(sample.mask) != n:
        raise Refused(f"{path}: {len(sample.mask)} loss mask values for {n} tokens")
    return sample


@dataclass
class Source:
    """The samples of a directory, in the order of their numbers."""

    folder: Path
    form: str
    paths: list[Path]
    store: StoreFiles | None = None

    def __len__(self) -> int:
        return self.store.count if self.store else len(self.paths)

    def name(self, i: int) -> Path:
        """The file of sample i."""
        return self.store.path(i) if self.store else self.paths[i]

    def sample(self, i: int, hidden: int) -> Sample:
        """Sample i."""
        if self.store is None:
            return read(self.paths[i], self.form, hidden)
        states, ids = self.store.sample(i)
        if states.shape[2] != hidden:
            raise Refused(f"{self.store.path(i)}: states of {states.shape[2]} values; wanted {hidden} (the verifier's)")
        mask = None if self.store.rows is None else self.store.mask(i).long()
        return Sample(ids, mask, list(states.unbind(1)))


def source(folder: Path, form: str | None = None) -> Source:
    """Find the samples of a directory and their format; `Refused` where there are none, or two formats mixed."""
    if form is not None and form not in (*FORMATS, SPECULATORS_09):
        raise Refused(f"--from {form}: known formats are {', '.join([*FORMATS, SPECULATORS_09])}")
    if (folder / "hidden_states").is_dir():
        if form not in (None, SPECULATORS_09):
            raise Refused(f"{folder}: holds hidden_states/ as {SPECULATORS_09} writes it, not {form}")
        return Source(folder, SPECULATORS_09, [], StoreFiles(folder))
    names = [p for p in folder.rglob("*") if p.suffix in (".pt", ".ckpt") or p.name.endswith(".ckpt.gz")]
    paths = sorted((p for p in names if p.stem not in ("t2d", "d2t", "token_freq")), key=_order)
    if not paths:
        raise Refused(f"{folder}: no samples in it (.pt, .ckpt, .ckpt.gz or hidden_states/hs_*.safetensors)")
    kinds = Counter("specforge" if ".ckpt" in p.name else "pt" for p in paths)
    first = format_of(load(paths[0]))
    if len(kinds) > 1:
        raise Refused(f"{folder}: {kinds['specforge']} .ckpt and {kinds['pt']} .pt files: two formats in one directory")
    if first is None:
        raise Refused(f"{paths[0]}: no sample of a known format ({', '.join(FORMATS)})")
    if form not in (None, first):
        raise Refused(f"{paths[0]}: found {first}, wanted {form} (--from)")
    return Source(folder, first, paths)


def _order(path: Path) -> tuple:
    """Numbers in a path count as numbers: data_10 comes after data_9."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path)))


# ---- what the columns are --------------------------------------------------------------------------------------


@dataclass
class Convention:
    """Layer ids by this workbook's convention, whether the last column is normed, and how each is known."""

    layer_ids: list[int]
    last_is_normed: bool
    how: str


def measure(src: Source, verifier: Verifier, given: list[int] | None = None) -> Convention:
    """What the columns are: by a reference forward, else by agreement for the last one and ``given`` for the rest.

    Raises `Refused`, naming what it needs, where that cannot be known.
    """
    chosen = sorted({k * len(src) // PROBES for k in range(PROBES)})
    columns = len(src.sample(0, verifier.hidden_size).columns)
    if columns != COLUMNS and given is None:
        raise Refused(
            f"{src.name(0)}: {columns} layers; wanted {COLUMNS} (three auxiliary ones and the last state): capture "
            "again, or say with --layer-ids which auxiliary layers they are"
        )
    if given is not None and columns != len(given) + 1:
        raise Refused(f"{src.name(0)}: {columns} layers; --layer-ids {given} and the last state are {len(given) + 1}")
    with tempfile.TemporaryDirectory(prefix="eagle3nb-import-") as place:
        folder = Path(place) / "hidden_states"
        folder.mkdir()
        for k, i in enumerate(chosen):
            sample = src.sample(i, verifier.hidden_size)
            states = torch.stack(sample.columns, 1).contiguous()
            save_file({"hidden_states": states, "token_ids": sample.ids}, folder / f"hs_{k}.safetensors")
        probe = of_parts(Path(place), verifier, store=StoreFiles(Path(place)))
        try:
            found = reference.measure(verifier, probe.store)
        except Refused as error:
            return _without_reference(probe, given, str(error))
    return _by_reference(found, given)


def _by_reference(found: reference.Reference, given: list[int] | None) -> Convention:
    columns = found.over_samples.shape[1]
    nearest = [found.nearest(c) for c in range(columns)]
    told = ", ".join(f"column {c}: {found.name(k)} ({d:.3f})" for c, (k, d) in enumerate(nearest))
    ids = [k for k, _ in nearest[:-1]]
    last = nearest[-1][0]
    if max(d for _, d in nearest) > SAME:
        raise Refused(
            f"the columns are no layers of this verifier on these tokens ({told}): another verifier, or a shift?"
        )
    if last < found.num_layers:
        raise Refused(f"the last state is missing ({told}); wanted it as the last column")
    if ids != sorted(set(ids)) or ids[-1] >= found.num_layers:
        raise Refused(f"the columns are not auxiliary layers in rising order ({told})")
    if given is not None and given != ids:
        raise Refused(f"--layer-ids {given}, but the states are those of {ids} ({told})")
    return Convention([*ids, found.num_layers], last > found.num_layers, f"reference forward: {told}")


def _without_reference(probe: Artefacts, given: list[int] | None, why: str) -> Convention:
    found = agreement.measure(probe)
    normed = found.cause_id == "last_state" and found.restored >= found.share
    if not normed and found.share < AGREES * 0.5:
        raise Refused(
            f"{why}; and the last column predicts the next token in only {found.share:.2f} of positions, so whether it "
            "is before the final norm cannot be known; wanted samples of the verifier's own answers, or room for it"
        )
    if given is None:
        raise Refused(f"{why}; so which layers the columns are cannot be known: give --layer-ids (inputs of layer k)")
    norm = "already in" if normed else "applied"
    how = f"--layer-ids; agreement {max(found.share, found.restored):.3f} with the norm {norm}"
    return Convention([*given, probe.verifier.num_layers], normed, how)


# ---- writing ---------------------------------------------------------------------------------------------------


def import_samples(
    src: Source,
    dest: Path,
    verifier: Verifier,
    *,
    layer_ids: list[int] | None = None,
    talks: str | None = None,
    say: Callable[[str], None] = print,
) -> Store:
    """Write a sample store out of foreign samples, one by one; goes on where an earlier import stopped.

    ``talks``: conversations to rebuild missing loss masks from. A last state after the final norm is divided by the
    norm's weight, so that the norm gives it back; its size is lost, and the store says so.
    """
    convention = measure(src, verifier, layer_ids)
    say(f"{len(src):,} samples of {src.form}; {convention.how}")
    masks = _masks_from(talks, verifier) if talks else None
    weight = verifier.weight("norm").float()
    fields = Declaration(
        verifier=verifier.identity(),
        layer_ids=convention.layer_ids,
        hidden_size=verifier.hidden_size,
        dtype="bfloat16",
        compute_dtype="unknown",
        data_sha256=sha256_json([_file_state(src, src.name(i)) for i in range(len(src))]),
        responses="given",
        temperature=0.0,
        seed=0,
    )
    store = Store(dest)
    moved = store.begin(fields)
    if moved:
        say(f"a store of other inputs is kept as {moved.name}")
    done, rows = store.written(), []
    for i in range(len(src)):
        sample = src.sample(i, verifier.hidden_size)
        if len(sample.columns) != len(convention.layer_ids):
            found, wanted = len(sample.columns), len(convention.layer_ids)
            raise Refused(f"{src.name(i)}: {found} layers; wanted {wanted} like the first sample")
        mask = _mask(sample, masks, i, src)
        rows.append({"input_ids": sample.ids.tolist(), "loss_mask": mask, "seq_len": len(mask)})
        if convention.last_is_normed:
            sample.columns[-1] = sample.columns[-1].float() / weight
        states = torch.stack([c.to(torch.bfloat16) for c in sample.columns], 1)
        if i not in done:
            store.write(i, states, sample.ids.tolist())
        elif store.token_ids(i) != sample.ids.tolist() or not torch.equal(
            store.hidden_states(i, slice(0, 2)), states[:2]
        ):
            raise Refused(
                f"{dest} holds another sample {i} than {src.name(i)}: of another import; give a new directory"
            )
        if (i + 1) % 1000 == 0:
            say(f"{i + 1:,}/{len(src):,} samples")
    store.finish(rows, imported={"from": src.form, "conventions": convention.how, "size_of_last_state": (
        "lost: it was stored after the final norm" if convention.last_is_normed else "kept")})  # fmt: skip
    return store


def _file_state(src: Source, path: Path) -> list[Any]:
    """What tells whether a sample's file has changed since an import was interrupted."""
    found = path.stat()
    return [str(path.relative_to(src.folder)), found.st_size, found.st_mtime_ns]


def _mask(sample: Sample, masks: dict[bytes, list[int]] | None, i: int, src: Source) -> list[int]:
    if sample.mask is not None:
        return sample.mask.tolist()
    if masks is None:
        raise Refused(
            f"{src.form} has no loss mask: give the conversations the samples were made from (--conversations)"
        )
    key = np.array(sample.ids.tolist()).tobytes()
    if key not in masks:
        raise Refused(f"sample {i}: none of the conversations gives its tokens (another chat template, or cut off?)")
    return masks[key]


def _masks_from(path: str, verifier: Verifier) -> dict[bytes, list[int]]:
    """Token ids (as bytes) of each whole conversation -> its loss mask, every assistant turn with loss."""
    template, found = ChatTemplate(verifier), {}
    for record in conversations.read_source(path):
        turns = conversations.turns_of(record)
        if turns is None:
            continue
        full = template.ids(turns, prompt=False)
        mask = [0] * len(full)
        for k in (k for k, turn in enumerate(turns) if turn["role"] == "assistant" and k):
            start, end = len(template.ids(turns[:k], prompt=True)), len(template.ids(turns[: k + 1], prompt=False))
            ends = [p for p in range(start, end) if full[p] in verifier.eos_token_ids]
            for p in range(start, (ends[-1] + 1) if ends else end):
                mask[p] = 1
        found[np.array(full).tobytes()] = mask
    return found
