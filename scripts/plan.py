"""Will it fit? Give it the commands you are about to run: what they take, by stage and phase, beside what is there.

    python scripts/plan.py -- deepspeed step3_rlhf/train.py --actor models/sft --critic models/reward --zero_stage 3
    python scripts/plan.py --num_gpus 8 --gpu_gb 79 -- step1_sft/train.py --model Qwen/Qwen2.5-7B --zero_stage 3

Reads   commands of steps 1 to 3 and of scripts/evaluate.py, each after a `--`; of each model its configuration alone
        (of a hub name that one small file), and tokenizers where actor and critic are of two models. A folder that an
        earlier command will write counts as the model it is made from. A stage that is finished takes nothing.
Writes  nothing. Exits with 2 if something cannot fit, and names a change with which it would.

The figures are arithmetic for rows at full length (common/memory.py), and so are the seconds. Nothing is measured.
Left out: what DeepSpeed's hybrid engine keeps for itself, and a --ds_config of the user's own.
"""

import copy
import dataclasses
import importlib
import json
import math
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli, memory
from common.errors import UserError
from common.printing import say
from scripts.plan_stages import GIB, Machine, Stage, plan

STAGES = {
    "step1_sft/train.py": "sft",
    "step2_reward/train.py": "reward",
    "step3_rlhf/train.py": "rlhf",
    "scripts/evaluate.py": "evaluation",
}
# What CUDA, NCCL and fragmentation leave of a GPU: a rule of thumb.
USABLE_SHARE = 0.9

# What may be changed where something does not fit, the least costly first; each is tried together with those before it.
CHANGES = [
    {"zero_stage": 3, "frozen_zero_stage": 3},
    {"gradient_checkpointing": True},
    {"rollout_forward_batch_size": 16, "batch_size": 16},
    {"per_device_train_batch_size": 1},
    {"offload_optimizer": True},
    {"rollout_forward_batch_size": 4, "batch_size": 4},
    {"offload_param": True, "offload_frozen": True},
]


def parse_args(argv=None):
    words = list(sys.argv[1:] if argv is None else argv)
    parser = cli.Parser(__doc__)
    flag = parser.add_argument_group("machine").add_argument
    flag("--num_gpus", type=cli.positive, default=None, help="ranks, over all nodes; default: the GPUs seen here")
    flag("--num_nodes", type=cli.positive, default=1, help="machines they are spread over, evenly")
    flag(
        "--gpu_gb",
        type=cli.number(0),
        default=None,
        help="GiB of one GPU (an 80 GB card: 79); 0: CPU; default: as seen here",
    )
    flag(
        "--host_gb",
        type=cli.number(0, above=True),
        default=None,
        help="GiB of free memory of one machine; default: as seen here",
    )
    help = "GiB of free disk for models and checkpoints; default: as seen here"
    flag("--disk_gb", type=cli.number(0, above=True), default=None, help=help)
    flag = parser.add_argument_group("time, by arithmetic").add_argument
    flag("--tflops", type=cli.number(0, above=True), default=300, help="TFLOP/s that one GPU keeps up")
    flag("--decode_ms", type=cli.number(0), default=30, help="milliseconds a token, of all responses decoded at once")
    flag = parser.add_argument_group("output").add_argument
    flag("--json", action="store_true", help="print the plan as json")
    ours, *commands = split(words, "--")
    args = parser.parse_args(ours)
    args.commands = commands
    return args


def split(words: list[str], at: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == at:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


@dataclasses.dataclass(frozen=True)
class Disk:
    """One file system: what will be written to it, where, and what is free."""

    folders: list[str]
    need: float
    free: float


def main(argv=None) -> None:
    args = parse_args(argv)
    if not args.commands:
        raise UserError("nothing to plan; give the commands you are about to run, each after a --")
    commands = [read_command(words) for words in args.commands]
    machine = look_around(args)

    from scripts.model_sizes import Lineage

    lineage = Lineage([command for _, command in commands])
    open_ = [(name, command) for name, command in commands if not is_finished(name, command)]
    for name in [name for name, command in commands if is_finished(name, command)]:
        print(f"{name}: finished already", file=sys.stderr)
    for name, command in open_:
        if name == "rlhf":
            lineage.check_same_tokens(command.actor, command.critic, command.trust_remote_code)

    stages = [plan(name, command, machine, lineage, args) for name, command in open_]
    disks = disk_needs(stages, lineage, args.disk_gb)
    if args.json:
        print_json(stages, machine, disks)
    else:
        print_tables(stages, machine, disks, args)
    if faults := shortages(stages, machine) + full_disks(disks):
        hints = [what_would_fit(open_, machine, lineage, args)] if shortages(stages, machine) else []
        seen = {"--host_gb": "host memory" in " ".join(faults), "--disk_gb": "of disk" in " ".join(faults)}
        asked = [flag for flag, matters in seen.items() if matters and getattr(args, flag[2:]) is None]
        hints += [f"that is of this machine; for another give {' and '.join(asked)}"] * bool(asked)
        raise UserError("; ".join([*faults, *hints]))


def read_command(words: list[str]):
    """(stage, flags) of a command as typed; what stands before the script launches it."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    script = "" if at is None else "/".join(Path(words[at]).parts[-2:])
    if script not in STAGES:
        raise UserError(f"no plan for `{' '.join(words)[:80]}`; wanted a command of {', '.join(STAGES)}")
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    return STAGES[script], module.parse_args(words[at + 1 :])


def is_finished(name: str, command) -> bool:
    if name == "evaluation":
        return command.output.exists()
    return any((Path(command.output_dir) / file).exists() for file in ("stage.json", "actor/stage.json"))


# ---- what is there


def look_around(args) -> Machine:
    gpu, ranks = args.gpu_gb, args.num_gpus
    if ranks and ranks % args.num_nodes:
        raise UserError(f"--num_gpus {ranks} cannot be spread evenly over --num_nodes {args.num_nodes}")
    if gpu is None or ranks is None:
        import torch

        seen = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        gpu = min(seen, default=0) / GIB if gpu is None else gpu
        ranks = ranks or len(seen) or 1
    if ranks % args.num_nodes:
        raise UserError(f"--num_gpus {ranks} cannot be spread evenly over --num_nodes {args.num_nodes}")
    host = memory.free_host_memory() if args.host_gb is None else args.host_gb * GIB
    return Machine(ranks, ranks // args.num_nodes, gpu * GIB if gpu else None, host)


def disk_needs(stages: list[Stage], lineage, disk_gb: float | None) -> list[Disk]:
    """Model folders, downloads, and the checkpoints of the stage that takes most for them, by file system.

    `disk_gb` is that of another machine, of whose file systems nothing is known: all are one.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    wanted = [(stage.folder, stage.disk) for stage in stages if stage.disk]
    most = max(stages, key=lambda stage: stage.checkpoints, default=None)
    wanted += [(most.folder, most.checkpoints)] if most and most.checkpoints else []
    wanted += [(Path(HF_HUB_CACHE), size) for size in lineage.downloads.values()]
    found: dict[int, Disk] = {}
    for folder, size in wanted:
        there = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
        device = os.stat(there).st_dev if disk_gb is None else 0
        free = shutil.disk_usage(there).free if disk_gb is None else disk_gb * GIB
        so_far = found.get(device, Disk([], 0.0, free))
        folders = list(dict.fromkeys([*so_far.folders, str(folder)]))
        found[device] = Disk(folders, so_far.need + size, so_far.free)
    return list(found.values())


def shortages(stages: list[Stage], machine: Machine) -> list[str]:
    """A sentence for each stage that GPUs or hosts are too small for."""
    found = []
    rooms = [("host", machine.host, "host memory")]
    if machine.gpu is not None:
        rooms.append(("gpu", USABLE_SHARE * machine.gpu, "each GPU"))
    for stage in stages:
        for place, room, words in rooms:
            phase, need = memory.peak(stage.items, place)
            if need > room:
                found.append(
                    f"{stage.name} takes {need / GIB:.1f} GiB of {words} ({phase}), {room / GIB:.1f} can be used"
                )
    return found


def full_disks(disks: list[Disk]) -> list[str]:
    return [
        f"{' and '.join(disk.folders)} take {disk.need / GIB:.1f} GiB of disk, {disk.free / GIB:.1f} are free; "
        "make room, or choose another output folder or HF_HOME"
        for disk in disks
        if disk.need > disk.free
    ]


def what_would_fit(commands: list, machine: Machine, lineage, args) -> str:
    """A change with which every stage would fit: flags, else more GPUs."""

    def fits(changes: dict, ranks: int, host: float = machine.host) -> bool:
        per_node = min(ranks, machine.ranks_per_node)
        there = dataclasses.replace(machine, ranks=ranks, ranks_per_node=per_node, host=host)
        changed = []
        for name, command in commands:
            command = copy.copy(command)
            vars(command).update({flag: value for flag, value in changes.items() if hasattr(command, flag)})
            changed.append(plan(name, command, there, lineage, args))
        return not shortages(changed, there)

    changes: dict = {}
    for more in CHANGES:
        changes |= more
        if fits(changes, machine.ranks):
            return f"it would fit with {' '.join(as_flags(changes, commands))}"
    for ranks in [machine.ranks * factor for factor in (2, 4, 8, 16) if machine.gpu]:
        if fits({}, ranks):
            return f"it would fit on {ranks} such GPUs"
    if fits({}, machine.ranks, host=math.inf):
        return "the GPUs hold it, the host does not: it takes a machine with more memory"
    return "no flag makes it fit here: take a smaller model or shorter rows"


def as_flags(changes: dict, commands: list) -> list[str]:
    """Only what would change something."""
    seen = {flag: [vars(command)[flag] for _, command in commands if flag in vars(command)] for flag in changes}
    new = {flag: value for flag, value in changes.items() if any(now != value for now in seen[flag])}
    return [f"--{flag}" + ("" if value is True else f" {value}") for flag, value in new.items()]


# ---- the screen


def gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / GIB:.3f}"


def print_tables(stages: list[Stage], machine: Machine, disks: list[Disk], args) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    there = f"{machine.ranks} GPUs of {machine.gpu / GIB:.0f} GiB" if machine.gpu else f"{machine.ranks} ranks on a CPU"
    print(f"Plan for {there}, in GiB, by arithmetic for rows at full length; nothing of it was measured.")
    if machine.gpu:
        print(f"Times: if a GPU keeps up {args.tflops:g} TFLOP/s and a step of decoding takes {args.decode_ms:g} ms.")
    for stage in stages:
        phases = [phase for phase in memory.phases(stage.items) if phase not in ("load", "save")]
        table = Table(box=None, pad_edge=False)
        table.add_column(f"{stage.name}, one {'GPU' if machine.gpu else 'rank'}")
        for phase in phases:
            table.add_column(phase, justify="right")
        for name, sizes in memory.by_item(stage.items, "gpu", phases).items():
            table.add_row(name, *(gib(size) if size else "" for size in sizes))
        table.add_row("together", *(gib(memory.held(stage.items, "gpu", phase)) for phase in phases))
        print()
        console.print(table)
        phase, need = memory.peak(stage.items, "host")
        print(f"host memory of one machine: {gib(need)} ({phase}), free {gib(machine.host)}")
        if machine.gpu:
            hours = f", {stage.steps * stage.seconds * machine.ranks / 3600:.1f} GPU hours" if stage.steps else ""
            print(f"time: {stage.seconds:.0f} s {'in all' if stage.name == 'evaluation' else 'a step'}{hours}")
    print()
    for disk in disks:
        where = " and ".join(disk.folders)
        say(f"disk: {gib(disk.need)} for {where}, free {gib(disk.free)}; data come on top")


def print_json(stages: list[Stage], machine: Machine, disks: list[Disk]) -> None:
    """The plan in bytes and seconds."""
    record = {"machine": dataclasses.asdict(machine), "stages": {}, "disks": [dataclasses.asdict(d) for d in disks]}
    for stage in stages:
        phases = memory.phases(stage.items)
        record["stages"][stage.name] = {
            place: {
                "phases": phases,
                "items": memory.by_item(stage.items, place, phases),
                "together": [memory.held(stage.items, place, phase) for phase in phases],
            }
            for place in ("gpu", "host")
        } | {"disk": stage.disk, "checkpoints": stage.checkpoints, "seconds": stage.seconds, "steps": stage.steps}
    record["does_not_fit"] = shortages(stages, machine) + full_disks(disks)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(cli.run(main))
