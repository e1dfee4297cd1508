"""Anthropic's hh-rlhf as people have it: the hub's layout in a folder, the hub itself, odd dialogues, 800 real rows."""

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import small_hub

from common import cli
from step0_data import formats, prepare

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("sft", "preference", "prompts")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, words)])
    return cli.run(prepare.main)


def rows_of(folder: Path, part: str) -> dict[str, list[dict]]:
    """{stage: rows} of train or eval."""
    files = {stage: folder / stage / f"{part}.parquet" for stage in STAGES}
    return {stage: pq.read_table(file).to_pylist() if file.exists() else [] for stage, file in files.items()}


def sources_of(folder: Path) -> list[dict]:
    return json.loads((folder / "manifest.json").read_text())["sources"]


def texts_of(folder: Path, part: str) -> set[str]:
    """First user turns of all stages."""
    rows = [row for rows in rows_of(folder, part).values() for row in rows]
    return {(row.get("prompt") or row["messages"])[0]["content"] for row in rows}


def dialogue(*turns: str) -> str:
    names = ("Human", "Assistant")
    return "".join(f"\n\n{names[i % 2]}: {turn}" for i, turn in enumerate(turns))


def packed(rows: list[dict]) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def pair(question: str) -> dict:
    return {
        "chosen": dialogue("hi " + question, "hello", question, "a good answer"),
        "rejected": dialogue("hi " + question, "hello", question, "a bad one"),
    }


def red_team() -> bytes:
    row = {"min_harmlessness_score_transcript": 0.5, "transcript": dialogue("x", "y"), "rating": 4.0, "tags": None}
    return packed([row] * 3)


def repository(train: int = 30, test: int = 6) -> dict[str, bytes]:
    """The files of the hub's data set, each with its own questions."""
    files = {"README.md": b"---\nlicense: mit\n---\n", "red-team-attempts/red_team_attempts.jsonl.gz": red_team()}
    for folder in ("harmless-base", "helpful-base"):
        for part, size in (("train", train), ("test", test)):
            files[f"{folder}/{part}.jsonl.gz"] = packed([pair(f"{folder} {part} {i}") for i in range(size)])
    return files


@pytest.fixture
def copy(tmp_path) -> Path:
    """A local copy of the repository."""
    for name, content in repository().items():
        (tmp_path / "hh-rlhf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hh-rlhf" / name).write_bytes(content)
    return tmp_path / "hh-rlhf"


def questions(folder: str, part: str, size: int) -> set[str]:
    return {f"hi {folder} {part} {i}" for i in range(size)}


# ---- a copy of its files


@pytest.mark.parametrize("how", ["--data_dir", "its path", "its files"])
def test_its_own_train_and_test_files_become_train_and_eval(copy, tmp_path, monkeypatch, capsys, how):
    out = tmp_path / "data"
    words = {
        "--data_dir": ["--dataset", copy, "--data_dir", "harmless-base"],
        "its path": ["--dataset", copy / "harmless-base"],
        "its files": ["--dataset", *(copy / f"harmless-base/{part}.jsonl.gz" for part in ("train", "test"))],
    }[how]
    assert run(monkeypatch, *words, "--output_dir", out) == 0
    assert texts_of(out, "train") == questions("harmless-base", "train", 30)
    assert texts_of(out, "eval") == questions("harmless-base", "test", 6)
    train = rows_of(out, "train")
    assert all(len(train[stage]) > 3 for stage in STAGES)
    turns = [user("hi q"), assistant("hello"), user("q")]
    for stage, rows in train.items():
        for row in rows:
            question = (row.get("prompt") or row["messages"])[2]["content"]
            prompt = [{**turn, "content": turn["content"].replace("q", question)} for turn in turns]
            good, bad = [assistant("a good answer")], [assistant("a bad one")]
            assert (
                row
                == {
                    "sft": {"messages": prompt + good},
                    "preference": {"prompt": prompt, "chosen": good, "rejected": bad},
                    "prompts": {"prompt": prompt},
                }[stage]
            )
    printed = capsys.readouterr().out
    assert "its own split is kept: train is train, and what it holds out is eval" in printed
    assert sum(entry["rows"] for entry in sources_of(out)) == 36
    assert {file["rows"] for entry in sources_of(out) for file in entry["files"]} == {30, 6}
    assert run(monkeypatch, *words, "--output_dir", out) == 0 and "already done" in capsys.readouterr().out


def test_the_whole_copy_is_read_but_for_the_red_team(copy, tmp_path, monkeypatch, capsys):
    out = tmp_path / "data"
    assert run(monkeypatch, "--dataset", copy, "--output_dir", out) == 0
    folders = ("harmless-base", "helpful-base")
    assert texts_of(out, "train") == set().union(*(questions(name, "train", 30) for name in folders))
    assert texts_of(out, "eval") == set().union(*(questions(name, "test", 6) for name in folders))
    attempts = (copy / "red-team-attempts/red_team_attempts.jsonl.gz").as_posix()
    assert f"left out, being neither train nor test: {attempts}" in capsys.readouterr().out
    (entry,) = sources_of(out)
    assert entry["left_out"] == [attempts] and len(entry["files"]) == 4 and entry["rows"] == 72
    assert run(monkeypatch, "--dataset", copy, "--output_dir", out) == 0 and "already done" in capsys.readouterr().out


def test_the_red_team_alone_is_refused(copy, tmp_path, monkeypatch, capsys):
    words = ["--dataset", copy, "--data_dir", "red-team-attempts", "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert "a red-team transcript is one dialogue with a rating, no pair; take a folder of pairs" in error
    assert error.startswith("error: ") and error.count("\n") == 1 and not (tmp_path / "data").exists()


def test_one_file_alone_is_dealt_out_as_any_other(copy, tmp_path, monkeypatch):
    out = tmp_path / "data"
    words = ["--dataset", copy / "harmless-base/train.jsonl.gz", "--eval_fraction", 0.5, "--output_dir", out]
    assert run(monkeypatch, *words) == 0
    train, held_out = texts_of(out, "train"), texts_of(out, "eval")
    assert train and held_out and train | held_out == questions("harmless-base", "train", 30)
    assert not sources_of(out)[0]["own_split"]


def test_other_files_named_beside_a_split_are_dealt_out(copy, tmp_path, monkeypatch):
    """Only files of one folder are a split together: a train file from elsewhere keeps its share of eval."""
    out, other = tmp_path / "data", tmp_path / "other_train.jsonl"
    other.write_text("".join(json.dumps(pair(f"other {i}")) + "\n" for i in range(40)))
    words = ["--dataset", copy / "harmless-base", other, "--eval_fraction", 0.5, "--output_dir", out]
    assert run(monkeypatch, *words) == 0
    assert any(text.startswith("hi other") for text in texts_of(out, "eval"))
    assert [entry["own_split"] for entry in sources_of(out)] == [True, False]


def test_a_train_row_that_opens_like_a_held_out_one_is_set_aside(copy, tmp_path, monkeypatch):
    folder, out = copy / "harmless-base", tmp_path / "data"
    (folder / "train.jsonl.gz").write_bytes(packed([pair("q1"), pair("q2"), pair("Q2"), pair("q3")]))
    (folder / "test.jsonl.gz").write_bytes(packed([pair("q2")]))
    assert run(monkeypatch, "--dataset", folder, "--output_dir", out) == 0
    assert texts_of(out, "train") == {"hi q1", "hi q3"} and texts_of(out, "eval") == {"hi q2"}
    aside = {"rows": 2, "first": f"{folder / 'train.jsonl.gz'} line 2"}
    assert sources_of(out)[0]["set_aside"] == {"its prompt serves eval already, through another row": aside}


def test_max_rows_takes_the_first_of_train_and_of_test(copy, tmp_path, monkeypatch):
    out = tmp_path / "data"
    assert run(monkeypatch, "--dataset", copy / "helpful-base", "--max_rows", 4, "--output_dir", out) == 0
    assert texts_of(out, "train") == questions("helpful-base", "train", 4)
    assert texts_of(out, "eval") == questions("helpful-base", "test", 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "hh-rlhf", "--data_dir", "harmles-base"], "--data_dir harmles-base: not in hh-rlhf, which has"),
        (["--dataset", "hh-rlhf", "x", "--data_dir", "y"], "--data_dir y is of one source, 2 are given"),
        (["--dataset", "a/b:c", "--data_dir", "y"], "a/b:c is no folder and no plain hub name"),
        (["--dataset", "tiny", "--data_dir", "y"], "tiny stands alone"),
    ],
)
def test_data_dir_of_something_else_is_refused(copy, monkeypatch, capsys, words, message):
    monkeypatch.chdir(copy.parent)
    assert run(monkeypatch, *words, "--output_dir", "data") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (copy.parent / "data").exists()


# ---- odd dialogues

ODD = {
    "several turns": ((dialogue("a", "b", "c", "d"), dialogue("a", "b", "c", "e")), ("abc", "d", "e")),
    "white space around": ((dialogue(" a ", "b ", "c", "d \n"), dialogue("a", "b", "c\n", " e")), ("abc", "d", "e")),
    "a name inside a line": (
        (dialogue("a Human: x", "b"), dialogue("a Human: x", "c\nHuman: y\nAssistant: z")),
        (("a Human: x",), "b", "c\nHuman: y\nAssistant: z"),
    ),
    "a name without a space": ((dialogue("a", "b\n\nHuman:s"), dialogue("a", "c")), ("a", "b\n\nHuman:s", "c")),
    "an answer that begins with a name": ((dialogue("a", "Human: b"), dialogue("a", "c")), ("a", "Human: b", "c")),
    "paragraphs": ((dialogue("a\n\nb", "c\n\nd"), dialogue("a\n\nb", "e")), (("a\n\nb",), "c\n\nd", "e")),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_dialogues_that_are_understood(name):
    (chosen, rejected), (turns, better, worse) = ODD[name]
    _, record = formats.convert({"chosen": chosen, "rejected": rejected})
    assert record.prompt == [(user, assistant)[i % 2](text) for i, text in enumerate(turns)]
    assert (record.answer, record.rejected) == ([assistant(better)], [assistant(worse)])


def test_a_greeting_is_the_first_turn_of_the_prompt():
    greeting = "\n\nAssistant: hi"
    _, record = formats.convert({"chosen": greeting + dialogue("a", "b"), "rejected": greeting + dialogue("a", "c")})
    assert record.prompt == [assistant("hi"), user("a")]
    assert (record.answer, record.rejected) == ([assistant("b")], [assistant("c")])


def test_two_answers_in_a_row_stay_two():
    text = "\n\nHuman: a\n\nAssistant: b\n\nAssistant: c\n\nHuman: d\n\nAssistant: "
    _, record = formats.convert({"chosen": text + "e", "rejected": text + "f"})
    assert record.prompt == [user("a"), assistant("b"), assistant("c"), user("d")]


APART = "chosen and rejected part before the last turn"
SET_ASIDE = {
    "they part at the first answer": (dialogue("a", "b", "c", "d"), dialogue("a", "x", "c", "d"), APART),
    "they part at a question": (dialogue("a", "b", "c", "d"), dialogue("a", "b", "x", "d"), APART),
    "one goes on": (dialogue("a", "b", "c", "d"), dialogue("a", "b"), APART),
    "no answer chosen": (dialogue("a", ""), dialogue("a", "b"), "chosen is an empty answer"),
    "no answer rejected": (dialogue("a", "b"), dialogue("a", "").rstrip(), "rejected is an empty answer"),
    "blank answer": (dialogue("a", " \n"), dialogue("a", "b"), "chosen is an empty answer"),
    "ends with a question": (dialogue("a", "b", "c"), dialogue("a", "b", "d"), "chosen does not end with an assistant"),
    "only a question": (dialogue("a", "b"), dialogue("a"), "rejected does not end with an assistant turn"),
    "no question": (dialogue("", "b"), dialogue("", "c"), "the prompt is empty"),
    "an empty turn": (dialogue("a", "", "c", "d"), dialogue("a", "", "c", "e"), "an empty answer stands"),
    "an empty question": (dialogue("a", "b", "", "d"), dialogue("a", "b", "", "e"), "an empty user turn"),
    "nothing but an answer": ("\n\nAssistant: a", "\n\nAssistant: b", "the dialogue has no Human turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", SET_ASIDE)
def test_odd_dialogues_that_cannot_be_used_have_a_reason(name):
    chosen, rejected, reason = SET_ASIDE[name]
    with pytest.raises(formats.BadRow, match=reason):
        formats.convert({"chosen": chosen, "rejected": rejected})


def test_every_odd_row_is_in_the_ledger(tmp_path, monkeypatch):
    rows = [{"chosen": a, "rejected": b} for (a, b), _ in ODD.values()]
    rows += [{"chosen": a, "rejected": b} for a, b, _ in SET_ASIDE.values()]
    rows += [{"chosen": dialogue("same", "s"), "rejected": dialogue("same ", "s ")}]
    source, out = tmp_path / "odd.jsonl", tmp_path / "data"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(monkeypatch, "--dataset", source, "--on_bad_row", "skip", "--output_dir", out) == 0
    (entry,) = sources_of(out)
    aside = sum(reason["rows"] for reason in entry["set_aside"].values())
    assert (entry["rows"], sum(entry["used"].values()), aside) == (len(rows), len(ODD), len(SET_ASIDE) + 1)
    assert entry["set_aside"][APART]["rows"] == 3


# ---- 800 real rows


def split_plainly(text: str) -> list[tuple[str, str]]:
    """The obvious reading of a dialogue, by other means than the program's: cut at "\\n\\nHuman: ", then each piece."""
    turns = []
    for piece in text.split("\n\nHuman: ")[1:]:
        question, *answers = piece.split("\n\nAssistant: ")
        turns += [("user", question), *(("assistant", answer) for answer in answers)]
    return [(role, content.strip()) for role, content in turns]


def test_800_real_rows_are_read_as_the_obvious_reading_has_them(tmp_path, monkeypatch):
    folder = os.environ.get("RLHF_TEST_DATA")
    if not folder:
        pytest.skip("RLHF_TEST_DATA is unset: no folder of outside data to read")
    source, out = Path(folder) / "hh_harmless_800.jsonl.gz", tmp_path / "data"
    if not source.exists():
        pytest.skip("hh_harmless_800.jsonl.gz is not in RLHF_TEST_DATA")
    assert run(monkeypatch, "--dataset", source, "--on_bad_row", "skip", "--output_dir", out) == 0

    wanted, bad = {stage: [] for stage in STAGES}, []
    with gzip.open(source, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            chosen, rejected = (split_plainly(json.loads(line)[side]) for side in ("chosen", "rejected"))
            *prompt, better = chosen
            *same, worse = rejected
            if prompt != same or prompt[-1][0] != "user" or not better[1] or not worse[1] or better == worse:
                bad.append(number)
                continue
            wanted["sft"].append((*prompt, better))
            wanted["preference"].append((tuple(prompt), better, worse))
            wanted["prompts"].append(tuple(prompt))
    assert number == 800

    def pairs(messages):
        return tuple((message["role"], message["content"]) for message in messages)

    found = {stage: rows_of(out, "train")[stage] + rows_of(out, "eval")[stage] for stage in STAGES}
    read = {
        "sft": [pairs(row["messages"]) for row in found["sft"]],
        "preference": [(pairs(r["prompt"]), *pairs(r["chosen"]), *pairs(r["rejected"])) for r in found["preference"]],
        "prompts": [pairs(row["prompt"]) for row in found["prompts"]],
    }
    for stage in STAGES:
        assert set(read[stage]) <= set(wanted[stage]) and len(read[stage]) > 100
    (entry,) = sources_of(out)
    places = [int(reason["first"].split()[-1]) for reason in entry["set_aside"].values()]
    assert sum(map(len, read.values())) == 800 - len(bad) and set(places) <= set(bad)
    assert sum(reason["rows"] for reason in entry["set_aside"].values()) == len(bad)


# ---- the hub

CASES = """
import contextlib, io, json, os, runpy, sys
found = {}
for name in sys.argv[2:]:
    error = io.StringIO()
    sys.argv = [sys.argv[0], "--dataset", name, "--output_dir", "data"]
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
        except SystemExit as end:
            found[name] = [end.code, error.getvalue(), os.listdir(".")]
print(json.dumps(found))
"""


def environment(folder: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | changes


def try_names(folder: Path, names: list[str], **changes: str) -> dict[str, tuple[int, str, list[str]]]:
    """{name: exit code, stderr, what lies in the working folder} of step 0 on each, in one process."""
    (folder / "work").mkdir()
    changes |= {"SCRIPT": str(ROOT / "step0_data/prepare.py")}
    words = [sys.executable, "-c", CASES, "", *names]
    done = subprocess.run(
        words, cwd=folder / "work", env=environment(folder, **changes), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
MESSAGES = {
    "someone/missing": "the hub has no data set of that name, or a private one; check the spelling",
    "Anthropic/hh-rlfh": "the hub has no data set of that name, or a private one; check the spelling",
    "someone/private": f"or a private one; check the spelling; if private, {LOG_IN}",
    "someone/gated": "on the hub it is gated; accept its terms at http://127.0.0.1:",
    "someone/readable": f"/datasets/someone/readable and {LOG_IN}",
    "someone/forbidden": "the hub forbids it (403); use a token that may read it",
    "someone/broken": "the hub answers 500; try again later, or download its files elsewhere and give their folder",
    "Anthropic/hh-rlhf:harmles-base": "Anthropic/hh-rlhf has no configuration or folder 'harmles-base'; it has",
    "Anthropic/hh-rlhf@tset": "Should be one of ['train', 'test'].); write NAME[:CONFIG or FOLDER][@SPLIT]",
    "someone/parts": "someone/parts: which split? it has one, two; write someone/parts@one",
    "someone/empty": "the hub cannot give it",
}  # fmt: skip


@pytest.mark.slow
def test_what_the_hub_refuses_is_told_in_one_line_and_leaves_nothing(tmp_path):
    card = b"---\nconfigs:\n- config_name: default\n  data_files:\n"
    card += b"".join(b"  - split: %b\n    path: %b.jsonl\n" % (x, x) for x in (b"one", b"two")) + b"---\n"
    row = json.dumps(pair("q")).encode() + b"\n"
    sets = {
        "Anthropic/hh-rlhf": repository(),
        "someone/readable": repository(),
        "someone/parts": {"README.md": card, "one.jsonl": row, "two.jsonl": row},
        "someone/empty": {"README.md": b"nothing here"},
    }
    with small_hub.serve(sets, gated_files=("someone/readable",)) as endpoint:
        found = try_names(tmp_path, list(MESSAGES), HF_ENDPOINT=endpoint)
    for name, message in MESSAGES.items():
        code, error, left = found[name]
        assert code == 2 and left == [], (name, error)
        assert error.startswith(f"error: {name.partition(':')[0].partition('@')[0]}"), error
        assert error.count("\n") == 1 and message in error, error


@pytest.mark.slow
def test_a_hub_out_of_reach_is_told_in_one_line_and_leaves_nothing(tmp_path):
    with socket.socket() as probe:  # bound and not listening: connections are refused
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
        name = "Anthropic/hh-rlhf:harmless-base"
        (tmp_path / "refused").mkdir()
        found = {"refused": try_names(tmp_path / "refused", [name], HF_ENDPOINT=endpoint)[name]}
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        (tmp_path / variable).mkdir()
        found[variable] = try_names(tmp_path / variable, [name], **{variable: "1"})[name]
    by_hand = "or download its files elsewhere and give their folder"
    for why, (code, error, left) in found.items():
        assert code == 2 and left == [] and error.count("\n") == 1, (why, error)
        assert error.startswith(f"error: {name}: no such file or folder here, and the hub ") and by_hand in error
    assert f"the hub at {endpoint} cannot be reached" in found["refused"][1]
    assert "check the network and HF_ENDPOINT, set HF_HUB_OFFLINE=1 to take what its cache" in found["refused"][1]
    assert "is switched off by HF_HUB_OFFLINE and its cache lacks it" in found["HF_HUB_OFFLINE"][1]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["Anthropic/hh-rlhf --data_dir harmless-base", "Anthropic/hh-rlhf:harmless-base"])
def test_the_hub_gives_what_a_copy_gives(copy, tmp_path, monkeypatch, words):
    command = [sys.executable, ROOT / "step0_data/prepare.py", "--dataset", *words.split(), "--output_dir", "data"]
    with small_hub.serve({"Anthropic/hh-rlhf": repository()}) as endpoint:
        env = environment(tmp_path, HF_ENDPOINT=endpoint)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert run(monkeypatch, "--dataset", copy / "harmless-base", "--output_dir", tmp_path / "local") == 0
    for part in ("train", "eval"):
        assert rows_of(tmp_path / "data", part) == rows_of(tmp_path / "local", part)
    (entry,) = sources_of(tmp_path / "data")
    assert entry["source"] == "Anthropic/hh-rlhf:harmless-base" and entry["rows"] == 36 and entry["own_split"]


@pytest.mark.slow
def test_a_configuration_comes_before_a_folder_of_its_name_and_at_names_a_split(tmp_path):
    files = {
        f"{name}-{part}.jsonl": packed_plainly(f"{name} {part}") for name in ("a", "b") for part in ("train", "test")
    }
    files["a/train.jsonl"] = packed_plainly("of the folder")
    card = "---\nconfigs:\n"
    for name in ("a", "b"):
        card += f"- config_name: {name}\n  data_files:\n"
        card += "".join(f"  - split: {part}\n    path: {name}-{part}.jsonl\n" for part in ("train", "test"))
    a, b = ({"hi a train"}, {"hi a test"}), ({"hi b test"}, set())

    def prepare_it(source: str, name: str, **changes) -> tuple[set, set]:
        words = ["--dataset", source, "--eval_fraction", "0", "--output_dir", tmp_path / name]
        command = [sys.executable, ROOT / "step0_data/prepare.py", *words]
        env = environment(tmp_path, **changes)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return texts_of(tmp_path / name, "train"), texts_of(tmp_path / name, "eval")

    with small_hub.serve({"some/set": files | {"README.md": f"{card}---\n".encode()}}) as endpoint:
        assert prepare_it("some/set:a", "first", HF_ENDPOINT=endpoint) == a
        assert prepare_it("some/set:b@test", "second", HF_ENDPOINT=endpoint) == b
    assert prepare_it("some/set:a", "third", HF_HUB_OFFLINE="1") == a, "from the hub's cache"


def packed_plainly(question: str) -> bytes:
    return json.dumps(pair(question)).encode() + b"\n"
