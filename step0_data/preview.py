"""preview.md: a page to read before training: warnings, counts, the ledger, lengths, and rows with what they train.

Reads the finished parquet files batch by batch, so its memory does not grow with them. Lengths in characters are of
every row; what costs more is done on a sample of rows, the same each time, and the page says of how many.
"""

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from common import chat_format
from common.data import open_parquet, rows_of
from step0_data import checks, output
from step0_data.formats import STAGES

_BATCH = 1000  # rows in memory at once
_SAMPLE = 20_000  # rows of a file that are searched for warnings: a share is then known to within 1 %
_TOKENISED = 500  # of these, rows that a tokenizer is tried on: 1 to 3 ms each
_HUGE = 50_000  # characters: a longer row is over every default length, and not tokenised to find that out
_SHOWN = {"train": 3, "eval": 1}  # rows printed: the first one, and others of the sample
_PIECE, _PIECES = 700, 16  # what is printed of a row: characters of a piece, and pieces (two a turn)
_TRAINS = {
    "sft": "Step 1 trains on what stands between {0} and {1}: the answers.",
    "preference": "Step 2 compares the two answers between {0} and {1}, each behind the same prompt.",
    "prompts": "Step 3 samples an answer where {0}{1} stands; other columns go to reward functions.",
    "pretrain": "Text for a pretraining mix, {0} to {1}; there are no turns.",
}
_CONVERSATIONS = {
    "sft": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
    "pretrain": (),
}
# Printed as \x1b and the like: they would move the cursor or turn the line's direction in whoever reads the page.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def page(folder: Path, ledger: list[dict], tokenizer=None) -> tuple[str, list[str]]:
    """The page about prepared files, and its warnings.

    Args:
        folder: holds `{stage}/{train,eval}.parquet`.
        tokenizer: with a chat template, adds lengths in tokens and prints rows as that model will read them; without
            one, the page says so and stays with text.
    """
    warnings = []
    if tokenizer is not None and not tokenizer.chat_template:
        warnings.append(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template, so tokens are not shown here and no stage "
            f"will start; give --chat_template: {', '.join(chat_format.BUILTIN_TEMPLATES)}, or a jinja file"
        )
        tokenizer = None
    files = [path for stage in STAGES for part in _SHOWN if (path := folder / stage / f"{part}.parquet").is_file()]
    read = [_read(path, tokenizer) for path in files]
    tallies = [tally for tally, _ in read]
    warnings += checks.warnings(tallies)

    counts = {tally.stage: dict.fromkeys(_SHOWN, 0) for tally in tallies}
    for tally in tallies:
        counts[tally.stage][tally.part] = tally.rows
    rows = [
        (tally, [(number, _shortened(_pieces(tally.stage, row, tokenizer))) for number, row in shown])
        for tally, shown in read
    ]
    marks = _marks(text for _, shown in rows for _, pieces in shown for text, _ in pieces)
    blocks = ["# Prepared data", _warned(warnings), _fenced(output.summary(counts, ledger)), *_lengths(tallies)]
    for tally, shown in rows:
        blocks += [f"## {tally.name}: {tally.rows} rows", _TRAINS[tally.stage].format(*marks)]
        for number, pieces in shown:
            blocks += [f"Row {number + 1}:", _fenced(_drawn(pieces, marks))]
    return "\n\n".join(blocks) + "\n", warnings


def load_tokenizer(model: str, chat_template: str | None):
    """The tokenizer of a model folder or hub name, with the chat template the stages would give it.

    Raises:
        UserError: no tokenizer there, or a template that is not known or cannot be rendered.
    """
    from common import models

    tokenizer = models.load_tokenizer(model)
    if tokenizer.chat_template or chat_template:  # else the page warns
        chat_format.ensure_template(tokenizer, chat_template)
    return tokenizer


# Reading -------------------------------------------------------------------------------------------------------------


def _read(path: Path, tokenizer) -> tuple[checks.Tally, list[tuple[int, dict]]]:
    """What a file holds, and the rows to print: (row number from 0, row)."""
    import pyarrow as pa

    file = open_parquet(path, pre_buffer=False)  # which would keep all that was read
    tally = checks.Tally(path.parent.name, path.stem, file.metadata.num_rows)
    others = random.Random(tally.name).sample(range(1, tally.rows), min(tally.rows, _SAMPLE) - 1)
    sample = [0, *others]
    wanted, tokenised, printed = np.sort(sample), set(sample[:_TOKENISED]), sample[: _SHOWN[tally.part]]
    lengths: dict[str, list[np.ndarray]] = {}
    shown, start = [], 0
    for batch in file.iter_batches(_BATCH):
        for name, characters in _characters(tally.stage, batch).items():
            lengths.setdefault(name, []).append(characters)
        stop = start + len(batch)
        numbers = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, stop)]
        rows = rows_of(batch.take(pa.array(numbers - start)))
        for number, row in zip(numbers.tolist(), rows, strict=True):
            tally.add(row)
            if tokenizer is not None and number in tokenised:
                _count_tokens(tally, row, tokenizer)
            if number in printed:
                shown.append((number, row))
        start = stop
    tally.characters = {name: np.concatenate(arrays) for name, arrays in lengths.items()}
    return tally, shown


def _characters(stage: str, batch) -> dict[str, np.ndarray]:
    """{name: characters of that text in each row of the batch}, without making Python objects of the text."""
    import pyarrow.compute as pc

    def each(column: str) -> tuple[np.ndarray, np.ndarray]:
        """(characters before each message, and after the last; where each row's messages begin, and end)."""
        messages = batch.column(column)
        sizes = pc.fill_null(pc.utf8_length(messages.values.field("content")), 0).to_numpy(zero_copy_only=False)
        return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), messages.offsets.to_numpy()

    if stage == "pretrain":
        return {"text": pc.utf8_length(batch.column("text")).to_numpy(zero_copy_only=False)}
    if stage == "sft":
        before, rows = each("messages")
        last = rows[1:] - 1
        return {"prompt": before[last] - before[rows[:-1]], "answer": before[rows[1:]] - before[last]}
    found = {}
    for name in ("prompt", "chosen", "rejected") if stage == "preference" else ("prompt",):
        before, rows = each(name)
        found[name] = before[rows[1:]] - before[rows[:-1]]
    return found


def _is_huge(stage: str, row: dict) -> bool:
    prompt, texts = checks.parts_of(stage, row)
    return sum(len(m["content"]) for m in prompt) + sum(map(len, texts.values())) > _HUGE


def _count_tokens(tally: checks.Tally, row: dict, tokenizer) -> None:
    tally.tokenised += 1
    if _is_huge(tally.stage, row):
        tally.cut += 1
        return
    try:
        tools = chat_format.tools_of(row)
        if tally.stage == "pretrain":
            found = {"text": len(tokenizer(row["text"], add_special_tokens=False)["input_ids"])}
        elif tally.stage == "sft":
            ids, mask = chat_format.encode_conversation(tokenizer, row["messages"], tools)
            answer = mask[::-1].index(False) if False in mask else len(mask)
            found = {"prompt": len(ids) - answer, "answer": answer}
        elif tally.stage == "preference":
            sides = chat_format.encode_pair(tokenizer, row["prompt"], row["chosen"], row["rejected"], tools)
            found = dict(zip(("prompt", "chosen", "rejected"), map(len, sides), strict=True))
        else:
            found = {"prompt": len(chat_format.encode_prompt(tokenizer, row["prompt"], tools))}
    except chat_format.RowError as error:
        tally.set_aside[error.reason] += 1
        return
    for name, tokens in found.items():
        tally.tokens.setdefault(name, []).append(tokens)
    longest = found.pop("prompt", 0) + max(found.values(), default=0)
    tally.cut += tally.stage in checks.LIMITS and longest > checks.LIMITS[tally.stage][0]


# Drawing -------------------------------------------------------------------------------------------------------------

Pieces = list[tuple[str, bool]]  # text, and whether it is trained


def _pieces(stage: str, row: dict, tokenizer) -> Pieces:
    """A row as it will be read: through the chat template where there is a tokenizer, else turn by turn."""
    if tokenizer is not None and stage != "pretrain" and not _is_huge(stage, row):
        try:
            return _through_template(stage, row, tokenizer)
        except chat_format.RowError as error:
            return [(f"(the stage will set this row aside: {error})\n", False), *_turns(stage, row)]
    return _turns(stage, row)


def _turns(stage: str, row: dict) -> Pieces:
    pieces = []
    for name, value in row.items():
        if name not in _CONVERSATIONS[stage]:  # prompts may have any other column, of any of these names too
            pieces += [(f"\n[{name}] ", False), (str(value), stage == "pretrain")]
            continue
        for message in value:
            is_answer = message["role"] == "assistant" and not chat_format.is_context_only(message)
            is_trained = name in ("chosen", "rejected") or (stage == "sft" and is_answer)
            pieces += [(f"\n[{name}] {message['role']}: ", False), (message["content"], is_trained)]
        if stage == "prompts" and name == "prompt":
            pieces += [("\n[sampled] assistant: ", False), ("", True)]
    return [(pieces[0][0].lstrip("\n"), False), *pieces[1:]]


def _through_template(stage: str, row: dict, tokenizer) -> Pieces:
    tools = chat_format.tools_of(row)
    if stage == "sft":
        return chat_format.trained_spans(tokenizer, row["messages"], tools)
    extra = {name: value for name, value in row.items() if name not in _CONVERSATIONS[stage]}
    after = [(f"\n[{name}] {value}", False) for name, value in extra.items()]
    if stage == "prompts":
        ids = chat_format.encode_prompt(tokenizer, row["prompt"], tools)
        return [(_decode(tokenizer, ids), False), ("", True), *after]
    sides = chat_format.encode_pair(tokenizer, row["prompt"], row["chosen"], row["rejected"], tools)
    prompt, chosen, rejected = (_decode(tokenizer, ids) for ids in sides)
    return [
        *[("[prompt] ", False), (prompt, False)],
        *[("\n[chosen] ", False), (chosen, True), ("\n[rejected] ", False), (rejected, True), *after],
    ]


def _decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _marks(texts: Iterable[str]) -> tuple[str, str]:
    """Brackets that no text holds."""
    longest = max((len(run) for text in texts for run in re.findall("⟦+|⟧+", text)), default=0)
    return "⟦" * (longest + 1), "⟧" * (longest + 1)


def _shortened(pieces: Pieces) -> Pieces:
    """Without the middle of long texts and long dialogues, and without what only a terminal understands."""
    left_out = (len(pieces) - _PIECES + 1) // 2 * 2  # whole turns
    if left_out > 0:
        pieces = [*pieces[:2], (f"\n... turns not shown: {left_out // 2} ...", False), *pieces[2 + left_out :]]
    texts = []
    for text, is_trained in pieces:
        if len(text) > _PIECE:
            tail = _PIECE // 4
            text = f"{text[: _PIECE - tail]} ... {len(text) - _PIECE:,} characters are not shown ... {text[-tail:]}"
        texts.append((_UNPRINTABLE.sub(lambda c: c[0].encode("unicode_escape").decode(), text), is_trained))
    return texts


def _drawn(pieces: Pieces, marks: tuple[str, str]) -> str:
    return "".join(f"{marks[0]}{text}{marks[1]}" if is_trained else text for text, is_trained in pieces)


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _warned(warnings: list[str]) -> str:
    if not warnings:
        return "No warnings. Numbers see only so much: read some rows below as well."
    return "**Look at these before you train:**\n\n" + "\n".join(f"- {line}" for line in warnings)


def _lengths(tallies: list[checks.Tally]) -> Iterator[str]:
    """Tables of percentiles, in characters and, where there are any, in tokens."""
    for unit, what in (("characters", "all rows"), ("tokens", f"a sample of {_TOKENISED} rows a file")):
        rows = [
            [tally.name, name, len(values), *np.percentile(values, [5, 50, 95, 99, 100], method="nearest")]
            for tally in tallies
            for name, values in getattr(tally, unit).items()
        ]
        if rows:
            yield f"## Lengths in {unit} ({what})"
            yield _table([["file", "text", "rows", "p5", "p50", "p95", "p99", "max"], *rows])


def _table(rows: list[list]) -> str:
    cells = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust, str.ljust] + [str.rjust] * (len(widths) - 2)
    lines = [[pad(cell, width) for pad, cell, width in zip(sides, row, widths, strict=True)] for row in cells]
    lines.insert(
        1, ["-" * (width - 1) + ("-" if pad is str.ljust else ":") for pad, width in zip(sides, widths, strict=True)]
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
