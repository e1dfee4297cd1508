"""Prepared data: finding and reading it, tokenised examples, the rows of one optimiser step, padded batches.

Nothing is cached on disk and nothing is dropped in silence: each tokenise_* function returns a Report with every
row accounted for. Which rows make up step `s` is a pure function of (seed, s), the same for any number of ranks
and any micro-batch size, so a resumed or re-laid-out run sees the same data in the same order.

Legend: B rows of a micro-batch, Q padded prompt length, T padded length.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from common import chat_format
from common.checkpoint import hash_file
from common.errors import UserError

COLUMNS = {
    "sft": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
    "pretrain": ("text",),
}
_PREPARE = "python step0_data/prepare.py --dataset {} --output_dir data"
_HUB_NAME = re.compile(r"^\w[\w.-]*/[\w.-]*[\w-](:[\w./-]+)?(@[\w.-]+)?$")  # what looks like owner/name, for a hint


# ---- finding and reading


@dataclass(frozen=True)
class DataFiles:
    """One stage's prepared files. `hash` identifies their content; `notes` are lines to print."""

    train: Path
    eval: Path | None
    root: Path | None  # the step-0 folder with its manifest.json, if there is one
    hash: str
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, str | None]:
        """What `stage.json` keeps. Later stages find their data by the step-0 root; a bare file leads nowhere."""
        root = str(self.root.resolve()) if self.root else None
        return {"path": root, "train": str(self.train.resolve()), "hash": self.hash}


def locate(data: str | Path, stage: str, shares: str | None = None) -> DataFiles:
    """Finds a stage's parquet files.

    Args:
        data: a step-0 root, the folder of one stage, or a parquet file.
        stage: a key of `COLUMNS`.
        shares: what step 0 has to have dealt the rows out by, as "2,4,4"; None for any.

    Raises:
        UserError: nothing there, nothing for this stage, not parquet, columns of another stage, or other shares.
    """
    assert stage in COLUMNS, stage
    path = Path(data)
    if not path.exists():
        how = f"make it with `{_PREPARE.format('tiny')}`"
        if _HUB_NAME.match(str(data)):
            how = f"if that is a data set of the hub, prepare it first: `{_PREPARE.format(data)}`"
        raise UserError(f"--data {data}: no such folder or file; {how}")
    if path.is_file():
        train, eval_ = path, path.with_name("eval.parquet") if path.name == "train.parquet" else None
    else:
        folder = path / stage if (path / stage).is_dir() else path
        train, eval_ = folder / "train.parquet", folder / "eval.parquet"
        if not train.is_file():
            raise UserError(_nothing_for(path, stage))
        if folder == path and path.name in COLUMNS and path.name != stage:
            raise UserError(f"--data {data} holds {path.name} data and this stage reads {stage} data; give its parent")
    eval_ = eval_ if eval_ is not None and eval_.is_file() else None
    for file in filter(None, (train, eval_)):
        _check_columns(file, stage)
    manifest = _read_manifest(train.parent.parent)
    if shares is not None:
        _check_shares(data, shares, ((manifest or {}).get("args") or {}).get("split"))
    digest, notes = _fingerprint(manifest, train.parent.parent, [f for f in (train, eval_) if f])
    return DataFiles(train, eval_, train.parent.parent if manifest else None, digest, notes)


def _check_shares(data: str | Path, wanted: str, dealt: list[float] | None) -> None:
    numbers = [float(share) for share in wanted.split(",")]
    if not dealt:
        raise UserError(f"--data_split {wanted}: {data} has no record of a split by step 0; leave --data_split out")
    if any(not math.isclose(x / sum(numbers), y / sum(dealt)) for x, y in zip(numbers, dealt, strict=True)):
        seen = ",".join(f"{share:g}" for share in dealt)
        raise UserError(
            f"--data_split {wanted}, but step 0 dealt {data} out by {seen}; "
            f"prepare it again with --split {wanted}, or leave --data_split out"
        )


def locate_or_inherit(data: str | None, parent: dict | None, stage: str, shares: str | None = None) -> DataFiles:
    """`locate`, or without `--data` the folder that the parent model's `stage.json` records.

    Args:
        parent: the parent's stage record (`checkpoint.read_stage`), None for a foreign model.

    Raises:
        UserError: no `--data` and none recorded, or the recorded data has changed since.
    """
    if data is not None:
        return locate(data, stage, shares)
    recorded = (parent or {}).get("data")
    if not recorded or not recorded["path"]:
        raise UserError(
            f"--data is missing and the parent model records none; make some with `{_PREPARE.format('tiny')}`"
        )
    files = locate(recorded["path"], stage, shares)
    if files.hash != recorded["hash"]:
        raise UserError(
            f"the data in {recorded['path']} has changed since the parent model was trained; "
            f"to use it all the same, name it with --data"
        )
    return replace(files, notes=(*files.notes, f"data: {recorded['path']} (as the parent model was trained on)"))


def _nothing_for(path: Path, stage: str) -> str:
    there = [s for s in COLUMNS if (path / s / "train.parquet").is_file()]
    if there:
        return (
            f"--data {path} has no {stage} data, only {', '.join(there)}; prepare a source that feeds this stage, or "
            f"give a share of the rows to it with --split"
        )
    if (path / "manifest.json").is_file():
        return f"--data {path} has a manifest but no parquet files; prepare it again with step0_data/prepare.py"
    inside = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
    return f"--data {path} is no prepared data (it holds {inside}); prepare it with `{_PREPARE.format(path)}`"


def _check_columns(file: Path, stage: str) -> None:
    try:
        columns = pq.read_schema(file).names
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{file} is not a readable parquet file ({str(error).splitlines()[0][:100]}); "
            f"prepare it with `{_PREPARE.format(file)}`"
        ) from error
    missing = [c for c in COLUMNS[stage] if c not in columns]
    if missing:
        raise UserError(
            f"{file} has the columns {', '.join(columns)} but {stage} data needs {', '.join(COLUMNS[stage])}; "
            f"prepare it with `{_PREPARE.format(file)}`"
        )


def _read_manifest(root: Path) -> dict | None:
    path = root / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); prepare the data again") from error
    ours = isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) and "hash" in manifest
    return manifest if ours else None  # many programs write a file of this name


def _fingerprint(manifest: dict | None, root: Path, files: list[Path]) -> tuple[str, tuple[str, ...]]:
    """The manifest's hash while the files are as step 0 left them, else a hash of what they hold now."""
    actual = {file: hash_file(file) for file in files}
    notes = []
    for file in files if manifest else ():
        recorded = manifest["files"].get(file.relative_to(root).as_posix())
        if recorded is None:
            notes.append(f"{file} is not in {root / 'manifest.json'}: step 0 did not write it")
        elif recorded != actual[file]:
            notes.append(f"{file} was changed since step 0 wrote it (its sha256 is not the manifest's)")
    if manifest and not notes:
        return manifest["hash"], ()
    return hashlib.sha256("".join(actual.values()).encode()).hexdigest(), tuple(notes)


def read_rows(parquet: str | Path) -> list[dict]:
    """All rows of a file, as plain dicts."""
    return pq.read_table(parquet).to_pylist()


# ---- examples


@dataclass(frozen=True)
class SFTExample:
    ids: list[int]
    mask: list[bool]  # True on trained tokens: the answers, turn ends included


@dataclass(frozen=True)
class PairExample:
    prompt: list[int]
    chosen: list[int]  # without the prompt
    rejected: list[int]
    margin: float | None = None


@dataclass(frozen=True)
class PromptExample:
    ids: list[int]
    row: dict  # the whole row; its other columns reach reward functions untouched


@dataclass
class Report:
    """What became of the rows of one file. `str()` gives one line."""

    what: str
    read: int = 0
    kept: int = 0
    truncated: int = 0  # rows with an answer cut at the length limit; such an answer has no turn end
    shortened: int = 0  # prompts that lost their oldest turns
    partly_trained: int = 0  # conversations with earlier answers that are context only (see encode_conversation)
    set_aside: dict[str, int] = field(default_factory=dict)  # reason -> rows
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first such row, in words

    def put_aside(self, row: int, reason: str, detail: str = "") -> None:
        self.set_aside[reason] = self.set_aside.get(reason, 0) + 1
        self.first.setdefault(reason, f"first row {row}" + (f", {detail}" if detail else ""))

    def __str__(self) -> str:
        parts = [f"{self.what}: {self.read} rows read, {self.kept} kept"]
        if self.truncated:
            parts.append(f"{self.truncated} of them with an answer cut at the limit")
        if self.shortened:
            parts.append(f"{self.shortened} of them without their oldest turns")
        if self.partly_trained:
            parts.append(f"{self.partly_trained} of them with earlier answers not trained (template rewrites history)")
        parts += [f"{n} set aside: {reason} ({self.first[reason]})" for reason, n in self.set_aside.items()]
        return "; ".join(parts)

    def require_rows(self) -> None:
        """Raises a UserError when no row is left, with the reasons."""
        if not self.kept:
            why = "the file is empty" if not self.read else str(self).split("; ", 1)[-1]
            raise UserError(f"{self.what}: none of {self.read} rows can be used; {why}")


def tokenise_sft(tokenizer, rows: Iterable[dict], max_length: int) -> tuple[list[SFTExample], Report]:
    """Conversations cut on the right at `max_length` tokens. Raises UserError when no row is left.

    Where no answer would be left of a conversation, it loses its oldest turns first.
    """
    examples, report = [], Report("sft data")
    end = chat_format.turn_end_id(tokenizer)
    for number, row in enumerate(rows):
        report.read += 1
        try:
            ids, mask, messages = chat_format.fit_conversation(tokenizer, row["messages"], max_length)
        except chat_format.RowError as error:
            report.put_aside(number, error.reason, error.detail)
            continue
        answers = sum(m["role"] == "assistant" for m in messages)
        trained = sum(kept and token == end for token, kept in zip(ids, mask, strict=True))
        cut = mask[:max_length]
        if True not in cut:
            report.put_aside(number, f"no answer begins within --max_length {max_length}", f"{len(ids)} tokens")
            continue
        length = len(cut) - cut[::-1].index(True)  # context after the last trained token would be computed for nothing
        examples.append(SFTExample(ids[:length], mask[:length]))
        report.truncated += len(ids) > max_length
        report.shortened += len(messages) < len(row["messages"])
        report.partly_trained += trained < answers
    report.kept = len(examples)
    report.require_rows()
    return examples, report


def tokenise_pairs(
    tokenizer, rows: Iterable[dict], max_length: int, max_prompt_length: int | None = None
) -> tuple[list[PairExample], Report]:
    """Preference pairs whose answers are cut on the right so that prompt + answer has `max_length` tokens at most.

    A prompt over `max_prompt_length` (None: max_length - 1) loses its oldest turns first. Pairs that are equal,
    or are once cut, say nothing and are set aside. Raises UserError when no row is left.
    """
    examples, report = [], Report("preference data")
    prompt_limit = min(max_prompt_length or max_length, max_length - 1)
    for number, row in enumerate(rows):
        report.read += 1
        try:
            fitted = chat_format.fit_prompt(tokenizer, row["prompt"], prompt_limit)
            if fitted is None:
                report.put_aside(number, f"prompt over {prompt_limit} tokens even without its older turns")
                continue
            messages = fitted[1]
            prompt, chosen, rejected = chat_format.encode_pair(tokenizer, messages, row["chosen"], row["rejected"])
        except chat_format.RowError as error:
            report.put_aside(number, error.reason, error.detail)
            continue
        room = max_length - len(prompt)
        if chosen == rejected:
            report.put_aside(number, "chosen and rejected are equal")
            continue
        if chosen[:room] == rejected[:room]:
            report.put_aside(number, f"chosen and rejected are equal once cut at {max_length} tokens")
            continue
        margin = row.get("margin")
        examples.append(PairExample(prompt, chosen[:room], rejected[:room], None if margin is None else float(margin)))
        report.truncated += max(len(chosen), len(rejected)) > room
        report.shortened += len(messages) < len(row["prompt"])
    report.kept = len(examples)
    report.require_rows()
    return examples, report


def tokenise_prompts(tokenizer, rows: Iterable[dict], max_prompt_length: int) -> tuple[list[PromptExample], Report]:
    """Prompts of at most `max_prompt_length` tokens; a longer one loses its oldest turns first.

    `row["prompt"]` then holds the turns that are left: reward sources judge what the actor was shown. Raises
    UserError when no row is left.
    """
    examples, report = [], Report("prompts")
    for number, row in enumerate(rows):
        report.read += 1
        try:
            fitted = chat_format.fit_prompt(tokenizer, row["prompt"], max_prompt_length)
        except chat_format.RowError as error:
            report.put_aside(number, error.reason, error.detail)
            continue
        if fitted is None:
            report.put_aside(number, f"over --max_prompt_length {max_prompt_length} even without its older turns")
            continue
        ids, messages = fitted
        if len(messages) < len(row["prompt"]):
            report.shortened += 1
            row = {**row, "prompt": messages}
        examples.append(PromptExample(ids, row))
    report.kept = len(examples)
    report.require_rows()
    return examples, report


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
