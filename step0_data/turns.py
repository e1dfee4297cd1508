"""Turns: what records are made of, and how turns are found in lists of messages and in "Human: ... Assistant:" texts.

Text is kept as it is, but for white space around the turns of a dialogue that was cut out of one string.
"""

import contextlib
import datetime
import decimal
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field


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
    set_aside: str | None = None  # a legitimate row that serves no stage, and why
    tools: str | None = None  # their definitions, as the JSON text of a list
    extra: dict = field(default_factory=dict)  # other columns: prompts keep them, for reward functions
    read: frozenset = frozenset()  # those of `extra` that are in the record too
    unread: tuple[str, ...] = ()  # what nothing keeps: columns of one answer, further keys of messages


def kind(value) -> str:
    """What a value is, in words for people."""
    if value is None or value != value:  # NaN is how tables write null
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, list, tuple, dict)) and not value:
        return "empty" if isinstance(value, str) else f"an empty {'object' if isinstance(value, dict) else 'list'}"
    kinds = {
        str: "text",
        (int, float, decimal.Decimal): "a number",
        (list, tuple): "a list",
        dict: "an object",
        bytes: "bytes",
        (datetime.date, datetime.time, datetime.timedelta): "a date or a time",
    }
    return next((words for types, words in kinds.items() if isinstance(value, types)), "no JSON value")


# JSON ----------------------------------------------------------------------------------------------------------------


class Twice(ValueError):
    """A name that stands twice in one object."""


def _object(pairs: list[tuple[str, object]]) -> dict:
    """An object whose names differ: json would keep the last value of a name, and say nothing."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Twice(next(name for name in found if names.count(name) > 1))
    return found


JSON = json.JSONDecoder(object_pairs_hook=_object)
_BAD_JSON = (ValueError, RecursionError)


def as_list(value):
    """A list that stands in a cell as JSON text, as in a csv; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(*_BAD_JSON):
            return JSON.decode(value)
    return value


# Lists of messages ---------------------------------------------------------------------------------------------------

ROLES = {
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bot", "model", "function_call", "tool_call")},
    **{name: "tool" for name in ("tool", "observation", "function", "tool_response")},
    **{name: "system" for name in ("system", "developer")},
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_UNREAD = ("reasoning_content", "reasoning", "thinking", "refusal")  # of an assistant message, beside its content
_ELSEWHERE = {"tools": "tools", "functions": "tools", "images": None, "image": None, "audio": None, "video": None}
# Whether an answer is trained, as OpenAI, ms-swift and XTuner, axolotl, and Tinker spell it.
WEIGHTS = ("weight", "loss", "train", "training", "trainable")
_DETAILS = ("train_detail", "training_detail", "loss_scale")  # weights of parts of an answer
KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", *WEIGHTS, *_DETAILS, *_UNREAD}
# How a list of messages written as text begins: by JSON, or by Python.
_WRITTEN = re.compile(
    rf"""\s*\[?\s*\{{(?=.*?['"](?:content|value)['"]\s*:).*?['"](?:role|from)['"]\s*:\s*['"](?:{"|".join(ROLES)})['"]""",
    re.DOTALL | re.IGNORECASE,
)


def unwritten(value, column: str):
    """Messages that stand in a cell as JSON text, as in a csv; any other value as it is.

    Raises:
        BadRow: they are written otherwise, as by Python.
    """
    if not isinstance(value, str) or value.strip()[-1:] not in ("]", "}") or not _WRITTEN.match(value[:2000]):
        return value
    try:
        found = JSON.decode(value.strip())
    except Twice as error:
        raise BadRow(f"{column} has a name that stands twice in one message", f"keep one {str(error)!r}") from None
    except _BAD_JSON:
        way_out = "write them as JSON (json.dumps), or give the rows as jsonl"
        raise BadRow(f"{column} is a list of messages written as text that is no JSON", way_out) from None
    items = found if isinstance(found, list) else [found]
    is_messages = all(
        isinstance(it, dict)
        and str(it.get("role") or it.get("from")).lower() in ROLES
        and {"content", "value", "tool_calls", "function_call"} & it.keys()
        for it in items
    )
    return found if is_messages else value


def messages_of(value, column: str) -> list[dict]:
    """A list of {role, content} or {from, value} as a list of {role, content} with our four role names.

    An answer that is not to be trained has `weight` 0 beside them.
    """
    value = unwritten(value, column)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        wanted = "a list of messages" if column in ("messages", "conversations") else "text or a list of messages"
        quotes = " (text stands in quotes)" if kind(value) in ("a number", "true", "false") else ""
        raise BadRow(f"{column} is {kind(value)}", f"wanted {wanted}{quotes}")
    messages = []
    for item in value:
        if not isinstance(item, dict):
            raise BadRow(f"{column} is a list that holds {kind(item)}", "wanted messages: {role, content}")
        said = _one_of(item, "role", "from", column)
        if said is None:
            raise BadRow(f"{column} has a message without a role", "wanted {role, content} or {from, value}")
        role = ROLES.get(str(said).lower())
        if role is None:
            raise BadRow(f"{column} has the role {said!r}", f"roles known: {', '.join(ROLES)}")
        found = message(role, _said(item, role, column))
        if not _is_trained(item, role, column):
            found["weight"] = 0
        messages.append(found)
    return messages


def _one_of(item: dict, ours: str, theirs: str, column: str):
    """What a message has under either name; under both it has to be the same."""
    first, second = item.get(ours), item.get(theirs)
    if first is not None and second is not None and first != second:
        raise BadRow(f"{column} has a message whose {ours} and {theirs} differ", "keep one of them")
    return second if first is None else first


def _is_trained(item: dict, role: str, column: str) -> bool:
    """What the message's weight says; only answers can be trained."""
    for key in _DETAILS:
        if item.get(key) is not None:
            raise BadRow(f"{column} has a message with {key}, which no stage reads", "give whole turns a weight")
    said = {key: item[key] for key in WEIGHTS if kind(item.get(key)) != "null"}
    for key, value in said.items():
        if isinstance(value, (str, list, dict)) or value not in (0, 1):
            raise BadRow(f"{column} has a message whose {key} is {value!r:.40}", "wanted 0 or 1, true or false")
        if value and role != "assistant":
            raise BadRow(
                f"{column} has a {role} turn whose {key} is {value!r}", "only answers are trained: take it off"
            )
    if len(set(map(bool, said.values()))) > 1:
        raise BadRow(f"{column} has a message whose {' and '.join(said)} differ", "keep one of them")
    return role != "assistant" or all(said.values())


def _said(item: dict, role: str, column: str) -> str:
    """What a message says; the tool calls of the assistant are written as JSON, after the text if there is any."""
    for key in _UNREAD:
        if item.get(key):
            raise BadRow(f"{column} has a message with {key}, which no stage reads", "write it into content or drop it")
    for key, place in _ELSEWHERE.items():
        if item.get(key):
            if place is None:
                raise BadRow(f"multimodal: {column} has a message with {key}", "only text can be trained on")
            raise BadRow(f"{column} has a message with {key}", f"give them as a column, {place}, of the row")
    content = _one_of(item, "content", "value", column)
    calls = as_list(item.get("tool_calls")) or ([item["function_call"]] if item.get("function_call") else [])
    if not calls:
        return _content(content, column)
    if not isinstance(calls, list):
        raise BadRow(f"{column} has tool_calls that are {kind(calls)}", "wanted a list of calls")
    if role != "assistant":
        raise BadRow(
            f"{column} has a {role} turn with tool_calls", "only the assistant calls: write them into its turn"
        )
    text = "" if content is None else _content(content, column)
    written = [_call(call, column) for call in calls]
    return (text and text + "\n") + (written[0] if len(written) == 1 else f"[{', '.join(written)}]")


def _call(call, column: str) -> str:
    """A tool call as JSON. Arguments that are JSON already, as in OpenAI's form, stand there letter by letter."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{column} has a tool call without a name", "wanted {function: {name, arguments}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(*_BAD_JSON):
            json.loads(arguments)
            return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}'
    return json_text({"name": function["name"], "arguments": arguments}, f"{column} has a tool call that")


def json_text(value, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise BadRow(f"{what} cannot be written as JSON", "keep to what JSON can hold") from None


def _content(value, column: str) -> str:
    if isinstance(value, list) and value:  # content in parts, as multi-modal data has it
        for part in value:
            part_kind = part.get("type") if isinstance(part, dict) else None
            if part_kind is None:
                raise BadRow(f"{column} has a part without a type", "wanted {type: text, text: ...}")
            if part_kind not in _TEXT_PARTS:
                raise BadRow(
                    f"multimodal: {column} has a part of the type {part_kind!r}", "only text can be trained on"
                )
            if not isinstance(part.get("text"), str):
                raise BadRow(f"{column} has a text part without text", "wanted {type: text, text: ...}")
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise BadRow(f"{column} has a message whose content is {kind(value)}", "wanted text")
    return value


# Dialogues in one string ---------------------------------------------------------------------------------------------

_NAME = r"(Human|Assistant):(?=\s|$)"
_FIRST_NAME = re.compile(r"\s*(?:Human|Assistant):")
_TURN, _TURN_IN_A_LINE = re.compile(r"(?:^|\n\n)" + _NAME), re.compile(r"(?:^|\s)" + _NAME)


def dialogue_of(text: str) -> list[dict] | None:
    """The turns of HH's "\n\nHuman: ...\n\nAssistant: ..."; None for text that begins otherwise.

    Only a name after an empty line begins a turn: "Human:" anywhere else belongs to the text around it.
    """
    return _turns(_TURN.split(text)) if _FIRST_NAME.match(text) else None


def prompt_of(value, column: str) -> tuple[list[dict], bool]:
    """(turns, whether they were cut out of a dialogue that the answer goes on with).

    A string is one user turn, unless it is a "Human: ... Assistant:" dialogue, in HH's form or, as DeepSpeed-Chat
    writes it, with spaces between the turns (then the names have to alternate).
    """
    value = unwritten(value, column)
    if not isinstance(value, str):
        return messages_of(value, column), False
    dialogue = dialogue_of(value)
    if not _is_open(dialogue) and _FIRST_NAME.match(value) and value.rstrip().endswith("Assistant:"):
        dialogue = _turns(_TURN_IN_A_LINE.split(value))
        roles = [turn["role"] for turn in dialogue or ()]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            dialogue = None
    return (dialogue[:-1], True) if _is_open(dialogue) else ([message("user", value)], False)


def _turns(pieces: list[str]) -> list[dict] | None:
    if len(pieces) < 3 or pieces[0].strip():
        return None
    roles = ["user" if name == "Human" else "assistant" for name in pieces[1::2]]
    return [message(role, content.strip()) for role, content in zip(roles, pieces[2::2], strict=True)]


def _is_open(dialogue: list[dict] | None) -> bool:
    return bool(dialogue) and dialogue[-1] == assistant("") and has_user(dialogue)


# Parts and checks ----------------------------------------------------------------------------------------------------


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def assistant(content: str) -> dict:
    return message("assistant", content)


def has_user(messages: list[dict]) -> bool:
    return any(m["role"] == "user" for m in messages)


def check_prompt(prompt: list[dict] | None) -> None:
    """What stands before an answer. It may begin with the assistant's greeting, which is context."""
    if not prompt or not any(m["role"] == "user" and m["content"].strip() for m in prompt):
        raise BadRow("the prompt is empty: no user turn with text", "give the row a prompt")
    roles = [m["role"] for m in prompt]
    if "system" in roles[1:]:
        raise BadRow("roles out of order: a system turn after the first turn", "put the system text first")
    steps = zip(["", *roles], roles, strict=False)
    if any(role == "tool" and before not in ("assistant", "tool") for before, role in steps):
        raise BadRow("roles out of order: a tool answers where nobody called it", "put the assistant's call before it")
    for number, turn in enumerate(prompt, 1):
        if turn["role"] in ("user", "assistant") and not turn["content"].strip():
            who = "answer" if turn["role"] == "assistant" else "user turn"
            raise BadRow(f"an empty {who} stands before the last turn", f"give turn {number} a text or remove the row")
    if roles[-1] == "assistant":
        raise BadRow("the prompt ends with an assistant turn", "end it with the user's or a tool's turn")


def check_answer(answer: list[dict], column: str) -> None:
    if not answer:
        raise BadRow(f"{column} is an empty list", "give it an answer or remove the row")
    if answer[-1]["role"] != "assistant":
        raise BadRow(f"{column} does not end with an assistant turn", "end it with the assistant's answer")
    if not answer[-1]["content"].strip():
        raise BadRow(f"{column} is an empty answer", "give it an answer or remove the row")


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("a text holds half a surrogate pair, which is no character", "write the character whole") from None
