"""Every notebook in a real JupyterLab: opened in Chromium, all cells run, on a copy of a finished run."""

import papermill
import pytest
from conftest import ROOT
from lab import Lab

from eagle3nb import params, stage
from eagle3nb.files import read_json

# What would take long is made short; the rest finds its work done.
SHORT = {"evaluate": {"max_prompts": 2, "num_speculative_tokens": 1, "speed_prompts": 1, "max_new_tokens": 8}}


@pytest.mark.slow
@pytest.mark.engine
def test_every_notebook_runs_in_jupyterlab(copy_of_run, tmp_path):
    project = tmp_path / "project"
    (project / "params").mkdir(parents=True)
    (project / "notebooks").mkdir()
    given = read_json(copy_of_run / "params.json")
    stages = {stage.label(name): given[name] | SHORT.get(name, {}) for name in params.STAGES}
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert set(stages) < set(names)
    for name in names:
        values = stages.get(name, {}) | {"run_dir": str(copy_of_run)}
        papermill.execute_notebook(
            str(ROOT / "notebooks" / f"{name}.ipynb"), str(project / "notebooks" / f"{name}.ipynb"), parameters=values,
            prepare_only=True, progress_bar=False,
        )  # fmt: skip
    with Lab(project, tmp_path) as lab:
        for name in names:
            lab.open(f"notebooks/{name}.ipynb")
            lab.execute("notebook:run-all-cells")
            cells = [cell for cell in lab.notebook()["cells"] if cell["cell_type"] == "code"]
            lab.shutdown()
            errors = [o.get("evalue") for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
            assert errors == [], name
            assert all(cell["execution_count"] for cell in cells), name
            assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 4, name
