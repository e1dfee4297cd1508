"""Rows on their way to a stage's parquet files, and bad rows to rejected.jsonl, so that few are in memory at a time.

A value comes back from the file as it went in: an int is no float, and an object has its own names and no others. Where
no type of parquet gives back all values of a column so, it is kept as JSON text, which `common.data` decodes.
"""

import contextlib
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import UserError
from step0_data.files import is_unicode
from step0_data.formats import STAGES

_BATCH_ROWS, _BATCH_CHARS = 1000, 2 << 20  # rows of a part that are Python objects at a time
_GROUP_BYTES = 16 << 20  # of a row group of parquet
_DEPTH = 30  # of a column's type: a list is three levels of parquet, of which 100 can be read
CONVERSATION = {  # columns that are lists of messages
    "sft": {"messages"},
    "preference": {"prompt", "chosen", "rejected"},
    "prompts": {"prompt"},
    "pretrain": set(),
}


class Spool:
    """Rows on their way to the parquet files: aside in batches first, since a column's type is known at the end only.

    Args:
        folder: the staging folder; the parquet files go there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: Counter[tuple[str, str]] = Counter()  # (stage, part)
        self._kinds: dict[tuple[str, str], dict] = {}  # {column: arrow type, or None for JSON text}
        self._batch: dict[tuple[str, str], list[dict]] = {}
        self._chars: Counter[tuple[str, str]] = Counter()
        self._aside = folder / ".spool"
        self._aside.mkdir()

    def add(self, stage: str, part: str, row: dict, chars: int = 0) -> None:
        place = stage, part
        self.rows[place] += 1
        batch = self._batch.setdefault(place, [])
        batch.append(row)
        self._chars[place] += chars
        if len(batch) >= _BATCH_ROWS or self._chars[place] >= _BATCH_CHARS:
            self._flush(place)

    def _joined(self, stage: str, name: str, one, other):
        if name in CONVERSATION[stage]:
            return max(one, other, key=lambda kind: kind.value_type.num_fields)
        return _common(one, other)

    def counts(self) -> dict[str, dict[str, int]]:
        """{stage: {part: rows}} of the stages that have any."""
        some = [stage for stage in STAGES if self.rows[stage, "train"] or self.rows[stage, "eval"]]
        return {stage: {part: self.rows[stage, part] for part in ("train", "eval")} for stage in some}

    def _flush(self, place: tuple[str, str]) -> None:
        batch = self._batch.pop(place, [])
        self._chars[place] = 0
        kinds = self._kinds.setdefault(place, {})
        for name in dict.fromkeys(name for row in batch for name in row):
            values = [row.get(name) for row in batch]
            kind = _messages(values) if name in CONVERSATION[place[0]] else _kind_of(values)
            kinds[name] = self._joined(place[0], name, kind, kinds.get(name, kind))
        with open(self._aside / "-".join(place), "ab") as file:
            pickle.dump(batch, file, pickle.HIGHEST_PROTOCOL)

    def close(self) -> None:
        """Writes the parquet files; parts without rows get none. Train and eval get the same columns and types.

        Raises:
            UserError: neither a type of parquet nor JSON can hold the values of a column.
        """
        for place in list(self._batch):
            self._flush(place)
        for stage in self.counts():
            kinds: dict = {}
            for part in ("train", "eval"):
                for name, kind in self._kinds.get((stage, part), {}).items():
                    kinds[name] = self._joined(stage, name, kind, kinds.get(name, kind))
            kinds = {name: kind if kind is not None and _fits_parquet(kind) else None for name, kind in kinds.items()}
            self._write(stage, kinds)
            for name, kind in kinds.items():
                if kind is None:
                    print(
                        f"note: the column {name!r} mixes kinds of values; it is kept as JSON text, decoded when read"
                    )
        shutil.rmtree(self._aside)

    def _write(self, stage: str, kinds: dict) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from common.data import JSON_TEXT

        fields = [
            pa.field(name, pa.string(), metadata=JSON_TEXT) if kind is None else pa.field(name, kind)
            for name, kind in kinds.items()
        ]
        schema = pa.schema(fields)
        for part in ("train", "eval"):
            if not self.rows[stage, part]:
                continue
            path = self.folder / stage / f"{part}.parquet"
            path.parent.mkdir(exist_ok=True)
            with open(path, "wb") as file, pq.ParquetWriter(file, schema) as writer:
                group, size = [], 0
                for batch in _batches(self._aside / f"{stage}-{part}"):
                    columns = [_column(batch, name, kind) for name, kind in kinds.items()]
                    group.append(pa.record_batch(columns, schema))
                    size += group[-1].nbytes
                    if size >= _GROUP_BYTES:
                        writer.write_table(pa.Table.from_batches(group).combine_chunks())
                        group, size = [], 0
                if group:
                    writer.write_table(pa.Table.from_batches(group).combine_chunks())


def write_stages(folder: Path, stages: dict[str, dict[str, list[dict]]]) -> Spool:
    """Writes the parquet files of rows that are all there."""
    spool = Spool(folder)
    for stage, parts in stages.items():
        for part, rows in parts.items():
            for row in rows:
                spool.add(stage, part, row)
    spool.close()
    return spool


@contextlib.contextmanager
def rejected(folder: Path) -> Iterator[Callable[[dict], None]]:
    """Takes bad rows for rejected.jsonl; no such file where there are none."""
    path = folder / "rejected.jsonl"
    with contextlib.ExitStack() as stack:
        files = []

        def reject(entry: dict) -> None:
            if not files:
                files.append(stack.enter_context(open(path, "w", encoding="utf-8")))
            files[0].write(_as_json(entry) + "\n")

        yield reject


def _as_json(entry: dict) -> str:
    """One line of JSON; escaped where it holds half characters, and the row as Python writes it where JSON cannot."""
    for row in (entry["row"], repr(entry["row"])):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(entry | {"row": row}, ensure_ascii=False, allow_nan=False)
            return text if is_unicode(text) else json.dumps(entry | {"row": row}, allow_nan=False)
    raise AssertionError("repr is a string")


def _batches(path: Path) -> Iterator[list[dict]]:
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)  # our own, of a moment ago
            except EOFError:
                return


def _messages(values: list[list[dict]]):
    """Of a message; its weight is there where one of them is context that is not trained."""
    import pyarrow as pa

    fields = [("role", pa.string()), ("content", pa.string())]
    if any(message.get("weight") == 0 for messages in values for message in messages):
        fields.append(("weight", pa.int64()))
    return pa.list_(pa.struct(fields))


def _kind_of(values: list):
    """The type from which these values come back as they are; None where there is none.

    Compared as Python writes them: 1 == 1.0 == True, and an object that was filled up with nulls is another object.
    """
    import pyarrow as pa

    wanted = repr(values)
    try:
        kind = pa.array(values).type
        kinds = dict.fromkeys([kind, _finer(kind)])
        return next((kind for kind in kinds if repr(pa.array(values, kind).to_pylist()) == wanted), None)
    except (pa.ArrowException, OverflowError):
        return None


def _finer(kind):
    """With nanoseconds, of which pyarrow takes only whole microseconds by itself."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("ns", kind.tz)
    if pa.types.is_duration(kind):
        return pa.duration("ns")
    if pa.types.is_list(kind):
        return pa.list_(_finer(kind.value_type))
    return pa.struct([(it.name, _finer(it.type)) for it in kind]) if pa.types.is_struct(kind) else kind


def _common(one, other):
    """The type of which both are parts: nothing but nulls, and lists without entries, may become any other."""
    import pyarrow as pa

    if one is None or other is None:
        return None
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_list(one) and pa.types.is_list(other):
        inside = _common(one.value_type, other.value_type)
        return inside and pa.list_(inside)
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.names == other.names:
        inside = [_common(a.type, b.type) for a, b in zip(one, other, strict=True)]
        return None if None in inside else pa.struct(list(zip(one.names, inside, strict=True)))
    if pa.types.is_decimal(one) and pa.types.is_decimal(other) and one.scale == other.scale:
        return max(one, other, key=lambda kind: kind.precision)
    return None


def _fits_parquet(kind, depth: int = 0) -> bool:
    """Not so an object without fields, nor what is nested so deep that a reader gives up."""
    import pyarrow as pa

    fields = [kind.field(i).type for i in range(kind.num_fields)]
    is_hollow = pa.types.is_struct(kind) and not fields
    return not is_hollow and depth < _DEPTH and all(_fits_parquet(field, depth + 1) for field in fields)


def _column(batch: list[dict], name: str, kind):
    import pyarrow as pa

    values = [row.get(name) for row in batch]
    if kind is not None:
        return pa.array(values, kind)
    try:
        cells = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    except TypeError as error:
        raise UserError(
            f"the column {name!r} has values of several kinds, some of which JSON cannot hold ({error}); give its rows "
            "one kind of value, or take the column out"
        ) from error
    return pa.array(cells, pa.string())
