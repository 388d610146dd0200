"""What every stage does: find its folder and its inputs, know whether its output still holds, leave ``result.json``.

A stage reads what earlier ones left on disk, never their code. ``result.json`` carries the stage's fingerprint: its
parameters, the fingerprints of the stages it reads, the files its parameters name, and the package's own source.
The same fingerprint means the same output.
"""

import hashlib
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle3nb import __version__
from eagle3nb import verifier as verifiers
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, sha256_file, sha256_json, write_json
from eagle3nb.params import STAGES, StageParams

# stage -> the stages whose output it reads
READS: dict[str, list[str]] = {
    "preflight": [],
    "prepare_data": ["preflight"],
    "extract_hidden_states": ["preflight", "prepare_data"],
    "build_vocab_mapping": ["preflight", "extract_hidden_states"],
    "train": ["preflight", "extract_hidden_states", "build_vocab_mapping"],
    "evaluate": ["preflight", "prepare_data", "train"],
}


FINISHED = ("done", "cached")  # what run.json says of a stage that is complete


def label(name: str) -> str:
    """``04_train`` for ``train``: the name of its notebook and its output folder."""
    return f"{list(STAGES).index(name):02d}_{name}"


def folder(run_dir: Path | str, name: str) -> Path:
    """The output folder of a stage."""
    return Path(run_dir) / label(name)


def result(run_dir: Path | str, name: str) -> dict[str, Any]:
    """``result.json`` of a finished stage; ``Refused`` where it has not been run."""
    found = read_json(folder(run_dir, name) / "result.json")
    if found is None:
        raise Refused(f"{folder(run_dir, name)} has no result.json: run the stage {name} first (or check run_dir)")
    return found


def verifier(run_dir: Path | str, *, trust_remote_code: bool | None = None) -> verifiers.Verifier:
    """The verifier that the preflight of this run resolved.

    Where it no longer lies (a run directory on another machine) it is found again by the name that the params file
    gave it, and must have the same hashes. ``trust_remote_code`` overrules what the run's files say: they may be a
    stranger's.
    """
    done = result(run_dir, "preflight")
    try:
        found = done["verifier"] | {"path": Path(done["verifier"]["path"])}
        if trust_remote_code is not None:
            found["trust_remote_code"] = trust_remote_code
        first, identity = verifiers.Verifier(**found), dict(done["identity"])
    except (KeyError, TypeError, ValueError) as error:
        where = folder(run_dir, "preflight") / "result.json"
        raise Refused(f"{where}: names no verifier as preflight does ({error!r}); run that stage again") from None
    if first.path.is_dir():
        return first
    given = read_json(Path(run_dir) / "params.json", {}).get("preflight", {})
    way_out = "run the stage preflight again, or name it (eagle3nb check --verifier V)"
    try:
        again = verifiers.resolve(
            given.get("verifier", first.name), revision=given.get("revision"),
            cache_dir=given.get("cache_dir") if trust_remote_code is None else None,
            trust_remote_code=first.trust_remote_code,
        )  # fmt: skip
    except Refused as error:
        raise Refused(f"the verifier is not in {first.path}; {way_out} ({error})") from None
    changed = [key for key, value in again.identity().items() if value != identity.get(key)]
    if changed:
        raise Refused(f"{again.path} holds another verifier than this run's ({', '.join(changed)} differ); {way_out}")
    return again


def single_process(wanted: bool | None) -> bool:
    """None means: one process on a CPU (half the start-up time, both cores), vLLM's ordinary ones on GPUs."""
    import torch

    return not torch.cuda.is_available() if wanted is None else wanted


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; without it vLLM emulates, four times slower than float32."""
    try:
        flags = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_dtype(wanted: str, *, exact: bool) -> str:
    """What ``auto`` means: bfloat16 on a GPU and on a CPU that multiplies it itself, float32 elsewhere.

    Without such instructions vLLM emulates bf16, four times slower than float32. ``exact``: on a CPU always float32.
    Whether two engines give identical outputs can only be asked where rounding does not break ties: measured on
    SmolLM2, the last states agree with the next token in 0.997 of cases in float32 and 0.974 to 0.985 in bfloat16,
    which writes and captures 1.5 times as fast.
    """
    if wanted != "auto":
        return wanted
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    return "bfloat16" if cpu_has_bf16() and not exact else "float32"


@cache
def _source_digest() -> str:
    digest = hashlib.sha256(__version__.encode())
    package = Path(__file__).parent
    for file in sorted([*package.rglob("*.py"), *package.glob("data/*.jsonl")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _file_state(value: Any) -> Any:
    """What tells whether a file or directory named by a parameter has changed; None for anything else."""
    if isinstance(value, list):
        return [_file_state(item) for item in value]
    if not isinstance(value, str) or len(value) > 1000:
        return None
    path = Path(value).expanduser()
    if path.is_file():
        return sha256_file(path)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file())
        return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files[:10000]]
    return None


def fingerprint(name: str, params: StageParams) -> str:
    """Changes when anything changes that the stage's output depends on."""
    values = params.model_dump(exclude={"run_dir", "allow"})
    earlier = {read: result(params.run_dir, read)["fingerprint"] for read in READS[name]}
    named = {key: _file_state(value) for key, value in values.items()}
    return sha256_json([name, values, earlier, named, _source_digest()])


def is_done(name: str, params: StageParams) -> bool:
    """Whether the stage's output is complete, made from the same inputs, and passed its checks (or may fail them)."""
    found = read_json(folder(params.run_dir, name) / "result.json")
    checks = read_json(folder(params.run_dir, name) / "checks.json")
    if checks is None or any(c["verdict"] == "fail" and c["id"] not in params.allow for c in checks):
        return False
    try:
        return found is not None and found["fingerprint"] == fingerprint(name, params)
    except Refused:  # an earlier stage is missing
        return False


@dataclass
class Running:
    """A stage at work. ``folder`` is its own; ``finish`` writes its figures as ``result.json``."""

    name: str
    folder: Path
    fingerprint: str
    started: float

    def finish(self, **figures: Any) -> dict[str, Any]:
        seconds = round(time.time() - self.started, 2)
        value = {"stage": self.name, "fingerprint": self.fingerprint, "seconds": seconds, **figures}
        write_json(self.folder / "result.json", value)
        return read_json(self.folder / "result.json")


@contextmanager
def running(name: str, params: StageParams) -> Iterator[Running]:
    """Open a stage's folder for new output; an old ``result.json`` is gone before anything else changes."""
    here = folder(params.run_dir, name)
    mark = fingerprint(name, params)
    here.mkdir(parents=True, exist_ok=True)
    (here / "result.json").unlink(missing_ok=True)
    (here / "checks.json").unlink(missing_ok=True)
    (here / "child.json").unlink(missing_ok=True)
    try:
        yield Running(name, here, mark, time.time())
    except OSError as error:
        if error.errno != 28:  # ENOSPC
            raise
        raise Refused(f"the disk of {here} is full; free some space and run the stage again") from error
