"""What the draft proposed at each verifier step, for a few requests: recorded in vLLM's worker, no output changed.

The scheduler's output names the draft tokens that a step verifies. Where scheduling is asynchronous (GPUs) it holds
placeholders of -1, and the tokens are still in the model runner: both of vLLM's runners are known here. A step copies
one short row per recorded request; `take_drafts` takes the wrapper out again, so timed turns run without it.
"""

from collections.abc import Sequence
from typing import Any

EXTENSION = f"{__name__}.DraftsWorkerExtension"


class DraftsWorkerExtension:
    """Mixed into vLLM's worker (``worker_extension_cls``)."""

    def record_drafts(self, request_ids: list[str]) -> None:
        """From now on note the draft tokens of every step of these requests."""
        runner = self.model_runner
        original = runner.execute_model
        self._drafts: dict[str, list[list[int]]] = {name: [] for name in request_ids}

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def take_drafts(self) -> dict[str, list[list[int]]]:
        """What was noted: per request one list of draft tokens for each time it was scheduled."""
        del self.model_runner.execute_model  # the class's own method again
        return self._drafts

    def _note(self, scheduler_output: Any) -> None:
        verified = scheduler_output.scheduled_spec_decode_tokens
        for request_id in scheduler_output.num_scheduled_tokens:
            # The engine appends a random suffix to the request's id.
            name = request_id if request_id in self._drafts else request_id.rpartition("-")[0]
            if name in self._drafts:
                drafts = list(verified.get(request_id, ()))
                if -1 in drafts:
                    drafts = self._of_runner(request_id)[: len(drafts)]
                self._drafts[name].append(drafts)

    def _of_runner(self, request_id: str) -> list[int]:
        """The draft tokens that wait in the model runner for this step."""
        runner = self.model_runner
        if hasattr(runner, "req_states"):  # vLLM's second model runner
            return runner.req_states.draft_tokens[runner.req_states.req_id_to_index[request_id]].tolist()
        # Before this step's update the batch is still in the order of the step that proposed.
        return runner._draft_token_ids[runner.input_batch.req_ids.index(request_id)].tolist()


def align(noted: Sequence[list[int]], tokens: Sequence[int], steps: Sequence[int]) -> list[list[int]] | None:
    """The draft tokens of each of ``steps``, or None where what was noted does not explain ``tokens``.

    A request is scheduled more often than it yields tokens: chunks of a long prompt, a step begun before the end was
    known. Of the noted lists the latest stretch is taken in which every step's accepted tokens are its draft's first.
    """
    for skip in range(len(noted) - len(steps), -1, -1):
        drafts = list(noted[skip : skip + len(steps)])
        if _explains(drafts, tokens, steps):
            return drafts
    return None


def _explains(drafts: Sequence[list[int]], tokens: Sequence[int], steps: Sequence[int]) -> bool:
    start = 0
    for number, (draft, size) in enumerate(zip(drafts, steps, strict=True)):
        step, accepted = tokens[start : start + size], size - 1
        last = number == len(steps) - 1  # may be cut short after accepted tokens
        if draft[:accepted] != step[:accepted] or (not last and draft[accepted : accepted + 1] == step[accepted:]):
            return False
        start += size
    return True
