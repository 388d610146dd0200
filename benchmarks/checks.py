"""What the checks cost on a large store.

    python benchmarks/checks.py [SAMPLES] [DEEP_SAMPLES]

Makes a store of SAMPLES (10,000) samples of 144 tokens, 4 columns of 576: sparse files, whose states take no room on
the disk (and so fail as all zero). Checks headers and token ids in a fresh process: seconds and peak memory. Then a
store of DEEP_SAMPLES (1,500) with real bytes: ``--deep`` (SHA-256, NaN and Inf of every byte) against reading the same
files alone, in turns, from the disk (the page cache emptied of them) and from the page cache; and peak memory of this
store and one a tenth of its size: it must not grow with the store.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SEQ, COLUMNS, HIDDEN = 144, 4, 576


def make(folder: Path, samples: int, real: bool) -> None:
    """A store as extract_hidden_states leaves it; without ``real`` bytes the states are holes."""
    from datasets import Dataset, Features, Sequence, Value

    states = 2 * SEQ * COLUMNS * HIDDEN
    header = {
        "hidden_states": {"dtype": "BF16", "shape": [SEQ, COLUMNS, HIDDEN], "data_offsets": [0, states]},
        "token_ids": {"dtype": "I64", "shape": [SEQ], "data_offsets": [states, states + 8 * SEQ]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    chance = np.random.default_rng(0)
    (folder / "hidden_states").mkdir(parents=True)
    with open(folder / "samples.jsonl", "w") as sums:
        for i in range(samples):
            ids = (np.arange(SEQ) + i) % 49152
            with open(folder / "hidden_states" / f"hs_{i}.safetensors", "wb") as handle:
                handle.write(len(text).to_bytes(8, "little") + text)
                if real:
                    handle.write(chance.integers(0, 0x4000, states // 2, np.uint16).tobytes())
                else:
                    handle.seek(states, 1)
                handle.write(ids.astype(np.int64).tobytes())
            if real:
                with open(folder / "hidden_states" / f"hs_{i}.safetensors", "rb") as handle:
                    digest = hashlib.file_digest(handle, "sha256").hexdigest()
                sums.write(json.dumps({"i": i, "tokens": SEQ, "sha256": digest}) + "\n")
    if not real:
        (folder / "samples.jsonl").unlink()
    kinds = Features(input_ids=Sequence(Value("int64")), loss_mask=Sequence(Value("int64")), seq_len=Value("int64"))
    rows = (
        {"input_ids": (np.arange(SEQ) + i) % 49152, "loss_mask": [0] * 40 + [1] * (SEQ - 40), "seq_len": SEQ}
        for i in range(samples)
    )
    Dataset.from_list(list(rows), features=kinds).save_to_disk(folder)


def measured(*arguments: str) -> tuple[float, float, int]:
    """(seconds, peak MiB, exit code) of a command in a process of its own."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    return time.monotonic() - started, usage.ru_maxrss / 1024, status >> 8


def read_alone(folder: Path) -> None:
    """Read every byte of the samples with as many threads as the check uses."""

    def read(path: Path) -> int:
        with open(path, "rb", buffering=0) as handle:
            buffer, n = bytearray(2**20), 0
            while k := handle.readinto(buffer):
                n += k
        return n

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        sum(pool.map(read, sorted((folder / "hidden_states").iterdir())))


def read_deep(folder: Path) -> None:
    """What ``--deep`` does with every byte."""
    from eagle3nb.bridges.store import StoreFiles

    found = StoreFiles(folder).every_byte
    if found.changed.count or found.broken.count or found.unlisted.count:
        raise SystemExit(f"the healthy store was found broken: {found}")


def timed(work: Callable[[Path], None], folder: Path, cached: bool) -> float:
    """Seconds of ``work(folder)``, the files' pages in memory or not."""
    for path in (folder / "hidden_states").iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED if cached else os.POSIX_FADV_DONTNEED)
    started = time.monotonic()
    work(folder)
    return time.monotonic() - started


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    deep = int(sys.argv[2]) if len(sys.argv) > 2 else 1_500
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(folder / "many", samples, real=False)
        seconds, peak, code = measured("-m", "eagle3nb", "check", str(folder / "many"))
        print(f"headers and token ids of {samples:,} samples: {seconds:.1f} s, peak {peak:.0f} MiB, exit {code}")
        make(folder / "few", deep, real=True)
        size = sum(p.stat().st_size for p in (folder / "few" / "hidden_states").iterdir()) / 2**20
        few, code = measured("-m", "eagle3nb", "check", str(folder / "few"), "--deep")[1:]
        make(folder / "fewer", deep // 10, real=True)
        fewer = measured("-m", "eagle3nb", "check", str(folder / "fewer"), "--deep")[1]
        print(f"--deep: peak {few:.0f} MiB for {deep:,} samples, {fewer:.0f} MiB for {deep // 10:,}, exit {code}")
        for cached in (False, True):
            ratios = []
            for _ in range(3):
                alone = timed(read_alone, folder / "few", cached)
                ours = timed(read_deep, folder / "few", cached)
                ratios.append(alone / ours)
                print(f"alone {size / alone:,.0f} MiB/s, --deep {size / ours:,.0f} MiB/s: {alone / ours:.2f}")
            print(f"--deep at {sorted(ratios)[1]:.2f} of reading alone, {'page cache' if cached else 'disk'}")


if __name__ == "__main__":
    main()
