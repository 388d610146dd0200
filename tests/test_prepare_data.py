import json

import pytest

from eagle3nb import prepare_data, verifier
from eagle3nb.conversations import read_source
from eagle3nb.errors import Refused
from eagle3nb.params import PrepareData

CHAT = [
    {"role": "user", "content": "How do I tie a knot?"},
    {"role": "assistant", "content": "Cross the ends and pull."},
    {"role": "user", "content": "And a bow?"},
    {"role": "assistant", "content": "Make two loops first."},
]


@pytest.fixture(scope="session")
def tiny_verifier(verifier_dir):
    return verifier.resolve(str(verifier_dir))


def rows(tiny_verifier, source, mode="given", known=None, **fields):
    settings = PrepareData(train=[source], **fields)
    return prepare_data._build(settings, tiny_verifier, [source], settings.max_samples, mode, known or set())


def decode(tiny_verifier, row, value):
    ids = [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m == value]
    return tiny_verifier.tokenizer.decode(ids)


def test_one_row_per_assistant_turn_and_the_mask_is_the_answer(tiny_verifier, jsonl):
    found, counts = rows(tiny_verifier, jsonl({"messages": CHAT}))
    assert counts["rows"] == 2
    assert [decode(tiny_verifier, row, 1) for row in found] == [
        "Cross the ends and pull.<|im_end|>",
        "Make two loops first.<|im_end|>",
    ]
    assert decode(tiny_verifier, found[1], 0).endswith("And a bow?<|im_end|>\n<|im_start|>assistant\n")
    for row in found:  # all zeros, then all ones
        assert row["loss_mask"] == sorted(row["loss_mask"])
        assert row["loss_mask"].index(1) == row["prompt_tokens"]


def test_messages_and_sharegpt_give_the_same_rows(tiny_verifier, jsonl):
    sharegpt = [{"from": "human" if t["role"] == "user" else "gpt", "value": t["content"]} for t in CHAT]
    first, _ = rows(tiny_verifier, jsonl({"messages": CHAT}, name="a.jsonl"))
    second, _ = rows(tiny_verifier, jsonl({"conversations": sharegpt}, name="b.jsonl"))
    assert [r["input_ids"] for r in first] == [r["input_ids"] for r in second]


def test_pretokenised_rows_pass_through(tiny_verifier, jsonl):
    found, _ = rows(tiny_verifier, jsonl({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}))
    assert found[0]["input_ids"] == [5, 6, 7, 8]
    assert found[0]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids but 1 loss_mask"),
        ({"input_ids": [1, 99999], "loss_mask": [0, 1]}, "token id 99999 is outside"),
        ({"text": "hello"}, "wanted messages, conversations, or input_ids and loss_mask; found text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "loss mask all zero"),
    ],
)
def test_rows_that_cannot_be_used(tiny_verifier, jsonl, row, message):
    with pytest.raises(Refused, match=message):
        rows(tiny_verifier, jsonl(row))


def test_a_bad_row_among_good_ones_is_counted(tiny_verifier, jsonl):
    found, counts = rows(
        tiny_verifier, jsonl({"messages": CHAT}, {"messages": [{"role": "assistant", "content": "a"}]})
    )
    assert len(found) == 2
    assert counts["dropped: no user turn"] == 1


def test_generate_keeps_prompts_and_a_budget(tiny_verifier, jsonl):
    open_end = [*CHAT, {"role": "user", "content": "Thanks!"}]
    found, _ = rows(tiny_verifier, jsonl({"messages": open_end}), "generate", seq_len=60, max_new_tokens=30)
    assert len(found) == 2  # the third prompt fills seq_len
    assert all(sum(row["loss_mask"]) == 0 for row in found)
    assert all(len(row["input_ids"]) + row["max_new_tokens"] <= 60 for row in found)


def test_truncation_is_counted_and_cuts_the_answer(tiny_verifier, jsonl):
    long = [CHAT[0], {"role": "assistant", "content": "pull " * 100}]
    found, counts = rows(tiny_verifier, jsonl({"messages": long}), seq_len=40)
    assert counts["truncated to seq_len"] == 1
    assert len(found[0]["input_ids"]) == 40
    assert found[0]["loss_mask"][-1] == 1


def test_duplicates_and_held_out_prompts_are_dropped(tiny_verifier, jsonl):
    one = {"messages": CHAT[:2]}
    _, counts = rows(tiny_verifier, jsonl(one, one))
    assert counts["dropped: duplicate or held-out prompt"] == 1
    heldout, _ = rows(tiny_verifier, jsonl(one), "heldout")
    prompts = {tuple(row["input_ids"]) for row in heldout}
    with pytest.raises(Refused, match="1 x dropped: duplicate or held-out prompt"):
        rows(tiny_verifier, jsonl({"messages": CHAT[:1]}), "generate", prompts)


def test_template_without_a_boundary(tiny_verifier, jsonl, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    with pytest.raises(Refused, match="no boundary"):
        rows(tiny_verifier, jsonl({"messages": CHAT}), chat_template=str(template))


def test_template_whose_prompt_is_no_prefix(tiny_verifier, jsonl, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}"
    )
    with pytest.raises(Refused, match="prompt is no prefix of the conversation"):
        rows(tiny_verifier, jsonl({"messages": CHAT}), chat_template=str(template))


def test_system_prompt_goes_before_the_user(tiny_verifier, jsonl):
    found, _ = rows(tiny_verifier, jsonl({"messages": CHAT}), system_prompt="Be brief.")
    assert decode(tiny_verifier, found[0], 0).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_empty_and_missing_and_unreadable_sources(tiny_verifier, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(Refused, match="is empty"):
        rows(tiny_verifier, str(empty))
    with pytest.raises(Refused, match="no such file"):
        rows(tiny_verifier, str(tmp_path / "none.jsonl"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [')
    with pytest.raises(Refused, match="cannot be read"):
        rows(tiny_verifier, str(bad))
    with pytest.raises(Refused, match=r"unknown; known: builtin:heldout_prompts, builtin:train_prompts"):
        rows(tiny_verifier, "builtin:nothing")


def test_a_saved_dataset_is_a_source(tiny_verifier, tmp_path):
    from datasets import Dataset

    Dataset.from_list([{"messages": CHAT}]).save_to_disk(tmp_path / "saved")
    found, _ = rows(tiny_verifier, str(tmp_path / "saved"))
    assert len(found) == 2


def test_turns_of_a_conversation_stay_together(tiny_verifier, jsonl):
    chats = []
    for k in range(10):
        chats.append({"id": k, "messages": [{**turn, "content": f"{turn['content']} {k}"} for turn in CHAT]})
    found, _ = rows(tiny_verifier, jsonl(*chats), seed=3)
    ids = [row["id"] for row in found]
    assert ids[::2] == ids[1::2]
    assert ids[::2] != sorted(ids[::2])


@pytest.mark.parametrize(("name", "least"), [("train_prompts", 400), ("heldout_prompts", 40)])
def test_the_built_in_prompts(name, least):
    found = list(read_source(f"builtin:{name}"))
    assert len(found) >= least
    assert len({row["kind"] for row in found}) >= 8
    assert len({json.dumps(row["messages"]) for row in found}) == len(found)
    assert all(row["messages"][-1]["role"] == "user" for row in found)


def test_built_in_held_out_prompts_are_not_in_the_training_ones():
    train = {row["messages"][-1]["content"] for row in read_source("builtin:train_prompts")}
    assert not train & {row["messages"][-1]["content"] for row in read_source("builtin:heldout_prompts")}
