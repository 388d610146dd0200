"""Training with speculators' trainer: what it leaves, and that a kill loses and repeats nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_extract_hidden_states import wait_for

from eagle3nb import child, draft, stage, train
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, read_jsonl
from eagle3nb.params import Train

# Enough epochs that a stop in the second one comes in time: an epoch takes half a second.
FIELDS = {"epochs": 15, "lr": 2e-3, "tokens_per_step": 256, "seed": 1}


@pytest.fixture
def ready(copy_of_run) -> Path:
    """A run whose store and mapping are there, and nothing of training."""
    shutil.rmtree(stage.folder(copy_of_run, "train"))
    return copy_of_run


def test_a_run_leaves_a_checkpoint_of_the_verifiers_rows(finished_run):
    result = stage.result(finished_run, "train")
    path = draft.of_run(finished_run)
    tensors = load_file(path / "model.safetensors")
    verifier = stage.verifier(finished_run)
    mapping = stage.folder(finished_run, "build_vocab_mapping")
    t2d = torch.load(mapping / "t2d.pt", weights_only=True)
    assert torch.equal(tensors["t2d"].bool(), t2d)
    assert torch.equal(tensors["lm_head.weight"], verifier.weight("lm_head")[t2d])
    assert torch.equal(tensors["embed_tokens.weight"], verifier.weight("embed_tokens"))
    assert all(bool(t.float().isfinite().all()) for t in tensors.values())
    config = draft.config(path)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["draft_vocab_size"] == 512
    steps, validations = train.metrics(finished_run)
    assert [row["step"] for row in steps] == list(range(len(steps)))
    assert [row["epoch"] for row in validations] == [0, 1]
    assert steps[-1]["train"]["loss"] < steps[0]["train"]["loss"]
    best = max(validations, key=lambda row: sum(draft.predicted_acceptance(row["val"])))
    assert result["best_checkpoint"] == f"checkpoints/{best['epoch']}"
    link = stage.folder(finished_run, "train") / "checkpoints" / "checkpoint_best"
    assert link.resolve() == path.resolve()


def start(fields: Train) -> subprocess.Popen:
    code = "import sys; from eagle3nb import train as s, params as p; s.run(p.Train.model_validate_json(sys.argv[1]))"
    return subprocess.Popen([sys.executable, "-c", code, fields.model_dump_json()], start_new_session=True)


def rows(run_dir) -> list[dict]:
    return read_jsonl(stage.folder(run_dir, "train") / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_stopped_in_the_second_epoch_then_resumed(ready, how):
    fields = Train(run_dir=str(ready), **FIELDS)
    folder = stage.folder(ready, "train")
    parent = start(fields)
    try:
        wait_for(lambda: sum("train" in row for row in rows(ready) if row.get("epoch") == 1) >= 2)
        pid = read_json(folder / "child.json")["pid"]
        os.kill(pid, getattr(signal, how))
        assert parent.wait(60) == 1
    finally:
        parent.kill()
    seen = rows(ready)
    interrupted = max(row["step"] for row in seen if "train" in row)
    # What a kill in the middle of a save leaves behind must not be taken for a checkpoint.
    (folder / "checkpoints" / "14").mkdir()
    (folder / "checkpoints" / "14" / "model.safetensors").write_bytes(b"half")

    result = train.run(fields)
    steps = [row["step"] for row in rows(ready) if "train" in row]
    assert steps == list(range(len(steps)))  # nothing lost, nothing twice
    assert [row["epoch"] for row in rows(ready) if "val" in row] == list(range(15))
    assert result["epochs"] == 15
    assert result["steps"] == len(steps) > interrupted
    # Resumed, not begun anew: the steps before the checkpoint are the very same lines.
    kept = 1 + (interrupted if how == "SIGINT" else max(row["step"] for row in seen if row.get("epoch") == 0))
    first = [json.dumps(row) for row in seen if "train" in row][: kept - 1]
    assert [json.dumps(row) for row in rows(ready) if "train" in row][: kept - 1] == first


@pytest.mark.slow
def test_other_inputs_start_anew_and_keep_the_old_checkpoints(copy_of_run):
    before = stage.result(copy_of_run, "train")["checkpoint_sha256"]
    fields = Train(run_dir=str(copy_of_run), epochs=1, lr=1e-3, tokens_per_step=512)
    result = train.run(fields)
    folder = stage.folder(copy_of_run, "train")
    assert (folder / "checkpoints.old-1" / "checkpoint_best").exists()
    assert result["checkpoint_sha256"] != before
    assert {row["epoch"] for row in rows(copy_of_run)} == {0}


@pytest.mark.slow
def test_a_given_decoder_config(ready, tmp_path):
    verifier = stage.verifier(ready)
    given = verifier.config.to_dict() | {"num_hidden_layers": 1, "intermediate_size": 192}
    (tmp_path / "draft_config.json").write_text(json.dumps(given))
    fields = Train(run_dir=str(ready), epochs=1, draft_config=str(tmp_path / "draft_config.json"))
    train.run(fields)
    assert draft.config(draft.of_run(ready))["transformer_layer_config"]["intermediate_size"] == 192


def test_trainer_args_are_checked(ready):
    with pytest.raises(Refused, match=r"train.trainer_args.ttt_step: .*nearest: ttt_steps"):
        train.run(Train(run_dir=str(ready), trainer_args={"ttt_step": 2}))


def test_torchrun_over_nodes(ready):
    assert train.launcher(1, {}) is None
    command = train.launcher(1, {"nnodes": 2, "node_rank": 1, "rdzv_endpoint": "first:29500"})
    assert command[-4:] == ["--nproc-per-node=1", "--nnodes=2", "--node-rank=1", "--rdzv-endpoint=first:29500"]
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args([*command[3:], "script"])
    assert (parsed.nnodes, parsed.node_rank, parsed.rdzv_endpoint) == ("2", 1, "first:29500")
    with pytest.raises(Refused, match=r"train.torchrun.node_rang: no argument of torchrun; nearest: node_rank"):
        train.run(Train(run_dir=str(ready), torchrun={"node_rang": 1}))


def test_what_speculators_refuses_is_one_line(ready, tmp_path):
    path = tmp_path / "decoder.json"
    path.write_text(json.dumps(stage.verifier(ready).config.to_dict()))
    fields = Train(run_dir=str(ready), num_layers=2, draft_config=str(path))
    with pytest.raises(child.ChildFailed, match="speculators refuses the configuration") as caught:
        train.run(fields)
    assert "\n" not in str(caught.value)


def test_no_such_config_and_too_many_gpus(ready):
    with pytest.raises(Refused, match=r"train.draft_config: no such file"):
        train.run(Train(run_dir=str(ready), draft_config="./nothing.json"))
    with pytest.raises(Refused, match=r"train.num_gpus = 4096: this machine has"):
        train.run(Train(run_dir=str(ready), num_gpus=4096))


def test_stages_before_it_are_asked_for(tmp_path):
    with pytest.raises(Refused, match="run the stage preflight first"):
        train.run(Train(run_dir=str(tmp_path)))


def test_prediction_is_the_products_of_the_positions():
    assert draft.predicted_acceptance({"full_acc_0_epoch": 0.5, "full_acc_1_epoch": 0.2, "cond_acc_1_epoch": 0.4}) == [
        0.5,
        0.2,
    ]
