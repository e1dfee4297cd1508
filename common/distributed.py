"""Processes: starting the group under any launcher, who am I, and the few reductions the stages need.

Works alike under `python`, `torchrun` and `deepspeed`, on CPU (gloo) and GPU (NCCL). With one process every
reduction is the identity and touches no network.
"""

import datetime
import logging
import os
import random
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from common import launchers
from common.errors import UserError

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches, and warns about what it did not find
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402
import torch.distributed as dist  # noqa: E402

T = TypeVar("T")


def start(timeout_minutes: float, seed: int) -> torch.device:
    """Joins the process group, sets threads and seeds, and returns this process's device.

    Args:
        timeout_minutes: how long a collective may wait for the other ranks before the run ends.
        seed: of every library's global generator (the same on all ranks, so that fresh weights agree).

    Raises:
        UserError: an environment that no launcher makes (see `launchers.settle`), or a port that is taken.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    launchers.settle()
    # DeepSpeed makes groups of its own for gradients and weights and passes no time-out on: they take torch's default.
    timeout = datetime.timedelta(minutes=timeout_minutes)
    dist.distributed_c10d.default_pg_timeout = dist.distributed_c10d.default_pg_nccl_timeout = timeout
    # The shared-memory collectives of DeepSpeed's CPU back-end would be compiled at first use; gloo does without.
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    if torch.cuda.is_available():
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"LOCAL_RANK is {local} and this machine shows {gpus} GPU(s); start one process for each")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        # cuDNN's attention builds and keeps a plan for each new length: decoding has one at every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        deepspeed.init_distributed(backend, timeout=timeout, verbose=False)
    except RuntimeError as error:  # torch's DistNetworkError is one
        if "EADDRINUSE" in str(error):
            raise UserError(launchers.port_taken()) from error
        raise
    random.seed(seed)
    torch.manual_seed(seed)
    return device


def stop() -> None:
    """Leaves the process group; without it about one CPU run in six aborts at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def accumulate(totals: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> None:
    """Adds a micro-batch's named scalars to the totals, in float64; of names beginning with `max_` the larger stays."""
    for name, value in parts.items():
        value = value.detach().double()
        if name in totals:
            value = torch.maximum(totals[name], value) if name.startswith("max_") else totals[name] + value
        totals[name] = value


def sum_over_ranks(values: dict[str, torch.Tensor | float], device: torch.device) -> dict[str, float]:
    """Sums named scalars over all ranks, in float64; those whose names begin with `max_` become the largest.

    Every rank passes the same names; one collective for the sums, one more if there are maxima.
    """
    reduced = {}
    for operation, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
        names = sorted(name for name in values if name.startswith("max_") == is_max)
        if names:
            scalars = [torch.as_tensor(values[name], dtype=torch.float64, device=device).detach() for name in names]
            vector = torch.stack(scalars)
            if world_size() > 1:
                dist.all_reduce(vector, op=operation)
            reduced |= dict(zip(names, vector.tolist(), strict=True))
    return reduced


def max_over_ranks(value: int) -> int:
    """The largest of all ranks' numbers."""
    if world_size() == 1:
        return value
    on = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(value, device=on)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def barrier() -> None:
    """Waits for all ranks."""
    if world_size() > 1:
        dist.barrier()


def from_main(function: Callable[[], T]) -> T:
    """What `function` returns on the main process, where alone it runs; a UserError there is raised on every rank."""
    outcome: list = [None, None]
    if is_main():
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = error
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def rank_rows(num_rows: int) -> range:
    """The global row numbers this rank works on: dealt like cards, so that any number of rows fits any world."""
    return range(rank(), num_rows, world_size())


def gather_rows(tensor: torch.Tensor, num_rows: int, fill: float | int | bool = 0, left: bool = False) -> torch.Tensor:
    """Joins the rows dealt by `rank_rows` into one tensor in global order, the same on every rank.

    Args:
        tensor: (rows of this rank, ...) ; a second dimension may differ between ranks.
        num_rows: rows over all ranks.
        fill: put where a rank's second dimension is the shorter one; on the left if `left`.
    """
    if world_size() == 1:
        return tensor
    world = world_size()
    width = torch.tensor([tensor.shape[1] if tensor.dim() > 1 else 0], device=tensor.device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX)
    most = -(-num_rows // world)
    shape = (most, *([int(width)] if tensor.dim() > 1 else []), *tensor.shape[2:])
    padded = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    if tensor.dim() == 1:
        padded[: len(tensor)] = tensor
    elif left:
        padded[: len(tensor), shape[1] - tensor.shape[1] :] = tensor
    else:
        padded[: len(tensor), : tensor.shape[1]] = tensor
    as_bytes = padded.to(torch.uint8) if padded.dtype == torch.bool else padded
    parts = [torch.empty_like(as_bytes) for _ in range(world)]
    dist.all_gather(parts, as_bytes.contiguous())
    joined = torch.stack(parts, 1).flatten(0, 1)[:num_rows]  # row i of rank r is global row i * world + r
    return joined.to(padded.dtype)
