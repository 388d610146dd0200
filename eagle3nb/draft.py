"""Draft checkpoints: where a run's is, its config and tensors, and what its validation predicts."""

from pathlib import Path
from typing import Any

import torch

from eagle3nb import stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json


def of_run(run_dir: Path | str, given: str | None = None) -> Path:
    """The draft checkpoint of a run (the best one), or the given one."""
    folder = stage.folder(run_dir, "train")
    path = Path(given).expanduser() if given else folder / stage.result(run_dir, "train")["best_checkpoint"]
    if not (path / "config.json").is_file() or not (path / "model.safetensors").is_file():
        raise Refused(f"draft checkpoint {path}: wanted config.json and model.safetensors in it")
    return path


def config(path: Path) -> dict[str, Any]:
    """A checkpoint's config as plain JSON."""
    return read_json(path / "config.json")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise Refused(f"{path / 'model.safetensors'}: no whole safetensors file ({error}); fetch it again") from None


def predicted_acceptance(validation: dict[str, float]) -> list[float]:
    """Share accepted per draft position, as a validation row's ``full_acc_k`` predict it."""
    found = []
    while (key := f"full_acc_{len(found)}_epoch") in validation:
        found.append(validation[key])
    return found


def served_acceptance(predicted: list[float], coverage: float) -> list[float]:
    """What a server should accept per position, by validation's shares and the draft vocabulary's coverage.

    Validation knows no tokens outside the draft vocabulary. In serving such a token is a miss, and a draft at position
    k needs all k + 1 tokens inside.
    """
    return [share * coverage ** (k + 1) for k, share in enumerate(predicted)]
