"""Every json of ours, damaged in every way: one line that names file and key, and says what was wanted."""

import json

import pytest

from common import checkpoint, data, json_files, resume
from common.errors import UserError
from common.json_files import each, figure, many, number, text, whole
from step3_rlhf import rewards

SCHEMA = {"name": text, "mean": number, "files": each(text), "more?": {"n": whole}, "rows?": many({"x": figure})}
GOOD = {"name": "a", "mean": 0.5, "files": {"b": "c"}, "more": {"n": 3}, "rows": [{"x": None}, {"x": -1}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD | {"name": 3}, "name is 3, wanted text"),
        (GOOD | {"mean": "0,4"}, "mean is the text '0,4', wanted a finite number"),
        (GOOD | {"mean": True}, "mean is true, wanted a finite number"),
        (GOOD | {"mean": None}, "mean is null, wanted a finite number"),
        (GOOD | {"mean": 10**400}, "mean is a number too large, wanted a finite number"),
        (GOOD | {"files": ["b"]}, "files is a list, wanted names and values"),
        (GOOD | {"files": {"b": 1}}, "files['b'] is 1, wanted text"),
        (GOOD | {"more": "here"}, "more is the text 'here', wanted names and values"),
        (GOOD | {"more": {}}, "has no more.n, wanted a whole number of at least 0"),
        (GOOD | {"more": {"n": -1}}, "more.n is -1, wanted a whole number of at least 0"),
        (GOOD | {"more": {"n": 1.5}}, "more.n is 1.5, wanted a whole number of at least 0"),
        (GOOD | {"rows": [{"x": 1}, {"x": "1"}]}, "rows[1].x is the text '1', wanted a finite number or null"),
        ([GOOD], "holds a list, wanted names and values"),
        (b'{"mean": NaN}', "holds NaN, which json does not know"),
        (b'{"mean": -Infinity}', "holds -Infinity, which json does not know"),
        (b'{"mean": 1e999, "name": "a", "files": {}}', "mean is inf, wanted a finite number"),
        (b'{"mean": ' + b"9" * 9999 + b"}", "holds a number of thousands of digits"),
        (b'{"mean": 1, "st', "is not json (Unterminated string"),
        (b"", "is not json (Expecting value"),
        (b'{"mean": 1, "mean": 2}', "has the key 'mean' twice"),
        (b'{"files": {"b": "c", "b": "c"}}', "has the key 'b' twice"),
        (b'{"name": "\xff"}', "is not UTF-8 text (byte 10)"),
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"a":' * 200_000, "is nested too deeply"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UserError) as caught:
        json_files.read_json(path, SCHEMA, "make it again")
    assert str(caught.value).startswith(f"{path}: {said}") and str(caught.value).endswith("; make it again")
    assert "\n" not in str(caught.value)


def test_what_fits_the_schema_is_read(tmp_path):
    path = tmp_path / "a.json"
    for good in (GOOD, {**GOOD, "more": None, "rows": []}, {k: GOOD[k] for k in ("name", "mean", "files")}):
        path.write_text(json.dumps(good | {"of a later version": [1]}), encoding="utf-8-sig")
        assert json_files.read_json(path, SCHEMA, "") == good | {"of a later version": [1]}


STAGE = {"stage": "sft", "format_version": 1, "files": {}, "data": {"path": "d", "hash": "h"}}
MANIFEST = {"format_version": 1, "hash": "h", "files": {}, "args": {"split": [2, 4, 4]}}
POINT = {"step": 1, "counters": {}, "identity": {}, "files": {}, "sha256": "x"}
STATS = {"mean": 0.5, "std": 2.0}


@pytest.mark.parametrize(
    ("name", "read", "good", "bad"),
    [
        (
            "stage.json",
            lambda folder: checkpoint.require_stage(folder, "--actor", ("sft",)),
            STAGE,
            [{"stage": None}, {"files": ["a"]}, {"data": "here"}, {"data": {"path": "d"}}, {"parents": [1]}]
            + [{"format_version": "1"}, {"metrics": {"loss": "1"}}, {"args": 1}, {"files": {"a": 1}}],
        ),
        (
            "manifest.json",
            data._read_manifest,
            MANIFEST,
            [{"files": None}, {"hash": 1}, {"args": {"split": ["2"]}}, {"sources": {}}, {"args": []}],
        ),
        (
            "manifest.json",
            resume.verify,
            None,
            [
                POINT | {"files": []},
                POINT | {"step": -1},
                POINT | {"files": {"a": {"size": "1", "sha256": "x"}}},
                POINT,
            ],
        ),
        (
            "reward_stats.json",
            lambda folder: rewards.read_stats(folder, "standardize"),
            STATS,
            [{"mean": "0,4"}, {"mean": None}, {"std": 0.0}, {"std": -1}, {"std": 1e-9}, {"mean": 1e300}],
        ),
    ],
)
def test_every_file_of_ours_is_checked_where_it_is_read(tmp_path, name, read, good, bad):
    path = tmp_path / name
    if good:
        path.write_text(json.dumps(good))
        read(tmp_path)
    damaged = [json.dumps((good or {}) | change).encode() for change in bad]
    for content in [*damaged, b"", b"[]", b'{"a": NaN}', b"\xff", b"[" * 200_000, b'{"a": 1, "a": 1}']:
        path.write_bytes(content)
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            read(tmp_path)
            print(f"{name} was taken: {content[:80]}")


def test_a_spread_of_zero_matters_only_where_scores_are_divided_by_it(tmp_path):
    (tmp_path / "reward_stats.json").write_text('{"mean": 0.5, "std": 0}')
    assert rewards.read_stats(tmp_path, "center") == (0.5, 0.0)
    with pytest.raises(UserError, match="std is 0, wanted at least 1e-06, for scores are divided by it"):
        rewards.read_stats(tmp_path, "standardize")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("stage.json", '{"stage": "sft", "format_version": 1, "args": 3}', "args is 3, wanted names and values"),
        ("a.json", '{"seed": 1, "seed": 2}', "has the key 'seed' twice"),
        ("a.yaml", "seed: 1\nseed: 2", "has the key 'seed' twice"),
        ("a.yaml", "[" * 5000, "a.yaml"),
        ("a.json", '{"seed": NaN}', "holds NaN"),
    ],
)
def test_settings_are_checked_too(tmp_path, file, content, said):
    from common import cli

    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=said):
        cli.read_config(tmp_path / file)
