"""Where a number that is not finite came from: which rank, which rows, which tensor.

Called once, when a run is about to stop; all ranks call it together, since under ZeRO-3 every forward is a collective.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from common import distributed

# As many rows or names as a person wants to read.
_FEW = 8


def trace_loss(
    module: nn.Module, micro_batches: Sequence, rows: Sequence[Sequence[int]], shares: list[float], loss_fn: Callable
) -> str:
    """The rows whose loss is not finite, and the first weight, or output of a layer, in which that shows.

    Args:
        rows: row numbers of each micro-batch of this rank, for people; may be empty.
        shares: the loss of each micro-batch of this rank.
    """
    bad = [number for number, share in enumerate(shares) if not math.isfinite(share)]
    mine = None
    names = _bad_weights(module)
    if not _any_rank(bool(names)):
        names = _bad_outputs(module, lambda: loss_fn(micro_batches[bad[0] if bad else 0]))
    if bad:
        mine = _rows(bad, rows), f"first in {names[0]}" if names else "first in the loss itself, not in the model"
    elif names:
        mine = "", f"first in {names[0]}"
    return _joined(mine)


def trace_gradient(
    module: nn.Module,
    micro_batches: Sequence,
    rows: Sequence[Sequence[int]],
    loss_fn: Callable,
    backward: Callable[[torch.Tensor], None],
) -> str:
    """The rows whose gradient is not finite and the parameters it shows in. Runs the backward passes once more."""
    found: dict[int, list[str]] = {}
    for number, micro_batch in enumerate(micro_batches):
        names: list[str] = []

        def look(gradient, name, names=names):
            if not gradient.isfinite().all():
                names.append(name)

        hooks = [
            parameter.register_hook(lambda gradient, name=name, look=look: look(gradient, name))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        try:
            backward(loss_fn(micro_batch)[0])
        finally:
            for hook in hooks:
                hook.remove()
        if names:
            found[number] = names
    # Backward goes from the loss to the input, so the first one seen is nearest to the cause.
    first = next(iter(found.values()), [])
    return _joined((_rows(list(found), rows), f"first in the gradient of {first[0]}") if found else None)


def _rows(numbers: list[int], rows: Sequence[Sequence[int]]) -> str:
    seen = sorted({row for number in numbers if number < len(rows) for row in rows[number]})
    shown = ", ".join(map(str, seen[:_FEW])) + (", ..." if len(seen) > _FEW else "")
    return f"rows {shown}" if seen else ""


def _bad_weights(module: nn.Module) -> list[str]:
    """Names of weights, or of this rank's shards of them, that hold something not finite."""
    shards = ((name, getattr(p, "ds_tensor", p)) for name, p in module.named_parameters())
    return [f"the weight {name}" for name, shard in shards if not shard.detach().isfinite().all()]


@torch.no_grad()
def _bad_outputs(module: nn.Module, forward: Callable) -> list[str]:
    """Layers, in the order they are computed, whose output is not finite though it is a tensor of numbers."""
    names: list[str] = []

    def look(layer, inputs, output, name):
        for part in output if isinstance(output, tuple) else (output,):
            if isinstance(part, torch.Tensor) and part.is_floating_point() and not part.isfinite().all():
                names.append(f"the output of {name}")
                return

    hooks = [
        layer.register_forward_hook(lambda *args, name=name: look(*args, name))
        for name, layer in module.named_modules()
        if name
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return names


def _any_rank(value: bool) -> bool:
    return distributed.max_over_ranks(int(value)) > 0


def _joined(mine: tuple[str, str] | None) -> str:
    """What each rank has found, as one phrase."""
    found = [mine]
    if distributed.world_size() > 1:
        found = [None] * distributed.world_size()
        dist.all_gather_object(found, mine)
    parts = [
        ", ".join(filter(None, (f"rank {rank}", *report))) for rank, report in enumerate(found) if report is not None
    ]
    return "; ".join(parts) if parts else "on no rank alone"
