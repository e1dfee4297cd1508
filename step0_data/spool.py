"""Rows on their way to a stage's parquet files, and bad rows to rejected.jsonl, so that few are in memory at a time."""

import contextlib
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

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

    def counts(self) -> dict[str, dict[str, int]]:
        """{stage: {part: rows}} of the stages that have any."""
        some = [stage for stage in STAGES if self.rows[stage, "train"] or self.rows[stage, "eval"]]
        return {stage: {part: self.rows[stage, part] for part in ("train", "eval")} for stage in some}

    def _flush(self, place: tuple[str, str]) -> None:
        batch = self._batch.pop(place, [])
        self._chars[place] = 0
        kinds = self._kinds.setdefault(place, {})
        for name in dict.fromkeys(name for row in batch for name in row):
            if name in CONVERSATION[place[0]]:
                kinds[name] = _common([_messages(batch, name), kinds.get(name, _NOTHING)])
            elif name not in kinds or kinds[name] is not None:
                kinds[name] = _common([_kind_of([row.get(name) for row in batch]), kinds.get(name, _NOTHING)])
        with open(self._aside / "-".join(place), "ab") as file:
            pickle.dump(batch, file, pickle.HIGHEST_PROTOCOL)

    def close(self) -> None:
        """Writes the parquet files; parts without rows get none. Train and eval get the same columns and types.

        A column whose values have no common type (a number here, a string there) is kept as JSON text.
        """
        for place in list(self._batch):
            self._flush(place)
        for stage in self.counts():
            parts = [self._kinds.get((stage, part), {}) for part in ("train", "eval")]
            names = dict.fromkeys(name for kinds in parts for name in kinds)
            kinds = {name: _common([part.get(name, _NOTHING) for part in parts]) for name in names}
            kinds = {name: kind if kind is not None and _fits_parquet(kind) else None for name, kind in kinds.items()}
            while odd := self._write(stage, kinds):
                kinds[odd] = None
            for name, kind in kinds.items():
                if kind is None:
                    print(f"note: the column {name!r} mixes kinds of values; it is kept as JSON text")
        shutil.rmtree(self._aside)

    def _write(self, stage: str, kinds: dict) -> str | None:
        """One stage's files; the name of a column whose values do not fit after all, if there is one."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([(name, pa.string() if kind is None else kind) for name, kind in kinds.items()])
        for part in ("train", "eval"):
            if not self.rows[stage, part]:
                continue
            path = self.folder / stage / f"{part}.parquet"
            path.parent.mkdir(exist_ok=True)
            with pq.ParquetWriter(path, schema) as writer:
                group, size = [], 0
                for batch in _batches(self._aside / f"{stage}-{part}"):
                    columns = []
                    for name, kind in kinds.items():
                        try:
                            columns.append(_column(batch, name, kind))
                        except _NO_FIT():
                            return name
                    group.append(pa.record_batch(columns, schema))
                    size += group[-1].nbytes
                    if size >= _GROUP_BYTES:
                        writer.write_table(pa.Table.from_batches(group).combine_chunks())
                        group, size = [], 0
                if group:
                    writer.write_table(pa.Table.from_batches(group).combine_chunks())
        return None


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


_NOTHING = "nothing"  # the type of a column that is not there


def _NO_FIT():
    import pyarrow as pa

    return (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)


def _batches(path: Path) -> Iterator[list[dict]]:
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)  # our own, of a moment ago
            except EOFError:
                return


def _messages(batch: list[dict], name: str):
    """The type of a column of messages; the turns have a weight where one of them is not to be trained."""
    import pyarrow as pa

    is_weighted = any("weight" in turn for row in batch for turn in row[name])
    weight = [("weight", pa.int64())] if is_weighted else []
    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), *weight]))


def _kind_of(values: list):
    import pyarrow as pa

    try:
        return pa.array(values).type
    except _NO_FIT():
        return None


def _common(kinds: list):
    """The type that holds values of all these; None where there is none."""
    import pyarrow as pa

    kinds = [kind for kind in kinds if kind is not _NOTHING]
    if None in kinds or kinds.count(kinds[0]) == len(kinds):
        return None if None in kinds else kinds[0]
    try:
        schemas = [pa.schema([("it", kind)]) for kind in kinds]
        return pa.unify_schemas(schemas, promote_options="permissive").field("it").type
    except pa.ArrowException:
        return None


def _fits_parquet(kind, depth: int = 0) -> bool:
    """Not so an object without fields, nor what is nested so deep that a reader gives up."""
    import pyarrow as pa

    fields = [kind.field(i).type for i in range(kind.num_fields)]
    is_hollow = pa.types.is_struct(kind) and not fields
    return not is_hollow and depth < _DEPTH and all(_fits_parquet(field, depth + 1) for field in fields)


def _column(batch: list[dict], name: str, kind):
    import pyarrow as pa

    if kind is None:
        cells = [json.dumps(row.get(name), ensure_ascii=False, default=str) for row in batch]
        return pa.array(cells, pa.string())
    return pa.array([row.get(name) for row in batch], kind)
