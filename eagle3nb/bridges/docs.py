"""``docs/checks.md`` out of the register: ``python -m eagle3nb.bridges.docs > docs/checks.md`` (`make docs`)."""

from eagle3nb.bridges import CHECKS
from eagle3nb.bridges.registry import BRIDGES, WANTED

HEAD = """# The checks

Made from the checks themselves (`make docs`); do not edit.

Each check measures one thing on real bytes and gives a verdict: **pass**, **warn**, **fail**, or **skip** where it
could not be measured. A fail stops a run before the next stage, unless the stage's parameter `allow` names it. The
same checks run on any files: `eagle3nb check PATH --verifier V`. Thresholds come from measurements on healthy and
broken artefacts; they stand in the module of each bridge (`eagle3nb/bridges/`), with the figures beside them.

"Broken before" names a public report of the fault, or of the nearest one to it.
"""


def markdown() -> str:
    """The whole page."""
    lines = [HEAD]
    for bridge in BRIDGES:
        lines.append(f"\n## After {bridge.replace('_', ' ')}\n")
        for one in CHECKS.values():
            if one.bridges[-1] == bridge:
                also = "" if len(one.bridges) == 1 else f" (given responses: after {one.bridges[0].replace('_', ' ')})"
                lines.append(f"### `{one.id}`\n\n{one.title}{also}.\n")
                lines.append(f"- Measures: {one.measures}\n- Needs: {'; '.join(WANTED[name] for name in one.needs)}")
                lines.append(f"- Broken before: {one.why}\n- Remedy: {one.remedy}.\n")
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
