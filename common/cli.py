"""Command lines: the parser all entry scripts share, common flag groups, `--config`.

Imports nothing heavy, so `--help` and every usage error are instant.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  before anything that an older Python cannot even read
    sys.exit(f"error: Python {sys.version.split()[0]} is too old, 3.11 or newer is wanted; run: bash scripts/setup.sh")

import argparse
import dataclasses
import difflib
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common import json_files, launchers, names, printing
from common.chat_templates import BUILTIN_TEMPLATES
from common.errors import RunFailed, Stopped, UserError, is_lost_contact
from common.printing import one_line

# Threads that wait sleep instead of spinning: ten times faster as soon as anything else wants the cores. Read by OpenMP
# when torch is imported, which is after this file.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_ROOT = Path(__file__).resolve().parent.parent

# Launchers look after their processes once a second or oftener, and then end all when one has failed.
_WAIT_FOR_RANK_0 = 4.0


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Defaults that say something; `None` and `False` are in the words already."""
        says_nothing = action.required or action.default is None or action.default is False
        return action.help if says_nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse with exact names, a nearest-name hint, `--config FILE` and the names of other programs (`names`).

    `aliases` adds to the shared table or, by giving another target, overrides it. `stages` are those whose `stage.json`
    may be repeated by `--config`; empty for any.
    """

    def __init__(self, description: str | None, aliases: dict[str, str] | None = None, stages: tuple[str, ...] = ()):
        super().__init__(description=description, formatter_class=_Help, allow_abbrev=False)
        self.aliases = names.ALIASES | {name: ([target], names.QUIET) for name, target in (aliases or {}).items()}
        # What a file gives to repeatable flags: as a default, the command line would add to it and not replace it.
        self.lists: dict[str, list] = {}
        self.stages = stages
        self.where = ""  # the file whose entries are being read
        self.add_argument(
            "--config", metavar="FILE", help="yaml, json or stage.json that sets flags; the command line wins"
        )
        # The DeepSpeed launcher passes it; LOCAL_RANK in the environment says the same.
        self.add_argument("--local_rank", type=whole(-1), default=-1, help=argparse.SUPPRESS)

    def error(self, message: str):
        self.exit(2, f"error: {one_line(f'{self.where}{message}')}; see {self.prog} --help\n")

    def note(self, message: str) -> None:
        """A line on the terminal, once however many ranks there are."""
        if is_main_process():
            print(f"note: {one_line(message)}", file=sys.stderr)

    def parse_args(self, argv: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        argv = self._translate(list(sys.argv[1:] if argv is None else argv))
        for name, values, _ in split_words(argv):
            # Before argparse looks for what is missing: a flag with a typing error is the better thing to hear of.
            if name.startswith("--") and name not in self._known():
                self.error(names.instead(name, values) or f"unknown flag {name}{self._nearest(name)}")
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

    def _known(self) -> dict[str, argparse.Action]:
        return {option: it for it in self._actions for option in it.option_strings if option.startswith("--")}

    def _nearest(self, flag: str) -> str:
        """The flag that this is a misspelling, a beginning or an end of; nothing where none is close."""
        typed = flag.strip("-")

        def likeness(known: str) -> float:
            known = known.strip("-")
            whole, beginning = (difflib.SequenceMatcher(None, typed, x).ratio() for x in (known, known[: len(typed)]))
            return max(whole, 0.95 * beginning, 0.9 * known.endswith(f"_{typed}"))

        best = max((option for option in self._known() if not option.startswith("--no-")), key=likeness)
        return f"; the nearest is {best}" if len(typed) > 1 and likeness(best) >= 0.75 else ""

    def _translate(self, words: list[str]) -> list[str]:
        """The command line in our own names, with a note for each that another program has.

        What a switch of theirs implies comes first, so that a value that was written out wins.
        """
        implied, out = [], []
        for typed, values, _ in split_words(words):
            name = self._spelling(typed)
            target, _ = self.aliases.get(name, ([], names.QUIET))
            if not name:
                implied += values  # before any flag: argparse says what is wrong with it
            elif name in self._known():
                out += self._flag(typed, name, values)
            elif name == "--deepspeed":
                # `--deepspeed file.json` is the HF Trainer's; alone it is DeepSpeed's own switch, and DeepSpeed is always on.
                out += ["--ds_config", *values] if values else []
            elif len(target) == 1 and target[0] in self._known():
                meaning = self._flag(typed, target[0], values)
                self._note_alias(name, [word.partition("=")[0] for word in meaning[:1]])
                out += meaning
            elif target and target[0] in self._known():
                implied += self._implied(typed, name, target, values)
            elif names.no_effect(name, values):
                self.note(f"{name} has no effect here: {names.NO_EFFECT[name][1]}")
            else:
                out += [name, *values]
        return implied + out

    def _spelling(self, typed: str) -> str:
        """`--learning-rate` and `--no_x`, as transformers accepts them, are `--learning_rate` and `--no-x`."""
        underscores = typed[:2] + typed[2:].replace("-", "_")
        known = self._known() | self.aliases | names.NO_EFFECT | names.ELSEWHERE
        spellings = (typed, underscores, underscores.replace("--no_", "--no-", 1))
        return next((spelling for spelling in spellings if spelling in known), typed)

    def _note_alias(self, name: str, meaning: list[str]) -> None:
        remark = self.aliases[name][1]
        if remark and meaning:
            self.note(f"{name} ({remark}) is {' '.join(meaning)} here")

    def _implied(self, typed: str, name: str, target: list[str], values: list[str]) -> list[str]:
        """What a name of theirs stands for, where that is more than one word."""
        if "{}" in target and len(values) != 1:
            self.error(f"{typed} takes one value, seen {len(values)}")
        is_on = "{}" in target or self._is_on(typed, values)
        meaning = [word.replace("{}", " ".join(values)) for word in target] if is_on else []
        self._note_alias(name, meaning)
        return meaning

    def _is_on(self, typed: str, values: list[str]) -> bool:
        """A switch alone is on; it may be followed by true or false, as transformers has it."""
        said = " ".join(values).lower()
        if said not in ("", "true", "false"):
            self.error(f"{typed} takes true, false or nothing, seen {' '.join(values)}")
        return said != "false"

    def _flag(self, typed: str, name: str, values: list[str]) -> list[str]:
        """A flag of ours with its values."""
        action = self._known()[name]
        if action.nargs == 0:
            off = [option for option in action.option_strings if option.startswith("--no-")]
            return [name] if self._is_on(typed, values) else off[:1]
        if action.nargs is None and len(values) > 1:
            more = "; step 0 makes one folder of several sources" if action.dest == "data" else ""
            if isinstance(action, argparse._AppendAction):
                more = "; for several, repeat it: " + " ".join(f"{name} {value}" for value in values)
            self.error(f"{typed} takes one value, seen {len(values)}: {' '.join(values)}{more}")
        # One word: a value that begins with a dash stays a value.
        return [f"{name}={values[0]}"] if len(values) == 1 and action.nargs is None else [name, *values]

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
        content, self.where = read_config(path, self.stages), f"{path}: "
        actions = {action.dest: action for action in self._actions}
        defaults = {}
        for key, dest, value in self._entries(content, actions):
            if dest in ("config", "local_rank", "help"):
                continue
            converted = self._convert(actions[dest], key, value)
            if isinstance(actions[dest], argparse._AppendAction):
                self.lists[dest] = converted
            else:
                defaults[dest] = converted
            actions[dest].required = False
        self.set_defaults(**defaults)
        self.where = ""

    def _entries(self, content: dict, actions: dict) -> Iterator[tuple[str, str, object]]:
        """(key, our name, value) of a file's entries, by the same tables as the command line."""
        for key, value in content.items():
            dest = str(key).lstrip("-").replace("-", "_")
            if dest in actions:
                yield key, dest, value
                continue
            values = [str(item).lower() if item in (None, True, False) else str(item) for item in _items(value)]
            for name, said, _ in split_words(self._translate([f"--{dest}", *values]))[1:]:
                action = self._known().get(name)
                if action is None:
                    unknown = f"unknown key {key!r}{self._nearest(name).replace('--', '')}"
                    self.error(names.instead(name, said) or unknown)
                yield key, action.dest, said if action.nargs != 0 else not name.startswith("--no-")

    def _convert(self, action: argparse.Action, key: str, value):
        if value is None:
            if action.default is not None and not getattr(action.type, "optional", False):
                self.error(f"{key} is empty; give it a value or leave it out")
            return None
        if isinstance(action.default, bool) or action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{key} is {value!r}, wanted true or false")
            return value
        is_list = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
        items = _items(value)
        if len(items) != 1 and not is_list:
            self.error(f"{key} is a list, wanted one value")
        try:
            items = [self._get_value(action, item if isinstance(item, str) else json.dumps(item)) for item in items]
            for item in items:
                self._check_value(action, item)
        except argparse.ArgumentError as error:
            self.error(f"{key}: {error.message}")
        return items if is_list else items[0]


def _items(value) -> list:
    return value if isinstance(value, list) else [value]


def split_words(words: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    """(flag, its values, both as typed) for each flag of a command line; words before the first have the flag ""."""
    found = [("", [], [])]
    for word in words:
        if word.startswith("--") and word != "--":
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else [], [word]))
        else:
            found[-1][1].append(word)
            found[-1][2].append(word)
    return found


def read_config(path: Path, stages: tuple[str, ...] = ()) -> dict:
    """The flags in a yaml or json file; of a `stage.json`, the arguments of the run that wrote it.

    Args:
        stages: what a `stage.json` may be of; empty for any.
    """
    import yaml

    class Once(yaml.SafeLoader):
        """yaml's own takes the last of two equal keys."""

        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"has the key {twice!r} twice")
            return super().construct_mapping(node, deep)

    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            content = json_files.parse_json(data)
        else:
            content = yaml.load(data.decode("utf-8-sig"), Once)  # json is a subset of yaml
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: neither yaml nor json: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: holds {json_files.shown(content)}, wanted `flag: value` pairs")
    if not {"stage", "format_version", "args"} <= content.keys():
        return content
    schema = {"stage": json_files.text, "args": json_files.each(json_files.anything)}
    if fault := json_files.fault_of(content, schema):
        raise UserError(f"--config {path}: {fault}")
    if stages and content["stage"] not in stages:
        raise UserError(f"--config {path} is of stage {content['stage']!r}, wanted {' or '.join(map(repr, stages))}")
    return {name: value for name, value in content["args"].items() if name != "resume_from_checkpoint"}


def check_files(args: argparse.Namespace) -> None:
    """What flags of a training script name has to be there; found out before anything heavy is loaded."""
    from common.metrics import parse_report_to

    if args.ds_config and not Path(args.ds_config).is_file():
        raise UserError(f"--ds_config {args.ds_config}: no such file; wanted a DeepSpeed json, or leave it out")
    asked = args.resume_from_checkpoint
    if asked not in (None, "latest") and not Path(asked).is_dir():
        raise UserError(
            f"--resume_from_checkpoint {asked}: no such folder; without a name it takes the newest in --output_dir"
        )
    parse_report_to(args.report_to)


def run(main: Callable[[], None]) -> int:
    """Runs an entry script: 0 done, 1 failed, 2 a mistake the user can mend, 130 Ctrl-C, 143 SIGTERM after saving."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no Chinese, say, is shown escapes
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    logging.setLogRecordFactory(printing.Record)
    try:
        main()
    except (UserError, RunFailed) as error:
        _report(error)
        return 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if not name or (_ROOT / name).exists():
            raise
        _report(f"the package {name} is not installed here; run: source .venv/bin/activate (scripts/setup.sh makes it)")
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            raise
        where = f" ({error.filename})" if error.filename else ""
        _report(f"{error.strerror}{where}; make room or mend the disk, then run the same command again")
        return 1
    except Stopped as stopped:
        if is_main_process():
            print(one_line(stopped), file=sys.stderr, flush=True)
        return stopped.exit_code
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        # The rank that knows the cause speaks first; the launcher then ends this one while it waits.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        time.sleep(2 * _WAIT_FOR_RANK_0)
        _report(
            f"lost contact with another rank, which has died or did not answer within --timeout_minutes "
            f"({_first_line(error)}); the cause is in that rank's own output; when it is mended, run the same command "
            f"with --resume_from_checkpoint"
        )
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        return 130
    return 0


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _report(error: Exception | str) -> None:
    """One `error:` line however many ranks there are.

    Most mistakes are seen by all ranks alike. Rank 0 speaks and ends, and its launcher ends the others while they wait;
    what only another rank has seen is said after the wait.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        time.sleep(_WAIT_FOR_RANK_0)
    print(f"{'' if rank == '0' else f'[rank {rank}] '}error: {one_line(error)}", file=sys.stderr, flush=True)


def launch(main: Callable[[], None]) -> None:
    """`run`, then the end of the process: what a training script's last line calls.

    A rank of several that is done, or was stopped, ends without C++ destructors. All files are closed and the process group is left by
    then, but some thread is still joinable (we did not find whose), and tearing it down aborted some CPU runs at exit.
    """

    def as_a_rank() -> None:
        launchers.settle()
        if os.environ.get("WORLD_SIZE", "1") == "1":
            # Until the steps begin, which heed it themselves: what is done at exit is done, and the folder is left tidy.
            # Of several ranks one may be waiting for another, where Python hears nothing.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        launchers.end_with_launcher()
        main()

    code = run(as_a_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (0, 130, 143) and os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)


def is_main_process() -> bool:
    """True on rank 0, known from the launcher's environment before any process group exists."""
    return os.environ.get("RANK", "0") == "0"


def pick(record: type, args: argparse.Namespace, **overrides):
    """Fills a frozen dataclass from the flags of the same names; `overrides` win."""
    names = {field.name for field in dataclasses.fields(record)}
    return record(**({name: value for name, value in vars(args).items() if name in names} | overrides))


_MOST, _LARGEST = 2**31 - 1, 1e30  # limits of numbers that have no other: what 32 bits hold, as int and as float


def whole(low: int, high: int = _MOST) -> Callable[[str], int]:
    """A whole number from `low` to `high` (an argparse type)."""

    def convert(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            wanted = f"a whole number from {low}" + f" to {high}" * (high < _MOST or value > high)
            raise argparse.ArgumentTypeError(f"{_short(text)} is out of range, wanted {wanted}")
        return value

    convert.__name__ = "whole number"  # what argparse calls it in its errors
    return convert


def number(low: float, high: float = _LARGEST, above: bool = False, optional: bool = False) -> Callable[[str], float]:
    """A finite number from `low` to `high`, of which fp32 holds every one (an argparse type).

    Args:
        above: `low` itself is not allowed.
        optional: `none` means off, and becomes None.
    """

    def convert(text: str) -> float | None:
        if optional and text.lower() in ("none", "null"):
            return None
        value = float(text)
        if not low <= value <= high or (above and value == low):  # NaN is in no range
            wanted = f"a number {'above' if above else 'from'} {low:g}"
            wanted += f" to {high:g}" * (high < _LARGEST or value > high) + " or none" * optional
            raise argparse.ArgumentTypeError(f"{_short(text)} is out of range, wanted {wanted}")
        return value

    convert.__name__ = "number"
    convert.optional = optional
    return convert


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


positive, natural = whole(1), whole(0)
# What every generator takes: numpy's old one has 32 bits.
seed = whole(0, 2**32 - 1)
# What sampling takes; step 3 divides by the temperature in training too, so there it is above 0.
temperature, top_p = number(0, 100), number(0, 1, above=True)


def shares(text: str) -> tuple[float, ...]:
    """Three shares such as 2,4,4 (an argparse type)."""
    found = tuple(float(part) for part in text.split(","))
    if len(found) != 3 or min(found) < 0 or not 0 < sum(found) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not three shares of at least 0, such as 2,4,4")
    return found


def share_list(text: str) -> str:
    """The same, kept as it was written (an argparse type)."""
    shares(text)
    return text


def precision(text: str) -> str:
    """A precision; torch's names of them are understood too (an argparse type)."""
    return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}.get(text, text)


def add_switch(group, name: str, default: bool, help: str) -> None:
    """`--name` and `--no-name`."""
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=help)


def add_timeout_flag(group) -> None:
    """The limit of functions that come as FILE.py:FUNCTION."""
    help = "seconds that loading FILE.py, and then each call of its FUNCTION, may take; 0: no limit"
    group.add_argument("--reward_timeout", type=number(0, 1e6), default=1800, metavar="SECONDS", help=help)


# fmt: off
def add_run_flags(parser: Parser, output_dir: str) -> None:
    """Where the run reads and writes, its seed, and what it reports."""
    group = parser.add_argument_group("run")
    group.add_argument("--data", metavar="PATH", help="step-0 folder, a stage folder in it or a parquet file; default: the one the parent model was trained on")
    group.add_argument("--data_split", type=share_list, default=None, metavar="S,P,R", help="refuse data that step 0 has dealt out in other shares; default: take them as they are")
    group.add_argument("--tokens_cache", default="auto", metavar="DIR", help="folder that keeps the tokens of prepared data, off for none; auto: of 20,000 rows or more, in .tokens beside the data")
    group.add_argument("--output_dir", default=output_dir, metavar="DIR", help="where the run writes; a finished run there is never overwritten")
    group.add_argument("--seed", type=seed, default=1, help="of everything drawn at random; same seed, same run")
    group.add_argument("--logging_steps", type=positive, default=1, help="steps between lines on the terminal; files get every step")
    group.add_argument("--report_to", nargs="+", default=["tensorboard"], choices=["tensorboard", "wandb", "none"], help="where curves go besides metrics.jsonl")
    group.add_argument("--run_name", default=None, help="name shown by trackers; default: the output folder's")
    group.add_argument("--push_to_hub", action="store_true", help="upload the finished model to the Hugging Face hub (needs HF_TOKEN or `hf auth login`)")
    group.add_argument("--hub_model_id", default=None, metavar="OWNER/NAME", help="where to; default: the output folder's name, under your account")


def add_saving_flags(parser: Parser, steps: str) -> None:
    """Checkpoints inside the run, counted in `steps`."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save_steps", type=number(0), default=0.1, help=f"{steps} from one checkpoint to the next; below 1: a share of the run; 0: only when stopped")
    group.add_argument("--save_total_limit", type=positive, default=2, help="checkpoints kept, the newest; all go when the run is finished")
    group.add_argument("--resume_from_checkpoint", nargs="?", const="latest", default=None, metavar="DIR", help="go on from the newest checkpoint in --output_dir that is whole, or from DIR")


def add_model_flags(parser: Parser) -> None:
    """How models are loaded, whichever role they play."""
    group = parser.add_argument_group("models")
    group.add_argument("--chat_template", default=None, help=f"for tokenizers without a template of their own, and used only there: {', '.join(BUILTIN_TEMPLATES)}, or a jinja file")
    group.add_argument("--attn_implementation", default="auto", help="attention kernel of transformers: sdpa, eager, flash_attention_2, ...; auto: sdpa where the model has it")
    add_switch(group, "--trust_remote_code", False, "run Python code that comes with a model from the hub")


def add_batch_flags(parser: Parser, rows: str) -> None:
    """How a fixed set of examples (`rows` is their name) is cut into optimizer steps."""
    group = parser.add_argument_group("batches")
    group.add_argument("--per_device_train_batch_size", type=positive, default=8, help=f"{rows} in one forward of one rank")
    group.add_argument("--gradient_accumulation_steps", type=positive, default=1, help="forwards per optimizer step")
    group.add_argument("--max_tokens_per_micro_batch", type=natural, default=0, metavar="N", help=f"cut a step's {rows} by length into forwards of at most N tokens, padding included; 0: into equal numbers")
    group.add_argument("--num_train_epochs", type=number(1e-6, 1e6), default=1.0, help=f"passes over the training {rows}")
    group.add_argument("--max_steps", type=natural, default=0, help="optimizer steps; 0: as --num_train_epochs says")
    group.add_argument("--eval_steps", type=natural, default=0, help="steps between evaluations; 0: only at the end")


def add_optim_flags(parser: Parser, learning_rate: float, lr_scheduler_type: str = "cosine") -> None:
    """Optimizer and schedule (torch's AdamW)."""
    group = parser.add_argument_group("optimizer")
    group.add_argument("--learning_rate", type=number(0), default=learning_rate, help="peak learning rate")
    group.add_argument("--lr_scheduler_type", default=lr_scheduler_type, choices=["linear", "cosine", "constant"], help="shape after warm-up")
    group.add_argument("--min_lr_ratio", type=number(0, 1), default=0.0, help="the schedule ends at this share of the peak")
    group.add_argument("--warmup_steps", type=number(0), default=0.03, help="optimizer steps of linear warm-up; below 1: a share of the run")
    group.add_argument("--weight_decay", type=number(0), default=0.0, help="AdamW's decoupled weight decay")
    group.add_argument("--adam_beta1", type=number(0, 0.99999), default=0.9, help="decay of the first moment")
    group.add_argument("--adam_beta2", type=number(0, 0.99999), default=0.95, help="decay of the second moment")
    group.add_argument("--adam_epsilon", type=number(0, 1, above=True), default=1e-8, help="added to the denominator")
    group.add_argument("--max_grad_norm", type=number(0), default=1.0, help="clip the global gradient norm; 0: off")


def add_lora_flags(parser: Parser, dropout: bool):
    """Low-rank adapters; returns the group, for flags of further roles."""
    group = parser.add_argument_group("adapters (LoRA)")
    group.add_argument("--lora_r", type=whole(0, 65536), default=0, help="rank; only adapters are trained then; 0: all weights are")
    group.add_argument("--lora_alpha", type=number(1e-6), default=32, help="the adapter's update is scaled by alpha / r")
    group.add_argument("--lora_target_modules", nargs="+", default=["all-linear"], help="names of the layers that get one; all-linear: all but output layer, routers and experts")
    if dropout:
        group.add_argument("--lora_dropout", type=number(0, 0.99), default=0.0, help="share of an adapter's inputs set to zero in training")
    return group


def add_engine_flags(parser: Parser) -> None:
    """DeepSpeed: precision, ZeRO, offload."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", type=precision, default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="auto: bf16 where the GPU has it, fp32 on CPU")
    group.add_argument("--zero_stage", type=int, default=0, choices=[0, 1, 2, 3], help="0 whole copies, 1 shard optimizer, 2 + gradients, 3 + weights")
    group.add_argument("--offload_optimizer", action="store_true", help="optimizer states in host memory (needs --zero_stage 1, 2 or 3)")
    group.add_argument("--offload_param", action="store_true", help="sharded weights in host memory (needs --zero_stage 3)")
    add_switch(group, "--gradient_checkpointing", False, "recompute activations in the backward pass: less memory, a third more time")
    group.add_argument("--ds_config", default=None, metavar="FILE", help="DeepSpeed json merged over the one built from the flags")
    group.add_argument("--timeout_minutes", type=number(0.01, 1e6), default=30, help="a collective that waits longer ends the run")


# fmt: on
