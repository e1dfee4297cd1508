"""Reading sources: local files, folders of them, or a data set of the hub, as a stream of plain rows.

A row that cannot even be parsed (broken JSON, a wrong number of cells) is not raised but handed on as a BadRow, so
that one place decides whether it stops the run or is set aside.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from step0_data.formats import BadRow

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow")
_NOT_DATA = {"dataset_info.json", "state.json", "dataset_dict.json", "manifest.json"}  # describe the data beside them
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?(:[\w.-]+)?(@[\w.-]+)?$")


@dataclass(frozen=True)
class Row:
    where: str  # "file.jsonl line 3": for people
    value: object  # a dict if all is well, or a BadRow


def resolve(source: str) -> list[Path] | None:
    """The files of a source in reading order; None for a name that only the hub can know.

    Raises:
        UserError: no such file, nothing readable in the folder, an unknown kind of file.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        inside = [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        files = sorted(p for p in inside if p.is_file() and _suffix(p) in SUFFIXES and p.name not in _NOT_DATA)
        if not files:
            raise UserError(f"{source}: no data file in this folder; wanted {', '.join(SUFFIXES)}, each also with .gz")
        return files
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError(f"{source}: unknown kind of file {path.suffix!r}; wanted {', '.join(SUFFIXES)} (or .gz)")
        return [path]
    if _HUB_NAME.match(source) and _suffix(path) not in SUFFIXES:
        return None
    raise UserError(f"{source}: no such file or folder (looked in {Path.cwd()})")


def read(source: str, files: list[Path] | None) -> Iterator[tuple[Path | None, Row]]:
    """(file, row) for every row of a source; the file is None on the hub."""
    if files is None:
        for row in read_hub(source):
            yield None, row
        return
    for file in files:
        for row in read_file(file):
            yield file, row


def read_file(path: Path) -> Iterator[Row]:
    """Rows of one local file.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    readers = {
        ".json": _json,
        ".jsonl": _lines,
        ".ndjson": _lines,
        ".parquet": _parquet,
        ".csv": _csv,
        ".tsv": _csv,
        ".arrow": _arrow,
    }
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    yield from readers[_suffix(path)](path, content)


def read_hub(source: str) -> Iterator[Row]:
    """Rows of `name[:config][@split]` through `datasets.load_dataset`; the split defaults to train."""
    name, _, split = source.partition("@")
    name, _, config = name.partition(":")
    from datasets import load_dataset

    try:
        dataset = load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the hub client has no common base class: offline, 404, gated, no such split, ...
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{source}: no such file or folder here, and the hub cannot give it ({reason}); give the files instead"
        ) from error
    for number, value in enumerate(dataset, 1):
        yield Row(f"{source} row {number}", value)


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path} line {line}: not UTF-8 (byte 0x{content[error.start]:02x}); save the file as UTF-8"
        ) from error


def _json(path: Path, content: bytes) -> Iterator[Row]:
    text = _decode(path, content)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # JSON lines under the name .json, as many tools write them
            yield from _lines(path, content)
            return
        raise UserError(f"{path} line {error.lineno} column {error.colno}: broken JSON ({error.msg})") from error
    if isinstance(data, dict):
        lists = [
            value for value in data.values() if isinstance(value, list) and all(isinstance(v, dict) for v in value)
        ]
        # {"data": [...]} holds rows; any other object is one row (a file with a single JSON line).
        data = (
            lists[0]
            if len(data) == 1 and len(lists) == 1 and set(data) <= {"data", "rows", "train", "examples"}
            else [data]
        )
    if not isinstance(data, list):
        raise UserError(f"{path}: holds a {type(data).__name__}, wanted a list of rows")
    for number, value in enumerate(data, 1):
        yield Row(f"{path} row {number}", value)


def _lines(path: Path, content: bytes) -> Iterator[Row]:
    # Not splitlines(): that cuts at U+2028 and its kin, which are legal inside a JSON string.
    for number, line in enumerate(_decode(path, content).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            value = BadRow(f"broken JSON ({error.msg})", f"mend the line at column {error.colno}")
        yield Row(f"{path} line {number}", value)


def _csv(path: Path, content: bytes) -> Iterator[Row]:
    reader = csv.DictReader(
        io.StringIO(_decode(path, content), newline=""), delimiter="\t" if _suffix(path) == ".tsv" else ",", strict=True
    )
    csv.field_size_limit(2**31 - 1)
    try:
        for value in reader:
            cells = None in value or any(v is None for v in value.values())
            bad = BadRow(
                "the row has more or fewer cells than the heading", "quote cells that hold commas or line breaks"
            )
            yield Row(f"{path} line {reader.line_num}", bad if cells else value)
    except csv.Error as error:
        raise UserError(f"{path} line {reader.reader.line_num}: broken CSV ({error})") from error


def _parquet(path: Path, content: bytes) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({' '.join(str(error).split())[:120]})") from error
    yield from _table(path, table)


def _arrow(path: Path, content: bytes) -> Iterator[Row]:
    import pyarrow as pa

    try:
        try:
            table = pa.ipc.open_stream(content).read_all()  # what `datasets` writes
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable arrow file ({' '.join(str(error).split())[:120]})") from error
    yield from _table(path, table)


def _table(path: Path, table) -> Iterator[Row]:
    number = 0
    for batch in table.to_batches(max_chunksize=1000):
        for value in batch.to_pylist():
            number += 1
            yield Row(f"{path} row {number}", value)
