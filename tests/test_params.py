import pytest

from eagle3nb import params
from eagle3nb.errors import Refused

FIELDS = [
    (stage, field) for stage, model in params.STAGES.items() for field in model.model_fields if field != "run_dir"
]


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "p.yaml"
        path.write_text(text)
        return params.load(path, list(overrides))

    return load


def refusal(load, text, *overrides) -> str:
    with pytest.raises(Refused) as caught:
        load(text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_exponent_is_a_number_in_file_override_and_nested(load):
    found = load("train: {lr: 1e-4, trainer_args: {weight_decay: 5e-2}}", "train.warmup_ratio=1E-1")
    assert found.train.lr == 1e-4
    assert found.train.trainer_args == {"weight_decay": 0.05}
    assert found.train.warmup_ratio == 0.1


def test_unknown_key_names_it_and_the_nearest(load):
    assert refusal(load, "train: {epoch: 3}").endswith("train.epoch: unknown key; nearest: epochs")


def test_unknown_stage_names_it_and_the_nearest(load):
    assert "trian: unknown stage; nearest: train" in refusal(load, "trian: {epochs: 3}")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train: {epochs: many}", "train.epochs"),
        ("train: {epochs: true}", "train.epochs"),
        ("train: {epochs: 1.5}", "train.epochs"),
        ("train: {epochs: 0}", "train.epochs"),
        ("train: {lr: fast}", "train.lr"),
        ("train: {lr: -1}", "train.lr"),
        ("train: {train_share: 1.0}", "train.train_share"),
        ("prepare_data: {train: file.jsonl}", "prepare_data.train"),
        ("prepare_data: {responses: invent}", "prepare_data.responses"),
        ("preflight: {verifier: 7}", "preflight.verifier"),
        ("extract_hidden_states: {engine_args: [1]}", "extract_hidden_states.engine_args"),
        ("evaluate: {num_speculative_tokens: [3, x]}", "evaluate.num_speculative_tokens"),
        ("train: 3", "train"),
    ],
)
def test_wrong_value_names_the_key(load, text, key):
    assert f": {key}" in refusal(load, text)


def test_not_yaml_missing_file_twice_and_list(load, tmp_path):
    assert "no valid YAML" in refusal(load, "train: {epochs: [")
    assert "'epochs' stands twice" in refusal(load, "train:\n  epochs: 1\n  epochs: 2\n")
    assert "a mapping of sections is wanted" in refusal(load, "- train")
    (tmp_path / "smoke.yaml").write_text("")
    with pytest.raises(Refused, match=r"no params file .*smok.yaml; nearest: .*smoke.yaml"):
        params.load(tmp_path / "smok.yaml")


def test_override_without_section_or_value(load):
    assert "wanted section.field=value" in refusal(load, "", "epochs=3")
    assert "wanted section.field=value" in refusal(load, "", "train.epochs")


@pytest.mark.parametrize(("stage", "field"), FIELDS)
def test_every_value_can_be_overridden(load, stage, field):
    default = params.STAGES[stage].model_fields[field].default
    other = {bool: "true", int: "2", float: "0.5", dict: "{a: 1}", list: "[1]"}.get(type(default), "some/text")
    special = {
        "responses": "given", "capture": "connector", "dtype": "float32", "optimizer": "adamw", "scheduler": "linear",
        "train": "[a.jsonl]", "heldout": "[a.jsonl]", "layer_ids": "[1, 2]", "allow": "[a.b]",
    }  # fmt: skip
    wanted = special.get(field, other)
    if default is None and "int" in str(params.STAGES[stage].model_fields[field].annotation) and field != "layer_ids":
        wanted = "2"
    if field == "single_process":
        wanted = "true"
    found = load("", f"{stage}.{field}={wanted}")
    assert getattr(getattr(found, stage), field) == params.parse_yaml(wanted)


def test_engine_args_keys_can_be_overridden_one_by_one(load):
    found = load("extract_hidden_states: {engine_args: {a: 1}}", "extract_hidden_states.engine_args.b=2")
    assert found.extract_hidden_states.engine_args == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("override", "key", "secret"),
    [
        ("preflight.verifier=hf_AbCdEfGh1234567890", "preflight.verifier", "hf_AbCdEfGh1234567890"),
        ("extract_hidden_states.engine_args.hf_token=abc", "extract_hidden_states.engine_args.hf_token", "abc"),
        ("train.trainer_args={api_key: 12345}", "train.trainer_args.api_key", "12345"),
        ("prepare_data.train=[https://me:pw1234@example.com/a.jsonl]", "prepare_data.train", "pw1234"),
        ("prepare_data.train=[https://example.com/a.jsonl?token=qwertz]", "prepare_data.train", "qwertz"),
        ("evaluate.engine_args.password=letmein", "evaluate.engine_args.password", "letmein"),
        ("train.lr=sk-proj-0123456789abcdef", "train.lr", "sk-proj-0123456789abcdef"),
        ("train.trainer_args={HUGGING_FACE_HUB_TOKEN: abc}", "trainer_args.HUGGING_FACE_HUB_TOKEN", "abc"),
        ("train.trainer_args={wandb_key: abc}", "trainer_args.wandb_key", "abc"),
        ("train.trainer_args={aws_session_token: abc}", "trainer_args.aws_session_token", "abc"),
        ("train.trainer_args={pwd: abc}", "trainer_args.pwd", "abc"),
        ("prepare_data.train=[https://tok123@example.com/a.jsonl]", "prepare_data.train", "tok123"),
        ("train.trainer_args={x: 'Authorization: Basic dXNlcjpwYXNz'}", "train.trainer_args", "dXNlcjpwYXNz"),
        ("hf_0123456789abcdef", "a value", "hf_0123456789abcdef"),
    ],
)
def test_credentials_are_refused_by_their_key(tmp_path, override, key, secret):
    path = tmp_path / "x.yaml"
    path.write_text("train: {epochs: 1}\n")
    with pytest.raises(Refused, match="looks like a credential") as caught:
        params.load(path, [override])
    assert key in str(caught.value)
    assert secret not in str(caught.value)


def test_a_credential_in_the_file_is_refused_before_its_type_is_looked_at(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("train:\n  epochs: ghp_0123456789abcdefghij\n")
    with pytest.raises(Refused, match=r"train.epochs looks like a credential") as caught:
        params.load(path)
    assert "ghp_" not in str(caught.value)


def test_ordinary_names_are_no_credentials(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("prepare_data: {train: [hf_dataset/chats, sk-learn/data@train], max_new_tokens: 7}\n")
    found = params.load(
        path,
        [
            "prepare_data.chat_template_kwargs={eos_token: </s>, think_token: a, x: basic knowledge}",
            "train.tokens_per_step=64",
        ],
    )
    assert found.prepare_data.max_new_tokens == 7
