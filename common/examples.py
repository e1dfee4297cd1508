"""Rows to tokenised examples, and a report of what became of every row.

Nothing is dropped in silence: each tokenise_* function returns a Report with every row accounted for. `rows` may be a
part of a file, whose first row has the number `first_row` there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common import chat_format
from common.errors import UserError


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
    weighted: int = 0  # conversations with answers that are context only because the data gives them weight 0
    tools_unseen: int = 0  # rows with tools of which the chat template prints nothing, or not all
    set_aside: dict[str, int] = field(default_factory=dict)  # reason -> rows
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first such row, in words

    def put_aside(self, row: int, reason: str, detail: str = "") -> None:
        self.set_aside[reason] = self.set_aside.get(reason, 0) + 1
        self.first.setdefault(reason, f"first row {row}" + (f", {detail}" if detail else ""))

    def add(self, later: "Report") -> None:
        """Takes in the report on rows that follow in the same file."""
        for name in ("read", "kept", "truncated", "shortened", "partly_trained", "weighted", "tools_unseen"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for reason, rows in later.set_aside.items():
            self.set_aside[reason] = self.set_aside.get(reason, 0) + rows
            self.first.setdefault(reason, later.first[reason])

    def __str__(self) -> str:
        parts = [f"{self.what}: {self.read} rows read, {self.kept} kept"]
        if self.truncated:
            parts.append(f"{self.truncated} of them with an answer cut at the limit")
        if self.shortened:
            parts.append(f"{self.shortened} of them without their oldest turns")
        if self.partly_trained:
            why = "the template rewrites them, they hold the stop token, or nothing was asked before them"
            parts.append(f"{self.partly_trained} of them with earlier answers not trained ({why})")
        if self.weighted:
            parts.append(f"{self.weighted} of them with answers of weight 0, which are context only")
        if self.tools_unseen:
            parts.append(f"{self.tools_unseen} of them with tools that the chat template does not print")
        parts += [f"{n} set aside: {reason} ({self.first[reason]})" for reason, n in self.set_aside.items()]
        return "; ".join(parts)

    def require_rows(self, file: Path) -> None:
        """Raises a UserError when no row is left, with the reasons: the file may be that of evaluation."""
        if not self.kept:
            why = "the file is empty" if not self.read else str(self).split("; ", 1)[-1]
            raise UserError(f"{self.what}: none of {self.read} rows can be used; {why}; these are the rows of {file}")


def tokenise_sft(
    tokenizer, rows: Iterable[dict], max_length: int, first_row: int = 0
) -> tuple[list[SFTExample], Report]:
    """Conversations cut on the right at `max_length` tokens.

    Where no answer would be left of a conversation, it loses its oldest turns first.
    """
    examples, report = [], Report("sft data")
    end = chat_format.turn_end_id(tokenizer)
    for number, row in enumerate(rows, first_row):
        report.read += 1
        try:
            tools = chat_format.tools_of(row)
            ids, mask, messages = chat_format.fit_conversation(tokenizer, row["messages"], max_length, tools)
            unseen = bool(tools) and chat_format.leaves_out(tokenizer, messages, tools)
        except chat_format.RowError as error:
            report.put_aside(number, error.reason, error.detail)
            continue
        said = [m for m in messages if m["role"] == "assistant"]
        answers = [m for m in said if not chat_format.is_context_only(m)]
        trained = sum(kept and token == end for token, kept in zip(ids, mask, strict=True))
        cut = mask[:max_length]
        if True not in cut:
            report.put_aside(number, f"no answer begins within --max_length {max_length}", f"{len(ids)} tokens")
            continue
        length = len(cut) - cut[::-1].index(True)  # context after the last trained token would be computed for nothing
        examples.append(SFTExample(ids[:length], mask[:length]))
        report.truncated += len(ids) > max_length
        report.shortened += len(messages) < len(row["messages"])
        report.partly_trained += trained < len(answers)
        report.weighted += len(answers) < len(said)
        report.tools_unseen += unseen
    report.kept = len(examples)
    return examples, report


def tokenise_pairs(
    tokenizer, rows: Iterable[dict], max_length: int, first_row: int = 0
) -> tuple[list[PairExample], Report]:
    """Preference pairs whose answers are cut on the right so that prompt + answer has `max_length` tokens at most.

    A prompt that leaves no room for an answer loses its oldest turns first. Pairs that are equal, or are once cut, say
    nothing and are set aside.
    """
    examples, report = [], Report("preference data")
    prompt_limit = max_length - 1
    for number, row in enumerate(rows, first_row):
        report.read += 1
        try:
            tools = chat_format.tools_of(row)
            fitted = chat_format.fit_prompt(tokenizer, row["prompt"], prompt_limit, tools)
            if fitted is None:
                report.put_aside(number, f"prompt over {prompt_limit} tokens even without its older turns")
                continue
            messages = fitted[1]
            prompt, *answers = chat_format.encode_pair(tokenizer, messages, row["chosen"], row["rejected"], tools)
            unseen = bool(tools) and chat_format.leaves_out(tokenizer, messages, tools)
        except chat_format.RowError as error:
            report.put_aside(number, error.reason, error.detail)
            continue
        chosen, rejected = answers
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
        report.tools_unseen += unseen
    report.kept = len(examples)
    return examples, report


def tokenise_prompts(
    tokenizer, rows: Iterable[dict], max_prompt_length: int, first_row: int = 0
) -> tuple[list[PromptExample], Report]:
    """Prompts of at most `max_prompt_length` tokens; a longer one loses its oldest turns first.

    `row["prompt"]` then holds the turns that are left: reward sources judge what the actor was shown.
    """
    examples, report = [], Report("prompts")
    for number, row in enumerate(rows, first_row):
        report.read += 1
        try:
            tools = chat_format.tools_of(row)
            fitted = chat_format.fit_prompt(tokenizer, row["prompt"], max_prompt_length, tools)
            unseen = bool(tools and fitted and chat_format.leaves_out(tokenizer, fitted[1], tools))
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
        report.tools_unseen += unseen
        examples.append(PromptExample(ids, row))
    report.kept = len(examples)
    return examples, report
