"""What a file really is, where its name or its outermost JSON value says otherwise, and the way out.

A file is read as what it is where there is one way only to take it. Everything else is named: what was seen, and what
to do. Nothing here guesses which of two readings was meant.
"""

from pathlib import Path

from common.errors import UserError
from step0_data.columns import WORDS
from step0_data.formats import FORMS
from step0_data.turns import ROLES

PACKED = {".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".rar", ".7z", ".tar", ".tgz"}
_ICONV = "convert it: iconv -f {0} -t UTF-8 OLD > NEW"
_SHEET, _UNPACK = "save the sheet as CSV (UTF-8) and give that", "unpack it, or pack the one file as .gz"
_BEGINS = {  # how a file begins: what it is, and the way out
    b"\x1f\x8b": "is packed by gzip, which its name does not say; end the name in .gz",
    b"version https://git-lfs": "is a Git LFS pointer, not the data; get them: git lfs pull",
    b"PAR1": "is a parquet file, which its name does not say; end the name in .parquet",
    b"ARROW1": "is an arrow file, which its name does not say; end the name in .arrow",
    b"\xff\xff\xff\xff": "is an arrow file, which its name does not say; end the name in .arrow",
    b"\xff\xfe\0\0": f"is UTF-32, wanted UTF-8; {_ICONV.format('UTF-32')}",
    b"\0\0\xfe\xff": f"is UTF-32, wanted UTF-8; {_ICONV.format('UTF-32')}",
    b"\xff\xfe": f"is UTF-16, wanted UTF-8; {_ICONV.format('UTF-16')}",
    b"\xfe\xff": f"is UTF-16, wanted UTF-8; {_ICONV.format('UTF-16')}",
    b"\xd0\xcf\x11\xe0": f"is an Excel sheet; {_SHEET}",
    b"\xfd7zXZ": f"is packed by xz; {_UNPACK}",
    b"\x28\xb5\x2f\xfd": f"is packed by zstd; {_UNPACK}",
    b"7z\xbc\xaf": "is a 7z archive; unpack it",
    b"Rar!": "is a rar archive; unpack it",
    b"%PDF": "is a PDF; its text has to be taken out first",
    b"SQLite format 3": "is an SQLite database; export its table as csv",
}
_OTHER_NAMES = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), f"a spreadsheet; {_SHEET}"),
    **dict.fromkeys(PACKED - {".gz"}, f"packed in a way that is not read here; {_UNPACK}"),
    ".tar.gz": "an archive; unpack it and give its folder",
    ".gz": "its name does not say what is packed in it; call it NAME.jsonl.gz, or .json.gz, .csv.gz, ...",
}


def check_beginning(path: Path, head: bytes, kind: str) -> None:
    """Raises a UserError if what a file begins with is not of the kind that its name says."""
    trouble = next((what for start, what in _BEGINS.items() if head.startswith(start)), None)
    if head[4:10] == b"1AY&SY":
        trouble = f"is packed by bzip2; {_UNPACK}"
    if trouble and not trouble.endswith(f"end the name in {kind}"):
        raise UserError(f"{path}: {trouble}")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        what = "XML" if text.startswith(b"<?xml") else "a web page"
        raise UserError(f"{path}: is {what}, no data; where it was downloaded, get the file itself (raw), logged in")
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        is_sheet = any(name in head for name in (b"[Content_Types].xml", b"xl/", b"docProps/"))
        raise UserError(f"{path}: " + (f"is an Excel sheet; {_SHEET}" if is_sheet else "is a zip archive; unpack it"))
    if kind in (".parquet", ".arrow"):
        return
    for order, zero in (("LE", 1), ("BE", 0)):  # without a mark: every other byte of plain text is zero
        if len(head) >= 8 and not any(head[zero:8:2]) and all(head[1 - zero : 8 : 2]):
            raise UserError(f"{path}: is UTF-16, wanted UTF-8; {_ICONV.format(f'UTF-16{order}')}")


def unknown_kind(path: Path, known: tuple[str, ...]) -> str:
    """What is said of a file whose name is of no kind that is read."""
    ends = "".join(path.suffixes[-2:]).lower()
    why = _OTHER_NAMES.get(ends if ends in _OTHER_NAMES else path.suffix.lower())
    return f"unknown kind of file {path.suffix!r}; " + (why or f"wanted {', '.join(known)}, each also with .gz")


# One JSON object that is the whole file -------------------------------------------------------------------------------

_ENTRY = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}  # of LLaMA-Factory
_WRAPPERS = {"data", "rows", "items", "records", "examples", "samples", "instances", "entries", "dataset", "train"}
_RECORDS = "write it again with orient='records', lines=True"


def describes(data) -> bool:
    """Whether this is a description of data: Croissant, `datasets`' information, a schema, a data package, a model."""
    if not isinstance(data, dict) or not data or is_row(data):
        return False
    inside = list(data.values())
    return bool(
        {"@context", "$schema", "builder_name", "architectures", "model_type", "tokenizer_class"} & data.keys()
        or {"features", "splits"} <= data.keys()
        or {"name", "resources"} <= data.keys()
        or all(isinstance(it, dict) and ("features" in it or _ENTRY & it.keys()) for it in inside)
    )


def is_row(data: dict) -> bool:
    row = {str(name).strip().lower(): value for name, value in data.items()}
    return any(form.recognises(row) for form in FORMS)


def rows_in(path: Path, data: dict) -> list[dict] | None:
    """The rows inside an object that is the whole file; None if it is a row itself.

    Raises:
        UserError: a description, a table told by its columns, several lists of rows, rows beside what they would lose.
    """
    if describes(data):
        raise UserError(f"{path}: describes data and holds no rows; give the files of the data")
    if shape := _table(data):
        raise UserError(f"{path}: holds {shape}, wanted a list of rows; where pandas wrote it, {_RECORDS}")
    lists = [name for name, it in data.items() if _are_rows(it) and name.strip().lower() not in WORDS]
    if is_row(data):
        return None
    beside = [name for name in data if name not in lists]
    if lists and (lost := [name for name in beside if name.strip().lower() in WORDS]):
        names = ", ".join(lost)
        raise UserError(f"{path}: holds rows under {lists[0]} and {names} beside them; write {names} into each row")
    if len(lists) == 1 and lists[0].strip().lower() not in _WRAPPERS and any(map(_is_nested, map(data.get, beside))):
        return None  # one row of a form that is not known, of which the list is a part
    if len(lists) > 1:
        names = ", ".join(lists)
        raise UserError(f"{path}: holds {len(lists)} lists of rows ({names}); write each to a file of its own")
    return data[lists[0]] if lists else None


def _is_nested(value) -> bool:
    return isinstance(value, (dict, list))


def _are_rows(value) -> bool:
    """A list of objects that are no messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(it, dict) and not is_message(it) for it in value)


def is_message(value) -> bool:
    return isinstance(value, dict) and any(str(value.get(key)).lower() in ROLES for key in ("role", "from"))


def _table(data: dict) -> str | None:
    """Whether it is a table that is told by its columns, or by its index, and not row by row."""
    inside = list(data.values())
    if {"columns", "data"} <= data.keys() and all(isinstance(data[name], list) for name in ("columns", "data")):
        return "a table in parts (columns and data)"
    if inside and all(isinstance(it, list) and len(it) == len(inside[0]) for it in inside):
        texts = [it for it in inside if it and all(isinstance(text, str) for text in it)]
        return "a table by columns, each a list" if len(texts) > 1 else None
    if not inside or not all(isinstance(it, dict) and it for it in inside):
        return None
    if all(it.keys() == inside[0].keys() for it in inside):
        if all(map(str.isdigit, inside[0])):
            return "a table by columns, each an object with a key for every row"
        if all(map(str.isdigit, data)):
            return "a table by its index, an object with a key for every row"
    return None
