"""``index.html``: all runs of a directory, newest first, sortable."""

from pathlib import Path
from typing import Any

from eagle3nb import stage
from eagle3nb.errors import Refused
from eagle3nb.files import read_json, write_text
from eagle3nb.report import page
from eagle3nb.report.verdict import summary, verifier_kind

SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), column = head.cellIndex, body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    return (up ? 1 : -1) * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
  };
  body.append(...[...body.rows].sort(compare));
});
"""


def refresh(runs_dir: Path | str, *, create: bool = False) -> Path | None:
    """Write ``index.html`` of a directory of runs anew; None where there is none of ours and ``create`` is not set."""
    target = Path(runs_dir) / "index.html"
    ours = target.is_file() and page.GENERATOR in target.read_text(errors="replace")[:2000]
    if not ours and (target.exists() or not create):
        return None
    rows = [_row(record.parent) for record in Path(runs_dir).glob("*/run.json")]
    rows.sort(key=lambda row: (row["started"], row["folder"]), reverse=True)
    body = page.render("index.html.j2", rows=rows)
    write_text(target, page.page("Runs", body, script=SCRIPT))
    return target


def _row(folder: Path) -> dict[str, Any]:
    """What the list says of a run; of one whose files are broken that it is unreadable, for it must not stop others."""
    link = f"{folder.name}/report.html" if (folder / "report.html").is_file() else ""
    nothing = {"started": "", "status": "", "seconds": None, "verifier": "", "kind": "", "headline": {}}
    try:
        run, verdict, _ = summary(folder)
        preflight = read_json(stage.folder(folder, "preflight") / "result.json", {})
        known = {
            "started": str(run["started"]),
            "status": run["status"],
            "seconds": run.get("seconds"),
            "verifier": preflight.get("verifier", {}).get("name", ""),
            "kind": verifier_kind(preflight),
            "headline": _headline(run.get("headline") or {}),
        }
    except (Refused, LookupError, TypeError, ValueError, AttributeError):
        return nothing | {"folder": folder.name, "link": link, "verdict": "unreadable"}
    return known | {"folder": folder.name, "link": link, "verdict": verdict}


def _headline(found: dict[str, Any]) -> dict[str, float]:
    """The figures of the list; empty of a run that was not evaluated."""
    names = ("acceptance_length", "speedup", "identical_outputs", "prompts")
    return {name: float(found[name]) for name in names} if found else {}
