"""The pages that people read, looked at in a browser: of a real run, and of runs made up to be awkward."""

import base64
import os
import re

import pytest
from conftest import ROOT

from eagle3nb import evaluate, report, show, stage
from eagle3nb.cli import main
from eagle3nb.files import read_json, write_json, write_text
from eagle3nb.report import page as pages
from eagle3nb.report import verdict
from eagle3nb.text import visible

OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["'](?!data:|#)([^"']+)|url\((?!data:)|@import|<script""")
GOOD = {
    "acceptance_length": 1.7, "acceptance_by_position": [0.5, 0.2], "speedup": 1.2, "speedup_rounds": [1.1, 1.3],
    "baseline_tokens_per_s": 10.0, "spec_tokens_per_s": 12.0, "lossless": True, "identical_outputs": 5, "prompts": 5,
    "num_speculative_tokens": 2,
}  # fmt: skip
HOSTILE = [
    "<script>document.title = 'owned'</script>", "\" onmouseover=\"document.title='owned'", "</code></table>",
    "\x00\x1b[31m", "\u202egnp.exe", "\u200b\u2066", "\\xf0\\x9f", "&lt;b&gt;", "{{ 7 * 7 }}",
]  # fmt: skip


def made_up(folder, *, headline=None, statuses=("done",) * 6, **fields):
    """A run directory that holds nothing but ``run.json`` and ``params.json``."""
    stages = [{"name": n, "status": s, "seconds": 1.0} for n, s in zip(stage.READS, statuses, strict=True)]
    run = {
        "run_id": folder.name, "name": "made-up", "params_file": "params/x.yaml", "overrides": [],
        "command": "eagle3nb run", "version": "0", "started": "2026-01-01T00:00:00+00:00", "status": "done",
        "stages": stages, "headline": headline or {},
    }  # fmt: skip
    write_json(folder / "run.json", run | fields)
    write_json(folder / "params.json", {"name": "made-up"})
    return folder


def a_check(id, verdict, **fields):
    empty = {"title": f"title of {id}", "observed": 0.5, "expected": "at least 0.9", "advice": f"advice for {id}"}
    return {"id": id, "verdict": verdict, **empty, **fields}


def looked_at(tab, file, **how):
    """Open a page and hold what is true of every one: quiet, alone, one title, pictures that show and say something."""
    tab.open(file, **how)
    assert tab.console == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [file.resolve().as_uri()]
    assert tab.js("document.querySelectorAll('h1').length") == 1
    assert tab.js("[...document.images].every(i => i.naturalWidth > 0 && i.alt.length > 20)")
    return tab


# ---- of a real run ---------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_report_has_the_figures_and_no_request_leaves_it(finished_run, browser):
    file = finished_run / "report.html"
    tab = looked_at(browser, file)
    headline = read_json(finished_run / "run.json")["headline"]
    text = tab.js("document.body.innerText")
    for figure in ("acceptance_length", "speedup", "baseline_tokens_per_s", "spec_tokens_per_s"):
        digits = 1 if "per_s" in figure else 2
        assert f"{headline[figure]:.{digits}f}" in text
    assert "small verifier" in tab.js("document.title")
    assert text.startswith("tiny (small verifier)")
    assert tab.js("document.images.length") >= 6
    links = tab.js("[...document.links].map(a => a.getAttribute('href')).filter(h => !h.startsWith('#'))")
    assert any(link.endswith("05_evaluate.html") for link in links)
    assert any(link.endswith("plots/accuracy.json") for link in links)
    assert all((finished_run / link).is_file() for link in links)
    assert file.stat().st_size < 2_000_000
    shas = [
        stage.result(finished_run, "train")["checkpoint_sha256"],
        *stage.result(finished_run, "build_vocab_mapping")["sha256"].values(),
    ]
    assert all(sha in file.read_text() for sha in shas)


@pytest.mark.engine
def test_the_report_follows_screen_paper_and_keyboard(finished_run, browser):
    file = finished_run / "report.html"
    colour = "getComputedStyle(document.body).backgroundColor"
    light = looked_at(browser, file).js(colour)
    assert looked_at(browser, file, dark=True).js(colour) != light
    assert looked_at(browser, file, dark=True, media="print").js(colour) == light  # paper is white
    assert looked_at(browser, file, width=390).js("document.documentElement.scrollWidth") <= 390
    tab = looked_at(browser, file)
    assert tab.pdf()[:5] == b"%PDF-"
    for _ in range(200):
        tab.press("Tab", 9)
        if tab.js("document.activeElement.textContent.trim()") == "Prompt, and step by step":
            break
    assert tab.js("document.activeElement.parentElement.open") is False
    tab.press("Enter", 13)
    assert tab.js("document.activeElement.parentElement.open") is True


@pytest.mark.engine
def test_the_draft_at_work_is_what_was_served(finished_run, browser):
    number = stage.result(finished_run, "evaluate")["num_speculative_tokens"]
    recorded = [r for r in evaluate.responses(finished_run) if "texts" in r]
    tab = looked_at(browser, finished_run / "report.html")
    assert tab.js("document.querySelectorAll('.e3-strip').length") == len(recorded) == evaluate.RECORDED_PROMPTS
    rows = tab.js("[...document.querySelectorAll('.e3-steps')].map(d => d.querySelectorAll('tbody tr').length)")
    assert rows == [len(r["with_draft"][str(number)]["steps"]) for r in recorded]
    rejected = tab.js("document.querySelectorAll('td .e3-rejected').length")
    accepted = tab.js("document.querySelectorAll('td .e3-accepted').length")
    drafted = sum(len(d) for r in recorded for d in r["with_draft"][str(number)]["drafts"])
    # A response that ends inside accepted tokens leaves draft tokens that nobody judged.
    assert 0 < rejected <= drafted
    assert drafted - number * len(recorded) <= rejected + accepted <= drafted


@pytest.mark.engine
def test_the_run_is_on_record(finished_run, browser):
    run = read_json(finished_run / "run.json")
    made = run["made_with"]
    assert made["packages"]["papermill"]
    assert made["commit"] is None or re.fullmatch("[0-9a-f]{40}", made["commit"])
    text = looked_at(browser, finished_run / "report.html").js("document.body.innerText")
    assert (made["commit"] or "not recorded") in text
    assert "params.json" in text


@pytest.mark.engine
@pytest.mark.parametrize("name", list(stage.READS))
def test_each_notebook_is_one_page_that_needs_nothing_else(finished_run, browser, name):
    file = stage.folder(finished_run, name) / f"{stage.label(name)}.html"
    looked_at(browser, file)
    text = file.read_text()
    assert OUTSIDE.findall(text) == ["../report.html"]  # the way back, no request
    assert "Healthy:" in text
    for image in re.findall(r'<img[^>]*src="data:image/png;base64,\s*([^"]+)"', text):
        assert base64.b64decode(image)[:4] == b"\x89PNG"


@pytest.mark.engine
def test_a_comparison_shows_what_differs(finished_run, copy_of_run, browser, capsys):
    params = read_json(copy_of_run / "params.json")
    params["train"]["epochs"] = 77
    write_json(copy_of_run / "params.json", params)
    result = stage.result(copy_of_run, "evaluate")
    write_json(stage.folder(copy_of_run, "evaluate") / "result.json", result | {"acceptance_length": 9.0})
    out = copy_of_run.parent / "sub" / "both.html"
    assert main(["report", str(finished_run), str(copy_of_run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip().endswith("both.html")
    tab = looked_at(browser, out)
    assert looked_at(browser, out, width=390).js("document.documentElement.scrollWidth") <= 390
    text = tab.js("document.body.innerText")
    assert "train.epochs" in text
    assert "77" in text
    assert "train.lr" not in text
    assert f"9.00 (+{9 - result['acceptance_length']:.2f})" in text
    assert tab.js("document.images.length") == 5
    links = tab.js("[...document.links].map(a => a.getAttribute('href'))")
    assert links
    assert all((out.parent / link).is_file() for link in links)


# ---- of made-up runs -------------------------------------------------------------------------------------------


def test_a_failed_run_shows_the_log_and_the_way_on(tmp_path, browser):
    made_up(tmp_path, statuses=["done"] * 4 + ["failed", "pending"])
    run = read_json(tmp_path / "run.json")
    run["stages"][4] |= {"error": "<b>boom</b>"}
    write_json(tmp_path / "run.json", run)
    log = "line\n<script>document.title = 'owned'</script>\n"
    log += "\x1b[2;36mcoloured\x1b[0m \x1b]8;id=1;file:///x\x1b\\link   \n"
    write_text(stage.folder(tmp_path, "train") / "log.txt", log)
    for name, old in (("live", False), ("loss", True)):
        show.curves(
            stage.folder(tmp_path, "train"), name, {name: ([0, 1], [2.0, 1.0])}, f"Title {name}", "step", "loss"
        )
        if old:  # of an earlier attempt
            os.utime(stage.folder(tmp_path, "train") / "plots" / f"{name}.png", (0, 0))
    write_json(stage.folder(tmp_path, "evaluate") / "checks.json", [a_check("served.old", "fail")])
    tab = looked_at(browser, report.write(tmp_path))
    assert tab.js("document.title") == "made-up: FAIL"
    text = tab.js("document.body.innerText")
    assert "The stage train failed: <b>boom</b>" in text
    assert "document.title = 'owned'</script>\ncoloured link\n" in text, text
    assert f"eagle3nb run --run-dir {tmp_path}" in text
    assert tab.js("[...document.images].map(i => i.alt)") == ["Title live: loss over step; live from 2 to 1"]
    assert "served.old" not in text
    assert "Not finished: train, evaluate." in text


@pytest.mark.parametrize(
    "statuses", [["running"] + ["pending"] * 5, ["done", "interrupted"] + ["pending"] * 4, ["pending"] * 6]
)
def test_an_unfinished_run_has_a_report(tmp_path, browser, statuses):
    tab = looked_at(browser, report.write(made_up(tmp_path, statuses=statuses)))
    assert "INCOMPLETE" in tab.js("document.title")
    assert "evaluate" in tab.js("document.querySelector('.verdict').innerText")


def test_hostile_tokens_are_text(tmp_path, browser):
    made_up(tmp_path, headline=GOOD)
    ids = range(len(HOSTILE))
    response = {
        "id": HOSTILE[0], "kind": HOSTILE[1], "text": "".join(HOSTILE),
        "texts": {str(i): text for i, text in enumerate(HOSTILE)},
        "with_draft": {"2": {
            "tokens": list(ids), "steps": [1] * len(ids), "drafts": [[(i + 1) % len(ids), i] for i in ids],
        }},
    }  # fmt: skip
    write_json(stage.folder(tmp_path, "evaluate") / "responses.json", [response])
    figures = {"num_speculative_tokens": 2, "prompts": 5, "concurrency": 1}
    write_json(stage.folder(tmp_path, "evaluate") / "result.json", figures)
    tab = looked_at(browser, report.write(tmp_path))
    assert tab.js("document.title") == "made-up: PASS"
    assert tab.js("document.scripts.length") == 0
    assert tab.js("document.querySelectorAll('[onmouseover]').length") == 0
    strip = tab.js("document.querySelector('.e3-strip').innerText")
    assert strip == "".join(visible(text) for text in HOSTILE)
    for sign in ("⟨U+202E⟩", "⟨U+0000⟩", "⟨U+001B⟩", "⟨U+200B⟩", "⟨U+2066⟩", "\\xf0\\x9f", "&lt;b&gt;", "{{ 7 * 7 }}"):
        assert sign in strip
    assert not re.search("[\x00\x1b\u202e\u200b\u2066]", tab.js("document.documentElement.outerHTML"))
    rows = tab.js("document.querySelectorAll('.e3-steps tbody tr').length")
    assert rows == len(HOSTILE)
    titles = tab.js("[...document.querySelectorAll('.e3-step')].map(s => s.title)")
    assert 'rejected «"·onmouseover=' in titles[0]


def test_checks_decide_and_are_shown_by_bridge(tmp_path, browser):
    made_up(tmp_path, headline=GOOD)
    write_json(
        stage.folder(tmp_path, "extract_hidden_states") / "checks.json",
        [a_check("samples.finite", "pass"), a_check("samples.layer_identity", "skip"), a_check("samples.cut", "warn")],
    )
    mapping = stage.folder(tmp_path, "build_vocab_mapping") / "checks.json"
    write_json(mapping, [a_check("vocab.offsets", "fail", allowed=True)])
    _, found, sentence = report.summary(tmp_path)
    assert found == "PASS"
    assert "Let through although it failed: vocab.offsets" in sentence
    tab = looked_at(browser, report.write(tmp_path))
    shown = tab.js("document.body.innerText")  # what is folded is not in it
    assert "advice for samples.cut" in shown
    assert "advice for vocab.offsets" in shown
    assert "let through" in shown
    assert "title of samples.finite" not in shown
    assert "Skipped: title of samples.layer_identity (samples.layer_identity): 0.5." in shown
    colour = "getComputedStyle(document.querySelector('.mark.{}')).color"
    assert tab.js(colour.format("skip")) != tab.js(colour.format("pass"))
    write_json(mapping, [a_check("vocab.offsets", "fail")])
    _, found, sentence = report.summary(tmp_path)
    assert found == "FAIL"
    assert sentence.startswith("The check vocab.offsets failed: observed 0.5, expected at least 0.9.")
    assert "FAIL" in looked_at(browser, report.write(tmp_path)).js("document.title")


def test_notes_are_the_authors_own(tmp_path, browser, capsys):
    made_up(tmp_path, headline=GOOD)
    report.start_notes(tmp_path)
    assert "None yet." in looked_at(browser, report.write(tmp_path)).js("document.body.innerText")
    notes = "# Heading\n\n**bold** <img src=x onerror=alert(1)>\n"
    notes += "![far](http://example.com/a.png) [js](javascript:alert(1))\n"
    write_text(tmp_path / "notes.md", notes)
    report.start_notes(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    tab = looked_at(browser, tmp_path / "report.html")
    assert tab.js("document.querySelector('.notes strong').innerText") == "bold"
    assert tab.js("document.querySelector('.notes h3').innerText") == "Heading"
    assert tab.js("document.querySelectorAll('.notes img').length") == 0
    assert "<img src=x onerror=alert(1)>" in tab.js("document.querySelector('.notes').innerText")
    assert not tab.js("[...document.links].some(a => a.href.startsWith('javascript:'))")


def test_parameters_from_the_command_line_are_marked(tmp_path, browser):
    made_up(tmp_path, headline=GOOD, overrides=["train.epochs=5", "evaluate.engine_args.max_num_seqs=4"])
    params = {"train": {"epochs": 5, "lr": 1e-3, "seed": 7}, "evaluate": {"engine_args": {"max_num_seqs": 4}}}
    write_json(tmp_path / "params.json", {"name": "made-up", **params})
    tab = looked_at(browser, report.write(tmp_path))
    rows = tab.js("[...document.querySelectorAll('#parameters ~ .wide')][0].innerText").splitlines()
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    assert rows["train.epochs"] == ["5", "3", "command line"]
    assert rows["train.lr"] == ["0.001", "0.0006", "params file"]
    assert rows["evaluate.engine_args"][-1] == "command line"
    assert "train 7" in tab.js("document.body.innerText")


def test_a_list_of_runs_is_sorted_by_its_buttons(tmp_path, browser):
    for k, (name, length) in enumerate({"a": 1.5, "b": 1.2, "c": 1.9}.items()):
        made_up(
            tmp_path / name, headline=GOOD | {"acceptance_length": length}, started=f"2026-01-0{k + 1}T00:00:00+00:00"
        )
        report.write(tmp_path / name)
    made_up(tmp_path / "d", statuses=["failed"] + ["pending"] * 5, started="2026-01-09T00:00:00+00:00", status="failed")
    assert report.refresh(tmp_path) is None  # it is not put where none was asked for
    file = report.refresh(tmp_path, create=True)
    tab = looked_at(browser, file)
    order = "[...document.querySelectorAll('tbody tr')].map(r => r.cells[0].innerText).join('')"
    assert tab.js(order) == "dcba"
    click = "document.querySelectorAll('th button')[3].click()"
    tab.js(click)
    assert tab.js(order) == "bacd"  # no figure: last either way
    tab.js(click)
    assert tab.js(order) == "cabd"
    assert tab.js("document.querySelectorAll('th')[3].getAttribute('aria-sort')") == "descending"
    assert looked_at(browser, file, width=390).js("document.documentElement.scrollWidth") <= 390
    (tmp_path / "mine").mkdir()
    write_text(tmp_path / "mine" / "index.html", "<p>my own page</p>")
    assert report.refresh(tmp_path / "mine", create=True) is None


def test_a_broken_run_is_listed_and_stops_no_other(tmp_path, browser):
    made_up(tmp_path / "good", headline=GOOD)
    for name in ("result", "record", "checks", "started"):
        made_up(tmp_path / name, headline=GOOD)
    write_text(stage.folder(tmp_path / "result", "preflight") / "result.json", "{")
    write_text(tmp_path / "record" / "run.json", "[]")
    write_text(stage.folder(tmp_path / "checks", "train") / "checks.json", '{"a": 1}')
    run = read_json(tmp_path / "started" / "run.json")
    del run["started"]
    write_json(tmp_path / "started" / "run.json", run)
    tab = looked_at(browser, report.refresh(tmp_path, create=True))
    rows = dict(
        tab.js("[...document.querySelectorAll('tbody tr')].map(r => [r.cells[0].innerText, r.cells[2].innerText])")
    )
    assert rows.pop("good") == "PASS"
    assert rows == dict.fromkeys(("result", "record", "checks", "started"), "unreadable")


def test_many_runs_are_compared(tmp_path, browser):
    folders = [tmp_path / f"r{k}" for k in range(8)]
    for folder in folders:
        made_up(folder, headline=GOOD)
        write_json(stage.folder(folder, "evaluate") / "result.json", {"acceptance_by_position": [0.5, 0.2]})
    tab = looked_at(browser, report.compare(folders, tmp_path / "c.html"))
    assert tab.js("document.querySelectorAll('img').length") == 1
    assert "data of H" in tab.js("document.body.innerText")


def test_commands_and_hostile_observations_can_be_read(tmp_path, browser):
    folder = tmp_path / "my run"
    made_up(folder, statuses=["done"] * 2 + ["pending"] * 4, status="incomplete")
    write_json(
        stage.folder(folder, "preflight") / "checks.json", [a_check("a.b", "warn", observed="tok \u202egnp.exe")]
    )
    text = looked_at(browser, report.write(folder)).js("document.body.innerText")
    assert "What to do next" in text
    assert f"--run-dir '{folder}'" in text
    assert "tok ⟨U+202E⟩gnp.exe" in text


def test_a_verifier_of_many_shards_has_its_size_in_the_report(tmp_path, browser):
    folder = made_up(tmp_path / "large")
    identity = {"weights": [["model.safetensors.index.json", "ab"]], "config_sha256": "cd", "tokenizer_sha256": "ef"}
    found = {
        "verifier": {"name": "large", "path": "/x"}, "identity": identity | {"chat_template_sha256": "01"},
        "parameters": 10**12, "sizes": {"weights": 594 * 10**9, "tokenizer": 7000, "chat_template": 90},
    }  # fmt: skip
    write_json(stage.folder(folder, "preflight") / "result.json", found)
    write_json(folder / "params.json", {"name": "made-up", "prepare_data": {"chat_template": "mine.jinja"}})
    prepared = {"rows": 5, "heldout_rows": 1, "rows_sha256": "23", "rows_bytes": 4000}
    prepared["chat_template_file"] = {"bytes": 80, "sha256": "45" * 32}
    write_json(stage.folder(folder, "prepare_data") / "result.json", prepared)
    cells = "[...document.querySelectorAll('#artefacts + div tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    rows = {row[0]: row[1:] for row in looked_at(browser, report.write(folder)).js(cells)}
    assert rows["verifier"][:2] == ["large", "594 GB"]
    assert rows["tokenizer"][1] == "7 kB"
    assert rows["chat template"] == ["mine.jinja", "80 B", "45" * 8, "file"]
    assert rows["prepared rows"][1] == "4 kB"


def test_out_is_for_comparisons(tmp_path, capsys):
    made_up(tmp_path / "a")
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "x.html")]) == 2
    assert main(["report", str(tmp_path / "a"), str(tmp_path)]) == 2
    (tmp_path / "a" / "run.json").write_text("{")
    assert main(["report", str(tmp_path / "a")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert "comparison" in lines[0]
    assert "no run directory" in lines[1]
    assert "no valid JSON" in lines[2]


def test_verdicts():
    stages = [{"name": n, "status": "done"} for n in stage.READS]
    assert verdict.judge({"stages": stages, "headline": GOOD})[0] == "PASS"
    found, text = verdict.judge({"stages": stages, "headline": GOOD | {"lossless": False, "identical_outputs": 4}})
    assert found == "FAIL"
    assert "4 of 5" in text
    found, text = verdict.judge({"stages": [*stages[:5], {"name": "evaluate", "status": "pending"}], "headline": {}})
    assert found == "INCOMPLETE"
    assert "evaluate" in text
    slow = verdict.judge({"stages": stages, "headline": GOOD | {"speedup": 0.8, "speedup_rounds": [0.7, 0.9]}})
    assert "slower than without it" in slow[1]
    assert "disagree" not in slow[1] + text
    noisy = verdict.judge({"stages": stages, "headline": GOOD | {"speedup_rounds": [0.7, 3.0]}})
    assert "these rounds disagree too much to be relied on" in noisy[1]
    spread = GOOD | {"acceptance_by_prompt": [1.0, 1.5, None, 2.0, 2.5, 3.0], "speed_prompts": 3}
    text = verdict.judge({"stages": stages, "headline": spread})[1]
    assert "on 5 held-out prompts (middle half of them 1.50 to 2.50) and 1.20 times the speed on 3 of them" in text


def test_what_the_verifier_is_stands_in_the_title():
    identity = {"weights": [["a", 100]]}
    assert verdict.verifier_kind({"identity": identity, "parameters": 8_000_000_000, "untrained": False}) == ""
    assert (
        verdict.verifier_kind({"identity": identity, "parameters": 8_000_000_000, "untrained": True})
        == "random verifier"
    )
    assert verdict.verifier_kind({"identity": identity, "parameters": 135_000_000}) == "small verifier"
    assert verdict.verifier_kind({}) == ""


def test_home_is_written_as_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    pages._home_pattern.cache_clear()
    try:
        found = pages.tilde({"a": ["/home/someone/x", "in /home/someone.", "/mnt/home/someone/x", "/home/someone2", 3]})
        more = pages.tilde(
            [
                "-p a.b=/home/someone/u",
                "file:///home/someone/q",
                "\x1b[1;32m/home/someone/x",
                "/home/someone:/home/someone",
            ]
        )
    finally:
        monkeypatch.undo()
        pages._home_pattern.cache_clear()
    assert more == ["-p a.b=~/u", "file://~/q", "\x1b[1;32m~/x", "~:~"]
    assert found == {"a": ["~/x", "in ~.", "/mnt/home/someone/x", "/home/someone2", 3]}


def test_templates_are_shipped_with_the_package():
    assert (ROOT / "eagle3nb" / "templates" / "page.html.j2").is_file()
    assert "templates/*" in (ROOT / "pyproject.toml").read_text()
