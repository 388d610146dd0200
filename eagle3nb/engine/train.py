"""Child of stage 04: speculators' training entry point with its own Trainer, made resumable and CPU-capable.

What differs from ``speculators train``: metrics go to a JSONL file; a checkpoint is complete or not counted; an
interrupted epoch is kept as a checkpoint inside that epoch; the best checkpoint is chosen by predicted acceptance
length. On a CPU, which speculators' Trainer does not know, a few attributes say so.
"""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3nb.draft import predicted_acceptance
from eagle3nb.engine import settings
from eagle3nb.engine.job import Progress, run_job
from eagle3nb.errors import Refused
from eagle3nb.files import move_aside, read_json, read_jsonl, write_json, write_text

RANK = int(os.environ.get("RANK", "0"))


def train(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run the training of ``job["config"]`` to its end, from the last complete checkpoint."""
    from pydantic import ValidationError
    from speculators.train.config import TrainConfig

    if RANK == 0:
        progress(force=True, phase="loading", done=0, total=0)
    folder, metrics = Path(job["config"]["save_path"]), Path(job["metrics"])
    try:
        config = TrainConfig.from_sources(cli=job["config"], argv=["speculators", "train"])
    except (ValidationError, ValueError) as error:
        raise Refused(f"train: speculators refuses the configuration: {' '.join(str(error).split())}") from error
    if RANK == 0:
        _prepare_resume(folder, metrics, job["inputs"])
    trainer = _patched_trainer(metrics, progress, config.trainer.epochs)
    started = time.monotonic()
    from speculators.train import cli

    cli.main(config)
    if trainer.interrupted:
        sys.exit("eagle3nb: training was interrupted; its state is kept: run the stage again to go on")
    return _summary(folder, metrics, time.monotonic() - started) if RANK == 0 else {}


# ---- before: what an earlier attempt left -------------------------------------------------------------------


def _prepare_resume(folder: Path, metrics: Path, inputs: dict[str, Any]) -> None:
    """Keep only what counts: complete checkpoints of these inputs, and metrics up to the last of them."""
    inputs_file = folder / "eagle3nb_inputs.json"
    if read_json(inputs_file, inputs) != inputs:
        print(f"checkpoints of other inputs are kept as {move_aside(folder).name}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(inputs_file, inputs)
    last: dict[str, Any] | None = None
    for path in [p for p in folder.iterdir() if p.name.isdigit() and not p.is_symlink()]:
        state = read_json(path / "training_state.json")
        if state is None:  # killed while it was written
            shutil.rmtree(path)
        elif last is None or state["epoch"] > last["epoch"]:
            last = state
    step = last["global_step"] if last else 0
    epochs = last["epoch"] + (last["local_step"] == 0) if last else 0
    kept = [
        row for row in read_jsonl(metrics)
        if ("train" in row and row["step"] < step) or ("val" in row and row["epoch"] < epochs)
    ]  # fmt: skip
    write_text(metrics, "".join(json.dumps(row) + "\n" for row in kept))


# ---- during --------------------------------------------------------------------------------------------------


class MetricsFile(logging.Handler):
    """Writes the dicts of the logger ``speculators.metrics`` to a JSONL file and reports progress."""

    def __init__(self, path: Path, progress: Progress, total_steps: int, first_step: int):
        super().__init__()
        self.path, self.progress, self.total, self.first = path, progress, total_steps, first_step
        self.started, self.tokens = time.monotonic(), 0

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict):
            return
        row = {"step": getattr(record, "step", None), "time": round(time.time(), 2), **record.msg}
        with open(self.path, "a") as handle:
            handle.write(json.dumps(row) + "\n")
        if "train" not in row:
            self.progress(force=True, phase=f"validated epoch {row['epoch'] + 1}")
            return
        done, seconds = row["step"] + 1, time.monotonic() - self.started
        self.progress(
            phase=f"epoch {row['epoch'] + 1}",
            unit="steps",
            done=done,
            total=self.total,
            # Time per step of this attempt, spread over all steps done, so that a resumed run predicts well.
            seconds=seconds / max(1, done - self.first) * done,
            figures={"loss": row["train"].get("loss", 0.0), "accuracy": row["train"].get("full_acc_0", 0.0)},
        )


def _patched_trainer(metrics: Path, progress: Progress, epochs: int) -> type:
    from speculators.train import checkpointer, cli, dataloader, trainer

    trainer.tqdm = lambda batches, **_: batches  # the progress line is ours; the log stays readable
    on_cpu = settings.device() == "cpu"
    if on_cpu:
        torch.accelerator.synchronize = lambda *_: None
        checkpointer.get_current_device = lambda: "cpu"
        torch.set_num_threads(settings.cores())
        dataloader.CollateFn = _without_padding(dataloader.CollateFn)

    class WorkbookTrainer(trainer.Trainer):
        interrupted = False
        local_step = 0

        if on_cpu:
            local_rank = property(lambda self: "cpu", lambda self, value: None)
            device_type = property(lambda self: "cpu", lambda self, value: None)

        def run_training(self) -> None:
            if self.rank == 0:
                steps = epochs * len(self.train_loader)
                total = min(steps, self.config.max_steps or steps)
                logging.getLogger("speculators.metrics").addHandler(
                    MetricsFile(metrics, progress, total, self.global_step)
                )
                logging.getLogger("speculators.metrics").setLevel(logging.INFO)
            self._validate_what_a_kill_left_out()
            super().run_training()

        def _validate_what_a_kill_left_out(self) -> None:
            """A kill between a checkpoint and its validation leaves an epoch that could never be the best one."""
            epoch = self.current_epoch - 1
            done = {row["epoch"] for row in read_jsonl(metrics) if "val" in row}
            if self.checkpointer.previous_epoch == epoch and epoch >= 0 and epoch not in done:
                self.maybe_update_best(epoch, self.val_epoch(epoch))

        def train_epoch(self, epoch: int, *, step_callback: Any = None) -> None:
            self.epoch_at_work = epoch
            self.local_step = self._resume_local_step if epoch == self.current_epoch else 0

            def count() -> None:
                self.local_step += 1

            super().train_epoch(epoch, step_callback=count)

        def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
            if epoch == "interrupted":
                WorkbookTrainer.interrupted = True
                if self.config.save_best or not self.local_step:
                    return  # the last checkpoint on disk is where it goes on
                epoch, local_step = self.epoch_at_work, self.local_step
                self._training_state_path(epoch).unlink(missing_ok=True)
                self.checkpointer.save_checkpoint(self.model, self.optimizers, epoch)
                if self.schedulers:
                    self.checkpointer.save_scheduler_state_dict(self.schedulers, epoch)
                self._save_training_state(epoch, local_step)
                return
            # Written last by speculators: while a checkpoint is being replaced it must not look complete.
            self._training_state_path(epoch).unlink(missing_ok=True)
            super().maybe_save_checkpoint(epoch, local_step)

        def maybe_update_best(self, epoch: int, val_metrics: dict | None) -> None:
            super().maybe_update_best(epoch, val_metrics)
            if self.config.save_best and self.checkpointer.read_best_epoch() == epoch:
                self._save_training_state(epoch, 0)

    cli.Trainer = WorkbookTrainer
    return WorkbookTrainer


def _without_padding(collate: type) -> type:
    """Batches cut to the rows they hold: compiled GPU kernels want one shape, a CPU would only compute the padding."""

    class CutCollate(collate):
        def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
            batch = super().__call__(rows)
            used = max(1, int((batch["document_ids"] >= 0).sum()))
            return {k: v[:, :used] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    return CutCollate


# ---- after ---------------------------------------------------------------------------------------------------


def _summary(folder: Path, metrics: Path, seconds: float) -> dict[str, Any]:
    from speculators.train.checkpointer import SingleGPUCheckpointer

    rows = read_jsonl(metrics)
    steps, validations = [r for r in rows if "train" in r], [r for r in rows if "val" in r]
    there = {int(p.name) for p in folder.iterdir() if p.name.isdigit() and not p.is_symlink()}
    predictions = {r["epoch"]: predicted_acceptance(r["val"]) for r in validations if r["epoch"] in there}
    if not predictions:
        raise Refused("no epoch was validated; give train.train_share a value that leaves rows to validate on")
    best = max(predictions, key=lambda epoch: sum(predictions[epoch]))
    SingleGPUCheckpointer(folder).update_best_symlink(best)
    return {
        "best_checkpoint": str(folder / str(best)),
        "best_epoch": best,
        "predicted_acceptance_by_position": predictions[best],
        "predicted_acceptance_length": 1 + sum(predictions[best]),
        "epochs": len(validations),
        "steps": len(steps),
        "final_train_loss": steps[-1]["train"].get("loss") if steps else None,
        "validation_loss": {r["epoch"]: r["val"].get("loss_epoch") for r in validations},
        "training_seconds": seconds,
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.cores()))
    run_job(train)
