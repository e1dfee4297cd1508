"""Random small files through step 0, against a reader of our own that knows the README and none of the code.

A file is one of the forms in one of the kinds of files, whole or damaged. Nothing ends in a traceback, every row is in
the output or in the ledger, and what is in the output is what the file says: `readings` and `wanted` are written with
json, csv and pyarrow alone. `RLHF_ALL=1` tries 2,000 files in the place of 100; `python tests/test_step0_fuzz.py SEED`
shows one.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from common import cli, data  # noqa: E402
from step0_data import prepare  # noqa: E402

FILES = 2000 if os.environ.get("RLHF_ALL") else 100
ROLES = ("user", "assistant")
TEXTS = [
    "plain", "  spaces around  ", "tabs\tand\nlines\n\n", "\u2028line\u2029\x85next", "\x1b[31mred\x7f", "👩‍🚀🏽 🇨🇳",
    "עברית \u202e!", "ＦＵＬＬ，。", "e\u0301", "\ufeffmark", "\ufffd", "\U0010ffff", '"quotes", \\ and \\n', "=1+1",
    "1e999", "null", "NaN", "007", "a,b;c|d", "carriage\rreturn\r\n", "'", "{}", "x" * 3000,
]  # fmt: skip
CELLS = [
    None, True, False, 0, 1, -1, 1.0, 2.5, -0.0, 1e999, 2**53 + 1, 2**63, 10**400, "", "1", "null", "你\u2028",
    [], [[]], {}, [{}], {"a": 1}, {"a": None}, {"b": {"c": [1, "x", None]}}, [1, "a"], [1.0, 1], {"": 0},
    {"a": 1, "b": 2}, {"b": 2, "a": 1},
]  # fmt: skip
TYPED = [[1, 2, None], [0.5, 1e999], ["", "x"], [[1], []], [{"a": 1}, None], [b"\xff", b""], [None]]  # of a table
COLUMNS = {
    "preference": ("prompt", "chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "question": ("question", "answer"),
    "prompt": ("prompt",),
    "text": ("text",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
}
KINDS = [
    "a.jsonl", "crlf.ndjson", "cr.jsonl", "bom.jsonl", "a.jsonl.gz", "A.JSONL.GZ", "indented.jsonl", "list.jsonl",
    "list.json", "indented.json", "list.json.gz", "wrapped.json", "titled.json", "lines.json",
    "a.csv", "bom.csv", "excel.csv", "a.tsv", "a.csv.gz", "a.parquet", "a.parquet.gz", "stream.arrow", "file.arrow",
]  # fmt: skip


# Files ----------------------------------------------------------------------------------------------------------------


def rows_of(rng: random.Random, form: str, as_table: bool, as_text: bool) -> list[dict]:
    rows, kinds, further = [], {}, rng.randint(0, 3)
    for i in range(rng.randint(1, 8)):

        def text(start=""):
            return start + rng.choice(TEXTS)

        asked = text(f"q{i} ")
        if form == "preference":
            row = {"prompt": asked, "chosen": text("good "), "rejected": text("bad ")}
        elif form in ("messages", "sharegpt"):
            names = ("role", "content") if form == "messages" else ("from", "value")
            who = ("user", "assistant") if form == "messages" else ("human", "gpt")
            turns = [(who[0], asked)]
            for _ in range(rng.randint(0, 1)):
                turns += [(who[1], text("so ")), (who[0], text("and "))]
            row = {COLUMNS[form][0]: [dict(zip(names, turn, strict=True)) for turn in [*turns, (who[1], text("a "))]]}
        elif form in ("prompt", "text"):
            row = {COLUMNS[form][0]: asked}
        else:
            row = dict(zip(COLUMNS[form], (asked, text("a ")), strict=True))
        for name in (
            ("level", "check", "a name")[: further if as_table or as_text else rng.randint(0, 3)]
            if form in ("prompt", "question")
            else ()
        ):
            if as_text:
                row[name] = rng.choice(TEXTS)
            elif as_table:  # one type a column
                same = kinds.setdefault(
                    name,
                    rng.choice([[1, 2, None], [0.5, 1e999], ["", "x"], [[1], []], [{"a": 1}, None], [b"\xff", b""]]),
                )
                row[name] = rng.choice(same)
            else:
                row[name] = rng.choice(CELLS)
        rows.append(row)
    if rng.random() < 0.2:
        rows.append(rng.choice(rows))
    return rows


def content_of(rng: random.Random, kind: str, rows: list[dict]) -> bytes:
    ascii = rng.random() < 0.5
    if ".csv" in kind or ".tsv" in kind:
        file = io.StringIO(newline="")
        more = ["", ""] if kind == "excel.csv" else []
        writer = csv.writer(file, delimiter="\t" if "tsv" in kind else ",", lineterminator=rng.choice(["\n", "\r\n"]))
        writer.writerow([*rows[0], *more])
        for row in rows:
            writer.writerow([*row.values(), *more])
            if more:
                writer.writerow([""] * (len(row) + 2))
        content = file.getvalue().encode("utf-8-sig" if kind != "a.csv" else "utf-8")
    elif "parquet" in kind or "arrow" in kind:
        table, file = pa.Table.from_pylist(rows), io.BytesIO()
        if "parquet" in kind:
            pq.write_table(table, file, row_group_size=3)
        else:
            with (pa.ipc.new_stream if "stream" in kind else pa.ipc.new_file)(file, table.schema) as writer:
                writer.write_table(table, 3)
        content = file.getvalue()
    elif kind in ("list.json", "list.json.gz", "list.jsonl"):
        content = json.dumps(rows, ensure_ascii=ascii).encode()
    elif kind == "indented.json":
        content = json.dumps(rows, indent=2, ensure_ascii=ascii).encode()
    elif kind == "wrapped.json":
        content = json.dumps({"data": rows}, indent=rng.choice([None, 1])).encode()
    elif kind == "titled.json":
        content = json.dumps({"title": "t", "items": rows, "n": 1}).encode()
    elif kind == "indented.jsonl":
        content = b"\n".join(json.dumps(row, indent=1).encode() for row in rows)
    else:
        content = b"".join(json.dumps(row, ensure_ascii=ascii).encode() + b"\n" for row in rows)
        content = {"crlf": content.replace(b"\n", b"\r\n"), "cr.j": content.replace(b"\n", b"\r"),
                   "bom.": b"\xef\xbb\xbf" + content}.get(kind[:4], content)  # fmt: skip
    return content


def damage(rng: random.Random, content: bytes, is_text: bool) -> bytes:
    """One of many accidents."""
    at = rng.randrange(len(content) + 1)
    cuts = [content[:at], content[at:], content[:at] + content[at + 1 :]]
    if not is_text:
        return rng.choice([*cuts, content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]])
    lines = content.split(b"\n")
    number = rng.randrange(len(lines))
    odd = [
        b"nonsense",
        b"17",
        b"null",
        b"[1]",
        b'"x"',
        b"{}",
        b"{'prompt': 'q'}",
        b"\xff",
        b"\0" * 9,
        b"{",
        b",",
        b'"',
        b"",
    ]
    odd += [b'{"prompt": null}', b'{"prompt": "", "completion": ""}', b'{"prompt": 7}', b'{"prompt": "\\ud83d"}']
    odd += [b'{"prompt": "a", "prompt": "b"}', b"[" * 3000, b'{"chosen": "a", "rejected": "a", "prompt": "z"}']
    with_line = [b"\n".join([*lines[:number], rng.choice(odd), *lines[number:]])]
    with contextlib.suppress(UnicodeError):
        text = content.decode()
        with_line += [text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "gb18030", "latin-1"]))]
    noise = bytes(rng.choice(b'\0\t\n\r "#,:[]{}\\\x80\xc3\xef\xff') for _ in range(rng.randint(1, 3)))
    return rng.choice(
        [*cuts, *with_line * 3, content[:at] + noise + content[at:], content[:at] + noise + content[at + len(noise) :]]
    )


def a_file(seed: int) -> tuple[str, str, list[dict] | None, bytes]:
    """(name, form, rows where it is whole, content)"""
    rng = random.Random(seed)
    form, name = rng.choice(list(COLUMNS)), rng.choice(KINDS)
    is_csv, is_table = ".csv" in name or ".tsv" in name, "parquet" in name or "arrow" in name
    if is_csv and form in ("messages", "sharegpt"):
        form = "preference"
    rows = rows_of(rng, form, is_table, is_csv)
    content, whole = content_of(rng, name, rows), rows
    if rng.random() < 0.6:
        before, content = content, damage(rng, content, not is_table)
        whole = rows if content == before else None
    if name.lower().endswith(".gz"):
        content = gzip.compress(content, mtime=0)
        if rng.random() < 0.1:
            content, whole = damage(rng, content, False), None
    return name, form, whole, content


# What the file says ---------------------------------------------------------------------------------------------------

NO_TEXT = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as surrogateescape has them
BAD = object()  # in the place of a row that cannot be read


class Unreadable(Exception):
    pass


def loads(text: str):
    def once(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name stands twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def readings(name: str, content: bytes) -> list[list]:
    """What may be read of a file: lists of rows, with BAD for those that are broken; none where it is refused."""
    if name.lower().endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            return []
        name = name[:-3]
    if name.endswith((".parquet", ".arrow")):
        try:
            opener = pa.ipc.open_stream if name.startswith("stream") else pa.ipc.open_file
            is_parquet, file = name.endswith(".parquet"), io.BytesIO(content)
            table = pq.ParquetFile(file).read() if is_parquet else opener(file).read_all()
            table.validate(full=True)  # or a damaged arrow file ends the process
        except Exception as error:
            if "UTF8" not in str(error):
                return []
        return [[row_of(table.slice(i, 1)) for i in range(table.num_rows)]]
    if name.endswith((".csv", ".tsv")):
        return csv_readings(content, "\t" if name.endswith("tsv") else ",")
    found = [values(content)]
    if not name.lower().endswith(".json") or content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        found += [lines_of(content, b"\n"), lines_of(content.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), b"\n")]
    return [rows for rows in found if rows is not None]


def row_of(table):
    try:
        return table.to_pylist()[0]
    except ValueError:
        return BAD


def lines_of(content: bytes, end: bytes) -> list:
    rows = []
    for line in content.split(end):
        try:
            text = line.decode()
            if text.lstrip("\ufeff").strip():
                rows.append(loads(text.lstrip("\ufeff")))
        except (ValueError, RecursionError):
            rows.append(BAD)
    return rows


def values(content: bytes) -> list | None:
    """One JSON value after another; a list is its entries, and so is the only list in an object."""
    rows, at, decoder = [], 0, json.JSONDecoder()
    try:
        text = content.decode("utf-8-sig", "surrogateescape")
        while at < len(text.rstrip()):
            at = re.compile(r"\s*").match(text, at).end()
            value, at = decoder.raw_decode(text, at)
            rows.append(loads(json.dumps(value)))
    except (ValueError, RecursionError):
        return None
    if len(rows) == 1 and isinstance(rows[0], list):
        return [BAD if NO_TEXT.search(json.dumps(it, ensure_ascii=False)) else it for it in rows[0]]
    lists = (
        [it for it in rows[0].values() if isinstance(it, list)] if len(rows) == 1 and isinstance(rows[0], dict) else []
    )
    is_row = (
        len(rows) == 1 and isinstance(rows[0], dict) and any(set(names) <= rows[0].keys() for names in COLUMNS.values())
    )
    return lists[0] if len(lists) == 1 and not is_row else rows


def csv_readings(content: bytes, delimiter: str) -> list[list]:
    lines = list(io.StringIO(content.decode("utf-8-sig", "surrogateescape"), newline=""))
    table, at = [], 0
    while at < len(lines):
        reader = csv.reader(lines[at:], delimiter=delimiter, strict=True)
        try:
            table.append(next(reader))
        except csv.Error:
            if not table or reader.line_num > 1:  # it is not known where the next row begins
                return []
            table.append(BAD)
        at += reader.line_num
    table = [cells for cells in table if cells is BAD or "".join(cells).strip()]

    def cut(cells, most):
        while len(cells) > most and not cells[-1].strip():
            cells = cells[:-1]
        return cells

    heading = cut(table[0], 1) if table else []
    rows = []
    for cells in table[1:]:
        cells = cells if cells is BAD else cut(cells, len(heading))
        fits = cells is not BAD and len(cells) == len(heading) and not NO_TEXT.search("".join(cells))
        rows.append(dict(zip(heading, cells, strict=True)) if fits else BAD)
    return [rows]


def wanted(form: str, row) -> dict[str, str] | None:
    """{stage: what its file has to hold} of a good row; None where the row may be anything else."""
    if row is BAD or not isinstance(row, dict) or not set(COLUMNS[form]) <= row.keys():
        return None
    extra = {name: it for name, it in row.items() if name not in COLUMNS[form] and it is not None}
    if extra.keys() - {"level", "check", "a name"}:
        return None
    with contextlib.suppress(Exception):
        json.dumps(row, ensure_ascii=False, default=repr).encode()
        if form in ("messages", "sharegpt"):
            keys, who = (
                (("role", "content"), ("user", "assistant"))
                if form == "messages"
                else (("from", "value"), ("human", "gpt"))
            )
            turns = [(it[keys[0]], it[keys[1]]) for it in row[COLUMNS[form][0]] if len(it) == 2]
            fits = len(turns) == len(row[COLUMNS[form][0]]) > 1 and len(turns) % 2 == 0
            fits = fits and all(turn[0] == who[i % 2] and turn[1].strip() for i, turn in enumerate(turns))
            said = [{"role": ROLES[i % 2], "content": text} for i, (_, text) in enumerate(turns)]
            return {"sft": repr({"messages": said})} if fits and not extra else None
        texts = [row[name] for name in COLUMNS[form]]
        if not all(isinstance(it, str) and it.strip() for it in texts) or texts[1:] != list(dict.fromkeys(texts[1:])):
            return None
        if any(re.match(r"\s*(Human|Assistant|\[|\{)", it) for it in texts):
            return None
        prompt, answers = (
            [{"role": "user", "content": texts[0]}],
            [[{"role": "assistant", "content": it}] for it in texts[1:]],
        )
        if form == "text":
            return {"pretrain": repr({"text": texts[0]})}
        if form == "prompt":
            return {"prompts": repr({"prompt": prompt, **extra})}
        found = {"sft": repr({"messages": prompt + answers[0]})}
        if form == "question":
            found["prompts"] = repr({"prompt": prompt, "answer": texts[1], **extra})
        if form == "preference":
            found["preference"] = repr({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
            found["prompts"] = repr({"prompt": prompt})
        return found
    return None


# Step 0 ---------------------------------------------------------------------------------------------------------------


def prepared(folder: Path, file: Path, *words: str) -> tuple[int, str, Counter, dict]:
    """(exit code, what stands on stderr, {(stage, row): times}, the ledger) of a run in this process."""
    out, said, argv = folder / "data", io.StringIO(), sys.argv
    shutil.rmtree(out, ignore_errors=True)
    sys.argv = ["prepare.py", "--dataset", str(file), "--output_dir", str(out), "--eval_fraction", "0.3", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = cli.run(prepare.main)
    finally:
        sys.argv = argv
    found, entry = Counter(), {}
    if code == 0:
        (entry,) = json.loads((out / "manifest.json").read_text())["sources"]
        bad = out / "rejected.jsonl"
        assert (len(bad.read_bytes().splitlines()) if bad.exists() else 0) == entry["rejected"]
        for path in out.glob("*/*.parquet"):
            for row in data.read_rows(path):
                found[path.parent.name, repr({name: it for name, it in row.items() if it is not None})] += 1
    return code, said.getvalue(), found, entry


def check(seed: int, folder: Path) -> str:
    """What became of the file of this seed. Raises an AssertionError if that is not right."""
    name, form, whole, content = a_file(seed)
    file = folder / name
    file.write_bytes(content)
    code, said, found, entry = prepared(folder, file, "--on_bad_row", "skip")
    assert (code, said == "") == (0, True) or (code == 2 and re.fullmatch(r"error: .*\n", said)), (code, said)
    strict = prepared(folder, file)
    assert strict[0] in (0, 2) and (strict[0] == 0 or re.fullmatch(r"error: .*\n", strict[1])), strict[:2]
    if strict[0] == 0 or code == 2:  # nothing was bad, or nothing could be read
        assert strict[0] == code and strict[2:] == (found, entry), strict[:2]
    possible = [whole] if whole else readings(name, content)
    goods = [[it for row in rows if (it := wanted(form, row))] for rows in possible]
    if code == 2:
        # Refused whole: the row by row kinds only where nothing good is left, or where it is another kind of file.
        by_line = (
            possible and name.lower().endswith((".jsonl", ".ndjson")) and not re.search(r" is (UTF|packed|an?) ", said)
        )
        assert not whole or not goods[0], said
        assert not by_line or not all(goods) or "broken JSON" in said or "twice" in said, said
        return "refused"
    assert sum(entry["used"].values()) + sum(it["rows"] for it in entry["set_aside"].values()) == entry["rows"]
    assert found.total() == sum(entry["used"].values())
    assert possible, "read, where another reader can read nothing"
    aside = sum(it["rows"] for reason, it in entry["set_aside"].items() if "serves" in reason)
    problems = []
    for rows, good in zip(possible, goods, strict=True):
        left, missing = Counter(found), []
        for row in good:
            place = next((place for place in row.items() if left[place]), None)
            left[place] -= 1
            missing += [] if place else [row]
        other = left.total() + len(missing)
        is_so = len(rows) == entry["rows"] and len(missing) <= aside and max(other, 0) <= len(rows) - len(good)
        if is_so:
            return "read"
        problems.append((len(rows), entry["rows"], missing, +left))
    raise AssertionError(problems)


def test_random_files_are_read_as_they_are_or_refused_in_one_line(tmp_path):
    became, failed = Counter(), {}
    for seed in range(FILES):
        try:
            became[check(seed, tmp_path)] += 1
        except Exception as error:  # all of them, to see whether they are of one kind
            failed[seed] = f"{a_file(seed)[0]}: {type(error).__name__} {error}"[:400]
    print(f"seeds 0 to {FILES - 1}: {dict(became)}")
    assert not failed, "\n".join(f"seed {seed}, {said}" for seed, said in failed.items())
    assert became["read"] > FILES / 2


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(seed, *a_file(seed), sep="\n")
        with tempfile.TemporaryDirectory() as folder:
            print(check(seed, Path(folder)))
