"""The notebooks in git: no outputs, parameters that match the models, short cells; and they run by hand."""

import ast
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT

from eagle3nb import params, stage

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STAGE_NOTEBOOKS = [(name, ROOT / "notebooks" / f"{stage.label(name)}.ipynb") for name in params.STAGES]


def parameters_cell(path):
    cells = nbformat.read(path, as_version=4).cells
    found = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(found) == 1
    return found[0].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_no_outputs_no_counts_and_the_kernel_python3(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_short_and_inspections_say_what_is_healthy(path):
    cells = nbformat.read(path, as_version=4).cells
    assert all(len(cell.source.splitlines()) <= 25 for cell in cells if cell.cell_type == "code")
    healthy = [cell for cell in cells if cell.cell_type == "markdown" and "Healthy:" in cell.source]
    assert len(healthy) >= 4


@pytest.mark.parametrize(("name", "path"), STAGE_NOTEBOOKS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_parameters_cell_is_the_model(name, path):
    fields = params.STAGES[name].model_fields
    source = parameters_cell(path)
    declared = {
        node.target.id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign)
    }
    assert declared == {key: field.default for key, field in fields.items()}
    for line, field in zip(source.splitlines(), fields.values(), strict=True):
        assert line.endswith(f"  # {field.description}")


def test_papermill_shows_the_parameters_as_help():
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "--help-notebook", str(STAGE_NOTEBOOKS[4][1])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "epochs: int (default 3)" in done.stdout
    assert "passes over the training rows" in done.stdout


@pytest.mark.engine
def test_bare_papermill_runs_one_notebook(copy_of_run, tmp_path):
    shutil.rmtree(stage.folder(copy_of_run, "build_vocab_mapping"))
    command = [
        sys.executable, "-m", "papermill", "notebooks/03_build_vocab_mapping.ipynb", str(tmp_path / "out.ipynb"),
        "-p", "run_dir", str(copy_of_run), "-p", "draft_vocab_size", "128",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert stage.result(copy_of_run, "build_vocab_mapping")["draft_vocab_size"] == 128


def test_a_wrong_value_is_refused_in_the_notebook(tmp_path):
    command = [
        sys.executable, "-m", "papermill", "notebooks/03_build_vocab_mapping.ipynb", str(tmp_path / "out.ipynb"),
        "-p", "draft_vocab_size", "many",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "draft_vocab_size = 'many'" in done.stderr
    outputs = [o for c in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells for o in c.get("outputs", [])]
    error = next(o for o in outputs if o.output_type == "error")
    assert error.traceback == [f"Refused: {error.evalue}"]  # one line, no traceback
