"""Serving with and without the draft, measured in vLLM (in the shared run)."""

import shutil

import pytest

from eagle3nb import evaluate, stage
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
    assert (
        result["predicted_acceptance_by_position"]
        == stage.result(finished_run, "train")["predicted_acceptance_by_position"]
    )
    assert read_json(stage.folder(finished_run, "evaluate") / "plots" / "predicted_against_served.json")["alt"]
