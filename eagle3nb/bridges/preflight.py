"""Before anything runs: does the verifier have what EAGLE-3 training assumes of it?"""

from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.registry import Finding, check
from eagle3nb.verifier import GEMMA_STYLE_NORM


@check(
    "verifier.tensors",
    "Embedding, lm_head and final norm are found, with the sizes of the config",
    bridge="preflight",
    needs=("verifier",),
    why="vllm-project/speculators#1156: the embedding of another kind of model lay under another key and was "
    "not found.",
    remedy="give a checkpoint whose tensors have the usual endings (embed_tokens.weight, lm_head.weight, norm.weight)",
)
def tensors(a: Artefacts) -> Finding:
    """Shapes of the three tensors that targets and drafts are computed with, read from the shards that hold them."""
    hidden, vocabulary = a.verifier.hidden_size, a.verifier.vocab_size
    found = {role: list(a.verifier.weight(role).shape) for role in ("embed_tokens", "lm_head", "norm")}
    good = all(found[role][1:] == [hidden] and found[role][0] >= vocabulary for role in ("embed_tokens", "lm_head"))
    expected = f"embed_tokens and lm_head [{vocabulary}, {hidden}], norm [{hidden}]"
    observed = ", ".join(f"{role} {shape}" for role, shape in found.items())
    return Finding("pass" if good and found["norm"] == [hidden] else "fail", observed, expected)


@check(
    "verifier.final_norm",
    "The verifier's final norm is x * w, as the trainer applies it",
    bridge="preflight",
    needs=("verifier",),
    why="vllm-project/speculators#1090: the final norm was rebuilt with gain w although the model stores it for 1 + w; "
    "targets were wrong and training still converged.",
    remedy="train on it only with a trainer that applies x * (1 + w) to the targets; allow this check then",
)
def final_norm(a: Artefacts) -> Finding:
    """Whether the model type multiplies by 1 + w: speculators 0.9 computes EAGLE-3 targets with w for all."""
    kind = a.verifier.config.model_type
    if kind in GEMMA_STYLE_NORM:
        return Finding("fail", f"model type {kind}: x * (1 + w)", "x * w, as speculators 0.9 applies it for EAGLE-3")
    return Finding("pass", f"model type {kind}: x * w", "x * w")


@check(
    "verifier.end_of_turn",
    "Config, generation config and tokenizer agree on what ends a turn",
    bridge="preflight",
    needs=("verifier",),
    why="huggingface/open-r1#663: the tokenizer's end token was changed, the generation config's was not, and "
    "answers never ended.",
    remedy="write the end-of-turn token's id into generation_config.json (a list may hold several)",
)
def end_of_turn(a: Artefacts) -> Finding:
    """End-of-turn ids of all three places, and whether the template closes an assistant's turn with one."""
    ends = a.verifier.eos_token_ids
    text = [a.verifier.tokenizer.decode([t]) for t in ends]
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    prompt, full = a.template.ids(turns[:1], prompt=True), a.template.ids(turns, prompt=False)
    closes = any(t in ends for t in full[len(prompt) :])
    observed = f"{', '.join(f'{t} {x!r}' for t, x in zip(ends, text, strict=True))}; the template " + (
        "closes a turn with one" if closes else "closes a turn with none of them"
    )
    return Finding("pass" if ends and closes else "fail", observed, "the template closes the assistant's turn with one")


@check(
    "verifier.vocabulary",
    "The tokenizer's ids are rows of the embedding",
    bridge="preflight",
    needs=("verifier",),
    why="InternRobotics/PointLLM#46: added tokens had ids beyond the embedding's rows, which ended in a "
    "device-side assert.",
    remedy="use the tokenizer that came with the checkpoint, or a checkpoint with a resized embedding",
)
def vocabulary(a: Artefacts) -> Finding:
    """Highest id of the tokenizer against the rows of the embedding; rows beyond it are padding, never emitted."""
    rows, tokens = a.verifier.vocab_size, len(a.verifier.tokenizer)
    observed = f"{tokens:,} tokens, {rows:,} rows ({max(0, rows - tokens):,} of them padding)"
    return Finding("pass" if tokens <= rows else "fail", observed, f"at most {rows:,} tokens")
