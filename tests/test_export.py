"""Draft checkpoints in other namings: the same tensors, no path of this machine, layer ids of who reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3nb import draft, export, stage
from eagle3nb.cli import main
from eagle3nb.errors import Refused

CONFIG = {
    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
    "draft_vocab_size": 8, "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "dtype": "bfloat16",
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "target_hidden_size": None, "embed_requires_grad": False, "tie_word_embeddings": False,
    "transformer_layer_config": {
        "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "hidden_act": "silu", "mlp_bias": False,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "use_cache": True, "pretraining_tp": 1, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    },
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "/models/some/Verifier-8B"},
    },
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "speculators"
    folder.mkdir()
    names = ("fc.weight", "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", "norm.weight", "lm_head.weight")
    tensors = {name: torch.randn(3, 4, dtype=torch.bfloat16) for name in names}
    tensors |= {"d2t": torch.arange(8), "t2d": torch.arange(16) % 2 == 0}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_to_sglang_and_back_is_equal(checkpoint, tmp_path):
    there = export.run(checkpoint, "sglang", tmp_path / "sglang", say=lambda _: None)
    tensors, config = load_file(there / "model.safetensors"), draft.config(there)
    assert {"midlayer.mlp.up_proj.weight", "additional_layers.0.mlp.up_proj.weight"} <= tensors.keys()
    assert not [name for name in tensors if name.startswith("layers.")]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    back = export.run(there, "vllm", tmp_path / "back", say=lambda _: None)
    assert same(load_file(back / "model.safetensors"), draft.tensors(checkpoint))
    wanted = json.loads(json.dumps(CONFIG))
    wanted["speculators_config"]["verifier"]["name_or_path"] = "Verifier-8B"
    assert draft.config(back) == wanted


def test_no_path_stays_and_the_layers_are_stated(checkpoint, tmp_path, capsys):
    arguments = ["export", str(checkpoint), "--to", "sglang", str(tmp_path / "x"), "--verifier", "somebody/Verifier-8B"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "inputs of layers [2, 4, 6]; written as outputs of layers: [1, 3, 5]" in out
    text = (tmp_path / "x" / "config.json").read_text()
    assert "/models" not in text
    assert "somebody/Verifier-8B" in text
    assert main(arguments) == 2
    assert "is there already; give a new directory" in capsys.readouterr().err


def test_what_sglang_would_compute_otherwise_is_refused(checkpoint, tmp_path):
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"norm_before_fc": True}))
    with pytest.raises(Refused, match="SGLang would compute otherwise: norm_before_fc = True") as caught:
        export.run(checkpoint, "sglang", tmp_path / "x")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()
    export.run(checkpoint, "sglang", tmp_path / "x", anyway=True, say=lambda _: None)
    assert draft.config(tmp_path / "x")["norm_before_fc"] is True
    export.run(checkpoint, "vllm", tmp_path / "y", say=lambda _: None)  # vLLM knows it


def test_inputs_that_cannot_be_exported(checkpoint, tmp_path):
    with pytest.raises(Refused, match="--to onnx: unknown; known: vllm, sglang"):
        export.run(checkpoint, "onnx", tmp_path / "x")
    with pytest.raises(Refused, match=r"wanted config.json and model.safetensors"):
        export.run(tmp_path, "vllm", tmp_path / "x")
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    with pytest.raises(Refused, match="sglang counts outputs of layers, and 0 is none's"):
        export.run(checkpoint, "sglang", tmp_path / "x")


@pytest.mark.engine
def test_a_runs_draft_without_its_machine(finished_run, tmp_path):
    export.run(finished_run, "vllm", tmp_path / "x", say=lambda _: None)
    config = draft.config(tmp_path / "x")
    verifier = stage.verifier(finished_run)
    assert config["speculators_config"]["verifier"]["name_or_path"] == verifier.path.name
    assert str(verifier.path) not in (tmp_path / "x" / "config.json").read_text()
    assert same(draft.tensors(tmp_path / "x"), draft.tensors(draft.of_run(finished_run)))
