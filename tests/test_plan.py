"""The plan, against sizes counted by transformers and by hand; and every params file of the project."""

import json
import re
import shutil
from collections import namedtuple

import pytest
import torch
from conftest import ROOT

from eagle3nb import draft_config, extract_hidden_states, params, plan, tiny
from eagle3nb import verifier as verifiers
from eagle3nb.cli import main
from eagle3nb.errors import Refused

KIMI = ROOT / "params" / "kimi-k2.5.yaml"
RATES = {"decode": 100, "prefill": 1000, "single": 10, "train": 50}
# Qwen3-8B's shape, from its model card.
QWEN = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _from_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ["llama", "kimi-k2.5"])
def test_parameters_are_those_of_the_model(tmp_path, name):
    from transformers import AutoModelForCausalLM

    path = {"llama": tiny.llama, "kimi-k2.5": tiny.kimi}[name](tmp_path / "v")
    found = verifiers.resolve(str(path))
    model = AutoModelForCausalLM.from_config(found.config)
    whole = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert plan.verifier_size(found).total == whole - norms
    assert plan.verifier_size(found).bytes == (path / "model.safetensors").stat().st_size


def test_draft_parameters_are_those_of_the_draft():
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    found = verifiers.Verifier("x", ROOT / "params" / "kimi-k2.5.config.json")
    legacy = json.loads((ROOT / "params" / "kimi-k2.5.draft_config.json").read_text())
    made = draft_config.to_speculators(legacy, verifier=None, verifier_architectures=[]).config
    config = Eagle3SpeculatorConfig.from_dict(made)
    config.transformer_layer_config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Eagle3DraftModel(config)
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "verifier" not in name}
    whole, trained = plan.draft_parameters(found, params.load(KIMI))
    assert whole == sum(sizes.values())
    assert trained == whole - sizes["embed_tokens.weight"]


def test_kimi_is_planned_without_its_weights():
    planned = plan.make(params.load(KIMI, ["prepare_data.max_samples=1000"]), ROOT)
    assert planned["verifier_parameters"] == pytest.approx(1.03e12, rel=0.01)
    assert planned["verifier_active_parameters"] == pytest.approx(32e9, rel=0.03)
    assert planned["verifier_gb"] == pytest.approx(595, rel=0.01)  # as published
    assert planned["bytes_per_token"] == 4 * 7168 * 2
    assert planned["gpus"] == 8
    assert planned["tokens"] == 1000 * (64 + 1024)
    assert planned["store_gb"] == pytest.approx(62.4, rel=0.01)


def test_throughputs_can_be_set_and_say_where_they_are_from():
    rates = [f"preflight.throughput.{name}={value}" for name, value in RATES.items()]
    chosen = params.load(KIMI, ["prepare_data.max_samples=10", *rates])
    planned = plan.make(chosen, ROOT)
    assert planned["throughput"] == [
        {"name": name, "tokens_per_s": value, "origin": "preflight.throughput"} for name, value in RATES.items()
    ]
    assert planned["seconds"]["train"] == round(10 * (64 + 1024) * 4 / 50)
    start = plan.ENGINE_START_SECONDS["cuda"] + planned["verifier_gb"] * 1e9 / plan.LOAD_BYTES_PER_SECOND
    assert planned["seconds"]["extract_hidden_states"] == pytest.approx(start + 10 * 1024 / 100 + 10 * 64 / 1000, abs=1)
    sharded = plan.make(params.load(KIMI, [*rates, "extract_hidden_states.num_shards=4"]), ROOT)
    assert (
        sharded["seconds"]["extract_hidden_states"]
        < plan.make(params.load(KIMI, rates), ROOT)["seconds"]["extract_hidden_states"] / 3.9
    )
    with pytest.raises(Refused, match=r"preflight.throughput.decod: unknown; nearest: decode"):
        plan.make(params.load(KIMI, ["preflight.throughput.decod=1"]), ROOT)


def test_the_command_prints_it_and_checks_the_disk(capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, 10**11))
    assert main(["plan", str(KIMI), "-p", "prepare_data.max_samples=10"]) == 0
    out = capsys.readouterr().out
    for word in ("extract_hidden_states", "594.2 GB", "8 GPUs", "prefill", "stated, not measured", "100.0 GB free"):
        assert word in out
    assert main(["plan", str(KIMI)]) == 2
    captured = capsys.readouterr()
    assert "together" in captured.out
    assert "the run needs about 3,757.7 GB and 50 GB in reserve" in captured.err


def test_a_verifier_that_is_not_here(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Refused, match=r"name its config.json as preflight.config"):
        plan.make(params.load(ROOT / "params" / "qwen3-8b.yaml", ["preflight.verifier=nobody/nothing"]), ROOT)
    with pytest.raises(Refused, match=r"preflight.config: no such file or directory ./x.json"):
        plan.make(params.load(KIMI, ["preflight.config=./x.json"]), ROOT)


def test_qwen3_8b(tmp_path):
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    chosen = params.load(ROOT / "params" / "qwen3-8b.yaml", [f"preflight.config={tmp_path / 'qwen.json'}"])
    found = plan.verifier_of(chosen)
    assert extract_hidden_states.layer_ids(chosen.extract_hidden_states, found) == [2, 18, 33, 36]
    assert found.default_layer_ids == [2, 18, 33]
    assert plan.make(chosen, ROOT)["verifier_parameters"] == pytest.approx(8.19e9, rel=0.01)


def test_kimis_layers_and_its_draft_config_agree():
    chosen = params.load(KIMI)
    found = plan.verifier_of(chosen)
    assert extract_hidden_states.layer_ids(chosen.extract_hidden_states, found) == [2, 30, 58, 61]
    assert found.default_layer_ids == [2, 30, 58]
    given = draft_config.read(chosen.train.draft_config)
    assert draft_config.layer_ids(given) == chosen.extract_hidden_states.layer_ids
    assert given["draft_vocab_size"] == chosen.build_vocab_mapping.draft_vocab_size
    assert given["vocab_size"] == found.vocab_size


def test_arguments_in_params_files_are_known_to_vllm_and_speculators():
    from speculators.train.config.schema import CONFIG_DESTS
    from vllm import EngineArgs

    for file in (ROOT / "params").glob("*.yaml"):
        chosen = params.load(file)
        for arguments in (chosen.extract_hidden_states.engine_args, chosen.evaluate.engine_args):
            assert set(arguments) <= set(EngineArgs.__dataclass_fields__)
        assert set(chosen.train.trainer_args) <= set(CONFIG_DESTS)


COMMAND = re.compile(r"eagle3nb (?:run|plan) +(params/\S+)((?: +-p \S+)*)")


@pytest.mark.parametrize(
    "file", sorted([*(ROOT / "params").glob("*.yaml"), *(ROOT / "docs").glob("*.md")]), ids=lambda f: f.name
)
def test_every_command_that_is_shown_is_valid(file):
    for path, overrides in COMMAND.findall(file.read_text()):
        params.load(ROOT / path, overrides.replace("-p ", "").split())
