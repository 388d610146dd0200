"""Serving with and without the draft, measured in vLLM (in the shared run)."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from eagle3nb import evaluate, stage
from eagle3nb.engine import drafts
from eagle3nb.errors import Refused
from eagle3nb.files import read_json
from eagle3nb.params import Evaluate


@pytest.mark.engine
def test_the_figures_hang_together(finished_run):
    result = stage.result(finished_run, "evaluate")
    assert set(result["by_num_speculative_tokens"]) == {"1", "3"}
    for number, figures in result["by_num_speculative_tokens"].items():
        by_position = figures["acceptance_by_position"]
        assert len(by_position) == int(number)
        assert by_position == sorted(by_position, reverse=True)
        assert figures["acceptance_length"] == pytest.approx(1 + sum(by_position))
        assert figures["drafts"] > 0
        assert len(figures["speedup_rounds"]) == len(figures["baseline_rounds"]) == 2
        assert min(figures["speedup_rounds"]) <= figures["speedup"] <= max(figures["speedup_rounds"])
        ratios = [b / a for a, b in zip(figures["baseline_rounds"], figures["spec_rounds"], strict=True)]
        assert figures["speedup_rounds"] == pytest.approx(ratios)
    assert result["prompts"] == 6
    best = result["by_num_speculative_tokens"][str(result["num_speculative_tokens"])]
    assert (
        result["speedup"] == best["speedup"] == max(f["speedup"] for f in result["by_num_speculative_tokens"].values())
    )


@pytest.mark.engine
def test_greedy_output_with_the_draft_is_the_one_without(finished_run):
    result = stage.result(finished_run, "evaluate")
    assert result["lossless"] is True
    assert result["identical_outputs"] == 6
    for response in evaluate.responses(finished_run):
        for drafted in response["with_draft"].values():
            assert drafted["tokens"] == response["without_draft"]
            assert sum(drafted["steps"]) == len(drafted["tokens"])


@pytest.mark.engine
def test_acceptance_of_the_steps_is_that_of_vllms_counters(finished_run):
    """Tokens per step, seen from outside, against 1 + accepted / drafts from inside."""
    result = stage.result(finished_run, "evaluate")
    for number, figures in result["by_num_speculative_tokens"].items():
        steps = [s for r in evaluate.responses(finished_run) for s in r["with_draft"][number]["steps"][1:]]
        # The last step of a response may be cut at max_new_tokens or the end of turn.
        assert sum(steps) / len(steps) == pytest.approx(figures["acceptance_length"], abs=0.25)


def test_different_outputs_are_found():
    responses = [{"tokens": [1, 2], "steps": [1, 1]}, {"tokens": [3, 4], "steps": [2]}]
    other = [{"tokens": [1, 2], "steps": [1, 1]}, {"tokens": [3, 5], "steps": [2]}]
    counters = {"drafts": 4, "accepted_tokens_per_pos": [2, 1]}
    base = {
        "quality": {"responses": responses, "counters": {}},
        "turns": [{"tokens_per_s": 10.0}, {"tokens_per_s": 8.0}],
    }
    draft = {
        "quality": {"responses": other, "counters": counters},
        "turns": [{"tokens_per_s": 15.0}, {"tokens_per_s": 8.0}],
    }
    found = evaluate._compare(base, draft, [{"kind": "a"}, {"kind": "b"}])
    assert found["lossless"] is False
    assert found["different_prompts"] == [1]
    assert found["acceptance_length"] == 1.75
    assert found["speedup_rounds"] == [1.5, 1.0]
    assert found["speedup"] == 1.25


def test_a_checkpoint_that_is_none(copy_of_run, tmp_path):
    with pytest.raises(Refused, match=r"wanted config.json and model.safetensors"):
        evaluate.run(Evaluate(run_dir=str(copy_of_run), checkpoint=str(tmp_path)))
    shutil.rmtree(stage.folder(copy_of_run, "train"))
    with pytest.raises(Refused, match="run the stage train first"):
        evaluate.run(Evaluate(run_dir=str(copy_of_run)))


def test_one_round_is_not_enough():
    from eagle3nb.params import validate

    with pytest.raises(Refused, match="rounds = 1"):
        validate(Evaluate, {"rounds": 1}, "here")


@pytest.mark.engine
def test_predicted_and_served_are_kept_side_by_side(finished_run):
    result = stage.result(finished_run, "evaluate")
    shares = stage.result(finished_run, "train")["predicted_acceptance_by_position"]
    coverage = result["draft_vocab_coverage"]
    assert 0.5 < coverage <= 1
    assert result["predicted_acceptance_by_position"] == [s * coverage ** (k + 1) for k, s in enumerate(shares)]
    assert read_json(stage.folder(finished_run, "evaluate") / "plots" / "predicted_against_served.json")["alt"]


@pytest.mark.engine
def test_the_recorded_drafts_explain_every_step(finished_run):
    """Accepted tokens are the draft's first ones; the verifier's own token is never the draft's next one."""
    recorded = [r for r in evaluate.responses(finished_run) if "texts" in r]
    assert len(recorded) == evaluate.RECORDED_PROMPTS
    for response in recorded:
        for number, answer in response["with_draft"].items():
            assert answer["drafts"][0] == []  # the prompt's own step has no draft
            assert all(len(draft) == int(number) for draft in answer["drafts"][1:])
            assert drafts.align(answer["drafts"], answer["tokens"], answer["steps"]) == answer["drafts"]
            assert {str(t) for t in answer["tokens"]} <= set(response["texts"])


def test_drafts_are_matched_to_steps():
    tokens, steps = [5, 6, 7, 8, 9], [1, 3, 1]
    noted = [[], [6, 7, 1], [2, 3, 4]]
    assert drafts.align(noted, tokens, steps) == noted
    assert drafts.align([[], *noted], tokens, steps) == noted  # a chunk of the prompt went before
    assert drafts.align([*noted, [1, 1, 1]], tokens, steps) == noted  # one step too many was begun
    assert drafts.align([[], [6, 1, 1], [2, 3, 4]], tokens, steps) is None
    assert drafts.align([[], [6, 7, 8], [2, 3, 4]], tokens, steps) is None  # 8 would have been accepted
    assert drafts.align(noted[:2], tokens, steps) is None


def test_prompts_of_different_kinds_are_recorded_first():
    rows = [{"kind": kind} for kind in "aabbcccdefg"]
    assert evaluate.recorded(rows) == [0, 2, 4, 7, 8]
    assert evaluate.recorded([{"kind": "a"}] * 3) == [0, 1, 2]


def test_placeholders_are_looked_up_in_either_model_runner():
    """Asynchronous scheduling names the drafts -1; the runner has them, in vLLM's two runners in different places."""
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={"a-1": [-1, -1]}, num_scheduled_tokens={"b-1": 1, "a-1": 3}
    )
    first = SimpleNamespace(
        _draft_token_ids=torch.tensor([[9, 9, 9], [4, 5, 6]]), input_batch=SimpleNamespace(req_ids=["b-1", "a-1"])
    )
    states = SimpleNamespace(draft_tokens=torch.tensor([[4, 5, 6], [9, 9, 9]]), req_id_to_index={"a-1": 0})
    for runner in (first, SimpleNamespace(req_states=states)):
        ran = []
        runner.execute_model = ran.append
        worker = drafts.DraftsWorkerExtension()
        worker.model_runner = runner
        worker.record_drafts(["a"])
        runner.execute_model(scheduled)
        assert ran == [scheduled]
        assert worker.take_drafts() == {"a": [[4, 5]]}
