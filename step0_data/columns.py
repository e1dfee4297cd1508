"""Columns: what a row has and under which name, `--columns OURS=THEIRS`, and rows that are not text."""

import functools
import math

from step0_data.turns import KEYS, BadRow, as_list

QUESTION = ("question", "query", "problem")
ANSWER = ("solution", "response", "completion", "output", "answer", "targets")  # the worked one before the short one
COMPLETION = ("completion", "response", "output")  # beside a `prompt`; `answer` and `solution` there are references
LABEL = ("kto_tag", "label")
ALPACA = ("instruction", "input", "context", "output", "system", "history")
TOOLS = ("tools", "functions")  # definitions: today's name and OpenAI's first one
LOSS_MASK = "loss_mask"  # beside messages: 0 or 1 for each
REJECTED = ("rejected", "rejected_response")
LISTS = ("completions", "responses", "answers", "generations", "candidates")
SCORES = ("scores", "ratings", "rewards", "ranks")

# What `--columns` can give a name to; in any case of letters they are known without it.
WORDS = tuple(
    dict.fromkeys(
        ("prompt", "chosen", *REJECTED, "margin", "completion", *LABEL, "messages", "conversations", *ALPACA, *QUESTION)
        + (*ANSWER, "ground_truth", *LISTS, *SCORES, "score_chosen", "score_rejected", *TOOLS, LOSS_MASK, "text")
    )
)
_ALSO = {"system_prompt": "system"}  # OpenOrca's name
_ONLY_LISTS = ("history", "human_answers", LOSS_MASK, *LISTS, *SCORES)
_OF_OBJECTS = ("prompt", "chosen", *REJECTED, "completion", "messages", "conversations", *TOOLS)
_MEDIA = {"image", "images", "audio", "audios", "video", "videos"}

# Columns whose emptiness means "this row is of another form"; an empty `chosen` or `output` is a bad row instead.
_SPARSE = {
    "input",
    "context",
    "system",
    "history",
    "prompt",
    "messages",
    "conversations",
    "instruction",
    *LABEL,
    *QUESTION,
}


def has(row: dict, *columns: str) -> str | None:
    """The first of the columns that says something, else the first that is empty and should not be.

    Exporters pad rows with nulls and empty strings.
    """
    there = [column for column in columns if not _is_null(row.get(column))]
    full = next((column for column in there if row[column] not in ("", [])), None)
    return full or next((column for column in there if column not in _SPARSE), None)


def _is_null(value) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def says(value) -> bool:
    return not _is_null(value) and value not in ("", [], {})


class TableRow(dict):
    """A row of parquet or arrow, where an object has the names that objects of other rows have, filled with null."""


def _unfilled(value):
    """Without the names that say nothing."""
    if isinstance(value, dict):
        return {name: _unfilled(it) for name, it in value.items() if it is not None}
    return [_unfilled(it) for it in value] if isinstance(value, list) else value


class Cells(dict):
    """One row that remembers what was read of it, so that the ledger can name the rest."""

    def __init__(self, row: dict, of_a_table: bool = False):
        # Lists that stand in cells as JSON text, where a column can be nothing but a list.
        read = {name: found for name in _ONLY_LISTS if isinstance(found := as_list(row.get(name)), list)}
        if of_a_table:
            read |= {name: _unfilled(row[name]) for name in _OF_OBJECTS if name in row}
        super().__init__(row | read)
        self._source, self.taken, self._read, self._left = row, set(), set(), {}

    def take(self, column: str, *more: str):
        """A cell that the record holds from now on; `more` go with it."""
        self.taken.update((column, *more))
        return self.get(column)

    def read(self, column: str):
        """A cell that the record holds, and that stays a further column of prompts too."""
        self._read.add(column)
        return self.get(column)

    def leave_out(self, names) -> None:
        """What nothing keeps: columns of one of several answers, say."""
        self._left |= dict.fromkeys(names)

    def said(self) -> dict:
        """What the record of this row says of its columns: `extra`, `read`, `unread`."""
        extra = {name: it for name, it in self._source.items() if name not in self.taken and name not in self._left}
        for column in self.taken & self.keys():
            cell = as_list(self[column])
            for item in cell if isinstance(cell, list) else ():
                if isinstance(item, dict) and ("role" in item or "from" in item):
                    self.leave_out(f"{column}.{key}" for key, it in item.items() if key not in KEYS and says(it))
        unread = tuple(str(name) for name in self._left if name not in self.taken and says(self.get(name, True)))
        return {"extra": extra, "read": frozenset(self._read), "unread": unread}


def rest(row: dict, used: set[str]) -> dict:
    return {name: value for name, value in row.items() if name not in used}


def seen(row: dict) -> str:
    return ", ".join(map(str, row)) or "none"


def number(value) -> float | None:
    """A number, also out of a csv cell; None where there is none."""
    try:
        found = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


# `--columns` ---------------------------------------------------------------------------------------------------------


def pair_of_names(text: str) -> str:
    """Checks one word of `--columns`; a ValueError says what is wrong."""
    ours, sign, theirs = text.partition("=")
    if not (ours and sign and theirs):
        raise ValueError(f"{text!r} is not OURS=THEIRS, such as prompt=question")
    if ours not in WORDS:
        if theirs in ("prompt", "chosen", "rejected"):  # hardly theirs, where ours is no word of ours
            raise ValueError(f"{ours!r} in {text!r} is none of our columns; ours stand left: {theirs}={ours}")
        raise ValueError(f"{ours!r} in {text!r} is none of our columns: {', '.join(WORDS)}")
    return text


def mapping(words: list[str] | None) -> dict[str, str]:
    """{our name: theirs}; of a name given twice the last counts."""
    return {ours: theirs for ours, _, theirs in (word.partition("=") for word in words or ())}


def in_our_names(row: dict, names: dict[str, str]) -> dict:
    """The row as `--columns` has it, then with our words in small letters: Zhihu-KOL's INSTRUCTION, a csv's Prompt."""
    for ours, theirs in names.items():
        if theirs not in row:
            raise BadRow(
                f"there is no column {theirs}, which --columns calls {ours}; columns seen: {seen(row)}",
                "name one of them",
            )
    if names:
        moved = {*names, *names.values()}
        row = {ours: row[theirs] for ours, theirs in names.items()} | rest(row, moved)
    changes, _ = _look_at(tuple(row))
    twice = next((ours for name, ours in changes.items() if list(changes.values()).count(ours) > 1), None)
    if twice:
        same = " and ".join(name for name, ours in changes.items() if ours == twice)
        raise BadRow(f"the columns {same} are both {twice} here", f"say which by --columns {twice}=THEIRS")
    return {changes.get(name, name): value for name, value in row.items()} if changes else row


@functools.lru_cache(maxsize=1000)
def _look_at(names: tuple) -> tuple[dict[str, str], tuple[str, ...]]:
    """What of these names is ours in other letters, and which may hold pictures; rows of one source ask the same."""
    tidy = {name: name.strip().lower() for name in names if isinstance(name, str)}
    tidy = {name: _ALSO.get(small, small) for name, small in tidy.items()}
    ours = {name: small for name, small in tidy.items() if small in WORDS and small not in names}
    return ours, tuple(name for name, small in tidy.items() if small in _MEDIA)


# Rows that are not text ----------------------------------------------------------------------------------------------


def refuse_media(row: dict) -> None:
    """Nothing here looks at pictures: a row that has one would be trained on as if it had not."""
    for name in _look_at(tuple(row))[1]:
        if _says_something(row[name]):
            raise BadRow(
                f"multimodal: the column {name} is filled",
                "only text can be trained on; remove the column where the text stands alone",
            )


def _says_something(value) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_says_something, value.values() if isinstance(value, dict) else value))
    return value is not None and value is not False and not (isinstance(value, str) and not value)
