"""One call, `log(step, {...})`, from a training loop to files, TensorBoard and the screen.

What a run folder gets:

    metrics.jsonl   {"step": 3, "loss": 1.25, ...}     nothing in it depends on the clock: equal runs give equal bytes
    timings.jsonl   {"step": 3, "time": <Unix seconds>, "<phase>": <seconds>, ...}
    samples.jsonl   {"step", "row", "prompt", "response", "score", "kl", "length", "truncated"}
    tensorboard/    the same numbers as curves (with --report_to tensorboard)

The files are the truth and get every step; the screen gets one aligned line every `logging_steps` steps, under a
progress bar when it is a terminal. JSON knows no NaN: a number that is not finite is written as null, so every line
loads everywhere (pandas reads null back as NaN). A line reaches the file whole, in one write, or not at all.
Only the main process writes; on the other ranks every method does nothing.
"""

import atexit
import importlib.util
import io
import json
import math
import os
import re
import sys
import time
from collections import deque
from pathlib import Path

from common.errors import UserError
from common.json_files import anything, parse_json, whole
from common.printing import printable

REPORTERS = ("tensorboard", "wandb")

# What the console line shows, in this order, under which short name. The files hold everything, by full name.
LABELS = {
    "loss": "loss",
    "accuracy": "acc",
    "mean_token_accuracy": "acc",
    "margin": "margin",
    "objective/scores": "score",
    "reward": "reward",
    "objective/kl": "kl",
    "kl": "kl",
    "objective/entropy": "ent",
    "entropy": "ent",
    "policy/clipfrac_avg": "clip",
    "val/ratio": "ratio",
    "loss/policy_avg": "policy",
    "loss/value_avg": "value",
    "completions/mean_length": "len",
    "grad_norm": "grad",
    "policy/grad_norm": "grad",
    "learning_rate": "lr",
    "lr": "lr",
}
SAMPLE_FIELDS = ("row", "prompt", "response", "score", "kl", "length", "truncated")

_NOT_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def number(value) -> float | int | None:
    """A Python number from a float, an int or a one-element tensor; None when it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    assert isinstance(value, int | float), f"a metric is a number, not {type(value).__name__}: {value!r}"
    value = int(value) if isinstance(value, bool) else value
    return value if math.isfinite(value) else None


def json_line(row: dict) -> str:
    """One line of valid JSON; readable (Chinese stays Chinese), no control bytes, no line separators inside."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return _NOT_IN_JSON.sub(lambda m: f"\\u{ord(m[0]):04x}", text) + "\n"


def read_lines(path, schema=anything) -> tuple[list[dict], list[int], bool]:
    """The complete lines of a file, the numbers of those that cannot be read, and whether the last is torn.

    Args:
        schema: of a line, see `json_files`.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_json(line, schema))
        except ValueError:
            bad.append(number)
    return rows, bad, bool(rest)


def read_jsonl(path) -> list[dict]:
    """Every complete line of a file written here; a last line torn by a crash is left out.

    Raises:
        UserError: another line cannot be read.
    """
    rows, bad, _ = read_lines(path)
    if bad:
        raise UserError(f"{path}: line {bad[0]} cannot be read as json; mend or remove it")
    return rows


def parse_report_to(names) -> tuple[str, ...]:
    """'tensorboard', 'tensorboard,wandb', 'none' or a sequence -> names that are known and installed, or UserError.

    Cheap (imports none of them): call it when flags are checked, before a model loads.
    """
    names = names.split(",") if isinstance(names, str) else list(names)
    names = tuple(dict.fromkeys(name.strip() for name in names if name.strip() not in ("", "none")))
    for name in names:
        if name not in REPORTERS:
            raise UserError(f"--report_to {name}: not known; use one of {', '.join(REPORTERS)}, none")
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--report_to {name}: the package is not installed; pip install {name}, or --report_to none"
            )
    return names


def format_value(value) -> str:
    """At most 7 characters, three decimals where they say something: 0.123, -12.346, 1.2e-05, 1234.5, 2.1e+06."""
    if value is None:
        return "nan"
    size = abs(value)
    if size == 0 or 1e-3 <= size < 99.9995:
        return f"{value:.3f}"
    if 99 < size < 9999.95:
        return f"{value:.1f}"
    text = f"{value:.1e}"
    return text if len(text) <= 7 else f"{value:.0e}"


def format_seconds(seconds: float) -> str:
    """95 -> 1:35, 3725 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def on_terminal() -> bool:
    """Whether to draw bars: a real terminal, and not one of CI's or a dumb one."""
    return sys.stdout.isatty() and not os.environ.get("CI") and os.environ.get("TERM", "") not in ("", "dumb")


class _Lines:
    """Appends JSON lines. Rows after `resume_step` are dropped first: a resumed run writes them again.

    Args:
        written: how many there were up to that step; None if that is not known.

    `problem` says what of them is lost, if anything is.
    """

    def __init__(self, path: Path, resume_step: int, written: int | None = None):
        rows, bad, _ = read_lines(path, {"step": whole}) if path.is_file() and resume_step else ([], [], False)
        kept = [row for row in rows if row["step"] <= resume_step]
        self.path, self.file, self.count, self.problem = path, None, len(kept), ""
        if bad or (written or 0) > len(kept):
            reason = f"line {bad[0]} cannot be read" if bad else "the others are gone" if kept else "it is gone"
            of = "" if written is None else f" of {written}"
            self.problem = f"warning: {path} has {len(kept)}{of} lines of the steps up to {resume_step}: {reason}"
        if kept:
            staged = path.with_name(path.name + ".tmp")
            staged.write_text("".join(map(json_line, kept)), encoding="utf-8")
            staged.replace(path)
        else:
            path.unlink(missing_ok=True)

    def write(self, *rows: dict):
        self.count += len(rows)
        if self.file is None:  # a stage that has no samples leaves no file of them
            self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        left = "".join(map(json_line, rows)).encode("utf-8")
        while left:  # a disk that fills up takes a part, and says so at the next call
            left = left[os.write(self.file, left) :]

    def sync(self):
        if self.file is not None:
            os.fsync(self.file)

    def close(self):
        if self.file is not None:
            os.close(self.file)
            self.file = None


class MetricsLogger:
    """Where a training loop sends numbers, samples and sentences; see the top of this file.

    `resume_step` is the last step that an earlier part of the same run completed; 0 starts the files afresh. `lines` is
    what the method of that name gave then: `problems` says which of them are lost.
    """

    def __init__(
        self,
        run_dir,
        *,
        total_steps: int | None,
        report_to=("tensorboard",),
        logging_steps: int = 1,
        main_process: bool = True,
        title: str = "",
        resume_step: int = 0,
        lines: dict[str, int] | None = None,
    ):
        self.main_process = main_process
        self.total_steps, self.logging_steps = total_steps, max(1, logging_steps)
        self.columns: list[str] | None = None
        self.bar = self.tensorboard = self.wandb = None
        self.files: list[_Lines] = []
        self.problems: list[str] = []
        self.clock = deque([(resume_step, time.monotonic())], maxlen=20)
        if not main_process:
            return
        reporters = parse_report_to(report_to)
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        names, lines = ("metrics", "timings", "samples"), lines or {}
        self.files = [_Lines(run_dir / f"{name}.jsonl", resume_step, lines.get(name)) for name in names]
        self.metrics_file, self.timings_file, self.samples_file = self.files
        self.problems = [file.problem for file in self.files if file.problem]
        if "tensorboard" in reporters:
            from torch.utils.tensorboard import SummaryWriter  # 1.4 s: only when asked for

            # purge_step hides what an interrupted run drew at the steps that are now run again
            self.tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1)
        if "wandb" in reporters:
            import wandb

            project = os.environ.get("WANDB_PROJECT", "four-step-rlhf")
            self.wandb = wandb.init(project=project, name=title or run_dir.name, dir=str(run_dir))
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a sample must not end a run under an ASCII locale
        if on_terminal():
            self._start_bar(title, resume_step)
        atexit.register(self.close)  # an exception must not leave a hidden cursor or unwritten curves

    def log(self, step: int, metrics: dict, timings: dict | None = None):
        """Record `metrics` (numbers) of `step`; `timings` (seconds) go to their own file."""
        if not self.main_process:
            return
        row = {name: number(value) for name, value in metrics.items()}
        seconds = {name: number(value) for name, value in (timings or {}).items()}
        assert not {"step", "time"} & seconds.keys(), "these names are taken"
        self.metrics_file.write({"step": step, **row})
        self.timings_file.write({"step": step, "time": round(time.time(), 3), **seconds})
        # curves show what is finite; TensorBoard would draw a NaN as a gap anyway, W&B stores null
        scalars = {**row, **{f"time/{name}": value for name, value in seconds.items()}}
        if self.tensorboard:
            for name, value in scalars.items():
                self.tensorboard.add_scalar(name, math.nan if value is None else value, step)
        if self.wandb:
            self.wandb.log(scalars, step=step)
        self._show(step, row)

    def samples(self, step: int, rows: list[dict]):
        """Record sampled responses and print them so that a person can read them."""
        if not self.main_process:
            return
        lines = []
        for row in rows:
            row = {name: row[name] for name in SAMPLE_FIELDS if name in row} | row
            lines.append({"step": step} | {k: v.item() if hasattr(v, "item") else v for k, v in row.items()})
        lines = [{k: number(v) if isinstance(v, float) else v for k, v in row.items()} for row in lines]
        self.samples_file.write(*lines)
        for row in lines:
            self.say(_readable_sample(row, self._width(100)))

    def sync(self):
        """Put on the disk what was logged so far: a checkpoint of this step will count on it."""
        for file in self.files:
            file.sync()

    def lines(self) -> dict[str, int]:
        """How many lines each file has by now; none on other ranks than the main one."""
        return {file.path.stem: file.count for file in self.files}

    def say(self, text: str):
        """Print a line that does not break the bar."""
        if not self.main_process:
            return
        text = printable(text)
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self):
        """Finish the bar and flush every file; harmless when called twice."""
        if not self.main_process:
            return
        self.main_process = False
        atexit.unregister(self.close)
        if self.bar:
            self.bar.stop()
        for file in self.files:
            file.close()
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _start_bar(self, title: str, resume_step: int):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn()]
        self.bar = Progress(*columns, expand=True)
        self.task = self.bar.add_task(printable(title), total=self.total_steps, completed=resume_step)
        self.bar.start()

    def _width(self, unlimited: int) -> int:
        """The terminal's width, or COLUMNS; a log file without COLUMNS has `unlimited`."""
        if self.bar:
            return self.bar.console.width
        columns = os.environ.get("COLUMNS", "")
        return max(40, int(columns)) if columns.isdecimal() else unlimited

    def _show(self, step: int, row: dict):
        """The console line of one step; evaluation figures get a line of their own, so columns never move."""
        evals = {name.removeprefix("eval_"): value for name, value in row.items() if name.startswith("eval_")}
        trained = {name: value for name, value in row.items() if not name.startswith("eval_")}
        if trained:
            if step > self.clock[-1][0]:
                self.clock.append((step, time.monotonic()))
            if self.bar:
                self.bar.update(self.task, completed=step)
            if step % self.logging_steps == 0 or step == self.total_steps or self.columns is None:
                self.say(self._step_line(step, trained))
        if evals:
            shown = "  ".join(f"{LABELS.get(name, name)} {format_value(value)}" for name, value in evals.items())
            self.say(f"evaluation at step {step}: {shown}")

    def _step_line(self, step: int, row: dict) -> str:
        if self.columns is None:  # fixed by the first line
            self.columns = [name for name in LABELS if name in row] or list(row)[:8]
        total = str(self.total_steps) if self.total_steps else ""
        head = f"step {step:>{len(total) or 6}}" + (f"/{total}" if total else "")
        (old_step, old_time), (new_step, new_time) = self.clock[0], self.clock[-1]
        pace = (new_time - old_time) / max(1, new_step - old_step)
        tail = f"{pace:6.2f} s/step"
        if self.total_steps and not self.bar:
            tail += f"  eta {format_seconds(pace * max(0, self.total_steps - step))}"
        line, width = head, self._width(1000)
        for name in self.columns:
            value = row.get(name)
            shown = f"{value:.1e}" if value and LABELS.get(name) == "lr" else format_value(value)
            cell = f"  {LABELS.get(name, name.rsplit('/')[-1])} {shown:>7}"
            if len(line) + len(cell) + len(tail) + 2 > width:
                break  # a narrow terminal: the first columns matter most, the file has them all
            line += cell
        return f"{line}  {tail}"


def _readable_sample(row: dict, width: int) -> str:
    from rich.console import Console
    from rich.text import Text

    facts = [f"step {row['step']}"] + [f"row {row['row']}"] * ("row" in row)
    facts += [f"{name} {format_value(row[name])}" for name in ("score", "kl") if name in row]
    if "length" in row:
        facts.append(f"{row['length']} tokens{', cut by length' if row.get('truncated') else ''}")
    out = ["  sample: " + ", ".join(facts)]
    for name in ("prompt", "response"):
        text = row.get(name, "")
        if isinstance(text, list):  # messages
            text = "\n".join(f"{message['role']}: {message['content']}" for message in text)
        if len(text) > 800:
            text = text[:800] + f" ... ({len(text) - 800} more characters in samples.jsonl)"
        # rich knows that Chinese characters are two columns wide
        wrapped = Text(printable(text)).wrap(Console(width=width, file=io.StringIO()), max(20, width - 15))
        for i, line in enumerate(part.plain for part in wrapped):
            out.append(f"  {name if i == 0 else '':>10} | {line}".rstrip())
    return "\n".join(out)


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self):
        self.start = time.perf_counter()

    def seconds(self) -> float:
        now = time.perf_counter()
        elapsed, self.start = now - self.start, now
        return elapsed
