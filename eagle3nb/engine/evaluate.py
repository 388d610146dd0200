"""Child of stage 05: one engine, with or without the draft; greedy responses, their draft steps, its speed.

Quality is measured on all prompts, many at once; speed on some of them, ``concurrency`` at once, in a fresh engine each
turn. A step's size is the number of tokens it yields: accepted draft tokens and the verifier's own one.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from eagle3nb import stage
from eagle3nb.engine import drafts, settings
from eagle3nb.engine.job import Progress, run_job


def evaluate(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Serve the prompts of the job; returns responses, steps, counters and timings."""
    progress(force=True, phase=f"{job['label']}: starting the engine", done=0, total=0)
    dtype = stage.choose_dtype(job["dtype"], exact=True)
    started, own = time.monotonic(), {"disable_log_stats": False, "dtype": dtype}
    if job["draft"]:
        own["speculative_config"] = {
            "method": "eagle3",
            "model": job["draft"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    # An extension that the user names goes first; then nothing is recorded.
    record = job["record"] if job["draft"] and "worker_extension_cls" not in job["engine_args"] else []
    if record:
        own["worker_extension_cls"] = drafts.EXTENSION
    if job["uses_mla"] and settings.device() == "cpu":
        # There, latent and ordinary attention share no block size; without the draft too, so that outputs compare.
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    llm = settings.start_llm(job, **own)
    result: dict[str, Any] = {"engine_start_seconds": time.monotonic() - started, "dtype": dtype}
    prompts = job["prompts"]
    serve(llm, prompts[:1], job["max_new_tokens"], 1)  # the first requests also pay for kernels being chosen
    if job["measure_quality"]:
        before = counters(llm)
        result["responses"] = serve(
            llm, prompts, job["max_new_tokens"], job["max_num_seqs"], progress, f"{job['label']}: all prompts", record
        )
        result["counters"] = {name: _minus(value, before.get(name)) for name, value in counters(llm).items()}
    timed = prompts[: job["speed_prompts"]]
    begin = time.perf_counter()
    responses = serve(llm, timed, job["max_new_tokens"], job["concurrency"], progress, f"{job['label']}: speed")
    seconds = time.perf_counter() - begin
    tokens = sum(len(response["tokens"]) for response in responses)
    result |= {"speed_tokens": tokens, "speed_seconds": seconds, "tokens_per_s": tokens / seconds}
    return result


def serve(
    llm: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    at_once: int,
    progress: Progress | None = None,
    phase: str = "",
    record: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Greedy responses to token prompts, ``at_once`` in the engine: per prompt ``tokens`` and ``steps``.

    Prompts in ``record`` also get ``drafts``: what the draft proposed at each step (None where that is not known).
    """
    from vllm import SamplingParams

    engine, waiting, done = llm.llm_engine, list(enumerate(prompts))[::-1], 0
    answers: list[dict[str, Any]] = [{"tokens": [], "steps": []} for _ in prompts]
    running: dict[str, int] = {}
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
    begin = time.monotonic()
    names = [f"{phase}-{i}-{begin}" for i in range(len(prompts))]
    if record:
        llm.collective_rpc("record_drafts", args=([names[i] for i in record],))
    while waiting or running:
        while waiting and len(running) < at_once:
            i, prompt = waiting.pop()
            engine.add_request(names[i], {"prompt_token_ids": prompt}, sampling)
            running[names[i]] = i
        for output in engine.step():
            answer, tokens = answers[running[output.request_id]], list(output.outputs[0].token_ids)
            if len(tokens) > len(answer["tokens"]):
                answer["steps"].append(len(tokens) - len(answer["tokens"]))
                answer["tokens"] = tokens
            if output.finished:
                del running[output.request_id]
                done += 1
        if progress:
            count = sum(len(answer["tokens"]) for answer in answers)
            seconds = time.monotonic() - begin
            progress(
                phase=phase, unit="prompts", done=done, total=len(prompts), tokens=count,
                tokens_per_s=count / max(seconds, 1e-3), seconds=seconds,
            )  # fmt: skip
    if record:
        noted = llm.collective_rpc("take_drafts")[0]
        for i in record:
            answers[i]["drafts"] = drafts.align(noted[names[i]], **answers[i])
    return answers


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own counters of drafts, draft tokens and accepted tokens (per position)."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            found[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def _minus(now: Any, before: Any) -> Any:
    if before is None:
        return now
    return [a - b for a, b in zip(now, before, strict=True)] if isinstance(now, list) else now - before


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run_job(evaluate)
