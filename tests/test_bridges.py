"""The checks: quiet on a healthy run, and each silent fault named by the check that is there for it."""

import json
import os
import shutil
from pathlib import Path

import faults
import pytest
from safetensors.torch import load_file, save_file

from eagle3nb import bridges, child, stage
from eagle3nb.bridges import artefacts, opening, registry
from eagle3nb.cli import main
from eagle3nb.engine import reference
from eagle3nb.verifier import Verifier


@pytest.fixture(autouse=True)
def reference_in_this_process(monkeypatch):
    """The reference forward without a new process per test; `test_reference_in_a_child` has the real one."""
    monkeypatch.setattr(reference, "load", faults.model_for_tests)

    def run(module, job, folder, **_):
        assert module == "eagle3nb.engine.reference"
        return reference.compare(job, None)

    monkeypatch.setattr(child, "run", run)


def checks_of(run: Path, until: str = "evaluate") -> dict[str, dict]:
    """Entries of the bridges up to one, as a run meets them: it would stop there."""
    bridges = registry.BRIDGES[: registry.BRIDGES.index(until) + 1]
    return {entry["id"]: entry for entry in registry.run(opening.of_run(run, deep=True), bridges)}


@pytest.fixture(scope="module")
def healthy(finished_run) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "load", faults.model_for_tests)
        patch.setattr(child, "run", lambda module, job, folder, **_: reference.compare(job, None))
        return {id: entry["verdict"] for id, entry in checks_of(finished_run).items()}


def test_a_healthy_run_has_no_fail_and_no_warning(finished_run, healthy):
    loud = {id: e for id, e in checks_of(finished_run).items() if e["verdict"] in ("fail", "warn")}
    assert not loud
    assert set(healthy.values()) == {"pass"}


def test_special_tokens_take_room_in_a_small_vocabulary(copy_of_run):
    """What the stage builds is never told to be another build, however few tokens there are (`make smoke`)."""
    from eagle3nb import build_vocab_mapping

    a = opening.of_run(copy_of_run)
    special = a.verifier.special_token_ids
    size = len(special) + 4
    built = build_vocab_mapping.build(a.counts, size, a.verifier.vocab_size, special)
    a.of_run["build_vocab_mapping"]["kept_special"] = special
    a.mapping = artefacts.Mapping(*built, "built")
    assert one_check("vocab.frequent", a).verdict == "pass"
    left_out = build_vocab_mapping.build({t: 1 for t in range(500, 500 + size)}, size, a.verifier.vocab_size, special)
    a.mapping = artefacts.Mapping(*left_out, "of other data")
    assert one_check("vocab.frequent", a).verdict == "fail"


def test_every_check_has_a_fault():
    made = {id for _, ids, _ in faults.FAULTS.values() for id in ids}
    assert set(registry.CHECKS) - made == ALONE


@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault(name, copy_of_run, healthy):
    make, ids, says = faults.FAULTS[name]
    make(copy_of_run)
    if ids != ("samples.checksum",):
        faults.checksums(copy_of_run)
    found = checks_of(copy_of_run, registry.CHECKS[ids[0]].bridges[-1])
    loud = {id for id, entry in found.items() if entry["verdict"] in ("fail", "warn")}
    assert loud == set(ids)
    assert says in found[ids[0]]["observed"]
    assert found[ids[0]]["advice"]


# ---- the command ---------------------------------------------------------------------------------------------


def check(capsys, *arguments: str) -> tuple[int, list[dict], str]:
    code = main(["check", *map(str, arguments), "--json"])
    out = capsys.readouterr()
    return code, json.loads(out.out) if code < 2 else [], out.err


@pytest.mark.parametrize(
    ("where", "kind", "some_id"),
    [
        ("", "a run directory", "served.lossless"),
        ("02_extract_hidden_states/store", "a sample store", "samples.layers"),
        ("02_extract_hidden_states/store/hidden_states/hs_3.safetensors", "one sample file", "samples.constant"),
        ("03_build_vocab_mapping", "a vocabulary pair", "vocab.offsets"),
        ("03_build_vocab_mapping/d2t.npy", "a vocabulary pair", "vocab.offsets"),
        ("03_build_vocab_mapping/t2d.pt", "a vocabulary pair", "vocab.pair"),
        ("03_build_vocab_mapping/token_freq.pt", "token counts", "vocab.counts"),
        ("04_train/checkpoints/checkpoint_best/config.json", "a draft config", "draft.rope_theta"),
        ("04_train/checkpoints/checkpoint_best/model.safetensors", "a draft checkpoint", "draft.lm_head"),
        ("04_train/checkpoints/checkpoint_best", "a draft checkpoint", "draft.fc_width"),
    ],
)
def test_check_finds_out_what_a_path_is(finished_run, verifier_dir, capsys, where, kind, some_id):
    assert main(["check", str(finished_run / where), "--verifier", str(verifier_dir)]) == 0
    out = capsys.readouterr().out
    assert f": {kind}\n" in out
    assert f"  pass  {some_id}" in out
    assert "fail" not in out.split("\n")[-2]


def test_check_without_a_verifier_skips_and_says_what_it_needs(finished_run, capsys):
    code, entries, _ = check(capsys, finished_run / "03_build_vocab_mapping")
    special = next(e for e in entries if e["id"] == "vocab.special")
    assert (code, special["verdict"]) == (0, "skip")
    assert "--verifier" in special["observed"]


def test_against_compares_a_draft_with_a_store(copy_of_run, verifier_dir, capsys):
    draft, store = faults.checkpoint(copy_of_run), faults.store(copy_of_run)
    arguments = (draft, "--verifier", verifier_dir, "--against", store)
    code, entries, _ = check(capsys, *arguments)
    assert code == 0
    assert not any(e["id"].startswith("samples.") for e in entries)  # the store is compared with, not checked
    assert {e["id"]: e["verdict"] for e in entries}["draft.layers_of_store"] == "pass"
    faults.layer_ids_in_the_convention_of_outputs(copy_of_run)
    code, entries, _ = check(capsys, *arguments)
    assert code == 1
    assert fails(entries) == ["draft.layer_convention"]


def test_against_a_config_gives_a_bare_store_its_layers(copy_of_run, verifier_dir, capsys):
    (faults.store(copy_of_run) / "store.json").unlink()
    config = faults.checkpoint(copy_of_run) / "config.json"
    code, entries, _ = check(capsys, faults.store(copy_of_run), "--verifier", verifier_dir, "--against", config)
    assert code == 0
    assert {e["id"]: e["verdict"] for e in entries}["samples.layers"] == "pass"


def lone_sample(run: Path) -> Path:
    return faults.store(run) / "hidden_states" / "hs_3.safetensors"


def test_a_lone_sample_is_compared_with_the_row_and_the_checksum_of_its_number(copy_of_run, verifier_dir, capsys):
    arguments = (lone_sample(copy_of_run), "--verifier", verifier_dir, "--against", faults.store(copy_of_run), "--deep")
    code, entries, _ = check(capsys, *arguments)
    verdicts = {e["id"]: e["verdict"] for e in entries}
    assert code == 0
    assert {verdicts[id] for id in ("samples.token_ids", "samples.checksum", "samples.layers")} == {"pass"}
    shutil.copy(lone_sample(copy_of_run).with_name("hs_4.safetensors"), lone_sample(copy_of_run))
    code, entries, _ = check(capsys, *arguments)
    loud = {e["id"]: e["observed"] for e in entries if e["verdict"] == "fail"}
    assert code == 1
    assert "samples.checksum" in loud
    assert "hs_3.safetensors" in loud.get("samples.token_ids", "") + loud.get("samples.length", "")


def test_ids_of_a_lone_sample_are_looked_at(copy_of_run, verifier_dir, capsys):
    def change(states, ids):
        ids[2] = -7
        return states, ids

    faults.samples(copy_of_run, change, only={3})
    code, entries, _ = check(capsys, lone_sample(copy_of_run), "--verifier", verifier_dir)
    assert code == 1
    assert "-7 to" in next(e["observed"] for e in entries if e["id"] == "samples.vocabulary")


def fails(entries: list[dict]) -> list[str]:
    return [e["id"] for e in entries if e["verdict"] == "fail"]


def test_against_compares_a_store_with_a_config(copy_of_run, verifier_dir, capsys):
    config = faults.checkpoint(copy_of_run) / "config.json"
    arguments = (faults.store(copy_of_run), "--verifier", verifier_dir, "--against", config)
    assert check(capsys, *arguments)[0] == 0
    faults.layer_ids_of_another_store(copy_of_run)
    code, entries, _ = check(capsys, *arguments)
    assert (code, fails(entries)) == (1, ["draft.layers_of_store"])


def test_against_compares_counts_with_a_store(copy_of_run, verifier_dir, capsys):
    import torch

    counts = stage.folder(copy_of_run, "build_vocab_mapping") / "token_freq.pt"
    arguments = (counts, "--verifier", verifier_dir, "--against", faults.store(copy_of_run))
    assert check(capsys, *arguments)[0] == 0
    torch.save({token: n + 7 for token, n in torch.load(counts).items()}, counts)
    code, entries, _ = check(capsys, *arguments)
    assert (code, fails(entries)) == (1, ["vocab.source"])


def test_against_compares_a_mapping_with_a_checkpoint(copy_of_run, verifier_dir, capsys):
    mapping = stage.folder(copy_of_run, "build_vocab_mapping")
    arguments = (mapping, "--verifier", verifier_dir, "--against", faults.checkpoint(copy_of_run))
    assert check(capsys, *arguments)[0] == 0
    faults.d2t_of_another_mapping(copy_of_run)
    code, entries, _ = check(capsys, *arguments)
    assert (code, fails(entries)) == (1, ["draft.d2t"])


def test_against_compares_a_checkpoint_with_a_mapping(copy_of_run, verifier_dir, tmp_path, capsys):
    mapping = Path(shutil.copytree(stage.folder(copy_of_run, "build_vocab_mapping"), tmp_path / "m"))
    arguments = (faults.checkpoint(copy_of_run), "--verifier", verifier_dir, "--against", mapping)
    assert check(capsys, *arguments)[0] == 0
    faults.d2t_of_another_mapping(copy_of_run)
    code, entries, _ = check(capsys, *arguments)
    assert (code, fails(entries)) == (1, ["draft.d2t"])


def test_the_last_samples_are_looked_at_too(copy_of_run, capsys):
    faults.samples(copy_of_run, lambda states, ids: states * float("nan"), only=set(range(32, 40)))
    code, entries, _ = check(capsys, faults.store(copy_of_run))
    assert code == 1
    assert "samples.finite" in fails(entries)


def test_a_lost_result_is_no_healthy_run(copy_of_run, capsys):
    (stage.folder(copy_of_run, "train") / "result.json").unlink()
    code, _, err = check(capsys, copy_of_run)
    assert code == 2
    assert "04_train/result.json is missing, though run.json says that train is done" in err


def test_against_compares_two_drafts(copy_of_run, tmp_path, capsys):
    other = tmp_path / "other.json"
    shutil.copy(faults.checkpoint(copy_of_run) / "config.json", other)
    arguments = (faults.checkpoint(copy_of_run), "--against", other)
    assert check(capsys, *arguments)[0] == 0
    flag = not json.loads(other.read_text())["norm_before_fc"]
    faults.edit(other, norm_before_fc=flag, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    code, entries, _ = check(capsys, *arguments)
    found = next(e for e in entries if e["id"] == "draft.other")
    assert (code, found["verdict"]) == (1, "fail")
    assert "norm_before_fc" in found["observed"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("params.json", "no draft config"),
        ("02_extract_hidden_states/store/store.json", "no draft config"),
        ("02_extract_hidden_states/store/hidden_states/hs_1.safetensors", "one sample file is nothing to compare with"),
        ("03_build_vocab_mapping", "nothing in it bears on"),
    ],
)
def test_against_something_that_says_nothing(finished_run, capsys, other, message):
    code, _, err = check(capsys, faults.store(finished_run), "--against", finished_run / other)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_against_a_run_whose_verifier_is_gone(copy_of_run, verifier_dir, capsys):
    faults.edit(stage.folder(copy_of_run, "preflight") / "result.json", verifier__path="/gone")
    faults.edit(copy_of_run / "params.json", preflight__verifier="/gone")
    draft = faults.checkpoint(copy_of_run)
    assert check(capsys, draft, "--verifier", verifier_dir, "--against", copy_of_run)[0] == 0
    code, _, err = check(capsys, copy_of_run)
    assert code == 2
    assert "--verifier V" in err


def test_a_verifier_that_is_none(finished_run, verifier_dir, tmp_path, capsys):
    draft = faults.checkpoint(finished_run)
    for bad in ("", str(tmp_path), str(finished_run / "00_preflight")):
        code, _, err = check(capsys, draft, "--verifier", bad)
        assert (code, err.count("\n")) == (2, 1)
    bare = Path(shutil.copytree(verifier_dir, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    code, entries, _ = check(capsys, draft, "--verifier", bare)
    verdicts = {e["id"]: e for e in entries}
    assert code == 0  # nothing is wrong with the draft
    assert verdicts["draft.lm_head"]["verdict"] == verdicts["draft.embedding"]["verdict"] == "skip"
    assert "no safetensors file" in verdicts["draft.lm_head"]["observed"]
    assert verdicts["draft.rope_theta"]["verdict"] == "pass"


def test_code_that_a_run_names_is_not_run(copy_of_run, verifier_dir, tmp_path, capsys):
    evil, mark = Path(shutil.copytree(verifier_dir, tmp_path / "evil")), tmp_path / "was-run"
    code = f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig\nclass Own(LlamaConfig): pass\n"
    (evil / "conf.py").write_text(code)
    faults.edit(evil / "config.json", model_type="own", auto_map={"AutoConfig": "conf.Own"})
    record = stage.folder(copy_of_run, "preflight") / "result.json"
    faults.edit(record, verifier__path=str(evil), verifier__trust_remote_code=True)
    check(capsys, copy_of_run)
    assert not mark.exists()
    check(capsys, copy_of_run, "--trust-remote-code")
    assert mark.exists()  # the trap works


@pytest.mark.parametrize("found", [{}, {"verifier": {}}, {"verifier": "x"}, {"verifier": {"path": "/", "odd": 1}}])
def test_a_run_that_names_no_verifier(copy_of_run, capsys, found):
    (stage.folder(copy_of_run, "preflight") / "result.json").write_text(json.dumps(found))
    code, _, err = check(capsys, copy_of_run)
    assert (code, err.count("\n")) == (2, 1)
    assert "names no verifier" in err


@pytest.mark.parametrize(
    "part",
    [
        "02_extract_hidden_states/store", "02_extract_hidden_states/store/hidden_states", "01_prepare_data/rows",
        "03_build_vocab_mapping/token_freq.pt", "00_preflight/result.json", "04_train/checkpoints",
    ],
)  # fmt: skip
def test_links_out_of_a_run_are_reported_and_not_followed(copy_of_run, tmp_path, capsys, part):
    path, away = copy_of_run / part, tmp_path / "away"
    shutil.move(path, away)
    path.symlink_to(away)
    code, entries, err = check(capsys, copy_of_run)
    assert code > 0
    assert "not followed" in err + " ".join(e["observed"] for e in entries if e["verdict"] == "fail")


def test_a_checkpoint_outside_the_run(copy_of_run, capsys):
    faults.edit(stage.folder(copy_of_run, "train") / "result.json", best_checkpoint="../../../..")
    code, _, err = check(capsys, copy_of_run)
    assert code == 2
    assert "leads out of the run directory" in err


def test_a_run_without_its_samples_is_not_called_healthy(copy_of_run, capsys):
    shutil.rmtree(faults.store(copy_of_run) / "hidden_states")
    code, entries, _ = check(capsys, copy_of_run, "--deep")
    assert (code, fails(entries)) == (1, ["samples.readable"])
    verdicts = {e["id"]: e["verdict"] for e in entries}
    for id in ("finite", "constant", "layers", "target_agreement", "dtype", "checksum"):
        assert verdicts[f"samples.{id}"] == "skip"


def test_deep_looks_at_what_is_not_listed(copy_of_run, capsys):
    faults.a_nan(copy_of_run)
    (faults.store(copy_of_run) / "samples.jsonl").write_text("")
    code, entries, _ = check(capsys, faults.store(copy_of_run), "--deep")
    assert (code, fails(entries)) == (1, ["samples.finite", "samples.checksum"])


def test_deep_reads_every_byte(copy_of_run, capsys):
    faults.bytes_changed_but_not_the_size(copy_of_run)
    store = faults.store(copy_of_run)
    assert check(capsys, store)[0] == 0
    code, entries, _ = check(capsys, store, "--deep")
    assert code == 1
    assert [e["id"] for e in entries if e["verdict"] == "fail"] == ["samples.checksum"]


def test_without_room_for_the_verifier_the_rest_is_still_measured(copy_of_run, monkeypatch):
    from eagle3nb.bridges import reference as where

    monkeypatch.setattr(where, "MEMORY_SHARE", 0.0)
    healthy = checks_of(copy_of_run)
    assert healthy["samples.layers"]["verdict"] == "skip"
    assert "does not fit" in healthy["samples.layers"]["observed"]
    assert {healthy[f"samples.{id}"]["verdict"] for id in ("last_state", "shift", "target_agreement")} == {"pass"}
    faults.states_shifted_back(copy_of_run)
    assert checks_of(copy_of_run)["samples.shift"]["verdict"] == "fail"


def test_a_normed_last_state_is_named_without_room_for_the_verifier(copy_of_run, monkeypatch):
    from eagle3nb.bridges import reference as where

    monkeypatch.setattr(where, "MEMORY_SHARE", 0.0)
    faults.last_state_after_the_final_norm(copy_of_run)
    found = checks_of(copy_of_run)["samples.last_state"]
    assert found["verdict"] == "fail"
    assert "already after the final norm" in found["observed"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("last_state_after_the_final_norm", "already after the final norm"),
        ("states_shifted_back", "one position late"),
        ("states_shifted_forward", "one position early"),
        ("mask_of_ones", "loss mask is taken from the chat template"),
        ("mask_from_the_users_turn", "loss mask is taken from the chat template"),
        ("columns_turned_round", "column 0 is the last state, not column 3"),
    ],
)
def test_the_diagnosis_names_the_cause(name, cause, copy_of_run, monkeypatch):
    from eagle3nb.bridges import reference as where

    monkeypatch.setattr(where, "MEMORY_SHARE", 0.0)  # by reading alone
    if name == "columns_turned_round":
        faults.samples(copy_of_run, lambda states, ids: states.flip(1))
    else:
        faults.FAULTS[name][0](copy_of_run)
    found = one_check("samples.target_agreement", opening.of_run(copy_of_run))
    assert found.verdict == "fail"
    assert cause in found.observed


def test_the_diagnosis_names_the_other_norm(finished_run, verifier_dir, tmp_path):
    """The same verifier with w - 1 in its files: right only where it is read as 1 + w."""
    other = changed(verifier_dir, tmp_path)
    weights = load_file(other.path / "model.safetensors")
    weights["model.norm.weight"] -= 1
    save_file(weights, other.path / "model.safetensors", metadata={"format": "pt"})
    found = one_check("samples.target_agreement", opening.of_run(finished_run, other))
    assert found.verdict == "fail"
    assert "the final norm multiplies by 1 + w" in found.observed


# ---- faults that need another verifier, or fewer things at hand, than a finished run has ----------------------

ALONE = {
    "verifier.tensors", "verifier.final_norm", "verifier.end_of_turn", "verifier.vocabulary", "draft.final_norm",
    "samples.hidden_size", "samples.growth", "vocab.coverage", "draft.other",
}  # fmt: skip


def one_check(id: str, a: artefacts.Artefacts) -> registry.Finding:
    return registry.CHECKS[id].function(a)


def changed(verifier_dir: Path, tmp_path: Path, **fields) -> Verifier:
    """A copy of the verifier whose config says something else."""
    folder = Path(shutil.copytree(verifier_dir, tmp_path / "changed"))
    faults.edit(folder / "config.json", **fields)
    return Verifier("changed", folder)


def test_a_verifier_with_the_other_norm_is_stopped_at_once(tmp_path, verifier_dir, finished_run):
    a = opening.of_run(finished_run, changed(verifier_dir, tmp_path, model_type="gemma2", head_dim=64))
    for id in ("verifier.final_norm", "draft.final_norm"):
        found = one_check(id, a)
        assert (found.verdict, "1 + w" in found.observed) == ("fail", True)


def test_a_verifier_whose_config_is_of_another_size(tmp_path, verifier_dir, finished_run):
    a = opening.of_run(finished_run, changed(verifier_dir, tmp_path, hidden_size=256, vocab_size=1000))
    assert one_check("verifier.tensors", a).verdict == "fail"
    assert one_check("samples.hidden_size", a).observed == "128"
    assert one_check("samples.hidden_size", a).verdict == "fail"
    assert "1,024 tokens, 1,000 rows" in one_check("verifier.vocabulary", a).observed
    assert one_check("verifier.vocabulary", a).verdict == "fail"


def test_a_verifier_whose_template_never_ends_a_turn(tmp_path, verifier_dir, finished_run):
    other = changed(verifier_dir, tmp_path)
    template = other.path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<end>"))
    found = one_check("verifier.end_of_turn", opening.of_run(finished_run, other))
    assert found.verdict == "fail"
    assert "with none of them" in found.observed


def test_columns_in_the_wrong_order_can_be_seen_without_the_verifier(copy_of_run):
    faults.samples(copy_of_run, lambda states, ids: states.flip(1))
    a = opening.identify(faults.store(copy_of_run))
    assert one_check("samples.growth", a).verdict == "warn"


def test_rows_of_another_kind_are_not_covered(copy_of_run):
    def row(i: int, row: dict) -> dict:
        start = list(row["loss_mask"]).index(1)
        other = [500 + 2 * i + k for k in range(len(row["input_ids"]) - start)]
        return row | {"input_ids": [*row["input_ids"][:start], *other]} if i % 10 == 0 else row

    faults.rows(faults.store(copy_of_run), row)
    found = one_check("vocab.coverage", opening.of_run(copy_of_run))
    assert (found.verdict, float(found.observed.split()[0]) < 0.5) == ("fail", True)


REFUSED = {
    "nothing-here": "no such file",
    "empty.safetensors": "cut short",
    "text.json": "wanted a JSON object, found none that can be read",
    "list.json": "wanted a JSON object",
    "other.json": "no draft config",
    "counts.pt": "found other keys or values",
    "bools.pt": "wanted a dict of counts or a 1-D integer tensor",
    "huge.pt": "beyond 64 bits",
    "weightless": "found pytorch_model.bin",
    "model": "no fc among its tensors",
    "pipe.safetensors": "no ordinary file",
    "code.pt": "code is not run",
    "object.npy": "no readable .npy",
    "expanded.pt": "larger than the bytes behind it",
    "words.txt": "wanted a run",
    "header.safetensors": "header of",
    "": "wanted a run",
}


@pytest.fixture
def odd_files(tmp_path) -> Path:
    import numpy as np
    import torch

    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "text.json").write_text("{nonsense")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"a": 1}')
    torch.save({"x": Path("/")}, tmp_path / "code.pt")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    torch.save(torch.zeros(1).long().expand(10**12), tmp_path / "expanded.pt")
    (tmp_path / "words.txt").write_text("hello")
    torch.save({1: float("inf")}, tmp_path / "counts.pt")
    torch.save(torch.ones(5, dtype=torch.bool), tmp_path / "bools.pt")
    torch.save({1: 10**30}, tmp_path / "huge.pt")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name, weights in (("weightless", "pytorch_model.bin"), ("model", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"hidden_size": 8}')
        save_file({"model.norm.weight": torch.ones(8)}, tmp_path / name / weights)
    (tmp_path / "header.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(odd_files, capsys, name):
    assert main(["check", str(odd_files / name)]) == 2
    err = capsys.readouterr().err
    assert REFUSED[name] in err
    assert err.count("\n") == 1


def test_reference_in_a_child(finished_run, verifier_dir, monkeypatch):
    monkeypatch.undo()
    from eagle3nb.bridges import reference as where
    from eagle3nb.bridges.store import StoreFiles

    found = where.measure(Verifier("tiny", verifier_dir), StoreFiles(faults.store(finished_run)))
    assert [found.nearest(c)[0] for c in range(4)] == [1, 3, 4, 6]
    assert max(found.nearest(c)[1] for c in range(4)) < 0.01


# ---- in a run ------------------------------------------------------------------------------------------------


def test_stages_leave_their_checks_and_a_fail_stops_the_next(copy_of_run):
    from eagle3nb import params

    entries = json.loads((stage.folder(copy_of_run, "train") / "checks.json").read_text())
    assert {e["verdict"] for e in entries} == {"pass"}
    assert {"id", "title", "verdict", "observed", "expected", "advice"} <= set(entries[0])
    faults.another_eps(copy_of_run)
    settings = params.Train(run_dir=str(copy_of_run))
    with pytest.raises(Exception, match=r"check draft.rms_eps failed: 1e-05; wanted"):
        bridges.stop_on_failure(bridges.cross("train", settings))
    allowed = bridges.cross("train", settings.model_copy(update={"allow": ["draft.rms_eps"]}))
    bridges.stop_on_failure(allowed)
    assert [e["id"] for e in allowed if e.get("allowed")] == ["draft.rms_eps"]
    with pytest.raises(Exception, match=r"no check is called draft.eps; nearest: draft"):
        bridges.cross("train", settings.model_copy(update={"allow": ["draft.eps"]}))


def test_a_stage_whose_checks_failed_is_not_cached(copy_of_run):
    from eagle3nb import params
    from eagle3nb.files import read_json, write_json

    given = params.Params(**read_json(copy_of_run / "params.json")).train
    settings = given.model_copy(update={"run_dir": str(copy_of_run)})
    path = stage.folder(copy_of_run, "train") / "checks.json"
    entries = read_json(path)
    assert stage.is_done("train", settings)
    entries[0]["verdict"] = "fail"
    write_json(path, entries)
    assert not stage.is_done("train", settings)
    assert stage.is_done("train", settings.model_copy(update={"allow": [entries[0]["id"]]}))
    path.unlink()
    assert not stage.is_done("train", settings)


def test_docs_are_current():
    from eagle3nb.bridges import docs

    page = Path(__file__).parent.parent / "docs" / "checks.md"
    assert page.read_text() == docs.markdown(), "run `make docs`"


def test_every_check_says_what_and_why():
    for one in registry.CHECKS.values():
        assert one.measures.endswith("."), one.id
        assert one.why, one.id
        assert one.remedy, one.id
        assert len(one.title) < 80, one.id
