"""How an engine is set up on this machine: environment variables and vLLM arguments, by device.

Measured on two cores: with its default of three processes vLLM takes twice as long to start and keeps one core for
itself; one process and both cores give the most tokens/s. ``enforce_eager`` because compiling takes minutes and gains
little on a CPU.
"""

import difflib
import os
from typing import Any

import torch

from eagle3nb.errors import Refused


def device() -> str:
    """``cuda`` where torch sees a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


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


def start_llm(job: dict[str, Any], **own: Any) -> Any:
    """vLLM for a job: what the device needs, ``own`` of the caller (``dtype`` among it), the job's ``engine_args``."""
    prepare_environment(single_process=job["single_process"])
    from vllm import LLM, EngineArgs

    for key in job["engine_args"]:
        if key not in EngineArgs.__dataclass_fields__:
            near = difflib.get_close_matches(key, EngineArgs.__dataclass_fields__, 1, 0.3)
            raise Refused(f"engine_args.{key}: no argument of vLLM" + (f"; nearest: {near[0]}" if near else ""))
    arguments: dict[str, Any] = {
        "model": job["verifier_path"],
        "max_model_len": job["max_model_len"],
        "trust_remote_code": job["trust_remote_code"],
        "seed": job["seed"],
        # A cached prefix has no hidden states of this request, and would make two timings differ.
        "enable_prefix_caching": False,
    }
    if device() == "cpu":
        arguments["enforce_eager"] = True
        if job["single_process"]:
            arguments["distributed_executor_backend"] = "uni"
    arguments |= own | job["engine_args"]
    try:
        return LLM(**arguments)
    except ValueError as error:  # pydantic's too: a value that vLLM does not take
        raise Refused(f"vLLM refuses to start: {' '.join(str(error).split())[:400]}") from error
