"""How an engine is set up on this machine: environment variables and vLLM arguments, by device.

Measured on two cores: with its default of three processes vLLM takes twice as long to start and keeps one core for
itself; one process and both cores give the most tokens/s. ``enforce_eager`` because compiling takes minutes and gains
little on a CPU.
"""

import os
from typing import Any

import torch


def device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def choose_dtype(wanted: str) -> str:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU (bf16 rounding there breaks ties between runs)."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device() == "cuda" else "float32"


def prepare_environment(*, single_process: bool) -> None:
    """Set what vLLM reads from the environment; call before importing vllm. Values already set are kept."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device() == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        if single_process:
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for a job: what the device needs, then the job's own ``engine_args`` over it."""
    arguments: dict[str, Any] = {
        "model": job["verifier_path"],
        "dtype": choose_dtype(job["dtype"]),
        "max_model_len": job["max_model_len"],
        "trust_remote_code": job["trust_remote_code"],
        "seed": job["seed"],
        # A cached prefix has no hidden states of this request, and would make two timings differ.
        "enable_prefix_caching": False,
    }
    if device() == "cpu":
        arguments |= {"enforce_eager": True}
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            arguments |= {"distributed_executor_backend": "uni"}
    return arguments | job["engine_args"]
