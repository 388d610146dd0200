"""Draft configs and checkpoints of EAGLE's naming, turned into speculators' form."""

from pathlib import Path
from typing import Any

from eagle3nb import draft_config, export
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_json
from eagle3nb.verifier import Verifier


def import_draft(path: Path, dest: Path, verifier: Verifier, layer_ids: list[int] | None, say: Any = print) -> None:
    """Write a draft config, or a whole checkpoint of EAGLE's naming, in speculators' form.

    The same layer ids mean inputs of layers to vLLM and outputs to SGLang, and no config says which: ``layer_ids``
    (inputs) must be given where a legacy config names some. Raises `Refused` else.
    """
    mine = draft_config.read(path)
    named = (mine.get("eagle_config") or mine).get("eagle_aux_hidden_state_layer_ids")
    if draft_config.is_legacy(mine) and layer_ids is None:
        raise Refused(
            f"{path}: its layer ids {named} mean inputs of layers to vLLM and outputs (one less) to SGLang, and it "
            "does not say which: give --layer-ids as inputs of layers (for its samples they can be measured)"
        )
    if path.is_dir() and (path / "model.safetensors").is_file():
        export.run(path, "vllm", dest, verifier=verifier.name, say=say)
        made = read_json(dest / "config.json")
    elif not draft_config.is_legacy(mine):
        made = mine
    else:
        kind = list(getattr(verifier.config, "architectures", None) or [])
        converted = draft_config.to_speculators(
            mine, verifier=verifier.name, verifier_architectures=kind, layers=layer_ids
        )
        for field, value, became, why in converted.notes:
            say(f"  {field:<44} {'' if value is None else value!s:<24.24} -> {became}{f'  ({why})' if why else ''}")
        made = converted.config
    if layer_ids is not None:
        made["eagle_aux_hidden_state_layer_ids"] = layer_ids
    write_json(dest / "config.json", made)
    say(f"auxiliary layers: inputs of layers {made.get('eagle_aux_hidden_state_layer_ids')}")
