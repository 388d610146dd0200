"""Child of the notebook explore_draft: the draft's proposals at every verifier step of a response.

The draft is speculators' own model. Its forward with ``ttt_steps`` = k gives, for every position at once, what the
draft proposes for the next k tokens if all of its earlier proposals were right. A server keeps proposals up to the
first wrong one only, so walking over the response with these is what greedy verification does.

The verifier's states and its greedy response come from a transformers forward, or both from a sample store.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eagle3nb import stage
from eagle3nb.engine import settings
from eagle3nb.engine.job import Progress, run_job
from eagle3nb.errors import Refused
from eagle3nb.files import read_json
from eagle3nb.samples import Store


def explore(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Walk over every response of the job; returns them with their steps."""
    progress(force=True, phase="loading the draft", done=0, total=0)
    dtype = getattr(torch, stage.choose_dtype(job["dtype"], exact=True))
    draft = load_draft(job, dtype)
    source = _from_store if job["samples"] else _from_verifier
    found = []
    total = len(job["samples"] or job["prompts"])
    for tokens, prompt_tokens, states, agreement in source(job, draft.target_layer_ids, dtype, progress):
        steps = walk(draft, tokens, prompt_tokens, states, job["num_speculative_tokens"])
        found.append({"tokens": tokens, "prompt_tokens": prompt_tokens, "agreement": agreement, "steps": steps})
        progress(force=True, phase="drafting", unit="responses", done=len(found), total=total)
    return {"responses": found, "dtype": str(dtype).removeprefix("torch."), "layer_ids": draft.target_layer_ids}


def load_draft(job: dict[str, Any], dtype: torch.dtype) -> Any:
    """speculators' draft model from a checkpoint, with this verifier's weights where the checkpoint has none."""
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    folder = Path(job["checkpoint"])
    if read_json(folder / "config.json", {}).get("speculators_model_type") != "eagle3":
        raise Refused(f"{folder} is no EAGLE-3 checkpoint of speculators; turn it into one with `speculators convert`")
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = job["verifier_path"]
    config.transformer_layer_config._attn_implementation = "sdpa"
    # On GPUs speculators compiles the forward; `walk` wants its hook to see every call.
    torch.compiler.set_stance("force_eager")
    if settings.device() == "cpu":
        torch.set_num_threads(settings.cores())
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=dtype).to(settings.device()).eval()


def _from_verifier(
    job: dict[str, Any], layer_ids: list[int], dtype: torch.dtype, progress: Progress
) -> Iterator[tuple[list[int], int, torch.Tensor, float]]:
    """(tokens, prompt tokens, states [seq, layers, hidden], share of the response that is its own first choice)."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    progress(force=True, phase="loading the verifier", done=0, total=0)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            job["verifier_path"], dtype=dtype, trust_remote_code=job["trust_remote_code"],
            device_map="auto" if settings.device() == "cuda" else None,
        ).eval()  # fmt: skip
    except (ValueError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise Refused(f"transformers does not load this verifier ({why}); look at `samples` of the store") from error
    greedy = GenerationConfig(
        max_new_tokens=job["max_new_tokens"], do_sample=False, eos_token_id=job["eos_token_ids"],
        pad_token_id=job["eos_token_ids"][0],
    )  # fmt: skip
    for number, (prompt, response) in enumerate(zip(job["prompts"], job["responses"], strict=True)):
        progress(phase="the verifier writes", unit="responses", done=number, total=len(job["prompts"]))
        tokens = torch.tensor([prompt + (response or [])], device=model.device)
        if response is None:
            tokens = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)
        out = model(tokens, output_hidden_states=True)
        # hidden_states[k] of transformers is the input of layer k for every k below the number of layers.
        states = torch.stack([out.hidden_states[k][0].to(model.device) for k in layer_ids], 1)
        own = out.logits[0, len(prompt) - 1 : -1].argmax(-1) == tokens[0, len(prompt) :]
        yield tokens[0].tolist(), len(prompt), states, float(own.float().mean())


def _from_store(
    job: dict[str, Any], layer_ids: list[int], dtype: torch.dtype, progress: Progress
) -> Iterator[tuple[list[int], int, torch.Tensor, None]]:
    """The same from samples whose states were captured; nothing but the draft is computed."""
    store = Store(job["store"])
    info, data = store.info, store.dataset()
    missing = [k for k in layer_ids if k not in info["layer_ids"]]
    if missing:
        raise Refused(f"the draft reads layers {layer_ids}, the store has {info['layer_ids']}: not made for each other")
    columns = [info["layer_ids"].index(k) for k in layer_ids]
    for i in job["samples"]:
        if not 0 <= i < len(data):
            raise Refused(f"sample {i}: the store has samples 0 to {len(data) - 1}")
        row = data[i]
        start = int(row["loss_mask"].argmax())
        yield row["input_ids"].tolist(), start, store.hidden_states(i)[:, columns].to(dtype), None


def walk(draft: Any, tokens: list[int], prompt_tokens: int, states: torch.Tensor, k: int) -> list[dict[str, Any]]:
    """The verifier steps of a response as a server with this draft would take them.

    ``states`` [seq, layers, hidden] of ``tokens``. A step is ``{"at", "size", "proposed", "why", "rank"}``: the index
    of its first token, the tokens it yields, the proposals up to the first wrong one, and what ended it: ``all``
    accepted, ``outside`` (the right token is not in the draft vocabulary), ``wrong`` (``rank``: place of the right one
    in the draft's list, 1 is its second choice), ``end`` of the response. The first step has no draft.
    """
    seq, device = len(tokens), settings.device()
    if seq - prompt_tokens < 1:
        return []
    logits: list[torch.Tensor] = []  # per draft position [seq - 1, draft vocabulary]
    hook = draft.lm_head.register_forward_hook(lambda _module, _inputs, out: logits.append(out[0]))
    ids = torch.tensor([tokens], device=device)
    try:
        # Training's alignment: token j + 1 beside the state of token j proposes token j + 2.
        draft(
            hidden_states=states[:-1].flatten(1)[None].to(device), input_ids=ids[:, 1:],
            document_ids=torch.zeros_like(ids[:, 1:]), ttt_steps=k,
        )  # fmt: skip
    finally:
        hook.remove()
    to_draft, to_verifier = _vocabulary(draft)
    steps, at = [{"at": prompt_tokens, "size": 1, "proposed": [], "why": "first", "rank": None}], prompt_tokens + 1
    while at < seq:
        step: dict[str, Any] = {"at": at, "proposed": [], "why": "all", "rank": None}
        accepted = 0
        for position in range(k):
            scores = logits[position][at - 2]
            step["proposed"].append(to_verifier(int(scores.argmax())))
            if at + position >= seq:
                step["why"] = "end"
                break
            right = tokens[at + position]
            if step["proposed"][-1] != right:
                own = to_draft(right)
                step["why"] = "outside" if own is None else "wrong"
                step["rank"] = None if own is None else int((scores > scores[own]).sum())
                break
            accepted += 1
        step["size"] = min(accepted + 1, seq - at)
        steps.append(step)
        at += step["size"]
    return steps


def _vocabulary(draft: Any) -> tuple[Any, Any]:
    """(verifier id -> draft id or None, draft id -> verifier id); the same ids where there is one vocabulary."""
    if draft.d2t is None:
        return (lambda token: token), (lambda token: token)
    targets = (draft.d2t.cpu() + torch.arange(len(draft.d2t))).tolist()
    own = {target: i for i, target in enumerate(targets)}
    return own.get, targets.__getitem__


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run_job(explore)
