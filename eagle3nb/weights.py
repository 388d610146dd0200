"""A checkpoint's tensors by role: found by name in the index or the files' headers, read one at a time.

======================  ====================================================================================
``embed_tokens``        token embedding, [vocabulary rows, hidden]
``lm_head``             output matrix, [vocabulary rows, hidden]; not in the files where it is tied
``norm``                weight of the final norm, [hidden]
======================  ====================================================================================

Names are matched by their ending, so prefixes (``model.``, ``language_model.model.``, ``model.language_model.``) do not
matter; the endings are those that speculators' trainer looks for (a test holds the two together). Tensors inside a
layer (``layers.3.``) and, where the text model has one, those of other towers are passed over.
"""

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3nb.errors import VerifierRefused
from eagle3nb.files import json_object

ROLES: dict[str, tuple[str, ...]] = {
    "embed_tokens": (
        "embed_tokens.weight", "tok_embeddings.weight", "llm.embed.weight", "backbone.embeddings.weight",
    ),
    "lm_head": ("lm_head.weight", "output.weight", "llm.unembed.weight"),
    "norm": ("model.norm.weight", "llm.norm.weight", "backbone.norm_f.weight", "norm.weight"),
}  # fmt: skip
INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\.\d+\.")
_TEXT_PREFIX = re.compile(r"((model|language_model|text_model|thinker|llm|backbone)\.)*")


def open_safetensors(path: Path) -> Any:
    """A safetensors file opened for reading; ``VerifierRefused`` where it is missing, cut short or none."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
        raise VerifierRefused(
            f"{path}: wanted a whole safetensors file, found {size} that cannot be read ({error}); fetch it again"
        ) from error


class Weights:
    """The safetensors files of a checkpoint directory. ``fetch(file name)`` brings a shard that is not there yet."""

    def __init__(self, folder: Path, name: str, fetch: Callable[[str], Path] | None = None):
        self.folder, self.name, self.fetch = folder, name, fetch

    def total_bytes(self) -> int | None:
        """Bytes of all weights, by the index where there is one, shards that are not there yet included."""
        if self.index:
            return json_object(self.index, "the JSON of an index").get("metadata", {}).get("total_size")
        return sum(f.stat().st_size for f in self.folder.glob("*.safetensors")) or None

    @cached_property
    def index(self) -> Path | None:
        """The index of a sharded checkpoint."""
        file = self.folder / INDEX
        return file if file.is_file() else None

    @cached_property
    def files(self) -> dict[str, str]:
        """Tensor name -> name of the file that holds it."""
        if self.index:
            found = json_object(self.index, "the JSON of an index").get("weight_map")
            if not isinstance(found, dict) or not found:
                what = type(found).__name__
                raise VerifierRefused(f"{self.index}: wanted a weight_map of tensor names, found {what}")
            return found
        found = {}
        if self.fetch and not any(self.folder.glob("*.safetensors")):
            self.fetch("model.safetensors")  # no index: a small model in one file
        for file in sorted(self.folder.glob("*.safetensors")):
            with open_safetensors(file) as handle:
                found |= dict.fromkeys(handle.keys(), file.name)
        if not found:
            raise VerifierRefused(f"verifier {self.name}: no safetensors file in {self.folder}")
        return found

    def missing(self) -> list[str]:
        """Files that the index names and the directory does not hold."""
        return [f for f in sorted(set(self.files.values())) if not (self.folder / f).is_file()]

    def find(self, role: str) -> str | None:
        """The tensor's name, None where there is none; ``VerifierRefused`` where several could be meant."""
        for ending in ROLES[role]:
            pattern = re.compile(rf"(?:^|.*[._]){re.escape(ending)}$")
            matches = [key for key in self.files if pattern.match(key) and not _LAYER.search(key)]
            own = [key for key in matches if _TEXT_PREFIX.fullmatch(key.removesuffix(ending.removeprefix("model.")))]
            matches = own or matches
            if len(matches) > 1:
                raise VerifierRefused(
                    f"verifier {self.name}: {len(matches)} tensors in {self.folder} could be its {role}: "
                    f"{', '.join(sorted(matches))}; wanted one"
                )
            if matches:
                return matches[0]
        return None

    def open(self, key: str) -> Any:
        """The file that holds ``key``, opened; fetched first where it can be."""
        file = self.folder / self.files[key]
        if not file.is_file():
            if not self.fetch:
                raise VerifierRefused(
                    f"{self.index}: names {file.name} for {key}, and {self.folder} holds no such file; copy it there"
                )
            file = self.fetch(file.name)
        return open_safetensors(file)

    def tensor(self, key: str) -> Any:
        """The tensor; nothing else of its file is read."""
        with self.open(key) as handle:
            return handle.get_tensor(key)

    def shape(self, key: str) -> list[int]:
        """The tensor's shape, from its file's header alone."""
        with self.open(key) as handle:
            return handle.get_slice(key).get_shape()
