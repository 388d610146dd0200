"""Draft checkpoints in the naming of who will serve them: speculators' for vLLM, EAGLE's for SGLang, and back.

============  ==========================================  =======================================================
target        decoder layers                              config
============  ==========================================  =======================================================
``vllm``      ``layers.0.*``, ``layers.1.*``, ...         `Eagle3SpeculatorConfig`; layer ids = inputs of layers
``sglang``    ``midlayer.*``, ``additional_layers.0.*``   ``LlamaForCausalLMEagle3``; layer ids = outputs, one less
============  ==========================================  =======================================================

Tensors are copied bit for bit; only names change. ``d2t`` holds offsets for both. The verifier stands in the exported
config under its name, never with a path of this machine.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3nb import draft, draft_config, stage
from eagle3nb.errors import Refused
from eagle3nb.files import atomic_path, write_json

TARGETS = ("vllm", "sglang")


def run(
    source: Path | str, target: str, destination: Path | str, *, verifier: str | None = None, anyway: bool = False,
    say: Callable[[str], Any] = print,
) -> Path:  # fmt: skip
    """Export the draft of a run (or a checkpoint directory of either naming) for ``target`` to ``destination``.

    ``Refused`` where the target would compute something else than what was trained, unless ``anyway``.
    """
    from safetensors.torch import save_file

    source, destination = Path(source), Path(destination)
    if target not in TARGETS:
        raise Refused(f"--to {target}: unknown; known: {', '.join(TARGETS)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise Refused(f"{destination} is there already; give a new directory")
    is_run = (source / "run.json").is_file() or stage.folder(source, "train").is_dir()
    checkpoint = draft.of_run(source) if is_run else draft.of_run(source, str(source))
    config = _without_paths(draft.config(checkpoint))
    old = "sglang" if draft_config.is_legacy(config) else "vllm"
    name = verifier or _verifier_name(source if is_run else None, config)
    if old == "vllm":
        config = {**config, "speculators_config": _named(config.get("speculators_config"), name)}
    converted = _convert(config, old, target, name)
    wrong = [f"{field} = {value!r} ({why})" for field, value, became, why in converted.notes if _lost(became, old)]
    if wrong and target == "sglang" and not anyway:
        raise Refused(
            f"{checkpoint} has what SGLang would compute otherwise: {'; '.join(wrong)}; train with a legacy "
            "train.draft_config for SGLang, or export with --anyway"
        )
    mine = draft.tensors(checkpoint)
    if "fc.weight" not in mine:
        raise Refused(f"{checkpoint}: no EAGLE-3 draft: no fc.weight among its {len(mine)} tensors")
    tensors = {_rename(key, target): tensor for key, tensor in mine.items()}
    destination.mkdir(parents=True, exist_ok=True)
    with atomic_path(destination / "model.safetensors") as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    write_json(destination / "config.json", converted.config)
    for field, value, became, why in converted.notes:
        say(f"  {field:<48} {'' if value is None else value!s:<24.24} -> {became}{f'  ({why})' if why else ''}")
    ids = draft_config.layer_ids(config, old)
    other = "inputs" if target == "vllm" else "outputs"
    say(f"auxiliary layers: inputs of layers {ids}; written as {other} of layers: {_written(converted.config)}")
    say(f"verifier: {name or 'not named'}; {len(tensors)} tensors, unchanged but for their names")
    return destination


def _without_paths(value: Any) -> Any:
    """A config whose absolute paths, wherever they stand, are cut to their last part."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _convert(config: dict[str, Any], old: str, target: str, name: str | None) -> draft_config.Converted:
    if old == target:
        return draft_config.Converted(config)
    if target == "sglang":
        return draft_config.to_legacy(config, convention="sglang")
    return draft_config.to_speculators(config, verifier=name, verifier_architectures=[], convention="sglang")


def _lost(became: str, old: str) -> bool:
    return old == "vllm" and became == "not representable"


def _written(config: dict[str, Any]) -> list[int] | None:
    return draft_config.layer_ids(config)


def _named(block: dict[str, Any] | None, name: str | None) -> dict[str, Any] | None:
    """speculators' block about the verifier, with its name instead of a path."""
    return block and block | {"verifier": block["verifier"] | {"name_or_path": name}}


def _verifier_name(run_dir: Path | None, config: dict[str, Any]) -> str | None:
    """What the run's params file called the verifier, else the config's own word; of a path only the last part."""
    if run_dir:
        name = stage.result(run_dir, "preflight")["verifier"]["name"]
    else:
        block = config.get("speculators_config") or (config.get("eagle3nb") or {}).get("speculators_config") or {}
        name = (block.get("verifier") or {}).get("name_or_path")
    if name and (name.startswith((".", "/", "~")) or Path(name).exists()):
        return Path(name).name
    return name


def _rename(key: str, target: str) -> str:
    """A tensor's name in the naming of ``target``; names that are in it already stay."""
    if target == "vllm":
        key = re.sub(r"^midlayer\.", "layers.0.", key)
        return re.sub(r"^additional_layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + 1}.", key)
    key = re.sub(r"^layers\.0\.", "midlayer.", key)
    return re.sub(r"^layers\.(\d+)\.", lambda m: f"additional_layers.{int(m[1]) - 1}.", key)
