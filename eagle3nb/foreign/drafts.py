"""Draft configs and checkpoints of EAGLE's naming, turned into speculators' form."""

from pathlib import Path
from typing import Any

from eagle3nb import draft_config, export
from eagle3nb.bridges import reading
from eagle3nb.bridges.artefacts import Draft
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_json
from eagle3nb.verifier import Verifier


def import_draft(path: Path, dest: Path, verifier: Verifier, layer_ids: list[int] | None, say: Any = print) -> None:
    """Write a draft config, or a whole checkpoint of EAGLE's naming, in speculators' form.

    The same layer ids mean inputs of layers to vLLM and outputs to SGLang, and no config says which: ``layer_ids``
    (inputs) must be given where a legacy config names some. Raises `Refused` else.
    """
    mine = draft_config.read(path)
    n = verifier.num_layers
    if layer_ids is not None and (layer_ids != sorted(set(layer_ids)) or layer_ids[0] < 0 or layer_ids[-1] >= n):
        raise Refused(f"--layer-ids {layer_ids}: wanted different ids in rising order from 0 to {n - 1}")
    if not draft_config.is_legacy(mine) and mine.get("speculators_model_type") != "eagle3":
        raise Refused(f"{path}: no draft config: neither of speculators (eagle3) nor a legacy one with eagle_config")
    if not isinstance(mine.get("eagle_config") or {}, dict):
        raise Refused(f"{path}: eagle_config is a {type(mine['eagle_config']).__name__}; wanted an object")
    weights = path / "model.safetensors" if path.is_dir() else None
    if path.is_dir() and not weights.is_file():
        raise Refused(f"{path}: no model.safetensors beside its config.json; for the config alone, name that file")
    if weights and layer_ids:
        width = reading.safetensors_header(weights).get("fc.weight")
        if width is not None and width.shape[1] != len(layer_ids) * verifier.hidden_size:
            layers = width.shape[1] / verifier.hidden_size
            raise Refused(f"--layer-ids {layer_ids}: fc of {weights} takes {layers:g} layers")
    decoder = Draft(mine, None, str(path)).transformer
    for field, wanted in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if decoder.get(field) != wanted:
            found = decoder.get(field)
            raise Refused(f"{path}: {field} {found}, the verifier {verifier.name} has {wanted}; give its own verifier")
    named = (mine.get("eagle_config") or mine).get("eagle_aux_hidden_state_layer_ids")
    if draft_config.is_legacy(mine) and layer_ids is None:
        raise Refused(
            f"{path}: its layer ids {named} mean inputs of layers to vLLM and outputs (one less) to SGLang, and it "
            "does not say which: give --layer-ids as inputs of layers (for its samples they can be measured)"
        )
    if weights:
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
