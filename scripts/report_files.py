"""What the report reads: metrics, timings, samples and records of stages, evaluations, defaults of flags.

Files may be missing, torn, damaged or still being written. What cannot be read is left out and said in `problems`.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint import STAGE
from common.errors import UserError
from common.json_files import anything, each, many, number, read_json, text, whole
from common.metrics import read_lines
from scripts.report_glossary import Chapter

EVALUATION = {"judge": text, "models": many({"model": text}), "differences": many({"model": text})}


@dataclass
class Run:
    """What one stage has written so far."""

    name: str
    folder: Path
    metrics: list[dict]
    timings: list[dict]
    samples: list[dict]
    record: dict | None  # stage.json: there once the stage has finished
    chapter: Chapter | None  # the README that explains its metrics

    @property
    def title(self) -> str:
        return self.chapter.title if self.chapter else self.name

    @property
    def steps(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    def values(self, name: str) -> list[float]:
        return points(self.metrics, name)[1]


@dataclass
class Evaluation:
    """What scripts/evaluate.py wrote: by model its figures, its answers, and its difference to the first model."""

    judge: str
    models: dict[str, dict]
    answers: dict[str, list[dict]]
    differences: dict[str, dict]

    def label(self, model: str) -> str:
        """The end of a model's path that tells it from the others."""
        try:
            return os.path.relpath(model, os.path.commonpath(self.models)) if len(self.models) > 1 else model
        except ValueError:  # some relative, some absolute
            return model


def is_number(value) -> bool:
    return number.test(value)


def points(rows: list[dict], *names: str) -> tuple[list, ...]:
    """The steps at which all these are finite numbers, and the values of each."""
    rows = [row for row in rows if all(is_number(row.get(name)) for name in names)]
    return [row["step"] for row in rows], *([row[name] for row in rows] for name in names)


def find_runs(out: Path, chapters: list[Chapter], problems: list[str]) -> list[Run]:
    """The stages in a folder, in the order of the steps; a folder that is a stage itself is the only one.

    Raises:
        UserError: there is nothing to show.
    """
    if not out.is_dir():
        raise UserError(f"{out}: no such folder; wanted the output folder of a recipe or of a stage")
    folders = [out] if (out / "metrics.jsonl").exists() else sorted(file.parent for file in out.glob("*/metrics.jsonl"))
    if not folders:
        raise UserError(f"{out}: no metrics.jsonl in it or in its folders; wanted the folder of a run that has started")
    runs = [read_run(folder, chapters, problems) for folder in folders]
    return sorted(runs, key=lambda run: (chapters.index(run.chapter) if run.chapter else len(chapters), run.name))


def read_run(folder: Path, chapters: list[Chapter], problems: list[str]) -> Run:
    """One stage. Its chapter is the one that explains most of its metrics."""
    record = read_object(folder / "stage.json", problems, STAGE)
    record = record or read_object(folder / "actor" / "stage.json", problems, STAGE)  # step 3 leaves two models
    names = ["metrics", "timings"]
    if (folder / "samples.jsonl").exists() or ((record or {}).get("args") or {}).get("sample_steps"):
        names.append("samples")  # which only stages that sample leave
    metrics, *others = (read_rows(folder / f"{name}.jsonl", {"step": whole}, problems) for name in names)
    others += [[]] * (len(names) == 2)
    logged = {name for row in metrics for name in row}
    known = {chapter: sum(chapter.find(name) is not None for name in logged) for chapter in chapters}
    chapter = max(known, key=known.get) if any(known.values()) else None
    return Run(folder.resolve().name, folder, metrics, *others, record, chapter)


def read_evaluation(out: Path, problems: list[str]) -> Evaluation | None:
    """evaluation.json with its samples, if it is there."""
    record = read_object(out / "evaluation.json", problems, EVALUATION)
    if record is None:
        return None
    models, differences = ({entry["model"]: entry for entry in record[name]} for name in ("models", "differences"))
    rows = read_rows(out / "evaluation.samples.jsonl", {"model": text, "response": text}, problems)
    answers = {model: [row for row in rows if row["model"] == model] for model in models}
    return Evaluation(record["judge"], models, answers, differences)


def read_rows(path: Path, schema: dict, problems: list[str]) -> list[dict]:
    """The complete lines that hold what is wanted."""
    try:
        rows, bad, torn = read_lines(path, schema)
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return []
    if bad:
        problems.append(f"{path}: {len(bad)} of {len(rows) + len(bad)} lines cannot be read and are left out")
    if torn:
        problems.append(f"{path}: the last line is torn, or being written, and is left out")
    return rows


def read_object(path: Path, problems: list[str], schema=None) -> dict | None:
    """A file's names and values; None if it is not there or not to be read."""
    if not path.exists():
        return None
    try:
        return read_json(path, schema or each(anything), "it is left out")
    except UserError as error:
        problems.append(str(error))
        return None


def flags_of(script: Path) -> dict[str, tuple[str, str]]:
    """Flag -> (its help, its default as text or ""), in the script's order, from what `--help` prints.

    A report needs no more of the training code than its command line.
    """
    command = [sys.executable, str(script), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "10000"})
    found = {}
    for entry in re.findall(r"^  (--.*?)(?=^  -|^\S|\Z)", done.stdout, re.M | re.S):
        name, words = re.match(r"--(\w+)", entry)[1], re.split(r"\s{2,}", entry.strip(), maxsplit=1)[-1]
        words, _, default = words.partition(" (default: ")
        found[name] = (words, default.removesuffix(")"))
    return found
