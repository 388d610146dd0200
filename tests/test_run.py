"""The runner: the whole chain through papermill, caching, failing, stopping; and the command line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_extract_hidden_states import wait_for

from eagle3nb import run, stage
from eagle3nb.cli import main
from eagle3nb.files import read_json
from eagle3nb.params import STAGES


@pytest.mark.engine
def test_all_stages_are_done_and_on_record(finished_run):
    record = read_json(finished_run / "run.json")
    assert record["status"] == "done"
    assert [s["name"] for s in record["stages"]] == list(STAGES)
    assert all(s["status"] == "done" and s["seconds"] > 0 for s in record["stages"])
    for name in ("extract_hidden_states", "train", "evaluate"):
        entry = next(s for s in record["stages"] if s["name"] == name)
        assert entry["peak_rss_mib"] > 100
        assert entry["exit"] == 0
    headline = record["headline"]
    assert headline["acceptance_length"] == stage.result(finished_run, "evaluate")["acceptance_length"]
    assert headline["lossless"] is True
    for name in STAGES:
        folder = stage.folder(finished_run, name)
        assert (folder / f"{stage.label(name)}.ipynb").is_file()
        assert (folder / f"{stage.label(name)}.html").is_file()
    assert (finished_run / "report.html").is_file()


@pytest.mark.engine
def test_the_draft_of_the_shared_run_is_accepted(finished_run):
    """The tiny verifier repeats itself, so even a draft of seconds is of use; none accepted: a broken chain."""
    result = stage.result(finished_run, "evaluate")
    assert result["acceptance_by_position"][0] > 0.05


@pytest.mark.engine
def test_running_it_again_does_nothing(copy_of_run, params_file, capsys):
    assert main(["run", str(params_file), "--run-dir", str(copy_of_run)]) == 0
    out = capsys.readouterr().out
    statuses = {s["name"]: s["status"] for s in read_json(copy_of_run / "run.json")["stages"]}
    assert statuses.pop("preflight") == "done"  # the machine may have changed
    assert set(statuses.values()) == {"cached"}
    figures = stage.result(copy_of_run, "evaluate")
    assert f"{figures['acceptance_length']:.2f}" in out
    assert "accepted by position" in out
    assert "identical outputs" in out
    assert re.search(r"report: .*report.html", out)


@pytest.mark.engine
def test_a_changed_parameter_runs_that_stage_and_what_reads_it(copy_of_run, params_file):
    arguments = ["run", str(params_file), "--run-dir", str(copy_of_run), "--until", "train"]
    assert main([*arguments, "-p", "build_vocab_mapping.draft_vocab_size=500", "-p", "train.epochs=1"]) == 0
    statuses = {s["name"]: s["status"] for s in read_json(copy_of_run / "run.json")["stages"]}
    assert statuses["extract_hidden_states"] == "cached"
    assert statuses["build_vocab_mapping"] == statuses["train"] == "done"
    assert stage.result(copy_of_run, "train")["draft_vocab_size"] == 500
    assert statuses["evaluate"] == "pending"  # what it left was made with another draft
    record = read_json(copy_of_run / "run.json")
    assert record["status"] == "incomplete"
    assert record["headline"] == {}
    page = (copy_of_run / "report.html").read_text()
    assert "Still to be run: evaluate." in page
    assert "predicted against served" not in page


def test_a_failing_stage_stops_the_run_and_says_why(tmp_path, params_file, capsys):
    arguments = ["run", str(params_file), "--run-dir", str(tmp_path / "r"), "--until", "extract_hidden_states"]
    assert main([*arguments, "-p", "extract_hidden_states.layer_ids=[9]"]) == 1
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert "stage extract_hidden_states failed: extract_hidden_states.layer_ids = [9]" in line
    assert "go on with: eagle3nb run --run-dir" in line
    record = read_json(tmp_path / "r" / "run.json")
    assert record["status"] == "failed"
    assert [s["status"] for s in record["stages"]] == ["done", "done", "failed", "pending", "pending", "pending"]
    report = (tmp_path / "r" / "report.html").read_text()
    assert "FAIL" in report
    assert "layer_ids = [9]" in report


def test_the_runner_keeps_a_list_of_runs_and_room_for_notes(tmp_path, monkeypatch):
    def fail(*_):
        listed.append(">running<" in (runs / "index.html").read_text())
        raise run.StageFailed("boom")

    runs, listed = tmp_path / "runs", []
    monkeypatch.setattr(run, "_execute", fail)
    with pytest.raises(run.StageFailed):
        run.run(str(ROOT / "params" / "smoke.yaml"), overrides=["train.epochs=2"], runs_dir=str(runs))
    folder = next(runs.glob("smoke-*"))
    index = (runs / "index.html").read_text()
    assert f'href="{folder.name}/report.html"' in index
    assert ">FAIL<" in index
    assert ">running<" not in index
    (folder / "notes.md").write_text("mine")
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    with pytest.raises(run.StageFailed):
        run.run(None, run_dir=str(folder), runs_dir=str(runs), overrides=["train.lr=1e-4"])
    record = read_json(folder / "run.json")
    assert record["overrides"] == ["train.epochs=2", "train.lr=1e-4"]
    assert len(record["commands"]) == 2
    assert record["made_with"]["packages"]["papermill"]
    assert (folder / "notes.md").read_text() == "mine"
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(run.StageFailed):
        run.run(str(ROOT / "params" / "smoke.yaml"), run_dir=str(elsewhere))
    assert listed == [True, True, False]  # listed from the start; the last run is not one of these
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "params/smoke.yaml", "-p", "train.epoch=1"], "train.epoch: unknown key; nearest: epochs"),
        (["run", "params/smoke.yaml", "-p", "train.lr=fast"], "train.lr"),
        (["run", "params/smok.yaml"], "nearest: params/smoke.yaml"),
        (["run", "params/smoke.yaml", "--from", "trian"], "--from trian: unknown stage; nearest: train"),
        (["run", "params/smoke.yaml", "--from", "train", "--until", "preflight"], "comes after"),
        (["run"], "give a params file, or --run-dir"),
        (["run", "params/smoke.yaml", "-p", "train.trainer_args.token=x"], "train.trainer_args.token looks like a"),
        (["report", "params"], "this is no run directory"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_starts(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "_execute", lambda *_: pytest.fail("a kernel was started"))
    where = ["--runs-dir", str(tmp_path / "runs")] if arguments[0] == "run" else []
    assert main([*arguments, *where]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("eagle3nb: ")
    assert message in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_goes_on_in_another_place(finished_run, verifier_dir, tmp_path, capsys):
    """As on another machine: the run is copied, it and the verifier lie elsewhere, the old places are gone."""
    first = tmp_path / "first"
    shutil.copytree(verifier_dir, first / "verifier")
    shutil.copytree(finished_run, first / "run", symlinks=True)
    params = read_json(first / "run" / "params.json")
    params["preflight"]["verifier"] = "verifier"  # found from where the command is run
    (first / "run" / "params.json").write_text(json.dumps(params))
    before = stage.result(first / "run", "train")["checkpoint_sha256"]
    second = tmp_path / "second"
    shutil.copytree(first, second, symlinks=True)
    first.rename(tmp_path / "gone")
    last = stage.folder(second / "run", "train") / "checkpoints" / "1"
    (stage.folder(second / "run", "train") / "result.json").unlink()
    command = [sys.executable, "-m", "eagle3nb", "run", "--run-dir", "run", "--until", "train"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    written = last.stat().st_mtime_ns
    done = subprocess.run(command, cwd=second, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    statuses = {s["name"]: s["status"] for s in read_json(second / "run" / "run.json")["stages"]}
    assert [statuses[name] for name in ("prepare_data", "extract_hidden_states", "build_vocab_mapping")] == [
        "cached"
    ] * 3
    assert statuses["train"] == "done"
    # Training went on from its checkpoints instead of beginning anew.
    assert last.stat().st_mtime_ns == written
    assert stage.result(second / "run", "train")["checkpoint_sha256"] == before
    assert stage.verifier(second / "run").path == second / "verifier"


@pytest.mark.engine
@pytest.mark.slow
def test_make_smoke_gets_to_its_end(tmp_path, capsys):
    """The params file of the README's second command, with the real small model."""
    assert main(["run", str(ROOT / "params" / "smoke.yaml"), "--runs-dir", str(tmp_path)]) == 0
    assert "PASS: The draft yields" in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.slow
def test_ctrl_c_stops_the_child_and_the_same_command_goes_on(copy_of_run, params_file):
    shutil.rmtree(stage.folder(copy_of_run, "train"))
    shutil.rmtree(stage.folder(copy_of_run, "evaluate"))
    command = [
        sys.executable, "-m", "eagle3nb", "run", str(params_file), "--run-dir", str(copy_of_run), "--until", "train",
        "-p", "train.epochs=10", "-p", "train.tokens_per_step=64",
    ]  # fmt: skip
    folder = stage.folder(copy_of_run, "train")
    runner = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True,
        # A test run in the background of a shell ignores SIGINT, and so would everything it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 8)
    child = read_json(folder / "child.json")["pid"]
    os.killpg(runner.pid, signal.SIGINT)
    _, errors = runner.communicate(timeout=90)
    assert runner.returncode == 130
    assert "run the same directory again to go on" in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
    assert not os.path.exists(f"/proc/{child}") or time.sleep(1) or not os.path.exists(f"/proc/{child}")
    record = read_json(copy_of_run / "run.json")
    assert record["status"] == "interrupted"
    assert record["stages"][4]["status"] == "interrupted"
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"train"' in line]
    assert steps == list(range(len(steps)))


def test_two_runs_in_one_directory(tmp_path, params_file):
    from filelock import FileLock

    from eagle3nb.errors import Refused

    (tmp_path / "r").mkdir()
    with FileLock(tmp_path / "r" / ".lock"), pytest.raises(Refused, match="another run is at work"):
        run.run(str(params_file), run_dir=str(tmp_path / "r"))
