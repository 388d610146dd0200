"""Where a run's time went: work and checks per stage, and what notebooks, papermill, inspection and report added.

    python benchmarks/overhead.py RUN

A stage's own work is the time of its ``run`` call (``seconds`` in result.json), its checks the sum of ``seconds`` in
checks.json; all else of the run's wall time is overhead: kernels starting, imports, inspection cells, papermill, HTML.
"""

import sys
from pathlib import Path

from eagle3nb import stage
from eagle3nb.files import read_json


def main() -> None:
    run_dir = Path(sys.argv[1])
    run, work, checks = read_json(run_dir / "run.json"), 0.0, 0.0
    for entry in run["stages"]:
        own = stage.result(run_dir, entry["name"])["seconds"]
        check = sum(c["seconds"] for c in read_json(stage.folder(run_dir, entry["name"]) / "checks.json"))
        work, checks = work + own, checks + check
        print(f"{entry['name']:<24}{entry['seconds']:>8.1f} s, of which work {own:>8.1f} s, checks {check:>5.1f} s")
    total = run["seconds"]
    rest = total - work - checks
    print(f"whole run {total:.1f} s, work {work:.1f} s")
    print(f"checks {checks:.1f} s = {checks / total:.1%}, overhead {rest:.1f} s = {rest / total:.1%}")


if __name__ == "__main__":
    main()
