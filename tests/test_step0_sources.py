"""Reading sources: every kind of file gives the same rows, and what cannot be read is named with file and line."""

import csv
import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import UserError
from step0_data import formats, sources

ROWS = [{"prompt": "one, two", "completion": "a\nb"}, {"prompt": "你好\u2028", "completion": '"🎉"'}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def values(path):
    return [row.value for row in sources.read_file(path)]


def write_csv(path, delimiter=","):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow(path, opener):
    table = pa.Table.from_pylist(ROWS)
    with opener(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "a.json": lambda p: p.write_text(json.dumps(ROWS), encoding="utf-8"),
    "lines.json": lambda p: p.write_text(LINES, encoding="utf-8"),
    "nested.json": lambda p: p.write_text(json.dumps({"data": ROWS}), encoding="utf-8"),
    "a.jsonl": lambda p: p.write_text(LINES, encoding="utf-8"),
    "bom.jsonl": lambda p: p.write_text(LINES, encoding="utf-8-sig"),
    "blank_lines.ndjson": lambda p: p.write_text("\n" + LINES.replace("\n", "\r\n\n"), encoding="utf-8", newline=""),
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(LINES.encode())),
    "a.parquet": lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p),
    "a.csv": write_csv,
    "a.tsv": lambda p: write_csv(p, "\t"),
    "stream.arrow": lambda p: write_arrow(p, pa.ipc.new_stream),
    "file.arrow": lambda p: write_arrow(p, pa.ipc.new_file),
    "UPPER.JSONL": lambda p: p.write_text(LINES, encoding="utf-8"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert sources.resolve(str(tmp_path / name)) == [tmp_path / name]
    assert values(tmp_path / name) == ROWS


def test_a_single_json_object_is_one_row(tmp_path):
    path = tmp_path / "one.jsonl.json"
    path.write_text(json.dumps(ROWS[0]))
    assert values(path) == ROWS[:1]


def test_a_folder_is_read_in_order_without_what_is_not_data(tmp_path):
    for name in ("b/x.jsonl", "a.jsonl", ".hidden/x.jsonl", "dataset_info.json", "README.md", "b/y.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    names = [p.relative_to(tmp_path).as_posix() for p in sources.resolve(str(tmp_path))]
    assert names == ["a.jsonl", "b/x.jsonl", "b/y.csv"]


def test_what_describes_the_data_is_left_out_of_a_folder_and_named(tmp_path):
    described = {
        "croissant.json": {"@context": {"@language": "en"}, "@type": "sc:Dataset"},
        "about.json": {"@context": {"@language": "en"}, "name": "corpus"},
        "dataset_infos.json": {"default": {"features": {"prompt": {"dtype": "string"}}, "splits": {}}},
        "infos.json": {"a": {"features": {}}, "b": {"features": {}}},
        "llama_factory.json": {"a": {"file_name": "a.jsonl"}, "b": {"hf_hub_url": "x/y"}},
        "datapackage.json": {"name": "corpus", "resources": [{"path": "a.jsonl"}]},
        "schema.json": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"},
        "config.json": {"model_type": "llama"},
    }
    for name, content in described.items():
        (tmp_path / name).write_text(json.dumps(content, indent=1))
    rows = {
        "one.json": ROWS[0],
        "lines.json": None,
        "other.json": {"foo": 1},
        "features.json": {"prompt": "q", "features": 1},
    }
    for name, content in rows.items():
        (tmp_path / name).write_text(json.dumps(content) if content else LINES)
    for name in ("README.md", "LICENSE", "notes.txt", ".gitattributes", ".git/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (plan,) = sources.plan([str(tmp_path)])
    assert [file.name for file in plan.files] == sorted(rows)
    assert list(plan.not_data) == sorted([*described, "README.md", "LICENSE", "notes.txt"])


def test_paths_with_signs_of_ours_in_them(tmp_path, monkeypatch):
    """= : @ in names: they are paths first, whatever else they might say."""
    monkeypatch.chdir(tmp_path)
    for name in ("a=1:b@2.jsonl", "set:train@0.5", "lr=1/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    assert sources.resolve("a=1:b@2.jsonl") == [Path("a=1:b@2.jsonl")]
    (plan,) = sources.plan(["a=1:b@2.jsonl@0.5"])
    assert (plan.name, plan.weight, plan.columns) == ("a=1:b@2.jsonl", 0.5, None)
    with pytest.raises(UserError, match="unknown kind of file '.5'"):
        sources.plan(["set:train@0.5"])
    os.mkfifo("pipe.jsonl")
    with pytest.raises(UserError, match="pipe.jsonl: is neither a file nor a folder"):
        sources.plan(["pipe.jsonl"])


def test_positions_count_from_one_and_skip_no_blank_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.where for row in sources.read_file(path)] == [f"{path} line 1", f"{path} line 3"]


def test_a_broken_line_is_handed_on_as_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    first, bad, last = values(path)
    assert (first, last) == ({"a": 1}, {"a": 2})
    assert isinstance(bad, formats.BadRow) and "broken JSON" in str(bad)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n3\n4,5\n")
    first, bad, last = values(path)
    assert isinstance(bad, formats.BadRow) and "cells than the heading" in str(bad)


ERRORS = {
    "broken.json": (b'[{"a": 1},\n {"a" 2}]', "broken.json line 2 column 7: broken JSON"),
    "number.json": (b"3", "holds a number, wanted a list of rows"),
    "a.parquet": (b"PAR1 no", "not a readable parquet file"),
    "a.arrow": (b"nothing", "not a readable arrow file"),
    "a.jsonl.gz": (b"no gzip", "cannot be read"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_unreadable_files_are_named(tmp_path, name):
    content, message = ERRORS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        values(tmp_path / name)


def test_a_folder_is_read_through_links_each_folder_once(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    for path in (folder / "a.jsonl", other / "b.jsonl"):
        path.parent.mkdir()
        path.write_text("{}\n")
    (folder / "more").symlink_to(other)
    (folder / "c.jsonl").symlink_to(other / "b.jsonl")
    (folder / "loop").symlink_to(folder)
    found = [file.relative_to(folder).as_posix() for file in sources.resolve(str(folder))]
    assert found == ["a.jsonl", "c.jsonl", "more/b.jsonl"]


def test_data_of_a_folder_that_would_be_missed_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    for name in ("notes.zip", "a.jsonl.sha256", "README.md", ".b.jsonl.zst"):
        (tmp_path / name).write_text("x")
    assert sources.resolve(str(tmp_path)) == [tmp_path / "a.jsonl"]
    (tmp_path / "b.jsonl.zst").write_text("x")
    with pytest.raises(UserError, match=r"b.jsonl.zst: packed in a way that is not read here; unpack it"):
        sources.resolve(str(tmp_path))
    (tmp_path / "b.jsonl.zst").unlink()
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match=r"b.jsonl: a link to a file that is not there; get that file"):
        sources.resolve(str(tmp_path))


def saved(folder, rows, shards):
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=shards)


def test_a_saved_data_set_is_read_in_the_order_of_its_shards_without_its_caches(tmp_path):
    folder, rows = tmp_path / "saved", [{"prompt": f"q{i}"} for i in range(10)]
    saved(folder, rows, 3)
    write_arrow(folder / "cache-0123456789abcdef.arrow", pa.ipc.new_stream)  # as `map` leaves them beside the data
    files = sources.resolve(str(folder))
    assert [file.name for file in files] == [f"data-{i:05}-of-00003.arrow" for i in range(3)]
    assert [row for file in files for row in values(file)] == rows
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert sources.resolve(str(folder)) == files[::-1]
    files[1].unlink()
    message = "state.json names data-00001-of-00003.arrow, which is not there; copy the folder whole"
    with pytest.raises(UserError, match=message):
        sources.resolve(str(folder))
    (folder / "state.json").write_text("[]")  # of some other program
    assert len(sources.resolve(str(folder))) == 3


def test_the_splits_of_a_saved_dict_are_a_split(tmp_path):
    import datasets

    rows = {name: [{"prompt": f"{name} {i}"} for i in range(3)] for name in ("train", "test")}
    parts = {name: datasets.Dataset.from_list(rows[name]) for name in rows}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    (plan,) = sources.plan([str(tmp_path / "saved")])
    assert [(file.parent.name, part) for file, part in plan.files.items()] == [("test", "eval"), ("train", "train")]
    pieces, left_out = sources.pieces(plan)
    assert [row.value for piece in pieces for row in piece.rows] == rows["test"] + rows["train"] and not left_out


def test_pictures_of_a_saved_data_set_are_not_decoded(tmp_path):
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = [{"prompt": "q", "image": {"bytes": b"no picture", "path": None}}]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    assert values(*sources.resolve(str(tmp_path / "saved"))) == rows
    assert [row.value for row in sources._hub_rows("x", dataset)] == rows


@pytest.mark.parametrize(
    ("typed", "name", "weight"),
    [
        ("a.jsonl", "a.jsonl", 1.0),
        ("a.jsonl@0.3", "a.jsonl", 0.3),
        ("a/b@2", "a/b", 2.0),
        ("a/b@.5", "a/b", 0.5),
        ("a/b@train", "a/b@train", 1.0),
        ("a/b:c@train@0.3", "a/b:c@train", 0.3),
        ("there@2", "there@2", 1.0),  # a file of that name
        ("there@2@3", "there@2", 3.0),
        ("a@v1.2", "a@v1.2", 1.0),
    ],
)
def test_a_number_behind_the_last_at_sign_is_a_weight(tmp_path, monkeypatch, typed, name, weight):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there@2").write_text("")
    assert sources.weight_of(typed) == (name, weight)


@pytest.mark.parametrize(
    ("typed", "name", "weight", "columns"),
    [
        ("a.csv:prompt=q", "a.csv", 1.0, {"prompt": "q"}),
        ("a.csv:prompt=q,chosen=a good one@0.3", "a.csv", 0.3, {"prompt": "q", "chosen": "a good one"}),
        ("some/set:c@train:prompt=问", "some/set:c@train", 1.0, {"prompt": "问"}),
        ("some/set:c@train@2", "some/set:c@train", 2.0, None),
        ("there:text=1", "there:text=1", 1.0, None),  # a file of that name
        ("there:text=1:text=b", "there:text=1", 1.0, {"text": "b"}),
    ],
)
def test_columns_of_one_source_stand_behind_its_name(tmp_path, monkeypatch, typed, name, weight, columns):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there:text=1").write_text("")
    assert sources.parts_of(typed) == (name, weight, columns)


def test_weights_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="a.jsonl@0: a weight is above 0; leave the source out instead"):
        sources.plan(["a.jsonl@0"])
    with pytest.raises(UserError, match="a.jsonl@-1: '-1' is no weight; write a.jsonl@0.3, or @2 to have each row"):
        sources.plan(["a.jsonl@-1"])
    (tmp_path / "d" / "x").mkdir(parents=True)
    assert sources.inside(["d@0.3"], "x") == ["d/x@0.3"]
    assert sources.inside(["d:prompt=q@0.3"], "x") == ["d/x:prompt=q@0.3"]
    assert sources.inside(["some/set@train@0.3"], "x") == ["some/set:x@train@0.3"]
    (plan,) = sources.plan(["some/set:x@train@0.3"])
    assert (plan.source, plan.name, plan.weight) == ("some/set:x@train@0.3", "some/set:x@train", 0.3)


def test_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"missing.jsonl: no such file or folder \(looked in"):
        sources.resolve("missing.jsonl")
    with pytest.raises(UserError, match="unknown kind of file '.txt'; wanted .json, .jsonl"):
        sources.resolve("notes.txt")
    with pytest.raises(UserError, match="no data file in this folder"):
        sources.resolve("empty")
    assert sources.resolve("someone/some-data:main@test") is None


def test_a_hub_name_without_a_network_is_one_line(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        sources.pieces(*sources.plan(["someone/some-data"]))
    assert "someone/some-data: no such file or folder here, and the hub is switched off" in str(caught.value)
    assert "\n" not in str(caught.value)


PLANS = {  # files of the folder d, the sources as typed: (file, part) of each, what is left out
    "a split": (["d"], ["test.jsonl", "train.jsonl"], [[("test.jsonl", "eval"), ("train.jsonl", "train")]], []),
    "words of a name": (["d"], ["q_dev.csv", "q_train.csv"], [[("q_dev.csv", "eval"), ("q_train.csv", "train")]], []),
    "numbers": (
        ["d"], ["eval0.parquet", "train-00000-of-00001.parquet"],
        [[("eval0.parquet", "eval"), ("train-00000-of-00001.parquet", "train")]], [],
    ),
    "folders": (
        ["d"], ["train/b.json", "validation/a.json"], [[("train/b.json", "train"), ("validation/a.json", "eval")]], [],
    ),
    "the file before its folder": (
        ["d"], ["train/test.json", "train/train.json"],
        [[("train/test.json", "eval"), ("train/train.json", "train")]], [],
    ),
    "others left out": (
        ["d"], ["a.json", "test.json", "train.json"], [[("test.json", "eval"), ("train.json", "train")]], ["a.json"],
    ),
    "train only": (["d"], ["a.json", "train.json"], [[("a.json", None), ("train.json", None)]], []),
    "parts of words": (["d"], ["latest.json", "trainer.json"], [[("latest.json", None), ("trainer.json", None)]], []),
    "each by itself": (["d/train.json", "d/test.json"], ["train.json", "test.json"],
                       [[("train.json", "train")], [("test.json", "eval")]], []),
    "others by themselves": (["d/a.json", "d/train.json", "d/test.json"], ["a.json", "train.json", "test.json"],
                             [[("a.json", None)], [("train.json", "train")], [("test.json", "eval")]], []),
    "of two folders": (["d/x/train.json", "d/y/test.json"], ["x/train.json", "y/test.json"],
                       [[("x/train.json", None)], [("y/test.json", None)]], []),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_train_and_a_test_file_side_by_side_are_a_split(tmp_path, monkeypatch, name):
    typed, files, wanted, left_out = PLANS[name]
    folder = tmp_path / "test" / "d"  # the folders around a source say nothing
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("[]")
    monkeypatch.chdir(folder.parent)
    plans = sources.plan(typed)
    found = [[(path.relative_to("d").as_posix(), part) for path, part in plan.files.items()] for plan in plans]
    assert found == wanted
    assert [path for plan in plans for path in plan.left_out] == [f"d/{path}" for path in left_out]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("a", ("a", None, None)),
        ("a/b", ("a/b", None, None)),
        ("a/b:c", ("a/b", "c", None)),
        ("a/b:c-d/e.f", ("a/b", "c-d/e.f", None)),
        ("a/b@test", ("a/b", None, "test")),
        ("a/b:c@test", ("a/b", "c", "test")),
        ("a/b/c", None),
        ("a b", None),
        ("a/b:c:d", None),
        ("/a", None),
    ],
)
def test_names_on_the_hub(source, parts):
    found = sources._HUB_NAME.match(source)
    assert (found and found.groups()) == parts
