"""What capturing costs: the extraction's own loop with and without capture, in turns, each in a fresh process.

    python benchmarks/capture.py RUN [--rows 64] [--rounds 2]

RUN is a run directory with the stages preflight and prepare_data done. Prints tokens/s and peak memory of both, and
their ratios; the wanted figures stand in benchmarks/README.md.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from eagle3nb import extract_hidden_states, prepare_data, stage
from eagle3nb.engine import capture
from eagle3nb.engine import extract_hidden_states as child
from eagle3nb.engine.job import Progress
from eagle3nb.params import ExtractHiddenStates
from eagle3nb.samples import Declaration, Store


class Nothing:
    """Stands in for a way of capture: no states, so that the engine's work alone is left."""

    def __init__(self, layer_ids, folder):
        self.engine_arguments = {}

    def attach(self, llm):
        pass

    def sampling(self, i):
        return {}

    def take(self, llm, request_id, i):
        return torch.empty((1_000_000, 0, 0))


class NoStore(Store):
    """Writes nothing."""

    def write(self, i, hidden_states, token_ids):
        pass


def work(run_dir: str, way: str, rows: int) -> dict:
    """One pass over the first rows of the run, as the stage does it."""
    params = ExtractHiddenStates(run_dir=run_dir)
    verifier, data = stage.verifier(run_dir), stage.result(run_dir, "prepare_data")
    train, _ = prepare_data.load(run_dir)
    capture.MECHANISMS["nothing"] = Nothing
    with tempfile.TemporaryDirectory() as folder:
        store = (NoStore if way == "nothing" else Store)(Path(folder) / "store")
        layers = extract_hidden_states.layer_ids(params, verifier)
        declaration = extract_hidden_states.declaration(params, verifier, layers, data)
        job = {
            "verifier_path": str(verifier.path), "trust_remote_code": False, "eos_token_ids": verifier.eos_token_ids,
            "declaration": declaration, "max_model_len": data["longest_row"] + 2, "capture": way,
            "single_process": True, "seed": 0, "engine_args": {"max_num_seqs": params.max_num_seqs},
        }  # fmt: skip
        store.begin(Declaration(**declaration, compute_dtype="float32"))
        progress = Progress(Path(folder) / "progress.json")
        done = child._run_engine(job, train, list(range(min(rows, len(train)))), store, "float32", progress)
    done["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=["nothing", "forward", "connector"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(work(args.run, args.way, args.rows)))
        return
    figures: dict[str, list[dict]] = {"nothing": [], "forward": []}
    for _ in range(args.rounds):
        for way, results in figures.items():
            command = [sys.executable, __file__, args.run, "--rows", str(args.rows), "--way", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout.strip().splitlines()[-1]))
            result = results[-1]
            print(
                f"{way:<8} {result['generated_tokens']} tokens, {result['generated_tokens_per_s']:.0f} tokens/s, "
                f"peak {result['peak_rss_mib']:.0f} MiB",
                flush=True,
            )
    pairs = list(zip(figures["forward"], figures["nothing"], strict=True))
    speed = [a["generated_tokens_per_s"] / b["generated_tokens_per_s"] for a, b in pairs]
    memory = [a["peak_rss_mib"] / b["peak_rss_mib"] for a, b in pairs]
    print(f"speed with capture / without: median {median(speed):.3f} ({', '.join(f'{r:.3f}' for r in speed)})")
    print(f"peak memory with / without:   median {median(memory):.3f} ({', '.join(f'{r:.3f}' for r in memory)})")


if __name__ == "__main__":
    started = time.monotonic()
    torch.set_grad_enabled(False)
    main()
