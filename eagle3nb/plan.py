"""What a run will cost: tokens, disk, memory and time per stage, before anything starts.

All of it follows from the params and the verifier's config; its weights need not be here. Times come from throughputs
in tokens/s, each with its origin; `preflight.throughput` sets any of them to what you have measured.

=============  ==============================================================================================
``decode``     new tokens, many requests at once (the verifier writes the responses)
``prefill``    given tokens, read in batches
``single``     new tokens, one request at a time (speed in the evaluation)
``train``      tokens of the store, each unrolled over all TTT steps
=============  ==============================================================================================
"""

import difflib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3nb import child, draft_config
from eagle3nb import verifier as verifiers
from eagle3nb.conversations import read_source
from eagle3nb.errors import Refused
from eagle3nb.params import Params
from eagle3nb.verifier import Verifier

TYPICAL_PROMPT_TOKENS = 64  # a chat prompt with its template; measured on the built-in prompts (mean 48)
HELDOUT_PROMPTS = 48  # of the built-in file
# Achieved operations per second. On a CPU: times the rate of a float32 matrix product, which is measured now
# (194 GFLOP/s beside SmolLM2's 343 tokens/s decoding 64 at once, 748 prefilling and 27 decoding one alone, in float32).
# On GPUs: stated for each, 35% of an H100's bf16 peak where arithmetic binds, 1 to 3% where memory does.
CPU_FACTORS = {"decode": 0.48, "prefill": 1.04, "single": 0.038, "train": 0.86}
GPU_FLOPS = {"decode": 30e12, "prefill": 300e12, "single": 3e12, "train": 300e12}
ENGINE_START_SECONDS = {"cpu": 20, "cuda": 120}
LOAD_BYTES_PER_SECOND = 2e9  # a large verifier from a local disk


@dataclass
class Size:
    """Parameters of a model: all, those that a token passes, and the bytes of all on disk."""

    total: int
    active: int
    bytes: int
    origin: str


def verifier_of(params: Params) -> Verifier:
    """The verifier to plan for: the config named in the params, or the verifier itself (its small files)."""
    named = params.preflight.config
    if named:
        path = Path(named).expanduser()
        if not path.exists():
            raise Refused(f"preflight.config: no such file or directory {named}")
        return Verifier(params.preflight.verifier, path, params.preflight.trust_remote_code)
    try:
        return verifiers.resolve(
            params.preflight.verifier, revision=params.preflight.revision, cache_dir=params.preflight.cache_dir,
            trust_remote_code=params.preflight.trust_remote_code,
        )  # fmt: skip
    except Refused as error:
        raise Refused(f"{error}; to plan without it, name its config.json as preflight.config") from None


def make(params: Params, folder: Path, verifier: Verifier | None = None) -> dict[str, Any]:
    """The plan of a run whose directory will lie below ``folder``. Tokens and disk are upper bounds."""
    verifier = verifier or verifier_of(params)
    data, train, settings = params.prepare_data, params.train, params.evaluate
    rows = _count_rows(data.train)
    samples = min(rows, data.max_samples or rows) if rows is not None else data.max_samples
    heldout = min(
        n for n in (_count_rows(data.heldout) or HELDOUT_PROMPTS, settings.max_prompts, data.max_heldout) if n
    )
    given = data.responses == "given"
    row_tokens = data.seq_len if given else min(data.seq_len, TYPICAL_PROMPT_TOKENS + data.max_new_tokens)
    tokens = (samples or 0) * row_tokens
    generated = 0 if given else (samples or 0) * data.max_new_tokens

    layers = len(params.extract_hidden_states.layer_ids or verifier.default_layer_ids) + 1
    bytes_per_token = layers * verifier.hidden_size * 2  # bf16
    size, (draft_params, trained) = verifier_size(verifier), draft_parameters(verifier, params)
    checkpoints = 1 if train.keep_only_best else max(1, round(train.epochs / train.checkpoint_every))
    store_gb = tokens * bytes_per_token / 1e9
    checkpoint_gb = draft_params * 2 * 3 / 1e9 * checkpoints  # bf16 weights and both AdamW moments

    gpus = planned_gpus(params)
    rates = throughputs(params, size, trained, gpus)
    speed = {name: value for name, value, _ in rates}
    start = ENGINE_START_SECONDS["cuda" if gpus else "cpu"] + size.bytes / LOAD_BYTES_PER_SECOND
    numbers = settings.num_speculative_tokens
    engines = 1 + (len(numbers) if isinstance(numbers, list) else 1)
    answers = heldout * settings.max_new_tokens
    timed = min(heldout, settings.speed_prompts) * settings.max_new_tokens
    shards = params.extract_hidden_states.num_shards
    seconds = {
        "extract_hidden_states": start
        + (generated / speed["decode"] + (tokens - generated) / speed["prefill"]) / shards,
        "train": tokens * train.epochs / speed["train"],
        "evaluate": engines * (answers / speed["decode"] + settings.rounds * (start + timed / speed["single"])),
    }
    each = max(1, gpus)
    # Training keeps float32 weights, gradients and two moments of what is trained, and bf16 or float32 of the rest.
    training = (16 * trained + 4 * (draft_params - trained)) / (each if train.trainer_args.get("fsdp_shard") else 1)
    memory = {
        "extract_hidden_states": size.bytes / each,
        "train": training,
        "evaluate": (size.bytes + 2 * draft_params) / each,
    }
    work = {
        "extract_hidden_states": (tokens, store_gb),
        "train": (tokens * train.epochs, checkpoint_gb),
        "evaluate": (engines * (answers + settings.rounds * timed), 0.0),
    }
    return {
        "samples": samples,
        "samples_known": samples is not None,
        "tokens": tokens,
        "bytes_per_token": bytes_per_token,
        "verifier_parameters": size.total,
        "verifier_active_parameters": size.active,
        "verifier_gb": round(size.bytes / 1e9, 3),
        "verifier_size_from": size.origin,
        "draft_parameters": draft_params,
        "store_gb": round(store_gb, 3),
        "checkpoints_gb": round(checkpoint_gb, 3),
        "disk_gb": round(store_gb + checkpoint_gb + 0.05, 3),
        "disk_free_gb": round(shutil.disk_usage(folder).free / 1e9, 1),
        "disk_reserve_gb": params.preflight.disk_reserve_gb,
        "disk_of": str(folder),
        "gpus": gpus,
        "seconds": {name: round(value) for name, value in seconds.items()},
        "total_seconds": round(sum(seconds.values())),
        "stages": [
            {
                "stage": name, "tokens": work[name][0], "disk_gb": round(work[name][1], 3),
                "memory_gb": round(memory[name] / 1e9, 2), "seconds": round(seconds[name]),
            }
            for name in seconds
        ],
        "throughput": [
            {"name": name, "tokens_per_s": round(value, 1), "origin": origin} for name, value, origin in rates
        ],
    }  # fmt: skip


def check_disk(plan: dict[str, Any]) -> None:
    """``Refused`` where the run would not fit on its disk."""
    if plan["disk_gb"] + plan["disk_reserve_gb"] > plan["disk_free_gb"]:
        raise Refused(
            f"the run needs about {plan['disk_gb']:,.1f} GB and {plan['disk_reserve_gb']:g} GB in reserve, but "
            f"{plan['disk_of']} has {plan['disk_free_gb']:,.1f} GB free; use another run directory, "
            "fewer samples (prepare_data.max_samples) or shorter ones (prepare_data.seq_len)"
        )


STAGE_HEADERS = ("stage", "tokens", "disk, GB", "memory, GB", "time")
RATE_HEADERS = ("throughput", "tokens/s", "origin")


def stage_rows(plan: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Rows for `STAGE_HEADERS`; memory is that of one GPU, or of the machine without one."""
    rows = [
        (s["stage"], s["tokens"], s["disk_gb"], s["memory_gb"], child.duration(s["seconds"])) for s in plan["stages"]
    ]
    most = max(s["memory_gb"] for s in plan["stages"])
    return [*rows, ("together", None, plan["disk_gb"], most, child.duration(plan["total_seconds"]))]


def rate_rows(plan: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Rows for `RATE_HEADERS`."""
    return [(rate["name"], rate["tokens_per_s"], rate["origin"]) for rate in plan["throughput"]]


def _billions(count: int) -> str:
    return f"{count / 1e9:,.{1 if count > 1e10 else 3}f} billion"


def lines(plan: dict[str, Any]) -> list[str]:
    """The plan as plain text."""
    where = f"{plan['gpus']} GPUs, memory of each" if plan["gpus"] else "this machine's CPU"
    known = f"{plan['samples']:,}" if plan["samples_known"] else "unknown (set prepare_data.max_samples); none counted:"
    out = [
        f"samples {known}, at most {plan['tokens']:,} tokens, {plan['bytes_per_token']:,} bytes each in the store",
        f"verifier {_billions(plan['verifier_parameters'])} parameters, "
        f"{_billions(plan['verifier_active_parameters'])} of them a token, {plan['verifier_gb']:,.1f} GB "
        f"({plan['verifier_size_from']})",
        f"draft {_billions(plan['draft_parameters'])} parameters; planned for {where}",
        "",
        f"{STAGE_HEADERS[0]:<24}{STAGE_HEADERS[1]:>14}{STAGE_HEADERS[2]:>12}{STAGE_HEADERS[3]:>12}{STAGE_HEADERS[4]:>10}",
    ]
    for name, tokens, disk, memory, seconds in stage_rows(plan):
        out.append(
            f"{name:<24}{'' if tokens is None else f'{tokens:,}':>14}{disk:>12,.2f}{memory:>12,.2f}{seconds:>10}"
        )
    out += ["", *(f"{name:<9}{value:>12,.0f} tokens/s  {origin}" for name, value, origin in rate_rows(plan))]
    out.append(
        f"disk: {plan['disk_gb']:,.1f} GB of {plan['disk_free_gb']:,.1f} GB free in {plan['disk_of']} "
        "(the verifier's own files not counted)"
    )
    return out


# ---- sizes ---------------------------------------------------------------------------------------------------


def verifier_size(verifier: Verifier) -> Size:
    """Parameters counted from the config; bytes from the index or the files where they are here."""
    config, hidden = verifier.config, verifier.hidden_size
    if verifier.uses_mla:
        heads, rank = config.num_attention_heads, config.q_lora_rank
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
        attention = (hidden * rank + rank * heads * query) if rank else hidden * heads * query
        attention += hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        attention += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        attention += heads * config.v_head_dim * hidden
    else:
        attention = _attention(config, hidden)
    experts = next((n for n in (getattr(config, f, None) for f in EXPERT_FIELDS) if n), 0)
    expert = 3 * hidden * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    dense_layers = getattr(config, "first_k_dense_replace", 0) if experts else verifier.num_layers
    moe_layers = verifier.num_layers - dense_layers
    shared = (getattr(config, "n_shared_experts", None) or 0) * expert
    per_token = getattr(config, "num_experts_per_tok", None) or 0
    vocabulary = verifier.vocab_size * hidden * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    rest = verifier.num_layers * attention + dense_layers * 3 * hidden * config.intermediate_size
    rest += moe_layers * (shared + hidden * experts)
    routed = moe_layers * experts * expert
    bits, origin = _expert_bits(verifier)
    bytes_, origin = int(2 * (rest + vocabulary) + routed * bits / 8), f"counted from the config, {origin}"
    found = verifier.path.is_dir() and verifier.weights.total_bytes()
    if found:
        bytes_, origin = found, "as stored"
    active = rest + moe_layers * per_token * expert + verifier.vocab_size * hidden
    return Size(rest + vocabulary + routed, active, bytes_, origin)


EXPERT_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")


def _attention(config: Any, hidden: int, inputs: int | None = None) -> int:
    """Parameters of ordinary attention on ``inputs`` wide inputs (hidden by default)."""
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return (inputs or hidden) * (queries + 2 * keys) + queries * hidden


def _expert_bits(verifier: Verifier) -> tuple[float, str]:
    """Bits per weight of the routed experts: published Kimi checkpoints quantise nothing else."""
    groups = (verifier.quantization or {}).get("config_groups") or {}
    weights = next((g["weights"] for g in groups.values() if g.get("weights")), None)
    if not weights:
        return 16, "bf16"
    bits = weights["num_bits"] + (16 / weights["group_size"] if weights.get("group_size") else 0)
    return bits, f"experts {bits:g} bits with their scales"


def draft_parameters(verifier: Verifier, params: Params) -> tuple[int, int]:
    """(all, trained) parameters of the draft: fc, a first layer with inputs twice as wide, further layers, lm_head."""
    config, hidden = verifier.config, verifier.hidden_size
    layers = params.train.num_layers or 1
    if params.train.draft_config:
        fields = draft_config.flattened(draft_config.read(params.train.draft_config))
        config = type("Decoder", (), {"head_dim": None, "num_key_value_heads": fields["num_attention_heads"]} | fields)
        layers = fields["num_hidden_layers"]
        if fields["hidden_size"] != hidden:
            raise Refused(
                f"train.draft_config: {params.train.draft_config} has hidden_size {fields['hidden_size']}, "
                f"the verifier {hidden}; wanted the same"
            )
    mlp = 3 * hidden * (getattr(config, "intermediate_size", None) or 3 * hidden)
    aux = len(params.extract_hidden_states.layer_ids or verifier.default_layer_ids)
    inner = _attention(config, hidden, 2 * hidden) + (layers - 1) * _attention(config, hidden) + layers * mlp
    trained = aux * hidden * hidden + inner + params.build_vocab_mapping.draft_vocab_size * hidden
    return trained + verifier.vocab_size * hidden, trained


def _count_rows(sources: list[str]) -> int | None:
    """Rows of the sources that can be counted at once; None where one is on the hub."""
    if not all(source.startswith("builtin:") or Path(source).expanduser().exists() for source in sources):
        return None
    return sum(1 for source in sources for _ in read_source(source))


# ---- throughputs -----------------------------------------------------------------------------------------------


def planned_gpus(params: Params) -> int:
    """GPUs of this machine, or as many as the engine is told to use."""
    import torch

    told = params.extract_hidden_states.engine_args
    wanted = told.get("tensor_parallel_size", 1) * told.get("pipeline_parallel_size", 1)
    return wanted if wanted > 1 else torch.cuda.device_count()


def throughputs(params: Params, size: Size, trained: int, gpus: int) -> list[tuple[str, float, str]]:
    """(name, tokens/s, origin) of each throughput."""
    given = params.preflight.throughput
    for key in given:
        if key not in CPU_FACTORS:
            near = difflib.get_close_matches(key, CPU_FACTORS, 1, 0.3)
            hint = f"nearest: {near[0]}" if near else f"known: {', '.join(CPU_FACTORS)}"
            raise Refused(f"preflight.throughput.{key}: unknown; {hint}")
    cost = dict.fromkeys(("decode", "prefill", "single"), 2 * size.active)  # operations per token
    cost["train"] = 6 * trained * params.train.ttt_steps
    measured = 0.0 if gpus or set(given) == set(CPU_FACTORS) else matmul_flops()
    found = []
    for name, operations in cost.items():
        if name in given:
            found.append((name, float(given[name]), "preflight.throughput"))
        elif gpus:
            count = gpus**0.5 if name == "single" else gpus  # one stream gains little from more GPUs
            flops, bound = GPU_FLOPS[name] * count, "arithmetic" if GPU_FLOPS[name] > 1e14 else "memory"
            origin = f"stated, not measured: {GPU_FLOPS[name] / 1e12:.0f} TFLOP/s a GPU (H100), bound by {bound}"
            found.append((name, flops / operations, origin))
        else:
            origin = (
                f"a float32 matrix product measured now ({measured / 1e9:.0f} GFLOP/s) x {CPU_FACTORS[name]} of "
                "SmolLM2's run"
            )
            found.append((name, CPU_FACTORS[name] * measured / operations, origin))
    return found


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
