"""What one RL step has sampled and computed before its update, and how that is cut into forwards of equal number.

Legend: N responses of the step over all ranks, B of a micro-batch, Q padded prompt length, R padded response length,
T = Q + R.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common import distributed
from common.batches import pack_micro_batches, rank_micro_batches
from common.generation import Rollout


@dataclasses.dataclass(frozen=True)
class Experience:
    """Everything the update needs, for all N responses, the same on every rank. (N, R) unless said otherwise.

    Old-policy quantities (logprobs, ref_logprobs, values) were computed once, by the weights that sampled.
    """

    query: Tensor  # (N, Q)
    query_mask: Tensor  # (N, Q) bool
    response: Tensor
    mask: Tensor  # bool
    rollout_logprobs: Tensor
    truncated: Tensor  # (N,) bool
    scores: Tensor  # (N,) as fused, before clipping and penalties
    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One training forward: whole sequences, and the columns of their responses that the losses read."""

    rows: list[int]  # of the rollout batch; none in a forward of weight zero
    ids: Tensor  # (B, T)
    seen: Tensor  # (B, T) bool: what attention may see
    query_length: int
    response: Tensor  # (B, R)
    mask: Tensor  # (B, R) bool: what counts in the loss; all False in a row of weight zero
    logprobs: Tensor  # (B, R), and so are the rest
    ref_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """The scoring forwards of a step: under ZeRO-3 every rank has to run equally many."""

    size: int  # rows in one forward
    count: int  # forwards on every rank


def forward_plan(num_responses: int, size: int) -> ForwardPlan:
    """Cuts the rows of the busiest rank into forwards of `size` rows; 0 for one forward of them all."""
    most = -(-num_responses // distributed.world_size())
    size = size or most
    return ForwardPlan(size, -(-most // size))


def scoring_forwards(rollout: Rollout, plan: ForwardPlan) -> Iterator[tuple[list[int], bool]]:
    """Row numbers of this rank's forwards, similar lengths together. True: run it, but its result is not needed."""
    lengths = (rollout.query_mask.sum(1) + rollout.mask.sum(1)).tolist()
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    for number in range(plan.count):
        rows = order[number * plan.size : (number + 1) * plan.size]
        yield (rows, False) if rows else ([0], True)


def gather(rollout: Rollout, computed: dict[str, Tensor], num_responses: int, pad_id: int) -> Experience:
    """Joins all ranks' rows in global order. `computed`: this rank's further fields, by name."""
    fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)} | computed
    fill = {"query": pad_id, "response": pad_id}
    joined = {
        name: distributed.gather_rows(tensor, num_responses, fill=fill.get(name, 0), left=name.startswith("query"))
        for name, tensor in fields.items()
    }
    return Experience(**joined)


def micro_batches(
    rows: list[int], experience: Experience, advantages: Tensor, returns: Tensor, size: int, max_tokens: int
) -> list[MicroBatch]:
    """This rank's share of a minibatch (`rows` of the experience), as many micro-batches on every rank.

    They hold `size` rows, or with `max_tokens` above 0 as many as make no more tokens than that, padding included.
    Similar lengths go together and columns of padding only are cut off. A rank with nothing left for a forward runs a
    row of weight zero.
    """
    queries, responses = experience.query_mask.sum(1).tolist(), experience.mask.sum(1).tolist()
    rows = sorted(rows, key=lambda row: queries[row] + responses[row])

    def padded_tokens(group: list[int]) -> int:
        return len(group) * (max(queries[row] for row in group) + max(responses[row] for row in group))

    rank, world, batches = distributed.rank(), distributed.world_size(), []
    if max_tokens:
        dealt = pack_micro_batches(rows, rank, world, padded_tokens, max_tokens)
    else:
        dealt = rank_micro_batches(rows, rank, world, size)
    for own in dealt:
        index = own or rows[:1]
        part = rows_of(experience, index)
        ids, seen = sequence(part)
        width = part["mask"].shape[1]
        batches.append(
            MicroBatch(
                rows=own,
                ids=ids,
                seen=seen,
                query_length=part["query"].shape[1],
                response=part["response"],
                mask=part["mask"] if own else torch.zeros_like(part["mask"]),
                logprobs=part["logprobs"],
                ref_logprobs=part["ref_logprobs"],
                values=part["values"],
                advantages=advantages[index, :width],
                returns=returns[index, :width],
            )
        )
    return batches


def rows_of(record: Rollout | Experience, index: list[int]) -> dict[str, Tensor]:
    """Some rows of a record, by field, without the columns in which all of them are padding."""
    part = {field.name: getattr(record, field.name)[index] for field in dataclasses.fields(record)}
    first = int(part["query_mask"].any(0).long().argmax())
    width = max(1, int(part["mask"].any(0).sum()))
    for name, tensor in part.items():
        if name.startswith("query"):
            part[name] = tensor[:, first:]
        elif tensor.dim() > 1:
            part[name] = tensor[:, :width]
    return part


def sequence(part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Prompt and response side by side, (B, T), and what attention may see, (B, T) bool."""
    return torch.cat([part["query"], part["response"]], 1), torch.cat([part["query_mask"], part["mask"]], 1)


def permutation(seed: int, step: int, epoch: int, num_responses: int) -> list[int]:
    """The order of all responses in one PPO epoch: a function of its arguments, so the same on every rank."""
    # Counter word 2 is 1 here and 0 in the sampler's noise, so the two never draw the same numbers.
    noise = np.random.Generator(np.random.Philox(key=(seed % 2**64, step), counter=(0, 0, 1, epoch)))
    return np.argsort(noise.random(num_responses), kind="stable").tolist()
