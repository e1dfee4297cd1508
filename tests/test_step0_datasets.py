"""Step 0 end to end: every form in every kind of file, and the data sets that DeepSpeed-Chat names, in small copies."""

import csv
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common import cli
from step0_data import dataset_info, formats, prepare


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


Q, A, B = [user("How are you?\n你好 🎉")], [assistant('Well, "thanks"\n')], [assistant("No")]
Q_TEXT, A_TEXT, B_TEXT = Q[0]["content"], A[0]["content"], B[0]["content"]
PAIR = {"prompt": Q, "chosen": A, "rejected": B}
SHARE = [{"from": "human", "value": Q_TEXT}]

# (form, is it flat, row, stage, what the stage's file holds)
TABLE = {
    "hh": (
        "preference",
        True,
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: Q\n\nAssistant: A",
            "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: Q\n\nAssistant: B",
        },
        "preference",
        {
            "prompt": [user("hi"), assistant("hello"), user("Q")],
            "chosen": [assistant("A")],
            "rejected": [assistant("B")],
        },
    ),
    "pair of strings": (
        "preference",
        True,
        {"prompt": Q_TEXT, "chosen": A_TEXT, "rejected": B_TEXT},
        "preference",
        PAIR,
    ),
    "pair with a margin": (
        "preference",
        True,
        {"prompt": Q_TEXT, "chosen": A_TEXT, "rejected": B_TEXT, "margin": 1.5},
        "preference",
        PAIR | {"margin": 1.5},
    ),
    "pair of messages": ("preference", False, {"prompt": Q, "chosen": A, "rejected": B}, "preference", PAIR),
    "implicit pair of messages": ("preference", False, {"chosen": Q + A, "rejected": Q + B}, "preference", PAIR),
    "sharegpt pair": (
        "preference",
        False,
        {
            "conversations": SHARE,
            "chosen": {"from": "gpt", "value": A_TEXT},
            "rejected": {"from": "gpt", "value": B_TEXT},
        },
        "preference",
        PAIR,
    ),
    "ultrafeedback": (
        "scored",
        False,
        {
            "instruction": Q_TEXT,
            "completions": [{"response": B_TEXT, "overall_score": 1.0}, {"response": A_TEXT, "overall_score": 4.5}],
        },
        "preference",
        PAIR | {"margin": 3.5},
    ),
    "responses and ranks": (
        "scored",
        False,
        {"prompt": Q_TEXT, "responses": [B_TEXT, A_TEXT], "ranks": [2, 1]},
        "preference",
        PAIR,
    ),
    "webgpt": (
        "webgpt",
        True,
        {"question": Q_TEXT, "answer_0": B_TEXT, "answer_1": A_TEXT, "score_0": -0.5, "score_1": 0.5},
        "preference",
        PAIR | {"margin": 1.0},
    ),
    "shp": (
        "shp",
        True,
        {"history": Q_TEXT, "human_ref_A": A_TEXT, "human_ref_B": B_TEXT, "labels": 1, "score_A": 9, "score_B": 2},
        "preference",
        PAIR,
    ),
    "unpaired": ("unpaired", True, {"prompt": Q_TEXT, "completion": A_TEXT, "label": True}, "sft", {"messages": Q + A}),
    "kto_tag": ("unpaired", False, {"messages": Q + A, "kto_tag": True}, "sft", {"messages": Q + A}),
    "messages": ("messages", False, {"messages": Q + A + Q + B}, "sft", {"messages": Q + A + Q + B}),
    "messages in parts": (
        "messages",
        False,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": Q_TEXT}]}]
         + [{"role": "assistant", "content": [{"type": "text", "text": A_TEXT}]}]},
        "sft",
        {"messages": Q + A},
    ),
    "sharegpt with a tool": (
        "sharegpt",
        False,
        {
            "conversations": [
                *SHARE,
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": A_TEXT},
            ],
            "system": "S",
        },
        "sft",
        {
            "messages": [
                {"role": "system", "content": "S"},
                *Q,
                assistant('{"name": "f", "arguments": {}}'),
                {"role": "tool", "content": "1"},
                *A,
            ]
        },
    ),
    "tool calls": (
        "messages",
        False,
        {
            "messages": [
                {"role": "user", "content": Q_TEXT, "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ]
        },
        "sft",
        {"messages": [*Q, assistant('{"name": "f", "arguments": {}}')]},
    ),
    "completion": ("completion", True, {"prompt": Q_TEXT, "completion": A_TEXT}, "sft", {"messages": Q + A}),
    "completion of messages": ("completion", False, {"prompt": Q, "completion": A}, "sft", {"messages": Q + A}),
    "alpaca": (
        "alpaca",
        True,
        {"instruction": Q_TEXT, "input": "", "output": A_TEXT},
        "sft",
        {"messages": Q + A},
    ),
    "alpaca, all columns": (
        "alpaca",
        False,
        {"instruction": "Q", "input": "x", "output": A_TEXT, "system": "S", "history": [["q", "a"]]},
        "sft",
        {"messages": [{"role": "system", "content": "S"}, user("q"), assistant("a"), user("Q\nx"), *A]},
    ),
    "hc3": (
        "hc3",
        False,
        {"question": Q_TEXT, "human_answers": [A_TEXT, "x"], "chatgpt_answers": [B_TEXT]},
        "sft",
        {"messages": Q + A},
    ),
    "question": (
        "question",
        True,
        {"question": Q_TEXT, "answer": "so it is\n#### 72"},
        "prompts",
        {"prompt": Q, "answer": "so it is\n#### 72"},
    ),
    "prompt": ("prompt", True, {"prompt": Q_TEXT, "ground_truth": "4"}, "prompts", {"prompt": Q, "ground_truth": "4"}),
    "messages in cells of text": (
        "preference",
        True,
        {name: json.dumps(messages, ensure_ascii=False) for name, messages in PAIR.items()},
        "preference",
        PAIR,
    ),
    "a conversation in a cell of text": (
        "messages",
        True,
        {"messages": json.dumps(Q + A), "source": "x"},
        "sft",
        {"messages": Q + A},
    ),
    "scores beside a pair": (
        "preference",
        True,
        {"input": Q_TEXT, "chosen": A_TEXT, "rejected": B_TEXT, "chosen_score": 9, "rejected_score": 2.5},
        "preference",
        PAIR | {"margin": 6.5},
    ),
    "an answer that is not trained": (
        "messages",
        False,
        {"messages": [*Q, B[0] | {"weight": 0}, *Q, A[0] | {"weight": 1}]},
        "sft",
        {"messages": [it | {"weight": w} for it, w in zip(Q + B + Q + A, (None, 0, None, None), strict=True)]},
    ),
    "the same of a prompt": (
        "preference",
        False,
        {"prompt": [*Q, B[0] | {"train": False}, *Q], "chosen": A, "rejected": B},
        "preference",
        PAIR | {"prompt": Q + B + Q},
    ),
    "a greeting": ("messages", False, {"messages": B + Q + A}, "sft", {"messages": B + Q + A}),
    "tools": (
        "messages",
        False,
        {"messages": Q + A, "tools": [{"name": "f", "parameters": {"properties": {"名": {"type": "string"}}}}]},
        "sft",
        {"messages": Q + A, "tools": '[{"name": "f", "parameters": {"properties": {"名": {"type": "string"}}}}]'},
    ),
    "tools of a prompt": (
        "prompt",
        True,
        {"prompt": Q_TEXT, "tools": '[{"name": "f"}]', "unit": "m"},
        "prompts",
        {"prompt": Q, "tools": '[{"name": "f"}]', "unit": "m"},
    ),
    "an input and no instruction": (
        "alpaca",
        True,
        {"instruction": "", "input": Q_TEXT, "output": A_TEXT},
        "sft",
        {"messages": Q + A},
    ),
    "a solution and a short answer": (
        "question",
        True,
        {"problem": Q_TEXT, "answer": "6", "solution": A_TEXT},
        "sft",
        {"messages": Q + A},
    ),
    "text": ("text", True, {"text": " 从前……\n\n"}, "pretrain", {"text": " 从前……\n\n"}),
}  # fmt: skip


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, words)])
    return cli.run(prepare.main)


def rows_of(folder: Path, stage: str, part: str = "train") -> list[dict]:
    file = folder / stage / f"{part}.parquet"
    return pq.read_table(file).to_pylist() if file.exists() else []


def in_order(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=json.dumps)


def ledger(folder: Path) -> dict:
    (entry,) = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sources"]
    return entry


def test_the_table_has_every_form():
    assert {form for form, *_ in TABLE.values()} == {form.name for form in formats.FORMS}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("name", TABLE)
def test_every_form_in_every_kind_of_file(name, kind, tmp_path, monkeypatch, capsys):
    form, is_flat, row, stage, wanted = TABLE[name]
    if kind == "csv" and not is_flat:
        pytest.skip("a cell of a csv file holds no list")
    source, out = write(tmp_path / f"rows.{kind}", [row]), tmp_path / "data"
    words = ["--dataset", source, "--stages", stage, "--eval_fraction", 0, "--output_dir", out]
    assert run(monkeypatch, *words) == 0
    assert rows_of(out, stage) == [wanted]
    assert f"rows.{kind}: 1 rows read ({form} 1), 1 used" in capsys.readouterr().out
    assert run(monkeypatch, *words, "--overwrite", "--format", form) == 0 and rows_of(out, stage) == [wanted]


# ---- the data sets that DeepSpeed-Chat names, in folders of their names


HH = "\n\nHuman: h {0}\n\nAssistant: i\n\nHuman: {0}\n\nAssistant:"


def turns(question: str) -> list[dict]:
    return [user(f"h {question}"), assistant("i"), user(question)]


def static(question: str) -> dict:
    return {"prompt": HH.format(question), "response": " A.", "chosen": " A.", "rejected": " B [2]."}


def static_pair(question: str) -> dict:
    return {"prompt": turns(question), "chosen": [assistant("A.")], "rejected": [assistant("B [2].")]}


def comparison(question: str, scores: tuple[float, float]) -> dict:
    return {
        "question": {"dataset": "eli5", "id": "x", "full_text": question},
        "quotes_0": {"title": ["t"], "extract": ["e"]},
        "answer_0": "B [1].",
        "tokens_0": {"prefix": [1, 2], "completion": [3]},
        "score_0": scores[0],
        "quotes_1": {"title": [], "extract": []},
        "answer_1": " A (so) [1][2].",
        "tokens_1": {"prefix": [1, 2], "completion": [4]},
        "score_1": scores[1],
    }


def post(title: str, labels: int) -> dict:
    return {
        "post_id": "p", "domain": "askbaking_train", "upvote_ratio": 0.98, "history": title, "c_root_id_A": "a",
        "c_root_id_B": "b", "created_at_utc_A": 1, "created_at_utc_B": 2, "score_A": 5, "score_B": 300,
        "human_ref_A": "one\n\n* way", "human_ref_B": "the other", "labels": labels, "seconds_difference": 1.0,
        "score_ratio": 60.0,
    }  # fmt: skip


def pair(prompt: str, chosen: str, rejected: str, **more) -> dict:
    return {"prompt": [user(prompt)], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)], **more}


def talk(prompt: str, answer: str) -> dict:
    return {"messages": [user(prompt), assistant(answer)]}


ZHIHU = "怎么说服男朋友买烤箱？"
# name: (files, form, stage, train rows, eval rows)
NAMED = {
    "Dahoas/rm-static": (
        {"data/train-00000-of-00001.parquet": [static("q1"), static("q2")], "data/test-0.parquet": [static("q3")]},
        "preference",
        "preference",
        [static_pair("q1"), static_pair("q2")],
        [static_pair("q3")],
    ),
    "Dahoas/full-hh-rlhf": (
        {"data/train-00000-of-00001.parquet": [static("q1")], "data/test-00000-of-00001.parquet": [static("q2")]},
        "preference",
        "sft",
        [{"messages": [*turns("q1"), assistant("A.")]}],
        [{"messages": [*turns("q2"), assistant("A.")]}],
    ),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        {"data/train-00000-of-00001.parquet": [{"prompt": "How?", "chosen": "So. ", "rejected": "No\n"}]},
        "preference",
        "preference",
        [pair("How?", "So. ", "No\n")],
        [],
    ),
    "yitingxie/rlhf-reward-datasets": (
        {
            "data/train-00000-of-00001.parquet": [
                {"prompt": "\n\nHuman: q\n\n", "chosen": "Assistant: A", "rejected": "Assistant: B"},
                {"prompt": "Human: h r Assistant: i Human: r Assistant:", "chosen": " A", "rejected": " B"},
            ],
            "data/test-00000-of-00001.parquet": [
                {
                    "prompt": "\n\nHuman: h s\n\nAssistant: i\n\nHuman: s\n\n",
                    "chosen": "Assistant: A",
                    "rejected": "Assistant: B",
                }
            ],
        },
        "preference",
        "preference",
        [pair("q", "A", "B"), {**pair("q", "A", "B"), "prompt": turns("r")}],
        [{**pair("q", "A", "B"), "prompt": turns("s")}],
    ),
    "openai/webgpt_comparisons": (
        {
            "default/webgpt_comparisons-train.parquet": [
                comparison("Why?", (-0.5, 0.5)),
                comparison("Equal?", (0.0, 0.0)),
            ]
        },
        "webgpt",
        "preference",
        [pair("Why?", " A (so) [1][2].", "B [1].", margin=1.0)],
        [],
    ),
    "stanfordnlp/SHP": (
        {
            "askbaking/train.json": [post("Post 1", 1), post("Post 2", 0)],
            "askbaking/validation.json": [post("Post 3", 0)],
            "askbaking/test.json": [post("Post 4", 1)],
        },
        "shp",
        "preference",
        [pair("Post 1", "one\n\n* way", "the other"), pair("Post 2", "the other", "one\n\n* way")],
        [pair("Post 4", "one\n\n* way", "the other"), pair("Post 3", "the other", "one\n\n* way")],
    ),
    "wangrui6/Zhihu-KOL": (
        {
            "data/train-00000-of-00005-a1706ab6ef0f6b3b.parquet": [
                {
                    "INSTRUCTION": ZHIHU,
                    "RESPONSE": "emmmmm，\n首先。",
                    "SOURCE": "Zhihu",
                    "METADATA": '{"upvotes": "1"}',
                }
            ]
        },
        "alpaca",
        "sft",
        [talk(ZHIHU, "emmmmm，\n首先。")],
        [],
    ),
    "Hello-SimpleAI/HC3-Chinese": (
        {
            "all.jsonl": [
                {"question": "什么是 HC3？", "human_answers": ["人答一。", "人答二。"], "chatgpt_answers": ["机答。"]}
            ]
        },
        "hc3",
        "sft",
        [talk("什么是 HC3？", "人答一。")],
        [],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_copy_of_a_named_data_set_is_converted_by_name(name, tmp_path, monkeypatch):
    files, form, stage, train, held_out = NAMED[name]
    for file, rows in files.items():
        # SHP's .json files hold a row a line.
        path = tmp_path / name / file
        if file.endswith(".json"):
            write(path.with_suffix(".jsonl"), rows).rename(path)
        else:
            write(path, rows)
    monkeypatch.chdir(tmp_path)
    words = ["--dataset", name, "--stages", stage, "--eval_fraction", 0, "--output_dir", "data"]
    assert run(monkeypatch, *words) == 0
    assert in_order(rows_of(Path("data"), stage)) == in_order(train)
    assert in_order(rows_of(Path("data"), stage, "eval")) == in_order(held_out)
    entry = ledger(Path("data"))
    count = sum(map(len, files.values()))
    assert (entry["source"], entry["rows"], entry["forms"]) == (name, count, {form: count})
    aside = {reason: entry["rows"] for reason, entry in entry["set_aside"].items()}
    assert aside == ({"no answer scores better than another": 1} if "webgpt" in name else {})


def test_the_prompts_of_comparisons_leave_the_answers_columns_behind(tmp_path, monkeypatch):
    for number, row in enumerate((comparison("Why?", (-1, 1)), post("Post", 1))):
        source, out = write(tmp_path / f"{number}.jsonl", [row]), tmp_path / f"data{number}"
        words = ["--dataset", source, "--stages", "prompts", "--eval_fraction", 0, "--output_dir", out]
        assert run(monkeypatch, *words) == 0
    assert rows_of(tmp_path / "data0", "prompts") == [{"prompt": [user("Why?")]}]
    kept = {"post_id": "p", "domain": "askbaking_train", "upvote_ratio": 0.98}
    assert rows_of(tmp_path / "data1", "prompts") == [{"prompt": [user("Post")], **kept}]


def test_rm_static_and_hh_are_the_same_dialogues(tmp_path, monkeypatch):
    whole = {side: HH.format("q") + text for side, text in (("chosen", " A."), ("rejected", " B [2]."))}
    sources = [write(tmp_path / "hh.jsonl", [whole]), write(tmp_path / "static.jsonl", [static("q")])]
    words = ("--drop_duplicates", "--stages", "preference", "--output_dir", tmp_path / "data")
    assert run(monkeypatch, "--dataset", *sources, *words) == 0
    entries = json.loads((tmp_path / "data/manifest.json").read_text())["sources"]
    assert [sum(entry["used"].values()) for entry in entries] == [1, 0] and entries[1]["duplicates"] == 1


# ---- what is not used is counted


def test_pictures_stop_the_run_or_are_counted(tmp_path, monkeypatch, capsys):
    rows = [
        {"instruction": "Q", "output": "A", "images": []},
        {"instruction": "<image> What?", "output": "A cat", "images": ["cat.jpg"]},
        {"instruction": "<image> And?", "output": "A dog", "images": ["dog.jpg"]},
    ]
    source, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "data"
    assert run(monkeypatch, "--dataset", source, "--output_dir", out) == 2
    error = capsys.readouterr().err
    assert "rows.jsonl line 2: multimodal: the column images is filled; only text can be trained on" in error
    words = ["--dataset", source, "--on_bad_row", "skip", "--eval_fraction", 0, "--output_dir", out]
    assert run(monkeypatch, *words) == 0
    reason = {"rows": 2, "first": f"{source} line 2"}
    assert ledger(out)["set_aside"] == {"multimodal: the column images is filled": reason}
    assert rows_of(out, "sft") == [talk("Q", "A")]


def test_bad_answers_of_an_unpaired_set_are_counted(tmp_path, monkeypatch):
    rows = [{"prompt": f"Q{i}", "completion": "A", "label": str(i % 3 == 0)} for i in range(9)]
    out = tmp_path / "data"
    source = write(tmp_path / "kto.csv", rows)
    assert run(monkeypatch, "--dataset", source, "--eval_fraction", 0, "--output_dir", out) == 0
    assert rows_of(out, "sft") == [talk(f"Q{i}", "A") for i in (0, 3, 6)]
    assert ledger(out)["forms"] == {"unpaired": 9}
    assert {reason: it["rows"] for reason, it in ledger(out)["set_aside"].items()} == {
        "labelled as a bad answer: it is no demonstration": 6
    }


def test_columns_by_flag(tmp_path, monkeypatch, capsys):
    source, out = write(tmp_path / "rows.csv", [{"问题": "Q", "好": "A", "坏": "B"}]), tmp_path / "data"
    words = ["--dataset", source, "--stages", "preference", "--eval_fraction", 0, "--output_dir", out, "--columns"]
    assert run(monkeypatch, *words, "prompt=问题", "chosen=好", "rejected=坏") == 0
    assert rows_of(out, "preference") == [pair("Q", "A", "B")]
    assert run(monkeypatch, *words, "prompt=题", "--overwrite") == 2
    assert "there is no column 题, which --columns calls prompt; columns seen: 问题, 好, 坏" in capsys.readouterr().err
    assert rows_of(out, "preference") == [pair("Q", "A", "B")]


def test_columns_of_one_source_alone(tmp_path, monkeypatch, capsys):
    one = write(tmp_path / "one.csv", [{"问题": "Q1", "好": "A", "坏": "B"}])
    two = write(tmp_path / "two.jsonl", [{"frage": "Q2", "gut": "A", "schlecht": "B"}])
    three = write(tmp_path / "three.jsonl", [{"prompt": "Q3", "chosen": "A", "rejected": "B"}])
    words = ["--stages", "preference", "--eval_fraction", 0, "--output_dir", tmp_path / "data", "--dataset"]
    own = f"{two}:prompt=frage,chosen=gut,rejected=schlecht@2"
    assert run(monkeypatch, *words, f"{one}:prompt=问题,chosen=好,rejected=坏", own, three) == 0
    found = sorted(row["prompt"][0]["content"] for row in rows_of(tmp_path / "data", "preference"))
    assert found == ["Q1", "Q2", "Q2", "Q3"]
    capsys.readouterr()
    for source, message in (
        (f"{one}:promt=x", "'promt' in 'promt=x' is none of our columns"),
        (f"{one}:prompt=x,", "'' is not OURS=THEIRS"),
        (f"{one}:prompt=題", "there is no column 題, which --columns calls prompt; columns seen: 问题"),
        (f"{tmp_path}/no.csv:prompt=x", "no.csv: no such file"),
    ):
        assert run(monkeypatch, *words, source, "--overwrite") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_the_ledger_counts_tools_and_answers_that_are_not_trained(tmp_path, monkeypatch, capsys):
    rows = [
        {"messages": Q + A, "tools": '[{"name": "f"}]'},
        {"messages": [*Q, B[0] | {"loss": 0}, *Q, *A], "tools": ""},
    ]
    words = ["--dataset", write(tmp_path / "a.jsonl", rows), "--eval_fraction", 0, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, *words) == 0
    entry, printed = ledger(tmp_path / "data"), capsys.readouterr().out
    assert (entry["with_tools"], entry["with_weights"], entry["unread"]) == (1, 1, [])
    assert "1 have definitions of tools" in printed and "1 have answers of weight 0: context, not trained" in printed
    page = (tmp_path / "data/preview.md").read_text()
    assert f"assistant: {B_TEXT}\n" in page and f"assistant: ⟦{A_TEXT}⟧" in page


def test_flags_of_forms_are_not_for_the_tiny_set(tmp_path, monkeypatch, capsys):
    for words in (["--format", "text"], ["--columns", "text=x"]):
        assert run(monkeypatch, *words, "--output_dir", tmp_path / "data") == 2
        assert "tiny stands alone" in capsys.readouterr().err


# ---- real files


def real(name: str) -> Path:
    path = Path(os.environ.get("RLHF_TEST_DATA", "")) / name
    if not os.environ.get("RLHF_TEST_DATA") or not path.is_file():
        pytest.skip(f"RLHF_TEST_DATA names no folder with {name}")
    return path


def read(path: Path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.parametrize("name", ["alpaca_zh_demo.json", "alpaca_en_demo.json"])
def test_every_text_of_alpaca_comes_out_as_it_went_in(name, tmp_path, monkeypatch):
    rows = read(real(name))
    words = ["--on_bad_row", "skip", "--eval_fraction", 0, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, "--dataset", real(name), *words) == 0
    wanted = [
        talk(row["instruction"] + ("\n" + row["input"] if row["input"] else ""), row["output"])
        for row in rows
        if row["output"].strip() and (row["instruction"] + row["input"]).strip()
    ]
    assert rows_of(tmp_path / "data", "sft") == wanted and len(wanted) > 990
    aside = sum(it["rows"] for it in ledger(tmp_path / "data")["set_aside"].values())
    assert ledger(tmp_path / "data")["rows"] == len(rows) == len(wanted) + aside


def test_every_text_of_the_sharegpt_pairs_comes_out_as_it_went_in(tmp_path, monkeypatch):
    rows = read(real("dpo_en_demo.json"))
    words = ["--on_bad_row", "skip", "--stages", "preference", "--eval_fraction", 0, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, "--dataset", real("dpo_en_demo.json"), *words) == 0
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    wanted = [
        {
            "prompt": [{"role": names[turn["from"]], "content": turn["value"]} for turn in row["conversations"]],
            "chosen": [assistant(row["chosen"]["value"])],
            "rejected": [assistant(row["rejected"]["value"])],
        }
        for row in rows
    ]
    found = rows_of(tmp_path / "data", "preference")
    aside = sum(it["rows"] for it in ledger(tmp_path / "data")["set_aside"].values())
    assert all(row in wanted for row in found) and len(found) + aside == 300 and aside < 5


def test_the_answers_of_gsm8k_reach_reward_functions_untouched(tmp_path, monkeypatch):
    rows = read(real("gsm8k_train_2000.jsonl"))
    words = ["--stages", "prompts", "--eval_fraction", 0, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, "--dataset", real("gsm8k_train_2000.jsonl"), *words) == 0
    wanted = [{"prompt": [user(row["question"])], "answer": row["answer"]} for row in rows]
    found = rows_of(tmp_path / "data", "prompts")
    assert found == wanted and len(found) == 2000
    numbers = [row["answer"].rsplit("####", 1)[-1].strip().replace(",", "") for row in found]  # as the README has it
    assert numbers[:3] == ["72", "10", "5"] and all(float(number) == int(number) for number in numbers)


# ---- LLaMA-Factory's registry

INFO = {
    "plain": {"file_name": "plain.json"},
    "renamed": {
        "file_name": "more/renamed.jsonl",
        "columns": {"prompt": "问", "query": "input", "response": "答", "system": "sys", "history": None},
    },
    "renamed_too": {"file_name": "more/renamed.jsonl", "columns": {"prompt": "问", "response": "x"}},
    "pairs": {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"},
    },
    "openai": {
        "file_name": "openai.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "pretrain": {"file_name": "wiki.json", "columns": {"prompt": "body"}},
    "hub": {"hf_hub_url": "some/set", "subset": "zh", "split": "test"},
    "folder": {"hf_hub_url": "some/set", "folder": "data/zh"},
    "script": {"script_url": "belle"},
    "odd tags": {"file_name": "x.json", "formatting": "sharegpt", "tags": {"user_tag": "wizard"}},
    "odd pictures": {"file_name": "x.json", "columns": {"images": "pics"}},
}


@pytest.fixture
def info(tmp_path) -> Path:
    write(tmp_path / "lf/plain.json", [{"instruction": "Q", "input": "", "output": "A"}])
    write(tmp_path / "lf/more/renamed.jsonl", [{"问": "Q", "input": "x", "答": "A", "sys": "S"}])
    turn = {"from": "human", "value": "Q"}
    pairs = [{"talk": [turn], "good": {"from": "gpt", "value": "A"}, "bad": {"from": "gpt", "value": "B"}}]
    write(tmp_path / "lf/pairs.json", pairs)
    talks = [{"messages": [user("Q"), assistant("A")], "label": True}, {"messages": [user("R"), B[0]], "label": False}]
    write(tmp_path / "lf/openai.json", talks)
    write(tmp_path / "lf/wiki.json", [{"body": "从前", "title": "x"}])
    path = tmp_path / "lf/dataset_info.json"
    path.write_text(json.dumps(INFO, ensure_ascii=False), encoding="utf-8")
    return path


SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("name", "form", "stage", "wanted"),
    [
        ("plain", "alpaca", "sft", [talk("Q", "A")]),
        ("renamed", "alpaca", "sft", [{"messages": [SYSTEM, user("Q\nx"), assistant("A")]}]),
        ("pairs", "preference", "preference", [pair("Q", "A", "B")]),
        ("openai", "unpaired", "sft", [talk("Q", "A")]),
        ("pretrain", "text", "pretrain", [{"text": "从前"}]),
    ],
)
def test_an_entry_of_llama_factorys_registry_is_a_source(info, name, form, stage, wanted, tmp_path, monkeypatch):
    words = ["--dataset_info", info, "--dataset", name, "--stages", stage, "--eval_fraction", 0]
    assert run(monkeypatch, *words, "--output_dir", tmp_path / "data") == 0
    assert rows_of(tmp_path / "data", stage) == wanted and list(ledger(tmp_path / "data")["forms"]) == [form]


def test_entries_on_the_hub_become_hub_names(info):
    sources = dataset_info.look_up(str(info), ["hub", "folder@0.5", "other/set"], ["text=x"])
    assert sources == ["some/set:zh@test", "some/set:data/zh@0.5", "other/set"]


def test_entries_with_columns_of_their_own_stand_side_by_side(info, tmp_path, monkeypatch):
    words = ["--dataset_info", info, "--dataset", "plain", "renamed@2", "--eval_fraction", 0]
    assert run(monkeypatch, *words, "--output_dir", tmp_path / "data") == 0
    wanted = [talk("Q", "A"), *[{"messages": [SYSTEM, user("Q\nx"), assistant("A")]}] * 2]
    assert sorted(map(str, rows_of(tmp_path / "data", "sft"))) == sorted(map(str, wanted))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["plian"], "plian: no entry of "),
        (["plian"], "the nearest there: plain"),
        (["script"], "script: its entry has no file_name and no hf_hub_url; download"),
        (["odd tags"], "odd tags: its entry has the tag user_tag 'wizard' (known: user, human, prompter); rename"),
        (["odd pictures"], "odd pictures: its entry has a column of images; only text"),
    ],
)
def test_an_entry_that_cannot_be_followed_is_named(info, names, message, tmp_path, monkeypatch, capsys):
    words = ["--dataset_info", info, "--dataset", *names, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "data").exists()


def test_a_registry_that_is_none_is_named(tmp_path, monkeypatch, capsys):
    for content, message in (
        ("[1]", "wanted an object with an entry"),
        ("{", "cannot be read (Expecting property"),
        ("[" * 100000, "cannot be read (maximum recursion depth"),
        ('{"x": {"file_name": 5}}', "x: its entry has the file_name 5; wanted a string"),
        ('{"x": {"file_name": "a", "columns": ["q"]}}', "x: its entry has the columns ['q']; wanted {name: string}"),
        ('{"x": {"file_name": "a", "tags": {"role_tag": 1}}}', "x: its entry has the tags {'role_tag': 1}; wanted"),
        ('{"x": {"file_name": "a.jsonl", "tags": null}}', "a.jsonl: no such file"),
    ):
        (tmp_path / "info.json").write_text(content)
        assert run(monkeypatch, "--dataset_info", tmp_path / "info.json", "--dataset", "x") == 2
        assert message in capsys.readouterr().err
