"""Reading one local file as a stream of rows, so that memory does not grow with the file.

What is wrong with one row is not raised but handed on as a BadRow: one place decides whether it stops the run or is set
aside. What is wrong with the file, so that nothing after it can be trusted, is an error. Text is never mended.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from common.errors import UserError
from step0_data import shapes
from step0_data.columns import TableRow
from step0_data.turns import JSON, BadRow, Twice
from step0_data.turns import kind as kind_of

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow")
_BATCH = 1000  # rows of a table that are Python objects at a time
_CHUNK = 1 << 20  # bytes of a JSON list that are looked at together
_BLANK = re.compile(r"[ \t\r\n]*")


class Row(NamedTuple):
    where: str  # "file.jsonl line 3": for people
    value: object  # a dict if all is well, or a BadRow
    raw: object = None  # beside a BadRow: what stands in the file, as text, cells, or bytes that are no text


def suffix(path: Path) -> str:
    return (path.with_suffix("") if is_gzip(path) else path).suffix.lower()


def is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def read_file(path: Path) -> Iterator[Row]:
    """Rows of one local file.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    kind = suffix(path)
    try:
        with gzip.open(path) if is_gzip(path) else open(path, "rb") as file:
            shapes.check_beginning(path, file.read(4096), kind)
            file.seek(0)
            if kind in (".parquet", ".arrow"):
                yield from (_parquet if kind == ".parquet" else _arrow)(path, file)
            elif kind in (".csv", ".tsv"):
                yield from _csv(path, file, "\t" if kind == ".tsv" else ",")
            else:
                yield from _json(path, file, kind == ".json")
    except EOFError as error:
        raise UserError(f"{path}: the gzip file ends early, it was cut off; get the whole file") from error
    except (OSError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def _undecodable(data: bytes) -> BadRow:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        first = f"byte 0x{data[error.start]:02x}"
        return BadRow("undecodable bytes, not UTF-8", f"save the file as UTF-8 ({first} is the first that is not)")
    raise AssertionError("these bytes are UTF-8")


# JSON ----------------------------------------------------------------------------------------------------------------


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[Row]:
    """One JSON value a line. Lines end at line feeds, or at lone carriage returns, as on old Macs.

    No JSON string can hold these as they are, unlike U+2028 and its kin.
    """
    place, decode, number = f"{path} line ", JSON.decode, 0
    for line in file:
        number += 1
        try:
            yield Row(place + str(number), decode(line.decode()))
        except (ValueError, RecursionError) as error:
            if getattr(error, "msg", "") != "Extra data" or not error.doc[: error.pos].rstrip(" \t").endswith("\r"):
                yield from _odd_line(place + str(number), line, error)
                continue
            pieces = line.split(b"\r")
            for i, piece in enumerate(pieces):
                yield from _lines_again(place + str(number + i), piece)
            number += len(pieces) - 1 - (not pieces[-1].strip())  # of CR LF at the end


def _odd_line(where: str, line: bytes, error: Exception) -> Iterator[Row]:
    """A blank line, one behind a byte order mark, or one that cannot be read, and why."""
    if isinstance(error, UnicodeDecodeError):
        is_cut = error.reason == "unexpected end of data" and not line.endswith(b"\n")
        yield Row(where, _cut() if is_cut else _undecodable(line), line)
        return
    text = line.decode()
    if not text.removeprefix("\ufeff").strip():
        return
    if text.startswith("\ufeff"):  # of the file, or of one that was put behind another
        yield from _lines_again(where, text.removeprefix("\ufeff").encode())
        return
    if "\0" in text:
        bad = BadRow("holds NUL bytes", "remove them or the line; files end so when the machine goes down")
    elif isinstance(error, Twice):
        bad = BadRow("a name stands twice in one object", f"keep one {str(error)!r}")
    elif isinstance(error, RecursionError):
        bad = BadRow("broken JSON (nested too deeply)", "make it flatter")
    elif not isinstance(error, json.JSONDecodeError):
        bad = BadRow("broken JSON (a number of thousands of digits)", "write it as a string")
    elif not line.endswith(b"\n") and text.lstrip()[0] in '{["' and text.rstrip()[-1] not in "}]":
        bad = _cut()
    else:
        bad = BadRow(f"broken JSON ({error.msg})", f"mend the line at column {error.colno}")
    yield Row(where, bad, text.rstrip("\r\n"))


def _cut() -> BadRow:
    return BadRow("the last line is cut off", "get the whole file, or remove the line")


def _lines_again(where: str, line: bytes) -> Iterator[Row]:
    return (row._replace(where=where) for row in _lines(Path(where), [line]))


def _json(path: Path, file: BinaryIO, is_json: bool) -> Iterator[Row]:
    """JSON lines; a list of rows; rows one after another, over several lines each; or one object, or rows inside one.

    Args:
        is_json: the name ends in .json: lines are only one of these, and what is broken is no line.
    """
    offset, line = 0, file.readline(_CHUNK)
    while line.endswith(b"\n") and not line.removeprefix(codecs.BOM_UTF8).strip():
        offset, line = file.tell(), file.readline(_CHUNK)
    line = line.removeprefix(codecs.BOM_UTF8).strip()
    file.seek(offset)
    head = file.read(_CHUNK).decode("utf-8-sig", "replace").lstrip()
    if line.startswith(b"["):
        reads = _values if is_json or line == b"[" or _begins_with_a_row(head) else _lines
    elif line.startswith(b"{"):
        reads = _how_to_read_objects(path, file, head, is_json or line == b"{")
    else:
        reads = _one_value if is_json else _lines
    file.seek(0)
    yield from reads(path, file)


_PLAIN = json.JSONDecoder()


def _begins_with_a_row(head: str) -> bool:
    """A list, where lines are wanted: one list of rows, and neither a list on each line nor a broken line."""
    try:
        first, _ = _PLAIN.raw_decode(head, _BLANK.match(head, 1).end())
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and not shapes.is_message(first)


def _how_to_read_objects(path: Path, file: BinaryIO, head: str, is_whole: bool) -> Callable:
    """What reads a file that begins with an object, by where the first one ends and what follows.

    Args:
        head: the beginning of the file, which has been read up to there. is_whole: if the first is broken, all is.
    """
    try:
        first, end = _PLAIN.raw_decode(head)
    except (ValueError, RecursionError):
        return _one_value if is_whole else _lines
    after = head[end:].strip()
    if not after:
        after = next((part for part in iter(lambda: file.read(_CHUNK), b"") if part.strip()), b"").decode(
            errors="replace"
        )
    if "\n" in head[:end] or "\r" in head[:end]:
        return _values if after.lstrip().startswith("{") else _one_value
    return _lines if after or shapes.rows_in(path, first) is None else _one_value


def _one_value(path: Path, file: BinaryIO) -> Iterator[Row]:
    """An object that is a row, or holds all rows."""
    content = file.read()
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise UserError(f"{path}: is empty, wanted a list of rows")
    try:
        data = JSON.decode(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line}: {_undecodable(content)}") from error
    except json.JSONDecodeError as error:
        before = error.doc[: error.pos].strip()
        if error.msg == "Extra data" and before.startswith("{") and "\n" not in before:
            yield from _lines(path, io.BytesIO(content))
            return
        why = _ENDS if error.pos >= len(error.doc.rstrip()) else error.msg
        where = f"{path} line {error.lineno} column {error.colno}"
        raise UserError(f"{where}: broken JSON ({why}); mend the file there") from error
    except Twice as error:
        raise UserError(f"{path}: {str(error)!r} stands twice in one object; keep one") from error
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else "a number of thousands of digits"
        raise UserError(f"{path}: broken JSON ({why}); mend the file") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {kind_of(data)}, wanted a list of rows")
    rows = shapes.rows_in(path, data)
    for number, value in enumerate([data] if rows is None else rows, 1):
        yield Row(f"{path} row {number}", value)


class _Window:
    """The part of a long text that is being looked at. Bytes that are no text are lone surrogates in it."""

    def __init__(self, file: BinaryIO):
        self.file, self.text, self.at = file, "", 0
        self.is_whole, self.is_clean = False, True  # nothing follows; no undecodable byte so far
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._lines, self._column = 0, 0  # before this text

    def grow(self) -> None:
        """Drops what was read and reads on, twice as far each time: a value of any size is scanned a few times only."""
        line, column = self.place(self.at)
        self._lines, self._column = line - 1, column - 1
        data = self.file.read(max(_CHUNK, len(self.text) - self.at))
        more, self.is_whole = self._decode(data, final=not data), not data
        self.is_clean = self.is_clean and is_unicode(more)
        self.text, self.at = self.text[self.at :] + more, 0

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1."""
        lines = self.text.count("\n", 0, at)
        column = at - self.text.rfind("\n", 0, at) if lines else at + 1 + self._column
        return self._lines + lines + 1, column

    def sign(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()
            if self.at < len(self.text) or self.is_whole:
                return self.text[self.at : self.at + 1]
            self.grow()

    def value(self) -> tuple[object, str]:
        """The next JSON value, and its text."""
        self.sign()
        while True:
            try:
                value, end = JSON.raw_decode(self.text, self.at)
                # What looks like a number may go on in the next chunk: 1 of 12, 1.5, 1e3.
                if self.is_whole or (end < len(self.text) and self.text[end] not in "0123456789.eE+-"):
                    begin, self.at = self.at, end
                    return value, self.text[begin:end]
            except ValueError as error:
                if self.is_whole or isinstance(error, Twice):
                    raise
            self.grow()


def _values(path: Path, file: BinaryIO) -> Iterator[Row]:
    """The values of one JSON list, or values one after another, as they come."""
    window, number = _Window(file), 0
    is_list = window.sign() == "["
    window.at += is_list
    while (sign := window.sign()) != ("]" if is_list else ""):
        if is_list and number and sign != ",":
            raise _broken(path, window, window.at, "Expecting ',' delimiter")
        window.at += is_list and number > 0
        number += 1
        try:
            value, text = window.value()
        except json.JSONDecodeError as error:
            raise _broken(path, window, error.pos, error.msg) from error
        except Twice as error:
            raise UserError(f"{path} row {number}: {str(error)!r} stands twice in one object; keep one") from error
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else "a number of thousands of digits"
            raise UserError(f"{path} row {number}: broken JSON ({why}); mend or remove the row") from error
        raw = None if window.is_clean or is_unicode(text) else text.encode("utf-8", "surrogateescape")
        yield Row(f"{path} row {number}", _undecodable(raw) if raw else value, raw)
    window.at += is_list
    if window.sign():
        raise _broken(path, window, window.at, "Extra data")


_ENDS = "the file ends too early, it was cut off"


def _broken(path: Path, window: _Window, at: int, why: str) -> UserError:
    line, column = window.place(at)
    if not window.text.rstrip().endswith(("]", "}")) or at >= len(window.text.rstrip()):
        why = _ENDS
    return UserError(f"{path} line {line} column {column}: broken JSON ({why}); mend the file there")


def is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Tables --------------------------------------------------------------------------------------------------------------


def _csv(path: Path, file: BinaryIO, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    line, heading = "", None

    def lines() -> Iterator[str]:
        nonlocal line
        for line in text:  # noqa: UP028  a broken row is shown by it
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise UserError(f"{path} line {begin}: broken CSV (a quote that is never closed); close it") from error
            if heading is None or reader.line_num > begin:  # where the next row begins is not known
                raise UserError(f"{path} line {reader.line_num}: broken CSV ({error}); mend it") from error
            bad = BadRow(f"broken CSV ({error})", "double the quotes inside a quoted cell")
            raw = line.rstrip("\r\n")
            yield Row(f"{path} line {begin}", bad, raw if is_unicode(raw) else raw.encode("utf-8", "surrogateescape"))
            continue
        if cells is None:
            return
        said = "".join(cells)
        if not said.strip():  # also the row of commas only that Excel writes
            continue
        if not is_unicode(said):
            raw = delimiter.join(cells).encode("utf-8", "surrogateescape")
            value = _undecodable(raw)
            if heading is None:
                raise UserError(f"{path} line {reader.line_num}: {value}")
        elif heading is None:
            heading = _without_blank_end(cells)
            _check_names(path, heading)
            other = next((sign for sign in ";\t|," if len(heading) == 1 and sign in heading[0]), None)
            if other:
                raise UserError(f"{path}: its cells are parted by {other!r}, wanted {delimiter!r}; save it with that")
            continue
        elif len(cells) != len(heading) and len(cells := _without_blank_end(cells, len(heading))) != len(heading):
            value, raw = BadRow("the row has more or fewer cells than the heading", _QUOTE), cells
        else:
            value, raw = dict(zip(heading, cells, strict=True)), None
        yield Row(f"{path} line {reader.line_num}", value, raw)


def _without_blank_end(cells: list[str], keep: int = 1) -> list[str]:
    """Without the blank cells at the end of a row: Excel writes them for columns that once had something in them."""
    while len(cells) > keep and not cells[-1].strip():
        cells = cells[:-1]
    return cells


def _check_names(path: str | Path, names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: two columns are called {twice!r}; rename one")


_QUOTE = "quote cells that hold commas or line breaks"


def _parquet(path: Path, file: BinaryIO) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pa.BufferReader(file.read()) if is_gzip(path) else file
        yield from table_rows(str(path), pq.ParquetFile(source).iter_batches(_BATCH))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "parquet", error) from error


def _arrow(path: Path, file: BinaryIO) -> Iterator[Row]:
    import pyarrow as pa

    try:
        # Not a memory map: the process would be killed if somebody cut the file off meanwhile.
        source = pa.BufferReader(file.read()) if is_gzip(path) else file
        try:
            batches = iter(pa.ipc.open_stream(source))  # what `datasets` writes
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_file(source)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        yield from table_rows(str(path), map(_checked, batches))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, "arrow", error) from error


def _checked(batch):
    """Raises ArrowInvalid if its buffers are damaged: arrow takes them as they are, and reads beyond their ends."""
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # a matter of its rows
                raise
    return batch


def _unreadable(path: Path, kind: str, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable {kind} file ({' '.join(str(error).split())[:120]}); get it again")


def table_rows(place: str, batches: Iterable) -> Iterator[Row]:
    """Rows of arrow batches or tables."""
    from common.data import rows_of  # brings pyarrow, which --help does without

    number = 0
    for batch in batches:
        if not number:
            _check_names(place, batch.schema.names)
        for start in range(0, batch.num_rows, _BATCH):
            part = batch.slice(start, _BATCH)
            try:
                values = rows_of(part)
            except (ValueError, OverflowError, KeyError):  # the last is of a map with a name twice
                for i in range(part.num_rows):
                    number += 1
                    yield Row(f"{place} row {number}", *_table_row(part.slice(i, 1)))
                continue
            for value in values:
                number += 1
                yield Row(f"{place} row {number}", TableRow(value))


def _table_row(row) -> tuple[object, bytes | str | None]:
    """A row, or what is wrong with it and the cell (the row, where it is not known which cell)."""
    from common.data import rows_of

    try:
        return TableRow(rows_of(row)[0]), None
    except UnicodeDecodeError as error:
        return _undecodable(error.object), error.object
    except UserError:
        raise
    except (ValueError, OverflowError, KeyError) as error:
        return BadRow(f"a value that Python cannot hold ({error})", "mend it or drop its column"), str(row)
