"""The served draft: is it accepted as validation foretold, and is the output what the verifier alone writes?"""

import math
from statistics import mean, stdev

from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.registry import Finding, check
from eagle3nb.draft import served_acceptance

BRIDGE = "evaluate"
# |served - predicted x coverage^(k+1)| at position k. Measured on 48 prompts of SmolLM2: 0.009, 0.008, 0.007 (8192
# draft tokens), 0.03, 0.01, 0.01 and 0.06, 0.03, 0.00 (4096, two trainings); on six prompts of tiny Llamas, in ten
# healthy runs, 0.02 to 0.17 at position 0. A draft served with another layer or norm than it was trained with loses a
# third or more.
NEAR = 0.04
STEPS = 2.0  # standard errors on top, by how far prompts are spread: 0.03 on 48 of SmolLM2, 0.06 to 0.1 on six
# Acceptance length of a draft that is never right is 1.00. Healthy: SmolLM2 1.74, ten tiny Llamas 1.06 to 1.47.
# Validation's first position: SmolLM2 0.52, tiny Llamas 0.02 to 0.40; who has learned nothing is not to be judged here.
USEFUL, LEARNED = 1.02, 0.02


@check(
    "served.predicted",
    "Acceptance is what validation predicted",
    bridge=BRIDGE,
    needs=("served", "predicted"),
    why="vllm-project/speculators#613: validation was good, acceptance in vLLM very low.",
    remedy="compare what trainer and server assume: layer ids, norms, d2t, rope (the checks of the train bridge)",
)
def predicted(a: Artefacts) -> Finding:
    """Accepted share per position against validation's, times coverage: validation knows no other tokens."""
    served, coverage = a.served["acceptance_by_position"], a.served.get("draft_vocab_coverage") or 1.0
    far, texts = [], []
    for k, (got, wanted) in enumerate(zip(served, served_acceptance(a.predicted, coverage), strict=False)):
        texts.append(f"{got:.3f} (predicted {wanted:.3f})")
        if abs(got - wanted) > NEAR + STEPS * _error(a, max(got, wanted)):
            far.append(k)
    observed, expected = ", ".join(texts), f"within {NEAR} and chance; predicted = validation x coverage {coverage:.2f}"
    if far:
        low = all(served[k] < a.predicted[k] for k in far)
        return Finding("fail", f"{observed}: position {far[0]} is far {'below' if low else 'above'}", expected)
    return Finding("pass", observed, expected)


def _error(a: Artefacts, share: float) -> float:
    """Standard error of the difference of two measured shares, by how differently the prompts are foreseen."""
    gains = [length - 1 for length in a.served.get("acceptance_by_prompt") or [] if length]
    rows = max(1, int(a.of_run["train"].get("validation_rows") or 1))
    # Few prompts may be alike by chance. Measured: 0.46 of the mean (48 of SmolLM2), 0.25 (six of tiny Llama).
    spread = max(0.5, stdev(gains) / max(mean(gains), 0.05)) if len(gains) > 1 else 1.0
    return share * spread * math.sqrt(1 / max(1, len(gains)) + 1 / rows)


@check(
    "served.lossless",
    "Greedy output is the same with and without the draft",
    bridge=BRIDGE,
    needs=("served",),
    why="SafeAILab/EAGLE#50: benchmark quality fell with speculative decoding, from a bug in accepting drafts.",
    remedy="evaluate in float32, where rounding breaks no ties; what still differs is a bug of the server",
)
def lossless(a: Artefacts) -> Finding:
    """Responses that differ in any token."""
    same, prompts = a.served.get("identical_outputs"), a.served.get("prompts")
    observed = f"{same} of {prompts} responses identical ({a.served.get('dtype')})"
    if a.served.get("lossless"):
        return Finding("pass", observed, "all")
    # On GPUs in bfloat16 batches of different shapes round differently: 1 to 3% of greedy responses part ways.
    rounding = a.served.get("dtype") != "float32" and same and same >= 0.9 * prompts
    return Finding(
        "warn" if rounding else "fail", observed, "all", "rounding may part ways in bfloat16" if rounding else ""
    )


@check(
    "served.coverage",
    "Held-out responses are in the draft vocabulary",
    bridge=BRIDGE,
    needs=("served",),
    why="MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark#43: what the draft vocabulary lacks is never accepted.",
    remedy="raise build_vocab_mapping.draft_vocab_size, or train on more data of that kind",
)
def coverage(a: Artefacts) -> Finding:
    """Share of the tokens of the held-out responses that the draft can propose."""
    from eagle3nb.bridges.build_vocab_mapping import COVERS, HARDLY

    share = a.served.get("draft_vocab_coverage")
    if share is None:
        return Finding("skip", "not measured", f"{COVERS:.0%} and more")
    verdict = "pass" if share >= COVERS else "warn" if share >= HARDLY else "fail"
    return Finding(verdict, f"{share:.3f}", f"{COVERS:.0%} and more")


@check(
    "served.useful",
    "The draft is accepted at all",
    bridge=BRIDGE,
    needs=("served",),
    why="sgl-project/sglang#27908: an acceptance length of exactly 1.00 meant that lm_head was random.",
    remedy="run `eagle3nb check` on the checkpoint with --verifier; then look at the training curves",
)
def useful(a: Artefacts) -> Finding:
    """Acceptance length: 1.00 is a draft that is never right."""
    length = float(a.served["acceptance_length"])
    nothing = (a.predicted or [0])[0] < LEARNED
    verdict = "pass" if length > USEFUL else "skip" if nothing else "fail"
    return Finding(verdict, f"{length:.2f} tokens a step", f"above {USEFUL}")
