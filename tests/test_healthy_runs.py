"""Ten healthy runs of different seeds, data, layers and draft sizes: no check fails or warns. `make test-long`."""

import pytest

from eagle3nb import build_vocab_mapping, evaluate, extract_hidden_states, params, preflight, prepare_data, tiny, train
from eagle3nb.bridges import opening, registry

# verifier seed, teaching steps, training rows, new tokens, layers, draft vocabulary, epochs, learning rate, seed
RUNS = [
    (0, 150, 60, 24, [1, 2, 4], 400, 3, 2e-3, 0),
    (0, 150, 40, 40, [1, 3, 4], 512, 1, 1e-3, 1),
    (1, 150, 80, 16, [0, 2, 5], 300, 2, 2e-3, 2),
    (1, 300, 40, 32, [2, 3, 4], 500, 1, 6e-4, 3),
    (2, 100, 50, 24, [1, 2, 3], 450, 4, 2e-3, 4),
    (2, 100, 120, 12, [0, 1, 2], 450, 1, 3e-3, 5),
    (3, 200, 40, 48, [3, 4, 5], 512, 2, 1e-3, 6),
    (3, 200, 64, 20, [1, 2, 5], 350, 2, 2e-3, 7),
    (4, 150, 70, 24, [2, 4, 5], 420, 2, 2e-3, 8),
    (4, 150, 48, 30, [0, 3, 5], 480, 3, 1e-3, 9),
]


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    made = {}

    def give(seed: int, steps: int) -> str:
        if (seed, steps) not in made:
            made[seed, steps] = tiny.llama(tmp_path_factory.mktemp("v") / "llama", seed=seed, steps=steps)
        return str(made[seed, steps])

    return give


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("case", RUNS, ids=[f"seed{case[-1]}" for case in RUNS])
def test_no_fail_and_no_warning(case, verifiers, tmp_path):
    model_seed, steps, rows, new, layers, draft, epochs, lr, seed = case
    run = str(tmp_path / "run")
    preflight.run(params.Preflight(run_dir=run, verifier=verifiers(model_seed, steps)))
    prepare_data.run(params.PrepareData(run_dir=run, max_samples=rows, max_heldout=6, max_new_tokens=new, seed=seed))
    extract_hidden_states.run(params.ExtractHiddenStates(run_dir=run, layer_ids=layers, dtype="float32"))
    kept = [*range(3, draft - 50), *range(700, 722)]  # the answers hold only some tens of different tokens
    build_vocab_mapping.run(params.BuildVocabMapping(run_dir=run, draft_vocab_size=draft, keep_token_ids=kept))
    train.run(params.Train(run_dir=run, epochs=epochs, lr=lr, tokens_per_step=512, seed=seed))
    evaluate.run(params.Evaluate(run_dir=run, max_new_tokens=new, speed_prompts=1))
    entries = registry.run(opening.of_run(run, deep=True))
    assert not [(e["id"], e["observed"]) for e in entries if e["verdict"] in ("fail", "warn")]
