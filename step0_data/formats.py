"""Record forms: recognises how a row of someone else's data is laid out and converts it to ours.

`FORMS` is the one table. A form is a name, the columns it is known by (shown to people), a test and a conversion;
the first form whose test passes wins, so special forms stand above general ones. To teach the program another
dialect, add one line there and one function below it.

Text is kept as it is, but for white space around the turns of a dialogue that was cut out of one string.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

STAGES = ("sft", "preference", "prompts", "pretrain")


class BadRow(ValueError):
    """A row that cannot be used: `reason` is counted in the ledger, `fix` says what to do about it."""

    def __init__(self, reason: str, fix: str):
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix = reason, fix


@dataclass(frozen=True)
class Record:
    """A row in our own terms; a part that its form does not have is None."""

    prompt: list[dict] | None = None
    answer: list[dict] | None = None  # a demonstration, or the better answer of a pair
    rejected: list[dict] | None = None
    margin: float | None = None
    text: str | None = None
    extra: dict = field(default_factory=dict)  # other columns: prompts keep them, for reward functions
    set_aside: str | None = None  # a legitimate row that serves no stage, and why


@dataclass(frozen=True)
class Form:
    name: str
    columns: str
    recognises: Callable[[dict], bool]
    convert: Callable[[dict], Record]
    feeds: tuple[str, ...]  # stages it serves by itself
    can_feed: tuple[str, ...]  # stages it serves when asked with --stages


def recognise(row: dict) -> Form:
    """The form of a row.

    Raises:
        BadRow: none fits, naming the columns seen and the forms known.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a row is a {type(row).__name__}, not an object with named columns", "wanted one object a row")
    for form in FORMS:
        if form.recognises(row):
            return form
    if "transcript" in row and "rating" in row:  # red-team-attempts, beside the pairs of hh-rlhf
        raise BadRow("a red-team transcript is one dialogue with a rating, no pair", "take a folder of pairs instead")
    known = " | ".join(form.columns for form in FORMS)
    seen = ", ".join(map(str, row)) or "none"
    raise BadRow(f"unknown form with the columns {seen}", f"rename columns to one of the forms known: {known}")


def convert(row: dict) -> tuple[Form, Record]:
    """A row's form and its content in our terms; BadRow when either cannot be had."""
    form = recognise(row)
    record = form.convert(row)
    for part in (record.prompt, record.answer, record.rejected):
        for message in part or ():
            _check_unicode(message["content"])
    if record.text is not None:
        _check_unicode(record.text)
    return form, record


# The forms -----------------------------------------------------------------------------------------------------------

QUESTION = ("question", "query", "problem")
ANSWER = ("answer", "response", "completion", "output", "targets", "solution")
COMPLETION = ("completion", "response", "output")  # beside a `prompt`; `answer` and `solution` there are references
LABEL = ("label", "kto_tag")
_ROLES = {
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bot", "model", "function_call")},
    **{name: "tool" for name in ("tool", "observation", "function")},
    "system": "system",
}


def _is_pair(row: dict) -> bool:
    return _has(row, "chosen") and any(_has(row, name) for name in ("rejected", "rejected_response"))


def _pair(row: dict) -> Record:
    """`chosen` + `rejected`, with a `prompt`, Alpaca's or ShareGPT's in front, or with the prompt inside both."""
    name = "rejected" if _has(row, "rejected") else "rejected_response"
    has_prompt = any(_has(row, column) for column in ("prompt", "conversations", "instruction", *QUESTION))
    chosen, rejected = (_answer_side(row[column], column, has_prompt) for column in ("chosen", name))
    used = {"chosen", name, "prompt", "conversations", "messages", *_ALPACA}
    prompt = None
    if _has(row, "prompt"):
        prompt = _prompt(row["prompt"], "prompt")
    elif _has(row, "conversations"):
        prompt = _with_system(row, messages_of(row["conversations"], "conversations"))
    elif _has(row, "instruction"):
        prompt = _alpaca_prompt(row)
    else:
        used |= set(QUESTION)
        question = next((q for q in QUESTION if _has(row, q)), None)
        prompt = _prompt(row[question], question) if question else None

    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("chosen and rejected are of different kinds", "make both strings or both lists of messages")
    if isinstance(chosen, str) and prompt is None:
        prompt, chosen, rejected = _split_common_text(chosen, rejected)
    if isinstance(chosen, str):
        chosen, rejected = [_assistant(chosen)], [_assistant(rejected)]
    elif chosen and rejected and (chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant"):
        # Whole conversations: what both share is the prompt, whatever a `prompt` column repeats of it.
        for column, messages in (("chosen", chosen), (name, rejected)):
            _check_answer(messages, column)
        shared = _shared_prefix(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    _check_prompt(prompt)
    if max(len(chosen), len(rejected)) > 1:
        raise BadRow("chosen and rejected part before the last turn", "let them differ in the last answer only")
    for column, answer in (("chosen", chosen), (name, rejected)):
        _check_answer(answer, column)
    margin = row.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, (int, float)) or math.isnan(margin)):
        raise BadRow(f"margin is {margin!r}", "wanted a number")
    extra = _rest(row, used | {"margin"})
    return Record(prompt, chosen, rejected, None if margin is None else float(margin), extra=extra)


def _conversation(row: dict) -> Record:
    """`messages` or ShareGPT's `conversations`: everything up to the last answer is context."""
    column = "messages" if _has(row, "messages") else "conversations"
    messages = _with_system(row, messages_of(row[column], column))
    while messages and messages[-1]["role"] != "assistant":
        raise BadRow(f"{column} ends with a {messages[-1]['role']} turn", "end it with the assistant's answer")
    _check_prompt(messages[:-1])
    _check_answer(messages[-1:], column)
    return Record(messages[:-1], messages[-1:], extra=_rest(row, {"messages", "conversations", "prompt", "system"}))


def _completion(row: dict) -> Record:
    """`prompt` + `completion`, and with `label` an unpaired preference: a bad answer is no demonstration."""
    column = next(c for c in COMPLETION if _has(row, c))
    prompt, value = _prompt(row["prompt"], "prompt"), row[column]
    answer = [_assistant(value)] if isinstance(value, str) else messages_of(value, column)
    _check_prompt(prompt)
    _check_answer(answer, column)
    label = next((row[c] for c in LABEL if _has(row, c)), None)
    label = (
        {"true": True, "false": False, "1": True, "0": False}.get(label.lower(), label)
        if isinstance(label, str)
        else label
    )
    if label is not None and label not in (True, False):
        raise BadRow(f"label is {label!r}", "wanted true or false")
    aside = "labelled as a bad answer: it is no demonstration" if label is not None and not label else None
    return Record(prompt, answer, extra=_rest(row, {"prompt", column, *LABEL}), set_aside=aside)


_ALPACA = ("instruction", "input", "output", "system", "history")


def _alpaca(row: dict) -> Record:
    """`instruction`, `input`, `output` (and `system`, `history`)."""
    column = "output" if row.get("output") is not None else "response"
    output = row.get(column)
    if not isinstance(output, str):
        raise BadRow(f"{column} is a {type(output).__name__}", "wanted the answer as a string")
    prompt, answer = _alpaca_prompt(row), [_assistant(output)]
    _check_prompt(prompt)
    _check_answer(answer, column)
    return Record(prompt, answer, extra=_rest(row, {*_ALPACA, column}))


def _alpaca_prompt(row: dict) -> list[dict]:
    parts = [row[c] for c in ("instruction", "input") if _has(row, c)]
    history = [
        _message(role, text)
        for turn in row.get("history") or ()
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return _with_system(row, [*history, _message("user", "\n".join(map(str, parts)))])


def _question(row: dict) -> Record:
    """`question` + `answer`: a worked example for SFT, and a prompt whose answer a rule can check."""
    question = next(q for q in QUESTION if _has(row, q))
    column = next(a for a in ANSWER if _has(row, a))
    prompt, answer = _prompt(row[question], question), [_assistant(str(row[column]))]
    _check_prompt(prompt)
    _check_answer(answer, column)
    return Record(prompt, answer, extra=_rest(row, {question}))


def _prompt_only(row: dict) -> Record:
    """`prompt` (or a question) with whatever other columns a reward function wants."""
    column = next(c for c in ("prompt", *QUESTION) if _has(row, c))
    prompt = _prompt(row[column], column)
    _check_prompt(prompt)
    return Record(prompt, extra=_rest(row, {column}))


def _text(row: dict) -> Record:
    if not isinstance(row["text"], str) or not row["text"].strip():
        raise BadRow("text is empty" if isinstance(row["text"], str) else "text is no string", "give it some text")
    return Record(text=row["text"])


def _has(row: dict, column: str) -> bool:
    """The column is there and says something; exporters pad rows with nulls and empty strings."""
    value = row.get(column)
    return (
        value is not None
        and not (isinstance(value, float) and math.isnan(value))
        and not (column in _SPARSE and value in ("", []))
    )


# Columns whose emptiness means "this row is of another form"; an empty `chosen` or `output` is a bad row instead.
_SPARSE = (
    "input",
    "system",
    "history",
    "prompt",
    "messages",
    "conversations",
    "instruction",
    "label",
    "kto_tag",
    *QUESTION,
)


def _any(row: dict, *columns: str) -> bool:
    return any(_has(row, c) for c in columns)


def _is_completion(row: dict) -> bool:
    return _has(row, "prompt") and _any(row, *COMPLETION)


def _is_alpaca(row: dict) -> bool:
    return _has(row, "instruction") and _any(row, "output", "response")


def _is_question(row: dict) -> bool:
    return not _has(row, "prompt") and _any(row, *QUESTION) and _any(row, *ANSWER)


_SFT, _PROMPTS, _BOTH = ("sft",), ("prompts",), ("sft", "prompts")
_ALL = ("sft", "preference", "prompts")

# Special forms stand above general ones: an UltraFeedback row has prompt, messages, chosen and rejected.
# name, columns, test, conversion, stages it feeds by itself, stages it can feed when asked
FORMS: tuple[Form, ...] = (
    Form("preference", "chosen + rejected (+ prompt)", _is_pair, _pair, _ALL, _ALL),
    Form("messages", "messages", lambda r: _has(r, "messages"), _conversation, _SFT, _BOTH),
    Form("sharegpt", "conversations", lambda r: _has(r, "conversations"), _conversation, _SFT, _BOTH),
    Form("completion", "prompt + completion (+ label)", _is_completion, _completion, _SFT, _BOTH),
    Form("alpaca", "instruction + output (+ input, system, history)", _is_alpaca, _alpaca, _SFT, _BOTH),
    Form("question", "question + answer", _is_question, _question, _BOTH, _BOTH),
    Form("prompt", "prompt (+ answer, ...)", lambda r: _any(r, "prompt", *QUESTION), _prompt_only, _PROMPTS, _PROMPTS),
    Form("text", "text", lambda r: _has(r, "text"), _text, ("pretrain",), ("pretrain",)),
)  # fmt: skip


# Parts ---------------------------------------------------------------------------------------------------------------


def messages_of(value, column: str) -> list[dict]:
    """A list of {role, content} or {from, value} as a list of {role, content} with our four role names."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(f"{column} is a {type(value).__name__}", "wanted a list of messages")
    messages = []
    for item in value:
        if not isinstance(item, dict):
            raise BadRow(f"{column} holds a {type(item).__name__}", "wanted messages: {role, content} or {from, value}")
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if str(role).lower() not in _ROLES:
            raise BadRow(f"{column} has the role {role!r}", f"roles known: {', '.join(_ROLES)}")
        messages.append(_message(_ROLES[str(role).lower()], _content(content, column)))
    return messages


def _content(value, column: str) -> str:
    if isinstance(value, list):  # content in parts, as multi-modal data has it
        if all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            return "".join(str(part.get("text", "")) for part in value)
        raise BadRow(f"{column} has content that is not text", "images and audio are not supported")
    if not isinstance(value, str):
        raise BadRow(f"{column} has a message whose content is a {type(value).__name__}", "wanted a string")
    return value


def _prompt(value, column: str) -> list[dict]:
    """A string is one user turn, unless it is itself a "Human: ... Assistant:" dialogue."""
    if not isinstance(value, str):
        return messages_of(value, column)
    dialogue = _dialogue(value) or [_message("assistant", value)]
    if dialogue[0]["role"] == "user" and dialogue[-1] == _assistant(""):
        return dialogue[:-1]
    return [_message("user", value)]


def _answer_side(value, column: str, has_prompt: bool) -> str | list[dict]:
    """`chosen` or `rejected`: a plain string, or messages (a dialogue in one string becomes messages)."""
    if not isinstance(value, str):
        return messages_of(value, column)
    dialogue = _dialogue(value)
    if dialogue and not has_prompt and dialogue[0]["role"] == "assistant":
        raise BadRow("the dialogue begins with an Assistant turn", "begin it with a Human turn or remove the row")
    is_whole = dialogue and dialogue[0]["role"] == "user" and (len(dialogue) > 1 or not has_prompt)
    return dialogue if is_whole else value


_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):(?=\s|$)")


def _dialogue(text: str) -> list[dict] | None:
    """The turns of HH's "\n\nHuman: ...\n\nAssistant: ..."; None for text that begins otherwise.

    Only a name after an empty line begins a turn: "Human:" anywhere else belongs to the text around it.
    """
    pieces = _TURN.split(text)
    if len(pieces) < 3 or pieces[0].strip():
        return None
    roles = ["user" if name == "Human" else "assistant" for name in pieces[1::2]]
    return [_message(role, content.strip()) for role, content in zip(roles, pieces[2::2], strict=True)]


def _shared_prefix(first: list[dict], second: list[dict]) -> int:
    """How many messages two conversations share, up to the answers they differ in (or the last, if they are equal)."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    while shared and (shared == min(len(first), len(second)) or first[shared - 1]["role"] == "assistant"):
        shared -= 1
    return shared


def _split_common_text(first: str, second: str) -> tuple[list[dict], str, str]:
    """The prompt inside two plain strings is what they share, up to the last white space of it."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    shared = max(first.rfind(" ", 0, shared), first.rfind("\n", 0, shared))
    if shared < 1:
        raise BadRow("there is no prompt: chosen and rejected share no beginning", "add a prompt column")
    return [_message("user", first[:shared])], first[shared:].lstrip(), second[shared:].lstrip()


def _with_system(row: dict, messages: list[dict]) -> list[dict]:
    system = row.get("system")
    has_one = messages and messages[0]["role"] == "system"
    return [_message("system", system), *messages] if isinstance(system, str) and system and not has_one else messages


def _check_prompt(prompt: list[dict] | None) -> None:
    if not prompt or not any(m["role"] == "user" and m["content"].strip() for m in prompt):
        raise BadRow("the prompt is empty: no user turn with text", "give the row a prompt")
    if prompt[-1]["role"] == "assistant":
        raise BadRow("the prompt ends with an assistant turn", "end it with the user's or a tool's turn")


def _check_answer(answer: list[dict], column: str) -> None:
    if not answer or answer[-1]["role"] != "assistant":
        raise BadRow(f"{column} does not end with an assistant turn", "end it with the assistant's answer")
    if not answer[-1]["content"].strip():
        raise BadRow(f"{column} is an empty answer", "give it an answer or remove the row")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("a text holds half a surrogate pair, which is no character", "write the character whole") from None


def _rest(row: dict, used: set[str]) -> dict:
    return {name: value for name, value in row.items() if name not in used}


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _assistant(content: str) -> dict:
    return _message("assistant", content)
