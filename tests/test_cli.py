"""The command line on input of any form: one line, exit code 2, and nothing of the user's written over."""

import json
from pathlib import Path

import pytest

from eagle3nb.cli import main


def refused(capsys, *arguments: object) -> str:
    assert main([str(a) for a in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("eagle3nb: ")
    return lines[0]


def params(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_the_run_directory_is_the_runners(tmp_path, capsys):
    assert "use --run-dir" in refused(capsys, "run", params(tmp_path, "train: {run_dir: x}"))
    assert "use --run-dir" in refused(capsys, "run", params(tmp_path, "train: {}"), "-p", "train.run_dir=x")


def test_places_that_are_files(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for arguments in (
        ("run", params(tmp_path, ""), "--run-dir", tmp_path / "file"),
        ("run", params(tmp_path, ""), "--runs-dir", tmp_path / "file"),
        ("tiny", "llama", tmp_path / "file"),
    ):
        refused(capsys, *arguments)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "record", ["[]", "{}", "5", '{"stages": ["x"]}', '{"stages": null, "name": 3}', '{"stages": [{"name": "what"}]}']
)
def test_runs_of_any_form(record, tmp_path, capsys):
    (tmp_path / "run.json").write_text(record)
    refused(capsys, "report", tmp_path)
    refused(capsys, "report", tmp_path, tmp_path)


def test_a_comparison_replaces_no_other_page(tmp_path, capsys):
    (tmp_path / "mine.html").write_text("mine")
    (tmp_path / "run.json").write_text("{}")
    assert "would be lost" in refused(capsys, "report", tmp_path, tmp_path, "--out", tmp_path / "mine.html")
    assert "would be lost" in refused(capsys, "report", tmp_path, tmp_path, "--out", tmp_path / "report.html")
    assert (tmp_path / "mine.html").read_text() == "mine"


@pytest.mark.parametrize("part", ["²/3", "1", "a/b", "1/0"])
def test_parts_of_a_store(part, tmp_path, capsys):
    assert "wanted K/N" in refused(capsys, "shard", tmp_path, part)


def test_no_ordinary_file(tmp_path, capsys):
    import os

    os.mkfifo(tmp_path / "pipe.json")
    assert "no ordinary file" in refused(capsys, "check", tmp_path / "pipe.json")
    assert "empty path" in refused(capsys, "check", "")


@pytest.mark.parametrize("config", [{}, {"eagle_config": [2]}, {"draft_vocab_size": "abc"}, {"architectures": 3}])
def test_drafts_of_any_form(config, tmp_path, verifier_dir, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(capsys, "import", tmp_path / "config.json", tmp_path / "new", "--verifier", verifier_dir)
    assert not (tmp_path / "new").exists()
