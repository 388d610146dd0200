import numpy as np
import pytest
import torch
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from eagle3nb import build_vocab_mapping as mapping
from eagle3nb import stage
from eagle3nb.errors import Refused
from eagle3nb.params import BuildVocabMapping
from eagle3nb.samples import Store


def test_it_is_speculators_function_where_nothing_must_be_kept():
    counts = {7: 3, 2: 9, 40: 1, 41: 1}
    t2d, d2t = mapping.build(counts, 3, 50, [])
    theirs = build_vocab_mappings_from_distribution(counts, 3, 50)
    assert torch.equal(d2t, theirs[0])
    assert torch.equal(t2d, theirs[1])


def test_invariant_and_kept_tokens():
    counts = {token: 100 - token for token in range(10, 60)}
    t2d, d2t = mapping.build(counts, 20, 100, [2, 99])
    assert t2d.dtype == torch.bool
    assert d2t.dtype == torch.int64
    assert torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(20))
    assert t2d[2]
    assert t2d[99]
    assert t2d[10:28].all()  # the rest are the most frequent ones
    assert int(t2d.sum()) == 20


def test_full_vocabulary_is_the_identity():
    t2d, d2t = mapping.build({1: 1}, 30, 30, [])
    assert t2d.all()
    assert not d2t.any()


@pytest.mark.parametrize(
    ("size", "kept", "message"),
    [(101, [], "has only 100 tokens"), (2, [1, 2, 3], "must hold them all"), (10, [100], "outside the vocabulary")],
)
def test_sizes_that_cannot_be(size, kept, message):
    with pytest.raises(Refused, match=message):
        mapping.build({1: 1}, size, 100, kept)


@pytest.mark.parametrize(
    "value", [{3: 2, 5: 1}, {"3": 2, "5": 1}, torch.tensor([0, 0, 0, 2, 0, 1]), {3: 2, 5: 1, 7: 0}]
)
def test_counts_from_elsewhere(tmp_path, value):
    torch.save(value, tmp_path / "c.pt")
    assert mapping.load_counts(tmp_path / "c.pt", 100) == {3: 2, 5: 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([[1]]), r"1-D integer tensor, found Tensor \[1, 1\]"),
        (torch.tensor([0.5]), "1-D integer tensor"),
        ([1, 2], "found list"),
        ({"a": 1}, "other keys or values"),
        ({200: 1}, "counts of another verifier"),
        ({1: -1}, "no negative count"),
        ({1: 0}, "all counts are zero"),
    ],
)
def test_counts_that_are_none(tmp_path, value, message):
    torch.save(value, tmp_path / "c.pt")
    with pytest.raises(Refused, match=message):
        mapping.load_counts(tmp_path / "c.pt", 100)


def test_counts_never_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({1: Evil()}, tmp_path / "c.pt")
    with pytest.raises(Refused, match="loads safely"):
        mapping.load_counts(tmp_path / "c.pt", 100)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(Refused, match="no such file"):
        mapping.load_counts(tmp_path / "none.pt", 100)


def test_coverage_curve_rises_to_one():
    curve = mapping.coverage_curve({token: 1000 // (token + 1) for token in range(500)})
    shares = [share for _, share in curve]
    assert shares == sorted(shares)
    assert curve[-1] == (500, 1.0)


def test_a_run_counts_what_is_masked_and_writes_all_files(finished_run):
    folder = stage.folder(finished_run, "build_vocab_mapping")
    result = stage.result(finished_run, "build_vocab_mapping")
    counts = torch.load(folder / "token_freq.pt", weights_only=True)
    store = Store(stage.folder(finished_run, "extract_hidden_states") / "store")
    data = store.dataset()
    assert sum(counts.values()) == sum(int(row["loss_mask"].sum()) for row in data) == result["response_tokens"]
    for name in ("t2d", "d2t"):
        assert np.array_equal(
            np.load(folder / f"{name}.npy"), torch.load(folder / f"{name}.pt", weights_only=True).numpy()
        )
    verifier = stage.verifier(finished_run)
    t2d = torch.load(folder / "t2d.pt", weights_only=True)
    assert all(t2d[token] for token in verifier.eos_token_ids)
    assert 0 < result["coverage"] <= 1


def test_a_run_takes_counts_from_elsewhere(copy_of_run, tmp_path):
    torch.save(torch.arange(1024), tmp_path / "freq.pt")
    fields = BuildVocabMapping(run_dir=str(copy_of_run), draft_vocab_size=64, counts=str(tmp_path / "freq.pt"))
    result = mapping.run(fields)
    t2d = np.load(stage.folder(copy_of_run, "build_vocab_mapping") / "t2d.npy")
    assert t2d[-61:].all()
    assert result["counted_from"] == str(tmp_path / "freq.pt")
