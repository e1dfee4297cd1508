"""Record forms: each known layout gives the right conversation, and each kind of bad row says what is wrong."""

import pytest

from step0_data import formats


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


Q, A, B = [user("Q")], [assistant("A")], [assistant("B")]

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
    "completion": ({"prompt": "Q", "completion": "A"}, "completion", Q, A, None, {}),
    "completion, messages": ({"prompt": Q, "completion": A}, "completion", Q, A, None, {}),
    "labelled good": ({"prompt": "Q", "completion": "A", "label": True}, "completion", Q, A, None, {}),
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


def test_plain_text_is_for_pretraining():
    form, record = formats.convert({"text": "Once upon a time  \n"})
    assert (form.name, form.feeds, record.text) == ("text", ("pretrain",), "Once upon a time  \n")


def test_a_margin_is_kept_as_a_number():
    assert formats.convert({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": 2})[1].margin == 2.0


def test_a_bad_answer_is_no_demonstration():
    for label in (False, 0, "false"):
        record = formats.convert({"prompt": "Q", "completion": "A", "label": label})[1]
        assert "no demonstration" in record.set_aside


def test_text_is_not_trimmed_where_the_form_gives_it_whole():
    record = formats.convert({"prompt": "  Q\n", "completion": " A "})[1]
    assert (record.prompt, record.answer) == ([user("  Q\n")], [assistant(" A ")])


BAD = {
    "unknown form": ({"foo": 1, "bar": 2}, "unknown form with the columns foo, bar.*chosen . rejected.*instruction"),
    "no columns": ({}, "unknown form with the columns none"),
    "no object": ([1, 2], "a row is a list"),
    "empty chosen": ({"prompt": "Q", "chosen": " ", "rejected": "B"}, "chosen is an empty answer"),
    "empty rejected": ({"prompt": "Q", "chosen": "A", "rejected": ""}, "rejected is an empty answer"),
    "empty prompt": ({"prompt": [], "chosen": "A", "rejected": "B"}, "share no beginning; add a prompt column"),
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
    "no messages": ({"messages": "hello"}, "messages is a str; wanted a list of messages"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "the role 'wizard'; roles known: .*assistant"),
    "content missing": ({"messages": [{"role": "user"}]}, "content is a NoneType"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text; images and audio"),
    "answer missing": ({"instruction": "Q", "input": "", "output": ""}, "output is an empty answer"),
    "answer no string": ({"instruction": "Q", "output": 3}, "output is a int"),
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
