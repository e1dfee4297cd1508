"""Prepared data: finding and reading the files that step 0 wrote, known by what they hold."""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.checkpoint import hash_file
from common.errors import UserError
from common.json_files import each, many, number, read_json, text, whole

COLUMNS = {
    "sft": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt",),
    "pretrain": ("text",),
}
JSON_TEXT = {"encoding": "json"}  # metadata of a column whose cells are JSON: no type of parquet holds its values
# What readers of step 0's manifest.json count on; what else it holds is for people.
MANIFEST = {
    "format_version": whole,
    "hash": text,
    "files": each(text),
    "stages?": each(each(whole)),
    "sources?": many({"source": text, "files?": many({"file": text, "sha256": text})}),
    "warnings?": many(text),
    "args?": {"split?": many(number)},
}
_PREPARE = "python step0_data/prepare.py --dataset {} --output_dir data"
_HUB_NAME = re.compile(r"^\w[\w.-]*/[\w.-]*[\w-](:[\w./-]+)?(@[\w.-]+)?$")  # what looks like owner/name, for a hint


@dataclass(frozen=True)
class DataFiles:
    """One stage's prepared files. `hash` identifies their content; `notes` are lines to print; `sha256` is by file."""

    train: Path
    eval: Path | None
    root: Path | None  # the step-0 folder with its manifest.json, if there is one
    hash: str
    notes: tuple[str, ...] = ()
    sha256: dict[Path, str] = field(default_factory=dict, compare=False)

    def feeds(self, stage: str) -> bool:
        """Whether a later stage finds its data beside these."""
        return self.root is not None and (self.root / stage / "train.parquet").is_file()

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
        prepared = [folder.parent.name for folder in path.parent.glob("*/manifest.json")]
        if near := difflib.get_close_matches(path.name, prepared, 1, 0.7):
            how = f"did you mean {path.with_name(near[0])}?"
        elif _HUB_NAME.match(str(data)):
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
    sha256 = {file: hash_file(file) for file in (train, eval_) if file}
    digest, notes = _fingerprint(manifest, train.parent.parent, sha256)
    return DataFiles(train, eval_, train.parent.parent if manifest else None, digest, notes, sha256)


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
            "--data is missing and the parent model records none; name the folder that step 0 wrote, or make one with "
            f"`{_PREPARE.format('tiny')}`"
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
        without = (
            "; or do without a reward model: step 3 takes --reward FILE.py:FUNCTION" if stage == "preference" else ""
        )
        return (
            f"--data {path} has no {stage} data, only {', '.join(there)}; prepare a source that feeds this stage, or "
            f"give a share of the rows to it with --split{without}"
        )
    if (path / "manifest.json").is_file():
        return f"--data {path} has a manifest but no parquet files; prepare it again with step0_data/prepare.py"
    inside = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
    return f"--data {path} is no prepared data (it holds {inside}); prepare it with `{_PREPARE.format(path)}`"


def _check_columns(file: Path, stage: str) -> None:
    try:
        with open_parquet(file) as found:
            columns = found.schema_arrow.names
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
    advice = "the file is damaged, prepare the data again"
    if not {"hash", "files"} & read_json(path, {}, advice).keys():
        return None  # many programs write a file of this name
    return read_json(path, MANIFEST, advice)


def _fingerprint(manifest: dict | None, root: Path, actual: dict[Path, str]) -> tuple[str, tuple[str, ...]]:
    """The manifest's hash while the files are as step 0 left them, else a hash of what they hold now."""
    notes = []
    for file in actual if manifest else ():
        recorded = manifest["files"].get(file.relative_to(root).as_posix())
        if recorded is None:
            notes.append(f"{file} is not in {root / 'manifest.json'}: step 0 did not write it")
        elif recorded != actual[file]:
            notes.append(f"{file} was changed since step 0 wrote it (its sha256 is not the manifest's)")
    if manifest and not notes:
        return manifest["hash"], ()
    return hashlib.sha256("".join(actual.values()).encode()).hexdigest(), tuple(notes)


def open_parquet(file: str | Path, **options) -> pq.ParquetFile:
    """A parquet file by its whole path: pyarrow takes the relative `out:1/train.parquet` for an address."""
    return pq.ParquetFile(Path(file).absolute(), **options)


def read_rows(parquet: str | Path) -> list[dict]:
    """All rows of a file, as plain dicts."""
    with open_parquet(parquet) as file:
        return rows_of(file.read())


def rows_of(table: pa.Table | pa.RecordBatch) -> list[dict]:
    """Rows of arrow as plain dicts, the one way from prepared files to Python: values are what the source had."""
    return decoded(table.to_pylist(maps_as_pydicts="strict"), table.schema)


def decoded(rows: list[dict], fields: Iterable[pa.Field]) -> list[dict]:
    """The same rows, with the columns that are kept as JSON text decoded."""
    for name in [it.name for it in fields if (it.metadata or {}).get(b"encoding") == b"json"]:
        for row in rows:
            try:
                row[name] = None if row[name] is None else json.loads(row[name])
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"column {name!r}: said to be JSON text and is not ({error}); prepare it again"
                ) from error
    return rows
