"""Runs entry scripts in fresh processes that start fast, and ends them at chosen moments.

Processes are forked from a server that has imported torch, transformers and DeepSpeed once, which is most of what a
start costs. Each runs the script's own `main`, as rank r of n, with its output in a file.
"""

import dataclasses
import errno
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["deepspeed", "datasets", "small_models", "peft", "common.engine", "common.hybrid_engine", "common.resume"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to end a process, on which rank, by which signal. 0: not ended, the disk is full instead; -1: not
    ended, the model's weights turn to NaN.

    where: "train_step" (before the n-th optimizer step of any model), "fsync" (the n-th file a checkpoint seals),
    "rename" (before the n-th checkpoint gets its name), "publish" (before the n-th stage.json is written).
    """

    where: str
    n: int
    rank: int = 0
    signal: int = signal.SIGKILL
    times: int = 1  # how often, in quick succession: a launcher passes on what the terminal has sent already


@dataclasses.dataclass(frozen=True)
class Outcome:
    codes: list[int]  # by rank; negative: ended by that signal
    output: list[str]  # by rank, stdout and stderr together


def run(script: str, flags: str, cwd: Path, ranks: int = 1, moment: Moment | None = None, timeout: float = 120):
    """Runs `script` and waits for all its ranks; when one ends badly the others are ended after a while."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"  # the server is a process of its own
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [cwd / f"output-{rank}.txt" for rank in range(ranks)]
    what = (script, flags.split(), str(cwd), ranks, port, moment)
    children = [context.Process(target=_child, args=(rank, str(logs[rank]), *what)) for rank in range(ranks)]
    for child in children:
        child.start()
    end = time.monotonic() + timeout
    for child in children:
        child.join(max(0.1, end - time.monotonic()))
        if child.exitcode != 0:
            end = min(end, time.monotonic() + 20)  # what a launcher does, only with more patience
    for child in children:
        if child.is_alive():
            child.kill()
            child.join()
    return Outcome([child.exitcode for child in children], [log.read_text(errors="replace") for log in logs])


def _child(rank, log, script, argv, cwd, ranks, port, moment):
    os.chdir(cwd)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    import torch

    torch.set_num_threads(1)
    sys.argv = [script, *argv]
    spec = importlib.util.spec_from_file_location("stage", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if moment is not None and moment.rank == rank:
        _arm(moment)
    from common import cli

    cli.launch(module.main)


def _arm(moment: Moment) -> None:
    """Puts the ending in front of the n-th call of what the moment names."""
    from common import checkpoint, engine, resume

    owner, name = {
        "train_step": (engine.TrainedModel, "train_step"),
        "fsync": (resume, "_sealed"),
        "rename": (Path, "rename"),
        "publish": (checkpoint, "atomic_write_text"),
    }[moment.where]
    function, calls = getattr(owner, name), []

    def counting(*args, **kwargs):
        is_one = moment.where != "publish" or Path(args[0]).name == "stage.json"
        if is_one:
            calls.append(1)
            if len(calls) == moment.n and not moment.signal:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if len(calls) == moment.n and moment.signal < 0:
                for parameter in args[0].module.parameters():
                    parameter.data.fill_(float("nan"))
            elif len(calls) == moment.n:
                for _ in range(moment.times):
                    os.kill(os.getpid(), moment.signal)
                    time.sleep(0.05)
        return function(*args, **kwargs)

    setattr(owner, name, counting)
