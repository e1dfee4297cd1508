"""Turns conversations into token ids: the chat template, where a turn ends, which tokens are trained, what is cut.

Every stage builds its tokens here, so that the sequence a model is trained on has, as an exact prefix, the
very ids the actor is shown at rollout time:

    encode_conversation(prompt + [answer]) == encode_prompt(prompt) + answer ids, the last of them the turn end

Two things make that harder than calling the tokenizer on the whole text. A tokenizer may merge the last
characters of the prompt with the first of the answer ("=" + "12" -> "=1", "2"), which no rollout can do; and
many base models have no turn-end token in their template. So text is tokenised in segments: in context where
that leaves the ids before it unchanged, on its own where it does not; and the turn end is put in as an id.
BOS comes from the template only (`add_special_tokens=False` everywhere): it can be neither missing nor doubled.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
from dataclasses import dataclass

from common.chat_rendering import (
    SENTINEL,
    RowError,
    back_to_a_word,
    ensure_template,
    marker_ids,
    probe,
    render,
    tokens_of,
)
from common.chat_templates import BUILTIN_TEMPLATES

__all__ = ["BUILTIN_TEMPLATES", "RowError", "ensure_template", "marker_ids"]  # of other files, for users of this one


def turn_end_id(tokenizer) -> int:
    """The token that ends an assistant turn: the one the template prints after the answer, else EOS."""
    return probe(tokenizer).end_id


def stop_ids(tokenizer, generation_config_eos: int | list[int] | None = None) -> tuple[int, ...]:
    """The tokens that end a response: the turn end first, then what the generation config names."""
    extra = [generation_config_eos] if isinstance(generation_config_eos, int) else list(generation_config_eos or ())
    return tuple(dict.fromkeys([turn_end_id(tokenizer), *extra]))


# ---- conversations to ids


@dataclass
class _Encoded:
    text: str
    ids: list[int]
    mask: list[bool]
    # The last turn end: text before it is no context to what follows, since no tokenizer merges across its token, or,
    # where it was put in as an id, since the text does not show it.
    text_start: int = 0
    ids_start: int = 0
    answer_at: int = 0  # where in the text the last answer begins
    trouble: tuple[str, str] | None = None  # why the last answer must not be trained: a RowError's reason, detail

    def extended(self, tokenizer, text: str, trained: bool) -> _Encoded:
        new = _continuation(tokenizer, self.text[self.text_start :], self.ids[self.ids_start :], text) if text else []
        return _Encoded(
            self.text + text, self.ids + new, self.mask + [trained] * len(new), self.text_start, self.ids_start
        )


def _continuation(tokenizer, context: str, context_ids: list[int], text: str) -> list[int]:
    """Ids of `text` as it follows `context`, whose ids are already fixed."""
    if context:
        whole = tokens_of(tokenizer, context + text)
        if whole[: len(context_ids)] == context_ids:
            return whole[len(context_ids) :]
    alone = tokens_of(tokenizer, text)
    if _adds_prefix_space(tokenizer):
        # Some sentencepiece tokenizers put a space before any text they are given: hide it behind a newline.
        anchor, whole = tokens_of(tokenizer, "\n"), tokens_of(tokenizer, "\n" + text)
        if whole[: len(anchor)] == anchor:
            return whole[len(anchor) :]
    return alone


def _adds_prefix_space(tokenizer) -> bool:
    first = tokenizer.convert_ids_to_tokens(tokens_of(tokenizer, "a")[:1])
    return bool(first) and first[0][:1] in ("\u2581", "\u0120")


def _check_messages(messages) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RowError("not a list of messages", f"got {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("not a list of messages with role and content", f"got {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise RowError("a message without text", f"role {message['role']}, content {message.get('content')!r:.80}")


def is_context_only(message: dict) -> bool:
    """Whether the data says that an answer is never trained: `weight` 0. Absent or null means 1."""
    return message.get("weight") is not None and not message["weight"]


def tools_of(row: dict) -> list[dict] | None:
    """The definitions of tools that a row brings in its column `tools`, which is JSON text. Raises RowError."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("the column tools is no JSON text", str(error)) from error
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("the column tools is no list of definitions", f"got {tools!r:.80}")
    return tools or None


def leaves_out(tokenizer, messages, tools: list[dict]) -> bool:
    """Whether the model does not get to see these tools: the template prints no definitions, or not all."""
    text = render(tokenizer, messages, tools=tools)
    names = [tool.get("function", tool).get("name") for tool in tools if isinstance(tool.get("function", tool), dict)]
    return text == render(tokenizer, messages) or not all(str(name) in text for name in names)


def _encode_prompt(tokenizer, messages, tools) -> _Encoded:
    """All turns and the generation prompt."""
    text = render(tokenizer, messages, True, tools)
    _check_printed(messages, text)
    return _encode_turns(tokenizer, messages, tools, text)


def _check_printed(messages, text: str) -> None:
    for message in messages:
        if message["role"] != "assistant" and not _is_in(message["content"], text):
            shown = repr(message["content"][:80])
            raise RowError(f"the chat template leaves out what a turn of role {message['role']} says", shown)


def _encode_turns(tokenizer, messages, tools, text: str) -> _Encoded:
    """`text`, which holds these turns as the template prints them; earlier answers end in their turn end.

    That is so where the template lets them stand. It may rewrite answers once they are history (drop reasoning, say);
    then they are context, as the template prints them, and so are answers before which nothing was asked.
    """
    later, answers = text, []
    for i in reversed(range(1, len(messages))):
        if messages[i]["role"] == "assistant":
            try:
                found = _find_answer(tokenizer, messages[: i + 1], tools)
            except RowError:  # it prints this turn only where others follow, or nothing was asked before it
                break
            if not later.startswith(found.before + found.answer):
                break
            answers.append((messages[i], found))
            later = found.before
    ids = tokens_of(tokenizer, later)
    encoded = _Encoded(later, ids, [False] * len(ids))
    for message, found in reversed(answers):
        prompt = _followed(tokenizer, encoded, found.before)
        encoded = _answered(tokenizer, prompt, message["content"], found)
        if encoded.trouble or is_context_only(message):  # no model should give this answer: it stays as context
            encoded.mask[len(prompt.ids) :] = [False] * (len(encoded.ids) - len(prompt.ids))
    return _followed(tokenizer, encoded, text)


def _is_in(content: str, text: str) -> bool:
    """Whether a template has printed a content: trimmed, re-spaced or as JSON, as some do, but all of it."""
    if content.strip() in text:
        return True
    text = _squeezed(text)
    return any(_squeezed(said) in text for said in (content, json.dumps(content, ensure_ascii=False)[1:-1]))


def _followed(tokenizer, past: _Encoded, text: str) -> _Encoded:
    """`text`, which begins with the past's, as context after it."""
    return past.extended(tokenizer, text[len(past.text) :], trained=False)


@dataclass(frozen=True)
class _Answer:
    """Where the template prints the last message of a conversation."""

    before: str  # all text before it
    answer: str  # up to and with the turn end, where one is printed
    content: str  # the text that has to hold the message's: the answer, after what the generation prompt had of it


def _find_answer(tokenizer, messages, tools) -> _Answer:
    if len(messages) == 1:
        raise RowError("the conversation starts with the assistant: there is no prompt")
    printed = probe(tokenizer)
    prompt = render(tokenizer, messages[:-1], True, tools)
    full = render(tokenizer, messages, False, tools)
    head = prompt.removesuffix(printed.opened)
    if full.startswith(head):
        start, turn = len(prompt) if full.startswith(prompt) else len(head), len(head)
    else:
        start, turn = _start_otherwise(tokenizer, messages, tools, prompt, full)
    answer, content = full[start:], full[turn:]
    if printed.end_text and printed.end_text in answer:
        answer = answer[: answer.rfind(printed.end_text) + len(printed.end_text)]
    elif printed.tail and answer.endswith(printed.tail):
        answer = answer[: -len(printed.tail)]
    return _Answer(full[:start], answer, content)


def _start_otherwise(tokenizer, messages, tools, prompt: str, full: str) -> tuple[int, int]:
    """Where the last answer and its turn begin in `full`, which does not go on from the generation prompt."""
    turns = render(tokenizer, messages[:-1], False, tools)
    shared = os.path.commonprefix([prompt, full])
    if shared.startswith(turns):  # they part within what opens the answer ("<think>\n\n</think>" for "<think>\nhm")
        return len(turns) + len(back_to_a_word(shared[len(turns) :])), len(turns)
    marked = render(tokenizer, messages[:-1] + [{"role": "assistant", "content": SENTINEL}], False, tools)
    start = marked.rfind(SENTINEL)
    if start < 0 or marked[:start] != full[:start]:
        raise RowError("the chat template moves the answer about, so its start cannot be found")
    return start, start


def _answered(tokenizer, prompt: _Encoded, content: str, found: _Answer) -> _Encoded:
    """A prompt and the answer found after it, up to and including its turn end."""
    printed, answer = probe(tokenizer), found.answer
    encoded = prompt.extended(tokenizer, answer, trained=True)
    encoded.answer_at = len(prompt.text)
    if encoded.ids[len(prompt.ids) :][-1:] != [printed.end_id]:
        encoded.ids.append(printed.end_id)
        encoded.mask.append(True)
        encoded.text_start, encoded.ids_start = len(encoded.text), len(encoded.ids)
    elif printed.end_text and answer.endswith(printed.end_text):
        encoded.text_start, encoded.ids_start = len(encoded.text) - len(printed.end_text), len(encoded.ids) - 1
    early = [i for i in encoded.ids[len(prompt.ids) : -1] if i in (printed.end_id, tokenizer.eos_token_id)]
    if early:
        shown = tokenizer.convert_ids_to_tokens(early)[0]
        encoded.trouble = (f"an answer holds the text of the stop token {shown}", repr(content[:80]))
    elif content.strip() not in found.content and _squeezed(content) not in _squeezed(found.content):
        # Templates may trim or re-space an answer, but one that has lost words is not what the data says.
        encoded.trouble = ("the chat template leaves out part of an answer", repr(content[:80]))
    elif tag := _opened_twice(content, found.content):
        encoded.trouble = (f"the chat template opens {tag} before an answer that opens it itself", repr(content[:80]))
    elif printed.end_text and printed.end_text not in answer:
        encoded.trouble = (f"the chat template prints no {printed.end_text} after an answer", repr(content[:80]))
    return encoded


def _opened_twice(content: str, printed: str) -> str | None:
    """The tag that an answer begins with, where the template has put one like it in front."""
    tag = re.match(r"\s*(<[^<>/\s]+>|\[[^\[\]/\s]+\])", content)
    before, found, _ = printed.partition(content.strip())
    return tag[1] if tag and found and tag[1] in before else None


def _encode_answered(tokenizer, messages, tools, prompt: _Encoded | None = None) -> _Encoded:
    """A conversation whose last message is the assistant's, up to and including its turn end.

    `prompt` saves work: the encoding of all messages but the last, where the caller has it.
    """
    found = _find_answer(tokenizer, messages, tools)
    if prompt is None or prompt.text != found.before:
        prompt = _encode_turns(tokenizer, messages[:-1], tools, found.before)
    return _answered(tokenizer, prompt, messages[-1]["content"], found)


def _encode_trained(tokenizer, messages, tools, prompt: _Encoded | None = None) -> _Encoded:
    encoded = _encode_answered(tokenizer, messages, tools, prompt)
    _check_printed(messages, encoded.text[: encoded.answer_at])
    if encoded.trouble:
        raise RowError(*encoded.trouble)
    return encoded


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _checked_prompt(messages) -> list[dict]:
    _check_messages(messages)
    if messages[-1]["role"] == "assistant":
        raise RowError("the prompt ends with an answer", repr(messages[-1]["content"][:80]))
    return list(messages)


def encode_prompt(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Ids the actor is shown: all turns and the generation prompt. Raises RowError (a UserError)."""
    return _encode_prompt(tokenizer, _checked_prompt(messages), tools).ids


def last_answer(messages: list[dict]) -> int:
    """The number of the last answer that is trained. Raises RowError where there is none."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise RowError("no assistant turn")
    trained = [i for i in answers if not is_context_only(messages[i])]
    if not trained:
        raise RowError("no assistant turn is trained: all have weight 0")
    return trained[-1]


def encode_conversation(
    tokenizer, messages: list[dict], tools: list[dict] | None = None
) -> tuple[list[int], list[bool]]:
    """Ids up to the turn end of the last trained answer, and a mask: True on answers, each with its one turn end.

    Messages after that answer are left out, as is what the template prints after its turn end. Answers of weight 0 are
    context only; so are earlier ones that the template rewrites (see `rewrites_history`), that hold the text of the
    stop token, or before which nothing was asked. Raises RowError.
    """
    _check_messages(messages)
    encoded = _encode_trained(tokenizer, list(messages[: last_answer(messages) + 1]), tools)
    return encoded.ids, encoded.mask


def encode_scored(tokenizer, messages: list[dict], truncated: bool, tools: list[dict] | None = None) -> list[int]:
    """Ids of a conversation whose last answer was sampled, for a model that only scores it.

    No text that a model may come up with is refused, not even a stop token's. A truncated answer gets no turn end:
    it never said that its turn ends. Raises RowError where the template refuses the prompt.
    """
    _check_messages(messages)
    ids = _encode_answered(tokenizer, list(messages), tools).ids
    return ids[:-1] if truncated else ids


def encode_pair(
    tokenizer, prompt: list[dict], chosen: list[dict], rejected: list[dict], tools: list[dict] | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Ids of the prompt and of the two answers without it, each ending in its turn end. Raises RowError.

    The prompt is what the actor is shown, or less of it where an answer is printed without the end of that.
    """
    prompt = _checked_prompt(prompt)
    before = _encode_prompt(tokenizer, prompt, tools)
    answers = []
    for answer in (chosen, rejected):
        _check_messages(answer)
        if answer[-1]["role"] != "assistant":
            raise RowError("an answer of a pair ends with another role", answer[-1]["role"])
        answers.append(
            _encode_trained(tokenizer, prompt + list(answer), tools, before if len(answer) == 1 else None).ids
        )
    shared = before.ids
    if any(ids[: len(shared)] != shared for ids in answers):
        shared = _encode_turns(tokenizer, prompt, tools, before.text.removesuffix(probe(tokenizer).opened)).ids
    if any(ids[: len(shared)] != shared for ids in answers):
        raise RowError("the chat template rewrites the prompt when an answer of several turns follows")
    return shared, answers[0][len(shared) :], answers[1][len(shared) :]


def trained_spans(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[tuple[str, bool]]:
    """A conversation as the pieces of text that are trained (True) and that are context only (False), for people.

    Put together they are the text of `encode_conversation`'s ids, special tokens written out. Raises RowError.
    """
    ids, mask = encode_conversation(tokenizer, messages, tools)
    pieces, so_far = [], ""
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[end - 1]:
            # Decoded from the beginning, since many decoders drop a space in front of what they are given.
            text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
            pieces.append((text[len(so_far) :], mask[end - 1]))
            so_far = text
    return pieces


def rewrites_history(tokenizer) -> bool:
    """Whether the template prints an answer differently once another turn follows (then only last answers train)."""
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SENTINEL}]
    past = _encode_answered(tokenizer, answered, None)
    later = render(tokenizer, answered + [{"role": "user", "content": "Why?"}], generation_prompt=True)
    return not later.startswith(past.text)


def decode_answer(tokenizer, ids: list[int], stop_ids: tuple[int, ...] = ()) -> str:
    """The text of a sampled response as a message holds it, for people, rewards and judges.

    That is without its turn end and what the template puts between that and the answer, and with what the generation
    prompt began of it ("<think>\n"). Where another of `stop_ids` has ended it, without that one, which may be a token
    of ordinary text.
    """
    printed = probe(tokenizer)
    ids = list(ids)
    stop = next((i for i, token in enumerate(ids) if token == printed.end_id or token in stop_ids), None)
    ended = stop is not None and ids[stop] == printed.end_id
    ids = ids[:stop]
    lead = printed.lead
    led = not _holds_special(tokenizer, lead) or _text(tokenizer, ids, True).startswith(
        _text(tokenizer, tokens_of(tokenizer, lead), True)
    )
    text, lead = _text(tokenizer, ids), _as_decoded(tokenizer, lead)
    if printed.opened and not (led and lead.strip() and text.startswith(lead)):
        text = _as_decoded(tokenizer, printed.opened) + text
    elif led:
        text = text.removeprefix(lead)
    return text.removesuffix(_as_decoded(tokenizer, printed.gap)) if ended else text


def _text(tokenizer, ids: list[int], special: bool = False) -> str:
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def _holds_special(tokenizer, text: str) -> bool:
    return any(token.special and token.content in text for token in tokenizer.added_tokens_decoder.values())


def _as_decoded(tokenizer, text: str) -> str:
    """What is left of a template's text in a decoded answer."""
    return _text(tokenizer, tokens_of(tokenizer, text)) if _holds_special(tokenizer, text) else text


# ---- cutting


def fit_prompt(
    tokenizer, messages: list[dict], max_length: int, tools: list[dict] | None = None
) -> tuple[list[int], list[dict]] | None:
    """A prompt of at most `max_length` tokens: the oldest whole exchanges go first, never the system turn in
    front nor the last user turn. Returns its ids and the messages that are left, or None when those do not fit."""
    return _fit(tokenizer, _checked_prompt(messages), max_length, tools)


def _fit(tokenizer, messages: list[dict], max_length: int, tools) -> tuple[list[int], list[dict]] | None:
    ids = _encode_prompt(tokenizer, messages, tools).ids
    if len(ids) <= max_length:
        return ids, messages
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    # An exchange is a user turn and all up to the next one, so what is left opens with the user.
    users = [i for i, message in enumerate(messages) if message["role"] == "user" and i > len(system)]

    def fits(user: int) -> bool:
        return len(_encode_prompt(tokenizer, system + messages[user:], tools).ids) <= max_length

    at = bisect.bisect_left(users, True, key=fits)  # the later it begins, the shorter it is
    if at == len(users):
        return None
    messages = system + messages[users[at] :]
    return _encode_prompt(tokenizer, messages, tools).ids, messages


def fit_conversation(
    tokenizer, messages: list[dict], max_length: int, tools: list[dict] | None = None
) -> tuple[list[int], list[bool], list[dict]]:
    """As `encode_conversation`; where no answer begins within `max_length` tokens, the oldest exchanges go first.

    They go, as by `fit_prompt`, until the last answer does, or until none is left to go. The ids are not cut: what lies
    beyond is for the caller to drop and to count. Returns ids, mask and the messages that are left. Raises RowError.
    """
    ids, mask = encode_conversation(tokenizer, messages, tools)
    if True not in mask[:max_length]:
        last = last_answer(messages)
        if fitted := _fit(tokenizer, list(messages[:last]), max_length - 1, tools):
            messages = fitted[1] + list(messages[last:])
            ids, mask = encode_conversation(tokenizer, messages, tools)
    return ids, mask, messages
