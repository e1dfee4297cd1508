"""The chat template in force, how it prints a conversation, and what it puts around an answer."""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from common import template_limits
from common.chat_templates import BUILTIN_TEMPLATES, ending_in_eos, turn_end
from common.errors import UserError

SENTINEL = "Sentinel42"
_NO_EOS = (
    "the tokenizer has no EOS token and its chat template prints none after an answer, so nothing could end a turn; "
    "set eos_token in tokenizer_config.json"
)


class RowError(UserError):
    """One conversation cannot be used; `reason` is the same for all rows with the same trouble, to be counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


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
    if not _is_built_in(tokenizer.chat_template):
        special = json.dumps(tokenizer.special_tokens_map)
        if why := template_limits.refused(tokenizer.get_chat_template(), special):
            raise UserError(f"{used} is stopped: {why}; give another with --chat_template, or mend the model's")
    printed = probe(tokenizer)  # a template that cannot be rendered is found here, before any model is loaded
    if printed.header:
        used += f" (it has no generation prompt: the model has to learn to write {printed.header!r} itself)"
    if printed.opened and printed.unprinted:
        used += (
            f" (its generation prompt opens {printed.opened!r}; an answer that does not begin so is trained as the "
            "template prints it, without that)"
        )
    return used


def _is_built_in(template) -> bool:
    return any(template in (BUILTIN_TEMPLATES[name], ending_in_eos(name)) for name in BUILTIN_TEMPLATES)


def marker_ids(tokenizer) -> dict[str, int]:
    """Text -> id of the tokens that the tokenizer never splits and never makes from ordinary words."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}


def render(tokenizer, messages: list[dict], generation_prompt: bool = False, tools: list[dict] | None = None) -> str:
    """What the template prints. Raises RowError where it refuses, or does not come to an end."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; name one with --chat_template")
    messages = [{name: value for name, value in m.items() if name != "weight"} for m in messages]  # ours, not its
    try:
        with template_limits.watched():
            text = tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=generation_prompt
            )
    except Exception as error:  # whatever a template may raise: TemplateError, TypeError on missing content, ...
        roles = " ".join(m["role"] for m in messages)
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        what = " ".join(str(error).split()) or type(error).__name__
        raise RowError("the chat template refuses the conversation", f"{line}{what} (roles: {roles})") from error
    given = sum(len(m["content"]) for m in messages) + len(json.dumps(tools or ""))
    if why := template_limits.too_long(text, given):
        raise RowError("the chat template prints too much", why)
    return text


def tokens_of(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


# ---- what stands around an answer


@dataclass(frozen=True)
class Probe:
    """What the template prints around an answer, found by rendering a known one."""

    lead: str  # between the generation prompt and the answer's text: " " for "Assistant:" + " yes"
    header: str  # the same, where it names the speaker: the template has no generation prompt
    opened: str  # text of the answer that the generation prompt begins: "<think>\n"
    unprinted: bool  # an answer that does not bring that text itself is printed without it
    tail: str  # after the answer's text, at the end of a conversation
    gap: str  # its part before the turn end: " " for "yes </s>"
    end_id: int  # the turn end
    end_text: str | None  # its text where the template prints it; None: we add it as an id


def probe(tokenizer) -> Probe:
    return _cached_probe(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token, len(tokenizer))


@functools.lru_cache(maxsize=16)
def _cached_probe(tokenizer, _template, _eos, _size) -> Probe:
    # The underscored arguments are only there so that a changed tokenizer is probed again.
    question = [{"role": "user", "content": "Hi"}]
    answered = question + [{"role": "assistant", "content": SENTINEL}]
    prompt = render(tokenizer, question, generation_prompt=True)
    full = render(tokenizer, answered)
    at = full.rfind(SENTINEL)
    if at < 0:
        raise UserError("the chat template does not print the assistant's content; give another with --chat_template")
    opened, unprinted = _opened(prompt, full[:at])
    lead = "" if unprinted else full[len(prompt) : at]
    header = lead if lead.strip() and prompt == render(tokenizer, question) else ""
    tail = full[at + len(SENTINEL) :]
    try:
        later = render(tokenizer, [*answered, *question]).rpartition(SENTINEL)[2]
    except RowError:
        later = tail
    # What is printed once after a whole conversation (Phi 3's EOS) ends no turn, unless nothing else does (gpt-oss).
    end = _turn_end(tokenizer, os.path.commonprefix([tail, later])) or _turn_end(tokenizer, tail)
    if end:
        return Probe(lead, header, opened, unprinted, tail, *end)
    if tokenizer.eos_token_id is None:
        raise UserError(_NO_EOS)
    return Probe(lead, header, opened, unprinted, tail, "", tokenizer.eos_token_id, None)


def _opened(prompt: str, before: str) -> tuple[str, bool]:
    """The end of a generation prompt that is the answer's, and whether a plain answer is printed without it.

    Args:
        before: what a finished conversation prints up to the text of a plain answer.
    """
    shared = os.path.commonprefix([prompt, before])
    tag = re.search(r"[<\[][^<>\[\]/\s]+[>\]]\s*$", prompt)
    if tag:
        name = tag.group().strip()[1:-1].strip("|\uff5c")
        closed = ("/" + name, name.replace("START", "END"), name.replace("begin", "end"))
        rest = before[tag.end() if shared == prompt else tag.start() :]
        if any(close in rest for close in closed if close != name):
            return prompt[tag.start() :], shared != prompt
    if shared == prompt:
        return "", False
    if shared != before:  # they part within what is printed before the answer
        shared = back_to_a_word(shared)
    opened = prompt[len(shared) :]
    return opened if opened.strip() else "", True


def back_to_a_word(text: str) -> str:
    """Without the beginning of a word or tag that it ends in."""
    return re.sub(r"[^\s>\]:]+$", "", text)


def _turn_end(tokenizer, tail: str) -> tuple[str, int, str] | None:
    """Of the markers after an answer the EOS, else the last: the text before it, its id and its text."""
    markers = marker_ids(tokenizer)
    longest_first = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    present = set(tokens_of(tokenizer, tail))
    found = [m for m in re.finditer(longest_first, tail) if m.group() and markers[m.group()] in present]
    if not found:
        return None
    end = next((m for m in found if m.group() == tokenizer.eos_token), found[-1])
    return tail[: end.start()], markers[end.group()], end.group()
