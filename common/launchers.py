"""Who started this process and as which rank: the environment of every launcher, turned into torchrun's names.

Imports nothing heavy: a value that cannot be is told before anything is loaded. `deepspeed` and `torchrun` say all
there is to say. Pods of Kubeflow and Volcano say RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, one process each;
`srun` and `mpirun` have names of their own.
"""

import ctypes
import os
import re
import signal
import socket

from common.errors import UserError

# What other launchers call it. Of Slurm only inside a step: in a batch script there is one process, whatever was asked.
_OTHER_NAMES = (
    {
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
    },
    {
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "RANK": "OMPI_COMM_WORLD_RANK",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
)
_ALL = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
_ADVICE = f"a launcher sets {_ALL}: start with deepspeed or torchrun, or unset them for one process"
_PR_SET_PDEATHSIG = 1


def settle() -> None:
    """Sets in the environment all of torchrun's variables that are missing. Again called, it changes nothing.

    Raises:
        UserError: a variable holds what it cannot, or one is missing that cannot be known from the others.
    """
    env = os.environ
    if "RANK" not in env:
        for names in _OTHER_NAMES:
            if _number(names["WORLD_SIZE"], 1) > 1:
                env.update({ours: env[theirs] for ours, theirs in names.items() if theirs in env})
                _meet_under_slurm()
    if "RANK" not in env and _number("WORLD_SIZE", 1, low=1) == 1:  # plain `python`: a group of one
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        env["MASTER_PORT"] = str(free_port())
        return
    for name in ("RANK", "WORLD_SIZE"):
        if not env.get(name):
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise UserError(f"{other} is {env[other]} in the environment and {name} is not set; {_ADVICE}")
    world = _number("WORLD_SIZE", low=1)
    rank = _number("RANK", high=world - 1, because=f"WORLD_SIZE is {world}")
    if world == 1:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", str(free_port()))
    elif env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world):  # mpirun on one machine, which names no port
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "29500")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UserError(f"WORLD_SIZE is {world} in the environment and {name} is not set; {_ADVICE}")
    _number("MASTER_PORT", low=1, high=65535)
    all_here = env["MASTER_ADDR"] in ("127.0.0.1", "localhost")  # otherwise one process in each pod
    env.setdefault("LOCAL_RANK", str(rank) if all_here else "0")
    # DeepSpeed's launcher calls it LOCAL_SIZE.
    env.setdefault("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", str(world if all_here else _number("LOCAL_RANK") + 1)))
    local = _number("LOCAL_WORLD_SIZE", low=1)
    _number("LOCAL_RANK", high=local - 1, because=f"LOCAL_WORLD_SIZE is {local}")


def end_with_launcher() -> None:
    """Asks for SIGTERM when the launcher dies: it was killed alone, and its ranks would hold the run's folder for ever.

    A shell that started us by plain `python` may go; only `torchrun` and `deepspeed` look after their processes.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" not in os.environ and "LOCAL_SIZE" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died just now
        os.kill(os.getpid(), signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_taken() -> str:
    """What to say when the port of the group could not be bound."""
    return (
        f"port {os.environ['MASTER_PORT']} is taken by another run or program on this machine; give this run a port of "
        "its own: deepspeed --master_port N ..., torchrun --standalone ... or --master_port N"
    )


def _number(name: str, default: int | None = None, low: int = 0, high: int | None = None, because: str = "") -> int:
    text = os.environ.get(name, str(default))
    value = int(text) if re.fullmatch(r"\d{1,9}", text) else -1
    if value < low or (high is not None and value > high):
        wanted = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
        reason = f" ({because})" if because else ""
        raise UserError(f"{name} is {text!r} in the environment, wanted {wanted}{reason}; {_ADVICE}")
    return value


def _meet_under_slurm() -> None:
    """All tasks of a step work out the same address: its first node, and a port made of the numbers of job and step."""
    env = os.environ
    if "SLURM_PROCID" not in env:
        return
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    if env.get("SLURM_STEP_NUM_NODES", "1") == "1":
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    elif first:
        env.setdefault("MASTER_ADDR", "".join(filter(None, first.groups())))
    number = _number("SLURM_JOB_ID", 0) * 31 + _number("SLURM_STEP_ID", 0)
    env.setdefault("MASTER_PORT", str(15_000 + number % 15_000))
    per_node = [int(count) for count in re.findall(r"(?:^|,)(\d+)", env.get("SLURM_STEP_TASKS_PER_NODE", ""))]
    env.setdefault("LOCAL_WORLD_SIZE", str(max(per_node, default=1)))
