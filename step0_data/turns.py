"""Turns: what records are made of, and how turns are found in lists of messages and in "Human: ... Assistant:" texts.

Text is kept as it is, but for white space around the turns of a dialogue that was cut out of one string.
"""

import contextlib
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
    extra: dict = field(default_factory=dict)  # other columns: prompts keep them, for reward functions
    set_aside: str | None = None  # a legitimate row that serves no stage, and why


# Lists of messages ---------------------------------------------------------------------------------------------------

ROLES = {
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bot", "model", "function_call", "tool_call")},
    **{name: "tool" for name in ("tool", "observation", "function", "tool_response")},
    **{name: "system" for name in ("system", "developer")},
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_UNREAD = ("reasoning_content", "reasoning", "thinking")  # of an assistant message, beside its content


def messages_of(value, column: str) -> list[dict]:
    """A list of {role, content} or {from, value} as a list of {role, content} with our four role names."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise BadRow(f"{column} is a {type(value).__name__}", "wanted a list of messages")
    messages = []
    for item in value:
        if not isinstance(item, dict):
            raise BadRow(f"{column} holds a {type(item).__name__}", "wanted messages: {role, content} or {from, value}")
        role = item.get("role") if item.get("role") is not None else item.get("from")
        if str(role).lower() not in ROLES:
            raise BadRow(f"{column} has the role {role!r}", f"roles known: {', '.join(ROLES)}")
        messages.append(message(ROLES[str(role).lower()], _said(item, column)))
    return messages


def _said(item: dict, column: str) -> str:
    """What a message says; the tool calls of the assistant are written as JSON, after the text if there is any."""
    for key in _UNREAD:
        if item.get(key):
            raise BadRow(f"{column} has a message with {key}, which no stage reads", "write it into content or drop it")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if not calls:
        return _content(content, column)
    if not isinstance(calls, list):
        raise BadRow(f"{column} has tool_calls that are a {type(calls).__name__}", "wanted a list of calls")
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
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(arguments)
            return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments}}}'
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _content(value, column: str) -> str:
    if isinstance(value, list):  # content in parts, as multi-modal data has it
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _TEXT_PARTS:
                raise BadRow(f"multimodal: {column} has a part of the type {kind!r}", "only text can be trained on")
            if not isinstance(part.get("text"), str):
                raise BadRow(f"{column} has a text part without text", "wanted {type: text, text: ...}")
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise BadRow(f"{column} has a message whose content is a {type(value).__name__}", "wanted a string")
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
    return bool(dialogue) and dialogue[0]["role"] == "user" and dialogue[-1] == assistant("")


# Parts and checks ----------------------------------------------------------------------------------------------------


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def assistant(content: str) -> dict:
    return message("assistant", content)


def check_prompt(prompt: list[dict] | None) -> None:
    if not prompt or not any(m["role"] == "user" and m["content"].strip() for m in prompt):
        raise BadRow("the prompt is empty: no user turn with text", "give the row a prompt")
    roles = [m["role"] for m in prompt]
    if "system" in roles[1:]:
        raise BadRow("roles out of order: a system turn after the first turn", "put the system text first")
    if roles[1 if roles[0] == "system" else 0] != "user":
        raise BadRow(f"roles out of order: the conversation begins with the {roles[0]}", "let the user begin")
    steps = zip(roles, roles[1:], strict=False)
    if any(role == "tool" and before not in ("assistant", "tool") for before, role in steps):
        raise BadRow("roles out of order: a tool answers where nobody called it", "put the assistant's call before it")
    if roles[-1] == "assistant":
        raise BadRow("the prompt ends with an assistant turn", "end it with the user's or a tool's turn")


def check_answer(answer: list[dict], column: str) -> None:
    if not answer or answer[-1]["role"] != "assistant":
        raise BadRow(f"{column} does not end with an assistant turn", "end it with the assistant's answer")
    if not answer[-1]["content"].strip():
        raise BadRow(f"{column} is an empty answer", "give it an answer or remove the row")


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("a text holds half a surrogate pair, which is no character", "write the character whole") from None
