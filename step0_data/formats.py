"""Record forms: recognises how a row of someone else's data is laid out and converts it to ours.

`FORMS` is the one table. A form is a name, the columns it is known by (shown to people), a test and a conversion;
the first form whose test passes wins, so special forms stand above general ones. To teach the program another
dialect, add one line there and one function: here, or in `pairs.py` if it says which of two answers is better.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from step0_data import pairs
from step0_data.columns import (
    ALPACA,
    ANSWER,
    COMPLETION,
    LABEL,
    QUESTION,
    has,
    in_our_names,
    refuse_media,
    rest,
    seen,
)
from step0_data.turns import (
    BadRow,
    Record,
    assistant,
    check_answer,
    check_prompt,
    check_unicode,
    messages_of,
)

STAGES = ("sft", "preference", "prompts", "pretrain")
_CONTEXT = ("system", "history")  # columns that stand in front of a prompt


@dataclass(frozen=True)
class Form:
    name: str
    columns: str
    recognises: Callable[[dict], object]
    convert: Callable[[dict], Record]
    feeds: tuple[str, ...]  # stages it serves by itself
    can_feed: tuple[str, ...]  # stages it serves when asked with --stages


def convert(row: dict, form_name: str | None = None, names: dict[str, str] | None = None) -> tuple[Form, Record]:
    """A row's form and its content in our terms; BadRow when either cannot be had.

    Args:
        form_name: the form to take, of `FORMS`; None: the first that fits. names: {our column: theirs}.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a row is a {type(row).__name__}, not an object with named columns", "wanted one object a row")
    row = in_our_names(row, names or {})
    refuse_media(row)
    form = recognise(row, form_name)
    record = form.convert(row)
    for part in (record.prompt, record.answer, record.rejected):
        for message in part or ():
            check_unicode(message["content"])
    if record.text is not None:
        check_unicode(record.text)
    return form, record


def recognise(row: dict, form_name: str | None = None) -> Form:
    """The form of a row.

    Raises:
        BadRow: none fits, or not the one asked for, naming the columns seen and what is known.
    """
    for form in FORMS:
        if form_name in (None, form.name) and form.recognises(row):
            return form
    if form_name:
        wanted = next(form.columns for form in FORMS if form.name == form_name)
        raise BadRow(
            f"the row is not of the form {form_name}, which wants {wanted}; columns seen: {seen(row)}",
            "map columns with --columns OURS=THEIRS or leave --format out",
        )
    if "transcript" in row and "rating" in row:  # red-team-attempts, beside the pairs of hh-rlhf
        raise BadRow("a red-team transcript is one dialogue with a rating, no pair", "take a folder of pairs instead")
    known = " | ".join(form.columns for form in FORMS)
    raise BadRow(
        f"unknown form with the columns {seen(row)}", f"map them with --columns OURS=THEIRS to a form known: {known}"
    )


# The forms -----------------------------------------------------------------------------------------------------------


def _conversation(row: dict) -> Record:
    """`messages` or ShareGPT's `conversations`: everything up to the last answer is context."""
    column = has(row, "messages", "conversations")
    messages = pairs.with_system(row, messages_of(row[column], column))
    if messages and messages[-1]["role"] != "assistant":
        raise BadRow(f"{column} ends with a {messages[-1]['role']} turn", "end it with the assistant's answer")
    check_prompt(messages[:-1])
    check_answer(messages[-1:], column)
    return Record(messages[:-1], messages[-1:], extra=rest(row, {"messages", "conversations", "prompt", "system"}))


def _completion(row: dict) -> Record:
    """`prompt` + `completion`, strings or messages."""
    column = has(row, *COMPLETION)
    value, (prompt, is_open) = row[column], pairs.whole_prompt(row, "prompt")
    text = value.strip() if is_open and isinstance(value, str) else value
    answer = [assistant(text)] if isinstance(value, str) else messages_of(value, column)
    check_prompt(prompt)
    check_answer(answer, column)
    return Record(prompt, answer, extra=rest(row, {"prompt", column, *_CONTEXT}))


def _alpaca(row: dict) -> Record:
    """`instruction`, `input`, `output` (and `system`, `history`)."""
    column = has(row, "output", "response") or "output"
    output = row.get(column)
    if not isinstance(output, str):
        raise BadRow(f"{column} is a {type(output).__name__}", "wanted the answer as a string")
    prompt, answer = pairs.alpaca_prompt(row), [assistant(output)]
    check_prompt(prompt)
    check_answer(answer, column)
    return Record(prompt, answer, extra=rest(row, {*ALPACA, column}))


def _unpaired(row: dict) -> Record:
    """Answers that are said to be good or bad, each by itself: a bad one is no demonstration."""
    column = has(row, *LABEL)
    words = {**dict.fromkeys(("true", "1", "1.0"), True), **dict.fromkeys(("false", "0", "0.0"), False)}
    said = words.get(str(row[column]).lower())
    if said is None:
        raise BadRow(f"{column} is {row[column]!r}", "wanted true or false")
    plain = rest(row, set(LABEL))
    form = next(form for form in FORMS if form.name in _LABELLED and form.recognises(plain))
    aside = None if said else "labelled as a bad answer: it is no demonstration"
    return replace(form.convert(plain), set_aside=aside)


def _question(row: dict) -> Record:
    """`question` + `answer`: a worked example for SFT, and a prompt whose answer a rule can check."""
    question, column = has(row, *QUESTION), has(row, *ANSWER)
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadRow(f"{column} is a {type(value).__name__}", "wanted the answer as a string or a number")
    (prompt, is_open), text = pairs.whole_prompt(row, question), str(value)
    answer = [assistant(text.strip() if is_open else text)]
    check_prompt(prompt)
    check_answer(answer, column)
    return Record(prompt, answer, extra=rest(row, {question, *_CONTEXT}))


def _hc3(row: dict) -> Record:
    """A question with answers by people and by ChatGPT. Nobody judged them: the first human one is a demonstration."""
    answers = row["human_answers"]
    if not isinstance(answers, list) or not answers or not isinstance(answers[0], str):
        raise BadRow("human_answers has no string", "wanted a list of answers")
    prompt, answer = pairs.whole_prompt(row, "question")[0], [assistant(answers[0])]
    check_prompt(prompt)
    check_answer(answer, "human_answers")
    return Record(prompt, answer, extra=rest(row, {"question", *_CONTEXT}))


def _prompt_only(row: dict) -> Record:
    """`prompt` (or a question) with whatever other columns a reward function wants."""
    column = has(row, "prompt", *QUESTION)
    prompt, _ = pairs.whole_prompt(row, column)
    check_prompt(prompt)
    return Record(prompt, extra=rest(row, {column, *_CONTEXT}))


def _text(row: dict) -> Record:
    if not isinstance(row["text"], str) or not row["text"].strip():
        raise BadRow("text is empty" if isinstance(row["text"], str) else "text is no string", "give it some text")
    return Record(text=row["text"], extra=rest(row, {"text"}))


def _is_completion(row: dict) -> bool:
    return bool(has(row, "prompt") and has(row, *COMPLETION))


def _is_alpaca(row: dict) -> bool:
    return bool(has(row, "instruction") and has(row, "output", "response"))


def _is_question(row: dict) -> bool:
    return bool(not has(row, "prompt") and has(row, *QUESTION) and has(row, *ANSWER))


def _is_unpaired(row: dict) -> bool:
    """Beside prompt + completion any label is a verdict; elsewhere it may be a topic, unless it is true or false."""
    if _is_completion(row):
        return bool(has(row, *LABEL))
    is_verdict = has(row, "kto_tag") or str(row.get("label")).lower() in ("true", "false")
    return bool(is_verdict and (has(row, "messages", "conversations") or _is_alpaca(row)))


_SFT, _PROMPTS, _BOTH = ("sft",), ("prompts",), ("sft", "prompts")
_ALL, _PRETRAIN = ("sft", "preference", "prompts"), ("pretrain",)
_LABELLED = ("messages", "sharegpt", "completion", "alpaca")

# Special forms stand above general ones: an UltraFeedback row has prompt, messages, chosen and rejected.
# name, columns, test, conversion, stages it feeds by itself, stages it can feed when asked
FORMS: tuple[Form, ...] = (
    Form("preference", "chosen + rejected (+ prompt)", pairs.is_pair, pairs.pair, _ALL, _ALL),
    Form("scored", "prompt + completions or responses with scores or ranks", pairs.is_scored, pairs.scored, _ALL, _ALL),
    Form("webgpt", "question + answer_0 + answer_1 + score_0 + score_1", pairs.is_webgpt, pairs.webgpt, _ALL, _ALL),
    Form("shp", "history + human_ref_A + human_ref_B + labels", pairs.is_shp, pairs.shp, _ALL, _ALL),
    Form("unpaired", "prompt + completion + label or kto_tag", _is_unpaired, _unpaired, _SFT, _BOTH),
    Form("messages", "messages", lambda r: has(r, "messages"), _conversation, _SFT, _BOTH),
    Form("sharegpt", "conversations", lambda r: has(r, "conversations"), _conversation, _SFT, _BOTH),
    Form("completion", "prompt + completion", _is_completion, _completion, _SFT, _BOTH),
    Form("alpaca", "instruction + output (+ input, system, history)", _is_alpaca, _alpaca, _SFT, _BOTH),
    Form("hc3", "question + human_answers", lambda r: has(r, "question") and "human_answers" in r, _hc3, _SFT, _BOTH),
    Form("question", "question + answer", _is_question, _question, _BOTH, _BOTH),
    Form("prompt", "prompt (+ answer, ...)", lambda r: has(r, "prompt", *QUESTION), _prompt_only, _PROMPTS, _PROMPTS),
    Form("text", "text", lambda r: has(r, "text"), _text, _PRETRAIN, _PRETRAIN),
)  # fmt: skip
