"""Which rows make up an optimiser step, how ranks share them, and padded batches.

The rows of step `s` are a pure function of (seed, s), the same for any number of ranks and any micro-batch size, so a
resumed or re-laid-out run sees the same data in the same order.

Legend: B rows of a micro-batch, Q padded prompt length, T padded length.
"""

import bisect
import functools
import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch

from common.examples import PairExample, SFTExample

# ---- which rows a step trains on


def _rows_in_all(n: int, epochs: float) -> int:
    return max(1, round(n * epochs))


def num_steps(n: int, batch_size: int, epochs: float) -> int:
    """Optimiser steps in `epochs` passes over n rows; the last step may be short."""
    return math.ceil(_rows_in_all(n, epochs) / batch_size)


def step_rows(step: int, batch_size: int, n: int, seed: int, epochs: float | None = None) -> list[int]:
    """Row numbers of optimiser step `step` (from 0): a slice of the endless row of shuffled epochs.

    Epochs follow one another without a gap, so every batch is full but for the very last; one that spans two
    epochs may hold a row twice. epochs None: no end. A step past the end is empty.
    """
    assert n > 0 and batch_size > 0 and step >= 0, (step, batch_size, n)
    start, stop = step * batch_size, (step + 1) * batch_size
    if epochs is not None:
        stop = min(stop, _rows_in_all(n, epochs))
    return [int(_epoch_order(n, seed, at // n)[at % n]) for at in range(start, stop)]


@functools.lru_cache(maxsize=4)
def _epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    # Sorting the raw output of a counter-based generator: unlike Generator.permutation, whose algorithm numpy may
    # change, the same in every version. Hashed, so that no other use of Philox(seed) in the project can coincide.
    key = hashlib.sha256(f"epoch order {seed} {epoch}".encode()).digest()[:16]
    noise = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)
    return np.argsort(noise, kind="stable")


def rank_micro_batches(rows: list, rank: int, world: int, micro_size: int) -> list[list]:
    """This rank's share of a step's rows in micro-batches of `micro_size`, as many on every rank.

    Rows are dealt like cards, so shares differ by one at most; a rank that has nothing for a slot gets [] there
    and runs a filler row of zero weight, since all ranks must make the same number of forwards.
    """
    assert 0 <= rank < world and micro_size > 0, (rank, world, micro_size)
    mine = rows[rank::world]
    slots = math.ceil(len(rows) / world / micro_size)
    return [mine[i * micro_size : (i + 1) * micro_size] for i in range(slots)]


def pack_micro_batches(
    rows: list, rank: int, world: int, padded_tokens: Callable[[list], int], max_tokens: int
) -> list[list]:
    """This rank's share of a step's rows in micro-batches of at most `max_tokens`, as many on every rank.

    Args:
        rows: from short to long, so that neighbours need little padding.
        padded_tokens: what a micro-batch of these rows takes, padding included; more for more rows.
        max_tokens: only a row that alone takes more is over it, by itself in its micro-batch.

    Each rank gets as few as can be. Then they are made as small as that number allows, and the largest are halved
    until every rank has one for each slot. Those of a size share a slot, which takes as long as its largest one.
    """
    fewest = math.ceil(len(_filled(rows, padded_tokens, max_tokens)) / world)
    limit = bisect.bisect_left(
        range(max_tokens), -fewest, key=lambda most: -math.ceil(len(_filled(rows, padded_tokens, most)) / world)
    )
    groups = _filled(rows, padded_tokens, limit)
    while len(groups) < min(fewest * world, len(rows)):
        largest = max((group for group in groups if len(group) > 1), key=padded_tokens)
        at, half = groups.index(largest), len(largest) // 2
        groups[at : at + 1] = [largest[half:], largest[:half]]
    groups = sorted(reversed(groups), key=padded_tokens)
    return [(groups[i * world : (i + 1) * world] + [[]] * world)[rank] for i in range(fewest)]


def _filled(rows: list, padded_tokens: Callable[[list], int], max_tokens: int) -> list[list]:
    """Groups of neighbours, each filled from the long end: there is no cut into fewer."""
    groups: list[list] = []
    for row in reversed(rows):
        if groups and padded_tokens([row, *groups[-1]]) <= max_tokens:
            groups[-1].insert(0, row)
        else:
            groups.append([row])
    return groups


# ---- padded batches


def pad_right(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, T) with padding after them, and the bool mask (B, T) of what is real, made from lengths."""
    return _pad(rows, pad_id, left=False)


def pad_left(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, Q) with padding before them, and the bool mask (B, Q) of what is real, made from lengths."""
    return _pad(rows, pad_id, left=True)


def _pad(rows: list[list[int]], pad_id: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, span] = torch.tensor(row, dtype=torch.long)
        mask[i, span] = True
    return ids, mask


def collate_sft(examples: list[SFTExample], pad_id: int, filler: SFTExample | None = None) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask (bool) and labels (-100 where nothing is trained), each (B, T).

    No examples: one row with the filler's tokens and no label, so that this rank runs its forward too.
    """
    real = bool(examples)
    assert real or filler is not None, "an empty micro-batch needs a filler"
    examples = examples or [filler]
    ids, mask = pad_right([e.ids for e in examples], pad_id)
    trained, _ = pad_right([[int(real and kept) for kept in e.mask] for e in examples], 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(trained.bool(), ids, -100)}


def collate_pairs(
    examples: list[PairExample], pad_id: int, filler: PairExample | None = None
) -> dict[str, torch.Tensor]:
    """The chosen sequences of B pairs, then their rejected ones.

    input_ids, attention_mask (2B, T); last (2B,), the index of each row's last token; margin (B,), 0 where the
    data has none; weight (B,), 1 for pairs and 0 for the filler that stands in when there are no examples.
    """
    real = bool(examples)
    assert real or filler is not None, "an empty micro-batch needs a filler"
    examples = examples or [filler]
    ids, mask = pad_right([e.prompt + e.chosen for e in examples] + [e.prompt + e.rejected for e in examples], pad_id)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "last": mask.sum(1) - 1,
        "margin": torch.tensor([e.margin or 0.0 for e in examples], dtype=torch.float32),
        "weight": torch.full((len(examples),), float(real)),
    }
