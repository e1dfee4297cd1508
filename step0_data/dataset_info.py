"""LLaMA-Factory's `dataset_info.json`: the data sets named there as sources and `--columns` of ours."""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from step0_data.columns import mapping
from step0_data.turns import ROLES

_OURS = {"prompt": "instruction", "query": "input", "response": "output"}  # other columns have the same names
_SAME = ("history", "system", "chosen", "rejected", "kto_tag")
_LISTS = ("messages", "conversations")
_MEDIA = ("images", "videos", "audios")  # a column of that name is refused row by row, as anywhere
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    **{
        f"{tag}_tag": tuple(name for name, known in ROLES.items() if known == role)
        for tag, role in (
            ("user", "user"),
            ("assistant", "assistant"),
            ("function", "assistant"),
            ("observation", "tool"),
            ("system", "system"),
        )
    },
}


def look_up(file: str, datasets: Sequence[str], columns: list[str] | None) -> list[str]:
    """The sources, with the names of that file and their columns worked in; `columns`, of `--columns`, wins.

    Raises:
        UserError: the file cannot be read, has no such entry, or has one that cannot be followed.
    """
    try:
        path = Path(file).expanduser()
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # the last is of ~ALICE, and of deep JSON
        raise UserError(f"--dataset_info {file}: cannot be read ({error}); give LLaMA-Factory's file") from error
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise UserError(f"--dataset_info {file}: wanted an object with an entry for each data set")
    sources = []
    for typed in datasets:
        name, at, rest = typed.partition("@")
        if name in entries:
            _check(name, entries[name])
            own = mapping(_columns(name, entries[name]))
            words = [f"{ours}={theirs}" for ours, theirs in (own | mapping(columns)).items()] if own else []
            source = _source(path.parent, name, entries[name])
            sources.append(source + (":" + ",".join(words) if words else "") + at + rest)
        elif "/" in name or Path(name).expanduser().exists():
            sources.append(typed)
        else:
            near = difflib.get_close_matches(name, entries, 1) or list(entries)[:5]
            raise UserError(f"{name}: no entry of {file}, and no file; the nearest there: {', '.join(near)}")
    return sources


def _check(name: str, entry: dict) -> None:
    """What is said in an entry has to be of its kind."""
    for key in ("file_name", "hf_hub_url", "subset", "folder", "split"):
        if not isinstance(entry.get(key), str | None):
            raise UserError(f"{name}: its entry has the {key} {entry[key]!r}; wanted a string")
    for key in ("columns", "tags"):
        inside = entry.get(key) or {}
        if not isinstance(inside, dict) or not all(isinstance(value, str | None) for value in inside.values()):
            raise UserError(f"{name}: its entry has the {key} {inside!r}; wanted {{name: string}}")


def _source(folder: Path, name: str, entry: dict) -> str:
    if entry.get("hf_hub_url"):
        inside = [entry[key] for key in ("subset", "folder") if entry.get(key)]
        if len(inside) > 1:
            raise UserError(f"{name}: its entry has both a subset and a folder; download that folder and give its path")
        split = [entry["split"]] if entry.get("split") else []
        return entry["hf_hub_url"] + "".join(f":{it}" for it in inside) + "".join(f"@{it}" for it in split)
    if entry.get("file_name"):
        return str(folder / entry["file_name"])
    raise UserError(f"{name}: its entry has no file_name and no hf_hub_url; download the data and give their path")


def _columns(name: str, entry: dict) -> list[str]:
    """Words of `--columns` where its names are not ours already."""
    for tag, value in (entry.get("tags") or {}).items():
        if value not in _TAGS.get(tag, ()):
            wanted = f"known: {', '.join(_TAGS[tag])}" if tag in _TAGS else "an unknown tag"
            raise UserError(f"{name}: its entry has the tag {tag} {value!r} ({wanted}); rename it in the data")
    words, theirs = [], {key: value for key, value in (entry.get("columns") or {}).items() if value}
    for key, column in theirs.items():
        if key in _MEDIA and column != key:
            raise UserError(f"{name}: its entry has a column of {key}; only text can be trained on here")
        if key == "messages":
            ours = column if column in _LISTS else "conversations"
        elif list(theirs) == ["prompt"]:
            ours = "text"  # with nothing beside it, a prompt is pretraining text
        else:
            ours = _OURS.get(key) or (key if key in _SAME else None)
        if ours and ours != column:
            words.append(f"{ours}={column}")
    return words
