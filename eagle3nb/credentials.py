"""Credentials do not belong into parameters, which stand in notebooks, ``run.json`` and reports that are shared."""

import re
from typing import Any

from eagle3nb.errors import Refused

# Names whose value is a credential, whatever it looks like. Not `eos_token` and the like.
_NAMES = re.compile(
    r"(.*[_-])?(pass(word|wd|phrase)|pwd|secret([_-]?key)?|credentials?|auth(orization)?)"
    r"|(.*[_-])?(api|access|private|auth|ssh|encryption|signing|wandb|hf|hub)[_-]?key"
    r"|((.*[_-])?(hf|hub|hugging_?face|api|auth|access|bearer|refresh|session|git(hub|lab)|wandb|npm|aws)[_-]?)?token",
    re.IGNORECASE,
)
_VALUES = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|npm_|xox[abprs]-)(?=[\w-]*\d|[\w-]{16})[\w-]{8,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bauthorization\s*[:=]\s*\S|\b(Bearer|Basic)\s+(?=\S*\d)\S{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[\w-]{10,}\.[\w-]+\.[\w-]+"
    r"|\w://[^/\s@]*:[^/\s@]+@|\bhttps?://[^/\s@]+@|[?&](api_?key|access_?token|token|password|sig|signature)=[^&\s]+",
    re.IGNORECASE,
)


def refuse(value: Any, key: str, where: str) -> None:
    """``Refused`` where ``value`` (or a part of it) looks like a credential; names the key, never the value."""
    if isinstance(value, dict):
        for name, part in value.items():
            refuse(part, f"{key}.{name}" if key else str(name), where)
    elif isinstance(value, list):
        for part in value:
            refuse(part, key, where)
    elif looks_secret(key, value):
        raise Refused(
            f"{where}: {key or 'a value'} looks like a credential; parameters are kept in notebooks and reports, so "
            "take it out and give it in the environment instead (HF_TOKEN for the model hub)"
        )


def looks_secret(key: str, value: Any) -> bool:
    """Whether a parameter's name or its text says that it is a password, a token or a key."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    return bool(_NAMES.fullmatch(key.rpartition(".")[2])) or (isinstance(value, str) and bool(_VALUES.search(value)))
