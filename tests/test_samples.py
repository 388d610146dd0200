import pytest
import torch
from safetensors import safe_open

from eagle3nb import files
from eagle3nb.errors import Refused
from eagle3nb.samples import Declaration, Store


def declaration(**changes) -> Declaration:
    fields = {
        "verifier": {"name": "v"}, "layer_ids": [1, 2, 4], "hidden_size": 8, "dtype": "bfloat16",
        "compute_dtype": "float32", "data_sha256": "d", "responses": "generate", "temperature": 0.0, "seed": 0,
    }  # fmt: skip
    return Declaration(**fields | changes)


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / "store")
    store.begin(declaration())
    for i in range(3):
        store.write(i, torch.full((i + 2, 3, 8), float(i)), list(range(i + 2)))
    return store


def rows(store):
    return [{"input_ids": list(range(i + 2)), "loss_mask": [0] + [1] * (i + 1), "seq_len": i + 2} for i in range(3)]


def test_a_finished_store_reads_back_in_slices(store):
    store.finish(rows(store))
    assert len(store) == 3
    assert store.info["tokens"] == 9
    assert store.shape(2) == [4, 3, 8]
    assert store.hidden_states(2).dtype == torch.bfloat16
    assert store.hidden_states(2, slice(1, 3), layer=0).shape == (2, 8)
    assert [r.tolist() for r in store.responses()] == [[1], [1, 2], [1, 2, 3]]


def test_speculators_data_loader_reads_it(store):
    from speculators.train.data import ArrowDataset

    store.finish(rows(store))
    item = ArrowDataset(max_len=16, datapath=str(store.folder), on_missing="raise")[1]
    assert item["hidden_states"].shape == (3, 16)
    assert item["verifier_last_hidden_states"].shape == (3, 8)
    assert item["loss_mask"].tolist() == [0, 1, 1]


def test_checksums_are_those_of_the_files(store):
    store.finish(rows(store))
    lines = files.read_jsonl(store.folder / "samples.jsonl")
    assert [line["sha256"] for line in lines] == [files.sha256_file(store.sample_path(i)) for i in range(3)]


def test_a_sample_without_its_line_gets_one(store):
    (store.folder / "samples.jsonl").write_text('{"i": 0, "tok')  # killed while the line was written
    store.finish(rows(store))
    assert [line["i"] for line in files.read_jsonl(store.folder / "samples.jsonl")] == [0, 1, 2]


def test_an_unfinished_store_is_refused(store):
    with pytest.raises(Refused, match="not finished"):
        _ = store.info
    with pytest.raises(Refused, match="no sample store"):
        _ = Store(store.folder / "nothing").info


def test_the_same_declaration_keeps_the_samples_and_another_moves_them(store):
    (store.hidden_states_dir / ".hs_9.tmp").write_bytes(b"half")
    assert store.begin(declaration()) is None
    assert store.written() == {0, 1, 2}
    assert not list(store.hidden_states_dir.glob(".*.tmp"))
    moved = store.begin(declaration(layer_ids=[1, 3, 4]))
    assert Store(moved).written() == {0, 1, 2}
    assert store.written() == set()


def test_states_and_tokens_must_be_as_many(store):
    with pytest.raises(ValueError, match="2 states for 3 tokens"):
        store.write(7, torch.zeros(2, 3, 8), [1, 2, 3])
    assert 7 not in store.written()


def test_a_failed_write_leaves_no_file(tmp_path):
    def fail(path):
        with files.atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_sample_file_has_the_two_tensors_of_the_format(store):
    with safe_open(store.sample_path(0), "pt") as handle:
        assert sorted(handle.keys()) == ["hidden_states", "token_ids"]
        assert handle.get_tensor("token_ids").dtype == torch.int64
