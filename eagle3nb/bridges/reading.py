"""Reading files of strangers: every function gives what the file holds or raises `Refused` with one line.

Nothing here unpickles, follows a link out of its folder or believes a size that the file's own length contradicts.
"""

import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3nb.errors import Refused
from eagle3nb.files import JSON_LIMIT, json_object

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
FLOATS = ("BF16", "F16", "F32", "F64")  # dtypes that can be computed with
TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: dtype as written there, shape, and where its bytes are in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def safetensors_header(path: Path | str) -> dict[str, Entry]:
    """Name -> `Entry` of a safetensors file; the header is checked against the file's length before it is believed."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise Refused(f"{path}: no ordinary file")
    try:
        with open(path, "rb") as handle:
            return header_of(path, handle.read, os.fstat(handle.fileno()).st_size)
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({_why(error)})") from None


def header_of(path: Path, read: Any, size: int) -> dict[str, Entry]:
    """The header, by ``read`` of a file just opened, of ``size`` bytes."""
    first = read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise Refused(f"{path}: no safetensors file, or cut short: {size:,} bytes, header of {length:,}")
    if length > JSON_LIMIT:
        raise Refused(f"{path}: a header of {length:,} bytes; wanted at most {JSON_LIMIT:,}")
    try:
        table = json.loads(read(length))
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: its safetensors header is no JSON ({_why(error)})") from None
    if not isinstance(table, dict):
        raise Refused(f"{path}: its safetensors header is no JSON object")
    table.pop("__metadata__", None)
    start, entries = 8 + length, {}
    for name, value in table.items():
        entries[name] = _entry(path, name, value, start)
    expected = max((entry.end for entry in entries.values()), default=start)
    if expected != size:
        what = "cut short" if size < expected else "longer than its header says"
        raise Refused(f"{path}: {what}: {size:,} bytes, {expected:,} by its header")
    return entries


def _entry(path: Path, name: str, value: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        good = dtype in ITEM_BYTES and all(type(n) is int and 0 <= n < 2**62 for n in numbers)
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise Refused(f"{path}: its header describes the tensor {name[:60]!r} in no known way")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise Refused(f"{path}: tensor {name[:60]!r} is {dtype} {shape}, but has {end - begin:,} bytes")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def safetensors_tensor(path: Path | str, name: str) -> torch.Tensor:
    """One tensor of a safetensors file, as it is there."""
    entry = safetensors_header(path).get(name)
    if entry is None:
        raise Refused(f"{path}: no tensor {name!r} in it")
    if entry.dtype not in TORCH_DTYPES:
        raise Refused(f"{path}: tensor {name!r} has the dtype {entry.dtype}; wanted one that torch computes with")
    with open(path, "rb") as handle:
        handle.seek(entry.begin)
        data = bytearray(handle.read(entry.end - entry.begin))
    if not data:
        return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[entry.dtype]).reshape(entry.shape)


def torch_file(path: Path | str) -> Any:
    """What a ``.pt`` file holds, without running any code of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise a dozen unrelated types
        code = "weights_only" in str(error).lower() or "unpickling" in type(error).__name__.lower()
        why = "it holds more than plain tensors, numbers and texts; such code is not run" if code else _why(error)
        raise Refused(f"{path}: cannot be read safely ({why})") from None
    try:
        tensors = list(_tensors_in(value))
    except RecursionError:
        raise Refused(f"{path}: its containers are nested without end") from None
    for tensor in tensors:
        # An expanded view of one element can claim any size; written out it would fill the memory.
        if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
            raise Refused(f"{path}: a tensor {list(tensor.shape)} is sparse or larger than the bytes behind it")
    return value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def npy_file(path: Path | str) -> torch.Tensor:
    """The array of a ``.npy`` file as a tensor, without unpickling."""
    try:
        # Through a map: a header that claims more than the file holds fails here instead of asking for the memory.
        array = np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        return torch.from_numpy(array)
    except Exception as error:  # numpy's header parser raises many types
        raise Refused(f"{path}: no readable .npy array ({_why(error)})") from None


def tensor_file(path: Path) -> Any:
    """What a ``.npy`` or ``.pt`` file holds."""
    return npy_file(path) if path.suffix == ".npy" else torch_file(path)


def inside(folder: Path, name: str) -> Path | None:
    """``folder/name`` where it is a file there, None where nothing is; `Refused` where a link leads away.

    A hub cache is the exception: its snapshots are links to the ``blobs`` beside them.
    """
    path = folder / name
    if leads_away(path, folder):
        raise Refused(f"{path}: a link that leaves the directory (to {os.path.realpath(path)}); it was not followed")
    if path.exists() and not path.is_file():
        raise Refused(f"{path}: wanted a file, found no ordinary one")
    return path if path.is_file() else None


def leads_away(path: Path, folder: Path) -> bool:
    """Whether a path below ``folder`` comes out of it by a link, its own or of a directory on the way.

    Links in circles do; those of a hub cache to its blobs do not.
    """
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):
        return True
    hub = root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")
    return not (target.is_relative_to(root) or hub)


class TokenRows:
    """An arrow dataset with ``input_ids`` and ``loss_mask`` per row, mapped, never loaded whole."""

    def __init__(self, folder: Path):
        import pyarrow as pa

        self.folder = folder
        state = json_object(folder / "state.json")
        try:
            names = [entry["filename"] for entry in state["_data_files"]]
            tables = []
            for name in names:
                if Path(name).name != name or inside(folder, name) is None:
                    raise Refused(f"{folder}: its state.json names {name!r}, which is no plain file in that folder")
                with pa.memory_map(str(folder / name)) as source, pa.ipc.open_stream(source) as stream:
                    tables.append(stream.read_all())
            self.table = pa.concat_tables(tables)
            self.table.validate(full=True)
            self._ids, self._mask = self._column("input_ids"), self._column("loss_mask")
        except Refused:
            raise
        except Exception as error:  # pyarrow raises many types
            raise Refused(f"{folder}: no readable arrow dataset of token rows ({_why(error)})") from None

    def _column(self, name: str) -> Any:
        import pyarrow as pa

        if name not in self.table.column_names:
            raise Refused(f"{self.folder}: no column {name}; found {', '.join(self.table.column_names)}")
        kind = self.table.schema.field(name).type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
            raise Refused(f"{self.folder}: column {name} is {kind}; wanted lists of integers")
        column = self.table.column(name)
        if column.null_count or any(chunk.flatten().null_count for chunk in column.chunks):
            raise Refused(f"{self.folder}: column {name} has empty places; wanted integers throughout")
        return column

    def __len__(self) -> int:
        return self.table.num_rows

    def ids(self, i: int) -> np.ndarray:
        """Token ids [seq] of row i, int64."""
        return _numbers(self._ids[i])

    def mask(self, i: int) -> np.ndarray:
        """Loss mask [seq] of row i: 1 = response token."""
        return _numbers(self._mask[i])

    def value(self, name: str, i: int) -> Any:
        """Another column's value, None where there is no such column."""
        return self.table.column(name)[i].as_py() if name in self.table.column_names else None

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(token ids, loss mask) per row."""
        for ids, mask in zip(self._ids.chunks, self._mask.chunks, strict=True):
            for k in range(len(ids)):
                yield _numbers(ids[k]), _numbers(mask[k])


def _numbers(cell: Any) -> np.ndarray:
    """A list cell as int64, in place where it is that already: datasets writes small ids as int32."""
    return cell.values.to_numpy().astype(np.int64, copy=False)


def _why(error: BaseException) -> str:
    """An error in a few words."""
    return " ".join(str(error).split())[:150] or type(error).__name__
