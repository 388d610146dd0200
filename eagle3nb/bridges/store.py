"""A stranger's view of a sample store: what its files say, without trusting any of it. Memory does not grow with it."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from eagle3nb.bridges import reading
from eagle3nb.errors import Refused
from eagle3nb.files import json_object

CHUNK = 2**20  # bytes hashed and looked through at once: stays in the processor's cache
NOT_FINITE = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}


@dataclass
class Cases:
    """How often something was seen, and the first few places."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.first) < 3:
            self.first.append(text)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return "; ".join(self.first) + more


@dataclass
class Scan:
    """What the headers and token ids of all sample files say."""

    files: int = 0
    dtypes: Counter = field(default_factory=Counter)
    columns: Counter = field(default_factory=Counter)
    hidden_sizes: Counter = field(default_factory=Counter)
    unreadable: Cases = field(default_factory=Cases)  # damaged, cut short, links that lead away
    low: int = 0  # lowest and highest token id
    high: int = 0
    lengths: Cases = field(default_factory=Cases)  # states, token ids and row of different lengths
    token_ids: Cases = field(default_factory=Cases)  # token ids that are not the row's
    unmatched: Cases = field(default_factory=Cases)  # rows without a file, files without a row


@dataclass
class EveryByte:
    """What reading every byte showed."""

    files: int = 0
    changed: Cases = field(default_factory=Cases)  # bytes that are not those of their checksum
    unlisted: Cases = field(default_factory=Cases)  # samples without a checksum
    broken: Cases = field(default_factory=Cases)  # samples with NaN or Inf


class StoreFiles:
    """The files of a sample store in ``folder``; one sample file alone (``only``) is a store of that one.

    ``home`` is the store whose declaration, rows and checksums count: itself, and of a lone file the one it is said to
    belong to, if any.
    """

    def __init__(self, folder: Path, only: Path | None = None):
        self.folder, self.only = folder, only
        self.hidden_states = only.parent if only else folder / "hidden_states"
        self.home: StoreFiles | None = None if only else self

    @property
    def declared(self) -> dict[str, Any] | None:
        """``store.json``, None where there is none."""
        return self.home._declared if self.home else None

    @property
    def rows(self) -> reading.TokenRows | None:
        """The arrow dataset beside the samples, None where there is none."""
        return self.home._rows if self.home else None

    @property
    def checksums(self) -> Path | None:
        """``samples.jsonl``, None where there is none."""
        return reading.inside(self.home.folder, "samples.jsonl") if self.home else None

    @cached_property
    def _declared(self) -> dict[str, Any] | None:
        path = reading.inside(self.folder, "store.json")
        return json_object(path) if path else None

    @cached_property
    def _rows(self) -> reading.TokenRows | None:
        path = reading.inside(self.folder, "state.json")
        return reading.TokenRows(self.folder) if path else None

    def path(self, i: int) -> Path:
        return self.only or self.hidden_states / f"hs_{i}.safetensors"

    def numbers(self) -> Iterator[int]:
        """Numbers of the samples on disk, in no order."""
        if self.only:
            yield _number(self.only.name) or 0
            return
        if reading.leads_away(self.hidden_states, self.folder):
            raise Refused(f"{self.hidden_states}: a link that leaves the directory; it was not followed")
        try:
            with os.scandir(self.hidden_states) as entries:
                for entry in entries:
                    if (number := _number(entry.name)) is not None:
                        yield number
        except OSError as error:
            raise Refused(f"{self.hidden_states}: cannot be listed ({error.strerror})") from None

    @cached_property
    def count(self) -> int:
        """How many samples there should be: rows of the dataset, or files where there is none."""
        return len(self.rows) if self.rows is not None and not self.only else sum(1 for _ in self.numbers())

    @cached_property
    def unusable(self) -> str:
        """Why nothing can be said of the samples at all; empty where something can."""
        try:
            return "" if self.scan.dtypes else "no sample can be read: see samples.readable"
        except Refused as error:
            return f"{error}: see samples.readable"

    # ---- all headers -----------------------------------------------------------------------------------------

    @cached_property
    def scan(self) -> Scan:
        """One pass over every header and the token ids; the hidden states are not read."""
        scan, rows = Scan(), self.rows
        seen = np.zeros(0 if self.only else self.count, bool)
        for i in self.numbers():
            scan.files += 1
            if rows is not None and i >= len(rows):
                scan.unmatched.add(f"hs_{i} has no row (there are {len(rows)})")
                continue
            if i < len(seen):
                seen[i] = True
            path = self.path(i)
            if path.is_symlink() and reading.leads_away(path, self.hidden_states):
                scan.unreadable.add(f"{path.name} is a link that leaves the directory; it was not followed")
                continue
            if not path.is_file():
                scan.unreadable.add(f"{path.name} is no ordinary file")
                continue
            try:
                self._look_at(i, path, scan)
            except (Refused, OSError) as error:
                scan.unreadable.add(str(error).replace(f"{path}: ", f"{path.name}: "))
        if rows is not None and not self.only:
            for i in np.flatnonzero(~seen):
                scan.unmatched.add(f"row {i} has no hs_{i}.safetensors")
        return scan

    def _look_at(self, i: int, path: Path, scan: Scan) -> None:
        with open(path, "rb", buffering=4096) as handle:
            size = os.fstat(handle.fileno()).st_size
            header = reading.header_of(path, handle.read, size)
            states, tokens = header.get("hidden_states"), header.get("token_ids")
            if states is None or len(states.shape) != 3 or tokens is None or len(tokens.shape) != 1:
                found = ", ".join(f"{name} {list(entry.shape)}" for name, entry in islice(header.items(), 4))
                scan.unreadable.add(
                    f"{path.name}: wanted hidden_states [seq, layers, hidden] and token_ids [seq], found {found}"
                )
                return
            seq, columns, hidden = states.shape
            scan.dtypes[states.dtype] += 1
            scan.columns[columns] += 1
            scan.hidden_sizes[hidden] += 1
            handle.seek(tokens.begin)
            data = handle.read(tokens.end - tokens.begin)
        kind = {"I64": np.int64, "I32": np.int32}.get(tokens.dtype)
        if kind is None:
            scan.unreadable.add(f"{path.name}: token_ids are {tokens.dtype}, wanted I64")
            return
        ids = np.frombuffer(data, kind)
        if len(ids):
            scan.low, scan.high = min(scan.low, int(ids.min())), max(scan.high, int(ids.max()))
        wanted = self.rows.ids(i) if self.rows is not None else ids
        if seq != len(ids) or seq != len(wanted):
            scan.lengths.add(f"{path.name}: {seq} states, {len(ids)} token ids, {len(wanted)} tokens in the row")
        elif not np.array_equal(ids, wanted):
            differ = int((ids != wanted).sum())
            scan.token_ids.add(f"{path.name}: {differ} of {seq} token ids are not those of row {i}")

    # ---- some samples ----------------------------------------------------------------------------------------

    def some(self, count: int) -> list[int]:
        """Numbers of up to ``count`` samples that can be read, spread evenly over the store."""
        found: list[int] = []
        numbered = self.rows is not None and not self.only
        candidates = range(self.count) if numbered else sorted(islice(self.numbers(), 4 * count))
        last = len(candidates) - 1
        places = sorted({round(k) for k in np.linspace(0, last, min(count, last + 1))}) if last >= 0 else []
        for place, after in zip(places, [*places[1:], last + 1], strict=True):
            # A damaged one is reported by other checks; its neighbour stands in for it here.
            good = next((i for i in candidates[place:after][:8] if self._usable(i)), None)
            if good is not None:
                found.append(good)
        return found

    def _usable(self, i: int) -> bool:
        path = self.path(i)
        try:
            header = reading.safetensors_header(path)
            states, ids = header["hidden_states"].shape, header["token_ids"].shape
        except (Refused, KeyError):
            return False
        good = len(states) == 3 and len(ids) == 1 and states[0] == ids[0]
        good = good and not (path.is_symlink() and reading.leads_away(path, path.parent))
        return good and (self.rows is None or (i < len(self.rows) and len(self.rows.ids(i)) == ids[0]))

    def sample(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states [seq, layers, hidden], token ids [seq]) of one sample."""
        path = self.path(i)
        size, room = path.stat().st_size, psutil.virtual_memory().available
        if 3 * size > room:  # as read, and in float32
            raise Refused(f"{path}: {size / 1e9:,.1f} GB in one sample, with {room / 1e9:,.1f} GB of memory free")
        states = reading.safetensors_tensor(path, "hidden_states")
        ids = reading.safetensors_tensor(path, "token_ids")
        if states.dim() != 3 or ids.dim() != 1 or not states.is_floating_point():
            raise Refused(f"{path}: wanted hidden_states [seq, layers, hidden] and token_ids [seq]")
        return states, ids.long()

    def tokens_are_known(self, i: int, vocab_size: int) -> bool:
        """Whether all token ids of a sample lie in a vocabulary."""
        ids = reading.safetensors_tensor(self.path(i), "token_ids")
        return bool(((ids >= 0) & (ids < vocab_size)).all())

    def mask(self, i: int) -> torch.Tensor:
        """Loss mask [seq] of a sample, as bool; the rows must be there."""
        return torch.from_numpy(np.array(self.rows.mask(i))).bool()

    # ---- every byte ------------------------------------------------------------------------------------------

    @cached_property
    def every_byte(self) -> EveryByte:
        """Reads the whole store."""
        found = EveryByte()
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            items = self._with_checksums()
            while batch := list(islice(items, 256)):
                for i, (digest, bad) in zip((i for i, _ in batch), pool.map(self._read_whole, batch), strict=True):
                    wanted = dict(batch)[i]
                    if digest is None:
                        continue  # counted by the scan of headers
                    found.files += 1
                    if wanted is None:
                        found.unlisted.add(f"hs_{i}.safetensors")
                    elif wanted != digest:
                        found.changed.add(f"hs_{i}.safetensors")
                    if bad:
                        found.broken.add(f"hs_{i}: {bad:,} values")
        return found

    def _with_checksums(self) -> Iterator[tuple[int, str | None]]:
        """(number, checksum or None) of every sample on disk; a sample that is listed twice counts as listed last."""
        wanted: dict[int, str] = {}
        if self.checksums is not None:
            try:
                with open(self.checksums, encoding="utf-8", errors="replace") as handle:
                    for line in handle:
                        row = json.loads(line)
                        wanted[int(row["i"])] = str(row["sha256"])
            except OSError as error:
                raise Refused(f"{self.checksums}: cannot be read ({error.strerror})") from None
            except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
                raise Refused(f"{self.checksums}: a line is no record of a sample: {line[:80]!r}") from None
        yield from ((i, wanted.get(i)) for i in self.numbers())

    def _read_whole(self, item: tuple[int, str | None]) -> tuple[str | None, int]:
        """(SHA-256, count of NaN and Inf) of a sample file in one pass."""
        path = self.path(item[0])
        try:
            entry = reading.safetensors_header(path)["hidden_states"]
            number, bits = NOT_FINITE.get(entry.dtype, (None, 0))
            digest, bad, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
            with open(path, "rb", buffering=0) as handle:
                # The states begin at their own multiple of the item size, so chunks are cut there.
                digest.update(handle.read(entry.begin))
                left = entry.end - entry.begin
                while left and (n := handle.readinto(memoryview(buffer)[: min(CHUNK, left)])):
                    left -= n
                    digest.update(memoryview(buffer)[:n])
                    if number is not None:
                        values = np.frombuffer(buffer, number, n // number().itemsize)
                        bad += _count_not_finite(values, bits)
                while tail := handle.read(CHUNK):
                    digest.update(tail)
            return digest.hexdigest(), bad
        except (Refused, OSError, KeyError):
            return None, 0


def _count_not_finite(values: np.ndarray, bits: int) -> int:
    """Values whose exponent bits are all set; the count is only made where the largest one has them."""
    magnitude = values & values.dtype.type(np.iinfo(values.dtype).max >> 1)
    return int((magnitude >= bits).sum()) if magnitude.size and magnitude.max() >= bits else 0


def _number(name: str) -> int | None:
    """3 of ``hs_3.safetensors``; None of any other name."""
    number = name.removeprefix("hs_").removesuffix(".safetensors")
    good = name == f"hs_{number}.safetensors" and number.isdecimal() and len(number) < 12
    return int(number) if good and str(int(number)) == number else None
