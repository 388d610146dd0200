"""The draft at work: a recorded response as a strip of tokens, one group per verifier step."""

import html
from collections.abc import Iterable, Mapping
from typing import Any

from eagle3nb.show.tables import PRINTED, Html
from eagle3nb.text import visible

# Of the strip of `steps`; in rgba, as the page below may be light or dark.
STRIP_STYLE = (
    """
.e3-strip { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 900px; }
.e3-strip span { unicode-bidi: isolate; padding: 1px 0; }
.e3-accepted { background: rgba(34, 136, 51, .28); """
    + PRINTED
    + """; }
.e3-missed { border-bottom: 2px solid rgba(204, 51, 17, .75); }
.e3-step { border-left: 1px solid rgba(128, 128, 128, .45); }
.e3-note { font-size: 13px; margin: .6em 0 .2em; } .e3-steps { overflow-x: auto; font-size: 13px; }
.e3-steps table { border-collapse: collapse; } .e3-steps :is(th, td) { padding: 1px 10px; text-align: left; }
.e3-steps td:first-child { text-align: right; }
.e3-steps code { unicode-bidi: isolate; white-space: pre; margin-right: .5em; }
td .e3-rejected { opacity: .75; } .e3-prompt { opacity: .75; white-space: pre-wrap; font-size: 13px; }
"""
)
STRIP_LEGEND = (
    '<span class="e3-accepted">green</span>: draft tokens that were accepted; plain: the verifier’s own tokens; '
    '<span class="e3-missed">underlined in red</span>: the verifier’s own token in place of a rejected draft '
    "(hover, or open the list of steps)"
)


def draft_steps(response: Mapping[str, Any], num_speculative_tokens: int) -> list[dict[str, list[str]]]:
    """Per verifier step the texts of ``accepted`` draft tokens, the verifier's ``own`` and ``rejected`` draft tokens.

    ``response`` is a recorded one of ``responses.json``. Where the draft's tokens are not known, accepted ones follow
    from the step's size, and ``rejected`` is empty.
    """
    answer = response["with_draft"][str(num_speculative_tokens)]
    drafts, found, start = answer.get("drafts"), [], 0

    def texts(ids: Iterable[int]) -> list[str]:
        return [response["texts"][str(token)] for token in ids]

    for k, size in enumerate(answer["steps"]):
        step = answer["tokens"][start : start + size]
        draft = drafts[k] if drafts else step[:-1]
        same = 0
        while same < min(len(step), len(draft)) and step[same] == draft[same]:
            same += 1
        rejected = draft[same:] if same < len(step) else []  # a response may end inside accepted tokens
        found.append({"accepted": texts(step[:same]), "own": texts(step[same:]), "rejected": texts(rejected)})
        start += size
    return found


def steps(response: Mapping[str, Any], num_speculative_tokens: int) -> Html:
    """A recorded response as a strip of tokens, one group per verifier step, and the same as a list of steps."""
    rows = draft_steps(response, num_speculative_tokens)
    boxes, lines = [], []
    for k, row in enumerate(rows, 1):
        title = f"step {k}: {len(row['accepted'])} accepted"
        if row["rejected"]:
            title += ", rejected " + " ".join(f"«{_one_line(text)}»" for text in row["rejected"])
        inside = "".join(f'<span class="e3-accepted">{_in_strip(text)}</span>' for text in row["accepted"])
        missed = ' class="e3-missed"' if row["rejected"] else ""
        inside += "".join(f"<span{missed}>{_in_strip(text)}</span>" for text in row["own"])
        boxes.append(f'<span class="e3-step" title="{html.escape(title)}">{inside}</span>')
        cells = [
            "".join(f'<code class="e3-{name}">{html.escape(_one_line(text))}</code>' for text in row[name])
            for name in ("accepted", "own", "rejected")
        ]
        lines.append(f"<tr><td>{k}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    accepted, rejected = (sum(len(row[name]) for row in rows) for name in ("accepted", "rejected"))
    total = sum(len(row["accepted"]) + len(row["own"]) for row in rows)
    note = (
        f"{response['id']} ({response['kind']}): {total} tokens in {len(rows)} steps, "
        f"{accepted} draft token{'' if accepted == 1 else 's'} accepted"
    )
    note += f", {rejected} rejected" if rejected else ""
    prompt = f'<div class="e3-prompt">{_in_strip(response["text"])}</div>' if "text" in response else ""
    heads = "".join(f"<th>{h}</th>" for h in ("step", "accepted draft", "verifier’s own", "rejected draft"))
    markup = (
        f'<style>{STRIP_STYLE}</style><div class="e3-note">{html.escape(visible(note))}</div>'
        f'<div class="e3-strip">{"".join(boxes)}</div>'
        f'<details><summary class="e3-note">Prompt, and step by step</summary>{prompt}'
        f'<div class="e3-steps" tabindex="0"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )
    return Html(markup, note)


def _in_strip(text: str) -> str:
    return html.escape(visible(text)).replace("\n", "⏎<br>")


def _one_line(text: str) -> str:
    """A token in a list: spaces and line ends as signs."""
    return visible(text).replace("\n", "⏎").replace(" ", "·")
