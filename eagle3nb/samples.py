"""The sample store: verifier hidden states on disk, in the layout that speculators' trainer reads.

=============================  ==================================================================================
``hidden_states/hs_<i>.safetensors``  sample i: ``hidden_states`` [seq, layers, hidden] bf16, ``token_ids`` [seq] int64
``samples.jsonl``              one line per written sample: ``i``, ``tokens``, ``sha256`` of its file
``store.json``                 what the tensors mean (fields of `Declaration`); ``count`` is null until it is complete
arrow dataset files            row i: ``input_ids`` [seq], ``loss_mask`` [seq] (1 = response token), ``seq_len``
=============================  ==================================================================================

The mistake everybody makes: ``hidden_states[:, k]`` is NOT layer k. Column k is ``layer_ids[k]`` of store.json,
layer id L means the residual stream at the input of layer L, and the last column (id = number of layers) is the
state before the final norm.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from eagle3nb.errors import Refused
from eagle3nb.files import move_aside, read_json, read_jsonl, sha256_file, write_bytes, write_json

FORMAT = "eagle3nb-store-1"
CONVENTION = "input of layer k; k = number of layers is the final state before the final norm"


@dataclass
class Declaration:
    """What a store's tensors mean. Two runs may add to one store only if all of it is equal."""

    verifier: dict[str, Any]  # Verifier.identity(), the same wherever the verifier lies
    layer_ids: list[int]  # one per column of hidden_states, the last one = number of layers
    hidden_size: int
    dtype: str  # of the tensors on disk
    compute_dtype: str  # of the engine that made them
    data_sha256: str  # of the prepared rows they were made from
    responses: str  # "given" (prefilled) or "generate" (written by the verifier in the same pass)
    temperature: float
    seed: int
    format: str = FORMAT
    convention: str = CONVENTION
    last_layer: str = "before final norm"


class Store:
    """A sample store in ``folder``; reads headers and slices, never more than what is asked for."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._lock = threading.Lock()

    # ---- writing -------------------------------------------------------------------------------------------

    def begin(self, declaration: Declaration, mine: Iterable[int] | None = None) -> Path | None:
        """Open the store for writing. A store that declares something else is moved aside, its new path returned.

        Several processes may write into one store at once, each its own samples (``mine``; None: all).
        """
        wanted = json.loads(json.dumps(asdict(declaration)))
        with self._one_process():
            found = read_json(self.folder / "store.json")
            moved = None
            if found is not None and {key: found.get(key) for key in wanted} != wanted:
                moved = move_aside(self.folder)
            self.hidden_states_dir.mkdir(parents=True, exist_ok=True)
            if found is None or moved:
                write_json(self.folder / "store.json", wanted | {"count": None})
        own = None if mine is None else {self.sample_path(i).name for i in mine}
        for left_over in self.hidden_states_dir.glob(".hs_*.tmp"):  # of a killed run
            if own is None or ".".join(left_over.name.split(".")[1:3]) in own:
                left_over.unlink()
        return moved

    def _one_process(self) -> Any:
        """A lock for what only one of several writing processes may do at a time."""
        from filelock import FileLock

        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder.with_name(f".{self.folder.name}.lock"))

    def write(self, i: int, hidden_states: torch.Tensor, token_ids: list[int]) -> None:
        """Write sample i: ``hidden_states`` [seq, layers, hidden], ``token_ids`` of the same seq."""
        if hidden_states.shape[0] != len(token_ids):
            raise ValueError(f"sample {i}: {hidden_states.shape[0]} states for {len(token_ids)} tokens")
        states = hidden_states.to(torch.bfloat16).contiguous()
        data = save({"hidden_states": states, "token_ids": torch.tensor(token_ids)})
        write_bytes(self.sample_path(i), data)
        line = json.dumps({"i": i, "tokens": len(token_ids), "sha256": hashlib.sha256(data).hexdigest()})
        with self._lock, open(self.folder / "samples.jsonl", "a") as handle:
            handle.write(line + "\n")
            handle.flush()

    def finish(self, rows: list[dict[str, Any]], **notes: Any) -> None:
        """Write samples.jsonl in order, the arrow dataset (one row per sample) and, last, store.json with ``notes``."""
        with self._one_process():
            self._finish(rows, notes)

    def _finish(self, rows: list[dict[str, Any]], notes: dict[str, Any]) -> None:
        from datasets import Dataset, Features, Sequence, Value

        known = {row["i"]: row for row in read_jsonl(self.folder / "samples.jsonl")}
        for i in range(len(rows)):  # a crash between a sample and its line leaves a gap
            if i not in known:
                known[i] = {"i": i, "tokens": rows[i]["seq_len"], "sha256": sha256_file(self.sample_path(i))}
        lines = [known[i] for i in range(len(rows))]
        write_bytes(self.folder / "samples.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())

        features = Features(
            input_ids=Sequence(Value("int64")), loss_mask=Sequence(Value("int64")), seq_len=Value("int64")
        )
        dataset = Dataset.from_list(rows, features=features).with_format("torch")
        temporary = self.folder / ".dataset.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        dataset.save_to_disk(temporary)
        for file in sorted(temporary.iterdir(), key=lambda f: f.name == "state.json"):
            os.replace(file, self.folder / file.name)
        temporary.rmdir()
        totals = {"count": len(rows), "tokens": sum(row["seq_len"] for row in rows)}
        totals["samples_sha256"] = sha256_file(self.folder / "samples.jsonl")
        write_json(self.folder / "store.json", read_json(self.folder / "store.json") | totals | notes)

    # ---- reading -------------------------------------------------------------------------------------------

    @property
    def hidden_states_dir(self) -> Path:
        return self.folder / "hidden_states"

    def sample_path(self, i: int) -> Path:
        return self.hidden_states_dir / f"hs_{i}.safetensors"

    def written(self) -> set[int]:
        """Indices of the samples that are complete on disk."""
        return {int(f.stem[3:]) for f in self.hidden_states_dir.glob("hs_*.safetensors")}

    @property
    def info(self) -> dict[str, Any]:
        """The fields of store.json; ``Refused`` where the store is not finished."""
        info = read_json(self.folder / "store.json")
        if info is None:
            raise Refused(f"no store.json in {self.folder}: this is no sample store")
        if info["count"] is None:
            raise Refused(f"the store in {self.folder} is not finished; run extract_hidden_states again")
        return info

    def __len__(self) -> int:
        return self.info["count"]

    def dataset(self) -> Any:
        """The arrow dataset: ``input_ids``, ``loss_mask``, ``seq_len`` per row."""
        from datasets import load_from_disk

        return load_from_disk(str(self.folder))

    def token_ids(self, i: int) -> list[int]:
        """Token ids [seq] of sample i, read without its hidden states."""
        with safe_open(self.sample_path(i), "pt") as handle:
            return handle.get_tensor("token_ids").tolist()

    def hidden_states(self, i: int, rows: slice = slice(None), layer: int | None = None) -> torch.Tensor:
        """States of sample i: [seq, layers, hidden], or [seq, hidden] of one column; only the slice is read."""
        with safe_open(self.sample_path(i), "pt") as handle:
            part = handle.get_slice("hidden_states")
            return part[rows] if layer is None else part[rows, layer]

    def shape(self, i: int) -> list[int]:
        """[seq, layers, hidden] of sample i, from the file's header alone."""
        with safe_open(self.sample_path(i), "pt") as handle:
            return handle.get_slice("hidden_states").get_shape()

    def responses(self) -> Iterator[torch.Tensor]:
        """Per sample the response tokens (those whose loss mask is 1), [n] int64."""
        for row in self.dataset():
            yield row["input_ids"][row["loss_mask"].bool()]

    def fingerprint(self) -> str:
        """Changes when any sample, mask or declaration changes."""
        info = self.info
        return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
