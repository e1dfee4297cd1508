"""Chat templates, turn ends and masks: worked out by hand token by token, then as properties of random text."""

import functools
import gzip
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from common import chat_format as cf
from common.errors import UserError
from common.tokenizer import choose_pad

SP_FOLDER = Path(tempfile.mkdtemp(prefix="tokenizer-"))
BUILD = {
    "characters": small.characters,
    "gpt2_like": small.gpt2_like,
    "adds_bos": small.adds_bos,
    "qwen_like": small.qwen_like,
    "sentencepiece": lambda: small.sentencepiece_llama(SP_FOLDER / "plain"),
    "sentencepiece_prefix_space": lambda: small.sentencepiece_llama(SP_FOLDER / "prefix", prefix_space=True),
}


@functools.cache
def cached(name, template=None):
    tokenizer = BUILD[name]()
    if template is not None:
        tokenizer.chat_template = None
        cf.ensure_template(tokenizer, template)
    return tokenizer


def fresh(name, template):
    """A tokenizer to be changed by the test, with a template given as jinja text."""
    tokenizer = BUILD[name]()
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents, system=None):
    """user, assistant, user, ... with an optional system turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def by_hand(tokenizer, *parts):
    """Ids and mask of ("context", "+answer", "<special>") parts, one token a byte: "+" marks what is trained."""
    ids, mask = [], []
    for part in parts:
        trained, text = part.startswith("+"), part.removeprefix("+")
        if text in tokenizer.all_special_tokens:
            tokens = [text]
        else:
            tokens = ["\u0120" if c == " " else "\u010a" if c == "\n" else c for c in text]
        ids += [tokenizer.get_vocab()[t] for t in tokens]
        mask += [trained] * len(tokens)
    return ids, mask


# ---- by hand


def test_human_assistant_by_hand():
    tok = cached("characters", "human-assistant")
    messages = turns("Hi", "Yo!", "Bye", "So long", system="Be kind.")
    expected = by_hand(
        tok,
        "<s>",
        "Be kind.",
        "\n\nHuman: Hi\n\nAssistant:",
        "+ Yo!",
        "+</s>",
        "\n\nHuman: Bye\n\nAssistant:",
        "+ So long",
        "+</s>",
    )
    assert cf.encode_conversation(tok, messages) == expected
    assert cf.encode_prompt(tok, messages[:2]) == by_hand(tok, "<s>", "Be kind.", "\n\nHuman: Hi\n\nAssistant:")[0]


def test_an_empty_answer_is_the_turn_end_alone():
    tok = cached("characters", "human-assistant")
    assert cf.encode_conversation(tok, turns("Hi", "")) == by_hand(tok, "<s>", "\n\nHuman: Hi\n\nAssistant:", "+</s>")


def test_plain_by_hand():
    tok = cached("characters", "plain")
    assert cf.encode_conversation(tok, turns("1+2=", "3", "2+2=", "4")) == by_hand(
        tok, "<s>", "1+2=", "+3", "+</s>", "2+2=", "+4", "+</s>"
    )
    assert cf.encode_prompt(tok, turns("1+2=", system="Sum.")) == by_hand(tok, "<s>", "Sum.\n\n1+2=")[0]


def test_chatml_without_its_tokens_ends_turns_in_eos():
    tok = small.characters()
    used = cf.ensure_template(tok, "chatml")
    assert "'</s>'" in used and "<|im_end|>" in used
    assert cf.encode_conversation(tok, turns("Hi", "Yo")) == by_hand(
        tok, "<s>", "<|im_start|>user\nHi", "</s>", "\n<|im_start|>assistant\n", "+Yo", "+</s>"
    )


def test_chatml_with_its_tokens():
    tok = small.qwen_like(template=None)
    assert cf.ensure_template(tok, "chatml") == "the built-in chat template chatml"
    ids, mask = cf.encode_conversation(tok, turns("Hi", "Yo", "Hi", "Oh"))
    start, end = tok.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert cf.turn_end_id(tok) == end != tok.eos_token_id
    # user, assistant, user, assistant: the newline after the last turn end is not there, the others are context.
    assert [i for i in ids if i in (start, end)] == [start, end] * 4
    assert ids[-1] == end
    assert runs(tok, ids, mask) == ["Yo<|im_end|>", "Oh<|im_end|>"]
    assert tok.decode(ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOh<|im_end|>"
    )


def test_chatml_does_not_double_a_bos_that_is_im_start():
    tok = small.qwen_like(template=None)
    tok.bos_token = "<|im_start|>"  # as SmolLM2
    cf.ensure_template(tok, "chatml")
    assert tok.decode(cf.encode_prompt(tok, turns("Hi"))) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def runs(tokenizer, ids, mask):
    """The text of each stretch of trained tokens; a turn end closes a stretch."""
    out, current = [], []
    for token, trained in zip(ids, mask, strict=True):
        if trained:
            current.append(token)
        if current and (not trained or token == cf.turn_end_id(tokenizer)):
            out.append(tokenizer.decode(current))
            current = []
    return out + ([tokenizer.decode(current)] if current else [])


def test_bos_comes_from_the_template_only():
    tok = cached("adds_bos", "human-assistant")
    assert tok("x")["input_ids"][0] == tok.bos_token_id  # the tokenizer does add one, unless told not to
    ids, _ = cf.encode_conversation(tok, turns("Hi", "Yo"))
    assert ids[0] == tok.bos_token_id and ids.count(tok.bos_token_id) == 1
    without = fresh("adds_bos", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert tok.bos_token_id not in cf.encode_prompt(without, turns("Hi"))


def test_the_eos_of_gpt2_is_trained_though_it_is_also_bos_and_pad():
    tok = cached("gpt2_like", "human-assistant")
    ids, mask = cf.encode_conversation(tok, turns("Hi", "Yo"))
    end = tok.eos_token_id
    assert [(i, m) for i, m in zip(ids, mask, strict=True) if i == end] == [(end, False), (end, True)]


# ---- the boundary between prompt and answer


@pytest.mark.parametrize("name", ["gpt2_like", "adds_bos", "sentencepiece", "sentencepiece_prefix_space"])
def test_a_merge_across_the_boundary_is_undone(name):
    tok = cached(name, "plain")
    prompt, answer = turns("ha"), "ppy"
    # The trap is real: as one text, "happy" is a token that no actor shown "ha" can produce.
    whole = cf.tokens_of(tok, "happy")
    assert whole[: len(cf.tokens_of(tok, "ha"))] != cf.tokens_of(tok, "ha")
    ids, mask = cf.encode_conversation(tok, prompt + [{"role": "assistant", "content": answer}])
    shown = cf.encode_prompt(tok, prompt)
    assert ids[: len(shown)] == shown and mask == [False] * len(shown) + [True] * (len(ids) - len(shown))
    pieces = tok.convert_ids_to_tokens(ids[len(shown) :])
    assert "".join(pieces) == "ppy" + tok.eos_token  # and no space has slipped in before it


def test_in_context_ids_are_kept_where_nothing_merges():
    tok = cached("sentencepiece_prefix_space", "human-assistant")
    messages = turns("What is an apple pie?", "Sure! An apple pie is tasty.")
    text = tok.apply_chat_template(messages, tokenize=False)
    assert cf.encode_conversation(tok, messages)[0] == tok(text, add_special_tokens=False)["input_ids"]


# Emits no turn end, puts a newline after each turn, as many hand-written templates do.
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def test_a_template_without_turn_ends_gets_eos_as_an_id_in_later_context_too():
    tok = fresh("characters", NO_END)
    assert cf.turn_end_id(tok) == tok.eos_token_id
    messages = turns("Hi", "Yo", "Bye", "Oh")
    first = ("user: Hi\nassistant:", "+ Yo", "+</s>")
    assert cf.encode_conversation(tok, messages[:2]) == by_hand(tok, *first)
    assert cf.encode_conversation(tok, messages) == by_hand(tok, *first, "\nuser: Bye\nassistant:", "+ Oh", "+</s>")
    assert (
        cf.encode_prompt(tok, messages[:3])
        == by_hand(tok, "user: Hi\nassistant: Yo", "</s>", "\nuser: Bye\nassistant:")[0]
    )


# ---- templates with quirks


def test_a_template_that_trims():
    # As Gemma: role "model", content trimmed, a turn-end token of its own.
    tok = fresh(
        "qwen_like",
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    )
    ids, mask = cf.encode_conversation(tok, turns("  Hi\n", "\n Yo  ", "ok ", " No\n"))
    assert runs(tok, ids, mask) == ["Yo<|im_end|>", "No<|im_end|>"]


def test_a_turn_end_after_a_space():
    # As Llama 2: "[INST] Hi [/INST] Yo </s>".
    tok = fresh(
        "characters",
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}",
    )
    assert cf.encode_conversation(tok, turns("Hi", "Yo")) == by_hand(tok, "[INST] Hi [/INST]", "+ Yo ", "+</s>")


def swallowing():
    """As Phi 3's: the turn tokens take the white space after them with them, so "<|im_end|>\\n" is one token."""
    tok = small.qwen_like()
    swallow = [AddedToken(name, rstrip=True, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    tok.add_special_tokens({"additional_special_tokens": swallow})
    return tok


def test_white_space_that_a_turn_token_swallows():
    tok = swallowing()
    messages = turns("Hi", "Yo", "Hm", "Ah", system="S")
    ids, _ = cf.encode_conversation(tok, messages)
    assert ids == cf.tokens_of(tok, tok.apply_chat_template(messages, tokenize=False))
    # On its own, the newline between "Yo<|im_end|>" and the next turn would have been a token.
    assert "Yo<|im_end|><|im_start|>user\nHm<|im_end|>" in tok.decode(ids)


def test_a_later_answer_is_tokenised_as_the_first():
    tok = swallowing()
    tok.chat_template = (  # no turn end: it exists as an id only
        "{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    ids, mask = cf.encode_conversation(tok, turns("Hi", "\nYo", "Hm", "\nYo"))
    assert runs(tok, ids, mask) == ["Yo<|endoftext|>"] * 2


THINK_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


@pytest.mark.parametrize("answer, trained", [
    ("Yo", "Yo<|im_end|>"),
    ("<b>Yo</b>", "<b>Yo</b><|im_end|>"),  # begins like the extra text and is not it
    ("<think>\nhm\n</think>Yo", "hm\n</think>Yo<|im_end|>"),
])  # fmt: skip
def test_a_generation_prompt_with_extra_text(answer, trained):
    tok = fresh("qwen_like", THINK_PROMPT)
    messages = turns("Hi", answer)
    ids, mask = cf.encode_conversation(tok, messages)
    shown = cf.encode_prompt(tok, messages[:1])
    assert tok.decode(shown).endswith("assistant\n<think>\n")
    assert ids[: len(shown)] == shown and not any(mask[: len(shown)]) and all(mask[len(shown) :])
    assert runs(tok, ids, mask) == [trained]


def test_where_the_template_rewrites_history_only_the_last_answer_is_trained():
    tok = fresh("qwen_like", THINK_PROMPT)
    assert cf.rewrites_history(tok)
    assert not cf.rewrites_history(cached("qwen_like"))
    assert not cf.rewrites_history(cached("characters", "human-assistant"))
    messages = turns("Hi", "Yo", "Bye", "Oh")
    ids, mask = cf.encode_conversation(tok, messages)
    assert runs(tok, ids, mask) == ["Oh<|im_end|>"]
    shown = cf.encode_prompt(tok, messages[:3])
    assert ids[: len(shown)] == shown
    assert shown == cf.tokens_of(tok, tok.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True))


def test_a_template_that_drops_reasoning_is_refused_for_training_and_fine_as_history():
    # As DeepSeek R1's: what stands before </think> never reaches the text.
    tok = fresh(
        "qwen_like",
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1] }}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    )
    messages = turns("Hi", "hm</think>Yo", "Bye", "Oh")
    with pytest.raises(cf.RowError, match="leaves out part of an answer"):
        cf.encode_conversation(tok, messages[:2])
    assert runs(tok, *cf.encode_conversation(tok, messages)) == ["Oh<|im_end|>"]
    assert "Yo<|im_end|>" in tok.decode(cf.encode_prompt(tok, messages[:3]))


def test_a_template_that_moves_the_answer_about():
    tok = fresh(
        "characters",
        "{% for m in messages %}{{ m['content'] | length ~ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '?' }}{% endif %}",
    )
    with pytest.raises(cf.RowError, match="its start cannot be found"):
        cf.encode_conversation(tok, turns("Hi", "Yo"))


def test_a_template_that_refuses_a_system_turn():
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tok = fresh("characters", template)
    with pytest.raises(UserError) as caught:
        cf.encode_prompt(tok, turns("Hi", system="Be kind."))
    assert str(caught.value) == (
        "the chat template refuses the conversation: System role not supported (roles: system user)"
    )
    assert caught.value.reason == "the chat template refuses the conversation"


# ---- what is refused


@pytest.mark.parametrize("messages, message", [
    ("Hi", "not a list of messages: got 'Hi'"),
    ([], "not a list of messages: got []"),
    (["Hi"], "not a list of messages with role and content: got 'Hi'"),
    ([{"content": "Hi"}], "not a list of messages with role and content: got {'content': 'Hi'}"),
    ([{"role": "user", "content": None}], "a message without text: role user, content None"),
    (turns("Hi"), "no assistant turn"),
    (turns("Hi", "Yo")[1:], "the conversation starts with the assistant: there is no prompt"),
    (turns("Hi", "Yo</s>"), "an answer holds the text of the stop token </s>: 'Yo</s>'"),
    (turns("Hi", "Y</s>o"), "an answer holds the text of the stop token </s>: 'Y</s>o'"),
    ([{"role": "robot", "content": "Hi"}, *turns("Hi", "Yo")],
     "the chat template refuses the conversation: unknown role robot (roles: robot user)"),
])  # fmt: skip
def test_conversations_that_are_refused(messages, message):
    with pytest.raises(cf.RowError) as caught:
        cf.encode_conversation(cached("characters", "human-assistant"), messages)
    assert str(caught.value) == message


def test_prompts_and_pairs_that_are_refused():
    tok = cached("characters", "human-assistant")
    with pytest.raises(cf.RowError, match="^the prompt ends with an answer: 'Yo'$"):
        cf.encode_prompt(tok, turns("Hi", "Yo"))
    with pytest.raises(cf.RowError, match="^the prompt ends with an answer"):
        cf.encode_pair(tok, turns("Hi", "Yo"), turns("Hi", "Yo")[1:], turns("Hi", "No")[1:])
    with pytest.raises(cf.RowError, match="^an answer of a pair ends with another role: user$"):
        cf.encode_pair(tok, turns("Hi"), turns("Yo"), turns("Hi", "No")[1:])
    with pytest.raises(cf.RowError, match="^not a list of messages"):
        cf.encode_pair(tok, turns("Hi"), "Yo", "No")
    rewriting = fresh("qwen_like", THINK_PROMPT)
    long = turns("", "Yo", "And?", "Oh")[1:]
    with pytest.raises(cf.RowError, match="rewrites the prompt"):
        cf.encode_pair(rewriting, turns("Hi"), long, long)


def test_a_stop_token_written_out_in_an_earlier_answer_makes_that_answer_context():
    tok = cached("characters", "human-assistant")
    assert cf.encode_conversation(tok, turns("Hi", "Y</s>o", "Hm", "Ah")) == by_hand(
        tok,
        *("<s>", "\n\nHuman: Hi\n\nAssistant: Y", "</s>", "o", "</s>", "\n\nHuman: Hm\n\nAssistant:"),
        *("+ Ah", "+</s>"),
    )
    # Answers before it are trained as they would be without it, on the ids that the actor was shown and gave.
    assert cf.encode_conversation(tok, turns("Hi", "Oh", "And?", "Y</s>o", "Hm", "Ah")) == by_hand(
        tok,
        *("<s>", "\n\nHuman: Hi\n\nAssistant:", "+ Oh", "+</s>", "\n\nHuman: And?\n\nAssistant:"),
        *(" Y", "</s>", "o", "</s>", "\n\nHuman: Hm\n\nAssistant:", "+ Ah", "+</s>"),
    )


def test_an_answer_that_spells_eos_changes_no_id_before_it():
    """Here as one text the prompt's last characters and the answer's first would be other tokens."""
    tok = small.byte_level(
        ("<s>", "</s>"), ["\n\nAssistant: Yes </s>"] * 9, words=False, bos_token="<s>", eos_token="</s>"
    )
    cf.ensure_template(tok, "deepseek")
    messages = turns("Hi", " Yes", "And?", "Yes </s>", "Hm", "Ah")
    ids, _ = cf.encode_conversation(tok, messages)
    for answer in (1, 3, 5):
        shown = cf.encode_prompt(tok, messages[:answer])
        assert ids[: len(shown)] == shown


def test_an_answer_that_spells_the_eos_of_a_template_with_another_turn_end():
    """EOS ends rollouts too (it is in most generation configs): no answer is trained to say it half way."""
    tok = cached("qwen_like")
    with pytest.raises(cf.RowError) as caught:
        cf.encode_conversation(tok, turns("Hi", "Y<|endoftext|>o"))
    assert str(caught.value) == "an answer holds the text of the stop token <|endoftext|>: 'Y<|endoftext|>o'"
    assert runs(tok, *cf.encode_conversation(tok, turns("Hi<|endoftext|>", "Yo"))) == ["Yo<|im_end|>"]


@pytest.mark.parametrize("name, template", [
    ("characters", cf.BUILTIN_TEMPLATES["human-assistant"]), ("characters", NO_END),
    ("qwen_like", small.QWEN_LIKE_TEMPLATE), ("qwen_like", small.QWEN3_LIKE_TEMPLATE),
], ids=["turn ends in the text", "none", "ChatML", "history rewritten"])  # fmt: skip
def test_the_work_for_a_long_conversation_grows_with_its_length(name, template, monkeypatch):
    tok = fresh(name, template)
    messages = turns(*["some words"] * 120)
    length, count = len(tok.apply_chat_template(messages, tokenize=False)), []
    tokens = cf.tokens_of
    monkeypatch.setattr(cf, "tokens_of", lambda tokenizer, text: count.append(len(text)) or tokens(tokenizer, text))
    cf.encode_conversation(tok, messages)
    assert sum(count) < 5 * length
    count.clear()
    ids, left = cf.fit_prompt(tok, messages[:-1], 100)
    assert 1 < len(left) < 10 and sum(count) < 15 * length


def test_sampled_answers_are_scored_whatever_they_say():
    tok = cached("characters", "human-assistant")
    prompt = ("<s>", "\n\nHuman: Hi\n\nAssistant:")
    for text, tokens in (("Yo", (" Yo",)), ("Y</s>o", (" Y", "</s>", "o")), ("", ())):
        whole = by_hand(tok, *prompt, *tokens, "</s>")[0]
        assert cf.encode_scored(tok, turns("Hi", text), truncated=False) == whole
        assert cf.encode_scored(tok, turns("Hi", text), truncated=True) == whole[:-1]
    with pytest.raises(cf.RowError, match="not a list of messages"):
        cf.encode_scored(tok, [], truncated=False)


def test_messages_after_the_last_answer_are_left_out():
    tok = cached("characters", "human-assistant")
    assert cf.encode_conversation(tok, turns("Hi", "Yo", "Bye")) == cf.encode_conversation(tok, turns("Hi", "Yo"))


@pytest.mark.parametrize("name, space", [
    ("characters", ""), ("adds_bos", ""), ("sentencepiece", ""),
    ("sentencepiece_prefix_space", " "),  # puts a space after each special token: the model reads that
])  # fmt: skip
def test_trained_spans_are_the_text_in_pieces(name, space):
    """Whatever the tokenizer does with spaces, which decoders drop in front of what they are given."""
    messages = turns("Hi", "Yo, all happy", "Bye", "So  long", system="S")
    assert cf.trained_spans(cached(name, "human-assistant"), messages) == [
        (f"<s>{space}S\n\nHuman: Hi\n\nAssistant:", False),
        (" Yo, all happy</s>", True),
        (f"{space}\n\nHuman: Bye\n\nAssistant:", False),
        (" So  long</s>", True),
    ]


# ---- pairs, stop tokens, decoding


def test_pair_by_hand():
    tok = cached("characters", "human-assistant")
    prompt, chosen, rejected = cf.encode_pair(tok, turns("Hi"), turns("", "Yo")[1:], turns("", "No", "So?", "No!")[1:])
    assert prompt == by_hand(tok, "<s>", "\n\nHuman: Hi\n\nAssistant:")[0]
    assert chosen == by_hand(tok, " Yo", "</s>")[0]
    assert rejected == by_hand(tok, " No", "</s>", "\n\nHuman: So?\n\nAssistant: No!", "</s>")[0]


def test_stop_ids():
    tok = cached("qwen_like")
    end, eos = tok.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert cf.stop_ids(tok) == (end,)
    assert cf.stop_ids(tok, eos) == (end, eos)
    assert cf.stop_ids(tok, [eos, end]) == (end, eos)
    assert cf.stop_ids(tok, 0) == (end, 0)  # id 0 is a token like any other


@pytest.mark.parametrize("name, template", [
    ("characters", "human-assistant"), ("gpt2_like", "human-assistant"), ("sentencepiece", "human-assistant"),
    ("sentencepiece_prefix_space", "human-assistant"), ("qwen_like", None), ("characters", "plain"),
])  # fmt: skip
def test_decode_answer_gives_back_the_content(name, template):
    tok = cached(name, template)
    for content in ("Yo, 1+2=3!", "two  spaces\n\nand lines", "\u4f60\u597d \U0001f34e", ""):
        ids, mask = cf.encode_conversation(tok, turns("Hi", content))
        answer = [i for i, trained in zip(ids, mask, strict=True) if trained]
        assert cf.decode_answer(tok, answer) == content
        assert cf.decode_answer(tok, answer + answer[:1]) == content  # nothing after the turn end counts
        assert cf.decode_answer(tok, answer[:-1]) == content  # a response cut by length has none


# ---- choosing the template


def test_the_tokenizers_own_template_wins_and_says_so():
    tok = small.qwen_like()
    assert cf.ensure_template(tok, None) == "the tokenizer's own chat template"
    assert "--chat_template plain not used" in cf.ensure_template(tok, "plain")
    assert tok.chat_template == small.QWEN_LIKE_TEMPLATE


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(NO_END, encoding="utf-8")
    tok = small.characters()
    assert cf.ensure_template(tok, str(path)) == f"the chat template in {path}"
    assert cf.encode_prompt(tok, turns("Hi")) == by_hand(tok, "user: Hi\nassistant:")[0]


def refuse(tokenizer, name):
    with pytest.raises(UserError) as caught:
        cf.ensure_template(tokenizer, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_template_errors(tmp_path):
    message = refuse(small.characters(), None)
    assert "--chat_template: human-assistant, chatml, plain, llama-2, " in message
    assert "--chat_template chat-ml: neither a built-in" in refuse(small.characters(), "chat-ml")

    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}\n{{ m['content' }}\n{% endfor %}")
    message = refuse(small.characters(), str(path))
    assert message.startswith("the chat template refuses the conversation: line 2:")
    path.write_bytes(b"{# caf\xe9 #}")
    assert refuse(small.characters(), str(path)).endswith(
        "broken.jinja: not UTF-8 (invalid continuation byte at byte 6)"
    )
    path.write_text("{{ messages | length }}")
    assert "does not print the assistant's content" in refuse(small.characters(), str(path))

    for name in ("chatml", "human-assistant"):
        no_eos = small.characters()
        no_eos.eos_token = None
        assert "has no EOS token" in refuse(no_eos, name)

    with pytest.raises(UserError, match="has no chat template; name one with --chat_template"):
        cf.encode_prompt(small.characters(), turns("Hi"))


def test_a_changed_tokenizer_is_looked_at_again():
    tok = small.qwen_like(template=None)
    cf.ensure_template(tok, "human-assistant")
    assert cf.turn_end_id(tok) == tok.convert_tokens_to_ids("<|endoftext|>")
    tok.eos_token = "<|im_end|>"
    assert cf.turn_end_id(tok) == tok.convert_tokens_to_ids("<|im_end|>")
    tok.chat_template = NO_END.replace("'\\n' }}{% endfor", "'<|fim_pad|>' }}{% endfor")
    assert cf.turn_end_id(tok) == tok.convert_tokens_to_ids("<|fim_pad|>")


# ---- cutting prompts


def test_fit_prompt_drops_the_oldest_whole_exchanges():
    tok = cached("characters", "human-assistant")
    messages = turns("one", "1", "two", "2", "three", system="S")
    size = {n: len(cf.encode_prompt(tok, messages[:1] + messages[n:])) for n in (1, 3, 5)}
    assert cf.fit_prompt(tok, messages, size[1]) == (cf.encode_prompt(tok, messages), messages)
    for limit, kept in ((size[1] - 1, 3), (size[3], 3), (size[3] - 1, 5), (size[5], 5)):
        left = messages[:1] + messages[kept:]
        assert cf.fit_prompt(tok, messages, limit) == (cf.encode_prompt(tok, left), left)
    assert cf.fit_prompt(tok, messages, size[5] - 1) is None
    assert messages == turns("one", "1", "two", "2", "three", system="S")


def test_fit_prompt_keeps_every_system_turn_at_the_front():
    tok = cached("characters", "plain")
    front = [{"role": "system", "content": text} for text in ("S", "T")]
    left = front + turns("c")
    assert cf.fit_prompt(tok, front + turns("a", "b", "c"), len("S--T--c") + 1) == (cf.encode_prompt(tok, left), left)


def test_fit_prompt_keeps_all_of_the_last_exchange():
    tok = cached("characters", "plain")
    messages = [*turns("a", "b", "c"), {"role": "system", "content": "note"}]
    left = messages[2:]
    assert cf.fit_prompt(tok, messages, len(cf.encode_prompt(tok, left))) == (cf.encode_prompt(tok, left), left)


# ---- the pad token


def test_a_pad_token_apart_from_the_stop_tokens_is_kept():
    tok = small.adds_bos()
    cf.ensure_template(tok, "human-assistant")
    pad_id, added, note = choose_pad(tok, len(tok))
    assert (pad_id, added, note) == (2, False, "pad token '<pad>', the tokenizer's own") and tok.pad_token == "<pad>"


def test_pad_is_moved_off_the_eos_to_a_reserved_token():
    tok = small.qwen_like()
    pad_id, added, note = choose_pad(tok, len(tok))
    assert tok.pad_token == "<|fim_pad|>" and pad_id == tok.pad_token_id == 3 and not added and "reserved" in note
    assert tok.eos_token == "<|endoftext|>"


def test_the_first_reserved_token_by_id_is_taken_and_the_turn_end_is_not():
    tok = small.characters()
    names = [f"<|reserved_special_token_{i}|>" for i in (7, 2, 10)]
    tok.add_special_tokens({"additional_special_tokens": names})
    tok.eos_token = names[0]  # as a tokenizer that ends its turns in a reserved token
    cf.ensure_template(tok, "human-assistant")
    assert choose_pad(tok, len(tok))[:2] == (259, False) and tok.pad_token == names[1]


def test_a_reserved_token_without_an_embedding_row_is_not_taken():
    tok = small.qwen_like()
    pad_id, added, note = choose_pad(tok, 3)  # <|fim_pad|> is id 3
    assert (pad_id, added) == (340, True) and "grows from 3 to 341 rows" in note


def test_pad_that_the_generation_config_stops_on_is_moved():
    tok = small.adds_bos()
    cf.ensure_template(tok, "human-assistant")
    assert choose_pad(tok, len(tok), extra_stop_ids=(2,))[0] != 2


def test_unk_is_taken_only_where_no_text_needs_it():
    tok = small.sentencepiece_llama(SP_FOLDER / "pad")  # byte fallback: never yields <unk>
    cf.ensure_template(tok, "human-assistant")
    pad_id, added, note = choose_pad(tok, len(tok))
    assert (pad_id, added, tok.pad_token) == (tok.unk_token_id, False, "<unk>") and "needs for no text" in note

    words = small.words()  # a vocabulary of whole words: <unk> is what rare words become
    cf.ensure_template(words, "human-assistant")
    assert choose_pad(words, len(words))[1] is True and words.pad_token == "<|pad|>"


def test_a_new_pad_token_lands_on_a_spare_row_or_says_that_the_embedding_grows():
    tok = small.gpt2_like()
    cf.ensure_template(tok, "human-assistant")
    pad_id, added, note = choose_pad(tok, 344)
    assert (pad_id, added) == (340, True) and tok.pad_token == "<|pad|>" and "spare row" in note
    assert tok("<|pad|>", add_special_tokens=False)["input_ids"] == [340]
    assert choose_pad(tok, 344) == (340, False, "pad token '<|pad|>', the tokenizer's own")  # inherited

    tok = small.gpt2_like()
    cf.ensure_template(tok, "human-assistant")
    assert "the embedding grows from 340 to 341 rows" in choose_pad(tok, 340)[2]


# ---- properties

CHARACTERS = "aehpyH1=+., \n\t\u4f60\u597d\U0001f34e\u00e9e\u0301\u0120:|>"
# Not "<": it could begin a special token. Not "\u2581": sentencepiece's own sign for a space.
OTHERS = st.characters(exclude_categories=["Cs"], exclude_characters="<\u2581")
TEXTS = st.text(st.sampled_from(CHARACTERS) | OTHERS, max_size=12)
CASES = [(name, template) for name in BUILD for template in ("human-assistant", "plain", "chatml")]
OTHER_BUILT_INS = sorted(cf.BUILTIN_TEMPLATES.keys() - {"human-assistant", "plain", "chatml"})
CASES += [(name, template) for name in ("gpt2_like", "sentencepiece_prefix_space") for template in OTHER_BUILT_INS]


@pytest.mark.parametrize("name, template", [*CASES, ("qwen_like", None)])
@given(contents=st.lists(TEXTS, min_size=2, max_size=6), system=st.none() | TEXTS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_what_is_trained_begins_with_what_is_shown(name, template, contents, system):
    tok = cached(name, template)
    if len(contents) % 2:
        contents = contents[:-1]
    messages = turns(*contents, system=system)
    ids, mask = cf.encode_conversation(tok, messages)
    end = cf.turn_end_id(tok)

    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            shown = cf.encode_prompt(tok, messages[:i])
            so_far, _ = cf.encode_conversation(tok, messages[: i + 1])
            assert so_far[: len(shown)] == shown and ids[: len(so_far)] == so_far
            assert so_far[len(shown) :].count(end) == 1 and so_far[-1] == end
            spans += range(len(shown), len(so_far))
    assert [i for i, trained in enumerate(mask) if trained] == spans and spans

    if name != "sentencepiece_prefix_space":  # whose decoder cannot tell its own spaces from the text's
        text = tok.apply_chat_template(messages, tokenize=False)
        assert text.startswith(tok.decode(ids, clean_up_tokenization_spaces=False))
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and "prefix_space" not in name:
            shown = cf.encode_prompt(tok, messages[:i])
            answer = cf.encode_conversation(tok, messages[: i + 1])[0][len(shown) :]
            trims = template in ("llama-2", "llama-3", "gemma")
            assert cf.decode_answer(tok, answer) == (message["content"].strip() if trims else message["content"])


# ---- public data, where there is any

DATA = os.environ.get("RLHF_TEST_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="RLHF_TEST_DATA names no folder of public data")


def dialogue(text):
    """The turns of an HH dialogue."""
    parts = re.split(r"\n\n(Human|Assistant):", text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


@needs_data
@pytest.mark.parametrize("name", ["gpt2_like", "sentencepiece", "qwen_like"])
def test_hh_dialogues(name):
    tok = cached(name, "human-assistant")
    end = cf.turn_end_id(tok)
    count = 0
    with gzip.open(Path(DATA) / "hh_harmless_800.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in list(lines)[::4]:
            row = json.loads(line)
            chosen, rejected = dialogue(row["chosen"]), dialogue(row["rejected"])
            common = 0
            while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
                common += 1
            ids, mask = cf.encode_conversation(tok, chosen)
            answers = [m["content"] for m in chosen if m["role"] == "assistant"]
            assert sum(m and i == end for i, m in zip(ids, mask, strict=True)) == len(answers)
            assert [r.removesuffix(tok.eos_token).removeprefix(" ") for r in runs(tok, ids, mask)] == answers
            if common and common == len(chosen) - 1 == len(rejected) - 1 and chosen[common]["role"] == "assistant":
                prompt, good, bad = cf.encode_pair(tok, chosen[:common], chosen[common:], rejected[common:])
                assert prompt == cf.encode_prompt(tok, chosen[:common]) and prompt + good == ids and good != bad
                count += 1
    assert count > 100


@needs_data
@pytest.mark.parametrize("file", ["alpaca_en_demo.json", "alpaca_zh_demo.json"])
def test_alpaca(file):
    tok = cached("sentencepiece", "chatml")
    for row in json.loads((Path(DATA) / file).read_text(encoding="utf-8"))[::5]:
        question = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        messages = turns(question, row["output"])
        ids, mask = cf.encode_conversation(tok, messages)
        shown = cf.encode_prompt(tok, messages[:1])
        assert ids[: len(shown)] == shown and mask == [False] * len(shown) + [True] * (len(ids) - len(shown))
        assert cf.decode_answer(tok, ids[len(shown) :]) == row["output"]
