import base64
import re

import pytest
from conftest import ROOT

from eagle3nb import report, stage
from eagle3nb.files import read_json, write_json

OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["'](?!data:|#)([^"']+)|url\((?!data:)|@import|<script""")


@pytest.mark.engine
def test_the_report_has_the_figures_and_no_request_leaves_it(finished_run):
    page = (finished_run / "report.html").read_text()
    headline = read_json(finished_run / "run.json")["headline"]
    assert f"{headline['acceptance_length']:.2f}" in page
    assert f"{headline['speedup']:.2f}" in page
    assert "<td>trust_remote_code</td><td>False</td>" in page
    links = [match.group(1) for match in OUTSIDE.finditer(page)]
    assert links  # to the stages' pages, beside it
    for link in links:
        assert (finished_run / link).is_file()
    assert page.count("<img ") == page.count('alt="')
    assert len(page) < 2_000_000


@pytest.mark.engine
@pytest.mark.parametrize("name", list(stage.READS))
def test_each_notebook_is_one_page_that_needs_nothing_else(finished_run, name):
    page = (stage.folder(finished_run, name) / f"{stage.label(name)}.html").read_text()
    found = [match.group(0) for match in OUTSIDE.finditer(page)]
    assert found == []
    assert "Healthy:" in page
    for image in re.findall(r'<img[^>]*src="data:image/png;base64,\s*([^"]+)"', page):
        assert base64.b64decode(image)[:4] == b"\x89PNG"


def test_a_failed_run_shows_the_log_and_the_way_on(tmp_path):
    stages = [{"name": n, "status": "done", "seconds": 1.0} for n in stage.READS]
    stages[4] = {"name": "train", "status": "failed", "seconds": 2.0, "error": "<b>boom</b>"}
    write_json(
        tmp_path / "run.json", {"run_id": "r", "name": "r", "status": "failed", "stages": stages, "headline": {}}
    )
    folder = stage.folder(tmp_path, "train")
    folder.mkdir()
    (folder / "log.txt").write_text("line\n<script>alert(1)</script>\n")
    page = report.write(tmp_path).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<b>boom" not in page
    assert "--run-dir" in page


def test_verdicts():
    stages = [{"name": n, "status": "done"} for n in stage.READS]
    good = {
        "acceptance_length": 1.7, "speedup": 1.2, "speedup_rounds": [1.1, 1.3], "lossless": True,
        "identical_outputs": 5, "prompts": 5,
    }  # fmt: skip
    assert report.judge({"stages": stages, "headline": good})[0] == "PASS"
    verdict, text = report.judge({"stages": stages, "headline": good | {"lossless": False, "identical_outputs": 4}})
    assert verdict == "FAIL"
    assert "4 of 5" in text
    verdict, text = report.judge({"stages": [*stages[:5], {"name": "evaluate", "status": "pending"}], "headline": {}})
    assert verdict == "INCOMPLETE"
    assert "evaluate" in text
    slow = report.judge({"stages": stages, "headline": good | {"speedup": 0.8, "speedup_rounds": [0.7, 0.9]}})
    assert "slower than without it" in slow[1]


def test_templates_are_shipped_with_the_package():
    assert (ROOT / "eagle3nb" / "templates" / "page.html.j2").is_file()
    assert "templates/*" in (ROOT / "pyproject.toml").read_text()
