"""Tokens of prepared data: the same with and without the cache, however many processes; what the cache depends on."""

import dataclasses
import json
import multiprocessing
import os
import signal
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_tokenizers as small
import stage_processes
from small_models import save_llama

from common import chat_format, data, distributed, examples, tokens
from common.errors import UserError
from common.metrics import read_jsonl

LIMIT = 24


def tokenizer(template: str = "plain"):
    tok = small.characters()
    chat_format.ensure_template(tok, template)
    return tok


def user(text):
    return [{"role": "user", "content": text}]


def answer(text):
    return [{"role": "assistant", "content": text}]


def rows_of(kind: str, count: int) -> list[dict]:
    """Good rows, rows that are cut or shortened, and rows that are set aside, in turns."""
    words = ["ab", "", "abcdefghij" * 3, "x</s>", "c"]
    made = []
    for i in range(count):
        word, question = words[i % 5], user(f"{i}?")
        long = user("old " * 9) + answer("yes") + question
        made.append(
            {
                "sft": {"messages": (long if i % 7 == 0 else question) + answer(word)},
                "preference": {
                    "prompt": long if i % 3 == 0 else question, "chosen": answer(word), "rejected": answer("c"),
                    "margin": None if i % 2 else i / 2,
                },
                "prompts": {
                    "prompt": long if i % 3 == 0 else user("abcd" * (i % 9)), "level": i, "tags": ["a"] * (i % 3)
                },
            }[kind]
        )  # fmt: skip
    return made


def prepared(folder: Path, kind: str = "sft", count: int = 40) -> data.DataFiles:
    (folder / kind).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows_of(kind, count)), folder / kind / "train.parquet", row_group_size=17)
    return data.locate(folder, kind)


def load(files, kind="sft", tok=None, limit=LIMIT, folder="auto", output_dir="out"):
    cache = tokens.Cache(str(folder), str(output_dir))
    return tokens.load(kind, tok or tokenizer(), files, files.train, limit, cache)


def arrows(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.arrow"))


@pytest.mark.parametrize("kind", ["sft", "preference", "prompts"])
def test_the_same_examples_and_report_from_a_list_a_cache_and_two_processes(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tokens, "_CHUNK", 7)  # no multiple of anything in the file
    files = prepared(tmp_path / "data", kind)
    tokenise = {"sft": examples.tokenise_sft, "preference": examples.tokenise_pairs}.get(
        kind, examples.tokenise_prompts
    )
    expected, report = tokenise(tokenizer(), rows_of(kind, 40), LIMIT)
    assert 0 < report.kept < 40 and len(report.set_aside) >= 1
    for name in ("made", "found"):
        seen, of_cache = load(files, kind, folder=tmp_path / "cache")
        assert (list(seen), of_cache, str(of_cache)) == (expected, report, str(report)), name
    for processes in (1, 2):
        found = examples.Report("")
        batches = list(tokens._tokenised(kind, tokenizer(), files.train, LIMIT, processes, found))
        assert list(tokens.Examples(type(expected[0]), batches)) == expected and found == report, processes
    assert load(files, kind)[0] == expected and not (tmp_path / "data/.tokens").exists()  # few rows are not kept
    with pytest.raises(IndexError):
        seen[len(expected)]


def test_columns_of_any_kind_reach_reward_functions_through_the_cache(tmp_path):
    (tmp_path / "prompts").mkdir()
    table = pa.table(
        {
            "prompt": [user(f"{i}") for i in range(6)],
            "category": pa.array(["x", "y", "x", "z", "y", "x"]).dictionary_encode(),
            "scores": [[0.5], None, [], [1.0, 2.0], [3.0], None],
            "bytes": [b"\x00\xff"] * 6,
            "nothing": pa.nulls(6),
            "nested": [{"a": i, "b": {"c": "\u4f60\u597d"}} for i in range(6)],
            "uuid": pa.array([uuid.UUID(int=i).bytes for i in range(6)], pa.uuid()),
            "nanoseconds": pa.array([1, None, 3, 4, 5, 6], pa.timestamp("ns")),
        }
    )
    rows = table.to_pylist()
    rows[2]["prompt"] = user("no room " * LIMIT)  # set aside
    rows[3]["prompt"] = user("old " * 9) + answer("yes") + user("3")  # loses its first two turns
    table = table.set_column(0, "prompt", pa.array([row["prompt"] for row in rows]))
    mixed = [1, 1.0, {"a": None}, None, {}, "1"]
    field = pa.field("mixed", pa.string(), metadata={"encoding": "json"})
    table = table.append_column(field, pa.array(["1", "1.0", '{"a": null}', None, "{}", '"1"']))
    pq.write_table(table, tmp_path / "prompts/train.parquet")
    for folder in (tmp_path / "cache", "off"):
        seen, report = load(data.locate(tmp_path, "prompts"), "prompts", folder=folder)
        wanted = [row | {"mixed": it} for row, it in zip(rows, mixed, strict=True)]
        wanted[3]["prompt"] = user("3")
        del wanted[2]
        assert repr([example.row for example in seen]) == repr(wanted) and report.shortened == 1


def test_the_default_keeps_large_sets_beside_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MANY_ROWS", 30)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "data"
    files = prepared(root)
    (root / "manifest.json").write_text(json.dumps({"hash": "h", "files": {}}))
    load(dataclasses.replace(files, root=root))
    assert len(arrows(root / ".tokens")) == 1 and not (tmp_path / "out").exists()
    # In memory it is arrow too, and nothing is written.
    (tmp_path / "other").mkdir()
    kept, _ = load(prepared(tmp_path / "other"), folder="off")
    assert isinstance(kept, tokens.Examples) and not list((tmp_path / "other").glob("**/.tokens"))


def test_data_that_cannot_be_written_to_has_its_tokens_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MANY_ROWS", 30)
    files = prepared(tmp_path / "data")
    blocked = tmp_path / "data/sft/.tokens"
    blocked.touch()  # a folder cannot be made there, even by root
    load(files, output_dir=tmp_path / "run")
    assert len(arrows(tmp_path / "run/.tokens")) == 1
    with pytest.raises(UserError, match=r"tokens cannot be kept in .*: .*; give a folder with --tokens_cache DIR, or"):
        load(files, folder=blocked)
    if os.geteuid():  # permissions do not bind root
        blocked.unlink()
        blocked.parent.chmod(0o555)
        load(files, output_dir=tmp_path / "second")
        blocked.parent.chmod(0o755)
        assert arrows(tmp_path / "second/.tokens") == arrows(tmp_path / "run/.tokens")


# ---- what the cache depends on


def with_added_token(tok):
    tok.add_tokens(["ab"])
    return tok


def with_other_bos(tok):
    tok.bos_token = "</s>"
    return tok


def with_template_for_system_turns(tok):
    """Another template, which prints the same for a conversation without a system turn."""
    tok.chat_template = tok.chat_template.replace("'system' %}{{ '\\n\\n'", "'system' %}{{ '\\n'")
    assert tok.chat_template != tokenizer().chat_template
    return tok


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ("vocabulary", {"tok": with_added_token(tokenizer())}),
        ("special token", {"tok": with_other_bos(tokenizer())}),
        ("template", {"tok": with_template_for_system_turns(tokenizer())}),
        ("limit", {"limit": LIMIT + 1}),
    ],
)
def test_another_tokenizer_template_or_limit_is_another_cache(tmp_path, capsys, changed, settings):
    files, folder = prepared(tmp_path / "data"), tmp_path / "cache"
    first = list(load(files, folder=folder)[0])
    (name,) = arrows(folder)
    load(files, folder=folder, **settings)
    assert len(arrows(folder)) == 2 and "made before" not in capsys.readouterr().out, changed
    # And back: the first is found, by a tokenizer loaded anew.
    assert list(load(files, folder=folder)[0]) == first
    assert f"tokens: {folder / name}, made before from the same data, tokenizer and settings" in capsys.readouterr().out


def test_changed_data_are_another_cache_and_a_copy_is_not(tmp_path):
    folder = tmp_path / "cache"
    load(prepared(tmp_path / "data"), folder=folder)
    load(prepared(tmp_path / "copy"), folder=folder)
    assert len(arrows(folder)) == 1
    seen, report = load(prepared(tmp_path / "data", count=41), folder=folder)
    assert len(arrows(folder)) == 2 and report.read == 41


def test_code_and_kind_are_in_the_key(tmp_path, monkeypatch):
    first = tokens._key("sft", tokenizer(), "0", LIMIT)
    assert first == tokens._key("sft", tokenizer(), "0", LIMIT) != tokens._key("prompts", tokenizer(), "0", LIMIT)
    package = tmp_path / "common"
    package.mkdir()
    for path in Path(tokens.__file__).parent.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    monkeypatch.setattr(tokens, "__file__", str(package / "tokens.py"))
    assert tokens._key("sft", tokenizer(), "0", LIMIT) == first
    (package / "chat_format.py").write_text("# another\n")
    assert tokens._key("sft", tokenizer(), "0", LIMIT) != first


def test_a_tokenizer_class_of_other_code_is_another_cache():
    """A class that comes with a model keeps its name when its code changes; the module it is loaded as does not."""
    tok, keys = tokenizer(), []
    for commit in ("3f2a", "9b01"):
        tok.__class__ = type("TheirTokenizer", (type(tok),), {"__module__": f"transformers_modules.theirs.{commit}"})
        keys.append(tokens._key("sft", tok, "0", LIMIT))
    assert keys[0] != keys[1]


# ---- damage, and more than one process


def test_damage_is_found_told_and_mended(tmp_path, capsys):
    files, folder = prepared(tmp_path / "data"), tmp_path / "cache"
    expected = list(load(files, folder=folder)[0])
    path = folder / arrows(folder)[0]
    whole, sealed = path.read_bytes(), path.with_suffix(".json").read_bytes()

    def flip(content: bytes, at: int) -> bytes:
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    damages = {
        "was changed since it was written (sha256)": lambda: path.write_bytes(flip(whole, len(whole) // 2)),
        f"has {len(whole) - 9} bytes, written were {len(whole)}": lambda: path.write_bytes(whole[:-9]),
        "cannot be used ([Errno 2]": path.unlink,
        "cannot be used (is not json (Expecting": lambda: path.with_suffix(".json").write_bytes(sealed[:30]),
        "is of other tokens": lambda: path.with_suffix(".json").write_bytes(sealed.replace(b'"24"', b'"25"')),
        "": path.with_suffix(".json").unlink,  # never finished: no word
    }
    for said, damage in damages.items():
        damage()
        capsys.readouterr()
        assert list(load(files, folder=folder)[0]) == expected
        out = capsys.readouterr().out
        assert (f"tokens: {path} {said}" in out and "made again" in out) if said else not out
        assert path.read_bytes() == whole and path.with_suffix(".json").read_bytes() == sealed
    assert sorted(p.name for p in folder.iterdir()) == sorted([".lock", path.name, path.with_suffix(".json").name])


def test_a_second_host_takes_no_file_of_its_own_that_was_never_finished(tmp_path, monkeypatch):
    files, folder = prepared(tmp_path / "data"), tmp_path / "cache"
    expected = list(load(files, folder=folder)[0])
    path = folder / arrows(folder)[0]
    path.write_bytes(path.read_bytes()[:-9])
    path.with_suffix(".json").unlink()
    monkeypatch.setattr(distributed, "from_main", lambda function: str(path))  # found whole on the first one's disk
    assert list(load(files, folder=folder)[0]) == expected


def test_a_file_that_is_in_use_is_never_written_into(tmp_path):
    files, folder = prepared(tmp_path / "data"), tmp_path / "cache"
    in_use, _ = load(files, folder=folder)
    expected = list(in_use)
    path = folder / arrows(folder)[0]
    inode = path.stat().st_ino
    path.with_suffix(".json").unlink()
    load(files, folder=folder)
    assert list(in_use) == expected and path.stat().st_ino != inode


def test_no_row_left_is_an_error_from_the_cache_too(tmp_path):
    (tmp_path / "sft").mkdir()
    pq.write_table(pa.Table.from_pylist([{"messages": user("a")}] * 3), tmp_path / "sft/train.parquet")
    message = r"sft data: none of 3 rows can be used; 3 set aside: no assistant turn \(first row 0\)"
    for _ in ("made", "found"):
        with pytest.raises(UserError, match=message):
            load(data.locate(tmp_path, "sft"), folder=tmp_path / "cache")
    empty = pa.Table.from_pylist([{"messages": user("a")}]).slice(0, 0)
    pq.write_table(empty, tmp_path / "sft/train.parquet")
    with pytest.raises(UserError, match="sft data: none of 0 rows can be used; the file is empty"):
        load(data.locate(tmp_path, "sft"), folder=tmp_path / "cache")


def small_server():
    """Children of a small process: this one has grown too large to be copied."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(stage_processes.PRELOAD)
    return context


def _make(folder: str, go) -> None:
    go.wait()
    load(data.locate(f"{folder}/data", "sft"), folder=f"{folder}/cache")


def test_processes_that_start_at_once_write_once(tmp_path):
    prepared(tmp_path / "data", count=400)
    context = small_server()
    go = context.Event()
    children = [context.Process(target=_make, args=(str(tmp_path), go)) for _ in range(3)]
    for child in children:
        child.start()
    go.set()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0] and len(arrows(tmp_path / "cache")) == 1
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def _write_until_killed(folder: str, at: int) -> None:
    """Ends like a power cut before the `at`-th of the calls that change the folder or seal a file."""
    seen = 0

    def counting(function):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    tokens.fsync, Path.rename, os.replace, Path.unlink = map(
        counting, (tokens.fsync, Path.rename, os.replace, Path.unlink)
    )
    load(data.locate(f"{folder}/data", "sft"), folder=f"{folder}/cache")


def test_killed_at_every_moment_of_writing_the_next_run_mends_it(tmp_path):
    files = prepared(tmp_path / "data")
    expected = list(load(files)[0])
    context, kills = small_server(), 0
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/.tmp-notes.tmp").touch()  # not ours, in a folder that the user named
    for at in range(1, 30):
        for path in (tmp_path / "cache").glob("*sft-*"):
            path.unlink()
        child = context.Process(target=_write_until_killed, args=(str(tmp_path), at))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        kills += 1
        # What is left is either whole or not taken for it.
        assert list(load(files, folder=tmp_path / "cache")[0]) == expected
        name = arrows(tmp_path / "cache")[0].removesuffix(".arrow")
        there = {p.name for p in (tmp_path / "cache").iterdir()}
        assert there == {".lock", ".tmp-notes.tmp", f"{name}.arrow", f"{name}.json"}
    assert kills >= 4


def test_processes_that_tokenise_end_with_the_one_that_started_them(tmp_path):
    files = prepared(tmp_path / "data", count=30_000)
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_tokenise_all, args=(str(files.train), str(tmp_path / "pids")))
    child.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    child.kill()
    child.join()
    while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_is_running(pid) for pid in pids)


def _tokenise_all(file: str, pids: str) -> None:
    batches = tokens._tokenised("sft", tokenizer(), Path(file), LIMIT, 2, examples.Report(""))
    next(batches)
    found = [child.pid for child in multiprocessing.active_children()]
    Path(pids + ".part").write_text(" ".join(map(str, found)))
    Path(pids + ".part").rename(pids)
    list(batches)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_run_on_two_ranks_is_the_same_from_the_cache(tmp_path):
    save_llama(tmp_path / "base")
    prepared(tmp_path / "data")
    flags = (
        "--model base --data data --max_steps 3 --per_device_train_batch_size 2 --max_length 60 --report_to none "
        "--chat_template plain --output_dir {} --tokens_cache {}"
    )
    seen = {}
    for out, folder in (("plain", "off"), ("made", "cache"), ("found", "cache")):
        done = stage_processes.run("step1_sft/train.py", flags.format(out, folder), tmp_path, ranks=2)
        assert done.codes == [0, 0], done.output
        assert done.output[0].count("made before") == (out == "found") and "tokens:" not in done.output[1]
        seen[out] = (tmp_path / out / "metrics.jsonl").read_bytes()
        report = next(line for line in done.output[0].splitlines() if line.startswith("sft data:"))
        seen[out] += report.encode()
    assert seen["plain"] == seen["made"] == seen["found"] and len(arrows(tmp_path / "cache")) == 1
    # Micro-batches by tokens are cut otherwise on one rank and on two: the same figures, to rounding.
    plain = read_jsonl(tmp_path / "plain/metrics.jsonl")
    for ranks in (1, 2):
        more = f" --max_tokens_per_micro_batch 50 --per_device_train_batch_size {4 // ranks}"
        done = stage_processes.run("step1_sft/train.py", flags.format(ranks, "off") + more, tmp_path, ranks)
        assert done.codes == [0] * ranks, done.output
        for row, expected in zip(read_jsonl(tmp_path / f"{ranks}/metrics.jsonl"), plain, strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
