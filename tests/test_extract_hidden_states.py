"""Extraction with real vLLM on the tiny verifier: what is captured, and what survives a kill and a full disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3nb import child, extract_hidden_states, stage, verifier
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, read_jsonl, sha256_file, write_json
from eagle3nb.params import ExtractHiddenStates, Params
from eagle3nb.samples import Store


def store_of(run_dir) -> Store:
    return Store(stage.folder(run_dir, "extract_hidden_states") / "store")


def reference(path: Path, ids: list[int]) -> torch.Tensor:
    """All layer inputs and the state before the final norm, [seq, layers + 1, hidden], by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return layer_states(model, model.model, ids)


def layer_states(model: torch.nn.Module, text: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The states of ``model`` at the layers of its text part, as `reference` gives them."""
    seen: dict[int, torch.Tensor] = {}
    for k, layer in enumerate(text.layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, k=k: seen.__setitem__(k, (args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
    text.norm.register_forward_pre_hook(lambda _, args: seen.__setitem__(len(text.layers), args[0][0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack([seen[k] for k in sorted(seen)], dim=1)


@pytest.mark.engine
def test_every_column_is_the_layer_it_is_called(finished_run):
    store = store_of(finished_run)
    path = stage.verifier(finished_run).path
    for i in (0, len(store) - 1):
        wanted = reference(path, store.token_ids(i))
        found = store.hidden_states(i).float()
        assert found.shape[0] == len(store.token_ids(i))
        for column, layer in enumerate(store.info["layer_ids"]):
            distance = (wanted - found[:, column, None]).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
            assert int(distance.argmin()) == layer
            assert distance[layer] < 0.01


@pytest.mark.engine
def test_rows_and_masks_of_the_store(finished_run):
    from datasets import load_from_disk

    store, rows = store_of(finished_run), load_from_disk(str(stage.folder(finished_run, "prepare_data") / "rows"))
    ends = set(stage.verifier(finished_run).eos_token_ids)
    data = store.dataset()
    assert len(data) == len(rows) == len(store)
    for row, sample in zip(rows, data, strict=True):
        ids, mask = sample["input_ids"].tolist(), sample["loss_mask"].tolist()
        assert ids[: row["prompt_tokens"]] == row["input_ids"]
        assert mask == [0] * row["prompt_tokens"] + [1] * (len(ids) - row["prompt_tokens"])
        response = ids[row["prompt_tokens"] :]
        assert 1 <= len(response) <= row["max_new_tokens"]
        assert not ends & set(response[:-1])  # nothing after the end of turn
        assert response[-1] in ends or len(response) == row["max_new_tokens"]


@pytest.fixture
def settings(prepared_run):
    return ExtractHiddenStates(run_dir=str(prepared_run), layer_ids=[1, 3, 4], max_num_seqs=1, dtype="float32")


def start_child(settings: ExtractHiddenStates) -> subprocess.Popen:
    """The stage in a process of its own group, as a user would have it in a terminal."""
    code = (
        "import sys; from eagle3nb import extract_hidden_states as s, params as p; "
        "s.run(p.ExtractHiddenStates.model_validate_json(sys.argv[1]))"
    )
    return subprocess.Popen([sys.executable, "-c", code, settings.model_dump_json()], start_new_session=True)


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


@pytest.mark.engine
@pytest.mark.slow
def test_killed_in_the_middle_then_resumed(settings):
    store, folder = store_of(settings.run_dir), stage.folder(settings.run_dir, "extract_hidden_states")
    parent = start_child(settings)
    try:
        wait_for(lambda: len(list(store.hidden_states_dir.glob("hs_*.safetensors"))) >= 3)
        engine = read_json(folder / "child.json")["pid"]
        os.kill(engine, signal.SIGKILL)
        assert parent.wait(60) == 1
    finally:
        parent.kill()
    assert read_json(folder / "child.json")["signal"] == "SIGKILL"
    assert not (folder / "result.json").exists()
    before = {i: sha256_file(store.sample_path(i)) for i in store.written()}
    assert 3 <= len(before) < 16
    with pytest.raises(Refused, match="not finished"):
        _ = store.info

    result = extract_hidden_states.run(settings)
    assert result["resumed"] == len(before)
    assert len(store) == result["store_samples"] == 16
    assert {i: sha256_file(store.sample_path(i)) for i in before} == before  # nothing done twice
    lines = read_jsonl(store.folder / "samples.jsonl")
    assert [line["i"] for line in lines] == list(range(16))
    assert all(line["sha256"] == sha256_file(store.sample_path(line["i"])) for line in lines)

    again = extract_hidden_states.run(settings)  # nothing left to do: no engine is started
    assert again["resumed"] == 16
    assert again["store_fingerprint"] == result["store_fingerprint"]


@pytest.mark.engine
@pytest.mark.slow
def test_full_disk_keeps_what_is_complete(settings, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = stage.folder(settings.run_dir, "extract_hidden_states") / "store"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]).returncode:
        pytest.skip("this system does not allow mounting a tmpfs")
    try:
        with pytest.raises(child.ChildFailed) as caught:
            extract_hidden_states.run(settings)
        assert str(caught.value).startswith("the disk is full")
        assert "\n" not in str(caught.value)
        complete = store_of(settings.run_dir).written()
        assert complete
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        result = extract_hidden_states.run(settings)
        assert result["resumed"] == len(complete)
        assert len(store_of(settings.run_dir)) == 16
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.engine
@pytest.mark.slow
def test_both_ways_of_capture_give_the_same_store(settings):
    forward = extract_hidden_states.run(settings)
    store = store_of(settings.run_dir)
    samples = [(store.token_ids(i), store.hidden_states(i)) for i in range(len(store))]
    store.folder.rename(store.folder.with_name("first"))
    connector = extract_hidden_states.run(settings.model_copy(update={"capture": "connector"}))
    assert (forward["capture"], connector["capture"]) == ("forward", "connector")
    for i, (tokens, states) in enumerate(samples):
        assert store.token_ids(i) == tokens
        assert store.hidden_states(i).shape == states.shape
        assert (store.hidden_states(i).float() - states.float()).norm() / states.float().norm() < 0.01


@pytest.mark.engine
@pytest.mark.slow
def test_given_responses_are_prefilled_shard_by_shard(prepared_run, jsonl):
    from eagle3nb import prepare_data
    from eagle3nb.params import PrepareData

    chats = [
        {"messages": [{"role": "user", "content": f"Count to {k}."}, {"role": "assistant", "content": "one two " * k}]}
        for k in range(3, 9)
    ]
    given = PrepareData(run_dir=str(prepared_run), train=[jsonl(*chats)], responses="given", max_heldout=2)
    prepare_data.run(given)
    half = ExtractHiddenStates(run_dir=str(prepared_run), layer_ids=[1, 3, 4], shard=1, num_shards=2)
    with pytest.raises(Refused, match="shard 1 of 2 is complete, the store is not"):
        extract_hidden_states.run(half)
    assert store_of(prepared_run).written() == {1, 3, 5}
    result = extract_hidden_states.run(half.model_copy(update={"shard": 0}))
    store = store_of(prepared_run)
    assert result["generated_tokens"] == 0
    rows, _ = prepare_data.load(prepared_run)
    for i, row in enumerate(rows):
        assert store.token_ids(i) == row["input_ids"]
        assert store.dataset()[i]["loss_mask"].tolist() == row["loss_mask"]
        assert store.shape(i)[0] == len(row["input_ids"])


@pytest.mark.engine
@pytest.mark.slow
def test_two_shards_at_once_give_the_store_of_one_run(settings):
    extract_hidden_states.run(settings)
    store = store_of(settings.run_dir)
    samples = [(store.token_ids(i), store.hidden_states(i).float()) for i in range(len(store))]
    info, data = store.info, store.dataset()[:]
    store.folder.rename(store.folder.with_name("first"))
    write_json(Path(settings.run_dir) / "params.json", Params(name="x", extract_hidden_states=settings).model_dump())
    command = [sys.executable, "-m", "eagle3nb", "shard", settings.run_dir]
    shards = [subprocess.Popen([*command, f"{k}/2"], stdout=subprocess.PIPE, text=True) for k in (0, 1)]
    try:
        said = [shard.communicate(timeout=300)[0].strip().splitlines()[-1] for shard in shards]
    finally:
        for shard in shards:
            shard.kill()
    assert [shard.returncode for shard in shards] == [0, 0]
    assert any(line.startswith("the store is complete") for line in said)
    result = extract_hidden_states.run(settings)
    assert result["resumed"] == len(samples)  # nothing is left to do
    assert {key: value for key, value in store.info.items() if key != "samples_sha256"} == {
        key: value for key, value in info.items() if key != "samples_sha256"
    }
    again = store.dataset()[:]
    assert all(torch.equal(a, b) for key in data for a, b in zip(data[key], again[key], strict=True))
    for i, (tokens, states) in enumerate(samples):
        assert store.token_ids(i) == tokens
        # Other requests stand beside it in a batch: sums are rounded otherwise, and no more.
        assert (store.hidden_states(i).float() - states).norm() / states.norm() < 0.005


@pytest.mark.parametrize("layers", [[], [3, 1], [1, 1], [-1, 2], [1, 6]])
def test_layer_ids_that_cannot_be(verifier_dir, layers):
    fields = ExtractHiddenStates(layer_ids=layers)
    with pytest.raises(Refused, match="wanted different ids in rising order from 0 to 5"):
        extract_hidden_states.layer_ids(fields, verifier.resolve(str(verifier_dir)))


def test_default_layers_and_the_last_one(verifier_dir):
    fields, found = ExtractHiddenStates(), verifier.resolve(str(verifier_dir))
    object.__setattr__(found, "config", type("Config", (), {"num_hidden_layers": 30})())
    assert extract_hidden_states.layer_ids(fields, found) == [2, 15, 27, 30]


def test_a_shard_that_is_not_there(prepared_run):
    with pytest.raises(Refused, match="wanted below num_shards = 2"):
        extract_hidden_states.run(ExtractHiddenStates(run_dir=str(prepared_run), layer_ids=[1], shard=2, num_shards=2))


def test_engine_arguments_that_vllm_does_not_know(prepared_run):
    wrong = ExtractHiddenStates(run_dir=str(prepared_run), layer_ids=[1, 3], engine_args={"tensor_paralel_size": 2})
    with pytest.raises(
        child.ChildFailed, match=r"engine_args.tensor_paralel_size.*nearest: tensor_parallel_size"
    ) as caught:
        extract_hidden_states.run(wrong)
    assert "\n" not in str(caught.value)
