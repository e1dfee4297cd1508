"""The training loop of stages that learn from a fixed set of examples: a step's rows, the step, evaluation.

A stage says what is its own (a `Task`); how rows become micro-batches, equally many on every rank, is the same for all.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from common import distributed, engine
from common.batches import num_steps, pack_micro_batches, rank_micro_batches, step_rows
from common.engine import TrainedModel
from common.metrics import Stopwatch
from common.runs import Run


@dataclasses.dataclass(frozen=True)
class Batches:
    """How examples are cut into steps. max_steps 0: as many as num_train_epochs takes; eval_steps 0: at the end;
    max_tokens_per_micro_batch 0: micro-batches of per_device_train_batch_size examples, however long they are."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_train_epochs: float
    max_steps: int
    eval_steps: int
    seed: int
    max_tokens_per_micro_batch: int = 0

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
        return self.max_steps or num_steps(num_examples, self.size, self.num_train_epochs)

    def words(self, num_examples: int) -> str:
        """How a run of these steps sees the examples."""
        repeats = self.max_steps and self.size > num_examples
        again = f", so each of the {num_examples} comes several times in it" if repeats else ""
        return f"{self.size} a step{again}, {self.steps(num_examples)} steps"

    def rows(self, step: int, num_examples: int) -> list[int]:
        """Row numbers of a 0-based step."""
        return step_rows(step, self.size, num_examples, self.seed, None if self.max_steps else self.num_train_epochs)


@dataclasses.dataclass(frozen=True)
class Task:
    """What one stage learns.

    length: tokens of an example, of its longest row if it makes several, so that similar ones share a micro-batch.
    collate: (examples, filler) -> tensors; no examples means a row of zero weight made from the filler.
    loss: batch -> (loss summed over what counts, named sums).
    count: what a step's loss is averaged over, from its examples.
    figures: (sums, count) -> the metrics of a step or an evaluation.
    rows: of the padded batch that one example makes.
    """

    length: Callable[[object], int]
    collate: Callable[[list, object], dict[str, torch.Tensor]]
    loss: Callable[[dict], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    count: Callable[[list], int]
    figures: Callable[[dict[str, float], int], dict[str, float]]
    rows: int = 1


def train(
    model: TrainedModel, train_set: Sequence, eval_set: Sequence, task: Task, batches: Batches, run: Run
) -> tuple[dict[str, float], dict[str, float]]:
    """Runs all steps, or those left. Returns the last step's metrics and the last evaluation's sums ({} if none)."""
    total_steps = batches.steps(len(train_set))
    done, counters = run.restore({"model": model})
    record: dict[str, float] = counters.get("record", {})
    eval_sums: dict[str, float] = counters.get("eval_sums", {})
    seen: int = counters.get("num_tokens", 0)
    for step in range(done, total_steps):
        clock = Stopwatch()
        rows = batches.rows(step, len(train_set))
        examples = {row: train_set[row] for row in rows}
        count = task.count([examples[row] for row in rows])

        def share(batch, count=count):
            loss, sums = task.loss(batch)
            return loss / count, sums

        micro_batches, dealt = _micro_batches(rows, examples, task, batches, model.device)
        result = model.train_step(micro_batches, share, step + 1, dealt)
        seen += sum(task.length(examples[row]) for row in rows)
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
        run.log.log(step + 1, record, {"total": clock.seconds()})
        counters = {"record": record, "eval_sums": eval_sums, "num_tokens": seen}
        run.after_step(step + 1, {"model": model}, counters)
    return record, eval_sums


def evaluate(
    model: TrainedModel, eval_set: Sequence, task: Task, batches: Batches
) -> tuple[dict[str, float], dict[str, float]]:
    """The task's figures, loss included, over a set of examples; and the sums they were made from."""
    sums: dict[str, torch.Tensor] = {}
    count = 0
    with model.evaluating():
        for start in range(0, len(eval_set), batches.size):
            rows = list(range(start, min(start + batches.size, len(eval_set))))
            examples = {row: eval_set[row] for row in rows}
            count += task.count(list(examples.values()))
            for batch in _micro_batches(rows, examples, task, batches, model.device)[0]:
                loss, parts = task.loss(batch)
                distributed.accumulate(sums, parts | {"loss": loss})
    totals = distributed.sum_over_ranks(sums, model.device)
    return task.figures(totals, count) | {"loss": totals["loss"] / count}, totals


def _micro_batches(
    rows: list[int], examples: dict[int, object], task: Task, batches: Batches, device: torch.device
) -> tuple[list[dict[str, torch.Tensor]], list[list[int]]]:
    """This rank's share of a step and its row numbers; similar lengths together, so that little of it is padding."""
    rows = sorted(rows, key=lambda row: task.length(examples[row]))
    rank, world = distributed.rank(), distributed.world_size()
    if batches.max_tokens_per_micro_batch:

        def padded_tokens(group: list[int]) -> int:
            return task.rows * len(group) * max(task.length(examples[row]) for row in group)

        dealt = pack_micro_batches(rows, rank, world, padded_tokens, batches.max_tokens_per_micro_batch)
    else:
        dealt = rank_micro_batches(rows, rank, world, batches.per_device_train_batch_size)
    made = [task.collate([examples[row] for row in micro], examples[rows[0]]) for micro in dealt]
    return [{name: x.to(device) for name, x in batch.items()} for batch in made], dealt
