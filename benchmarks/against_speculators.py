"""From prompts to a finished store: this workbook against speculators' own commands, same prompts, same machine.

    python benchmarks/against_speculators.py [--prompts 64] [--max-tokens 96]

speculators' way on a CPU: a vLLM server writes the responses (``regenerate-responses``, ``prepare-data``), a second
one with the hidden-state connector (its CPU version) gives the states (``generate-offline-data``). Each part is
timed. Ours: the stages prepare_data and extract_hidden_states, child process and engine start included.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from eagle3nb import extract_hidden_states, preflight, prepare_data, stage
from eagle3nb.conversations import read_source
from eagle3nb.engine import capture, settings
from eagle3nb.params import ExtractHiddenStates, Preflight, PrepareData

PORT = 8123


class Clock:
    """Adds up named parts."""

    def __init__(self):
        self.parts: dict[str, float] = {}

    def time(self, name, work):
        begin = time.monotonic()
        value = work()
        self.parts[name] = time.monotonic() - begin
        print(f"  {name:<28}{self.parts[name]:>7.1f} s", flush=True)
        return value

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def serve(model: Path, log: Path, *arguments: str) -> subprocess.Popen:
    """Start a vLLM server and wait until it answers."""
    settings.prepare_environment(single_process=False)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--no-enable-prefix-caching", *arguments,
    ]  # fmt: skip
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True, env=environment
    )
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
            return process
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(0.3)
    stop(process)
    sys.exit(f"the server did not start; its log ends:\n{log.read_text()[-3000:]}")


def stop(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def speculators(log: Path, *arguments: str) -> None:
    with log.open("a") as output:
        command = [sys.executable, "-m", "speculators", *arguments]
        if subprocess.run(command, stdout=output, stderr=output).returncode:
            sys.exit(f"speculators {arguments[0]} failed; its log ends:\n{log.read_text()[-3000:]}")


def their_way(model: Path, prompts: Path, folder: Path, max_tokens: int) -> Clock:
    clock, log = Clock(), folder / "speculators.log"
    url, data = f"http://127.0.0.1:{PORT}", str(folder / "data")
    server = clock.time("start the first server", lambda: serve(model, folder / "server1.log"))
    try:
        regenerated = str(folder / "regenerated.jsonl")
        clock.time("regenerate-responses", lambda: speculators(
            log, "regenerate-responses", "--endpoint", f"{url}/v1/chat/completions", "--dataset", str(prompts),
            "--max-tokens", str(max_tokens), "--sampling-params", '{"temperature": 0}', "--outfile", regenerated,
        ))  # fmt: skip
        clock.time("prepare-data", lambda: speculators(
            log, "prepare-data", "--model", str(model), "--data", regenerated, "--output", data, "--seq-length", "512",
            "--num-preprocessing-workers", "1", "--render-endpoint", url,
        ))  # fmt: skip
    finally:
        stop(server)
    layers = [2, 15, 27, 30]
    way = capture.Connector(layers, folder / "states").engine_arguments
    arguments = [part for key, value in way.items() for part in (f"--{key.replace('_', '-')}", json.dumps(value))]
    server = clock.time("start the second server", lambda: serve(model, folder / "server2.log", *arguments))
    try:
        clock.time("generate-offline-data", lambda: speculators(
            log, "generate-offline-data", "--preprocessed-data", data, "--endpoint", f"{url}/v1", "--fail-on-error",
        ))  # fmt: skip
    finally:
        stop(server)
    clock.samples = len(list((folder / "data" / "hidden_states").glob("hs_*.safetensors")))
    return clock


def our_way(run_dir: Path, prompts: Path, max_tokens: int) -> Clock:
    clock = Clock()
    clock.time("prepare_data", lambda: prepare_data.run(PrepareData(
        run_dir=str(run_dir), train=[str(prompts)], max_new_tokens=max_tokens, max_heldout=1,
    )))  # fmt: skip
    result = clock.time(
        "extract_hidden_states", lambda: extract_hidden_states.run(ExtractHiddenStates(run_dir=str(run_dir)))
    )
    clock.samples = result["store_samples"]
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        preflight.run(Preflight(run_dir=str(folder / "run")))
        rows = [row for row in read_source("builtin:train_prompts") if len(row["messages"]) == 1]
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows[: args.prompts]))
        model = stage.verifier(folder / "run").path
        print(f"speculators' commands, {args.prompts} prompts, {args.max_tokens} new tokens at most", flush=True)
        theirs = their_way(model, prompts, folder, args.max_tokens)
        print(f"  {'':<28}{theirs.total:>7.1f} s for {theirs.samples} samples\nthis workbook", flush=True)
        ours = our_way(folder / "run", prompts, args.max_tokens)
        print(f"  {'':<28}{ours.total:>7.1f} s for {ours.samples} samples")
        print(f"ratio {ours.total / theirs.total:.2f}")


if __name__ == "__main__":
    main()
