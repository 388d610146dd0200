"""Child of the bridges: the verifier's own forward on a few stored samples, compared with what is stored.

transformers in float32, another implementation than the engine that made the states: what both agree on is right.
"""

import os
from typing import Any

import torch

from eagle3nb.engine import settings
from eagle3nb.engine.job import Progress, run_job

SHIFTS = (-1, 0, 1)


def compare(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Distances [samples, shifts, columns, candidates] of the files in ``job["files"]``."""
    from safetensors.torch import load_file

    model = load(job["verifier_path"], job["trust_remote_code"])
    found = []
    for path in job["files"]:
        stored = load_file(path)
        ids = stored["token_ids"][: job["tokens"]].long()
        found.append(distances(stored["hidden_states"][: len(ids)].float(), layers_of(model, ids)).tolist())
    return {"distance": found, "num_layers": len(decoder(model).layers)}


def load(path: str, trust_remote_code: bool) -> torch.nn.Module:
    """The verifier as transformers knows it, float32 on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(settings.cores())
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    nested = config.get_text_config() is not config
    kind = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code).eval()


def decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The module that has the decoder ``layers`` and the final ``norm``."""
    for candidate in (model.get_decoder(), *model.modules()):
        if hasattr(candidate, "layers") and hasattr(candidate, "norm"):
            return candidate
    raise ValueError(f"{type(model).__name__} has no module with layers and a norm")


@torch.inference_mode()
def layers_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[num_layers + 2, seq, hidden]: the input of every layer, the final state before the norm, and after it."""
    text, seen, hooks = decoder(model), [], []

    def keep(module: Any, args: tuple, kwargs: dict) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0].float())

    for module in [*text.layers, text.norm]:
        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    hooks.append(text.norm.register_forward_hook(lambda module, args, out: seen.append(out[0].float())))
    try:
        text(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen)


def distances(stored: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[shifts, columns, candidates]: median of ``|h - r| / |r|`` over positions; the first one, a sink, is left out."""
    seq, columns, _ = stored.shape
    result = torch.full((len(SHIFTS), columns, len(reference)), torch.inf)
    for k, shift in enumerate(SHIFTS):
        first, last = max(1, 1 - shift), min(seq, reference.shape[1] - shift)
        here = stored[first:last].transpose(0, 1)  # (columns, n, hidden)
        if here.shape[1] < 2 or here.shape[2] != reference.shape[2]:
            continue
        there = reference[:, first + shift : last + shift]  # (candidates, n, hidden)
        for c in range(columns):
            ratio = (here[c] - there).norm(dim=-1) / there.norm(dim=-1).clamp_min(1e-12)  # (candidates, n)
            result[k, c] = ratio.nan_to_num(torch.inf).median(-1).values
    return result


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.cores()))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_job(compare)
