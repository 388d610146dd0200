"""Artefacts of other tools, made here from a finished run in each tool's form, and read back."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3nb import build_vocab_mapping, child, foreign, stage
from eagle3nb.cli import main
from eagle3nb.engine import reference
from eagle3nb.errors import Refused
from eagle3nb.samples import Store


@pytest.fixture(autouse=True)
def reference_in_this_process(monkeypatch):
    monkeypatch.setattr(reference, "load", faults.model_for_tests)
    monkeypatch.setattr(child, "run", lambda module, job, folder, **_: reference.compare(job, None))


@pytest.fixture
def verifier(finished_run):
    return stage.verifier(finished_run)


@pytest.fixture
def original(finished_run) -> Store:
    return Store(faults.store(finished_run))


def samples(run: Path, count: int = 8):
    """(number, states [seq, 4, hidden], ids, mask) of some samples of the run."""
    store = Store(faults.store(run))
    data = store.dataset()
    for i in range(count):
        yield i, store.hidden_states(i), data[i]["input_ids"], data[i]["loss_mask"]


def v0(run: Path, folder: Path) -> None:
    for i, states, ids, mask in samples(run):
        value = {"input_ids": ids, "loss_mask": mask, "hidden_state": states[:, :3].flatten(1), "target": states[:, 3]}
        torch.save(value, folder / f"data_{i}.pt")


def v1(run: Path, folder: Path) -> None:
    """As speculators 0.3 wrote it: ids [0, 2, 3] meant outputs, so these are the inputs of [1, 3, 4]."""
    for i, states, ids, mask in samples(run):
        value = {"input_ids": ids, "loss_mask": mask, "hidden_states": [c.clone() for c in states.unbind(1)]}
        torch.save(value, folder / f"data_{i}.pt")


def v09(run: Path, folder: Path) -> None:
    shutil.copytree(faults.store(run), folder, dirs_exist_ok=True)
    for name in ("store.json", "samples.jsonl"):
        (folder / name).unlink()


def specforge(run: Path, folder: Path) -> None:
    """The last state after the final norm, as its target head takes it; some files packed."""
    (folder / "rows_0-5000").mkdir()
    for i, states, ids, mask in samples(run):
        normed = faults.layers(run, ids)[7].to(torch.bfloat16)
        value = {
            "input_ids": ids, "loss_mask": mask, "hidden_state": normed[None],
            "aux_hidden_state": states[:, :3].flatten(1)[None],
        }  # fmt: skip
        path = folder / "rows_0-5000" / f"data_{i}.ckpt"
        torch.save(value, path)
        if i % 2:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()


def modelopt(run: Path, folder: Path) -> None:
    for i, states, ids, _ in samples(run):
        normed = faults.layers(run, ids)[7].to(torch.bfloat16)
        value = {"input_ids": ids, "hidden_states": normed, "aux_hidden_states": states[:, :3].flatten(1)}
        torch.save(value | {"conversation_id": str(i)}, folder / f"{i}.pt")


def conversations_of(run: Path, path: Path) -> Path:
    """The conversations behind the first samples; the template adds a newline after the last end of turn."""
    words = stage.verifier(run).tokenizer
    with open(path, "w") as handle:
        for _, _, ids, mask in samples(run):
            text = words.decode(ids.tolist())
            user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
            answer = words.decode([t for t, m in zip(ids.tolist(), mask.tolist(), strict=True) if m])
            turns = [("user", user), ("assistant", answer.removesuffix("<|im_end|>"))]
            handle.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    return path


FORMATS: dict[str, Callable[[Path, Path], None]] = {
    "speculators-0.3-v0": v0, "speculators-0.3-v1": v1, "speculators-0.9": v09, "specforge": specforge,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_samples_become_a_store_whose_conventions_were_measured(
    name, finished_run, verifier, original, tmp_path, capsys
):
    source, dest = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    FORMATS[name](finished_run, source)
    before = {p: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    assert main(["import", str(source), str(dest), "--verifier", str(verifier.path)]) == 0
    assert {p: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before
    new = Store(dest)
    assert new.info["layer_ids"] == [1, 3, 4, 6]
    assert new.info["imported"]["from"] == name
    for i in (0, 5):
        old, now = original.hidden_states(i).float(), new.hidden_states(i).float()
        assert torch.equal(old[:, :3], now[:, :3])
        assert torch.nn.functional.cosine_similarity(old[:, 3], now[:, 3]).min() > 0.999
        assert original.dataset()[i]["loss_mask"].tolist() == new.dataset()[i]["loss_mask"].tolist()
    capsys.readouterr()
    main(["check", str(dest), "--verifier", str(verifier.path), "--json"])
    verdicts = {e["id"]: e["verdict"] for e in json.loads(capsys.readouterr().out)}
    for id in ("samples.layers", "samples.last_state", "samples.target_agreement", "mask.start", "samples.shift"):
        assert verdicts[id] == "pass", id
    assert "fail" not in verdicts.values()


def test_a_missing_mask_is_rebuilt_from_the_conversations_or_refused(finished_run, verifier, tmp_path, original):
    source, dest = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    modelopt(finished_run, source)
    with pytest.raises(Refused, match="has no loss mask: give the conversations"):
        foreign.import_samples(foreign.source(source), dest, verifier)
    talks = conversations_of(finished_run, tmp_path / "talks.jsonl")
    # Samples of that tool hold the whole rendered conversation, the newline after the end of turn included.
    words = verifier.tokenizer
    for path, line in zip(sorted(source.iterdir(), key=lambda p: int(p.stem)), talks.open(), strict=True):
        full = torch.tensor(words.apply_chat_template(json.loads(line)["messages"], return_dict=False))
        states = faults.layers(finished_run, full).to(torch.bfloat16)
        value = {
            "input_ids": full,
            "hidden_states": states[7],
            "aux_hidden_states": states[[1, 3, 4]].transpose(0, 1).flatten(1),
        }
        torch.save(value, path)
    store = foreign.import_samples(foreign.source(source), tmp_path / "other", verifier, talks=str(talks))
    compared = 0
    for i in range(8):
        old, new = original.dataset()[i], store.dataset()[i]
        n = len(old["input_ids"])
        if new["input_ids"].tolist()[:n] != old["input_ids"].tolist():
            continue  # decoded and encoded again, some texts become other tokens
        compared += 1
        assert new["loss_mask"].tolist()[:n] == old["loss_mask"].tolist()
        assert not any(new["loss_mask"].tolist()[n + 1 :])
    assert compared >= 3


def test_an_interrupted_import_goes_on(finished_run, verifier, tmp_path, monkeypatch):
    source, dest = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    v1(finished_run, source)
    write = Store.write

    def stop(self, i, *rest):
        if i == 4:
            raise KeyboardInterrupt
        write(self, i, *rest)

    monkeypatch.setattr(Store, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        foreign.import_samples(foreign.source(source), dest, verifier)
    first = {p.name: p.stat().st_mtime_ns for p in (dest / "hidden_states").iterdir()}
    assert len(first) == 4
    monkeypatch.setattr(Store, "write", write)
    foreign.import_samples(foreign.source(source), dest, verifier)
    assert len(Store(dest)) == 8
    assert {
        n: t for n, t in ((p.name, p.stat().st_mtime_ns) for p in (dest / "hidden_states").iterdir()) if n in first
    } == first


def test_without_room_for_the_verifier_layers_are_not_guessed(finished_run, verifier, tmp_path, monkeypatch):
    from eagle3nb.bridges import reference as where

    monkeypatch.setattr(where, "MEMORY_SHARE", 0.0)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    v1(finished_run, tmp_path / "a")
    with pytest.raises(Refused, match="give --layer-ids"):
        foreign.measure(foreign.source(tmp_path / "a"), verifier)
    assert not foreign.measure(foreign.source(tmp_path / "a"), verifier, [1, 3, 4]).last_is_normed
    specforge(finished_run, tmp_path / "b")
    assert foreign.measure(foreign.source(tmp_path / "b"), verifier, [1, 3, 4]).last_is_normed


def test_layer_ids_that_are_not_what_the_states_are(finished_run, verifier, tmp_path):
    v1(finished_run, tmp_path)
    with pytest.raises(Refused, match=r"--layer-ids \[0, 2, 3\], but the states are those of \[1, 3, 4\]"):
        foreign.measure(foreign.source(tmp_path), verifier, [0, 2, 3])


def test_states_without_the_last_one(finished_run, verifier, tmp_path):
    v1(finished_run, tmp_path)
    for path in tmp_path.iterdir():
        value = torch.load(path)
        torch.save(value | {"hidden_states": value["hidden_states"][:3]}, path)
    with pytest.raises(Refused, match=r"data_0.pt: 3 layers; wanted 4"):
        foreign.measure(foreign.source(tmp_path), verifier)
    with pytest.raises(Refused, match="the last state is missing"):
        foreign.measure(foreign.source(tmp_path), verifier, [1, 3])


def test_samples_of_four_auxiliary_layers_are_taken_when_named(finished_run, verifier, tmp_path):
    v1(finished_run, tmp_path)
    for path in tmp_path.iterdir():
        value = torch.load(path)
        more = faults.layers(finished_run, value["input_ids"])[5].to(torch.bfloat16)
        states = value["hidden_states"]
        torch.save(value | {"hidden_states": [*states[:3], more, states[3]]}, path)
    with pytest.raises(Refused, match="5 layers; wanted 4"):
        foreign.measure(foreign.source(tmp_path), verifier)
    assert foreign.measure(foreign.source(tmp_path), verifier, [1, 3, 4, 5]).layer_ids == [1, 3, 4, 5, 6]
    value = torch.load(tmp_path / "data_3.pt")
    torch.save(value | {"hidden_states": value["hidden_states"][1:]}, tmp_path / "data_3.pt")
    with pytest.raises(Refused, match=r"data_3.pt: 4 layers; wanted 5"):
        foreign.import_samples(foreign.source(tmp_path), tmp_path / "store", verifier, layer_ids=[1, 3, 4, 5])


def test_two_formats_in_one_directory(finished_run, tmp_path):
    v1(finished_run, tmp_path)
    specforge(finished_run, tmp_path)
    with pytest.raises(Refused, match="two formats in one directory"):
        foreign.source(tmp_path)


def test_a_file_of_another_format_among_the_others(finished_run, verifier, tmp_path):
    v1(finished_run, tmp_path)
    torch.save({"x": torch.zeros(2)}, tmp_path / "data_6.pt")
    with pytest.raises(Refused, match=r"data_6.pt: found no known sample \(x\), wanted speculators-0.3-v1"):
        foreign.import_samples(foreign.source(tmp_path), tmp_path / "store", verifier)


def test_a_sample_of_code(finished_run, tmp_path):
    torch.save({"input_ids": Path("/")}, tmp_path / "data_0.pt")
    with pytest.raises(Refused, match=r"data_0.pt: cannot be read safely .* code is not run"):
        foreign.source(tmp_path)


def test_samples_of_another_verifier(finished_run, verifier, tmp_path):
    v1(finished_run, tmp_path)
    for path in tmp_path.iterdir():
        value = torch.load(path)
        torch.save(value | {"hidden_states": [c[:, :64] for c in value["hidden_states"]]}, path)
    with pytest.raises(Refused, match="the verifier's hidden size"):
        foreign.measure(foreign.source(tmp_path), verifier)


# ---- vocabulary ------------------------------------------------------------------------------------------------


def pair(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(np.load(folder / f"{n}.npy")) for n in ("t2d", "d2t"))


@pytest.fixture
def mapping(finished_run) -> tuple[torch.Tensor, torch.Tensor]:
    return pair(stage.folder(finished_run, "build_vocab_mapping"))


VOCABULARIES = {
    "pt": lambda f, t2d, d2t: (torch.save(t2d, f / "t2d.pt"), torch.save(d2t, f / "d2t.pt"), f)[-1],
    "npy": lambda f, t2d, d2t: (np.save(f / "t2d.npy", t2d.numpy()), np.save(f / "d2t.npy", d2t.numpy()), f)[-1],
    "one file": lambda f, t2d, d2t: (torch.save({"d2t": d2t, "t2d": t2d}, f / "vocab.pt"), f / "vocab.pt")[-1],
    "ids": lambda f, t2d, d2t: (
        (f / "ids.json").write_text(json.dumps(t2d.nonzero().flatten().tolist())), f / "ids.json")[-1],
    "d2t of ids": lambda f, t2d, d2t: (
        torch.save(t2d, f / "t2d.pt"), torch.save(t2d.nonzero().flatten(), f / "d2t.pt"), f / "d2t.pt")[-1],
    "t2d alone": lambda f, t2d, d2t: (torch.save(t2d, f / "t2d.pt"), f / "t2d.pt")[-1],
}  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
def test_mappings_in_every_form_become_the_same_pair(name, mapping, verifier, tmp_path):
    (tmp_path / "a").mkdir()
    path = VOCABULARIES[name](tmp_path / "a", *mapping)
    assert main(["import", str(path), str(tmp_path / "b"), "--verifier", str(verifier.path)]) == 0
    t2d, d2t = pair(tmp_path / "b")
    assert torch.equal(t2d, mapping[0])
    assert torch.equal(d2t, mapping[1])


@pytest.mark.parametrize("as_tensor", [True, False])
def test_counts_become_a_mapping(as_tensor, finished_run, mapping, verifier, tmp_path):
    counts = torch.load(stage.folder(finished_run, "build_vocab_mapping") / "token_freq.pt")
    if as_tensor:
        table = torch.zeros(verifier.vocab_size, dtype=torch.long)
        table[list(counts)] = torch.tensor(list(counts.values()))
        counts = table
    torch.save(counts, tmp_path / "freq.pt")
    with pytest.raises(Refused, match="--draft-vocab-size"):
        foreign.import_vocabulary(tmp_path / "freq.pt", tmp_path / "b", verifier)
    foreign.import_vocabulary(tmp_path / "freq.pt", tmp_path / "b", verifier, len(mapping[1]))
    seen = torch.load(stage.folder(finished_run, "build_vocab_mapping") / "token_freq.pt")
    special, size = verifier.special_token_ids, len(mapping[1])
    assert torch.equal(pair(tmp_path / "b")[0], build_vocab_mapping.build(seen, size, verifier.vocab_size, special)[0])


def test_mapping_of_another_verifier(verifier, tmp_path):
    t2d = torch.zeros(163840, dtype=torch.bool)
    t2d[100_000:132_000] = True
    torch.save(t2d, tmp_path / "t2d.pt")
    with pytest.raises(Refused, match="t2d has 163,840 entries; the verifier has 1,024 tokens"):
        foreign.import_vocabulary(tmp_path, tmp_path / "b", verifier)


def test_d2t_alone_that_can_be_read_two_ways(mapping, verifier, tmp_path):
    torch.save(mapping[0].nonzero().flatten(), tmp_path / "d2t.pt")
    with pytest.raises(Refused, match="as ids and as offsets; give t2d"):
        foreign.import_vocabulary(tmp_path / "d2t.pt", tmp_path / "b", verifier)


def test_ids_are_kept_by_the_imported_store(finished_run, verifier, tmp_path):
    v1(finished_run, tmp_path)
    store = foreign.import_samples(foreign.source(tmp_path), tmp_path / "store", verifier)
    file = load_file(store.sample_path(3))
    assert file["token_ids"].tolist() == store.dataset()[3]["input_ids"].tolist()


# ---- the notebook ----------------------------------------------------------------------------------------------


def older_artefacts(run: Path, folder: Path) -> Path:
    """A directory as an older pipeline left it: v1 samples, a legacy draft config, d2t of ids."""
    (folder / "samples").mkdir(parents=True)
    v1(run, folder / "samples")
    t2d, d2t = pair(stage.folder(run, "build_vocab_mapping"))
    torch.save(t2d, folder / "t2d.pt")
    torch.save(t2d.nonzero().flatten(), folder / "d2t.pt")
    (folder / "draft_config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 128, "vocab_size": 1024,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "draft_vocab_size": len(d2t), "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True},
    }))  # fmt: skip
    return folder


def test_older_artefacts_are_found_and_judged(finished_run, verifier, tmp_path):
    from eagle3nb import explore_foreign as explore

    settings = explore.ExploreForeign(
        path=str(older_artefacts(finished_run, tmp_path / "old")), verifier=str(verifier.path)
    )
    found = explore.look(settings)
    assert dict(found.rows())["samples"] == "8 of speculators-0.3-v1"
    assert explore.convention(found, settings)["columns are the inputs of layers"] == [1, 3, 4]
    fields = {row[0]: row[1:] for row in explore.assumed(found, settings)}
    assert fields["norm_before_residual"][:3] == ("absent", False, True)
    assert fields["rms_norm_eps"][0] == 1e-5
    bad = {e["id"] for e in explore.verdicts(found, settings) if e["verdict"] == "fail"}
    assert bad == {"vocab.offsets", "draft.rms_eps", "draft.layer_convention"}


@pytest.mark.engine
def test_the_notebook_runs_by_papermill(finished_run, verifier, tmp_path, monkeypatch):
    import papermill
    from conftest import ROOT

    monkeypatch.undo()
    old = older_artefacts(finished_run, tmp_path / "old")
    out = papermill.execute_notebook(
        str(ROOT / "notebooks" / "explore_foreign.ipynb"), str(tmp_path / "out.ipynb"), cwd=str(ROOT),
        parameters={"path": str(old), "verifier": str(verifier.path)}, progress_bar=False,
    )  # fmt: skip
    cells = [cell for cell in out.cells if cell.cell_type == "code"]
    assert all(o.output_type != "error" for cell in cells for o in cell.outputs)
    assert sum(bool(cell.outputs) for cell in cells) == len(cells) - 3  # the given and the injected parameters, imports
    assert "not their offsets" in str(cells[-1].outputs)


# ---- drafts ----------------------------------------------------------------------------------------------------


def test_a_legacy_config_is_imported_with_layers_that_are_said(finished_run, verifier, tmp_path, capsys):
    old = older_artefacts(finished_run, tmp_path / "old") / "draft_config.json"
    arguments = ["import", str(old), str(tmp_path / "new"), "--verifier", str(verifier.path)]
    assert main(arguments) == 2
    assert "its layer ids [0, 2, 3] mean inputs of layers to vLLM and outputs" in capsys.readouterr().err
    assert main([*arguments, "--layer-ids", "1,3,4"]) == 0
    assert "norm_before_residual" in capsys.readouterr().out  # defaulted, and said so
    assert main(["check", str(tmp_path / "new" / "config.json"), "--verifier", str(verifier.path), "--json"]) == 1
    found = {e["id"]: e["verdict"] for e in json.loads(capsys.readouterr().out)}
    assert {id for id, verdict in found.items() if verdict == "fail"} == {"draft.rms_eps"}
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_a_checkpoint_of_the_other_naming_comes_back_bit_for_bit(copy_of_run, verifier, tmp_path):
    mine = faults.checkpoint(copy_of_run)
    assert main(["export", str(mine), str(tmp_path / "sglang"), "--to", "sglang", "--anyway"]) == 0
    arguments = ["import", str(tmp_path / "sglang"), str(tmp_path / "back"), "--verifier", str(verifier.path)]
    assert main([*arguments, "--layer-ids", "1,3,4"]) == 0
    before, after = load_file(mine / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---- what must not be lost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dest", ["source", "source/inside", "full", "file"])
def test_import_writes_over_nothing(dest, finished_run, verifier, tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    v1(finished_run, source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["import", str(source), str(tmp_path / dest), "--verifier", str(verifier.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_two_sources_are_not_mixed(finished_run, verifier, tmp_path, monkeypatch):
    from eagle3nb.foreign import samples

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        v1(finished_run, tmp_path / name)
    a, b = (torch.load(tmp_path / "two" / f"data_{i}.pt") for i in (0, 1))
    torch.save(b, tmp_path / "two" / "data_0.pt"), torch.save(a, tmp_path / "two" / "data_1.pt")
    foreign.import_samples(foreign.source(tmp_path / "one"), tmp_path / "store", verifier)
    declared = Store(tmp_path / "store").info
    monkeypatch.setattr(samples, "sha256_json", lambda *_: declared["data_sha256"])  # same names and sizes
    with pytest.raises(Refused, match="holds another sample 0"):
        foreign.import_samples(foreign.source(tmp_path / "two"), tmp_path / "store", verifier)


def test_forms_of_a_mapping_that_disagree(mapping, verifier, tmp_path, capsys):
    VOCABULARIES["npy"](tmp_path, *mapping)
    other = mapping[0].clone()
    other[mapping[0].nonzero()[3]] = False
    torch.save(other, tmp_path / "t2d.pt")
    assert main(["check", str(tmp_path)]) == 2
    assert "t2d.npy and t2d.pt disagree" in capsys.readouterr().err
