"""Command lines: the parser all entry scripts share, common flag groups, `--config`, and the names people bring along.

Imports nothing heavy, so `--help` and every usage error are instant.
"""

import argparse
import dataclasses
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import UserError

# Names typed from articles, courses and other trainers. A list of tokens stands for a flag with its value; an empty
# list for a flag that has nothing left to do. The value is (ours, a remark for the terminal or None to stay quiet).
QUIET = None
ALIASES: dict[str, tuple[list[str], str | None]] = {
    "--dataset_name": (["--data"], QUIET),
    "--dataset": (["--data"], QUIET),
    "--model": (["--model_name_or_path"], QUIET),
    "--lr": (["--learning_rate"], QUIET),
    "--actor_model": (["--actor"], QUIET),
    "--critic_model": (["--critic"], QUIET),
    "--reward_model": (["--reward"], QUIET),
    "--ref_model": (["--ref"], QUIET),
    "--reward_model_path": (["--reward"], "TRL's name"),
    "--sft_model_path": (["--actor"], "TRL's name"),
    "--response_length": (["--max_completion_length"], "TRL's name"),
    "--cliprange_low": (["--cliprange"], QUIET),
    "--init_kl_coef": (["--kl_coef"], "TRL's name"),
    # DeepSpeed-Chat
    "--data_path": (["--data"], "DeepSpeed-Chat's name"),
    "--actor_model_name_or_path": (["--actor"], "DeepSpeed-Chat's name"),
    "--critic_model_name_or_path": (["--critic"], "DeepSpeed-Chat's name"),
    "--actor_learning_rate": (["--learning_rate"], "DeepSpeed-Chat's name"),
    "--actor_weight_decay": (["--weight_decay"], "DeepSpeed-Chat's name"),
    "--actor_zero_stage": (["--zero_stage"], "DeepSpeed-Chat's name"),
    "--max_prompt_seq_len": (["--max_prompt_length"], "DeepSpeed-Chat's name"),
    "--max_answer_seq_len": (["--max_completion_length"], "DeepSpeed-Chat's name"),
    "--max_seq_len": (["--max_length"], "DeepSpeed-Chat's name"),
    "--ppo_epochs": (["--num_ppo_epochs"], "DeepSpeed-Chat's name"),
    "--unsup_coef": (["--ptx_coef"], "DeepSpeed-Chat's name"),
    "--num_warmup_steps": (["--warmup_steps"], "DeepSpeed-Chat's name"),
    "--offload": (["--offload_optimizer"], "DeepSpeed-Chat's name"),
    "--offload_reference_model": (["--offload_frozen"], "DeepSpeed-Chat's name"),
    "--actor_gradient_checkpointing": (["--gradient_checkpointing"], "DeepSpeed-Chat's name"),
    "--critic_gradient_checkpointing": (["--gradient_checkpointing"], "DeepSpeed-Chat's name"),
    "--enable_hybrid_engine": (["--rollout_backend", "hybrid"], "DeepSpeed-Chat's name"),
    "--enable_tensorboard": (["--report_to", "tensorboard"], "DeepSpeed-Chat's name"),
    "--lora_dim": (["--lora_r"], "DeepSpeed-Chat's name"),
    "--actor_lora_dim": (["--lora_r"], "DeepSpeed-Chat's name"),
    "--critic_lora_dim": (["--critic_lora_r"], "DeepSpeed-Chat's name"),
    "--print_answers": (["--sample_steps", "1"], "DeepSpeed-Chat's name"),
    "--per_device_training_batch_size": (["--per_device_train_batch_size"], "DeepSpeed-Chat's name"),
}

# Launchers look after their processes once a second or oftener, and then end all when one has failed.
_WAIT_FOR_RANK_0 = 4.0

# Names that no flag of ours stands for: what to do instead.
ELSEWHERE: dict[str, str] = {
    "--data_split": "step 0 deals the rows out: python step0_data/prepare.py --split 2,4,4",
    "--generation_batches": "--rollout_batch_size counts the responses of one RL step over all ranks",
    "--per_device_generation_batch_size": "--rollout_batch_size counts the responses of one RL step over all ranks",
    "--tensorboard_path": "curves are written to OUTPUT_DIR/tensorboard; --report_to says whether",
    "--vf_coef": "the critic is a model of its own; --critic_learning_rate says how fast it learns",
    "--unsup_coef": "no pretraining loss is mixed in",
    "--enable_ema": "no moving average of the actor is kept; leave it out",
    **dict.fromkeys(
        ["--only_optimize_lora", "--lora_module_name"],
        "with --lora_r only the adapters are trained; --lora_target_modules names the layers",
    ),
}


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36)


class Parser(argparse.ArgumentParser):
    """argparse with exact names, a nearest-name hint, `--config FILE` and the aliases above.

    `aliases` adds to the shared table or, by giving another target, overrides it.
    """

    def __init__(self, description: str | None, aliases: dict[str, str] | None = None):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self.aliases = ALIASES | {name: ([target], QUIET) for name, target in (aliases or {}).items()}
        # What a file gives to repeatable flags: as a default, the command line would add to it and not replace it.
        self.lists: dict[str, list] = {}
        self.add_argument(
            "--config", metavar="FILE", help="yaml, json or stage.json that sets flags; the command line wins"
        )
        # The DeepSpeed launcher passes it; LOCAL_RANK in the environment says the same.
        self.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)

    def error(self, message: str):
        self.exit(2, f"error: {message}; see {self.prog} --help\n")

    def parse_args(self, argv: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        argv = self._without_aliases(list(sys.argv[1:] if argv is None else argv))
        self._refuse_unknown(argv)
        config = self._peek_config(argv)
        if config:
            self._apply_config(Path(config))
        args, unknown = self.parse_known_args(argv, namespace)
        for dest, value in self.lists.items():
            if getattr(args, dest) is None:
                setattr(args, dest, value)
        if unknown:
            self.error(f"unexpected word {unknown[0]!r}: every value follows a --flag")
        return args

    def _refuse_unknown(self, argv: list[str]) -> None:
        """Before argparse looks for what is missing: a flag with a typing error is the better thing to hear of."""
        known = self._known()
        for name in (token.partition("=")[0] for token in argv if token.startswith("--") and token != "--"):
            if name in ELSEWHERE and name not in known:
                self.error(f"there is no {name} here: {ELSEWHERE[name]}")
            if name not in known:
                self.error(f"unknown flag {name}{self._nearest(name)}")

    def _known(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def _nearest(self, flag: str) -> str:
        def likeness(known: str) -> float:
            # People shorten names too: a good beginning counts nearly as much as the whole.
            whole, beginning = (difflib.SequenceMatcher(None, flag, x).ratio() for x in (known, known[: len(flag) + 1]))
            return max(whole, 0.95 * beginning)

        best = max(self._known(), key=likeness)
        return f"; the nearest is {best}" if likeness(best) >= 0.5 else ""

    def _without_aliases(self, argv: list[str]) -> list[str]:
        known, out = set(self._known()), []
        for position, token in enumerate(argv):
            name, equals, value = token.partition("=")
            if name == "--deepspeed" and name not in known:
                # `--deepspeed file.json` is the HF Trainer's; alone it is DeepSpeed's own switch, and DeepSpeed is always on.
                following = argv[position + 1] if position + 1 < len(argv) else "--"
                out += (
                    ["--ds_config" + equals + value]
                    if equals
                    else []
                    if following.startswith("--")
                    else ["--ds_config"]
                )
                continue
            target, remark = self.aliases.get(name, ([], QUIET))
            if name in known or not target or target[0] not in known:
                out.append(token)
                continue
            if remark and is_main_process():
                print(f"note: {name} ({remark}) is {' '.join(target)} here", file=sys.stderr)
            out += [target[0] + equals + value, *target[1:]]
        return out

    @staticmethod
    def _peek_config(argv: list[str]) -> str | None:
        found = None
        for position, token in enumerate(argv):
            if token.startswith("--config="):
                found = token.partition("=")[2]
            elif token == "--config" and position + 1 < len(argv):
                found = argv[position + 1]
        return found

    def _apply_config(self, path: Path) -> None:
        """Turns the file's entries into defaults, through the same conversions and choices as the command line."""
        actions = {action.dest: action for action in self._actions}
        defaults = {}
        for key, value in read_config(path).items():
            dest = key.lstrip("-").replace("-", "_")
            alias, _ = self.aliases.get(f"--{dest}", ([], QUIET))
            if dest not in actions and len(alias) == 1:
                dest = alias[0][2:]
            if dest in ("config", "local_rank", "help"):
                continue
            if dest not in actions:
                self.error(f"{path}: unknown key {key!r}{self._nearest('--' + dest).replace('--', '')}")
            converted = self._convert(actions[dest], key, value, path)
            if isinstance(actions[dest], argparse._AppendAction):
                self.lists[dest] = converted
            else:
                defaults[dest] = converted
            actions[dest].required = False
        self.set_defaults(**defaults)

    def _convert(self, action: argparse.Action, key: str, value, path: Path):
        if value is None:
            if action.default is not None and action.type is not optional_float:
                self.error(f"{path}: {key} is empty; give it a value or leave it out")
            return None
        if isinstance(action.default, bool) or action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{path}: {key} is {value!r}, wanted true or false")
            return value
        is_list = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
        items = value if isinstance(value, list) else [value]
        if len(items) > 1 and not is_list:
            self.error(f"{path}: {key} is a list, wanted one value")
        try:
            items = [self._get_value(action, item if isinstance(item, str) else json.dumps(item)) for item in items]
            for item in items:
                self._check_value(action, item)
        except argparse.ArgumentError as error:
            self.error(f"{path}: {key}: {error.message}")
        return items if is_list else items[0]


def read_config(path: Path) -> dict:
    """The flags in a yaml or json file; of a `stage.json`, the arguments of the run that wrote it."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())  # json is a subset of yaml
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: neither yaml nor json: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: holds a {type(content).__name__}, wanted `flag: value` pairs")
    return content["args"] if {"stage", "format_version", "args"} <= content.keys() else content


def run(main: Callable[[], None]) -> int:
    """Runs an entry script: 0 done, 1 failed (with traceback), 2 a mistake the user can mend, 130 Ctrl-C."""
    try:
        main()
    except UserError as error:
        _report(error)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        return 130
    return 0


def _report(error: UserError) -> None:
    """One `error:` line however many ranks there are.

    Most mistakes are seen by all ranks alike. Rank 0 speaks and ends, and its launcher ends the others while they wait;
    what only another rank has seen is said after the wait.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_WAIT_FOR_RANK_0)
    print(f"{'' if rank == '0' else f'[rank {rank}] '}error: {error}", file=sys.stderr, flush=True)


def launch(main: Callable[[], None]) -> None:
    """`run`, then the end of the process: what a training script's last line calls.

    A rank of several that is done ends without C++ destructors. All files are closed and the process group is left by
    then, but some thread is still joinable (we did not find whose), and tearing it down aborted some CPU runs at exit.
    """
    code = run(main)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(0)
    sys.exit(code)


def is_main_process() -> bool:
    """True on rank 0, known from the launcher's environment before any process group exists."""
    return os.environ.get("RANK", "0") == "0"


def pick(record: type, args: argparse.Namespace, **overrides):
    """Fills a frozen dataclass from the flags of the same names; `overrides` win."""
    names = {field.name for field in dataclasses.fields(record)}
    return record(**({name: value for name, value in vars(args).items() if name in names} | overrides))


def positive(text: str) -> int:
    """A whole number of at least 1 (an argparse type)."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number of at least 0 (an argparse type)."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return int(text)


def optional_float(text: str) -> float | None:
    """A number, or `none` for off (an argparse type)."""
    return None if text.lower() in ("none", "null") else float(text)


def add_switch(group, name: str, default: bool, help: str) -> None:
    """`--name` and `--no-name`."""
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=help)


# fmt: off
def add_run_flags(parser: Parser, output_dir: str) -> None:
    """Where the run reads and writes, its seed, and what it reports."""
    group = parser.add_argument_group("run")
    group.add_argument("--data", metavar="PATH", help="step-0 folder, a stage folder in it or a parquet file; default: the one the parent model was trained on")
    group.add_argument("--output_dir", default=output_dir, metavar="DIR", help="where the run writes; a finished run there is never overwritten")
    group.add_argument("--seed", type=int, default=1, help="of everything drawn at random; same seed, same run")
    group.add_argument("--logging_steps", type=positive, default=1, help="steps between lines on the terminal; files get every step")
    group.add_argument("--report_to", nargs="+", default=["tensorboard"], choices=["tensorboard", "wandb", "none"], help="where curves go besides metrics.jsonl")
    group.add_argument("--run_name", default=None, help="name shown by trackers; default: the output folder's")
    group.add_argument("--push_to_hub", action="store_true", help="upload the finished model to the Hugging Face hub (needs HF_TOKEN or `hf auth login`)")
    group.add_argument("--hub_model_id", default=None, metavar="OWNER/NAME", help="where to; default: the output folder's name, under your account")


def add_model_flags(parser: Parser) -> None:
    """How models are loaded, whichever role they play."""
    group = parser.add_argument_group("models")
    group.add_argument("--chat_template", default=None, help="built-in name or jinja file; used only when the tokenizer has no template")
    group.add_argument("--attn_implementation", default="auto", help="attention kernel of transformers: sdpa, eager, flash_attention_2, ...; auto: sdpa where the model has it")
    add_switch(group, "--trust_remote_code", False, "run Python code that comes with a model from the hub")


def add_batch_flags(parser: Parser, rows: str) -> None:
    """How a fixed set of examples (`rows` is their name) is cut into optimizer steps."""
    group = parser.add_argument_group("batches")
    group.add_argument("--per_device_train_batch_size", type=positive, default=8, help=f"{rows} in one forward of one rank")
    group.add_argument("--gradient_accumulation_steps", type=positive, default=1, help="forwards per optimizer step")
    group.add_argument("--num_train_epochs", type=float, default=1.0, help=f"passes over the training {rows}")
    group.add_argument("--max_steps", type=natural, default=0, help="optimizer steps; 0: as --num_train_epochs says")
    group.add_argument("--eval_steps", type=natural, default=0, help="steps between evaluations; 0: only at the end")


def add_optim_flags(parser: Parser, learning_rate: float, lr_scheduler_type: str = "cosine") -> None:
    """Optimizer and schedule (torch's AdamW)."""
    group = parser.add_argument_group("optimizer")
    group.add_argument("--learning_rate", type=float, default=learning_rate, help="peak learning rate")
    group.add_argument("--lr_scheduler_type", default=lr_scheduler_type, choices=["linear", "cosine", "constant"], help="shape after warm-up")
    group.add_argument("--min_lr_ratio", type=float, default=0.0, help="the schedule ends at this share of the peak")
    group.add_argument("--warmup_steps", type=float, default=0.03, help="optimizer steps of linear warm-up; below 1: a share of the run")
    group.add_argument("--weight_decay", type=float, default=0.0, help="AdamW's decoupled weight decay")
    group.add_argument("--adam_beta1", type=float, default=0.9, help="decay of the first moment")
    group.add_argument("--adam_beta2", type=float, default=0.95, help="decay of the second moment")
    group.add_argument("--adam_epsilon", type=float, default=1e-8, help="added to the denominator")
    group.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the global gradient norm; 0: off")


def add_lora_flags(parser: Parser, dropout: bool):
    """Low-rank adapters; returns the group, for flags of further roles."""
    group = parser.add_argument_group("adapters (LoRA)")
    group.add_argument("--lora_r", type=natural, default=0, help="rank; only adapters are trained then; 0: all weights are")
    group.add_argument("--lora_alpha", type=float, default=32, help="the adapter's update is scaled by alpha / r")
    group.add_argument("--lora_target_modules", nargs="+", default=["all-linear"], help="names of the layers that get one; all-linear: all but the output layer")
    if dropout:
        group.add_argument("--lora_dropout", type=float, default=0.0, help="share of an adapter's inputs set to zero in training")
    return group


def add_engine_flags(parser: Parser) -> None:
    """DeepSpeed: precision, ZeRO, offload."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="auto: bf16 where the GPU has it, fp32 on CPU")
    group.add_argument("--zero_stage", type=int, default=0, choices=[0, 1, 2, 3], help="0 whole copies, 1 shard optimizer, 2 + gradients, 3 + weights")
    group.add_argument("--offload_optimizer", action="store_true", help="optimizer states in host memory (needs --zero_stage 1, 2 or 3)")
    group.add_argument("--offload_param", action="store_true", help="sharded weights in host memory (needs --zero_stage 3)")
    add_switch(group, "--gradient_checkpointing", False, "recompute activations in the backward pass: less memory, a third more time")
    group.add_argument("--ds_config", default=None, metavar="FILE", help="DeepSpeed json merged over the one built from the flags")
    group.add_argument("--timeout_minutes", type=float, default=30, help="a collective that waits longer ends the run")


# fmt: on
