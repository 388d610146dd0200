"""vLLM's hidden-state connector without CUDA streams, for machines without a GPU."""

from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_connector


class _Done:
    """What the connector asks of a CUDA event; a plain copy is complete when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuHiddenStatesConnector(vllm_connector.ExampleHiddenStatesConnector):
    """Copies a finished request's states out of the cache with an ordinary copy."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None, :] + blocks[:, None] * self._block_size).flatten()
        count = pending.token_ids.shape[0]
        states = vllm_connector.extract_from_kv_cache(self._kv_cache, slots, count).clone()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        done = _Done()
        future = self._executor.submit(
            self._write_tensors, tensors, done, pending.filename, self._lock_fds.pop(pending.req_id, None)
        )
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
