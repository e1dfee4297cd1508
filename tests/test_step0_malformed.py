"""Malformed inputs, each with the exact words step 0 has for it, and odd ones that are fine and must not be altered."""

import datetime
import decimal
import gzip
import io
import json
import struct
import sys
import uuid
import zipfile
import zoneinfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common import cli
from common.data import read_rows
from common.errors import UserError
from step0_data import files, formats, prepare

GOOD = b'{"prompt": "one", "chosen": "a", "rejected": "b"}\n'
LAST = b'{"prompt": "two", "chosen": "a", "rejected": "b"}\n'
CSV = b"prompt,completion\none,a\n"


def lines(middle: bytes) -> bytes:
    return GOOD + middle + LAST


def row(**columns) -> bytes:
    return json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"} | columns).encode() + b"\n"


def chat(*roles: str) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]}).encode() + b"\n"


def parquet(*prompts: bytes) -> bytes:
    """Its strings are not checked: parquet files hold bytes that are no text when other programs write them."""
    file, column = io.BytesIO(), pa.array(prompts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": column, "completion": ["a"] * len(prompts)}), file)
    return file.getvalue()


def table(columns) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def damaged_arrow() -> bytes:
    """Whose second text begins far beyond the end of the file."""
    file, table = io.BytesIO(), pa.table({"prompt": ["a", "bc", "d"]})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue().replace(struct.pack("<4i", 0, 1, 3, 4), struct.pack("<4i", 0, 2**30, 3, 4))


def archive(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        for name in names:
            found.writestr(name, "x")
    return file.getvalue()


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, words)])
    return cli.run(prepare.main)


def ledger_of(folder) -> dict:
    (entry,) = json.loads((folder / "manifest.json").read_text())["sources"]
    return entry


def rejected_in(folder) -> list[dict]:
    path = folder / "rejected.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


ROWS = {  # file: content, place, reason, fix
    "not_json.jsonl": (lines(b"nonsense\n"), "line 2",
        "broken JSON (Expecting value)", "mend the line at column 1"),
    "python_dict.jsonl": (lines(b"{'prompt': 'q'}\n"), "line 2",
        "broken JSON (Expecting property name enclosed in double quotes)", "mend the line at column 2"),
    "two_on_a_line.jsonl": (lines(GOOD.strip() + LAST), "line 2",
        "broken JSON (Extra data)", "mend the line at column 50"),
    "open_string.jsonl": (lines(b'{"prompt": "q, "completion": "a"}\n'), "line 2",
        "broken JSON (Expecting ',' delimiter)", "mend the line at column 17"),
    "control.jsonl": (lines(b'{"prompt": "a\tb", "completion": "a"}\n'), "line 2",
        "broken JSON (Invalid control character at)", "mend the line at column 14"),
    "nul.jsonl": (lines(b'{"prompt": "a\0b", "completion": "a"}\n'), "line 2",
        "holds NUL bytes", "remove them or the line; files end so when the machine goes down"),
    "nuls_at_the_end.jsonl": (GOOD + LAST + b"\0" * 64, "line 3",
        "holds NUL bytes", "remove them or the line; files end so when the machine goes down"),
    "cut.jsonl": (GOOD + LAST + b'{"prompt": "q", "comple', "line 3",
        "the last line is cut off", "get the whole file, or remove the line"),
    "cut_in_a_character.jsonl": (GOOD + LAST + '{"prompt": "é'.encode()[:-1], "line 3",
        "the last line is cut off", "get the whole file, or remove the line"),
    "latin1.jsonl": (lines('{"prompt": "café", "completion": "a"}\n'.encode("latin-1")), "line 2",
        "undecodable bytes, not UTF-8", "save the file as UTF-8 (byte 0xe9 is the first that is not)"),
    "gbk.jsonl": (lines('{"prompt": "你好", "completion": "a"}\n'.encode("gbk")), "line 2",
        "undecodable bytes, not UTF-8", "save the file as UTF-8 (byte 0xc4 is the first that is not)"),
    "cesu.jsonl": (lines(b'{"prompt": "\xed\xa0\xbd", "completion": "a"}\n'), "line 2",
        "undecodable bytes, not UTF-8", "save the file as UTF-8 (byte 0xed is the first that is not)"),
    "deep.jsonl": (lines(b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}\n"), "line 2",
        "broken JSON (nested too deeply)", "make it flatter"),
    "digits.jsonl": (lines(b'{"prompt": "q", "n": ' + b"1" * 5000 + b"}\n"), "line 2",
        "broken JSON (a number of thousands of digits)", "write it as a string"),
    "twice.jsonl": (lines(b'{"prompt": "q", "chosen": "a", "rejected": "b", "prompt": "r"}\n'), "line 2",
        "a name stands twice in one object", "keep one 'prompt'"),
    "a_list.jsonl": (lines(b'["prompt", "q"]\n'), "line 2",
        "a row is a list, not an object with named columns", "wanted one object a row"),
    "a_string.jsonl": (lines(b'"prompt"\n'), "line 2",
        "a row is text, not an object with named columns", "wanted one object a row"),
    "a_number.jsonl": (lines(b"17\n"), "line 2",
        "a row is a number, not an object with named columns", "wanted one object a row"),
    "null.jsonl": (lines(b"null\n"), "line 2",
        "a row is null, not an object with named columns", "wanted one object a row"),
    "empty_prompt.jsonl": (lines(row(prompt=[])), "line 2",
        "there is no prompt: prompt is an empty list",
        "fill it; or take the column out, and what both answers begin with is the prompt"),
    "blank_prompt.jsonl": (lines(row(prompt="  ")), "line 2",
        "the prompt is empty: no user turn with text", "give the row a prompt"),
    "empty_chosen.jsonl": (lines(row(chosen="")), "line 2",
        "chosen is an empty answer", "give it an answer or remove the row"),
    "blank_rejected.jsonl": (lines(row(rejected=" \n")), "line 2",
        "rejected is an empty answer", "give it an answer or remove the row"),
    "kinds.jsonl": (lines(row(chosen=[{"role": "assistant", "content": "a"}])), "line 2",
        "chosen and rejected are of different kinds", "make both strings or both lists of messages"),
    "number_chosen.jsonl": (lines(row(chosen=5)), "line 2",
        "chosen is a number", "wanted text or a list of messages (text stands in quotes)"),
    "margin.jsonl": (lines(row(margin="much")), "line 2",
        "margin is 'much'", "wanted a number"),
    "surrogate.jsonl": (lines(b'{"prompt": "q \\ud83d", "chosen": "a", "rejected": "b"}\n'), "line 2",
        "a text holds half a surrogate pair, which is no character", "write the character whole"),
    "surrogate_in_a_column.jsonl": (b'{"prompt": "one"}\n{"prompt": "q", "answer": "\\ud83d"}\n{"prompt": "two"}\n',
        "line 2", "a further column holds half a surrogate pair, which is no character", "write the character whole"),
    "no_answer.jsonl": (lines(chat("user")), "line 2",
        "messages ends with a user turn",
        "end it with the assistant's answer; where it is a prompt only, say --columns prompt=messages"),
    "ends_with_user.jsonl": (lines(chat("user", "assistant", "user")), "line 2",
        "messages ends with a user turn",
        "end it with the assistant's answer; where it is a prompt only, say --columns prompt=messages"),
    "begins_with_assistant.jsonl": (lines(chat("assistant", "tool", "assistant")), "line 2",
        "the prompt is empty: no user turn with text", "give the row a prompt"),
    "two_answers.jsonl": (lines(chat("user", "assistant", "assistant")), "line 2",
        "messages ends with two answers in a row", "join them into one turn or remove one"),
    "no_messages.jsonl": (lines(b'{"messages": "hello"}\n'), "line 2",
        "messages is text", "wanted a list of messages"),
    "message_string.jsonl": (lines(b'{"messages": ["hello"]}\n'), "line 2",
        "messages is a list that holds text", "wanted messages: {role, content}"),
    "content_null.jsonl": (lines(b'{"messages": [{"role": "user", "content": null}]}\n'), "line 2",
        "messages has a message whose content is null", "wanted text"),
    "share_no_prefix.jsonl": (lines(b'{"chosen": "abc", "rejected": "xyz"}\n'), "line 2",
        "there is no prompt: chosen and rejected share no beginning", "add a prompt column"),
    "alpaca_output.jsonl": (lines(b'{"instruction": "q", "output": 7}\n'), "line 2",
        "output is a number", "wanted text"),
    "empty_text.jsonl": (lines(b'{"text": " "}\n'), "line 2",
        "text is empty", "give it some text"),
    "number_text.jsonl": (lines(b'{"text": 3}\n'), "line 2",
        "text is a number", "give it some text"),
    "label.jsonl": (lines(b'{"prompt": "q", "completion": "a", "label": "maybe"}\n'), "line 2",
        "label is 'maybe'", "wanted true or false: is the answer good? where it is a class, say --format completion"),
    "blank.jsonl": (lines(b'{"prompt": "", "completion": null}\n'), "line 2",
        "the row is blank: all its cells are empty", "remove it"),
    "half_pair.jsonl": (lines(row(rejected=None)), "line 2",
        "rejected is null, and the other answer of the pair is not", "give it an answer"),
    "other_half.jsonl": (lines(row(chosen=None)), "line 2",
        "chosen is null, and the other answer of the pair is not", "give it an answer"),
    "huge_score.jsonl": (lines(row(margin=10**400)), "line 2",
        f"margin is 1{'0' * 189}...", "wanted a number"),
    "same_name.jsonl": (lines(b'{"Prompt": "q", "PROMPT": "r", "completion": "a"}\n'), "line 2",
        "the columns Prompt and PROMPT are both prompt here", "say which by --columns prompt=THEIRS"),
    "deep_picture.jsonl": (lines(b'{"prompt": "q", "images": ' + b"[" * 900 + b"]" * 900 + b"}\n"), "line 2",
        "nested too deeply", "make it flatter"),
    "deep_column.jsonl": (lines(b'{"prompt": "q", "x": ' + b"[" * 100 + b"]" * 100 + b"}\n"), "line 2",
        "nested too deeply", "make it flatter"),
    "year_294247.parquet": (table({"prompt": ["one", "two"], "t": pa.array([0, 2**63 - 1], "timestamp[us]")}), "row 2",
        "a value that Python cannot hold (date value out of range)", "mend it or drop its column"),
    "short_row.csv": (CSV + b"two\nthree,c\n", "line 3",
        "the row has more or fewer cells than the heading", "quote cells that hold commas or line breaks"),
    "long_row.tsv": (b"prompt\tcompletion\none\ta\ntwo\tb\tc\n", "line 3",
        "the row has more or fewer cells than the heading", "quote cells that hold commas or line breaks"),
    "quote.csv": (CSV + b'"x"y,2\nthree,c\n', "line 3",
        "broken CSV (',' expected after '\"')", "double the quotes inside a quoted cell"),
    "latin1.csv": (CSV + b"caf\xe9,b\n", "line 3",
        "undecodable bytes, not UTF-8", "save the file as UTF-8 (byte 0xe9 is the first that is not)"),
    "utf8.parquet": (parquet(b"one", b"caf\xe9"), "row 2",
        "undecodable bytes, not UTF-8", "save the file as UTF-8 (byte 0xe9 is the first that is not)"),
    "latin1.json": (b'[{"prompt": "one"},\n {"prompt": "caf\xe9"}, {"prompt": "two"}]', "row 2",
        "undecodable bytes, not UTF-8", "save the file as UTF-8 (byte 0xe9 is the first that is not)"),
}  # fmt: skip

FILES = {  # file: content, what is said of it
    "open_quote.csv": (CSV + b'"two,b\nthree,c\n',
        "PATH line 3: broken CSV (a quote that is never closed); close it"),
    "broken_over_lines.csv": (CSV + b'"two\n"x,b\nthree,c\n',
        "PATH line 4: broken CSV (',' expected after '\"'); mend it"),
    "same_heading.csv": (b"prompt,prompt\none,a\n",
        "PATH: two columns are called 'prompt'; rename one"),
    "semicolons.csv": (b"prompt;completion\none;a\n",
        "PATH: its cells are parted by ';', wanted ','; save it with that"),
    "tabs.csv": (b"prompt\tcompletion\none\ta\n",
        "PATH: its cells are parted by '\\t', wanted ','; save it with that"),
    "commas.tsv": (CSV,
        "PATH: its cells are parted by ',', wanted '\\t'; save it with that"),
    "same_name.parquet": (table(pa.table([["one"], ["a"], ["b"]], names=["prompt", "completion", "completion"])),
        "PATH: two columns are called 'completion'; rename one"),
    "new\nline.jsonl": (GOOD,
        "FOLDER/new line.jsonl: its name has a line break or is not UTF-8; rename it"),
    "latin1_\udce9.jsonl": (GOOD,
        "FOLDER/latin1_\\udce9.jsonl: its name has a line break or is not UTF-8; rename it"),
    "latin1_heading.csv": (b"caf\xe9,prompt\none,a\n",
        "PATH line 1: undecodable bytes, not UTF-8; save the file as UTF-8 (byte 0xe9 is the first "
        "that is not)"),
    "no.parquet": (b"PAR1 no",
        "PATH: not a readable parquet file (Parquet file size is 7 bytes, smaller than the minimum "
        "file footer (8 bytes)); get it again"),
    "cut.parquet": (parquet(b"one")[:-30],
        "PATH: not a readable parquet file (Parquet magic bytes not found in footer. Either the "
        "file is corrupted or this is not a parquet file.); get it again"),
    "no.arrow": (b"nothing",
        "PATH: not a readable arrow file (File is too small: 7); get it again"),
    "offsets.arrow": (damaged_arrow(),
        "PATH: not a readable arrow file (Offset invariant failure: offset for slot 1 out of bounds: 1073741824 > 4); "
        "get it again"),
    "utf16.jsonl": (GOOD.decode().encode("utf-16"),
        "PATH: is UTF-16, wanted UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    "utf16.csv": (CSV.decode().encode("utf-16"),
        "PATH: is UTF-16, wanted UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    "packed.jsonl": (gzip.compress(GOOD),
        "PATH: is packed by gzip, which its name does not say; end the name in .gz"),
    "zip.jsonl": (b"PK\x03\x04....",
        "PATH: is a zip archive; unpack it"),
    "no.jsonl.gz": (b"no gzip",
        "PATH: cannot be read (Not a gzipped file (b'no'))"),
    "cut.jsonl.gz": (gzip.compress(GOOD * 3)[:-12],
        "PATH: the gzip file ends early, it was cut off; get the whole file"),
    "flipped.jsonl.gz": (gzip.compress(GOOD)[:-6] + b"xxxxxx",
        "PATH: cannot be read (CRC check failed 0x7878cb71 != 0x1ec3cb71)"),
    "broken.json": (b'[{"prompt": "one"},\n {"prompt" "two"}]',
        "PATH line 2 column 12: broken JSON (Expecting ':' delimiter); mend the file there"),
    "cut.json": (b'[{"prompt": "one"},\n {"prompt": "two"',
        "PATH line 2 column 18: broken JSON (the file ends too early, it was cut off); mend the file there"),
    "cut_between.json": (b'[{"prompt": "one"},\n {"prompt": "two"}\n',
        "PATH line 3 column 1: broken JSON (the file ends too early, it was cut off); mend the file there"),
    "twice.json": (b'[{"prompt": "one"}, {"a": [{"b": 1, "b": 2}]}]',
        "PATH row 2: 'b' stands twice in one object; keep one"),
    "twice_inside.json": (b'{"data": [{"prompt": "one", "prompt": "two"}]}',
        "PATH: 'prompt' stands twice in one object; keep one"),
    "no_comma.json": (b'[{"prompt": "one"} {"prompt": "two"}]',
        "PATH line 1 column 20: broken JSON (Expecting ',' delimiter); mend the file there"),
    "more.json": (b'[{"prompt": "one"}]\n[{"prompt": "two"}]',
        "PATH line 2 column 1: broken JSON (Extra data); mend the file there"),
    "a_number.json": (b"3",
        "PATH: holds a number, wanted a list of rows"),
    "empty.json": (b" \n",
        "PATH: is empty, wanted a list of rows"),
    "object_cut.json": (b'{"data": [{"prompt": "one"}\n',
        "PATH line 2 column 1: broken JSON (the file ends too early, it was cut off); mend the file there"),
    "deep.json": (b'[{"prompt": "one"}, ' + b"[" * 100000 + b"]" * 100000 + b"]",
        "PATH row 2: broken JSON (nested too deeply); mend or remove the row"),
    "null.json": (b"null",
        "PATH: holds null, wanted a list of rows"),
    "page.jsonl": (b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><body>Not found</body></html>",
        "PATH: is a web page, no data; where it was downloaded, get the file itself (raw), logged in"),
    "answer.parquet": (b"<?xml version='1.0'?><Error/>",
        "PATH: is XML, no data; where it was downloaded, get the file itself (raw), logged in"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "PATH: is a Git LFS pointer, not the data; get them: git lfs pull"),
    "table.jsonl": (parquet(b"one"),
        "PATH: is a parquet file, which its name does not say; end the name in .parquet"),
    "packed_twice.jsonl.gz": (gzip.compress(gzip.compress(GOOD)),
        "PATH: is packed by gzip, which its name does not say; end the name in .gz"),
    "sheet.csv": (archive("[Content_Types].xml", "xl/workbook.xml"),
        "PATH: is an Excel sheet; save the sheet as CSV (UTF-8) and give that"),
    "old_sheet.csv": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "PATH: is an Excel sheet; save the sheet as CSV (UTF-8) and give that"),
    "archive.json": (archive("a.json"),
        "PATH: is a zip archive; unpack it"),
    "no_mark.jsonl": (GOOD.decode().encode("utf-16-le"),
        "PATH: is UTF-16, wanted UTF-8; convert it: iconv -f UTF-16LE -t UTF-8 OLD > NEW"),
    "no_mark.csv": (CSV.decode().encode("utf-16-be"),
        "PATH: is UTF-16, wanted UTF-8; convert it: iconv -f UTF-16BE -t UTF-8 OLD > NEW"),
    "utf32.json": (GOOD.decode().encode("utf-32"),
        "PATH: is UTF-32, wanted UTF-8; convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW"),
    "rows.gz": (gzip.compress(GOOD),
        "PATH: unknown kind of file '.gz'; its name does not say what is packed in it; call it NAME.jsonl.gz, or "
        ".json.gz, .csv.gz, ..."),
    "rows.xlsx": (b"PK",
        "PATH: unknown kind of file '.xlsx'; a spreadsheet; save the sheet as CSV (UTF-8) and give that"),
    "rows.jsonl.zst": (b"\x28\xb5\x2f\xfd",
        "PATH: unknown kind of file '.zst'; packed in a way that is not read here; unpack it, or pack the one file as "
        ".gz"),
    "rows.tar.gz": (gzip.compress(b"rows"),
        "PATH: unknown kind of file '.gz'; an archive; unpack it and give its folder"),
    "columns.json": (b'{"prompt": {"0": "q", "1": "r"}, "completion": {"0": "a", "1": "b"}}',
        "PATH: holds a table by columns, each an object with a key for every row, wanted a list of rows; where pandas "
        "wrote it, write it again with orient='records', lines=True"),
    "index.json": (b'{"0": {"prompt": "q", "completion": "a"},\n "1": {"prompt": "r", "completion": "b"}}',
        "PATH: holds a table by its index, an object with a key for every row, wanted a list of rows; where pandas "
        "wrote it, write it again with orient='records', lines=True"),
    "split.jsonl": (b'{"columns": ["prompt"], "index": [0, 1], "data": [["q"], ["r"]]}\n',
        "PATH: holds a table in parts (columns and data), wanted a list of rows; where pandas wrote it, write it again "
        "with orient='records', lines=True"),
    "lists.json": (b'{"prompt": ["q", "r"], "completion": ["a", "b"]}',
        "PATH: holds a table by columns, each a list, wanted a list of rows; where pandas wrote it, write it again "
        "with orient='records', lines=True"),
    "splits.json": (b'{"train": [{"prompt": "q"}], "test": [{"prompt": "r"}]}',
        "PATH: holds 2 lists of rows (train, test); write each to a file of its own"),
    "croissant.json": (b'{"@context": {"@language": "en"}, "@type": "sc:Dataset", "name": "corpus"}',
        "PATH: describes data and holds no rows; give the files of the data"),
    "control\x1b[31m.jsonl": (GOOD,
        "FOLDER/control\\x1b[31m.jsonl: its name has a control character; rename it"),
    "indented_cut.jsonl": (b'{\n "prompt": "q"\n}\n{\n "prompt": "r"',
        "PATH line 5 column 15: broken JSON (the file ends too early, it was cut off); mend the file there"),
    "empty.jsonl": (b"\n\n",
        "no row is left from PATH: the sources hold no rows"),
    "empty.csv": (b"prompt,completion\n",
        "no row is left from PATH: the sources hold no rows"),
}  # fmt: skip

# Good rows beside the bad one; the others have two.
FEWER = {"long_row.tsv": 1, "latin1.csv": 1, "utf8.parquet": 1, "year_294247.parquet": 1}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_stops_with_these_words_or_is_set_aside_with_its_reason(tmp_path, monkeypatch, capsys, name):
    content, place, reason, fix = ROWS[name]
    path, out = tmp_path / name, tmp_path / "data"
    path.write_bytes(content)
    assert run(monkeypatch, "--dataset", path, "--output_dir", out) == 2
    aside = "or set such rows aside with --on_bad_row skip"
    assert capsys.readouterr().err == f"error: {path} {place}: {reason}; {fix}; {aside}\n"
    assert not out.exists()

    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--on_bad_row", "skip") == 0
    entry, (rejected,) = ledger_of(out), rejected_in(out)
    assert entry["set_aside"] == {reason: {"rows": 1, "first": f"{path} {place}"}} and entry["rejected"] == 1
    assert sum(entry["used"].values()) == FEWER.get(name, 2) == entry["rows"] - 1
    assert {**rejected, "row": ""} == {
        "source": str(path), "where": f"{path} {place}", "reason": reason, "fix": fix, "row": ""
    }  # fmt: skip
    assert rejected["row"] is not None or name == "null.jsonl"
    assert "of these are bad rows: see rejected.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("skip", [[], ["--on_bad_row", "skip"]])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_trusted_stops_with_these_words(tmp_path, monkeypatch, capsys, name, skip):
    content, message = FILES[name]
    path, out = tmp_path / name, tmp_path / "data"
    path.write_bytes(content)
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, *skip) == 2
    assert capsys.readouterr().err == f"error: {message.replace('PATH', str(path)).replace('FOLDER', str(tmp_path))}\n"
    assert not out.exists()


def test_a_column_nested_too_deep_for_parquet_is_json_text(tmp_path, monkeypatch):
    path, out = tmp_path / "a.jsonl", tmp_path / "data"
    cells = {f"{depth}{kind}": left * depth + "1" + right * depth for depth in (29, 30, 99) for kind, left, right in (
        ("lists", "[", "]"), ("objects", '{"a":', "}"))}  # fmt: skip
    path.write_text(json.dumps({"prompt": "q"} | {name: json.loads(cell) for name, cell in cells.items()}) + "\n")
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--eval_fraction", 0) == 0
    file = out / "prompts" / "train.parquet"
    (found,) = read_rows(file)
    assert {name: found[name] for name in cells} == {name: json.loads(cell) for name, cell in cells.items()}
    as_text = [field.name for field in pq.read_schema(file) if pa.types.is_string(field.type)]
    assert as_text == ["30lists", "30objects", "99lists", "99objects"]


def test_arguments_of_a_tool_call_that_no_reader_can_follow_stay_text():
    deep = "[" * 100000
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    _, record = formats.convert({"messages": [{"role": "user", "content": "q"}, call]})
    assert record.answer[0]["content"] == f'{{"name": "f", "arguments": "{deep}"}}'


def test_bytes_are_no_prompt():
    with pytest.raises(formats.BadRow, match="prompt is bytes; wanted text or a list of messages"):
        formats.convert({"prompt": b"one", "completion": "a"})


def test_what_is_rejected_stands_there_as_it_was_in_the_file(tmp_path, monkeypatch):
    path, out = tmp_path / "a.jsonl", tmp_path / "data"
    half = {"prompt": "你 \ud83d", "chosen": "a", "rejected": "b"}
    texts = [b'{"prompt": "\xe9"}', "{'你': 1}".encode(), json.dumps(half).encode(), b'{"foo": NaN}', b"[1, 2]"]
    path.write_bytes(b"".join(GOOD + text + b"\r\n" for text in texts))
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--on_bad_row", "skip") == 0
    content = (out / "rejected.jsonl").read_bytes()
    assert "{'你': 1}".encode() in content and b"\\ud83d" in content and b"NaN" not in content.replace(b"nan", b"")
    rows = [entry["row"] for entry in rejected_in(out)]
    assert rows == [repr(texts[0] + b"\r\n"), "{'你': 1}", half, "{'foo': nan}", [1, 2]]
    assert [entry["where"] for entry in rejected_in(out)] == [f"{path} line {n}" for n in (2, 4, 6, 8, 10)]


def test_reasons_that_quote_the_rows_do_not_fill_the_ledger(tmp_path, monkeypatch):
    path, out = tmp_path / "a.jsonl", tmp_path / "data"
    odd = b"".join(json.dumps({f"name {i}\n\ud800" + "x" * 5000: 1}).encode() + b"\n" for i in range(150))
    path.write_bytes(lines(odd))
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--on_bad_row", "skip") == 0
    aside = ledger_of(out)["set_aside"]
    assert len(aside) == 21 and aside["other reasons"]["rows"] == 130 and max(map(len, aside)) < 210
    assert "unknown form with the columns name 0 \\ud800xxx" in list(aside)[1]
    assert len(rejected_in(out)) == ledger_of(out)["rejected"] == 150


# Odd, and fine --------------------------------------------------------------------------------------------------------

TEXTS = [
    "  spaces around  ", "tabs\tand\r\nlines\n\n", "\u2028line\u2029paragraph\x85next",
    "nul \0 inside",
    "\x1b[31mred\x7f", "emoji 👩‍🚀🏽 and flags 🇨🇳",
    "עברית and العربية \u202e!",
    "ＦＵＬＬ　ｗｉｄｔｈ，。", "é is e\u0301, not é",
    "\ufeffa mark inside", "\ufffd is a character", "𝒳 beyond the first plane \U0010ffff",
    '"quotes", \\ and \\n, {"json": [1]}', "ﬁ ½ Ω ß",
    "=1+1", "1e999", "null", "NaN", "007", "Human: a\n\nAssistant b",
]  # fmt: skip


def read_back(folder) -> list[tuple[str, str]]:
    rows = [row for part in ("train", "eval") for row in pq.read_table(folder / f"sft/{part}.parquet").to_pylist()]
    return sorted(tuple(m["content"] for m in row["messages"]) for row in rows)


def as_csv(rows: list[dict], delimiter: str) -> bytes:
    cells = [list(rows[0]), *(row.values() for row in rows)]
    text = "\r\n".join(delimiter.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells)
    return (text + "\r\n").encode("utf-8-sig")


def as_lines(rows: list[dict], ascii: bool) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows).encode()


KINDS = {
    "raw.jsonl": lambda rows: as_lines(rows, False),
    "escaped.jsonl": lambda rows: as_lines(rows, True),
    "windows.jsonl": lambda rows: b"\xef\xbb\xbf" + as_lines(rows, False).replace(b"\n", b"\r\n \t\r\n"),
    "put_together.ndjson": lambda rows: b"".join(b"\xef\xbb\xbf" + as_lines([row], False) for row in rows),
    "no_last_line_feed.jsonl.gz": lambda rows: gzip.compress(as_lines(rows, False).rstrip()),
    "members.jsonl.gz": lambda rows: b"".join(gzip.compress(as_lines([row], False)) for row in rows),
    "old_mac.jsonl": lambda rows: as_lines(rows, False).replace(b"\n", b"\r"),
    "mixed_ends.jsonl": lambda rows: b"".join(
        as_lines([row], False)[:-1] + b"\r\n\r"[i % 3 :][:1] + b"\n" * (i % 3 == 2) for i, row in enumerate(rows)
    ),
    "PACKED.JSONL.GZ": lambda rows: gzip.compress(as_lines(rows, False)),
    "indented.jsonl": lambda rows: b"".join(json.dumps(row, indent=2).encode() + b"\n" for row in rows),
    "indented.json": lambda rows: b"".join(json.dumps(row, indent=2).encode() for row in rows),
    "list.jsonl": lambda rows: json.dumps(rows).encode(),
    "list_over_lines.jsonl": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode(),
    "wrapped_with_more.json": lambda rows: json.dumps({"title": "t", "items": rows, "n": 3}, indent=1).encode(),
    "wrapped.jsonl": lambda rows: json.dumps({"data": rows}).encode() + b"\n",
    "excel.csv": lambda rows: (
        b"\xef\xbb\xbfinstruction,output,,\r\n"
        + b"".join(as_csv([row], ",").partition(b"\r\n")[2].rstrip(b"\r\n") + b",,\r\n,,,\r\n" for row in rows)
        + b",\r\n" * 3
    ),
    "list.json": lambda rows: json.dumps(rows, ensure_ascii=False, indent=2).encode("utf-8-sig"),
    "list.json.gz": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "wrapped.json": lambda rows: json.dumps({"data": rows}).encode(),
    "lines.json": lambda rows: as_lines(rows, False),
    "table.csv": lambda rows: as_csv(rows, ","),
    "table.tsv": lambda rows: as_csv(rows, "\t"),
    "table.csv.gz": lambda rows: gzip.compress(as_csv(rows, ",")),
}


@pytest.mark.parametrize("name", KINDS)
def test_text_arrives_exactly_as_it_stands_in_the_file(tmp_path, monkeypatch, name):
    rows = [{"instruction": f"{i} {text}", "output": text} for i, text in enumerate(TEXTS)]
    path, out = tmp_path / name, tmp_path / "data"
    path.write_bytes(KINDS[name](rows))
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--eval_fraction", 0.3) == 0
    assert read_back(out) == sorted(tuple(row.values()) for row in rows)
    assert ledger_of(out)["rows"] == len(TEXTS) and not ledger_of(out)["set_aside"]


LOST = {
    "a part of one row": (
        {"info": {"post": "p"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
        "unknown form with the columns info, summaries, choice",
    ),
    "what all rows share": (
        {"system": "Be brief.", "rows": [{"question": "a", "answer": "b"}]},
        "holds rows under rows and system beside them; write system into each row",
    ),
}


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize("name", LOST)
def test_a_list_of_objects_is_not_taken_out_of_what_it_belongs_to(tmp_path, monkeypatch, capsys, name, ending):
    data, message = LOST[name]
    path = tmp_path / f"a.{ending}"
    path.write_text(json.dumps(data) + "\n")
    assert run(monkeypatch, "--dataset", path, "--output_dir", tmp_path / "data") != 0
    assert message in capsys.readouterr().err


def test_a_line_of_50_mb_and_its_neighbours_arrive_whole(tmp_path, monkeypatch):
    long = "a long answer 你好 " * (50_000_000 // 20)
    rows = [{"instruction": f"q{i}", "output": text} for i, text in enumerate(["short", long, "short too"])]
    path, out = tmp_path / "a.jsonl", tmp_path / "data"
    path.write_bytes(as_lines(rows, False))
    assert path.stat().st_size > 50_000_000
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--eval_fraction", 0) == 0
    got = [row["messages"][1]["content"] for row in pq.read_table(out / "sft/train.parquet").to_pylist()]
    assert got == ["short", long, "short too"]
    assert (out / "preview.md").stat().st_size < 100_000


@pytest.mark.parametrize("eval_fraction", [0, 0.1])
def test_further_columns_arrive_as_they_are_or_as_json(tmp_path, monkeypatch, capsys, eval_fraction):
    """What parquet has no type for: objects without fields, numbers too large, a number here and an object there."""
    path, out = tmp_path / "a.jsonl", tmp_path / "data"
    rows = [
        {"prompt": f"q{i}", "empty": {}, "nested": {"a": {}}, "large": 10**30 + i, "late": i if i < 2500 else {"a": i},
         "halves": i if i < 1500 else i + 0.5, "exact": 2**60 + 1 if i == 7 else i / 2 if i > 1500 else i, "list": [],
         "chosen": "a", "text": None, "fields": {f"f{i // 1500}": i}, "prompt ": "kept"}
        for i in range(3000)
    ]  # fmt: skip
    path.write_bytes(as_lines(rows, False))
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--eval_fraction", eval_fraction) == 0
    printed = capsys.readouterr().out
    as_text = {"empty", "nested", "large", "late", "exact", "halves", "fields"}
    assert {line.split("'")[1] for line in printed.splitlines() if line.startswith("note: the column")} == as_text
    tables = [pq.read_table(path) for path in sorted(out.glob("prompts/*.parquet"))]
    assert tables[0].schema == tables[-1].schema and len(tables) == 1 + bool(eval_fraction)
    found = [row for path in sorted(out.glob("prompts/*.parquet")) for row in read_rows(path)]
    got = {row.pop("prompt")[0]["content"]: row for row in found}
    assert len(got) == 3000
    for row in rows:  # as Python writes them: 1 is not 1.0, and an object has no name of another row's
        assert repr(got[row.pop("prompt")]) == repr(row)


# Each cell of these comes to a reward function as it stands in the file.
COLUMNS = {
    "ints and floats": [56, 2.5, 366],
    "a whole float": [1.0, 2, None],
    "one number among strings": ["#### 36", "#### 400", 36],
    "text that looks like JSON": ['"a"', "{}", "null"],
    "other keys": [{"min_words": 5}, {"letter": "r", "times": 2}, {}],
    "other keys in lists": [[{}], [{"num_bullets": 3}], [{"letter": "e"}, None]],
    "the same keys in another order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}, None],
    "a key that is null": [{"a": None}, {}, {"a": {"b": 1}}],
    "only nulls inside": [{"a": None}, {"a": None}, {"a": 1}],
    "bools and ints": [True, 1, 0],
    "bools": [True, False, None],
    "beyond int64": [2**63, -(2**63) - 1, 10**400],
    "int64": [2**63 - 1, -(2**63), None],
    "beyond 2^53": [2**53 + 1, 1.5, None],
    "infinite": [1e999, -1e999, 0.1],
    "lists": [[], [1, 2], None],
    "mixed lists": [[1], ["a"], [None, 1.0]],
    "empty objects": [{}, {}, {}],
    "nothing": [None, None, None],
    "": ["a name", "that is", "empty"],
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_cells_of_any_kind_reach_reward_functions_as_they_stand_in_the_file(tmp_path, monkeypatch, name):
    path, out = tmp_path / name, tmp_path / "data"
    rows = [{"prompt": f"q{i}"} | {column: cells[i] for column, cells in COLUMNS.items()} for i in range(3)]
    path.write_bytes(as_lines(rows, False) if name == "a.jsonl" else json.dumps(rows).encode())
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--eval_fraction", 0) == 0
    found = {row.pop("prompt")[0]["content"]: row for row in read_rows(out / "prompts/train.parquet")}
    for row in rows:
        wanted = json.loads(json.dumps(row))
        assert repr(found[wanted.pop("prompt")]) == repr(wanted)

    # Prepared data as a source: what is JSON text there is no text here.
    again = tmp_path / "again"
    words = ("--dataset", out / "prompts/train.parquet", "--output_dir", again, "--eval_fraction", 0)
    assert run(monkeypatch, *words) == 0
    assert {row["prompt"][0]["content"]: repr(row) for row in read_rows(again / "prompts/train.parquet")} == {
        row["prompt"][0]["content"]: repr(row) for row in read_rows(out / "prompts/train.parquet")
    }


def test_cells_of_a_table_reach_reward_functions_as_they_stand_there(tmp_path, monkeypatch):
    path, out, berlin = tmp_path / "a.parquet", tmp_path / "data", zoneinfo.ZoneInfo("Europe/Berlin")
    columns = {
        "date": pa.array([datetime.date(2024, 2, 29), None, datetime.date(1, 1, 1)]),
        "microseconds": pa.array([datetime.datetime(2024, 2, 29, 1, 2, 3, 4), None, None]),
        "nanoseconds": pa.array([1_000, 1, None], pa.timestamp("ns")),
        "a zone": pa.array([datetime.datetime(2024, 2, 29, tzinfo=berlin)] * 3),
        "inside": pa.array([[{"at": 1}], [], None], pa.list_(pa.struct([("at", pa.timestamp("ns"))]))),
        "span": pa.array([datetime.timedelta(1, 2, 3)] * 3),
        "bytes": pa.array([b"\xff\0", b"", None]),
        "decimal": pa.array([decimal.Decimal("1.10"), decimal.Decimal("-200.05"), None]),
        "uuid": pa.array([uuid.UUID(int=7).bytes, None, uuid.UUID(int=8).bytes], pa.uuid()),
        "map": pa.array([[("a", 1)], [("b", 2)], []], pa.map_(pa.string(), pa.int64())),
        "unsigned": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "single": pa.array([0.1, 1, None], pa.float32()),
        "category": pa.array(["a", "b", "a"]).dictionary_encode(),
    }
    pq.write_table(pa.table({"prompt": ["q0", "q1", "q2"]} | columns), path)
    assert run(monkeypatch, "--dataset", path, "--output_dir", out, "--eval_fraction", 0) == 0
    wanted = {name: column.to_pylist() for name, column in columns.items()} | {"map": [{"a": 1}, {"b": 2}, {}]}
    found = sorted(read_rows(out / "prompts/train.parquet"), key=lambda row: row["prompt"][0]["content"])
    for name in columns:
        assert repr([row[name] for row in found]) == repr(wanted[name])


def test_a_column_that_neither_parquet_nor_json_can_hold_is_one_line(tmp_path, monkeypatch, capsys):
    first, second, out = tmp_path / "a.parquet", tmp_path / "b.jsonl", tmp_path / "data"
    pq.write_table(pa.table({"prompt": ["q0"], "at": [datetime.date(2024, 2, 29)]}), first)
    second.write_text('{"prompt": "q1", "at": "2024-02-29"}\n')
    assert run(monkeypatch, "--dataset", first, second, "--output_dir", out, "--eval_fraction", 0) == 2
    assert capsys.readouterr().err == (
        "error: the column 'at' has values of several kinds, some of which JSON cannot hold (Object of type date is "
        "not JSON serializable); give its rows one kind of value, or take the column out\n"
    )
    assert not out.exists()


# By machine -----------------------------------------------------------------------------------------------------------

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@QUICK
@given(
    values=st.lists(JSON, max_size=8),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    escape=st.booleans(),
)
@example(values=[0.0], chunk=1, indent=None, escape=False)
@example(values=[12, -0.5, 1.5e-07, 10**30], chunk=3, indent=None, escape=False)
def test_a_json_list_is_read_in_pieces_of_any_size(tmp_path, values, chunk, indent, escape):
    path = tmp_path / "a.json"
    text = json.dumps(values, indent=indent, ensure_ascii=escape)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_CHUNK", chunk)
        found = [row.value for row in files.read_file(path)]
        assert found == values
        if values:  # cut anywhere: an error with a place, whose line is right
            path.write_bytes(text.encode("utf-8", "surrogatepass").rstrip()[:-1])
            with pytest.raises(UserError, match="cut off|Expecting|broken JSON") as caught:
                list(files.read_file(path))
            assert f"line {text[:-1].count(chr(10)) + 1} " in str(caught.value)


@QUICK
@given(
    parts=st.lists(st.sampled_from([GOOD, LAST, b"\n", b"{", b"\xff", b"\0", b'"', b"\xef\xbb\xbf", b"[1]\n",
                                     b" \r\n"]), max_size=12),
    noise=st.binary(max_size=5), at=st.integers(0, 400), name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv"]),
)  # fmt: skip
def test_bytes_of_any_kind_crash_nothing_and_lose_no_line(tmp_path, parts, noise, at, name):
    content = b"".join(parts)
    content = content[:at] + noise + content[at:]
    (tmp_path / name).write_bytes(content)
    try:
        found = list(files.read_file(tmp_path / name))
    except UserError as error:
        assert str(error).startswith(str(tmp_path / name)) and "\n" not in str(error)
        return
    if name == "a.jsonl":
        texts = [line.decode("utf-8", "replace") for line in content.split(b"\n")]
        assert len(found) == sum(bool(text.lstrip("\ufeff").strip()) for text in texts)
    for entry in found:
        assert (entry.raw is not None) <= isinstance(entry.value, formats.BadRow)
