"""The draft: does it say what trainer and server must know, are its tensors whole and its tables the verifier's?

Its config against the verifier's: `eagle3nb.bridges.train_config`.
"""

from typing import Any

import torch

from eagle3nb.bridges.artefacts import Artefacts
from eagle3nb.bridges.reading import FLOATS
from eagle3nb.bridges.registry import Finding, check

BRIDGE = "train"
# Cosine of a draft's rows with the verifier's. speculators freezes both tables: 1.0 (SmolLM2, tiny Llama, bf16 copies).
# Tables that were trained further stay near 1; rows of other tokens or random ones are near 0 (SmolLM2's rows among
# each other: 0.1).
LIKE, UNLIKE = 0.99, 0.5
ROWS = 4096  # rows compared, by chance but always the same ones: an even step would see only the even ones
FEW = 0.02  # share of rows that may be unlike: special tokens that were added and trained. Measured: none
# By how much layer ids differ from the store's, and what that means.
CONVENTIONS = {
    -1: "the convention of layer outputs (SGLang, SpecForge, speculators 0.3); here ids mean inputs",
    1: "one more than captured, as if the store counted outputs",
}
MANY = 1000  # decoder layers; drafts have one, some two
LAYER_TENSORS = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "hidden_norm.weight",
)  # fmt: skip


# ---- layers --------------------------------------------------------------------------------------------------


@check(
    "draft.layer_ids",
    "The config names its auxiliary layers",
    bridge=BRIDGE,
    needs=("draft",),
    why="vllm-project/vllm#50170: no layers were named, the server guessed them, and acceptance was 1.2%.",
    remedy="write eagle_aux_hidden_state_layer_ids, the inputs of layer k, as the hidden states were captured",
)
def layer_ids(a: Artefacts) -> Finding:
    """Presence and form of eagle_aux_hidden_state_layer_ids, at the top or in eagle_config."""
    ids, expected = a.draft.layer_ids, "a list of layer ids"
    if ids is None:
        return Finding("fail", "absent: a server guesses [2, n/2, n-3], and guesses alone", expected)
    good = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
    told = "speculators_model_type" not in a.draft.config or a.draft.config.get("num_aux_hidden_states")
    if good and len(ids) != 3 and not told:
        # Measured: fc of two layers does not load ("[128, 256] to a parameter of [128, 384]").
        return Finding(
            "fail", f"{ids}: {len(ids)} layers", "three: vLLM 0.32 makes fc for three of a speculators config"
        )
    return Finding("pass" if good else "fail", str(ids)[:80], expected)


@check(
    "draft.layer_range",
    "Auxiliary layers exist in the verifier",
    bridge=BRIDGE,
    needs=("draft", "verifier"),
    why="sgl-project/sglang#32334: of three layers only two were captured, and the draft's input had the wrong width.",
    remedy="name different layers below the verifier's number of layers, in rising order",
)
def layer_range(a: Artefacts) -> Finding:
    """Ids against the verifier's number of layers."""
    ids, n = _ids(a), a.verifier.num_layers
    if ids is None:
        return Finding("skip", "no layer ids: see draft.layer_ids", f"0 to {n - 1}")
    good = ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < n
    return Finding("pass" if good else "fail", f"{ids} of {n} layers", f"different, rising, 0 to {n - 1}")


@check(
    "draft.layers_of_store",
    "The draft was trained on the layers it names",
    bridge=BRIDGE,
    needs=("draft", "layer_ids"),
    between=("store",),
    why="sgl-project/sglang#25454: served layers one off the trained ones cost about 0.10 in acceptance "
    "length, on Kimi-K2.5.",
    remedy="write the store's auxiliary layer ids into the config",
)
def layers_of_store(a: Artefacts) -> Finding:
    """Ids against the store's."""
    ids, stored = _ids(a), a.layer_ids[:-1]
    if ids is None:
        return Finding("skip", "no layer ids: see draft.layer_ids", str(stored))
    if ids != stored and _step(ids, stored) in CONVENTIONS:
        return Finding("skip", f"{ids}: see draft.layer_convention", str(stored))
    return Finding("pass" if ids == stored else "fail", str(ids), str(stored))


@check(
    "draft.layer_convention",
    "Layer ids mean inputs, as the store counts them",
    bridge=BRIDGE,
    needs=("draft", "layer_ids"),
    between=("store",),
    why="verl-project/verl-SpeCo#82: an export added one to the layer ids, and serving read one layer deeper than "
    "training had.",
    remedy="write the ids of the inputs: what a tool calls the output of layer k is the input of layer k + 1",
)
def layer_convention(a: Artefacts) -> Finding:
    """Ids that are one less, or one more, than the store's all through."""
    ids, stored = _ids(a), a.layer_ids[:-1]
    if ids is None:
        return Finding("skip", "no layer ids: see draft.layer_ids", str(stored))
    why = CONVENTIONS.get(_step(ids, stored))
    return Finding("fail", f"{ids}: {why}", str(stored)) if why else Finding("pass", str(ids), str(stored))


def _step(ids: list[int], stored: list[int]) -> int | None:
    """By how much all ids differ from the store's; None where it is not the same for all."""
    steps = {i - s for i, s in zip(ids, stored, strict=True)} if len(ids) == len(stored) else set()
    return steps.pop() if len(steps) == 1 else None


@check(
    "draft.other",
    "It has the form of the draft it is compared with",
    bridge=BRIDGE,
    needs=("other_draft", "draft"),
    between=("draft",),
    why="ggml-org/llama.cpp#27040: a converter did not find the layer ids where the draft had them and wrote guessed "
    "ones; only the acceptance showed it.",
    remedy="find out which of the two is served, and with which the draft was trained",
)
def other(a: Artefacts) -> Finding:
    """Layer ids, sizes and norm flags of both configs; only where --against names another draft."""
    mine, theirs = (
        {
            "layer ids": draft.layer_ids, "hidden_size": draft.hidden_size, "draft vocabulary": draft.vocab_size,
            **{flag: bool(draft.field(flag)) for flag in ("norm_before_fc", "fc_norm", "norm_before_residual")},
        }
        for draft in (a.draft, a.other_draft)
    )  # fmt: skip
    differ = [key for key in mine if mine[key] != theirs[key]]
    observed, expected = ("; ".join(f"{key} {of[key]}" for key in differ) for of in (mine, theirs))
    return Finding("fail" if differ else "pass", observed or f"layers {mine['layer ids']}", expected or "the same")


@check(
    "draft.fc_width",
    "fc takes as many states as layers are named",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    why="sgl-project/sglang#32334: fc met 5760 values where it expected 8640.",
    remedy="name exactly the layers that fc was trained on",
)
def fc_width(a: Artefacts) -> Finding:
    """Shape of fc.weight against layer ids and the verifier's hidden size."""
    fc = a.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2:
        return Finding(
            "fail",
            "no fc.weight" if fc is None else f"fc.weight {list(fc.shape)}",
            "fc.weight [hidden, layers x hidden]",
        )
    target = a.verifier.hidden_size if a.verifier else (a.draft.config.get("target_hidden_size") or a.draft.hidden_size)
    count = len(_ids(a) or a.layer_ids[:-1] if _ids(a) or a.layer_ids else [0, 0, 0])
    expected = f"[{a.draft.hidden_size}, {count} x {target} = {count * target}]"
    if list(fc.shape) == [a.draft.hidden_size, count * target]:
        return Finding("pass", str(list(fc.shape)), expected)
    layers = fc.shape[1] / max(1, target)
    hint = f": {layers:.0f} layers" if layers == int(layers) else ": no multiple of the hidden size"
    return Finding("fail", f"{list(fc.shape)}{hint}", expected)


def _ids(a: Artefacts) -> list[int] | None:
    ids = a.draft.layer_ids
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


# ---- tensors -------------------------------------------------------------------------------------------------


@check(
    "draft.key_names",
    "Tensors have the names a server loads",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    why="vllm-project/speculators#1114: keys that do not match (midlayer against layers.0) left random "
    "weights behind, with a warning at most.",
    remedy="rename the tensors (`eagle3nb export`), or load them with the tool they were written for",
)
def key_names(a: Artefacts) -> Finding:
    """Names of the decoder layer's tensors: all of layers.k, none of another naming."""
    names, expected = set(a.tensors), "layers.0.* with attention, MLP and hidden_norm"
    other = sorted(n for n in names if n.startswith(("midlayer.", "model.", "draft_model.", "module.")))
    if other:
        prefix = other[0].split(".")[0]
        return Finding(
            "fail",
            f"{len(other)} tensors are named {prefix}.*: a server for layers.* skips them without a word",
            expected,
        )
    count = a.draft.transformer.get("num_hidden_layers") or 1
    if type(count) is not int or not 0 < count <= MANY:
        return Finding("fail", f"num_hidden_layers = {count!r}"[:80], f"a number of layers up to {MANY}")
    missing = [f"layers.{k}.{t}" for k in range(count) for t in LAYER_TENSORS if f"layers.{k}.{t}" not in names
               and not (k and t == "hidden_norm.weight")]  # fmt: skip
    if missing:
        return Finding("fail", f"{len(missing)} missing, such as {missing[0]}", expected)
    return Finding("pass", f"{len(names)} tensors", expected)


@check(
    "draft.shapes",
    "The decoder's tensors have the shapes that its config says",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    why="tensors that do not fit are skipped by a loader that does not insist, and stay random (seen in review, no "
    "public report).",
    remedy="write heads, head_dim and intermediate_size as they were trained; look for tensors that changed places",
)
def shapes(a: Artefacts) -> Finding:
    """Attention, MLP and norms of every layer against heads, head_dim and sizes of the config, and their dtype."""
    sizes = _decoder_sizes(a.draft.transformer)
    if isinstance(sizes, str):
        return Finding("fail", sizes, "positive numbers")
    hidden, heads, kv, inner = sizes
    wrong = []
    for name, entry in a.tensors.items():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        # The first layer takes the embedding beside the fused states.
        wide = 2 * hidden if layer == "0" else hidden
        decoder = {
            "self_attn.q_proj.weight": (heads, wide), "self_attn.k_proj.weight": (kv, wide),
            "self_attn.v_proj.weight": (kv, wide), "self_attn.o_proj.weight": (hidden, heads),
            "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner), "hidden_norm.weight": (hidden,),
            "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        known = {"norm.weight": (hidden,)} if not name.startswith("layers.") else decoder
        wanted = known.get(rest if known is decoder else name, entry.shape)
        if tuple(entry.shape) != wanted:
            wrong.append(f"{name} {list(entry.shape)} instead of {list(wanted)}")
        elif name.endswith(".weight") and entry.dtype not in FLOATS:
            wrong.append(f"{name} is {entry.dtype}")
    expected = f"hidden {hidden}, attention {heads} and {kv}, MLP {inner}"
    return Finding("fail" if wrong else "pass", "; ".join(wrong[:3]) or "they do", expected)


def _decoder_sizes(config: dict[str, Any]) -> tuple[int, int, int, int] | str:
    """(hidden size, widths of queries and of keys, MLP width), or what is wrong with them."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv = config.get("num_key_value_heads", heads)
    good = all(type(n) is int and n > 0 for n in (hidden, heads, kv, config.get("intermediate_size")))
    head = config.get("head_dim") or (hidden // heads if good else None)
    if not good or type(head) is not int or head <= 0:
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        return ", ".join(f"{name} = {config.get(name)!r}" for name in names)[:160]
    return hidden, heads * head, kv * head, config["intermediate_size"]


@check(
    "draft.norms",
    "Norm flags and norm weights go together",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    why="vllm-project/vllm#38111: norm_before_fc was not carried over, the trained norm was skipped, and "
    "acceptance fell.",
    remedy="set the flags to what was trained: norm_before_fc has input_norm, fc_norm has fc_norm.k",
)
def norms(a: Artefacts) -> Finding:
    """norm_before_fc with input_norm.weight, fc_norm with fc_norm.k.weight, norm.weight always."""
    names, wrong = set(a.tensors), []
    has_input, has_fc = "input_norm.weight" in names, any(n.startswith("fc_norm.") for n in names)
    for flag, there, name in (("norm_before_fc", has_input, "input_norm.weight"), ("fc_norm", has_fc, "fc_norm.*")):
        wanted = bool(a.draft.field(flag))
        if wanted and not there:
            wrong.append(f"{flag} is true, but there is no {name}: it stays at its initial value")
        if there and not wanted:
            wrong.append(f"{name} is there, but {flag} is not true: a server skips the trained norm")
    if "norm.weight" not in names:
        wrong.append("no norm.weight")
    return Finding("fail" if wrong else "pass", "; ".join(wrong) or "they do", "each flag with its weights")


@check(
    "draft.norm_before_residual",
    "norm_before_residual is written down",
    bridge=BRIDGE,
    needs=("draft",),
    why="vllm-project/vllm#25961: absent means true to vLLM and false to speculators' config class.",
    remedy="write norm_before_residual as it was trained",
)
def norm_before_residual(a: Artefacts) -> Finding:
    """Presence of the one flag whose absence trainer and server read differently."""
    value = a.draft.field("norm_before_residual")
    legacy = "speculators_model_type" not in a.draft.config
    if value is None and legacy:
        return Finding("warn", "absent: true to vLLM, false to speculators", "true or false")
    return Finding("pass" if isinstance(value, bool) else "fail", str(value), "true or false")


@check(
    "draft.embedding",
    "The draft's embedding is the verifier's",
    bridge=BRIDGE,
    needs=("draft", "tensors", "verifier"),
    why="lightseekorg/TorchSpec#38: a freshly initialised embedding was exported in place of the trained one.",
    remedy="copy the verifier's embedding into the checkpoint",
)
def embedding(a: Artefacts) -> Finding:
    """Cosine of up to 4096 rows of embed_tokens with the verifier's at the same ids."""
    if "embed_tokens.weight" not in a.tensors:
        return Finding("pass", "none in the checkpoint: a server takes the verifier's", "the verifier's rows")
    mine, theirs = a.draft.tensor("embed_tokens.weight"), a.verifier.weight("embed_tokens")
    if mine.shape != theirs.shape:
        return Finding("fail", f"{list(mine.shape)}", f"{list(theirs.shape)}")
    rows = _some(len(mine))
    return _alike(mine[rows], theirs[rows], "the verifier's rows")


@check(
    "draft.lm_head",
    "lm_head rows are the verifier's at the mapped ids",
    bridge=BRIDGE,
    needs=("draft", "tensors", "verifier"),
    why="sgl-project/sglang#27908: a missing lm_head was left at random, without a warning, and acceptance "
    "length was 1.00.",
    remedy="take the verifier's rows at i + d2t[i]; speculators keeps them frozen",
)
def lm_head(a: Artefacts) -> Finding:
    """Cosine of up to 4096 rows of lm_head with the verifier's at i + d2t[i], or at other readings of d2t."""
    if "lm_head.weight" not in a.tensors:
        return Finding("fail", "no lm_head.weight: a server leaves its own at random", "the verifier's mapped rows")
    mine, theirs = a.draft.tensor("lm_head.weight"), a.verifier.weight("lm_head")
    expected = "the verifier's rows at i + d2t[i]"
    if mine.dim() != 2 or mine.shape[1] != theirs.shape[1] or len(mine) != a.draft.vocab_size:
        return Finding("fail", f"{list(mine.shape)}", f"[{a.draft.vocab_size}, {theirs.shape[1]}]")
    rows = _some(len(mine))
    d2t = a.draft.tensor("d2t").flatten().long() if "d2t" in a.tensors else torch.zeros(len(mine), dtype=torch.long)
    if len(d2t) != len(mine):
        return Finding("fail", f"{len(mine)} rows, d2t has {len(d2t)} entries", expected)
    found = _alike(mine[rows], _rows(theirs, rows + d2t[rows]), expected)
    if found.verdict == "pass":
        return found
    for text, ids in (("d2t read as ids", d2t[rows]), ("the first rows of the vocabulary, unmapped", rows)):
        if _alike(mine[rows], _rows(theirs, ids), expected).verdict == "pass":
            return Finding("fail", f"they are {text}", expected)
    run = a.mapping.targets if a.mapping is not None else rows[:0]
    if len(run) == len(mine) and _alike(mine[rows], _rows(theirs, run[rows]), expected).verdict == "pass":
        return Finding("pass", "those of the run's mapping; its own d2t is another: see draft.d2t", expected)
    return found


def _rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a table; zeros where an id lies outside."""
    inside = (ids >= 0) & (ids < len(table))
    return table[ids.clamp(0, len(table) - 1)].float() * inside[:, None]


def _some(count: int) -> torch.Tensor:
    """Up to `ROWS` different row numbers of a table."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:ROWS]


def _alike(mine: torch.Tensor, theirs: torch.Tensor, expected: str) -> Finding:
    cosine = torch.nn.functional.cosine_similarity(mine.float(), theirs.float()).nan_to_num()
    # A row of zeros (padding) is equal to another one, though it has no direction.
    cosine[(mine == theirs).all(-1)] = 1.0
    share, middle = float((cosine >= LIKE).float().mean()), float(cosine.median())
    unlike = float((cosine <= UNLIKE).float().mean())
    if share >= LIKE:
        return Finding("pass", f"{share:.1%} of {len(mine):,} rows equal, median cosine {middle:.3f}", expected)
    if unlike > FEW:
        text = f"{unlike:.0%} of {len(mine):,} rows are random, or those of other tokens (median cosine {middle:.2f})"
        return Finding("fail", text, expected)
    return Finding("warn", f"median cosine {middle:.2f}: trained further", expected)


@check(
    "draft.d2t",
    "A reduced vocabulary comes with its d2t",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    between=("mapping",),
    why="NVIDIA-NeMo/Automodel#2447: the mapping lay in a file beside, vLLM took draft ids for verifier ids, "
    "and acceptance collapsed.",
    remedy="save d2t in the checkpoint: vLLM reads only that, and takes a missing one as identity without a word",
)
def d2t(a: Artefacts) -> Finding:
    """d2t where the draft vocabulary is smaller than the verifier's: its form, its own t2d, and the mapping's d2t."""
    full = a.verifier.vocab_size if a.verifier else int(a.draft.transformer.get("vocab_size") or 0)
    expected = f"d2t [{a.draft.vocab_size}]"
    if "d2t" not in a.tensors:
        if a.draft.vocab_size >= full:
            return Finding("pass", "full vocabulary, none needed", expected)
        return Finding("fail", f"none, with {a.draft.vocab_size:,} of {full:,} tokens", expected)
    form = a.tensors["d2t"]
    if form.dtype != "I64" or list(form.shape) != [a.draft.vocab_size]:
        return Finding("fail", f"{form.dtype} {list(form.shape)}", f"I64 [{a.draft.vocab_size}]")
    mine = a.draft.tensor("d2t")
    if a.mapping is not None and a.mapping.d2t is not None and not torch.equal(mine, a.mapping.d2t.flatten().long()):
        return Finding("fail", "not the mapping's: the draft was trained with another", "the mapping's d2t")
    targets = torch.arange(len(mine)) + mine
    if bool((targets[1:] <= targets[:-1]).any()) or int(targets[0]) < 0 or (full and int(targets[-1]) >= full):
        return Finding("fail", "i + d2t[i] is not rising within the vocabulary: ids in place of offsets?", expected)
    if "t2d" in a.tensors and not torch.equal(a.draft.tensor("t2d").flatten().bool().nonzero().flatten(), targets):
        return Finding("fail", "the checkpoint's own t2d selects other tokens", "t2d and d2t of one build")
    return Finding("pass", f"[{len(mine)}]", expected)


@check(
    "draft.finite",
    "All weights are finite",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    why="z-lab/dflash#115: one norm weight became NaN after 240 steps, and every output with it.",
    remedy="go back to an earlier checkpoint and a lower learning rate",
)
def finite(a: Artefacts) -> Finding:
    """Tensors with NaN or Inf."""
    wrong = []
    for name, entry in a.tensors.items():
        if entry.dtype in FLOATS:
            tensor = a.draft.tensor(name)
            if bad := int((~tensor.isfinite()).sum()):
                wrong.append(f"{name}: {bad:,} of {tensor.numel():,}")
    return Finding(
        "fail" if wrong else "pass", "; ".join(wrong[:3]) or f"{len(a.tensors)} tensors", "none with NaN or Inf"
    )


@check(
    "draft.zeros",
    "No weight is all zero",
    bridge=BRIDGE,
    needs=("draft", "tensors"),
    why="osaurus-ai/vmlx-swift#217: shards shorter than they should be loaded without an error, as zeros or leftovers.",
    remedy="copy the checkpoint anew, or go back to an earlier one",
)
def zeros(a: Artefacts) -> Finding:
    """Weights, of matrices and norms, without any value but zero."""
    weights = [name for name, entry in a.tensors.items() if name.endswith(".weight") and entry.dtype in FLOATS]
    wrong = [name for name in weights if not bool(a.draft.tensor(name).any())]
    return Finding("fail" if wrong else "pass", ", ".join(wrong[:3]) or f"none of {len(weights)}", "none")
