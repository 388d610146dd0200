"""The draft's config against the verifier's: sizes, rotary embedding, positions, norms."""

import math
from typing import Any

from eagle3nb.bridges import preflight
from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.registry import Finding, check

BRIDGE = "train"


@check(
    "draft.sizes",
    "Hidden size and vocabulary are the verifier's",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    between=("mapping",),
    why="vllm-project/speculators#1081: unintended vocabularies led to mismatched sizes.",
    remedy="write the config from the verifier's (the train stage does)",
)
def sizes(a: Artefacts) -> Finding:
    """hidden_size, vocab_size and draft_vocab_size against the verifier and the mapping."""
    transformer, wrong = a.draft.transformer, []
    for name, wanted in (("hidden_size", a.verifier.hidden_size), ("vocab_size", a.verifier.vocab_size)):
        if transformer.get(name) != wanted:
            wrong.append(f"{name} {transformer.get(name)} instead of {wanted}")
    if a.mapping is not None and a.draft.vocab_size != a.mapping.size:
        wrong.append(f"draft_vocab_size {a.draft.vocab_size} instead of the mapping's {a.mapping.size}")
    good = f"hidden {a.draft.hidden_size}, vocabulary {transformer.get('vocab_size')}, draft {a.draft.vocab_size}"
    return Finding("fail" if wrong else "pass", "; ".join(wrong) or good, "the verifier's")


@check(
    "draft.rope_theta",
    "The rotary base is the verifier's",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    why="vllm-project/speculators#574: a converter dropped parts of the rotary settings, and drafts got "
    "default positions.",
    remedy="copy rope_theta from the verifier; allow this check where another base was trained on purpose",
)
def rope_theta(a: Artefacts) -> Finding:
    """rope_theta of both configs, in rope_parameters or beside them."""
    mine, theirs = _rope(a.draft.transformer), _rope(_verifier_fields(a))
    found, wanted = mine.get("rope_theta"), theirs.get("rope_theta")
    if found is not None and type(found) not in (int, float):
        return Finding("fail", f"{found!r}"[:80], f"{wanted:g}")
    if found is None:
        return Finding("fail", "absent: a default of 10,000 is taken", f"{wanted:g}")
    return Finding("pass" if found == wanted else "fail", f"{found:g}", f"{wanted:g}")


@check(
    "draft.rope_scaling",
    "Rotary scaling is the verifier's",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    why="vllm-project/speculators#574: rope_scaling was dropped for verifiers that scale their positions.",
    remedy="copy the rotary scaling from the verifier; allow this check where the draft was trained without on purpose",
)
def rope_scaling(a: Artefacts) -> Finding:
    """rope type, factor and the rest of the scaling of both configs."""
    mine, theirs = _rope(a.draft.transformer), _rope(_verifier_fields(a))
    keys = [
        k
        for k in {**theirs, **mine}
        if (k != "rope_theta" and theirs.get(k) is not None) or (k in mine and k != "rope_theta")
    ]
    differ = [
        f"{k} {mine.get(k)!r} instead of {theirs.get(k)!r}" for k in sorted(set(keys)) if mine.get(k) != theirs.get(k)
    ]
    return Finding(
        "fail" if differ else "pass",
        "; ".join(differ)[:200] or f"{mine.get('rope_type')}",
        f"{theirs.get('rope_type')}",
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in one form: transformers 5 keeps them in rope_parameters, older configs beside each other."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" not in found and config.get("rope_theta") is not None:
        found["rope_theta"] = config["rope_theta"]
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    found.pop("type", None)
    return found


def _verifier_fields(a: Artefacts) -> dict[str, Any]:
    return a.verifier.config.to_dict()


@check(
    "draft.max_positions",
    "The draft reaches as far as the verifier",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    why="vllm-project/vllm#48894: a draft made for 2048 positions crashed the server at longer prompts.",
    remedy="copy max_position_embeddings from the verifier",
)
def max_positions(a: Artefacts) -> Finding:
    """max_position_embeddings of both configs."""
    mine, theirs = a.draft.transformer.get("max_position_embeddings"), a.verifier.config.max_position_embeddings
    good = isinstance(mine, int) and mine >= theirs
    return Finding("pass" if good else "fail", str(mine), f"at least {theirs}")


@check(
    "draft.rms_eps",
    "rms_norm_eps is the verifier's",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    why="meta-llama/llama#771: an eps of 1e-6 where 1e-5 was trained made greedy answers visibly worse.",
    remedy="copy rms_norm_eps: speculators applies the verifier's final norm with the draft's eps",
)
def rms_eps(a: Artefacts) -> Finding:
    """rms_norm_eps of both configs."""
    mine, theirs = a.draft.transformer.get("rms_norm_eps"), a.verifier.norm_eps
    # The same number, whatever rounding it has been through; others differ tenfold.
    good = isinstance(mine, int | float) and math.isclose(mine, theirs, rel_tol=1e-3)
    return Finding("pass" if good else "fail", "absent" if mine is None else f"{mine:.3g}", f"{theirs:.3g}")


@check(
    "draft.final_norm",
    "The draft's targets were computed with the verifier's norm",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    why="vllm-project/speculators#1090: targets were computed with gain w where the verifier has 1 + w.",
    remedy="train with a trainer that applies x * (1 + w)",
)
def final_norm(a: Artefacts) -> Finding:
    """Whether the verifier's model type multiplies by 1 + w, which speculators 0.9 does not do for EAGLE-3."""
    return preflight.final_norm(a)


@check(
    "draft.tied_embeddings",
    "The draft's lm_head is not tied to its embedding",
    bridge=BRIDGE,
    needs=("draft",),
    why="sgl-project/SpecForge#140: tied embeddings in a draft's config forced the reduced lm_head into the "
    "embedding's shape.",
    remedy="set tie_word_embeddings to false in the draft's config, also where the verifier's are tied",
)
def tied_embeddings(a: Artefacts) -> Finding:
    """tie_word_embeddings of the draft, at the top and in its decoder config."""
    places = {"at the top": a.draft.config, "in the decoder's config": a.draft.transformer}
    tied = [where for where, config in places.items() if config.get("tie_word_embeddings")]
    reduced = a.draft.vocab_size < int(a.draft.transformer.get("vocab_size") or 0)
    if tied and reduced:
        return Finding("fail", f"true {tied[0]}, with a reduced vocabulary", "false")
    return Finding("pass", f"true {tied[0]}, with the full vocabulary" if tied else "false", "false")
