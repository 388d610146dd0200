"""Legacy and speculators' draft configs: every field is accounted for, both ways."""

import json

import pytest
from conftest import ROOT
from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eagle3nb import draft_config
from eagle3nb.errors import Refused

KIMI = json.loads((ROOT / "params" / "kimi-k2.5.draft_config.json").read_text())


def to_speculators(legacy, **more):
    return draft_config.to_speculators(
        legacy, verifier="moonshotai/Kimi-K2.5", verifier_architectures=["KimiK25ForConditionalGeneration"], **more
    )


def test_the_reference_draft_of_kimi():
    made = to_speculators(KIMI)
    config = Eagle3SpeculatorConfig.from_dict(made.config)
    layer = config.transformer_layer_config
    assert type(layer).__name__ == "LlamaConfig"
    assert (layer.hidden_size, layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (
        7168, 64, 64, 128,
    )  # fmt: skip
    assert (layer.intermediate_size, layer.rms_norm_eps, layer.vocab_size) == (18432, 1e-6, 163840)
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (layer.bos_token_id, layer.eos_token_id, layer.max_position_embeddings) == (163584, 163585, 131072)
    assert config.draft_vocab_size == 32000
    assert config.eagle_aux_hidden_state_layer_ids == [2, 30, 58]
    assert {getattr(config, name) for name in draft_config.SGLANG_FIXED} == {False}


def test_no_field_is_dropped_without_a_word():
    legacy = KIMI | {
        "transformers_version": "4.51",
        "something_new": 7,
        "eagle_config": KIMI["eagle_config"] | {"x": 1},
    }
    made = to_speculators(legacy)
    named = {name.removeprefix("eagle_config.") for name, *_ in made.notes}
    assert {*legacy, *legacy["eagle_config"]} - {"eagle_config"} <= named
    assert made.config["transformer_layer_config"]["something_new"] == 7
    back = draft_config.to_legacy(made.config)
    named = {name.removeprefix("transformer_layer_config.") for name, *_ in back.notes}
    assert {*made.config, *made.config["transformer_layer_config"]} - {"transformer_layer_config"} <= named
    defaulted = [note for note in made.notes if note[2].startswith("defaulted")]
    assert defaulted
    assert all(why for *_, why in defaulted)


def test_there_and_back_is_the_same():
    back = draft_config.to_legacy(to_speculators(KIMI).config).config
    assert {key: back[key] for key in KIMI} == KIMI
    config = to_speculators(KIMI).config | {"norm_output": True, "speculators_version": "0.9.0"}
    assert to_speculators(draft_config.to_legacy(config).config).config == config
    outputs = draft_config.to_legacy(config, convention="sglang").config
    assert outputs["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert to_speculators(outputs, convention="sglang").config == config


def test_what_sglang_ignores_is_listed():
    config = to_speculators(KIMI).config | {"norm_before_fc": True}
    notes = draft_config.to_legacy(config, convention="sglang").notes
    assert [name for name, _, became, _ in notes if became == "not representable"] == ["norm_before_fc"]
    assert not [n for n in draft_config.to_legacy(config).notes if n[2] == "not representable"]  # vLLM reads it


def test_published_variants():
    """Other model types, no layer ids, no draft vocabulary, yarn."""
    legacy = {k: v for k, v in KIMI.items() if k not in ("eagle_config", "draft_vocab_size")} | {
        "model_type": "kimi_k2", "intermediate_size": 12288, "rope_scaling": {"type": "yarn", "factor": 32.0},
    }  # fmt: skip
    assert draft_config.is_legacy(legacy)
    config = to_speculators(legacy, layers=[2, 30, 58]).config
    assert config["draft_vocab_size"] == 163840
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0,
    }  # fmt: skip
    Eagle3SpeculatorConfig.from_dict(config)
    top = {k: v for k, v in KIMI.items() if k != "eagle_config"} | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert draft_config.layer_ids(top) == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"\[1, 2, 3\] at the top level, \[2, 30, 58\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2,30"}}, "wanted a list of whole numbers"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states = 4"),
        ({"target_vocab_size": 5}, "target_vocab_size 5, vocab_size 163840"),
    ],
)
def test_configs_that_cannot_be(changes, message):
    legacy = {k: v for k, v in (KIMI | changes).items() if v is not None}
    with pytest.raises(Refused, match=message) as caught:
        to_speculators(legacy)
    assert "\n" not in str(caught.value)


def test_other_decoders_and_other_files(tmp_path):
    config = to_speculators(KIMI).config
    with pytest.raises(Refused, match="a qwen3 decoder"):
        draft_config.to_legacy(config | {"transformer_layer_config": {"model_type": "qwen3"}})
    with pytest.raises(Refused, match="speculators_model_type = None"):
        draft_config.to_legacy(KIMI)
    (tmp_path / "d.json").write_text("{")
    with pytest.raises(Refused, match=r"d\.json: wanted the JSON of a draft config"):
        draft_config.read(tmp_path / "d.json")
