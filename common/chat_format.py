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
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import jinja2

from common.chat_templates import BUILTIN_TEMPLATES, ending_in_eos, turn_end
from common.errors import UserError

_SENTINEL = "Sentinel42"
_NO_EOS = (
    "the tokenizer has no EOS token and its chat template prints none after an answer, so nothing could end a turn; "
    "set eos_token in tokenizer_config.json"
)


class RowError(UserError):
    """One conversation cannot be used; `reason` is the same for all rows with the same trouble, to be counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


# ---- the template and what it prints around an answer


def ensure_template(tokenizer, name_or_file: str | None) -> str:
    """Give the tokenizer a chat template if it has none; return, in words to print, which one is in force.

    The tokenizer's own template wins over `name_or_file` (a key of BUILTIN_TEMPLATES or a jinja file): a
    model that was trained with one format is not to be fed another by a default in a script.
    """
    known = ", ".join(BUILTIN_TEMPLATES)
    if tokenizer.chat_template:
        used = "the tokenizer's own chat template"
        if name_or_file:
            used += f" (--chat_template {name_or_file} not used: it is for tokenizers that have none)"
    elif not name_or_file:
        raise UserError(f"the tokenizer has no chat template; name one with --chat_template: {known}, or a jinja file")
    elif name_or_file in BUILTIN_TEMPLATES:
        template, end = BUILTIN_TEMPLATES[name_or_file], turn_end(name_or_file)
        used = f"the built-in chat template {name_or_file}"
        if end not in marker_ids(tokenizer):
            if tokenizer.eos_token is None:
                raise UserError(_NO_EOS)
            if end:
                # Typed out, "<|im_end|>" would be half a dozen ordinary tokens: no single token to stop on.
                template = ending_in_eos(name_or_file)
                used += f" (turns end in {tokenizer.eos_token!r}: the tokenizer has no {end} token)"
        tokenizer.chat_template = template
    else:
        path = Path(name_or_file)
        if not path.is_file():
            raise UserError(f"--chat_template {name_or_file}: neither a built-in ({known}) nor a file")
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"--chat_template {path}: not UTF-8 ({error.reason} at byte {error.start})") from error
        used = f"the chat template in {path}"
    header = _probe(tokenizer).header  # a template that cannot be rendered is found here, before any model is loaded
    if header:
        used += f" (it has no generation prompt: the model has to learn to write {header!r} itself)"
    return used


def marker_ids(tokenizer) -> dict[str, int]:
    """Text -> id of the tokens that the tokenizer never splits and never makes from ordinary words."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}


def _render(tokenizer, messages: list[dict], generation_prompt: bool = False) -> str:
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; name one with --chat_template")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # whatever a template may raise: TemplateError, TypeError on missing content, ...
        roles = " ".join(m["role"] for m in messages)
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        what = " ".join(str(error).split())
        raise RowError("the chat template refuses the conversation", f"{line}{what} (roles: {roles})") from error


def _tokens(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


@dataclass(frozen=True)
class _Probe:
    """What the template prints around an answer, found by rendering a known one."""

    lead: str  # between the generation prompt and the answer's text: " " for "Assistant:" + " yes"
    header: str  # the same, where it names the speaker: the template has no generation prompt
    tail: str  # after the answer's text, at the end of a conversation
    gap: str  # its part before the turn end: " " for "yes </s>"
    end_id: int  # the turn end
    end_text: str | None  # its text where the template prints it; None: we add it as an id


def _probe(tokenizer) -> _Probe:
    return _cached_probe(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token, len(tokenizer))


@functools.lru_cache(maxsize=16)
def _cached_probe(tokenizer, _template, _eos, _size) -> _Probe:
    # The underscored arguments are only there so that a changed tokenizer is probed again.
    question = [{"role": "user", "content": "Hi"}]
    prompt = _render(tokenizer, question, generation_prompt=True)
    full = _render(tokenizer, question + [{"role": "assistant", "content": _SENTINEL}])
    at = full.rfind(_SENTINEL)
    if at < 0:
        raise UserError("the chat template does not print the assistant's content; give another with --chat_template")
    lead = full[len(prompt) : at] if full[:at].startswith(prompt) else ""
    header = lead if lead.strip() and prompt == _render(tokenizer, question) else ""
    tail = full[at + len(_SENTINEL) :]
    for text, token_id in sorted(marker_ids(tokenizer).items(), key=lambda item: -len(item[0])):
        if tail.lstrip().startswith(text) and token_id in _tokens(tokenizer, tail):
            return _Probe(lead, header, tail, tail[: tail.index(text)], token_id, text)
    if tokenizer.eos_token_id is None:
        raise UserError(_NO_EOS)
    return _Probe(lead, header, tail, "", tokenizer.eos_token_id, None)


def turn_end_id(tokenizer) -> int:
    """The token that ends an assistant turn: the one the template prints after the answer, else EOS."""
    return _probe(tokenizer).end_id


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
    trouble: tuple[str, str] | None = None  # why the last answer must not be trained: a RowError's reason, detail

    def extended(self, tokenizer, text: str, trained: bool) -> _Encoded:
        new = _continuation(tokenizer, self.text[self.text_start :], self.ids[self.ids_start :], text) if text else []
        return _Encoded(
            self.text + text, self.ids + new, self.mask + [trained] * len(new), self.text_start, self.ids_start
        )


def _continuation(tokenizer, context: str, context_ids: list[int], text: str) -> list[int]:
    """Ids of `text` as it follows `context`, whose ids are already fixed."""
    if context:
        whole = _tokens(tokenizer, context + text)
        if whole[: len(context_ids)] == context_ids:
            return whole[len(context_ids) :]
    alone = _tokens(tokenizer, text)
    if _adds_prefix_space(tokenizer):
        # Some sentencepiece tokenizers put a space before any text they are given: hide it behind a newline.
        anchor, whole = _tokens(tokenizer, "\n"), _tokens(tokenizer, "\n" + text)
        if whole[: len(anchor)] == anchor:
            return whole[len(anchor) :]
    return alone


def _adds_prefix_space(tokenizer) -> bool:
    first = tokenizer.convert_ids_to_tokens(_tokens(tokenizer, "a")[:1])
    return bool(first) and first[0][:1] in ("\u2581", "\u0120")


def _check_messages(messages) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RowError("not a list of messages", f"got {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("not a list of messages with role and content", f"got {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise RowError("a message without text", f"role {message['role']}, content {message.get('content')!r:.80}")


def _encode_prompt(tokenizer, messages) -> _Encoded:
    """All turns and the generation prompt; earlier answers end in their turn end, where the template lets them stand.

    It may rewrite answers once they are history (drop reasoning, say). Then the actor sees the text as the template
    prints it, up to there.
    """
    text = later = _render(tokenizer, messages, generation_prompt=True)
    answers = []
    for i in reversed(range(len(messages))):
        if messages[i]["role"] == "assistant":
            before = _render_prompt(tokenizer, messages[:i])
            answer, full = _find_answer(tokenizer, messages[: i + 1], before)
            if not later.startswith(before + answer):
                break
            answers.append((messages[i]["content"], before, answer, full))
            later = before
    ids = _tokens(tokenizer, later)
    encoded = _Encoded(later, ids, [False] * len(ids))
    for content, before, answer, full in reversed(answers):
        prompt = _followed(tokenizer, encoded, before)
        encoded = _answered(tokenizer, prompt, content, answer, full)
        if encoded.trouble:  # no model should give this answer: it stays as context
            encoded.mask[len(prompt.ids) :] = [False] * (len(encoded.ids) - len(prompt.ids))
    return _followed(tokenizer, encoded, text)


def _render_prompt(tokenizer, messages) -> str:
    if not messages:
        raise RowError("the conversation starts with the assistant: there is no prompt")
    return _render(tokenizer, messages, generation_prompt=True)


def _followed(tokenizer, past: _Encoded, text: str) -> _Encoded:
    """`text`, which begins with the past's, as context after it."""
    return past.extended(tokenizer, text[len(past.text) :], trained=False)


def _find_answer(tokenizer, messages, prompt: str) -> tuple[str, str]:
    """What the template prints of the last message after the prompt, up to its turn end; and all that it prints."""
    probe = _probe(tokenizer)
    full = _render(tokenizer, messages)
    if full.startswith(prompt):
        answer = full[len(prompt) :]
    else:
        # The generation prompt holds text that a finished turn does not ("<think>\n"): the answer goes after it.
        marked = _render(tokenizer, messages[:-1] + [{"role": "assistant", "content": _SENTINEL}])
        start = marked.rfind(_SENTINEL)
        if marked[:start] != full[:start]:
            raise RowError("the chat template moves the answer about, so its start cannot be found")
        answer = full[start:]
    if probe.end_text and probe.end_text in answer:
        answer = answer[: answer.rfind(probe.end_text) + len(probe.end_text)]
    elif probe.tail and answer.endswith(probe.tail):
        answer = answer[: -len(probe.tail)]
    return answer, full


def _answered(tokenizer, prompt: _Encoded, content: str, answer: str, full: str) -> _Encoded:
    """A prompt and the answer found for it, up to and including its turn end."""
    probe = _probe(tokenizer)
    encoded = prompt.extended(tokenizer, answer, trained=True)
    if encoded.ids[len(prompt.ids) :][-1:] != [probe.end_id]:
        encoded.ids.append(probe.end_id)
        encoded.mask.append(True)
        encoded.text_start, encoded.ids_start = len(encoded.text), len(encoded.ids)
    elif probe.end_text and answer.endswith(probe.end_text):
        encoded.text_start, encoded.ids_start = len(encoded.text) - len(probe.end_text), len(encoded.ids) - 1
    early = [i for i in encoded.ids[len(prompt.ids) : -1] if i in (probe.end_id, tokenizer.eos_token_id)]
    if early:
        shown = tokenizer.convert_ids_to_tokens(early)[0]
        encoded.trouble = (f"an answer holds the text of the stop token {shown}", repr(content[:80]))
    elif content.strip() not in full and _squeezed(content) not in _squeezed(full):
        # Templates may trim or re-space an answer, but one that has lost words is not what the data says.
        encoded.trouble = ("the chat template leaves out part of an answer", repr(content[:80]))
    return encoded


def _encode_answered(tokenizer, messages, prompt: _Encoded | None = None) -> _Encoded:
    """A conversation whose last message is the assistant's, up to and including its turn end.

    `prompt` saves work: the encoding of all messages but the last, where the caller has it.
    """
    if len(messages) == 1:
        raise RowError("the conversation starts with the assistant: there is no prompt")
    prompt = prompt or _encode_prompt(tokenizer, messages[:-1])
    answer, full = _find_answer(tokenizer, messages, prompt.text)
    return _answered(tokenizer, prompt, messages[-1]["content"], answer, full)


def _encode_trained(tokenizer, messages, prompt: _Encoded | None = None) -> _Encoded:
    encoded = _encode_answered(tokenizer, messages, prompt)
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


def encode_prompt(tokenizer, messages: list[dict]) -> list[int]:
    """Ids the actor is shown: all turns and the generation prompt. Raises RowError (a UserError)."""
    return _encode_prompt(tokenizer, _checked_prompt(messages)).ids


def encode_conversation(tokenizer, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """Ids up to the last answer's turn end, and a mask: True on answers, each with its one turn end.

    Messages after the last answer are left out, as is what the template prints after its turn end. Earlier answers
    that the template rewrites (see `rewrites_history`), or that hold the text of the stop token, are context only.
    Raises RowError.
    """
    _check_messages(messages)
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise RowError("no assistant turn")
    encoded = _encode_trained(tokenizer, list(messages[: last + 1]))
    return encoded.ids, encoded.mask


def encode_scored(tokenizer, messages: list[dict], truncated: bool) -> list[int]:
    """Ids of a conversation whose last answer was sampled, for a model that only scores it.

    No text that a model may come up with is refused, not even a stop token's. A truncated answer gets no turn end:
    it never said that its turn ends. Raises RowError where the template refuses the prompt.
    """
    _check_messages(messages)
    ids = _encode_answered(tokenizer, list(messages)).ids
    return ids[:-1] if truncated else ids


def encode_pair(
    tokenizer, prompt: list[dict], chosen: list[dict], rejected: list[dict]
) -> tuple[list[int], list[int], list[int]]:
    """Ids of the prompt and of the two answers without it, each ending in its turn end. Raises RowError."""
    prompt = _checked_prompt(prompt)
    before = _encode_prompt(tokenizer, prompt)
    answers = []
    for answer in (chosen, rejected):
        _check_messages(answer)
        if answer[-1]["role"] != "assistant":
            raise RowError("an answer of a pair ends with another role", answer[-1]["role"])
        ids = _encode_trained(tokenizer, prompt + list(answer), before if len(answer) == 1 else None).ids
        if ids[: len(before.ids)] != before.ids:
            raise RowError("the chat template rewrites the prompt when an answer of several turns follows")
        answers.append(ids[len(before.ids) :])
    return before.ids, answers[0], answers[1]


def trained_spans(tokenizer, messages: list[dict]) -> list[tuple[str, bool]]:
    """A conversation as the pieces of text that are trained (True) and that are context only (False), for people.

    Put together they are the text of `encode_conversation`'s ids, special tokens written out. Raises RowError.
    """
    ids, mask = encode_conversation(tokenizer, messages)
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
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _SENTINEL}]
    past = _encode_answered(tokenizer, answered)
    later = _render(tokenizer, answered + [{"role": "user", "content": "Why?"}], generation_prompt=True)
    return not later.startswith(past.text)


def decode_answer(tokenizer, ids: list[int], stop_ids: tuple[int, ...] = ()) -> str:
    """The text of a sampled response: without its turn end and what the template puts between that and the answer.

    Where another of `stop_ids` has ended it, without that one, which may be a token of ordinary text.
    """
    probe = _probe(tokenizer)
    ids = list(ids)
    stop = next((i for i, token in enumerate(ids) if token == probe.end_id or token in stop_ids), None)
    ended = stop is not None and ids[stop] == probe.end_id
    ids = ids[:stop]

    def text_of(ids):
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    lead = text_of(_tokens(tokenizer, probe.lead)) if probe.header else probe.lead  # a header may hold special tokens
    text = text_of(ids).removeprefix(lead)
    return text.removesuffix(probe.gap) if ended else text


# ---- cutting


def fit_prompt(tokenizer, messages: list[dict], max_length: int) -> tuple[list[int], list[dict]] | None:
    """A prompt of at most `max_length` tokens: the oldest whole exchanges go first, never the system turn in
    front nor the last user turn. Returns its ids and the messages that are left, or None when those do not fit."""
    return _fit(tokenizer, _checked_prompt(messages), max_length)


def _fit(tokenizer, messages: list[dict], max_length: int) -> tuple[list[int], list[dict]] | None:
    ids = _encode_prompt(tokenizer, messages).ids
    if len(ids) <= max_length:
        return ids, messages
    system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    # An exchange is a user turn and all up to the next one, so what is left still opens with the user.
    users = [i for i, message in enumerate(messages) if message["role"] == "user"][1:]

    def fits(user: int) -> bool:
        return len(_encode_prompt(tokenizer, system + messages[user:]).ids) <= max_length

    at = bisect.bisect_left(users, True, key=fits)  # the later it begins, the shorter it is
    if at == len(users):
        return None
    messages = system + messages[users[at] :]
    return _encode_prompt(tokenizer, messages).ids, messages


def fit_conversation(tokenizer, messages: list[dict], max_length: int) -> tuple[list[int], list[bool], list[dict]]:
    """As `encode_conversation`; where no answer begins within `max_length` tokens, the oldest exchanges go first.

    They go, as by `fit_prompt`, until the last answer does, or until none is left to go. The ids are not cut: what lies
    beyond is for the caller to drop and to count. Returns ids, mask and the messages that are left. Raises RowError.
    """
    ids, mask = encode_conversation(tokenizer, messages)
    if True not in mask[:max_length]:
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if fitted := _fit(tokenizer, list(messages[:last]), max_length - 1):
            messages = fitted[1] + list(messages[last:])
            ids, mask = encode_conversation(tokenizer, messages)
    return ids, mask, messages
