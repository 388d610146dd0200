"""The explore notebooks and what they show, on the shared run and on a store of holes."""

import sys
import tempfile
from pathlib import Path

import papermill
import pytest
import torch
from conftest import ROOT

from eagle3nb import evaluate, explore_draft, explore_hidden_states, explore_vocab_mapping, prepare_data, stage, tiny
from eagle3nb.errors import Refused
from eagle3nb.params import PrepareData
from eagle3nb.samples import Store
from eagle3nb.verifier import resolve

sys.path.insert(0, str(ROOT / "benchmarks"))
import explore as bench

EXPLORE = {
    "explore_hidden_states": explore_hidden_states.ExploreHiddenStates,
    "explore_vocab_mapping": explore_vocab_mapping.ExploreVocabMapping,
    "explore_draft": explore_draft.ExploreDraft,
}


def view(run, **values):
    return explore_hidden_states.view(explore_hidden_states.ExploreHiddenStates(run_dir=str(run), **values))


# ---- all of them ---------------------------------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "values"), [(n, {"samples": [0, 39]} if n == "explore_draft" else {}) for n in EXPLORE]
)
def test_papermill_runs_it_and_it_changes_nothing(name, values, finished_run, tmp_path):
    before = {f: f.lstat().st_mtime_ns for f in finished_run.rglob("*")}
    out = papermill.execute_notebook(
        str(ROOT / "notebooks" / f"{name}.ipynb"), str(tmp_path / "out.ipynb"), cwd=str(ROOT), progress_bar=False,
        parameters={"run_dir": str(finished_run), **values},
    )  # fmt: skip
    cells = [cell for cell in out.cells if cell.cell_type == "code"]
    assert all(o.output_type != "error" for cell in cells for o in cell.outputs)
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 3
    assert {f: f.lstat().st_mtime_ns for f in finished_run.rglob("*")} == before


# ---- hidden states -------------------------------------------------------------------------------------------


def test_no_cell_reads_more_than_it_shows(tmp_path):
    """Six samples of 64 MiB: one window of one of them is read, or the first positions of all."""
    bench.hollow_store(tmp_path, tiny.tokenizer(), samples=6, tokens=8192, hidden=1024, vocabulary=2048)
    row = Store(tmp_path / "store").sample_path(0).stat().st_size / 8192 / 2**20
    ahead = max(int(file.read_text()) for file in Path("/sys/class/bdi").glob("*/read_ahead_kb")) / 1024
    for title, _, _, read in bench.cells(tmp_path):
        over_samples = title == "Growth over the layers"
        assert sum(size > 0 for size in read) <= (6 if over_samples else 1), title
        # Once where the file begins, once where the window ends.
        assert max(read) <= (64 if over_samples else 256) * row + 2 * ahead, title
    assert title == "What the last layer predicts"


@pytest.mark.engine
def test_the_last_layer_predicts_the_next_tokens(finished_run):
    rows = explore_hidden_states.predictions(view(finished_run))
    assert len(rows) > 8
    assert sum(row[3] == "✓" for row in rows) >= len(rows) - 1
    first, second = (float(text.split()[-1]) for text in rows[0][4:6])
    assert first >= second > 0


def test_the_lm_head_in_parts_is_the_lm_head(verifier_dir, monkeypatch):
    verifier, hidden = resolve(str(verifier_dir)), torch.randn(5, resolve(str(verifier_dir)).hidden_size)
    monkeypatch.setattr(explore_hidden_states, "VOCABULARY_PART", 300)
    values, tokens, total = explore_hidden_states._top(verifier, hidden, 3)
    logits = hidden @ verifier.weight("lm_head").float().T
    assert torch.equal(tokens, logits.topk(3).indices)
    torch.testing.assert_close(values, logits.topk(3).values)
    torch.testing.assert_close(total, logits.logsumexp(-1), atol=0.01, rtol=0)


@pytest.mark.engine
def test_figures_of_the_layers(finished_run):
    here = view(finished_run, positions=10**6)
    states = here.states()
    assert list(states.shape) == here.store.shape(0)
    table = explore_hidden_states.similarity(here)
    for k, row in enumerate(table):
        assert row[k + 1] == pytest.approx(1, abs=1e-3)
    one, two = states[1:, 0].float(), states[1:, 1].float()
    assert table[0][2] == pytest.approx(
        float((one * two).sum(-1).div(one.norm(dim=-1) * two.norm(dim=-1)).mean()), abs=1e-3
    )
    channel, size, times, share = explore_hidden_states.outlier_channels(here)[0]
    assert size == pytest.approx(float(states[1:, -1, channel].float().pow(2).mean().sqrt()), rel=1e-3)
    assert times >= 1
    assert 0 < share < 1
    groups, labels, share = explore_hidden_states.projection(here)
    assert sum(map(len, groups.values())) == len(states) - 1
    assert 0 < share <= 1
    assert len(labels) == 8


@pytest.mark.engine
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sample": 40}, "the store has samples 0 to 39"),
        ({"first": 5000}, "sample 0 has positions 0 to"),
        ({"layer_id": 2}, r"the store has the layers \[1, 3, 4, 6\]"),
        ({"store": "nowhere"}, "this is no sample store"),
    ],
)
def test_what_the_store_does_not_hold(finished_run, values, message):
    with pytest.raises(Refused, match=message):
        view(finished_run, **values)


# ---- vocabulary mapping --------------------------------------------------------------------------------------


@pytest.mark.engine
def test_what_if_is_what_the_stage_would_do(finished_run):
    settings = explore_vocab_mapping.ExploreVocabMapping(run_dir=str(finished_run), sizes=[64, 256, 1024, 32000])
    vocabulary = explore_vocab_mapping.load(settings)
    result = stage.result(finished_run, "build_vocab_mapping")
    rows = explore_vocab_mapping.what_if(vocabulary, settings.sizes)
    assert [row[0] for row in rows] == [64, 256, 512, 1024]  # the run's own is added, what cannot be is left out
    own = rows[2]
    assert own[1] == pytest.approx(result["coverage"])
    assert own[3] == result["filler"]
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert rows[-1][1] == rows[-1][2] == 1.0
    heldout = [row["without_draft"] for row in evaluate.responses(finished_run)]
    assert vocabulary.heldout_counts.total() == sum(map(len, heldout))
    covered = sum(bool(vocabulary.t2d[t]) for tokens in heldout for t in tokens)
    assert own[2] == pytest.approx(covered / vocabulary.heldout_counts.total())
    kinds = explore_vocab_mapping.by_kind(vocabulary)
    assert sum(row[1] for row in kinds) == result["response_tokens"]


@pytest.mark.engine
def test_two_mappings(finished_run, tmp_path):
    settings = explore_vocab_mapping.ExploreVocabMapping(run_dir=str(finished_run))
    vocabulary = explore_vocab_mapping.load(settings)
    name, half = explore_vocab_mapping.second(vocabulary, settings)
    assert name == "half the size (256)"
    rows = explore_vocab_mapping.compare(vocabulary, half)
    assert [row[1] for row in rows] == [256, 256, 0]
    assert rows[0][2] + rows[1][2] == pytest.approx(explore_vocab_mapping.coverage(vocabulary.counts, vocabulary.t2d))
    settings.other = str(finished_run)
    assert [
        row[1]
        for row in explore_vocab_mapping.compare(vocabulary, explore_vocab_mapping.second(vocabulary, settings)[1])
    ] == [512, 0, 0]
    settings.other = str(tmp_path)
    with pytest.raises(Refused, match=r"wanted t2d.npy or t2d.pt"):
        explore_vocab_mapping.second(vocabulary, settings)


# ---- draft ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walked(finished_run):
    return explore_draft.run(explore_draft.ExploreDraft(run_dir=str(finished_run)))


@pytest.mark.engine
def test_the_steps_are_those_that_vllm_took(walked, finished_run):
    compared = explore_draft.against_served(walked, finished_run)
    assert compared["responses"] == 6
    assert compared["steps that are the same"] >= 0.98
    served = stage.result(finished_run, "evaluate")["by_num_speculative_tokens"]["3"]
    figures = explore_draft.acceptance(walked)
    # vLLM also counts what it accepted beyond the end of a response.
    ends = len(walked["responses"]) / figures["drafts"]
    assert figures["acceptance_by_position"] == pytest.approx(served["acceptance_by_position"], abs=ends)
    assert figures["verifier agrees with the responses"] >= 0.98


@pytest.mark.engine
def test_every_miss_has_its_reason(walked, finished_run):
    t2d = explore_vocab_mapping.read_t2d(finished_run, tiny.VOCABULARY)
    for response in walked["responses"]:
        tokens = response["tokens"]
        assert sum(step["size"] for step in response["steps"]) == len(tokens) - response["prompt_tokens"]
        for step in response["steps"][1:]:
            missed = step["at"] + len(step["proposed"]) - 1
            right = tokens[step["at"] : missed]
            assert step["proposed"][:-1] == right
            assert all(t2d[token] for token in step["proposed"])
            if step["why"] == "outside":
                assert not t2d[tokens[missed]]
            if step["why"] == "wrong":
                assert t2d[tokens[missed]]
                assert tokens[missed] != step["proposed"][-1]
                assert step["rank"] >= 1
    assert sum(explore_draft.reasons(walked).values()) == pytest.approx(1)
    for row in explore_draft.misses(walked):
        assert row[1] == 0 or sum(row[2:]) == pytest.approx(1)


@pytest.mark.engine
def test_prompts_of_ones_own(finished_run):
    """The verifier answers them through the chat template that the run was prepared with."""
    settings = explore_draft.ExploreDraft(run_dir=str(finished_run), prompts=["What is a boat?"], max_new_tokens=8)
    (response,) = explore_draft.run(settings)["responses"]
    template = prepare_data.chat_template(PrepareData(), stage.verifier(finished_run))
    prompt = template.ids([{"role": "user", "content": "What is a boat?"}], prompt=True)
    assert response["name"] == "What is a boat?"
    assert response["tokens"][: response["prompt_tokens"]] == prompt
    assert 1 <= len(response["tokens"]) - len(prompt) <= 8


@pytest.mark.engine
def test_a_checkpoint_of_another_kind(finished_run, tmp_path, monkeypatch):
    from eagle3nb.child import ChildFailed

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed child's folder is kept, for its log
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ChildFailed, match="no EAGLE-3 checkpoint of speculators"):
        explore_draft.run(explore_draft.ExploreDraft(run_dir=str(finished_run), checkpoint=str(tmp_path), samples=[0]))
