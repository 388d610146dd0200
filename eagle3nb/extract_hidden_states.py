"""Stage 02: the verifier's hidden states of every training row, on disk, each sample as it is done.

One child process, one engine, one pass: responses to be generated are written by vLLM and their states captured at
once, given responses are prefilled. Out (``02_extract_hidden_states/``): ``store/`` (see `eagle3nb.samples`). A
killed run goes on where it stopped; a store made from other inputs is kept under another name, never mixed.
"""

import shlex
from typing import Any

from eagle3nb import child, stage
from eagle3nb.errors import Refused
from eagle3nb.files import folder_bytes
from eagle3nb.params import ExtractHiddenStates
from eagle3nb.samples import Store
from eagle3nb.verifier import Verifier


class StoreIncomplete(Refused):
    """A shard is done, others are not."""


def run(params: ExtractHiddenStates) -> dict[str, Any]:
    """Run the stage; returns (and writes) its ``result.json``."""
    child.refuse_if_no_module("vllm")
    with stage.running("extract_hidden_states", params) as here:
        verifier, data = stage.verifier(params.run_dir).complete(), stage.result(params.run_dir, "prepare_data")
        layers = layer_ids(params, verifier)
        if params.shard >= params.num_shards:
            raise Refused(
                f"extract_hidden_states.shard = {params.shard}: wanted below num_shards = {params.num_shards}"
            )
        store = Store(here.folder / "store")
        job = {
            "verifier_path": str(verifier.path),
            "trust_remote_code": verifier.trust_remote_code,
            "eos_token_ids": verifier.eos_token_ids,
            "rows": str(stage.folder(params.run_dir, "prepare_data") / "rows"),
            "store": str(store.folder),
            "declaration": declaration(params, verifier, layers, data),
            "max_model_len": data["longest_row"] + 2,  # and the token that is thrown away
            "capture": params.capture,
            "dtype": params.dtype,
            "shard": params.shard,
            "num_shards": params.num_shards,
            "single_process": stage.single_process(params.single_process),
            "seed": params.seed,
            "engine_args": {"max_num_seqs": params.max_num_seqs} | params.engine_args,
        }
        # Shards may run at once, on several nodes: each has its own log and progress.
        folder = here.folder / f"shard-{params.shard}" if params.num_shards > 1 else here.folder
        done = child.run("eagle3nb.engine.extract_hidden_states", job, folder)
        if not done.get("complete"):
            raise StoreIncomplete(
                f"shard {params.shard} of {params.num_shards} is complete, the store is not: run the other shards, "
                "then this stage again"
            )
        return here.finish(
            **done,
            layer_ids=layers,
            store_fingerprint=store.fingerprint(),
            store_samples=len(store),
            store_tokens=store.info["tokens"],
            store_bytes=folder_bytes(store.folder),
        )


def run_shard(params: ExtractHiddenStates, shard: int, num_shards: int) -> str:
    """Extract one part of the rows; parts may be extracted at once, on several nodes. Returns what to do next."""
    params = params.model_copy(update={"shard": shard, "num_shards": num_shards})
    try:
        run(params)
    except StoreIncomplete as error:
        return str(error)
    return f"the store is complete: eagle3nb run --run-dir {shlex.quote(params.run_dir)}"


def layer_ids(params: ExtractHiddenStates, verifier: Verifier) -> list[int]:
    """Auxiliary layer ids and, last, the number of layers (the final state before the final norm)."""
    n = verifier.num_layers
    wanted = params.layer_ids if params.layer_ids is not None else verifier.default_layer_ids
    if not wanted or sorted(set(wanted)) != wanted or wanted[0] < 0 or wanted[-1] >= n:
        raise Refused(
            f"extract_hidden_states.layer_ids = {wanted}: wanted different ids in rising order from 0 to {n - 1} "
            f"({verifier.name} has {n} layers; the final state is added by itself)"
        )
    return [*wanted, n]


def declaration(
    params: ExtractHiddenStates, verifier: Verifier, layers: list[int], data: dict[str, Any]
) -> dict[str, Any]:
    """The fields of `eagle3nb.samples.Declaration` but the engine's dtype, which the child chooses."""
    return {
        "verifier": verifier.identity(),
        "layer_ids": layers,
        "hidden_size": verifier.hidden_size,
        "dtype": "bfloat16",
        "data_sha256": data["rows_sha256"],
        "responses": data["responses"],
        "temperature": params.temperature,
        "seed": params.seed,
    }
