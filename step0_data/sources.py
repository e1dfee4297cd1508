"""What is read: local files, folders of them, or a data set of the hub, each with a weight, as streams of plain rows.

A source with a train and a test part of its own (by the names of its files, or of its splits on the hub) keeps them:
train is train and test is eval. The words are those of `datasets`: harmless-base/test.jsonl.gz is a test file.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.printing import printable
from step0_data import shapes
from step0_data.columns import mapping, pair_of_names
from step0_data.files import SUFFIXES, Row, is_unicode, read_file, suffix, table_rows

_NOT_DATA = {  # describe the data beside them, or a model
    *("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "manifest.json", "croissant.json"),
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "vocab.json"),
    *("added_tokens.json", "special_tokens_map.json"),
}
_LARGEST_DESCRIPTION = 4 << 20  # bytes
_HUB_NAME = re.compile(r"^([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+(?:/[\w.-]+)*))?(?:@([\w.-]+))?$")
_WEIGHT = re.compile(r"^(.+)@(\d+(?:\.\d*)?|\.\d+)$")
_COLUMNS = re.compile(r":(?=\w+=)")
_PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"), "eval"),
}


@dataclass(frozen=True)
class Piece:
    """A file, or a split of the hub (then `file` is None), with its part as in `Plan`."""

    file: Path | None
    part: str | None
    rows: Iterator[Row]


@dataclass(frozen=True)
class Plan:
    """What is read of one source: its files with their parts, or None for the hub, whose splits are known later."""

    source: str  # as it was typed
    name: str  # without the weight and the columns
    weight: float
    columns: dict[str, str] | None  # {our name: theirs} of this source alone; None: what `--columns` says
    stage: str | None  # the only stage it feeds; None: any
    files: dict[Path, str | None] | None  # file: "train", "eval", or None where the rows are still to be dealt out
    left_out: tuple[str, ...] = ()  # files of it that are neither train nor test
    not_data: tuple[str, ...] = ()  # files of it that are not read: of other kinds, or descriptions of the data


def plan(sources: Sequence[str], stage: str | None = None) -> list[Plan]:
    """What to read of each source (for `stage` only). A train and a test file side by side are its own split.

    Side by side are files of one folder, given as a folder or each by itself. In a folder with such a split, files that
    are neither are left out, as `datasets` leaves them out.

    Raises:
        UserError: as `resolve` and `parts_of`.
    """
    weighted = [parts_of(source) for source in sources]
    found = [(source, path_of(source), resolve(source)) for source, *_ in weighted]
    named = [{file: _part_of_file(file, path) for file in files or ()} for _, path, files in found]
    together: dict[tuple, set] = {}  # parts by folder
    folders = [(path, True) if path.is_dir() else (path.parent, False) for _, path, _ in found]
    for folder, parts in zip(folders, named, strict=True):
        together.setdefault(folder, set()).update(parts.values())
    plans = []
    for typed, weight, (_, path, files), folder, parts in zip(sources, weighted, found, folders, named, strict=True):
        not_data = tuple(file.relative_to(path).as_posix() for file in _beside(path, files))
        if files is None or not _is_split(together[folder]):
            plans.append(Plan(typed, *weight, stage, files and dict.fromkeys(files), not_data=not_data))
            continue
        left_out = [file for file, part in parts.items() if part is None and folder[1]]
        kept = {file: part for file, part in parts.items() if file not in left_out}
        plans.append(Plan(typed, *weight, stage, kept, tuple(file.as_posix() for file in left_out), not_data))
    return plans


def parts_of(source: str) -> tuple[str, float, dict[str, str] | None]:
    """`PATH:prompt=question,chosen=good@0.3` as (what is in front, the weight, {our column: theirs}).

    Raises:
        UserError: as `weight_of`, or words that are none of `--columns`.
    """
    name, weight = weight_of(source)
    cuts = [it.start() for it in _COLUMNS.finditer(name)]
    if not cuts or path_of(name).exists():
        return name, weight, None
    cut = next((cut for cut in cuts if path_of(name[:cut]).exists()), cuts[0])
    try:
        return name[:cut], weight, mapping([pair_of_names(word) for word in name[cut + 1 :].split(",")])
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error


def _beside(path: Path, files: list[Path] | None) -> list[Path]:
    """What lies in a folder beside the data files."""
    return sorted(set(_files_in(path)) - set(files)) if files and path.is_dir() else []


def weight_of(source: str) -> tuple[str, float]:
    """`PATH@0.3` or `NAME@SPLIT@2` as (what is in front, the weight); 1 where none is written.

    Raises:
        UserError: the weight is 0.
    """
    found = _WEIGHT.match(source)
    if not found or path_of(source).exists():
        return source, 1.0
    if not float(found[2]):
        raise UserError(f"{source}: a weight is above 0; leave the source out instead")
    return found[1], float(found[2])


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
    source, *_ = parts_of(sources[0])
    path, rest = path_of(source), sources[0].removeprefix(source)
    if path.is_dir():
        if not (path / folder).exists():
            there = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folder"
            raise UserError(f"--data_dir {folder}: not in {path}, which has {there}")
        return [f"{path / folder}{rest}"]
    name = _HUB_NAME.match(source)
    if path.is_file() or not name or name[2]:
        raise UserError(f"--data_dir {folder}: {source} is no folder and no plain hub name; leave --data_dir out")
    return [f"{name[1]}:{folder}" + (f"@{name[3]}" if name[3] else "") + rest]


def path_of(source: str) -> Path:
    """What was typed, as a path that can be asked for.

    Raises:
        UserError: the system knows no such path: too long for it, or of a user who is not there.
    """
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"{source[:80]}: no such file or folder ({why}); give a path or a hub name") from error
    return path


def resolve(source: str) -> list[Path] | None:
    """The files of a source in reading order; None for a name that only the hub can know.

    Raises:
        UserError: no such file, nothing readable in the folder, an unknown kind of file.
    """
    path = path_of(source)
    if path.is_dir():
        seen = _files_in(path)
        files = [p for p in seen if suffix(p) in SUFFIXES and not _describes(p)]
        saved = {p.parent: _shards(p) for p in seen if p.name == "state.json"}
        order = {p: p for p in files if saved.get(p.parent) is None}
        for folder, shards in saved.items():  # of `save_to_disk`: files beside these are caches
            order |= {folder / name: folder / f"{i:09}" for i, name in enumerate(shards or ())}
        if not order:
            raise UserError(f"{source}: no data file in this folder; wanted {', '.join(SUFFIXES)}, each also with .gz")
        for file in order:
            _check_file(file)
        return sorted(order, key=order.get)
    if path.is_file():
        _check_file(path)
        if suffix(path) not in SUFFIXES:
            raise UserError(f"{source}: {shapes.unknown_kind(path, SUFFIXES)}")
        return [path]
    if path.exists():
        raise UserError(f"{source}: is neither a file nor a folder (a pipe, say); write what comes out of it to a file")
    before, at, last = source.rpartition("@")
    if at and path_of(before).exists():
        raise UserError(f"{source}: {last!r} is no weight; write {before}@0.3, or @2 to have each row twice")
    if _HUB_NAME.match(source) and suffix(path) not in SUFFIXES:
        return None
    raise UserError(f"{source}: no such file or folder (looked in {Path.cwd()})")


def _describes(file: Path) -> bool:
    """By its name, or by the one object that it holds."""
    if file.name in _NOT_DATA or file.suffix.lower() != ".json" or not 0 < file.stat().st_size < _LARGEST_DESCRIPTION:
        return file.name in _NOT_DATA
    try:
        return shapes.describes(json.loads(file.read_bytes()))
    except (ValueError, RecursionError):
        return False
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); look at the file") from error


def _files_in(folder: Path) -> list[Path]:
    """All files that are not hidden; links are followed, each folder once.

    Raises:
        UserError: a link to nothing, or a packed file that would be passed over.
    """

    def fail(error: OSError):
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); look at the folder") from error

    found, been = [], {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        real = {name: os.path.realpath(os.path.join(place, name)) for name in sorted(folders)}
        folders[:] = [name for name in real if not name.startswith(".") and real[name] not in been]
        been.update(real[name] for name in folders)
        found += [Path(place, name) for name in names if not name.startswith(".")]
    for file in found:
        is_data = any(word.lower() in SUFFIXES for word in file.suffixes)
        if is_data and not file.exists():
            raise UserError(f"{file}: a link to a file that is not there; get that file, or remove the link")
        if is_data and suffix(file) not in SUFFIXES and file.suffix.lower() in shapes.PACKED:
            raise UserError(f"{file}: packed in a way that is not read here; unpack it, or pack it as .gz, or move it")
    return [file for file in found if file.is_file()]


def _check_file(file: Path) -> None:
    name = str(file)
    if not is_unicode(name) or len(name.splitlines()) > 1:
        name = name.encode("utf-8", "backslashreplace").decode()
        raise UserError(f"{' '.join(name.split())}: its name has a line break or is not UTF-8; rename it")
    if printable(name) != name:
        raise UserError(f"{printable(name)}: its name has a control character; rename it")


def _shards(path: Path) -> list[str] | None:
    """The files of a data set in the order that its state.json, of `save_to_disk`, has them; None: some other file.

    Raises:
        UserError: a file that it names is not there.
    """
    try:
        shards = [str(it["filename"]) for it in json.loads(path.read_bytes())["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    lost = next((name for name in shards if not (path.parent / name).is_file()), None)
    if lost:
        raise UserError(f"{path} names {lost}, which is not there; copy the folder whole")
    return shards


def check_outside(plans: Sequence[Plan], output_dir: str) -> None:
    """What is written is not read again: the next run would take it for a part of the source.

    Raises:
        UserError: the output folder is a source, or inside one.
    """
    output = Path(output_dir).resolve()
    for it in plans:
        folder = None if it.files is None else path_of(it.name).resolve()
        if folder and folder.is_dir() and output.is_relative_to(folder):
            raise UserError(f"--output_dir {output_dir} is inside the source {it.name}; choose a folder outside of it")


def pieces(it: Plan) -> tuple[list[Piece], list[str]]:
    """The files or splits of a source, each to be read when its turn comes, and the names of what is left out."""
    if it.files is None:
        return _read_hub(it.name)
    return [Piece(file, part, read_file(file)) for file, part in it.files.items()], list(it.left_out)


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
    # As arrow has it: pictures and sounds are not decoded, only to be refused.
    yield from table_rows(where, dataset.with_format("arrow").iter(1000))


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
