import json

import pytest
import torch

from eagle3nb import show
from eagle3nb.show import plots, tables
from eagle3nb.text import token_text


def test_a_tensor_line_says_what_is_wrong_with_it():
    bad = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    markup = show.tensors({"a": bad, "zero": torch.zeros(3), "none": torch.zeros(0)}).markup
    for text in ("1 NaN, 1 Inf", "all zeros", "empty", "[4]", "float32"):
        assert text in markup


def test_numbers():
    assert [show.number(v) for v in (1234567, 0.123456, None, True, float("nan"), [1, 0.5])] == [
        "1,234,567", "0.1235", "–", "True", "nan", "[1, 0.5]",
    ]  # fmt: skip


def test_two_configs_side_by_side_mark_differences():
    markup = show.config({"a": 1, "b": 2}, {"a": 1, "b": 3}, ("draft", "verifier")).markup
    assert markup.count("≠") == 1


def test_checks_are_sorted_by_verdict_and_skip_is_not_green():
    made = [
        {
            "id": f"a.{verdict}",
            "title": "<t>",
            "verdict": verdict,
            "observed": 0.5,
            "expected": "> 0.9",
            "advice": f"do {verdict}",
        }
        for verdict in ("skip", "pass", "fail", "warn")
    ]
    shown = show.checks(made)
    places = [shown.markup.index(f"a.{verdict}<") for verdict in ("fail", "warn", "pass", "skip")]
    assert places == sorted(places)
    assert shown.markup.count(tables.VERDICTS["pass"]) == 1  # the badge of the one pass
    assert tables.VERDICTS["skip"] != tables.VERDICTS["pass"]
    assert "do fail" in shown.markup
    assert "do pass" not in shown.markup
    assert "<t>" not in shown.markup
    assert "1 fail, 1 warn, 1 pass, 1 skip" in shown.markup
    assert "no checks" in show.checks([]).markup


class Tokenizer:
    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


def test_tokens_are_escaped_and_what_hides_is_made_visible():
    texts = ["<script>alert(1)</script>", '" onmouseover="x', "a\u202eb", "\x00", "\n"]
    shown = show.tokens(Tokenizer(texts), range(5), [0, 0, 1, 1, 1])
    assert "<script>" not in shown.markup
    assert '" onmouseover' not in shown.markup.replace("&quot; onmouseover", "")
    assert "⟨U+202E⟩" in shown.markup
    assert "⟨U+0000⟩" in shown.markup
    assert "3 of them response" in shown.markup
    assert shown.markup.count(tables.RESPONSE) == 3


def test_tables_escape_cells():
    assert "<b>" not in show.table([("<b>", 1)], ("<i>", "n")).markup.replace("<tbody>", "")


def test_a_plot_leaves_picture_data_and_alternative_text(tmp_path):
    picture = show.curves(tmp_path, "c", {"loss": ([0, 1], [2.0, 1.0])}, "Loss", "step", "loss")
    assert (tmp_path / "plots" / "c.png").read_bytes()[:4] == b"\x89PNG"
    saved = json.loads((tmp_path / "plots" / "c.json").read_text())
    assert saved["data"]["loss"]["y"] == [2.0, 1.0]
    assert "loss from 2 to 1" in saved["alt"] == picture.alt


def test_a_dollar_sign_is_no_mathematics_and_many_series_all_have_a_look_of_their_own(tmp_path):
    kinds = {f"$\\frac{k}$ \u202e": {"a$b$": 1.0} for k in range(13)}
    saved = show.bars(tmp_path, "b", kinds, "$5 and $6", "share")
    assert len(json.loads((tmp_path / "plots" / "b.json").read_text())["data"]) == 13
    assert "$5 and $6" in saved.alt
    lines = {str(k): ([0, 1], [k, k]) for k in range(18)}
    show.curves(tmp_path, "c", lines, "t", "x", "y", mark=("here", 1))
    looks = {(plots.COLOURS[k % 6], plots.LINES[k // 6 % 3]) for k in range(18)}
    assert len(looks) == 18


def test_columns_of_numbers_stand_to_the_right():
    markup = show.table([("a", 1.5, None), ("b", None, None)], ("name", "share", "nothing")).markup
    assert markup.count("text-align:right") == 3  # the head, the number, and its missing neighbour


def test_training_curve_needs_a_step(tmp_path):
    assert show.training(tmp_path, "loss") is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train": {"loss": 3.0}}\n')
    assert show.training(tmp_path, "loss") is not None


@pytest.mark.parametrize(("seconds", "text"), [(5, "5s"), (75, "1m15s"), (3700, "1h01m")])
def test_durations(seconds, text):
    from eagle3nb.child import duration

    assert duration(seconds) == text


def test_bytes_that_are_no_character_are_written_out():
    from eagle3nb import tiny

    words = tiny.tokenizer()
    ids = words.encode("é🙂")
    texts = [token_text(words, i) for i in ids]
    assert "".join(texts).encode().decode("unicode_escape").encode("latin-1").decode() == "é🙂"
    assert "\\x" in "".join(texts)


def test_rejected_drafts_are_named():
    response = {
        "id": "x", "kind": "k", "texts": {"1": "a", "2": " b", "3": "c"},
        "with_draft": {"2": {"tokens": [1, 2, 3], "steps": [1, 2], "drafts": [[], [2, 1]]}},
    }  # fmt: skip
    assert show.draft_steps(response, 2) == [
        {"accepted": [], "own": ["a"], "rejected": []},
        {"accepted": [" b"], "own": ["c"], "rejected": ["a"]},
    ]
    found = show.steps(response, 2)
    assert "3 tokens in 2 steps, 1 draft token accepted, 1 rejected" in found.text
    assert "rejected «a»" in found.markup


def test_a_response_may_end_inside_accepted_tokens():
    response = {
        "texts": {"1": "a", "2": "b", "3": "c"},
        "with_draft": {"3": {"tokens": [1, 2, 3], "steps": [1, 2], "drafts": [[], [2, 3, 1]]}},
    }  # fmt: skip
    assert show.draft_steps(response, 3)[1] == {"accepted": ["b", "c"], "own": [], "rejected": []}
