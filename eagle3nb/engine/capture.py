"""How hidden states leave vLLM: two ways behind one small interface, chosen per device.

``forward`` (CPU, eager): the model's own auxiliary outputs, the same that serving an EAGLE-3 draft switches on, are
taken from the runner's forward call and split by request. Nearly free, needs neither a draft method nor a
connector; it sees nothing inside captured graphs.

``connector`` (GPU): vLLM's draft method ``extract_hidden_states`` with ``ExampleHiddenStatesConnector``. It verifies
one dummy draft token a step, which costs nothing where decoding is bound by memory, and keeps CUDA graphs. On a
CPU it works with the plain copy of ``CpuHiddenStatesConnector``, at up to twice the arithmetic.

Both use the same layer ids: k = residual stream at the input of layer k, k = n before the final norm.
A request's states end one token before its tokens: the last token was an output only.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save

from eagle3nb.engine import settings
from eagle3nb.errors import Refused


def choose(wanted: str) -> str:
    """``auto`` is ``forward`` on a CPU, ``connector`` on a GPU."""
    if wanted != "auto":
        return wanted
    return "forward" if settings.device() == "cpu" else "connector"


class Forward:
    """Capture by the forward pass; the states stay in the worker until they are taken."""

    def __init__(self, layer_ids: list[int], folder: Path):
        self.layer_ids = layer_ids
        self.engine_arguments = {"worker_extension_cls": f"{__name__}.ForwardWorkerExtension"}

    def attach(self, llm: Any) -> None:
        if settings.device() != "cpu" and not llm.llm_engine.model_config.enforce_eager:
            raise Refused("capture: forward needs engine_args: {enforce_eager: true} on a GPU; or use connector")
        llm.collective_rpc("start_capture", args=(self.layer_ids,))

    def sampling(self, i: int) -> dict[str, Any]:
        return {}

    def take(self, llm: Any, request_id: str, i: int) -> torch.Tensor:
        """States [tokens fed, layers, hidden] of a finished request; forgets them."""
        # As bytes: between vLLM's processes a tensor of an untyped answer does not come back as one.
        return load(llm.collective_rpc("take_states", args=(request_id,))[0])["states"]


class ForwardWorkerExtension:
    """Mixed into vLLM's worker (``worker_extension_cls``)."""

    def start_capture(self, layer_ids: list[int]) -> None:
        runner = self.model_runner
        model = runner.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise Refused(f"{type(model).__name__} in vLLM has no auxiliary outputs; EAGLE-3 cannot serve it either")
        model.set_aux_hidden_state_layers(tuple(layer_ids))
        self._pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._scheduled: Any = None
        original_execute, original_forward = runner.execute_model, runner._model_forward

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._scheduled = scheduler_output
            try:
                return original_execute(scheduler_output, *args, **kwargs)
            finally:
                self._scheduled = None

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            hidden, layers = original_forward(*args, **kwargs)
            if self._scheduled is not None and self.rank == 0:
                # One contiguous [tokens, layers, hidden] a step; requests keep views of it.
                self._split(torch.stack([layer.to(torch.bfloat16) for layer in layers], dim=1).cpu())
            return hidden

        runner.execute_model, runner._model_forward = execute_model, model_forward

    def _split(self, states: torch.Tensor) -> None:
        batch, start = self.model_runner.input_batch, 0
        for row, request_id in enumerate(batch.req_ids):
            count = self._scheduled.num_scheduled_tokens[request_id]
            # The position, not the order of arrival: a preempted request is computed again from 0.
            position = int(batch.num_computed_tokens_cpu[row])
            self._pieces.setdefault(request_id, []).append((position, states[start : start + count]))
            start += count

    def take_states(self, request_id: str) -> bytes:
        # The engine appends a random suffix to the request's id.
        key = next((k for k in self._pieces if k == request_id or k.rpartition("-")[0] == request_id), None)
        if key is None:
            return save({"states": torch.empty(0)})
        pieces = self._pieces.pop(key)
        length = max(position + piece.shape[0] for position, piece in pieces)
        out = pieces[0][1].new_empty((length, *pieces[0][1].shape[1:]))
        for position, piece in pieces:
            out[position : position + piece.shape[0]] = piece
        return save({"states": out})


class Connector:
    """Capture by vLLM's own method; the connector writes one file a request into ``folder``."""

    def __init__(self, layer_ids: list[int], folder: Path):
        self.folder = folder
        connector: dict[str, Any] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder), "allow_custom_save_path": True},
        }
        if settings.device() == "cpu":
            connector |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": CONNECTOR_MODULE}
        self.engine_arguments = {
            "kv_transfer_config": connector,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
            },
        }

    def attach(self, llm: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, i: int) -> Path:
        return self.folder / f"sample_{i}.safetensors"

    def sampling(self, i: int) -> dict[str, Any]:
        parameters = {"include_output_tokens": True, "hidden_states_path": str(self.path(i))}
        return {"extra_args": {"kv_transfer_params": parameters}}

    def take(self, llm: Any, request_id: str, i: int) -> torch.Tensor | None:
        """States [tokens fed, layers, hidden], or None where the connector has not written them yet."""
        import fcntl

        path, lock = self.path(i), Path(f"{self.path(i)}.lock")
        if not path.is_file() or not lock.is_file():
            return None
        with open(lock) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)  # held by the writer until the file is complete
        with safe_open(path, "pt") as handle:
            states = handle.get_tensor("hidden_states")
        os.remove(path)
        os.remove(lock)
        return states


CONNECTOR_MODULE = "eagle3nb.engine.cpu_connector"
MECHANISMS = {"forward": Forward, "connector": Connector}
