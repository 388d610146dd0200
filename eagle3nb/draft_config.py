"""Draft configs: the legacy ``LlamaForCausalLMEagle3`` of EAGLE and SGLang, speculators' ``Eagle3SpeculatorConfig``.

Every field of the one is mapped to the other, defaulted with a reason, or listed as not representable; nothing is
dropped without a word. Fields that the legacy form has no place for are carried along under its key ``eagle3nb``,
which every loader ignores, so that the way back gives the same config.

A layer id means the INPUT of that layer to vLLM and speculators 0.9, and its OUTPUT to SGLang: the same state has an id
one less there. Both read it from the same field, so a config alone does not say which is meant; ``convention`` does.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3nb.errors import Refused
from eagle3nb.files import json_object

LEGACY = "LlamaForCausalLMEagle3"
# What is added to a layer id of each convention to make it the id of a layer's input.
CONVENTIONS = {"vllm": 0, "sglang": 1}
# Fields outside the decoder that have the same name in both forms: speculators' default, and what it means when absent.
SHARED = {
    "norm_before_residual": (False, "legacy drafts keep the residual before the norm"),
    "norm_before_fc": (False, "legacy drafts have no norm before fc"),
    "fc_norm": (False, "legacy drafts have no norm per captured layer"),
    "norm_output": (False, "legacy drafts hand on the state before the norm"),
    "target_hidden_size": (None, "the draft is as wide as the verifier"),
    "embed_requires_grad": (False, "the embedding is the verifier's"),
}
# What the decoder is without these fields: transformers' LlamaConfig.
DECODER_DEFAULTS = {
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_cache": True,
    "pretraining_tp": 1,
}  # fmt: skip
DECODER_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# What SGLang's class for these drafts computes whatever the config says; anything else it ignores without a word.
SGLANG_FIXED = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
BOOKKEEPING = ("transformers_version", "_name_or_path", "auto_map", "speculators_version")


@dataclass
class Converted:
    """A converted config. ``notes`` has a row per field: name, value, what became of it, and why."""

    config: dict[str, Any]
    notes: list[tuple[str, Any, str, str]] = field(default_factory=list)

    def note(self, name: str, value: Any, became: str, why: str = "") -> None:
        self.notes.append((name, value, became, why))


def read(path: Path | str) -> dict[str, Any]:
    """A draft config: a JSON file, the ``config.json`` of a directory, or that of a hub id."""
    given, path = str(path), Path(path).expanduser()
    if not path.exists() and not given.startswith((".", "/", "~")) and path.suffix != ".json":
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(given, "config.json"))
        except Exception as error:  # the hub raises a dozen unrelated types
            why = " ".join(str(error).split())[:200]
            raise Refused(f"draft config {given}: no such file or directory, and not on the hub ({why})") from error
    return json_object(path / "config.json" if path.is_dir() else path, "the JSON of a draft config")


def is_legacy(config: dict[str, Any]) -> bool:
    """Whether it is a whole EAGLE-3 draft config of the legacy form (not a bare decoder config)."""
    return "speculators_model_type" not in config and (
        "eagle_config" in config or LEGACY in (config.get("architectures") or [])
    )


def layer_ids(config: dict[str, Any], convention: str = "vllm") -> list[int] | None:
    """The auxiliary layers of either form, as inputs of layers; None where the config names none.

    A legacy config has them nested in ``eagle_config`` or at the top level; ``Refused`` where the two differ.
    """
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if nested is not None and top is not None and nested != top:
        raise Refused(f"draft config: layer ids {top} at the top level, {nested} in eagle_config; wanted one of them")
    found = top if nested is None else nested
    if found is not None and not (isinstance(found, list) and all(type(k) is int for k in found)):
        raise Refused(f"draft config: eagle_aux_hidden_state_layer_ids = {found!r}; wanted a list of whole numbers")
    return None if found is None else [k + CONVENTIONS[convention] for k in found]


def to_speculators(
    legacy: dict[str, Any],
    *,
    verifier: str | None,
    verifier_architectures: list[str],
    layers: list[int] | None = None,
    convention: str = "vllm",
) -> Converted:
    """The `Eagle3SpeculatorConfig` (as JSON) of a legacy config. ``layers`` are used where it names none."""
    rest, made = dict(legacy), Converted({})
    missing = [name for name in DECODER_NEEDED if name not in rest]
    if missing:
        raise Refused(f"legacy draft config: no {', '.join(missing)}; wanted {', '.join(DECODER_NEEDED)}")
    eagle = dict(rest.pop("eagle_config", None) or {})
    if eagle.pop("use_aux_hidden_state", True) is not True:
        raise Refused("legacy draft config: use_aux_hidden_state = false; wanted true, speculators knows no other")
    if "use_aux_hidden_state" in (legacy.get("eagle_config") or {}):
        made.note("eagle_config.use_aux_hidden_state", True, "implied", "always so in speculators")

    found = layer_ids(legacy, convention)
    rest.pop("eagle_aux_hidden_state_layer_ids", None), eagle.pop("eagle_aux_hidden_state_layer_ids", None)
    shift = CONVENTIONS[convention]
    if found is not None:
        why = "outputs of layers there: one more" if shift else "inputs of layers in both"
        made.note("eagle_aux_hidden_state_layer_ids", [k - shift for k in found], f"same name: {found}", why)
    else:
        made.note("eagle_aux_hidden_state_layer_ids", None, f"defaulted: {layers}", "the config names no layers")
    count, ids = rest.pop("num_aux_hidden_states", None), found if found is not None else layers
    if count is not None:
        if ids is not None and count != len(ids):
            raise Refused(f"legacy draft config: num_aux_hidden_states = {count}, layer ids {ids}; wanted as many")
        made.note("num_aux_hidden_states", count, "implied", "the number of layer ids")

    kept = dict(rest.pop("eagle3nb", None) or {})
    config: dict[str, Any] = {
        "architectures": kept.pop("architectures", None) or ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": ids,
    }
    made.note("architectures", rest.pop("architectures", None), f"{config['architectures']}", "speculators' own class")
    for name, (default, why) in SHARED.items():
        source = eagle if name in eagle else rest
        if name in source:
            config[name] = source.pop(name)
            made.note(name, config[name], "same name")
        else:
            config[name] = kept.pop(name, default)
            made.note(name, None, f"defaulted: {config[name]}", why)
    vocabulary = rest.pop("draft_vocab_size", None)
    config["draft_vocab_size"] = rest["vocab_size"] if vocabulary is None else vocabulary
    why = "" if vocabulary is not None else "absent: the verifier's whole vocabulary, as vLLM reads it"
    made.note("draft_vocab_size", vocabulary, f"same name: {config['draft_vocab_size']}", why)
    target = rest.pop("target_vocab_size", None)
    if target is not None:
        if target != rest["vocab_size"]:
            raise Refused(f"draft config: target_vocab_size {target}, vocab_size {rest['vocab_size']}; wanted one")
        made.note("target_vocab_size", target, "transformer_layer_config.vocab_size", "the same number")

    dtype = rest.pop("torch_dtype", None) or rest.pop("dtype", None)
    config["dtype"] = dtype or "bfloat16"
    made.note("torch_dtype", dtype, f"dtype: {config['dtype']}", "" if dtype else "how drafts are served")
    decoder = _decoder(rest, made)
    for name in [n for n in BOOKKEEPING if n in rest]:
        made.note(name, rest.pop(name), "not representable", "says who wrote the file, not what the draft is")
    for name, value in rest.items():
        decoder[name] = value
        made.note(name, value, f"transformer_layer_config.{name}")
    for name, value in eagle.items():
        made.note(f"eagle_config.{name}", value, "not representable", "unknown to speculators")
    config["tie_word_embeddings"] = False
    config["transformer_layer_config"] = decoder
    config["speculators_config"] = kept.pop("speculators_config", None) or {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": verifier_architectures, "name_or_path": verifier},
    }
    if verifier is not None:
        config["speculators_config"]["verifier"]["name_or_path"] = verifier
    made.note("speculators_config", None, "from the verifier", "a legacy config does not name its verifier")
    config |= kept
    made.config = config
    return made


def _decoder(rest: dict[str, Any], made: Converted) -> dict[str, Any]:
    """The decoder fields of a legacy config as a LlamaConfig's; takes them out of ``rest``."""
    decoder: dict[str, Any] = {"model_type": "llama"}
    model_type = rest.pop("model_type", None)
    why = "" if model_type == "llama" else "the class is Llama's; some files carry the verifier's type"
    made.note("model_type", model_type, "transformer_layer_config.model_type: llama", why)
    theta, scaling = rest.pop("rope_theta", None), rest.pop("rope_scaling", None)
    if "rope_parameters" not in rest:
        rope = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
        if scaling:
            rope |= {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
        decoder["rope_parameters"] = rope
        why = "" if theta is not None else "LlamaConfig's default"
        made.note("rope_theta", theta, "transformer_layer_config.rope_parameters.rope_theta", why)
        made.note("rope_scaling", scaling, "transformer_layer_config.rope_parameters", "null: no scaling")
    for name, default in DECODER_DEFAULTS.items():
        if name not in rest:
            decoder[name] = default
            made.note(name, None, f"defaulted: {default}", "LlamaConfig's default")
    return decoder


def to_legacy(config: dict[str, Any], *, convention: str = "vllm") -> Converted:
    """The legacy form (as JSON) of a speculators config, with layer ids of the ``convention`` of who will read it."""
    if config.get("speculators_model_type") != "eagle3":
        found = config.get("speculators_model_type")
        raise Refused(f"draft config: speculators_model_type = {found!r}; wanted 'eagle3'")
    rest, made = dict(config), Converted({"architectures": [LEGACY]})
    decoder = dict(rest.pop("transformer_layer_config"))
    if decoder.get("model_type", "llama") != "llama":
        raise Refused(f"draft config: a {decoder['model_type']} decoder; {LEGACY} can only be a llama one")
    kept: dict[str, Any] = {"architectures": rest.pop("architectures", None)}
    made.note("architectures", kept["architectures"], f"{[LEGACY]}", "kept under eagle3nb")
    rest.pop("speculators_model_type")
    made.note("speculators_model_type", "eagle3", f"{[LEGACY]}")

    rope = dict(decoder.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    made.config["rope_theta"] = rope.pop("rope_theta", 10000.0)
    made.config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    made.note("transformer_layer_config.rope_parameters", None, "rope_theta, rope_scaling")
    dtype = rest.pop("dtype", None)
    made.config["torch_dtype"] = decoder.pop("dtype", None) or dtype or "bfloat16"
    made.note("dtype", dtype, "torch_dtype")
    for name, value in decoder.items():
        made.config[name] = value
        made.note(f"transformer_layer_config.{name}", value, name)
    for name in ("draft_vocab_size", *SHARED):
        if name in rest:
            made.config[name] = rest.pop(name)
            known = convention == "vllm" or name not in SGLANG_FIXED or made.config[name] == SGLANG_FIXED[name]
            became = "same name" if known else "not representable"
            made.note(name, made.config[name], became, "" if known else "SGLang's class for such drafts ignores it")
    rest.pop("tie_word_embeddings", None)
    made.note("tie_word_embeddings", False, "same name")

    ids, shift = layer_ids(config), CONVENTIONS[convention]
    rest.pop("eagle_aux_hidden_state_layer_ids", None)
    made.config["eagle_config"] = {"use_aux_hidden_state": True}
    if ids is not None:
        if min(ids) < shift:
            raise Refused(f"draft config: layer ids {ids}; {convention} counts outputs of layers, and 0 is none's")
        made.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [k - shift for k in ids]
        why = f"SGLang counts outputs of layers: {ids} there are {[k - 1 for k in ids]}" if shift else "inputs in both"
        made.note("eagle_aux_hidden_state_layer_ids", ids, "eagle_config", why)
    if convention == "sglang" and "sliding_attention" in (decoder.get("layer_types") or []):
        made.note("sliding_window", decoder.get("sliding_window"), "not representable", "SGLang attends to everything")
    for name, value in rest.items():
        kept[name] = value
        made.note(name, value, "kept under eagle3nb", "no place in the legacy form; loaders ignore it")
    made.config["eagle3nb"] = kept
    return made


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Either form as one flat table, so that two can be shown side by side field by field."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("transformer_layer_config", "eagle_config") and isinstance(value, dict):
            flat |= value
        elif name not in ("speculators_config", "eagle3nb", *BOOKKEEPING):
            flat[name] = value
    return flat
