"""Child of stage 02: one engine, one pass; responses are written and their hidden states captured at once.

Every request asks for one token more than its sample needs and that token is thrown away: the state of the last
sample token exists only once the token has been fed. So a sample always has as many states as tokens.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from eagle3nb import stage
from eagle3nb.engine import capture, settings
from eagle3nb.engine.job import Progress, run_job
from eagle3nb.errors import Refused
from eagle3nb.samples import Declaration, Store


def extract(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Fill the store with the rows of this shard that are not there yet."""
    from datasets import load_from_disk

    progress(force=True, phase="starting the engine", done=0, total=0)
    rows = load_from_disk(job["rows"])
    store = Store(job["store"])
    dtype = stage.choose_dtype(job["dtype"], exact=False)
    mine = [i for i in range(len(rows)) if i % job["num_shards"] == job["shard"]]
    moved = store.begin(Declaration(**job["declaration"], compute_dtype=dtype), mine)
    if moved:
        print(f"the store there was made from other inputs; it is kept as {moved.name}", flush=True)
    before = store.written()
    todo = [i for i in mine if i not in before]
    result = {"samples": len(mine), "resumed": len(mine) - len(todo), "compute_dtype": dtype}
    if todo:
        result |= _run_engine(job, rows, todo, store, dtype, progress)
    if len(store.written()) == len(rows):
        progress(force=True, phase="writing the dataset", done=len(mine), total=len(mine))
        store.finish([_dataset_row(store, rows[i], i) for i in range(len(rows))])
        result["complete"] = True
    return result


def _step(engine: Any, single_process: bool) -> list[Any]:
    """One engine step; also when all requests are done, since states may still be on their way out."""
    if engine.has_unfinished_requests() or single_process:
        return engine.step()
    time.sleep(0.05)  # the engine's own process goes on by itself; a step here would wait for a request
    return []


def _dataset_row(store: Store, row: dict[str, Any], i: int) -> dict[str, Any]:
    tokens = store.token_ids(i)
    mask = row["loss_mask"] if row["loss_mask"] else [0] * len(row["input_ids"])
    # What the verifier wrote itself follows the prompt, and all of it is response.
    return {"input_ids": tokens, "loss_mask": mask + [1] * (len(tokens) - len(mask)), "seq_len": len(tokens)}


def _run_engine(
    job: dict[str, Any], rows: Any, todo: list[int], store: Store, dtype: str, progress: Progress
) -> dict[str, Any]:
    started = time.monotonic()
    mechanism = capture.choose(job["capture"])
    way = capture.MECHANISMS[mechanism](job["declaration"]["layer_ids"], store.folder / ".connector")
    llm = settings.start_llm(job, dtype=dtype, **way.engine_arguments)
    way.attach(llm)
    from vllm import SamplingParams

    engine, ends = llm.llm_engine, set(job["eos_token_ids"])
    ready = time.monotonic()

    for i in todo:
        new_tokens = rows[i]["max_new_tokens"]
        engine.add_request(
            str(i),
            {"prompt_token_ids": rows[i]["input_ids"]},
            SamplingParams(
                temperature=job["declaration"]["temperature"],
                seed=job["seed"] + i if job["declaration"]["temperature"] else None,
                max_tokens=new_tokens + 1,
                ignore_eos=True,
                detokenize=False,
                **way.sampling(i),
            ),
        )

    finished = generated = tokens = 0
    fed: dict[str, int] = {}  # request id -> its tokens so far
    waiting: dict[str, list[int]] = {}  # request id -> the sample's tokens; its states are on their way
    with ThreadPoolExecutor(2) as writers:
        writes: list[Future] = []
        while engine.has_unfinished_requests() or waiting:
            for output in _step(engine, job["single_process"]):
                i, row = int(output.request_id), rows[int(output.request_id)]
                response = list(output.outputs[0].token_ids)
                fed[output.request_id] = len(row["input_ids"]) + len(response)
                end = next((k for k, t in enumerate(response) if t in ends), None)
                if end is not None and len(response) > end + 1 and not output.finished:
                    engine.abort_request([output.request_id])
                elif not output.finished:
                    continue
                keep = row["max_new_tokens"] if end is None else min(end + 1, row["max_new_tokens"])
                waiting[output.request_id] = list(row["input_ids"]) + response[:keep]
                generated += keep
            for request_id, sample in list(waiting.items()):
                states = way.take(llm, request_id, int(request_id))
                if states is None:
                    continue
                del waiting[request_id]
                if states.shape[0] < len(sample):
                    raise Refused(f"sample {request_id}: {states.shape[0]} states captured for {len(sample)} tokens")
                writes.append(writers.submit(store.write, int(request_id), states[: len(sample)], sample))
                finished, tokens = finished + 1, tokens + len(sample)
            for write in [w for w in writes if w.done()]:
                writes.remove(write)
                write.result()  # raises what went wrong on the disk
            seconds, so_far = time.monotonic() - ready, sum(fed.values())
            progress(
                phase=f"capture: {mechanism}",
                done=finished,
                total=len(todo),
                tokens=so_far,
                tokens_per_s=so_far / max(seconds, 1e-3),
                seconds=seconds,
            )
        for write in writes:
            write.result()
    seconds = time.monotonic() - ready
    return {
        "capture": mechanism,
        "engine_start_seconds": ready - started,
        "capture_seconds": seconds,
        "tokens": tokens,
        "generated_tokens": generated,
        "tokens_per_s": tokens / seconds,
        "generated_tokens_per_s": generated / seconds,
    }


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run_job(extract)
