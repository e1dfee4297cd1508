"""Reading the json files that this project writes: one check for all of them, whoever reads.

A schema is what a value has to be: `text`, `number`, `whole`, `anything` or another `Is`; a dict for an object with
these keys, of which those that end in "?" may be missing or null; `each(schema)` for an object whose values are all
alike, `many(schema)` for a list.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError


@dataclass(frozen=True)
class Is:
    """What one value has to be: the words for it, and the test."""

    words: str
    test: Callable[[object], bool]
    of: object = None  # the schema of each value in an object or a list


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


text = Is("text", lambda value: isinstance(value, str))
number = Is("a finite number", _is_number)
whole = Is("a whole number of at least 0", lambda value: _is_number(value) and isinstance(value, int) and value >= 0)
figure = Is("a finite number or null", lambda value: value is None or _is_number(value))
anything = Is("anything", lambda value: True)
_OBJECT = Is("names and values", lambda value: isinstance(value, dict))


def each(schema) -> Is:
    return Is(_OBJECT.words, _OBJECT.test, schema)


def many(schema) -> Is:
    return Is("a list", lambda value: isinstance(value, list), schema)


def read_json(path: str | Path, schema, advice: str) -> dict:
    """A file's content, which is as the schema says.

    Args:
        advice: what to do about a file that is not, for the end of the line.

    Raises:
        UserError: the file cannot be read, is no json (NaN, infinities and the same key twice are none), or one of its
            values is not what the schema wants; names the file, the key, and what was seen and wanted.
    """
    try:
        return parse_json(Path(path).read_bytes(), schema)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; {advice}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}; {advice}") from error


def parse_json(data: bytes, schema=anything):
    """The same of bytes.

    Raises:
        ValueError: says what is wrong.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not json ({error})") from error
    except ValueError as error:  # of ours; or of Python, which reads no number of thousands of digits
        raise ValueError("holds a number of thousands of digits" if "digits" in str(error) else str(error)) from error
    if fault := fault_of(content, schema):
        raise ValueError(fault)
    return content


def fault_of(value, schema, where: str = "") -> str | None:
    """What is wrong with a value, None if nothing is."""
    is_record = isinstance(schema, dict)
    rule = _OBJECT if is_record else schema
    if not rule.test(value):
        named = f"{where} is" if where else "holds"
        return f"{named} {shown(value)}, wanted {rule.words}"
    if is_record:
        for key, of in schema.items():
            name, optional = key.removesuffix("?"), key.endswith("?")
            path = f"{where}.{name}" if where else name
            if value.get(name) is None and optional:
                continue
            if name not in value:
                return f"has no {path}, wanted {(_OBJECT if isinstance(of, dict) else of).words}"
            if fault := fault_of(value[name], of, path):
                return fault
    elif rule.of is not None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if fault := fault_of(item, rule.of, f"{where}[{key!r:.60}]"):
                return fault
    return None


def shown(value) -> str:
    """A value in a few words for people."""
    kinds = {dict: "names and values", list: "a list", bool: str(value).lower(), type(None): "null"}
    if type(value) in kinds:
        return kinds[type(value)]
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"{value:.6g}" if isinstance(value, float) or abs(value) < 1e15 else "a number too large"


def _once(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {twice[:60]!r} twice")
    return found


def _no_constant(name: str):
    raise ValueError(f"holds {name}, which json does not know; wanted finite numbers")
