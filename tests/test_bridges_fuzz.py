"""Damaged files of every format: the check gives a verdict or one line, never a traceback."""

import json
import shutil
from pathlib import Path

import faults
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3nb import stage
from eagle3nb.bridges import opening, registry
from eagle3nb.errors import Refused

FILES = {
    "sample": "02_extract_hidden_states/store/hidden_states/hs_3.safetensors",
    "store.json": "02_extract_hidden_states/store/store.json",
    "samples.jsonl": "02_extract_hidden_states/store/samples.jsonl",
    "state.json": "02_extract_hidden_states/store/state.json",
    "arrow": "02_extract_hidden_states/store/data-00000-of-00001.arrow",
    "d2t.npy": "03_build_vocab_mapping/d2t.npy",
    "t2d.pt": "03_build_vocab_mapping/t2d.pt",
    "counts": "03_build_vocab_mapping/token_freq.pt",
    "config": "04_train/checkpoints/checkpoint_best/config.json",
    "checkpoint": "04_train/checkpoints/checkpoint_best/model.safetensors",
}
SUBJECT = {"sample": None, "d2t.npy": None, "t2d.pt": None, "counts": None, "config": None, "checkpoint": None}
STRUCTURE = 4096  # most flips go to the first and last bytes, where the formats keep their structure


@pytest.fixture(scope="module")
def small_run(finished_run, tmp_path_factory) -> Path:
    """The run with three samples, so that a check of it takes milliseconds."""
    run = tmp_path_factory.mktemp("fuzz") / "run"
    shutil.copytree(finished_run, run)
    return run


@st.composite
def damage(draw, size: int) -> tuple[str, int, int]:
    kind = draw(st.sampled_from(["cut", "flip", "flip", "flip", "insert"]))
    near = st.integers(0, min(size, STRUCTURE) - 1)
    place = draw(near | st.integers(max(0, size - STRUCTURE), size - 1) | st.integers(0, size - 1))
    return kind, place, draw(st.integers(1, 255))


def apply(data: bytes, hits: list[tuple[str, int, int]]) -> bytes:
    out = bytearray(data)
    for kind, place, value in hits:
        if kind == "cut":
            del out[place:]
        elif kind == "insert":
            out.insert(min(place, len(out)), value)
        elif place < len(out):
            out[place] ^= value
    return bytes(out)


def verdicts(path: Path, verifier) -> None:
    try:
        found = registry.run(opening.identify(path, verifier, deep=True))
    except Refused as refusal:
        line = str(refusal)
        if "\n" in line:
            pytest.fail(f"more than one line: {line}")
        return
    assert {entry["verdict"] for entry in found} <= {"pass", "warn", "fail", "skip"}
    json.dumps(found)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name, small_run, verifier_dir, monkeypatch):
    from eagle3nb.bridges import reference
    from eagle3nb.verifier import Verifier

    monkeypatch.setattr(reference, "MEMORY_SHARE", 0.0)  # the reference reads only what the checks let through
    verifier = Verifier("tiny", verifier_dir)
    path = small_run / FILES[name]
    whole = path.read_bytes()
    subject = path if name in SUBJECT else path.parent

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(damage(len(whole)), min_size=1, max_size=3))
    def look(hits) -> None:
        path.write_bytes(apply(whole, hits))
        verdicts(subject, verifier)

    try:
        look()
    finally:
        path.write_bytes(whole)
    verdicts(subject, verifier)


KEYS = [
    "eagle_config", "transformer_layer_config", "draft_vocab_size", "hidden_size", "eagle_aux_hidden_state_layer_ids",
    "rope_parameters", "vocab_size", "norm_before_fc", "tie_word_embeddings", "num_hidden_layers",
]  # fmt: skip
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
ANY = st.recursive(PLAIN, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.sampled_from(KEYS), v))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ANY)
def test_configs_of_any_shape(value):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(value))
        verdicts(path, None)


@pytest.mark.parametrize("name", stage.READS)
def test_records_of_any_shape(name, small_run, verifier_dir, monkeypatch):
    """A run whose ``result.json`` says something else, field by field."""
    from eagle3nb.bridges import reference
    from eagle3nb.verifier import Verifier

    monkeypatch.setattr(reference, "MEMORY_SHARE", 0.0)
    path = stage.folder(small_run, name) / "result.json"
    whole, verifier = path.read_text(), Verifier("tiny", verifier_dir)
    fields = st.dictionaries(st.sampled_from(sorted(json.loads(whole))), ANY, min_size=1, max_size=4)

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(fields)
    def look(changed) -> None:
        path.write_text(json.dumps(json.loads(whole) | changed))
        verdicts(small_run, verifier)

    try:
        look()
    finally:
        path.write_text(whole)
    verdicts(small_run, verifier)


def test_what_is_left_is_whole(small_run):
    assert faults.store(small_run).is_dir()
