"""The checks: quiet on a healthy run, and each silent fault named by the check that is there for it."""

import json
import shutil
from pathlib import Path

import faults
import pytest

from eagle3nb import bridges, child, stage
from eagle3nb.bridges import artefacts, registry
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
    return {entry["id"]: entry for entry in registry.run(artefacts.of_run(run, deep=True), bridges)}


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
    assert [e["id"] for e in entries if e["verdict"] == "fail"] == ["draft.layers_of_store"]


def test_against_a_config_gives_a_bare_store_its_layers(copy_of_run, verifier_dir, capsys):
    (faults.store(copy_of_run) / "store.json").unlink()
    config = faults.checkpoint(copy_of_run) / "config.json"
    code, entries, _ = check(capsys, faults.store(copy_of_run), "--verifier", verifier_dir, "--against", config)
    assert code == 0
    assert {e["id"]: e["verdict"] for e in entries}["samples.layers"] == "pass"


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


# ---- faults that need another verifier, or fewer things at hand, than a finished run has ----------------------

ALONE = {
    "verifier.tensors", "verifier.final_norm", "verifier.end_of_turn", "verifier.vocabulary", "draft.final_norm",
    "samples.hidden_size", "samples.growth", "vocab.coverage",
}  # fmt: skip


def one_check(id: str, a: artefacts.Artefacts) -> registry.Finding:
    return registry.CHECKS[id].function(a)


def changed(verifier_dir: Path, tmp_path: Path, **fields) -> Verifier:
    """A copy of the verifier whose config says something else."""
    folder = Path(shutil.copytree(verifier_dir, tmp_path / "changed"))
    faults.edit(folder / "config.json", **fields)
    return Verifier("changed", folder)


def test_a_verifier_with_the_other_norm_is_stopped_at_once(tmp_path, verifier_dir, finished_run):
    a = artefacts.of_run(finished_run, changed(verifier_dir, tmp_path, model_type="gemma2", head_dim=64))
    for id in ("verifier.final_norm", "draft.final_norm"):
        found = one_check(id, a)
        assert (found.verdict, "1 + w" in found.observed) == ("fail", True)


def test_a_verifier_whose_config_is_of_another_size(tmp_path, verifier_dir, finished_run):
    a = artefacts.of_run(finished_run, changed(verifier_dir, tmp_path, hidden_size=256, vocab_size=1000))
    assert one_check("verifier.tensors", a).verdict == "fail"
    assert one_check("samples.hidden_size", a).observed == "128"
    assert one_check("samples.hidden_size", a).verdict == "fail"
    assert "1,024 tokens, 1,000 rows" in one_check("verifier.vocabulary", a).observed
    assert one_check("verifier.vocabulary", a).verdict == "fail"


def test_a_verifier_whose_template_never_ends_a_turn(tmp_path, verifier_dir, finished_run):
    other = changed(verifier_dir, tmp_path)
    template = other.path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<end>"))
    found = one_check("verifier.end_of_turn", artefacts.of_run(finished_run, other))
    assert found.verdict == "fail"
    assert "with none of them" in found.observed


def test_columns_in_the_wrong_order_can_be_seen_without_the_verifier(copy_of_run):
    faults.samples(copy_of_run, lambda states, ids: states.flip(1))
    a = artefacts.identify(faults.store(copy_of_run))
    assert one_check("samples.growth", a).verdict == "warn"


def test_rows_of_another_kind_are_not_covered(copy_of_run):
    def row(i: int, row: dict) -> dict:
        start = list(row["loss_mask"]).index(1)
        other = [500 + 2 * i + k for k in range(len(row["input_ids"]) - start)]
        return row | {"input_ids": [*row["input_ids"][:start], *other]} if i % 10 == 0 else row

    faults.rows(faults.store(copy_of_run), row)
    found = one_check("vocab.coverage", artefacts.of_run(copy_of_run))
    assert (found.verdict, float(found.observed.split()[0]) < 0.5) == ("fail", True)


REFUSED = {
    "nothing-here": "no such file",
    "empty.safetensors": "cut short",
    "text.json": "wanted a JSON object, found none that can be read",
    "list.json": "wanted a JSON object",
    "other.json": "no draft config",
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
