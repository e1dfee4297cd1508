"""The chat template in force, how it prints a conversation, and what it puts around an answer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import jinja2

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
    header = probe(tokenizer).header  # a template that cannot be rendered is found here, before any model is loaded
    if header:
        used += f" (it has no generation prompt: the model has to learn to write {header!r} itself)"
    return used


def marker_ids(tokenizer) -> dict[str, int]:
    """Text -> id of the tokens that the tokenizer never splits and never makes from ordinary words."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}


def render(tokenizer, messages: list[dict], generation_prompt: bool = False) -> str:
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; name one with --chat_template")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # whatever a template may raise: TemplateError, TypeError on missing content, ...
        roles = " ".join(m["role"] for m in messages)
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        what = " ".join(str(error).split())
        raise RowError("the chat template refuses the conversation", f"{line}{what} (roles: {roles})") from error


def tokens_of(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


@dataclass(frozen=True)
class Probe:
    """What the template prints around an answer, found by rendering a known one."""

    lead: str  # between the generation prompt and the answer's text: " " for "Assistant:" + " yes"
    header: str  # the same, where it names the speaker: the template has no generation prompt
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
    prompt = render(tokenizer, question, generation_prompt=True)
    full = render(tokenizer, question + [{"role": "assistant", "content": SENTINEL}])
    at = full.rfind(SENTINEL)
    if at < 0:
        raise UserError("the chat template does not print the assistant's content; give another with --chat_template")
    lead = full[len(prompt) : at] if full[:at].startswith(prompt) else ""
    header = lead if lead.strip() and prompt == render(tokenizer, question) else ""
    tail = full[at + len(SENTINEL) :]
    for text, token_id in sorted(marker_ids(tokenizer).items(), key=lambda item: -len(item[0])):
        if tail.lstrip().startswith(text) and token_id in tokens_of(tokenizer, tail):
            return Probe(lead, header, tail, tail[: tail.index(text)], token_id, text)
    if tokenizer.eos_token_id is None:
        raise UserError(_NO_EOS)
    return Probe(lead, header, tail, "", tokenizer.eos_token_id, None)
