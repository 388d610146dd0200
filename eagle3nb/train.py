"""Stage 04: train the draft with speculators' own trainer, in a child process.

Out (``04_train/``): ``checkpoints/<epoch>/`` as speculators writes them (config.json, model.safetensors, optimizer),
``checkpoints/checkpoint_best`` (a link), ``metrics.jsonl`` (one line per step and per validation). A stopped run goes
on from its last complete checkpoint; checkpoints of other inputs are kept under another name.

Validation gives, per draft position k, ``full_acc_k``: the share of positions where the draft's tokens 0..k all equal
the verifier's choice. This is what vLLM later counts as accepted at position k, so 1 + their sum predicts the
acceptance length; the best checkpoint is the one where it is highest.
"""

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3nb import child, draft_config, stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_jsonl, sha256_file, write_json
from eagle3nb.params import Train
from eagle3nb.samples import Store
from eagle3nb.verifier import Verifier

# Fields of speculators' TrainConfig that say where something lies.
PATHS = ("verifier_name_or_path", "d2t_path", "t2d_path", "data_path", "save_path", "log_dir", "draft_config")


def run(params: Train, on_poll: Callable[[], None] | None = None) -> dict[str, Any]:
    """Run the stage; returns (and writes) its ``result.json``. ``on_poll`` draws live curves."""
    child.refuse_if_no_module("speculators")
    with stage.running("train", params) as here:
        verifier = stage.verifier(params.run_dir)
        extracted = stage.result(params.run_dir, "extract_hidden_states")
        mapping = stage.result(params.run_dir, "build_vocab_mapping")
        check_torchrun(params.torchrun)
        job = {
            "config": trainer_config(params, verifier, extracted["layer_ids"], mapping, here.folder),
            "metrics": str(here.folder / "metrics.jsonl"),
        }
        # What checkpoints are made from, wherever the run lies: the same on another machine.
        decoder = here.folder / "decoder.json"
        job["inputs"] = {
            "store": extracted["store_fingerprint"],
            "mapping": mapping["sha256"],
            "config": {key: value for key, value in job["config"].items() if key not in PATHS},
            "decoder": sha256_file(decoder) if job["config"].get("draft_config") == str(decoder) else None,
        }
        start = launcher(params.num_gpus, params.torchrun)
        done = child.run("eagle3nb.engine.train", job, here.folder, launcher=start, on_poll=on_poll)
        best = Path(done["best_checkpoint"])
        return here.finish(
            **done | {"best_checkpoint": str(best.relative_to(here.folder))},
            layer_ids=extracted["layer_ids"][:-1],
            draft_vocab_size=mapping["draft_vocab_size"],
            validation_rows=_validation_rows(params),
            checkpoint_sha256=sha256_file(best / "model.safetensors"),
            checkpoint_bytes=(best / "model.safetensors").stat().st_size,
        )


def _validation_rows(params: Train) -> int:
    """How many rows validate: the last ones, as speculators splits them."""
    rows = len(Store(stage.folder(params.run_dir, "extract_hidden_states") / "store"))
    return rows - int(rows * params.train_share)


def launcher(num_gpus: int | None, torchrun: dict[str, Any]) -> list[str] | None:
    """torchrun for several GPUs or nodes, None (plain python) for one or a CPU."""
    available = torch.cuda.device_count()
    count = num_gpus or max(1, available)
    if count > max(1, available):
        raise Refused(f"train.num_gpus = {count}: this machine has {available}")
    if count == 1 and not torchrun:
        return None
    given = torchrun or {"standalone": True}
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *flags]


def check_torchrun(torchrun: dict[str, Any]) -> None:
    """``Refused`` where a key is no argument of torchrun."""
    from torch.distributed.run import get_args_parser

    known = [action.dest for action in get_args_parser()._actions]
    for key in torchrun:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.3)
            raise Refused(f"train.torchrun.{key}: no argument of torchrun" + (f"; nearest: {near[0]}" if near else ""))


def trainer_config(
    params: Train, verifier: Verifier, layer_ids: list[int], mapping: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """speculators' flat TrainConfig fields for these parameters; ``trainer_args`` go over everything."""
    cpu = not torch.cuda.is_available()
    optimizer = params.optimizer if params.optimizer != "auto" else ("adamw" if cpu else "muon")
    mapping_folder = stage.folder(params.run_dir, "build_vocab_mapping")
    config: dict[str, Any] = {
        "speculator_type": "eagle3",
        "verifier_name_or_path": str(verifier.path),
        "trust_remote_code": verifier.trust_remote_code,
        "target_layer_ids": layer_ids[:-1],
        # Unused by EAGLE-3, but unset it would load the verifier's processor to look for one.
        "mask_token_id": verifier.eos_token_ids[0],
        "draft_vocab_size": mapping["draft_vocab_size"],
        "d2t_path": str(mapping_folder / "d2t.npy"),
        "t2d_path": str(mapping_folder / "t2d.npy"),
        "data_path": str(stage.folder(params.run_dir, "extract_hidden_states") / "store"),
        "on_missing": "raise",
        "total_seq_len": params.tokens_per_step,
        "train_data_ratio": params.train_share,
        "ttt_steps": params.ttt_steps,
        "epochs": params.epochs,
        "lr": params.lr,
        "optimizer": optimizer,
        "scheduler_type": params.scheduler,
        "scheduler_warmup_ratio": params.warmup_ratio,
        "checkpoint_freq": params.checkpoint_every,
        "save_best": params.keep_only_best,
        "hidden_states_dtype": stage.choose_dtype(params.dtype, exact=False),
        "save_path": str(folder / "checkpoints"),
        "log_dir": str(folder / "logs"),
        "seed": params.seed,
    }
    for name, value in (
        ("draft_config", params.draft_config),
        ("from_pretrained", params.from_pretrained),
        ("num_layers", params.num_layers),
    ):
        if value is not None:
            config[name] = value
    for name in ("draft_config", "from_pretrained"):
        value = config.get(name)
        if value and value.startswith((".", "/", "~")) and not Path(value).expanduser().exists():
            raise Refused(f"train.{name}: no such file or directory {value}")
    if params.draft_config:
        config |= from_draft_config(params.draft_config, verifier, config, folder)
    if cpu:
        config |= {
            "draft_attn_impl": "sdpa",
            "loss_implementation": "eager",
            "num_workers": 0,
        }
    else:
        config["num_workers"] = max(1, min(8, (os.cpu_count() or 2) // max(1, torch.cuda.device_count())))
    if params.trainer_args:
        check_trainer_args(params.trainer_args)
    return config | params.trainer_args


def from_draft_config(given: str, verifier: Verifier, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The trainer's fields for a given draft config, which must fit the store and the mapping.

    speculators takes only the decoder out of it: what a legacy or whole speculators config says of norms goes into
    the trainer's own fields, and its layer ids, which speculators would pass over, must be the store's.
    """
    found = draft_config.read(given)
    ids, size = draft_config.layer_ids(found), found.get("draft_vocab_size")
    if ids is not None and ids != config["target_layer_ids"]:
        raise Refused(
            f"train.draft_config: {given} names layers {ids} (read as inputs of layers), the store holds "
            f"{config['target_layer_ids']}; extract those layers, or, where the file counts outputs of layers "
            "(SGLang, SpecForge), write each id one higher"
        )
    if size is not None and size != config["draft_vocab_size"]:
        raise Refused(
            f"train.draft_config: {given} has draft_vocab_size {size}, the mapping {config['draft_vocab_size']}; "
            "set build_vocab_mapping.draft_vocab_size"
        )
    if draft_config.is_legacy(found):
        found = draft_config.to_speculators(found, verifier=None, verifier_architectures=[], layers=ids).config
    elif "transformer_layer_config" not in found:
        return {}
    write_json(folder / "decoder.json", found["transformer_layer_config"])
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    return {"draft_config": str(folder / "decoder.json")} | {key: found[key] for key in norms if key in found}


def draft_configs(params: Train, checkpoint: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(the given draft config or None, the checkpoint's), flat, for a look at both side by side."""
    given = draft_config.flattened(draft_config.read(params.draft_config)) if params.draft_config else None
    return given, draft_config.flattened(draft_config.read(checkpoint))


def check_trainer_args(trainer_args: dict[str, Any]) -> None:
    """``Refused`` where a key is no field of speculators' TrainConfig."""
    from speculators.train.config.schema import CONFIG_DESTS

    for key in trainer_args:
        if key not in CONFIG_DESTS:
            near = difflib.get_close_matches(key, CONFIG_DESTS, 1, 0.3)
            hint = f"; nearest: {near[0]}" if near else ""
            raise Refused(f"train.trainer_args.{key}: no field of speculators' TrainConfig{hint}")


def metrics(run_dir: Path | str) -> tuple[list[dict], list[dict]]:
    """(one row per logged step, one row per validation) of a run's ``metrics.jsonl``."""
    rows = read_jsonl(stage.folder(run_dir, "train") / "metrics.jsonl")
    return [row for row in rows if "train" in row], [row for row in rows if "val" in row]
