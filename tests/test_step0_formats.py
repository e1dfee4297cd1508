"""Record forms: each known layout gives the right conversation, and each kind of bad row says what is wrong."""

import collections
import itertools
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from step0_data import columns, files, formats, prepare


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def sharegpt(*turns):
    return [{"from": name, "value": text} for name, text in turns]


Q, A, B = [user("Q")], [assistant("A")], [assistant("B")]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "上海", "days": 1.0}'}}
TIME = {"id": "c2", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}

# name: (row, form, prompt, answer, rejected, extra)
GOOD = {
    "pair of strings": ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "preference", Q, A, B, {}),
    "pair of messages": ({"prompt": Q, "chosen": A, "rejected": B, "id": 7}, "preference", Q, A, B, {"id": 7}),
    "implicit prompt, messages": ({"chosen": Q + A, "rejected": Q + B}, "preference", Q, A, B, {}),
    "implicit prompt, equal": ({"chosen": Q + A, "rejected": Q + A}, "preference", Q, A, A, {}),
    "implicit prompt, plain text": (
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        "preference",
        [user("The sky is")],
        [assistant("blue.")],
        [assistant("green.")],
        {},
    ),
    "prompt repeated in messages": ({"prompt": "Q", "chosen": Q + A, "rejected": Q + B}, "preference", Q, A, B, {}),
    "ultrafeedback": (
        {"prompt": "Q", "messages": Q + A, "chosen": Q + A, "rejected": Q + B, "score_chosen": 8.0},
        "preference",
        Q,
        A,
        B,
        {"score_chosen": 8.0},
    ),
    "hh": (
        {"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"},
        "preference",
        Q,
        A,
        B,
        {},
    ),
    "hh, several turns": (
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: Q\nmore\n\nAssistant: A",
            "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: Q\nmore\n\nAssistant: B",
        },
        "preference",
        [user("hi"), assistant("hello"), user("Q\nmore")],
        A,
        B,
        {},
    ),
    "hh with a prompt": (
        {"prompt": "\n\nHuman: Q\n\nAssistant:", "chosen": "A", "rejected": "B"},
        "preference",
        Q,
        A,
        B,
        {},
    ),
    "sharegpt pair": (
        {
            "conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        "preference",
        [{"role": "system", "content": "S"}, *Q],
        A,
        B,
        {},
    ),
    "alpaca pair": (
        {"instruction": "Q", "input": "x", "chosen": "A", "rejected": "B"},
        "preference",
        [user("Q\nx")],
        A,
        B,
        {},
    ),
    "openai pair: messages without the answer": (
        {"messages": [system("S"), *Q], "chosen": A[0], "rejected": B[0]},
        "preference",
        [system("S"), *Q],
        A,
        B,
        {},
    ),
    "sharegpt pair of strings": (
        {"conversations": sharegpt(("human", "Q")), "chosen": " A", "rejected": "B\n", "system": "S"},
        "preference",
        [system("S"), *Q],
        [assistant(" A")],
        [assistant("B\n")],
        {},
    ),
    "rejected_response": ({"query": "Q", "chosen": "A", "rejected_response": "B"}, "preference", Q, A, B, {}),
    "an open dialogue and the rest of it": (
        {"prompt": "\n\nHuman: h\n\nAssistant: i\n\nHuman: Q\n\nAssistant:", "chosen": " A\n", "rejected": " B"},
        "preference",
        [user("h"), assistant("i"), *Q],
        A,
        B,
        {},
    ),
    "an open dialogue in one line": (
        {"prompt": " Human: h Assistant: i Human: Q Assistant:", "chosen": "A", "rejected": "B"},
        "preference",
        [user("h"), assistant("i"), *Q],
        A,
        B,
        {},
    ),
    "names in one line that do not alternate are text": (
        {"prompt": "Human: a Human: b Assistant:", "chosen": " A", "rejected": "B"},
        "preference",
        [user("Human: a Human: b Assistant:")],
        [assistant(" A")],
        B,
        {},
    ),
    "names inside a text are text": (
        {"prompt": "Say Human: hi Assistant:", "chosen": "A", "rejected": "B"},
        "preference",
        [user("Say Human: hi Assistant:")],
        A,
        B,
        {},
    ),
    "the name at the head of both answers": (
        {"prompt": "\n\nHuman: Q\n\n", "chosen": "Assistant: A", "rejected": "Assistant: B"},
        "preference",
        Q,
        A,
        B,
        {},
    ),
    "the same in one line": (
        {"prompt": "Human: h Assistant: i Human: Q ", "chosen": "Assistant: A", "rejected": "Assistant: B"},
        "preference",
        [user("h"), assistant("i"), *Q],
        A,
        B,
        {},
    ),
    "the name at the head of one answer is text": (
        {"prompt": "Q", "chosen": "Assistant: A", "rejected": "B"},
        "preference",
        Q,
        [assistant("Assistant: A")],
        B,
        {},
    ),
    "ultrafeedback, four answers": (
        {
            "source": "evol",
            "instruction": "Q",
            "models": ["m1", "m2", "m3", "m4"],
            "completions": [
                {"model": "m1", "response": "C", "overall_score": 6.0},
                {"model": "m2", "response": "A", "overall_score": 8.5},
                {"model": "m3", "response": "B", "overall_score": 2.0},
                {"model": "m4", "response": "", "overall_score": None},
            ],
        },
        "scored",
        Q,
        A,
        B,
        {"source": "evol", "models": ["m1", "m2", "m3", "m4"]},
    ),
    "responses and scores": (
        {"prompt": Q, "responses": ["B", "A", "C"], "scores": ["1", "3", "2"]},
        "scored",
        Q,
        A,
        B,
        {},
    ),
    "the first of equals": ({"question": "Q", "answers": ["A", "C", "B"], "scores": [2, 2, 1]}, "scored", Q, A, B, {}),
    "ratings with gaps": (
        {"instruction": "Q", "input": "x", "generations": ["C", "A", "B"], "ratings": ["N/A", "4", "2"]},
        "scored",
        [user("Q\nx")],
        A,
        B,
        {},
    ),
    "ranks: 1 is the best": (
        {"messages": Q, "responses": ["C", "B", "A"], "ranks": [2, 3, 1]},
        "scored",
        Q,
        A,
        B,
        {},
    ),
    "nectar": (
        {
            "prompt": "\n\nHuman: Q\n\nAssistant: ",
            "answers": [{"answer": "A", "rank": 1.0}, {"answer": "C", "rank": 2.0}, {"answer": " B", "rank": 7.0}],
            "turns": 1,
        },
        "scored",
        Q,
        A,
        B,
        {"turns": 1},
    ),
    "answers without scores are references": (
        {"question": "Q", "answers": ["A", "B"]},
        "prompt",
        Q,
        None,
        None,
        {"answers": ["A", "B"]},
    ),
    "question pair": ({"question": "Q", "chosen": "A", "rejected": "B"}, "preference", Q, A, B, {}),
    "messages": ({"messages": Q + A}, "messages", Q, A, None, {}),
    "messages win over prompt": (
        {"prompt": "Q", "prompt_id": "1", "messages": Q + A},
        "messages",
        Q,
        A,
        None,
        {"prompt_id": "1"},
    ),
    "messages with parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, *A]},
        "messages",
        Q,
        A,
        None,
        {},
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S"},
        "sharegpt",
        [{"role": "system", "content": "S"}, *Q],
        A,
        None,
        {},
    ),
    "sharegpt with tools": (
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": "f()"},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "A"},
            ]
        },
        "sharegpt",
        [*Q, assistant("f()"), {"role": "tool", "content": "1"}],
        A,
        None,
        {},
    ),
    "sharegpt with a function call as the answer": (
        {"conversations": sharegpt(("human", "Q"), ("function_call", '{"name": "f", "arguments": {}}')), "tools": "[]"},
        "sharegpt",
        Q,
        [assistant('{"name": "f", "arguments": {}}')],
        None,
        {},
    ),
    "tool calls are JSON in the assistant's turn": (
        {
            "messages": [
                {"role": "developer", "content": "S"},
                *Q,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                *A,
            ]
        },
        "messages",
        [
            system("S"),
            *Q,
            assistant('{"name": "weather", "arguments": {"city": "上海", "days": 1.0}}'),
            tool("rain"),
        ],
        A,
        None,
        {},
    ),
    "two calls and a text": (
        {"messages": [*Q, {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, TIME]}]},
        "messages",
        Q,
        [
            assistant(
                'Let me see.\n[{"name": "weather", "arguments": {"city": "上海", "days": 1.0}}, '
                '{"name": "time", "arguments": {"zone": "UTC"}}]'
            )
        ],
        None,
        {},
    ),
    "the old function_call; arguments that are no JSON": (
        {"messages": [*Q, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "x=1"}}]},
        "messages",
        Q,
        [assistant('{"name": "f", "arguments": "x=1"}')],
        None,
        {},
    ),
    "messages of a parquet file, with the keys of all rows": (
        {
            "messages": [
                {"role": "user", "content": "Q", "tool_calls": None, "from": None, "value": None},
                {"role": None, "content": None, "tool_calls": [], "from": "gpt", "value": "A"},
            ],
            "images": None,
        },
        "messages",
        Q,
        A,
        None,
        {"images": None},
    ),
    "parts of text": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "input_text", "text": " more"}]},
                *A,
            ]
        },
        "messages",
        [user("Q more")],
        A,
        None,
        {},
    ),
    "completion": ({"prompt": "Q", "completion": "A"}, "completion", Q, A, None, {}),
    "completion, messages": ({"prompt": Q, "completion": A}, "completion", Q, A, None, {}),
    "labelled good": ({"prompt": "Q", "completion": "A", "label": True}, "unpaired", Q, A, None, {}),
    "labelled good, as numbers of a file with gaps": (
        {"prompt": "Q", "completion": "A", "kto_tag": 1.0},
        "unpaired",
        Q,
        A,
        None,
        {},
    ),
    "messages with kto_tag": ({"messages": Q + A, "kto_tag": True, "n": 1}, "unpaired", Q, A, None, {"n": 1}),
    "messages with label": ({"messages": Q + A, "label": True}, "unpaired", Q, A, None, {}),
    "messages with another kind of label": (
        {"messages": Q + A, "label": "sport"},
        "messages",
        Q,
        A,
        None,
        {"label": "sport"},
    ),
    "sharegpt with kto_tag": (
        {"conversations": sharegpt(("human", "Q"), ("gpt", "A")), "kto_tag": "True"},
        "unpaired",
        Q,
        A,
        None,
        {},
    ),
    "alpaca with kto_tag": (
        {"instruction": "Q", "input": "x", "output": "A", "kto_tag": True},
        "unpaired",
        [user("Q\nx")],
        A,
        None,
        {},
    ),
    "alpaca": ({"instruction": "Q", "input": "", "output": "A"}, "alpaca", Q, A, None, {}),
    "alpaca, all columns": (
        {"instruction": "Q", "input": "x", "output": "A", "system": "S", "history": [["q", "a"]]},
        "alpaca",
        [{"role": "system", "content": "S"}, user("q"), assistant("a"), user("Q\nx")],
        A,
        None,
        {},
    ),
    "question and answer": (
        {"question": "Q", "answer": "A", "level": 2},
        "question",
        Q,
        A,
        None,
        {"answer": "A", "level": 2},
    ),
    "a number as the answer": (
        {"Question ": "Q", "Answer": 72},
        "question",
        Q,
        [assistant("72")],
        None,
        {"answer": 72},
    ),
    "columns in capitals": (
        {"INSTRUCTION": "Q", "RESPONSE": "A", "SOURCE": "s"},
        "alpaca",
        Q,
        A,
        None,
        {"SOURCE": "s"},
    ),
    "problem and solution": ({"problem": "Q", "solution": "A"}, "question", Q, A, None, {"solution": "A"}),
    "prompt": ({"prompt": "Q"}, "prompt", Q, None, None, {}),
    "prompt with a reference": (
        {"prompt": Q, "answer": "4", "unit": "m"},
        "prompt",
        Q,
        None,
        None,
        {"answer": "4", "unit": "m"},
    ),
    "question only": ({"question": "Q"}, "prompt", Q, None, None, {}),
    "nulls are absent columns": (
        {"messages": None, "prompt": "", "instruction": "Q", "input": None, "output": "A", "chosen": None},
        "alpaca",
        Q,
        A,
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_known_forms(name):
    row, form_name, prompt, answer, rejected, extra = GOOD[name]
    form, record = formats.convert(row)
    assert form.name == form_name
    assert (record.prompt, record.answer, record.rejected) == (prompt, answer, rejected)
    assert record.set_aside is None
    if extra is not None:
        assert record.extra == extra


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "Q", "completion": "A"}, "completion"),
        ({"prompt": "Q", "completion": "A", "label": True}, "unpaired"),
        ({"prompt": Q, "completion": A}, "completion"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "preference"),
        ({"question": "Q", "chosen": "A", "rejected": "B"}, "preference"),
        ({"chosen": Q + A, "rejected": Q + B}, "preference"),
        ({"prompt": "\n\nHuman: Q\n\nAssistant:", "chosen": "A", "rejected": "B"}, "preference"),
        ({"prompt": "Q", "responses": ["A", "B"], "scores": [2, 1]}, "scored"),
        ({"question": "Q", "answer": "A"}, "question"),
        ({"question": "Q", "human_answers": ["A"]}, "hc3"),
        ({"prompt": "Q"}, "prompt"),
    ],
)
@pytest.mark.parametrize("column", ["system", "System", "system_prompt"])
def test_a_system_text_stands_in_front_of_every_prompt(row, form, column):
    found, record = formats.convert(row | {column: "S"})
    assert found.name == form and record.prompt == [system("S"), *Q] and "system" not in record.extra
    assert record.answer in (A, None) and record.rejected in (B, None)
    assert formats.convert(row | {column: ""})[1].prompt == Q  # as a csv has it


def test_the_context_of_dolly_is_its_input():
    row = {"instruction": "Q", "context": "x", "response": "A", "category": "closed_qa"}
    form, record = formats.convert(row)
    assert form.name == "alpaca" and record.prompt == [user("Q\nx")] and record.answer == A
    assert formats.convert(row | {"context": ""})[1].prompt == Q
    assert formats.convert(row | {"input": "y"})[1].prompt == [user("Q\ny")]


def test_a_history_stands_in_front_of_a_prompt():
    row = {"prompt": "Q", "response": "A", "history": [["q", "a"]]}  # as ChatGLM's own recipe has it
    _, record = formats.convert(row | {"system": "S"})
    assert record.prompt == [system("S"), user("q"), assistant("a"), *Q] and record.answer == A
    _, record = formats.convert({"prompt": "Q", "chosen": "A", "rejected": "B", "history": [["q", "a"]]})
    assert record.prompt == [user("q"), assistant("a"), *Q]
    assert formats.convert(row | {"history": []})[1].prompt == Q
    with pytest.raises(formats.BadRow, match="history is no list of pairs of strings"):
        formats.convert(row | {"history": "q a"})


def test_plain_text_is_for_pretraining():
    form, record = formats.convert({"text": "Once upon a time  \n"})
    assert (form.name, form.feeds, record.text) == ("text", ("pretrain",), "Once upon a time  \n")


def test_a_margin_is_kept_as_a_number():
    assert formats.convert({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": 2})[1].margin == 2.0


@pytest.mark.parametrize(
    ("row", "margin"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, None),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": "2.5"}, 2.5),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": ""}, None),
        ({"prompt": "Q", "responses": ["A", "B", "C"], "scores": [3, 0.5, 1]}, 2.5),
        ({"prompt": "Q", "completions": [{"text": "A", "score": -1}, {"text": "B", "score": -4}]}, 3.0),
        ({"prompt": "Q", "responses": ["A", "B", "C"], "ranks": [1, 3, 2]}, None),  # by how much, nobody said
    ],
)
def test_the_margin_is_the_difference_of_the_scores(row, margin):
    form, record = formats.convert(row)
    assert (record.answer, record.rejected, record.margin) == (A, B, margin)


def test_equal_scores_are_set_aside():
    for row in (
        {"prompt": "Q", "responses": ["A", "B"], "scores": [1, 1.0]},
        {"prompt": "Q", "completions": [{"response": "A", "rank": 1}, {"response": "B", "rank": 1}]},
        {"question": "Q", "answer_0": "A", "answer_1": "B", "score_0": 0.0, "score_1": 0.0},
    ):
        assert formats.convert(row)[1].set_aside == "no answer scores better than another"


def test_scores_beside_a_pair_are_believed():
    pair = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    for scores, margin in (
        ({"score_chosen": 9, "score_rejected": "2"}, 7.0),
        ({"chosen-rating": 4.5, "rejected-rating": 4}, 0.5),
        ({"chosen_avg_rating": 2, "rejected_avg_rating": 1, "margin": 0.25}, 0.25),
        ({"chosen_rank": 1, "rejected_rank": 3}, None),
        ({"score_chosen": None, "score_rejected": None}, None),
        ({"score_chosen": 1}, None),
    ):
        record = formats.convert(pair | scores)[1]
        assert (record.answer, record.rejected, record.margin, record.set_aside) == (A, B, margin, None)
        assert scores.keys() - {"margin"} <= record.read  # the ledger does not call them unread
    for scores, reason in (
        ({"score_chosen": 7, "score_rejected": 7.0}, "chosen and rejected have the same score"),
        ({"chosen_score": 1, "rejected_score": 8}, "by its score the rejected answer is the better one"),
        ({"chosen_rank": 3, "rejected_rank": 1}, "by its rank the rejected answer is the better one"),
        ({"margin": -6}, "its margin is negative: the rejected answer is the better one"),
        ({"margin": "-0.5"}, "its margin is negative: the rejected answer is the better one"),
    ):
        assert formats.convert(pair | scores)[1].set_aside == reason


WRONG = "A first try."
TRIED = [user("Q"), assistant(WRONG), user("Again."), assistant("A")]


@pytest.mark.parametrize("key", ["weight", "loss", "train", "training", "trainable"])
@pytest.mark.parametrize(("off", "on"), [(0, 1), (False, True), (0.0, None)])
def test_an_answer_of_weight_0_is_context(key, off, on):
    context = [user("Q"), assistant(WRONG) | {"weight": 0}, user("Again.")]
    turns = [turn | {key: value} for turn, value in zip(TRIED, (0, off, None, on), strict=True)]
    for row in ({"messages": turns}, {"messages": json.dumps(turns)}, {"prompt": turns[:3], "completion": turns[3:]}):
        record = formats.convert(row)[1]
        assert (record.prompt, record.answer, record.set_aside) == (context, A, None)
        assert record.extra == {} and record.unread == ()
    record = formats.convert({"messages": TRIED, "loss_mask": [0, 0, 0, 1]})[1]
    assert (record.prompt, record.answer, record.extra) == (context, A, {})


def test_rows_of_which_nothing_is_trained_are_set_aside():
    off = [turn | {"weight": 0} for turn in TRIED]
    assert "nothing is to be trained" in formats.convert({"messages": off})[1].set_aside
    assert formats.convert({"messages": [*TRIED[:3], off[3]]})[1].set_aside is None  # the first answer is
    record = formats.convert({"chosen": [*off[:3], *A], "rejected": [*off[:3], *B]})[1]
    assert (len(record.prompt), record.answer, record.rejected, record.set_aside) == (3, A, B, None)
    assert "weight 0" in formats.convert({"prompt": "Q", "chosen": [off[3]], "rejected": B})[1].set_aside


def test_messages_in_a_cell_of_text_are_messages():
    def cell(messages):
        return json.dumps(messages, ensure_ascii=False)

    for row in (
        {"prompt": cell(Q), "chosen": cell(A), "rejected": cell(B)},
        {"chosen": cell(Q + A), "rejected": cell(Q + B)},
        {"question": cell(Q), "chosen": cell(A[0]), "rejected": cell(B[0])},
        {"messages": cell(Q), "chosen": cell(A), "rejected": cell(B)},
        {"conversations": cell(sharegpt(("human", "Q"))), "chosen": cell(A), "rejected": cell(B)},
        {"prompt": cell(Q), "responses": '["B", "A"]', "scores": "[1, 2]"},
    ):
        record = formats.convert(row)[1]
        assert (record.prompt, record.answer, record.rejected) == (Q, A, B)
    for row in (
        {"messages": cell(Q + A)},
        {"conversations": " " + cell(sharegpt(("human", "Q"), ("gpt", "A")))},
        {"prompt": cell(Q), "completion": cell(A)},
        {"query": cell(Q), "response": cell(A)},
        {"prompt": cell(Q), "completion": "A"},
    ):
        record = formats.convert(row)[1]
        assert (record.prompt, record.answer) == (Q, A)
    record = formats.convert({"prompt": cell(Q), "answer": cell(A), "answers": "[1]"})[1]
    assert record.prompt == Q and record.extra == {"answer": cell(A), "answers": "[1]"}  # as they are in the file
    history = {"prompt": "Q", "completion": "A", "history": '[["q", "a"]]'}
    assert formats.convert(history)[1].prompt == [user("q"), assistant("a"), *Q]
    for text in ('[{"role": "admin", "content": "x"}]', '{"name": "x", "role": "user"}', "[1, 2]", '{"content": "x"}'):
        record = formats.convert({"prompt": text, "completion": text})[1]
        assert (record.prompt, record.answer) == ([user(text)], [assistant(text)])


DEFINITION = {"type": "function", "function": {"name": "frost", "parameters": {"properties": {"度": {"minimum": 1.0}}}}}


@pytest.mark.parametrize("row", [{"messages": Q + A}, {"prompt": "Q", "chosen": "A", "rejected": "B"}, {"prompt": "Q"}])
def test_definitions_of_tools_go_with_the_row_as_they_are(row):
    text = json.dumps([DEFINITION], ensure_ascii=False)
    spaced = '[ {"name":"f",  "parameters": {"default": null}} ]'
    for tools, wanted in (
        ({"tools": [DEFINITION]}, text),
        ({"tools": spaced}, spaced),
        ({"tools": DEFINITION}, text),
        ({"tools": [json.dumps(DEFINITION)]}, json.dumps([DEFINITION])),
        ({"functions": [{"name": "f"}]}, '[{"name": "f"}]'),
        ({"Tools": None, "functions": [{"name": "f"}]}, '[{"name": "f"}]'),
        ({"tools": "[]"}, None),
        ({"tools": []}, None),
        ({"tools": ""}, None),
    ):
        record = formats.convert(row | tools)[1]
        assert record.tools == wanted and record.unread == () and "tools" not in record.extra
    record = formats.convert(row | {"tools": "hammer, saw"})[1]
    assert record.tools is None and record.unread == ("tools",)


def test_a_table_fills_objects_with_nulls_that_nobody_wrote(tmp_path):
    """pyarrow gives every object of a column the names of all of them."""

    def row(name, arguments):
        call = {"function": {"name": name, "arguments": arguments}}
        fields = {"properties": {key: {"type": "string"} for key in arguments}}
        return {"messages": [*Q, {"role": "assistant", "content": None, "tool_calls": [call]}],
                "tools": [{"name": name, "parameters": fields}]}  # fmt: skip

    pq.write_table(pa.Table.from_pylist([row("a", {"x": "1"}), row("b", {"y": "2"})]), tmp_path / "a.parquet")
    first, second = (formats.convert(it.value)[1] for it in files.read_file(tmp_path / "a.parquet"))
    assert first.answer == [assistant('{"name": "a", "arguments": {"x": "1"}}')]
    assert second.answer == [assistant('{"name": "b", "arguments": {"y": "2"}}')]
    assert json.loads(second.tools) == [{"name": "b", "parameters": {"properties": {"y": {"type": "string"}}}}]


def test_what_is_not_read_is_named():
    def unread(row):
        record = formats.convert(row)[1]
        return {name for name in record.extra if name not in record.read} | set(record.unread)

    pair = {"chosen": "A", "rejected": "B"}
    assert unread(pair | {"prompt": "Q", "instruction": "R", "input": "x"}) == {"instruction", "input"}
    assert unread(pair | {"question": "Q", "query": "R"}) == {"query"}
    assert unread({"messages": Q + A, "prompt": "R", "conversations": [{}]}) == {"prompt", "conversations"}
    assert unread({"messages": [*Q, {"role": "assistant", "content": "A", "name": "Bob"}]}) == {"messages.name"}
    assert unread({"problem": "Q", "solution": "A", "answer": "6"}) == {"answer"}
    scored = [{"text": "A", "score": 2, "critique": "fine"}, {"text": "B", "score": 1}]
    assert unread({"prompt": "Q", "completions": scored}) == {"completions.critique"}
    webgpt = {"question": "Q", "answer_0": "A", "answer_1": "B", "score_0": 1, "score_1": 0, "quotes_0": ["x"]}
    assert unread(webgpt) == {"quotes_0"}


def test_a_worked_solution_is_the_demonstration_and_the_short_answer_stays_with_the_prompt():
    for worked in ("solution", "response", "output"):
        record = formats.convert({"problem": "Q", "answer": "6", worked: "A"})[1]
        assert record.answer == A and record.extra == {"answer": "6", worked: "A"} and record.read == {worked}


def test_an_input_without_an_instruction_is_the_question():
    for row in ({"instruction": "", "input": "Q", "output": "A"}, {"input": "Q", "output": "A"}):
        form, record = formats.convert(row)
        assert (form.name, record.prompt, record.answer, record.extra) == ("alpaca", Q, A, {})
    record = formats.convert({"input": "Q", "chosen": "A", "rejected": "B", "system": ""})[1]
    assert (record.prompt, record.answer, record.extra) == (Q, A, {})
    for row in ({"prompt": "Q", "input": "x", "output": "A"}, {"question": "Q", "input": "x", "output": "A"}):
        record = formats.convert(row)[1]
        assert record.prompt == Q and "input" in record.extra


def test_a_conversation_may_begin_with_a_greeting():
    greeted = [assistant("Hi."), *Q]
    for row in (
        {"messages": greeted + A, "system": "S"},
        {"prompt": greeted, "chosen": A, "rejected": B, "system": "S"},
        {"chosen": greeted + A, "rejected": greeted + B, "system": "S"},
        {"prompt": greeted, "system": "S"},
    ):
        record = formats.convert(row)[1]
        assert record.prompt == [system("S"), *greeted] and record.answer in (A, None)


def test_a_bad_answer_is_no_demonstration():
    for label in (False, 0, "false", "False", 0.0):
        record = formats.convert({"prompt": "Q", "completion": "A", "label": label}, "unpaired")[1]
        assert "no demonstration" in record.set_aside
    for row in ({"messages": Q + A, "label": False}, {"instruction": "Q", "output": "A", "kto_tag": False}):
        assert "no demonstration" in formats.convert(row)[1].set_aside


def test_text_is_not_trimmed_where_the_form_gives_it_whole():
    record = formats.convert({"prompt": "  Q\n", "completion": " A "})[1]
    assert (record.prompt, record.answer) == ([user("  Q\n")], [assistant(" A ")])


BAD = {
    "a python list of messages": (
        {"prompt": "[{'role': 'user', 'content': 'Q'}]", "completion": "A"},
        "prompt is a list of messages written as text that is no JSON; write them as JSON",
    ),
    "messages beside a text": (
        {"prompt": "Q", "completion": '[{"role": "assistant", "content": "A"}]'},
        "completion is messages written as text, and the prompt is plain text",
    ),
    "messages in Alpaca": (
        {"instruction": "Q", "output": '{"role": "assistant", "content": "A"}'},
        "output is messages written as text",
    ),
    "a name twice in messages": (
        {"messages": '[{"role": "user", "content": "Q", "content": "R"}]'},
        "messages has a name that stands twice in one message; keep one 'content'",
    ),
    "another column may be the prompt": (
        {"user_prompt": "Q", "chosen": "A poem", "rejected": "A pond"},
        "there is no prompt: is it the column user_prompt.; say --columns prompt=user_prompt; or take",
    ),
    "turns in a list may be the prompt": (
        {"turns": ["What is it?"], "chosen": "A poem", "rejected": "A pond"},
        "there is no prompt: is it the column turns.",
    ),
    "text in an object may be the prompt": (
        {"meta": {"id": "x", "asked": "What is it?"}, "chosen": "A poem", "rejected": "A pond"},
        "there is no prompt: is it the column meta.",
    ),
    "an empty column is the prompt": (
        {"question": "", "chosen": "A poem", "rejected": "A pond"},
        "there is no prompt: question is empty; fill it",
    ),
    "prompt and conversations differ": (
        {"prompt": "R", "chosen": Q + A, "rejected": Q + B},
        "the prompt is not what chosen and rejected begin with",
    ),
    "half a weight": ({"messages": [*Q, A[0] | {"weight": 0.5}]}, "a message whose weight is 0.5; wanted 0 or 1, true"),
    "a weight in quotes": ({"messages": [*Q, A[0] | {"loss": "0"}]}, "a message whose loss is '0'; wanted 0 or 1"),
    "a question to be trained": (
        {"conversations": [{"from": "human", "value": "Q", "train": True}, {"from": "gpt", "value": "A"}]},
        "conversations has a user turn whose train is True; only answers are trained",
    ),
    "a part of an answer": (
        {"messages": [*Q, A[0] | {"train_detail": [{"begin_offset": 0}]}]},
        "messages has a message with train_detail, which no stage reads",
    ),
    "two weights": ({"messages": [*Q, A[0] | {"weight": 1, "loss": False}]}, "whose weight and loss differ"),
    "too short a mask": ({"messages": Q + A, "loss_mask": [1]}, "loss_mask has 1 entries for 2 messages"),
    "a mask of questions": ({"messages": Q + A, "loss_mask": [1, 1]}, "loss_mask trains a user turn"),
    "a mask in words": ({"messages": Q + A, "loss_mask": "none"}, "loss_mask is 'none'; wanted a list of 0 and 1"),
    "an empty answer in the middle": (
        {"messages": [*Q, assistant(" "), *Q, *A]},
        "an empty answer stands before the last turn; give turn 2 a text",
    ),
    "an empty answer in a completion": (
        {"prompt": "Q", "completion": [assistant(""), *Q, *A]},
        "an empty answer stands before the last turn; give turn 2 a text",
    ),
    "an empty question in a completion": (
        {"prompt": Q, "completion": [*A, user(" "), *B]},
        "an empty user turn stands before the last turn; give turn 3 a text",
    ),
    "an empty question": ({"messages": [user(""), *B, *Q, *A]}, "an empty user turn stands before the last turn"),
    "two answers in a row": ({"messages": [*Q, *A, *B]}, "messages ends with two answers in a row; join them"),
    "the prompt ends with an answer": ({"prompt": Q + A, "completion": "B"}, "the prompt ends with an assistant turn"),
    "a null completion": (
        {"prompt": "Q", "completion": None},
        "completion is null; give it an answer, or say --format",
    ),
    "a null answer": ({"question": "Q", "answer": float("nan")}, "answer is null; give it an answer"),
    "a null pair": ({"prompt": "Q", "chosen": None, "rejected": None}, "chosen is null; give it an answer"),
    "null messages": ({"prompt": "Q", "messages": None}, "messages is null; give it an answer, or say --format"),
    "null responses": ({"prompt": "Q", "responses": None, "scores": None}, "responses is null"),
    "a null verdict": (
        {"prompt": "Q", "completion": "A", "label": None},
        "label is null; say whether the answer is go",
    ),
    "a class": (
        {"prompt": "Q", "completion": "A", "label": 2},
        "label is 2; wanted true or false.*--format completion",
    ),
    "a class or a verdict": (
        {"prompt": "Q", "completion": "A", "label": "1"},
        "label is 1, a verdict or a class; where 1 is a good answer say --format unpaired; where .*--format completion",
    ),
    "a blank row": ({"prompt": "", "completion": None}, "the row is blank"),
    "no turns": ({"conversations": [], "id": 4}, "conversations is an empty list; fill it"),
    "no messages at all": ({"messages": None}, "messages is null; fill it"),
    "empty prompt cell": ({"prompt": "", "completion": "A"}, "prompt is empty; fill it"),
    "empty question cell": ({"question": "", "answer": "5"}, "question is empty; fill it"),
    "empty instruction": ({"instruction": "", "input": "", "output": "A"}, "instruction is empty; fill it"),
    "no prompt": (
        {"completion": "A", "n": 1},
        "columns completion, n; near is prompt . completion: there is no prompt;",
    ),
    "a slip": ({"promt": "Q", "completion": "A"}, "there is no prompt; say --columns prompt=promt"),
    "a number as the prompt": ({"prompt": 7, "completion": "A"}, "prompt is a number; wanted text or a list of mes"),
    "a number as the completion": (
        {"prompt": "Q", "completion": 2},
        "completion is a number; wanted text or a list of",
    ),
    "true as the answer": ({"question": "Q", "answer": True}, "answer is true; wanted the answer as text or a plain"),
    "a number without a spelling": ({"question": "Q", "answer": 1e30}, "answer is a number; wanted the answer as text"),
    "a list of texts": ({"prompt": "Q", "completion": ["A"]}, "completion is a list that holds text; wanted messages"),
    "an object": ({"prompt": "Q", "completion": {"text": "A"}}, "completion has a message without a role"),
    "two contents": ({"messages": [Q[0] | {"value": "R"}, *A]}, "a message whose content and value differ"),
    "two texts": (
        {"prompt": "Q", "responses": [{"text": "A", "answer": "B", "score": 1}, {"text": "B", "score": 2}]},
        "responses has an answer with text and answer; keep one",
    ),
    "tools in a message": ({"messages": [Q[0] | {"tools": [{}]}, *A]}, "a message with tools; give them as a column"),
    "tools cut off": ({"messages": Q + A, "tools": '[{"name": "f"'}, "tools is text that is no JSON"),
    "a picture in a message": ({"messages": [Q[0] | {"images": ["x"]}, *A]}, "multimodal: messages has a message with"),
    "a score in words": (
        {"prompt": "Q", "chosen": "A", "rejected": "B", "score_chosen": "good", "score_rejected": 1},
        "score_chosen is 'good'; wanted a number",
    ),
    "unknown form": ({"foo": 1, "bar": 2}, "unknown form with the columns foo, bar; say what they are: --columns p"),
    "no columns": ({}, "unknown form with the columns none"),
    "no object": ([1, 2], "a row is a list"),
    "empty chosen": ({"prompt": "Q", "chosen": " ", "rejected": "B"}, "chosen is an empty answer"),
    "empty rejected": ({"prompt": "Q", "chosen": "A", "rejected": ""}, "rejected is an empty answer"),
    "empty prompt": (
        {"prompt": [], "chosen": "A", "rejected": "B"},
        "there is no prompt: prompt is an empty list; fill it",
    ),
    "blank prompt": ({"prompt": " \n", "completion": "A"}, "the prompt is empty"),
    "nothing shared": ({"chosen": "A b", "rejected": "B b"}, "share no beginning; add a prompt column"),
    "mixed kinds": ({"prompt": "Q", "chosen": "A", "rejected": B}, "chosen and rejected are of different kinds"),
    "differ too early": (
        {"chosen": [*Q, *A, user("r"), *A], "rejected": [*Q, *B, user("r"), *A]},
        "chosen and rejected part before the last turn",
    ),
    "margin no number": (
        {"prompt": "Q", "chosen": "A", "rejected": "B", "margin": "big"},
        "margin is 'big'; wanted a number",
    ),
    "ends with the user": ({"messages": [*Q, *A, *Q]}, "messages ends with a user turn"),
    "no user": ({"messages": A}, "no user turn with text"),
    "no messages": ({"messages": "hello"}, "messages is text; wanted a list of messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "the role 'wizard'; roles known: .*assistant"),
    "content missing": ({"messages": [{"role": "user"}]}, "content is null; wanted text"),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "image_url"}]}, *A]},
        "multimodal: messages has a part of the type 'image_url'; only text",
    ),
    "image part of a pair": (
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "chosen": A, "rejected": B},
        "multimodal: prompt has a part of the type 'image'",
    ),
    "images beside placeholders": (
        {"messages": [user("<image>What is this?"), *A], "images": ["cat.jpg"]},
        "multimodal: the column images is filled; only text .* remove the column",
    ),
    "llava": (
        {"id": 1, "image": "cat.jpg", "conversations": sharegpt(("human", "<image>\nQ"), ("gpt", "A"))},
        "multimodal: the column image is filled",
    ),
    "audio as bytes": ({"prompt": "Q", "Audio": {"bytes": b"RIFF", "path": None}}, "multimodal: the column Audio is"),
    "videos": ({"instruction": "Q", "output": "A", "videos": [["1.png"]]}, "multimodal: the column videos is filled"),
    "text part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}, *A]},
        "messages has a text part without text",
    ),
    "a thought beside the answer": (
        {"messages": [*Q, A[0] | {"reasoning_content": "hm"}]},
        "messages has a message with reasoning_content, which no stage reads",
    ),
    "call without a name": (
        {"messages": [*Q, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]},
        "messages has a tool call without a name",
    ),
    "call and nothing else": (
        {"messages": [*Q, {"role": "assistant", "content": None, "tool_calls": []}]},
        "messages has a message whose content is null",
    ),
    "late system text": ({"messages": [*Q, system("S"), *A]}, "roles out of order: a system turn after the first turn"),
    "a tool begins": ({"messages": [tool("1"), *Q, *A]}, "roles out of order: a tool answers where nobody"),
    "an answer to no call": ({"messages": [*Q, tool("1"), *A]}, "roles out of order: a tool answers where nobody"),
    "two system texts": ({"messages": [system("S"), *Q, *A], "system": "T"}, "there are two system texts"),
    "system no string": ({"messages": Q + A, "system": ["S"]}, "system is a list; wanted text"),
    "history of triples": (
        {"instruction": "Q", "output": "A", "history": [["q", "a", "x"]]},
        "history is no list of pairs of strings",
    ),
    "history as text": ({"instruction": "Q", "output": "A", "history": "none"}, "history is no list of pairs"),
    "instruction no string": ({"instruction": {"en": "Q"}, "output": "A"}, "instruction is an object; wanted text"),
    "answer a list": ({"question": "Q", "answer": ["A"]}, "answer is a list; wanted the answer as text or a plain num"),
    "scores too few": ({"prompt": "Q", "responses": ["A", "B"], "scores": [1]}, "responses has 2 entries and scores h"),
    "scores no list": ({"prompt": "Q", "responses": ["A", "B"], "scores": "12"}, "2 entries and scores is text"),
    "one score": (
        {"prompt": "Q", "responses": ["A", "B"], "scores": [1, None]},
        "responses has fewer than two answers with a score",
    ),
    "scored, no text": (
        {"prompt": "Q", "completions": [{"score": 1}, {"score": 2}]},
        "completions has an answer without text; wanted text or {response, text, content: ...}",
    ),
    "the best answer is empty": (
        {"prompt": "Q", "responses": ["", "B"], "scores": [2, 1]},
        "the better answer is an empty answer",
    ),
    "scored, no prompt": ({"responses": ["A", "B"], "scores": [2, 1]}, "the prompt is empty"),
    "webgpt, no score": (
        {"question": "Q", "answer_0": "A", "answer_1": "B", "score_0": None, "score_1": 1},
        "score_0 or score_1 is no number",
    ),
    "shp, no label": (
        {"history": "Q", "human_ref_A": "A", "human_ref_B": "B", "labels": 2},
        "labels is 2; wanted 1 .A is preferred. or 0",
    ),
    "shp, no text": (
        {"history": "Q", "human_ref_A": None, "human_ref_B": "B", "labels": 0},
        "human_ref_A is null",
    ),
    "hc3, no answers": ({"question": "Q", "human_answers": [], "chatgpt_answers": ["B"]}, "human_answers has no text"),
    "kto_tag": ({"messages": Q + A, "kto_tag": "good"}, "kto_tag is 'good'; wanted true or false"),
    "answer missing": ({"instruction": "Q", "input": "", "output": ""}, "output is an empty answer"),
    "answer no string": ({"instruction": "Q", "output": 3}, "output is a number; wanted text"),
    "label": ({"prompt": "Q", "completion": "A", "label": "maybe"}, "label is 'maybe'; wanted true or false"),
    "empty text": ({"text": "  "}, "text is empty"),
    "half a character": ({"prompt": "Q", "completion": "\ud83d"}, "half a surrogate pair"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_say_what_is_wrong(name):
    row, message = BAD[name]
    with pytest.raises(formats.BadRow, match=message):
        formats.convert(row)


def test_every_form_is_listed_once_and_feeds_known_stages():
    assert len({form.name for form in formats.FORMS}) == len(formats.FORMS)
    for form in formats.FORMS:
        assert set(form.feeds) <= set(form.can_feed) <= set(formats.STAGES)


# --format and --columns ----------------------------------------------------------------------------------------------


def test_a_form_can_be_forced():
    row = {"prompt": "Q", "messages": Q + B, "text": "T", "completion": "A"}
    found = {name: formats.convert(row, name)[1] for name in ("messages", "completion", "prompt", "text")}
    assert formats.convert(row)[0].name == "messages" and formats.convert(row, "completion")[0].name == "completion"
    assert found["messages"].answer == B and found["completion"].answer == A and found["text"].text == "T"
    assert found["prompt"].prompt == Q and found["prompt"].answer is None


@pytest.mark.parametrize("form", formats.FORMS, ids=lambda form: form.name)
def test_a_forced_form_that_does_not_fit_says_what_it_wants_and_what_it_saw(form):
    with pytest.raises(formats.BadRow) as caught:
        formats.convert({"foo": 1, "bar": 2}, form.name)
    assert caught.value.reason == (
        f"the row is not of the form {form.name}, which wants {form.columns}; columns seen: foo, bar"
    )
    assert "--columns OURS=THEIRS" in caught.value.fix


def test_columns_are_given_our_names_before_the_form_is_looked_for():
    names = columns.mapping(["prompt=question", "chosen=good", "rejected=bad"])
    row = {"question": "Q", "good": "A", "bad": "B", "prompt": "an old one", "id": 7}
    form, record = formats.convert(row, names=names)
    assert (form.name, record.prompt, record.answer, record.rejected) == ("preference", Q, A, B)
    assert record.extra == {"id": 7}
    swapped = columns.mapping(["chosen=rejected", "rejected=chosen"])
    record = formats.convert({"prompt": "Q", "chosen": "B", "rejected": "A"}, names=swapped)[1]
    assert (record.answer, record.rejected) == (A, B)
    record = formats.convert({"Frage": "Q", "Zahl": "4"}, "prompt", columns.mapping(["prompt=Frage", "answer=Zahl"]))[1]
    assert (record.prompt, record.extra) == (Q, {"answer": "4"})


def test_a_mapped_column_that_a_row_lacks_is_named_with_those_it_has():
    with pytest.raises(formats.BadRow, match="no column good, which --columns calls chosen; columns seen: question, x"):
        formats.convert({"question": "Q", "x": 1}, names={"chosen": "good"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "promt=question"], "'promt' in 'promt=question' is none of our columns: prompt, chosen"),
        (["--columns", "Frage=prompt"], "none of our columns; ours stand left: prompt=Frage"),
        (["--columns", "question"], "'question' is not OURS=THEIRS, such as prompt=question"),
        (["--columns", "prompt="], "'prompt=' is not OURS=THEIRS"),
        (["--format", "alpacca"], "invalid choice: 'alpacca' (choose from 'preference'"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        prepare.parse_args(["--dataset", "x.jsonl", *words])
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1


# --- whatever a row holds -------------------------------------------------------------------------------------------

LAYOUTS = [
    "messages", "messages kto_tag", "conversations system", "messages chosen rejected", "prompt chosen rejected margin",
    "conversations chosen rejected", "chosen rejected_response", "instruction input output system history",
    "instruction output kto_tag", "prompt responses scores", "instruction completions", "question answers ranks",
    "prompt completion", "prompt completion label", "question answer", "question human_answers", "prompt answer",
    "text",
    "question answer_0 answer_1 score_0 score_1", "history human_ref_A human_ref_B labels", "Prompt images", "foo",
]  # fmt: skip
TEXTS = st.sampled_from(["", " ", "1", "x", "y", "Human: x Assistant:", "\n\nHuman: x\n\nAssistant: y", "\ud83d"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | TEXTS
CONTENT = TEXTS | st.lists(
    st.sampled_from([{"type": "text", "text": "x"}, {"type": "image"}, {"type": "text"}, "x", {}])
)
ODD = st.sampled_from([None, [], [{"function": {"name": "f"}}], [3], {"a": 1}, "x", 3, [{}], [{"name": "f"}]])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "user", "assistant", "system", "tool", "", None, 3])},
        optional={"content": CONTENT | LEAVES, "tool_calls": ODD, "function_call": ODD, "from": TEXTS, "value": LEAVES},
    ),
    max_size=4,
)
ANSWERS = st.lists(TEXTS | st.fixed_dictionaries({}, optional={"text": LEAVES, "score": LEAVES, "rank": LEAVES}))
VALUES = st.one_of(
    TEXTS, LEAVES, MESSAGES, ANSWERS, st.lists(LEAVES, max_size=3), st.lists(st.lists(TEXTS, max_size=3)), ODD
)


@settings(max_examples=800, deadline=None)
@given(data=st.data())
def test_any_row_is_converted_or_a_bad_row(data):
    row = {name: data.draw(VALUES, name) for name in data.draw(st.sampled_from(LAYOUTS)).split()}
    form_name = data.draw(st.sampled_from([None, None, *(form.name for form in formats.FORMS)]))
    try:
        form, record = formats.convert(row, form_name)
    except formats.BadRow as bad:
        assert bad.reason and bad.fix
        return
    if form.name == "text":
        assert record.text.strip()
        return
    assert any(message["role"] == "user" and message["content"].strip() for message in record.prompt)
    for part in (record.prompt, record.answer, record.rejected):
        assert part is None or all(isinstance(m["content"], str) and list(m)[:2] == ["role", "content"] for m in part)
    for answer in (record.answer, record.rejected):
        assert answer is None or (answer[-1]["role"] == "assistant" and answer[-1]["content"].strip())


def test_no_word_of_a_row_is_lost_in_silence():
    """Whatever the columns: each word is in the record, or its column is a further one or named as unread."""
    rng, number, used = random.Random(5), itertools.count(), collections.Counter()
    roles = ["user"], ["user", "assistant"], ["assistant"], ["assistant", "user", "assistant"]

    def cell(name):
        if name in (*columns.LABEL, "margin", "score_chosen", "score_rejected", *columns.SCORES, columns.LOSS_MASK):
            return [2, 1] if name in columns.SCORES else [0, 1] if name == columns.LOSS_MASK else 1
        words = [f"word{next(number)}x of it" for _ in range(3)]
        if name in columns.LISTS:
            return words[:2]
        if name in columns.TOOLS:
            return [{"name": words[0]}]
        if name == "history":
            return [words[:2]]
        turns = [{"role": role, "content": word} for role, word in zip(rng.choice(roles), words, strict=False)]
        kinds = [
            turns,
            json.dumps(turns),
            *([] if name in ("messages", "conversations") else words[:1] * 5 + ["", None]),
        ]
        return rng.choice(kinds)

    for _ in range(12_000):
        base = rng.choice(LAYOUTS).split()
        row = {name: cell(name) for name in [*base, *rng.sample(columns.WORDS, rng.randint(0, 3))]}
        try:
            form, record = formats.convert(row)
        except formats.BadRow:
            continue
        if record.set_aside:
            continue
        used[form.name] += 1
        said = json.dumps([record.prompt, record.answer, record.rejected, record.tools, record.text])
        for name in (name for name in row if not {name, name.lower()} & {*record.extra, *record.unread}):
            assert all(word in said for word in re.findall(r"word\d+x", json.dumps(row[name]))), (name, row, record)
    assert len(used) >= 9 and min(used.values()) >= 20, used
