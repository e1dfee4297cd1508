"""Reading sources: local files, folders of them, or a data set of the hub, as a stream of plain rows.

A source with a train and a test part of its own (by the names of its files, or of its splits on the hub) keeps them:
train is train and test is eval. The words are those of `datasets`: harmless-base/test.jsonl.gz is a test file.

A row that cannot even be parsed (broken JSON, a wrong number of cells) is not raised but handed on as a BadRow, so
that one place decides whether it stops the run or is set aside.
"""

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from step0_data.formats import BadRow

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow")
_NOT_DATA = {"dataset_info.json", "state.json", "dataset_dict.json", "manifest.json"}  # describe the data beside them
_HUB_NAME = re.compile(r"^([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+(?:/[\w.-]+)*))?(?:@([\w.-]+))?$")
_PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"), "eval"),
}


@dataclass(frozen=True)
class Row:
    where: str  # "file.jsonl line 3": for people
    value: object  # a dict if all is well, or a BadRow


@dataclass(frozen=True)
class Piece:
    """A file, or a split of the hub (then `file` is None), with its part as in `Plan`."""

    file: Path | None
    part: str | None
    rows: Iterator[Row]


@dataclass(frozen=True)
class Plan:
    """What is read of one source: its files with their parts, or None for the hub, whose splits are known later."""

    source: str
    files: dict[Path, str | None] | None  # file: "train", "eval", or None where the rows are still to be dealt out
    left_out: tuple[str, ...] = ()


def plan(sources: Sequence[str]) -> list[Plan]:
    """What to read of each source. A train and a test file side by side are its own split.

    Side by side are files of one folder, given as a folder or each by itself. In a folder with such a split, files that
    are neither are left out, as `datasets` leaves them out.

    Raises:
        UserError: as `resolve`.
    """
    found = [(source, Path(source).expanduser(), resolve(source)) for source in sources]
    named = [{file: _part_of_file(file, path) for file in files or ()} for _, path, files in found]
    together: dict[tuple, set] = {}  # parts by folder
    folders = [(path, True) if path.is_dir() else (path.parent, False) for _, path, _ in found]
    for folder, parts in zip(folders, named, strict=True):
        together.setdefault(folder, set()).update(parts.values())
    plans = []
    for (source, _, files), folder, parts in zip(found, folders, named, strict=True):
        if files is None or not _is_split(together[folder]):
            plans.append(Plan(source, files and dict.fromkeys(files)))
            continue
        left_out = [file for file, part in parts.items() if part is None and folder[1]]
        kept = {file: part for file, part in parts.items() if file not in left_out}
        plans.append(Plan(source, kept, tuple(file.as_posix() for file in left_out)))
    return plans


def _is_split(parts) -> bool:
    return {"train", "eval"} <= set(parts)


def _part_of_file(file: Path, source: Path) -> str | None:
    """By the file's name, else by that of a folder inside the source: train/0001.parquet is a train file too."""
    inside = file.relative_to(source).parts if source.is_dir() else (file.name,)
    return next((part for name in reversed(inside) if (part := _part_of(name))), None)


def _part_of(name: str) -> str | None:
    words = re.split(r"[-._ 0-9]+", name.lower())
    return next((_PARTS[word] for word in words if word in _PARTS), None)


def inside(sources: Sequence[str], folder: str | None) -> list[str]:
    """The sources with `--data_dir FOLDER` worked in: PATH/FOLDER, or NAME:FOLDER on the hub.

    Raises:
        UserError: several sources, or one that has no such folder.
    """
    if folder is None:
        return list(sources)
    if len(sources) != 1:
        raise UserError(f"--data_dir {folder} is of one source, {len(sources)} are given; write each as NAME:FOLDER")
    path = Path(sources[0]).expanduser()
    if path.is_dir():
        if not (path / folder).exists():
            there = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folder"
            raise UserError(f"--data_dir {folder}: not in {path}, which has {there}")
        return [str(path / folder)]
    name = _HUB_NAME.match(sources[0])
    if path.is_file() or not name or name[2]:
        raise UserError(f"--data_dir {folder}: {sources[0]} is no folder and no plain hub name; leave --data_dir out")
    return [f"{name[1]}:{folder}" + (f"@{name[3]}" if name[3] else "")]


def resolve(source: str) -> list[Path] | None:
    """The files of a source in reading order; None for a name that only the hub can know.

    Raises:
        UserError: no such file, nothing readable in the folder, an unknown kind of file.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        seen = [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        files = sorted(p for p in seen if p.is_file() and _suffix(p) in SUFFIXES and p.name not in _NOT_DATA)
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


def pieces(it: Plan) -> tuple[list[Piece], list[str]]:
    """The files or splits of a source, each to be read when its turn comes, and the names of what is left out."""
    if it.files is None:
        return _read_hub(it.source)
    return [Piece(file, part, read_file(file)) for file, part in it.files.items()], list(it.left_out)


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


def _read_hub(source: str) -> tuple[list[Piece], list[str]]:
    """The splits of `NAME[:CONFIG or FOLDER][@SPLIT]`, through `datasets.load_dataset`, and those left out.

    Raises:
        UserError: the hub cannot be reached or does not give it, or it is not known which split to take.
    """
    import datasets

    name, word, split = _HUB_NAME.match(source).groups()
    datasets.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        where = {"name": word} if datasets.config.HF_HUB_OFFLINE else _ask_hub(name, word)
        loaded = datasets.load_dataset(name, **where, split=split)
    except UserError:
        raise
    except Exception as error:  # the hub client has no common base class: offline, 404, gated, no such split, ...
        raise UserError(f"{source}: no such file or folder here, and {_why(error, name)}") from error
    if split:
        return [Piece(None, None, _hub_rows(source, loaded))], []
    parts = _choose_splits(source, list(loaded))
    found = [Piece(None, part, _hub_rows(f"{source} {name}", loaded[name])) for name, part in parts.items()]
    return found, [f"{source}@{name}" for name in loaded if name not in parts]


def _choose_splits(source: str, splits: list[str]) -> dict[str, str | None]:
    """{split: part} of what to read: train and what is held out by its name, or the only one."""
    named = {split: _PARTS[split] for split in splits if split in _PARTS}
    if _is_split(named.values()):
        return named
    if "train" in splits or len(splits) == 1:
        return {"train" if "train" in splits else splits[0]: None}
    raise UserError(f"{source}: which split? it has {', '.join(splits)}; write {source}@{splits[0]}")


def _hub_rows(where: str, dataset) -> Iterator[Row]:
    for number, value in enumerate(dataset, 1):
        yield Row(f"{where} row {number}", value)


def _ask_hub(name: str, word: str | None) -> dict[str, str]:
    """What `word` is of that data set, for `load_dataset`. Asked first: it fails at once, where a load would retry."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(name)
    configs = [str(it.get("config_name")) for it in (info.card_data or {}).get("configs") or []]
    files = [sibling.rfilename for sibling in info.siblings or []]
    if not word or word in configs:
        return {"name": word}
    if any(file.startswith(f"{word}/") for file in files):
        return {"data_dir": word}
    known = dict.fromkeys([*configs, *(file.split("/")[0] for file in files if "/" in file)])
    raise UserError(f"{name} has no configuration or folder {word!r}; it has {', '.join(known) or 'none'}")


def _why(error: Exception, name: str) -> str:
    """What a failure of the hub means for people, and what to do."""
    import datasets
    from huggingface_hub import constants, errors

    said = " ".join(str(error).split())[:200] or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    by_hand = "or download its files elsewhere and give their folder"
    if datasets.config.HF_HUB_OFFLINE:
        return f"the hub is switched off by HF_HUB_OFFLINE and its cache lacks it ({said}); unset that, {by_hand}"
    if isinstance(error, errors.GatedRepoError) or "gated dataset" in said:
        return f"on the hub it is gated; accept its terms at {constants.ENDPOINT}/datasets/{name} and {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return f"the hub has no data set of that name, or a private one; check the spelling; if private, {log_in}"
    if status == 403:
        return f"the hub forbids it (403); use a token that may read it: {log_in}"
    if status:
        return f"the hub answers {status}; try again later, {by_hand}"
    if isinstance(error, errors.HTTPError):
        where = constants.ENDPOINT
        cached = "set HF_HUB_OFFLINE=1 to take what its cache holds"
        return f"the hub at {where} cannot be reached ({said}); check the network and HF_ENDPOINT, {cached}, {by_hand}"
    if isinstance(error, ValueError):  # no such split, no such configuration
        return f"the hub has it otherwise ({said}); write NAME[:CONFIG or FOLDER][@SPLIT]"
    return f"the hub cannot give it ({said}); try another of its parts, {by_hand}"


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
