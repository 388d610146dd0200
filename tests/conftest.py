"""What tests share: one tiny verifier, and one finished run of the whole chain on it (real vLLM, training, serving)."""

import json
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import browser as browsers

from eagle3nb import params as parameters
from eagle3nb import preflight, prepare_data, tiny

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def verifier_dir(tmp_path_factory) -> Path:
    """A tiny Llama checkpoint, taught for some seconds so that a draft has something to learn."""
    return tiny.llama(tmp_path_factory.mktemp("verifier") / "tiny-llama", steps=150)


@pytest.fixture(scope="session")
def params_file(tmp_path_factory, verifier_dir) -> Path:
    """A params file for the whole chain on the tiny verifier."""
    path = tmp_path_factory.mktemp("params") / "tiny.yaml"
    path.write_text(f"""
preflight:
  verifier: {verifier_dir}
prepare_data:
  max_samples: 40
  max_heldout: 6
  max_new_tokens: 24
extract_hidden_states:
  layer_ids: [1, 3, 4]
  dtype: float32  # the tests compare states and outputs exactly
build_vocab_mapping:
  draft_vocab_size: 512
  keep_token_ids: {[*range(3, 445), *range(700, 725)]}  # its few answers hold only some tens of different tokens
train:
  epochs: 2
  lr: 2e-3
  tokens_per_step: 512
evaluate:
  num_speculative_tokens: [1, 3]
  max_new_tokens: 24
  speed_prompts: 2
""")
    return path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, params_file) -> Path:
    """A finished run of all stages through papermill. Read it; copy what you want to change (`copy_of_run`)."""
    from eagle3nb import run

    folder = tmp_path_factory.mktemp("runs") / "tiny-run"
    return run.run(str(params_file), run_dir=str(folder))


@pytest.fixture(scope="session")
def browser():
    """A tab of a headless Chromium (`tests/browser.py`)."""
    with browsers.chromium() as page:
        yield page


@pytest.fixture
def copy_of_run(finished_run, tmp_path) -> Path:
    """A finished run to change at will."""
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


@pytest.fixture
def prepared_run(tmp_path, verifier_dir) -> Path:
    """A run directory with the stages before the extraction done: 16 rows, 40 new tokens each."""
    run_dir = str(tmp_path / "run")
    preflight.run(parameters.Preflight(run_dir=run_dir, verifier=str(verifier_dir)))
    prepare_data.run(parameters.PrepareData(run_dir=run_dir, max_samples=16, max_heldout=2, max_new_tokens=40))
    return Path(run_dir)


@pytest.fixture
def jsonl(tmp_path):
    """Write rows to a JSONL file and give its path as text."""

    def write(*rows: dict, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
