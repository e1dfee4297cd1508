"""Record forms: recognises how a row of someone else's data is laid out and converts it to ours.

`FORMS` is the one table. A form is a name, the columns it is known by (shown to people), a test and a conversion;
the first form whose test passes wins, so special forms stand above general ones. To teach the program another
dialect, add one line there and one function: here, or in `pairs.py` if it says which of two answers is better.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from step0_data import pairs
from step0_data.columns import (
    ANSWER,
    COMPLETION,
    LABEL,
    LISTS,
    LOSS_MASK,
    QUESTION,
    REJECTED,
    SCORES,
    TOOLS,
    WORDS,
    Cells,
    TableRow,
    has,
    in_our_names,
    refuse_media,
    rest,
    says,
    seen,
)
from step0_data.turns import (
    JSON,
    BadRow,
    Record,
    assistant,
    check_answer,
    check_prompt,
    check_unicode,
    json_text,
    kind,
    messages_of,
)

STAGES = ("sft", "preference", "prompts", "pretrain")


@dataclass(frozen=True)
class Form:
    """`needs`: one column of each of these has to say something, unless `test` decides."""

    name: str
    columns: str
    needs: tuple[tuple[str, ...], ...]
    test: Callable[[dict], object] | None
    convert: Callable[[Cells], Record]
    feeds: tuple[str, ...]  # stages it serves by itself
    can_feed: tuple[str, ...]  # stages it serves when asked with --stages

    def recognises(self, row: dict) -> bool:
        return bool(self.test(row) if self.test else all(has(row, *columns) for columns in self.needs))


def convert(row: dict, form_name: str | None = None, names: dict[str, str] | None = None) -> tuple[Form, Record]:
    """A row's form and its content in our terms; BadRow when either cannot be had.

    Args:
        form_name: the form to take, of `FORMS`; None: the first that fits. names: {our column: theirs}.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a row is {kind(row)}, not an object with named columns", "wanted one object a row")
    row = Cells(in_our_names(row, names or {}), of_a_table=isinstance(row, TableRow))
    refuse_media(row)
    form = recognise(row, form_name)
    record = form.convert(row)
    if record.text is None:
        record = replace(record, tools=_tools(row))
        row.leave_out(name for name in ("prompt", "tools") if name in row)  # these names are the record's own
    record = replace(record, **row.said())
    for part in (record.prompt, record.answer, record.rejected):
        for message in part or ():
            check_unicode(message["content"])
    check_unicode((record.text or "") + (record.tools or ""))
    return form, record


def recognise(row: dict, form_name: str | None = None) -> Form:
    """The form of a row.

    Raises:
        BadRow: none fits, or not the one asked for, naming the columns seen and what is near.
    """
    form = next((form for form in FORMS if form_name in (None, form.name) and form.recognises(row)), None)
    if form and not form_name:
        _check_certain(row, form.name)
    if form:
        return form
    if len(row) > 1 and all(kind(value) in ("null", "empty") for value in row.values()):
        raise BadRow("the row is blank: all its cells are empty", "remove it")
    if form_name:
        wanted = next(form.columns for form in FORMS if form.name == form_name)
        raise BadRow(
            f"the row is not of the form {form_name}, which wants {wanted}; columns seen: {seen(row)}",
            "map columns with --columns OURS=THEIRS or leave --format out",
        )
    if "transcript" in row and "rating" in row:  # red-team-attempts, beside the pairs of hh-rlhf
        raise BadRow("a red-team transcript is one dialogue with a rating, no pair", "take a folder of pairs instead")
    raise _unknown(row)


def _check_certain(row: dict, form_name: str) -> None:
    """A row that may be something else, for all its columns say, is not read by a guess.

    Raises:
        BadRow: a prompt whose answer is null (it has lost it), a verdict that is null or may be a class.
    """
    if form_name == "prompt":
        answers = COMPLETION if has(row, "prompt") else ANSWER
        both = [names for names in (LISTS, SCORES) if any(name in row for name in names)]
        lists = [name for names in both if len(both) == 2 for name in names]
        for column in ("chosen", *REJECTED, *answers, "human_answers", "messages", "conversations", *lists):
            if column in row and not has(row, column):
                way_out = "give it an answer, or say --format prompt where rows are prompts only"
                raise BadRow(f"{column} is null", way_out)
    label = next((column for column in LABEL if column in row), None)
    said = str(row.get("label")).lower()
    if form_name == "completion" and label:
        way_out = "say whether the answer is good, or --format completion where it is a class"
        raise BadRow(f"{label} is {kind(row[label])}", way_out)
    if form_name == "unpaired" and has(row, *LABEL) == "label" and said in _VERDICTS and said not in ("true", "false"):
        way_out = "where 1 is a good answer say --format unpaired; where it is a class, --format completion"
        raise BadRow(f"label is {row['label']}, a verdict or a class", way_out)


def _unknown(row: dict) -> BadRow:
    """Why no form fits: an empty cell, or the columns that the nearest one lacks."""
    for form in FORMS:
        there = [next((name for name in columns if name in row), None) for columns in form.needs]
        if all(there):
            empty = next((name for name, it in zip(there, form.needs, strict=True) if not has(row, *it)), None)
            if empty:
                return BadRow(f"{empty} is {kind(row[empty])}", "fill it or remove the row")
    reason = f"unknown form with the columns {seen(row)}"
    lacks = {form: [columns for columns in form.needs if not has(row, *columns)] for form in FORMS}
    near = [form for form in FORMS if len(lacks[form]) < len(form.needs)]
    if near:
        form = min(near, key=lambda form: len(lacks[form]))
        missing = " and ".join(" or ".join(columns[:3]) for columns in lacks[form]) or "scores"
        return BadRow(
            reason, f"near is {form.columns}: there is no {missing}; say --columns {_example(row, lacks[form])}"
        )
    return BadRow(reason, f"say what they are: --columns {_example(row, [['prompt'], ['completion']])}")


def _example(row: dict, wanted: list) -> str:
    """Words of `--columns`, with their names where these look like ours."""
    names = {str(name).strip().lower(): name for name in row if str(name) not in WORDS}
    words = []
    for ours in wanted or [["scores"]]:
        near = next((names[it[0]] for name in ours if (it := difflib.get_close_matches(name, names, 1, 0.7))), None)
        words.append(f"{ours[0]}={near or 'THEIRS'}")
    return " ".join(words)


# Beside any form -----------------------------------------------------------------------------------------------------


def _tools(row: Cells) -> str | None:
    """The definitions of the tools that the row may call, as the JSON text of a list; None: it has none.

    A column of that name that holds something else is a column like others.
    """
    for column in TOOLS:
        value = row.get(column)
        if not says(value):
            continue
        written = value.strip() if isinstance(value, str) else json_text(value, column)
        if isinstance(value, list) and all(isinstance(it, str) for it in value):  # each definition a text
            written = f"[{', '.join(value)}]"
        try:
            found = JSON.decode(written)
        except (ValueError, RecursionError):
            if not written.startswith(("[", "{")) or isinstance(value, list):
                continue
            raise BadRow(f"{column} is text that is no JSON", "wanted a list of definitions") from None
        items = found if isinstance(found, list) else [found]
        if not all(isinstance(it, dict) and (it.get("name") or it.get("function")) for it in items):
            continue
        row.take(column)
        if items:
            return written if isinstance(found, list) else f"[{written}]"
    return None


def _whole_row_weights(row: Cells, messages: list[dict]) -> None:
    """`loss_mask`: a weight of each message, beside them."""
    mask = row.get(LOSS_MASK)
    if not says(mask):
        return
    row.take(LOSS_MASK)
    if not isinstance(mask, list) or any(isinstance(it, str) or it not in (0, 1) for it in mask):
        raise BadRow(f"{LOSS_MASK} is {mask!r:.40}", "wanted a list of 0 and 1, one for each message")
    if len(mask) != len(messages):
        raise BadRow(f"{LOSS_MASK} has {len(mask)} entries for {len(messages)} messages", "give one for each")
    for turn, weight in zip(messages, mask, strict=True):
        if weight and turn["role"] != "assistant":
            raise BadRow(f"{LOSS_MASK} trains a {turn['role']} turn", "only answers are trained: put 0 there")
        if not weight and turn["role"] == "assistant":
            turn["weight"] = 0


# The forms -----------------------------------------------------------------------------------------------------------


def _conversation(row: Cells) -> Record:
    """`messages` or ShareGPT's `conversations`: everything up to the last answer is context."""
    column = has(row, "messages", "conversations")
    messages = messages_of(row.take(column), column)
    _whole_row_weights(row, messages)
    messages = pairs.with_system(row, messages)
    if messages and messages[-1]["role"] != "assistant":
        way_out = "end it with the assistant's answer; where it is a prompt only, say --columns prompt=" + column
        raise BadRow(f"{column} ends with a {messages[-1]['role']} turn", way_out)
    if [turn["role"] for turn in messages[-2:]] == ["assistant"] * 2:
        raise BadRow(f"{column} ends with two answers in a row", "join them into one turn or remove one")
    check_prompt(messages[:-1])
    check_answer(messages[-1:], column)
    if row.get("prompt") in [turn["content"] for turn in messages if turn["role"] == "user"]:
        row.take("prompt")  # UltraChat's: the first question again
    return Record(messages[:-1], messages[-1:], set_aside=_unweighted(messages))


def _unweighted(messages: list[dict]) -> str | None:
    is_trained = any(turn["role"] == "assistant" and turn.get("weight") != 0 for turn in messages)
    return None if is_trained else "all its answers have weight 0: nothing is to be trained"


def _completion(row: Cells) -> Record:
    """`prompt` + `completion`, strings or messages."""
    column = has(row, *COMPLETION)
    value, (prompt, is_open) = (
        pairs.answer_in(row, column, "prompt", row.take(column)),
        pairs.whole_prompt(row, "prompt"),
    )
    text = value.strip() if is_open and isinstance(value, str) else value
    answer = [assistant(text)] if isinstance(value, str) else messages_of(value, column)
    check_prompt(prompt)
    check_answer(answer, column)
    if answer[:-1]:
        check_prompt([*prompt, *answer[:-1]])  # turns before the last answer, wherever they stand
    return Record(prompt, answer, set_aside=_unweighted([*prompt, *answer]))


def _alpaca(row: Cells) -> Record:
    """`instruction`, `input`, `output` (and `system`, `history`)."""
    column = has(row, "output", "response")
    prompt, answer = pairs.alpaca_prompt(row), [assistant(pairs.text_in(row, column))]
    check_prompt(prompt)
    check_answer(answer, column)
    return Record(prompt, answer)


def _unpaired(row: Cells) -> Record:
    """Answers that are said to be good or bad, each by itself: a bad one is no demonstration."""
    column = has(row, *LABEL)
    said = _VERDICTS.get(str(row.take(column)).lower())
    if said is None:
        value = row[column] if isinstance(row[column], (str, int, float)) else kind(row[column])
        way_out = "wanted true or false: is the answer good? where it is a class, say --format completion"
        raise BadRow(f"{column} is {value!r:.40}", way_out)
    plain = Cells(rest(row, {column}))
    form = next((form for form in FORMS if form.name in _LABELLED and form.recognises(plain)), None)
    if form is None:
        raise _unknown(plain)
    aside = None if said else "labelled as a bad answer: it is no demonstration"
    record = form.convert(row)
    return replace(record, set_aside=aside or record.set_aside)


def _question(row: Cells) -> Record:
    """`question` + `answer`: a worked example for SFT, and a prompt whose answer a rule can check."""
    question, column = has(row, *QUESTION), has(row, *ANSWER)
    value = row.read(column)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and "e" not in str(value)
    if not isinstance(value, str) and not is_number:
        raise BadRow(f"{column} is {kind(value)}", "wanted the answer as text or a plain number")
    (prompt, is_open), said = pairs.whole_prompt(row, question), pairs.answer_in(row, column, question, value)
    if isinstance(said, list):
        answer = messages_of(said, column)
    else:
        answer = [assistant(str(said).strip() if is_open else str(said))]
    check_prompt(prompt)
    check_answer(answer, column)
    return Record(prompt, answer)


def _hc3(row: Cells) -> Record:
    """A question with answers by people and by ChatGPT. Nobody judged them: the first human one is a demonstration."""
    answers = row.read("human_answers")
    if not isinstance(answers, list) or not answers or not isinstance(answers[0], str):
        raise BadRow("human_answers has no text", "wanted a list of answers")
    prompt, answer = pairs.whole_prompt(row, "question")[0], [assistant(answers[0])]
    check_prompt(prompt)
    check_answer(answer, "human_answers")
    return Record(prompt, answer)


def _prompt_only(row: Cells) -> Record:
    """`prompt` (or a question) with whatever other columns a reward function wants."""
    prompt, _ = pairs.whole_prompt(row, has(row, "prompt", *QUESTION))
    check_prompt(prompt)
    return Record(prompt)


def _text(row: Cells) -> Record:
    text = row.take("text")
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"text is {kind(text)}" if not isinstance(text, str) else "text is empty", "give it some text")
    return Record(text=text)


# Which form a row has ------------------------------------------------------------------------------------------------


def _is_question(row: dict) -> bool:
    return bool(not has(row, "prompt") and has(row, *QUESTION) and has(row, *ANSWER))


def _is_alpaca(row: dict) -> bool:
    """Also with the input as the question, where there is no instruction."""
    asked = has(row, "instruction") or (has(row, "input") and not has(row, "prompt", *QUESTION))
    return bool(asked and has(row, "output", "response"))


def _is_unpaired(row: dict) -> bool:
    """Beside prompt + completion any label is a verdict; elsewhere it may be a topic, unless it is true or false."""
    if has(row, "prompt") and has(row, *COMPLETION):
        return bool(has(row, *LABEL))
    is_verdict = has(row, "kto_tag") or str(row.get("label")).lower() in ("true", "false")
    return bool(is_verdict and (has(row, "messages", "conversations") or _is_alpaca(row)))


_VERDICTS = {**dict.fromkeys(("true", "1", "1.0"), True), **dict.fromkeys(("false", "0", "0.0"), False)}
_SFT, _PROMPTS, _BOTH = ("sft",), ("prompts",), ("sft", "prompts")
_ALL, _PRETRAIN = ("sft", "preference", "prompts"), ("pretrain",)
_LABELLED = ("messages", "sharegpt", "completion", "alpaca")
_PROMPT, _ALPACA = ("prompt",), (("instruction", "input"), ("output", "response"))
_WEBGPT = tuple((name,) for name in ("question", "answer_0", "answer_1", "score_0", "score_1"))
_SHP = tuple((name,) for name in ("history", "human_ref_A", "human_ref_B", "labels"))

# Special forms stand above general ones: an UltraFeedback row has prompt, messages, chosen and rejected.
# name, columns, what has to be there, test, conversion, stages it feeds by itself, stages it can feed when asked
FORMS: tuple[Form, ...] = (
    Form("preference", "chosen + rejected (+ prompt)", (("chosen",), REJECTED), pairs.is_pair, pairs.pair, _ALL, _ALL),
    Form("scored", "prompt + completions or responses with scores or ranks", (LISTS,), pairs.is_scored,
         pairs.scored, _ALL, _ALL),
    Form("webgpt", "question + answer_0 + answer_1 + score_0 + score_1", _WEBGPT, pairs.is_webgpt,
         pairs.webgpt, _ALL, _ALL),
    Form("shp", "history + human_ref_A + human_ref_B + labels", _SHP, pairs.is_shp, pairs.shp, _ALL, _ALL),
    Form("unpaired", "prompt + completion + label or kto_tag", (_PROMPT, COMPLETION, LABEL), _is_unpaired,
         _unpaired, _SFT, _BOTH),
    Form("messages", "messages", (("messages",),), None, _conversation, _SFT, _BOTH),
    Form("sharegpt", "conversations", (("conversations",),), None, _conversation, _SFT, _BOTH),
    Form("completion", "prompt + completion", (_PROMPT, COMPLETION), None, _completion, _SFT, _BOTH),
    Form("alpaca", "instruction + output (+ input, system, history)", _ALPACA, _is_alpaca, _alpaca, _SFT, _BOTH),
    Form("hc3", "question + human_answers", (("question",), ("human_answers",)), None, _hc3, _SFT, _BOTH),
    Form("question", "question + answer", (QUESTION, ANSWER), _is_question, _question, _BOTH, _BOTH),
    Form("prompt", "prompt (+ answer, ...)", (("prompt", *QUESTION),), None, _prompt_only, _PROMPTS, _PROMPTS),
    Form("text", "text", (("text",),), None, _text, _PRETRAIN, _PRETRAIN),
)  # fmt: skip
