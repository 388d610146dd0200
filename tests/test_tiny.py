"""The tiny checkpoints: what a published one of that shape has, and that transformers loads them whole."""

import json

import pytest
import torch
from safetensors import safe_open

from eagle3nb import tiny
from eagle3nb import verifier as verifiers
from eagle3nb.cli import main
from eagle3nb.errors import Refused


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return tiny.kimi(tmp_path_factory.mktemp("tiny") / "kimi")


def test_kimis_names_and_config_are_the_published_ones(kimi):
    with safe_open(kimi / "model.safetensors", "pt") as handle:
        names = set(handle.keys())
    layer = "language_model.model.layers"
    assert {
        "language_model.lm_head.weight", "language_model.model.embed_tokens.weight", "language_model.model.norm.weight",
        f"{layer}.0.mlp.gate_proj.weight", f"{layer}.1.mlp.experts.7.down_proj.weight", f"{layer}.1.mlp.gate.weight",
        f"{layer}.1.mlp.gate.e_score_correction_bias", f"{layer}.5.mlp.shared_experts.up_proj.weight",
        f"{layer}.5.self_attn.kv_a_proj_with_mqa.weight", f"{layer}.5.self_attn.q_b_proj.weight",
        "mm_projector.proj.0.weight", "vision_tower.encoder.blocks.0.wqkv.weight",
        "vision_tower.patch_embed.pos_emb.weight",
    } <= names  # fmt: skip
    config = json.loads((kimi / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert (config["model_type"], config["text_config"]["model_type"]) == ("kimi_k25", "kimi_k2")
    assert "hidden_size" not in config


def test_transformers_finds_every_tensor_in_its_place(kimi):
    from transformers import AutoModelForImageTextToText

    _, loaded = AutoModelForImageTextToText.from_pretrained(kimi, output_loading_info=True)
    assert not any(loaded.values())


def test_kimi_as_a_verifier(kimi):
    found = verifiers.resolve(str(kimi))
    assert (found.text_section, found.hidden_size, found.num_layers, found.vocab_size) == ("text_config", 256, 6, 1024)
    assert found.uses_mla
    assert found.tokenizer.convert_ids_to_tokens(found.eos_token_ids) == ["<|im_end|>", "[EOS]"]
    chat = [{"role": "user", "content": "Hello"}]
    text = found.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_user|>user<|im_middle|>Hello<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert not torch.equal(found.weight("lm_head"), found.weight("embed_tokens"))
    rows = {what: (where, value) for what, where, value in found.found()}
    assert rows["hidden size"] == ("config.json: text_config.hidden_size", 256)
    assert rows["norm"] == ("model.safetensors: language_model.model.norm.weight", [256])
    assert rows["padding"][1] == 0
    assert rows["code of its own"][1] == "not run"


def test_the_command_and_what_it_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tiny.MAKERS, "llama", lambda folder, steps: tiny.llama(folder, steps=0))
    assert main(["tiny", "llama", str(tmp_path / "a")]) == 0
    assert verifiers.resolve(str(tmp_path / "a")).num_layers == 6
    assert main(["tiny", "llama", str(tmp_path / "a")]) == 2
    assert main(["tiny", "gemma", str(tmp_path / "b")]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in errors if line.startswith("eagle3nb")]
    assert "is not empty or a file; give a new directory" in errors[0]
    assert "tiny:gemma: unknown; known: llama, kimi-k2.5" in errors[1]
    with pytest.raises(Refused, match=r"known: tiny:llama, tiny:kimi-k2\.5"):
        verifiers.resolve("tiny:x")


def test_made_once_into_the_cache(tmp_path, monkeypatch):
    made = []
    monkeypatch.setitem(
        tiny.MAKERS, "llama", lambda folder, steps=0: made.append(folder) or tiny.llama(folder, num_hidden_layers=3)
    )
    first = verifiers.resolve("tiny:llama", cache_dir=str(tmp_path))
    assert verifiers.resolve("tiny:llama", cache_dir=str(tmp_path)).path == first.path
    assert len(made) == 1
