"""The whole chain on a checkpoint of Kimi-K2.5's shape: nested config, latent attention, experts, a legacy draft."""

import pytest
import torch
from conftest import ROOT
from test_extract_hidden_states import layer_states, store_of

from eagle3nb import draft, draft_config, export, run, stage, train
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_json
from eagle3nb.params import STAGES, Train, load

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def kimi_run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        folder = tmp_path_factory.mktemp("kimi")
        overrides = [f"preflight.cache_dir={folder / 'cache'}"]
        yield run.run("params/tiny-kimi.yaml", run_dir=str(folder / "run"), overrides=overrides)


def test_all_stages_are_done_and_the_output_is_the_same(kimi_run):
    assert read_json(kimi_run / "run.json")["status"] == "done"
    result = stage.result(kimi_run, "evaluate")
    assert result["lossless"]
    assert result["acceptance_by_position"][0] > 0.05


def test_no_check_fails_and_the_semantic_ones_pass(kimi_run):
    entries = [entry for name in STAGES for entry in read_json(stage.folder(kimi_run, name) / "checks.json", [])]
    assert {entry["id"] for entry in entries if entry["verdict"] == "fail"} <= {"draft.rope_scaling"}  # allowed
    passed = {entry["id"] for entry in entries if entry["verdict"] == "pass"}
    assert {"samples.target_agreement", "samples.layers", "samples.shift", "samples.last_state"} <= passed


def test_every_column_is_the_layer_it_is_called(kimi_run):
    from transformers import AutoModelForImageTextToText

    store, verifier = store_of(kimi_run), stage.verifier(kimi_run)
    model = AutoModelForImageTextToText.from_pretrained(verifier.path, dtype=torch.float32).eval()
    assert store.info["layer_ids"] == [1, 3, 5, 6]
    wanted = layer_states(model, model.model.language_model, store.token_ids(0))
    found = store.hidden_states(0).float()
    for column, layer in enumerate(store.info["layer_ids"]):
        distance = (wanted - found[:, column, None]).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        assert int(distance.argmin()) == layer
        assert distance[layer] < 0.02


def test_the_draft_is_what_the_legacy_config_says(kimi_run):
    given = draft_config.read(ROOT / "params" / "tiny-kimi.draft_config.json")
    config = draft.config(draft.of_run(kimi_run))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert {key: config[key] for key in draft_config.SGLANG_FIXED} == draft_config.SGLANG_FIXED
    trained = draft_config.flattened(config)
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "head_dim",
        "vocab_size",
        "draft_vocab_size",
    ):
        assert trained[key] == given[key]
    assert trained["rope_parameters"]["rope_theta"] == given["rope_theta"]


def test_such_a_draft_can_be_exported_for_sglang(kimi_run, tmp_path):
    there = export.run(kimi_run, "sglang", tmp_path / "sglang", say=lambda _: None)
    assert draft.config(there)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert "tiny:kimi-k2.5" in (there / "config.json").read_text()
    assert str(kimi_run.parent) not in (there / "config.json").read_text()
    back = export.run(there, "vllm", tmp_path / "vllm", say=lambda _: None)
    mine, again = draft.tensors(draft.of_run(kimi_run)), draft.tensors(back)
    assert mine.keys() == again.keys()
    assert all(torch.equal(mine[key], again[key]) for key in mine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
            r"names layers \[0, 2, 4\] .*the store holds",
        ),
        ({"draft_vocab_size": 256}, "draft_vocab_size 256, the mapping 512"),
    ],
)
def test_a_draft_config_that_does_not_fit_the_run(kimi_run, tmp_path, changes, message):
    given = draft_config.read(ROOT / "params" / "tiny-kimi.draft_config.json") | changes
    write_json(tmp_path / "d.json", given)
    done, fields = stage.result(kimi_run, "train"), load(ROOT / "params" / "tiny-kimi.yaml").train.model_dump()
    settings = Train(**fields | {"run_dir": str(kimi_run), "draft_config": str(tmp_path / "d.json")})
    try:
        with pytest.raises(Refused, match=message) as caught:
            train.run(settings)
    finally:
        write_json(stage.folder(kimi_run, "train") / "result.json", done)
    assert "\n" not in str(caught.value)
