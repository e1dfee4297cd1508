"""The training loop of stages that learn from a fixed set of examples: a step's rows, the step, evaluation.

A stage says what is its own (a `Task`); how rows become micro-batches, equally many on every rank, is the same for all.
"""

import dataclasses
from collections.abc import Callable

import torch

from common import data, distributed, engine
from common.engine import TrainedModel
from common.metrics import MetricsLogger, Stopwatch


@dataclasses.dataclass(frozen=True)
class Batches:
    """How examples are cut into steps. max_steps 0: as many as num_train_epochs takes; eval_steps 0: at the end."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_train_epochs: float
    max_steps: int
    eval_steps: int
    seed: int

    @property
    def size(self) -> int:
        """Examples in one optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * distributed.world_size()

    def sizes(self) -> dict[str, tuple[int, str]]:
        """For `engine.check`: what a DeepSpeed json may say of them."""
        flags = "--per_device_train_batch_size and --gradient_accumulation_steps"
        return engine.batch_sizes(self.per_device_train_batch_size, self.size, flags)

    def steps(self, num_examples: int) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps or data.num_steps(num_examples, self.size, self.num_train_epochs)

    def rows(self, step: int, num_examples: int) -> list[int]:
        """Row numbers of a 0-based step."""
        return data.step_rows(
            step, self.size, num_examples, self.seed, None if self.max_steps else self.num_train_epochs
        )


@dataclasses.dataclass(frozen=True)
class Task:
    """What one stage learns.

    length: tokens of an example, so that similar ones share a micro-batch.
    collate: (examples, filler) -> tensors; no examples means a row of zero weight made from the filler.
    loss: batch -> (loss summed over what counts, named sums).
    count: what a step's loss is averaged over, from its examples.
    figures: (sums, count) -> the metrics of a step or an evaluation.
    """

    length: Callable[[object], int]
    collate: Callable[[list, object], dict[str, torch.Tensor]]
    loss: Callable[[dict], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    count: Callable[[list], int]
    figures: Callable[[dict[str, float], int], dict[str, float]]


def train(
    model: TrainedModel, train_set: list, eval_set: list, task: Task, batches: Batches, log: MetricsLogger
) -> tuple[dict[str, float], dict[str, float]]:
    """Runs all steps. Returns the last step's metrics and the last evaluation's sums (empty if there was none)."""
    total_steps = batches.steps(len(train_set))
    record: dict[str, float] = {}
    eval_sums: dict[str, float] = {}
    seen = 0
    for step in range(total_steps):
        clock = Stopwatch()
        examples = [train_set[row] for row in batches.rows(step, len(train_set))]
        count = task.count(examples)

        def share(batch, count=count):
            loss, sums = task.loss(batch)
            return loss / count, sums

        result = model.train_step(_micro_batches(examples, task, batches, model.device), share, step + 1)
        seen += sum(task.length(example) for example in examples)
        record = task.figures(result.sums, count) | {
            "loss": result.sums["loss"],
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "num_tokens": seen,
            "epoch": (step + 1) * batches.size / len(train_set),
        }
        is_last = step == total_steps - 1
        if eval_set and (is_last or (batches.eval_steps and (step + 1) % batches.eval_steps == 0)):
            figures, eval_sums = evaluate(model, eval_set, task, batches)
            record |= {f"eval_{name}": value for name, value in figures.items()}
        log.log(step + 1, record, {"total": clock.seconds()})
    return record, eval_sums


def evaluate(
    model: TrainedModel, examples: list, task: Task, batches: Batches
) -> tuple[dict[str, float], dict[str, float]]:
    """The task's figures, loss included, over a set of examples; and the sums they were made from."""
    sums: dict[str, torch.Tensor] = {}
    with model.evaluating():
        for start in range(0, len(examples), batches.size):
            for batch in _micro_batches(examples[start : start + batches.size], task, batches, model.device):
                loss, parts = task.loss(batch)
                for name, value in (parts | {"loss": loss}).items():
                    sums[name] = sums.get(name, 0.0) + value.double()
    totals = distributed.sum_over_ranks(sums, model.device)
    count = task.count(examples)
    return task.figures(totals, count) | {"loss": totals["loss"] / count}, totals


def _micro_batches(examples: list, task: Task, batches: Batches, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """This rank's share of a step; similar lengths together, so that little of it is padding."""
    examples = sorted(examples, key=task.length)
    dealt = data.rank_micro_batches(
        examples, distributed.rank(), distributed.world_size(), batches.per_device_train_batch_size
    )
    return [{name: x.to(device) for name, x in task.collate(micro, examples[0]).items()} for micro in dealt]
