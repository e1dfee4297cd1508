"""Which tokens are trained, for each style of chat template: written down by hand and compared token by token.

[[ and ]] stand around what is trained; all else is context. `bash scripts/test.sh -s -k chat_masks` prints the tokens
of every style, the trained ones in « ».
"""

import dataclasses
import datetime
import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
import small_tokenizers as small
from transformers import AddedToken, AutoTokenizer

from common import chat_format as cf

FOLDER = Path(tempfile.mkdtemp(prefix="tokenizers-"))


def said(text):
    """Messages from lines like "user: Hi"."""
    return [dict(zip(("role", "content"), line.split(": ", 1), strict=True)) for line in text.split(" | ")]


CHAT = said("system: Be kind. | user: Hi | assistant: Yo, all! | user: Bye | assistant: So long")
NO_SYSTEM = CHAT[1:]
TOOL = said("system: Be kind. | user: 2+3? | assistant: sum 2 3 | tool: 5 | assistant: It is 5.")
THOUGHT = [CHAT[0], CHAT[1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYo, all!"}, CHAT[3]] + [
    {"role": "assistant", "content": "<think>\noh\n</think>\n\nSo long"}
]
SPACED = [{**message, "content": f" {message['content']}\n"} for message in CHAT]


@dataclasses.dataclass(frozen=True)
class Style:
    """template: the name of a built-in, or jinja. special: tokens of the tokenizer. expected: see above."""

    template: str
    special: str  # with blanks between them; the first is BOS, the last EOS
    messages: list
    expected: str
    tools: list | None = None

    def names(self):
        special = tuple(self.special.split())
        return special, {"bos_token": special[0], "eos_token": special[-1]}


# ---- templates that are no built-ins, as the models named here bring them

QWEN_TOKENS = "<|endoftext|> <|im_start|> <|im_end|>"
LLAMA_3_TOKENS = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|>"
DEEPSEEK_TOKENS = "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>"

# Qwen 2.5: a default system turn; what tools return stands in a user turn, neighbours in one.
QWEN_2_5 = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Qwen 3: reasoning is printed in the last answer only, and a last answer without one gets an empty one.
QWEN_3 = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought, answer = '', text %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{% set text = '<think>\n' + thought + '\n</think>\n\n' + answer %}"
    "{% else %}{% set text = answer %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# DeepSeek R1: reasoning is never printed; the generation prompt opens one.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

# Llama 3.1: a dated system turn whether or not there is one, tools speak as "ipython".
LLAMA_3_1 = (
    "{% set system = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Mistral 7B v0.3: the system turn opens the last question, wherever that is.
MISTRAL_V3 = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)

# Phi 3 medium: the assistant's turn is opened by the user's, and an EOS stands after the whole conversation.
PHI_3_MEDIUM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}"
    "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)

PHI_4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

# DeepSeek Coder: a newline between the answer and its end, and one before the answer that the prompt lacks.
DEEPSEEK_CODER = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n' }}"
    "{% else %}{{ '### Response:\n' + m.content + '\n<|EOT|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:' }}{% endif %}"
)

# ChatGLM 3: nothing ends a turn but the next one.
CHATGLM = (
    "{{ '[gMASK]sop' }}{% for m in messages %}{{ '<|' + m.role + '|>\n ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

STRIPS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<A>' }}{% generation %}{{ m.content | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<' + m.role[0] + '>' + m.content | trim }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A>' }}{% endif %}"
)

# Many hand-written ones: no generation prompt. The model is shown none, so it has to learn the header too.
NO_GENERATION_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)

# The generation prompt opens a tag, which a finished turn holds only where the answer brings it.
MUSED = said("user: Hi | assistant: <muse>\nhm</muse>Yo | user: Bye | assistant: Ah")
OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<muse>\n' }}{% endif %}"
)

# Qwen 3.5: the same, and an answer without a thought gets an empty one.
OPENS_AND_CLOSES = (
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and '</muse>' not in text %}"
    "{% set text = '<muse>\n\n</muse>\n\n' + text %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<muse>\n' }}{% endif %}"
)

# Nemotron 3: the empty one is written otherwise than the generation prompt opens it.
OPENS_OTHERWISE = OPENS_AND_CLOSES.replace("<muse>\n\n</muse>\n\n", "<muse></muse>")

# Qwen 3.5 as it comes in small sizes: the generation prompt holds an empty thought, whatever an answer brings.
THINKS = "an empty thought in the generation prompt"
THINKS_NOTHING = OPENS_AND_CLOSES.replace("assistant\n<muse>\n", "assistant\n<muse>\n\n</muse>\n\n")

# Cohere 2: an answer ends in two markers, the second of which ends every turn.
TWO_MARKERS = (
    "{% for m in messages %}{{ '<T><' + m.role[0] + '>' }}"
    "{% if m.role == 'assistant' %}{{ '<R>' + m.content + '</R>' }}{% else %}{{ m.content }}{% endif %}{{ '</T>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<T><a><R>' }}{% endif %}"
)

# gpt-oss: channels, which the generation prompt does not name, and a last answer that ends in another marker.
CHANNELS = (
    "{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% if m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m.content }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
CHANNEL_TOKENS = "<|endoftext|> <|start|> <|channel|> <|message|> <|end|> <|return|>"

# Many: the day in front, definitions of tools as JSON.
DATED_WITH_TOOLS = (
    "{{ '<|im_start|>system\nYear: ' + strftime_now('%Y') }}"
    "{% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SUM = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "required": ["b", "a"]}}}

GREETING = [{"role": "assistant", "content": "Who is it?"}, *NO_SYSTEM]
# Some templates want a question before they print anything.
WANTS_A_QUESTION = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no question') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

STYLES = {
    "human-assistant": Style(
        "human-assistant", "<s> </s>", CHAT,
        "<s>Be kind.\n\nHuman: Hi\n\nAssistant:[[ Yo, all!</s>]]\n\nHuman: Bye\n\nAssistant:[[ So long</s>]]",
    ),
    "plain": Style("plain", "<s> </s>", CHAT, "<s>Be kind.\n\nHi[[Yo, all!</s>]]Bye[[So long</s>]]"),
    "llama-2": Style(
        "llama-2", "<s> </s>", CHAT,
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST][[ Yo, all! </s>]]<s>[INST] Bye [/INST][[ So long </s>]]",
    ),
    "llama-2, spaces": Style(
        "llama-2", "<s> </s>", SPACED[1:],
        "<s>[INST] Hi [/INST][[ Yo, all! </s>]]<s>[INST] Bye [/INST][[ So long </s>]]",
    ),
    "llama-3": Style(
        "llama-3", LLAMA_3_TOKENS, TOOL,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[sum 2 3<|eot_id|>]]"
        "<|start_header_id|>tool<|end_header_id|>\n\n5<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[It is 5.<|eot_id|>]]",
    ),
    "Llama 3.1": Style(
        LLAMA_3_1, LLAMA_3_TOKENS, TOOL[1:],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[sum 2 3<|eot_id|>]]"
        "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[It is 5.<|eot_id|>]]",
    ),
    "chatml": Style(
        "chatml", QWEN_TOKENS, TOOL,
        "<|endoftext|><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n"
        "<|im_start|>assistant\n[[sum 2 3<|im_end|>]]\n<|im_start|>tool\n5<|im_end|>\n"
        "<|im_start|>assistant\n[[It is 5.<|im_end|>]]",
    ),
    "Qwen 2.5": Style(
        QWEN_2_5, QWEN_TOKENS, [*TOOL[1:4], *TOOL[3:]],
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n"
        "<|im_start|>assistant\n[[sum 2 3<|im_end|>]]\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[It is 5.<|im_end|>]]",
    ),
    "Qwen 3, thoughts": Style(
        QWEN_3, QWEN_TOKENS, THOUGHT,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo, all!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[<think>\noh\n</think>\n\nSo long<|im_end|>]]",
    ),
    "Qwen 3, no thoughts": Style(
        QWEN_3, QWEN_TOKENS, NO_SYSTEM,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo, all!<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nSo long<|im_end|>]]",
    ),
    "mistral": Style(
        "mistral", "<s> </s>", CHAT,
        "<s> [INST] Be kind.\n\nHi [/INST][[ Yo, all!</s>]] [INST] Bye [/INST][[ So long</s>]]",
    ),
    "Mistral v0.3": Style(
        MISTRAL_V3, "<s> [INST] [/INST] </s>", CHAT,
        "<s>[INST] Hi[/INST] Yo, all!</s>[INST] Be kind.\n\nBye[/INST][[ So long</s>]]",
    ),
    "gemma": Style(
        "gemma", "<bos> <start_of_turn> <end_of_turn> <eos>", SPACED,
        "<bos><start_of_turn>user\n Be kind.\n\n\nHi<end_of_turn>\n<start_of_turn>model\n[[Yo, all!<end_of_turn>]]\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n[[So long<end_of_turn>]]",
    ),
    "zephyr": Style(
        "zephyr", "<s> </s>", CHAT,
        "<s><|system|>\nBe kind.</s>\n<|user|>\nHi</s>\n<|assistant|>\n[[Yo, all!</s>]]\n"
        "<|user|>\nBye</s>\n<|assistant|>\n[[So long</s>]]",
    ),
    "phi-3": Style(
        "phi-3", "<s> <|system|> <|user|> <|assistant|> <|end|> <|endoftext|>", CHAT,
        "<s><|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[[Yo, all!<|end|>]]\n"
        "<|user|>\nBye<|end|>\n<|assistant|>\n[[So long<|end|>]]",
    ),
    "Phi 3 medium": Style(
        PHI_3_MEDIUM, "<s> <|user|> <|assistant|> <|end|> <|endoftext|>", NO_SYSTEM,
        "<|user|>\nHi<|end|>\n<|assistant|>\n[[Yo, all!<|end|>]]\n"
        "<|user|>\nBye<|end|>\n<|assistant|>\n[[So long<|end|>]]",
    ),
    "Phi 4": Style(
        PHI_4, "<|endoftext|> <|im_start|> <|im_sep|> <|im_end|>", CHAT,
        "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>[[Yo, all!<|im_end|>]]"
        "<|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>[[So long<|im_end|>]]",
    ),
    "deepseek": Style(
        "deepseek", "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>", CHAT,
        "<｜begin▁of▁sentence｜>Be kind.\n\nUser: Hi\n\nAssistant:[[ Yo, all!<｜end▁of▁sentence｜>]]"
        "User: Bye\n\nAssistant:[[ So long<｜end▁of▁sentence｜>]]",
    ),
    "DeepSeek R1": Style(
        DEEPSEEK_R1, DEEPSEEK_TOKENS, [*THOUGHT[:4], CHAT[4]],
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>Hi<｜Assistant｜>\n\nYo, all!<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜>[[So long<｜end▁of▁sentence｜>]]",
    ),
    "an opened tag": Style(
        OPENS, QWEN_TOKENS, NO_SYSTEM,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo, all!<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[So long<|im_end|>]]",
    ),
    "an opened tag that answers bring": Style(
        OPENS, QWEN_TOKENS, [*MUSED[:3], said("assistant: <muse>oh</muse>Ah")[0]],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<muse>\n[[hm</muse>Yo<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[<muse>oh</muse>Ah<|im_end|>]]",
    ),
    "an opened tag, closed where there is no thought": Style(
        OPENS_AND_CLOSES, QWEN_TOKENS, MUSED,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<muse>\n[[hm</muse>Yo<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<muse>\n[[\n</muse>\n\nAh<|im_end|>]]",
    ),
    "an opened tag, closed otherwise": Style(
        OPENS_OTHERWISE, QWEN_TOKENS, MUSED,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<muse>\n[[hm</muse>Yo<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[<muse></muse>Ah<|im_end|>]]",
    ),
    THINKS: Style(
        THINKS_NOTHING, QWEN_TOKENS, MUSED,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<muse>\n[[hm</muse>Yo<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<muse>\n\n</muse>\n\n[[Ah<|im_end|>]]",
    ),
    "two markers after an answer": Style(
        TWO_MARKERS, "<b> <T> <R> </R> </T>", NO_SYSTEM,
        "<T><u>Hi</T><T><a><R>[[Yo, all!</R></T>]]<T><u>Bye</T><T><a><R>[[So long</R></T>]]",
    ),
    "two markers, neither of them EOS": Style(
        TWO_MARKERS, "<b> <T> <R> </R> </T> <e>", NO_SYSTEM,
        "<T><u>Hi</T><T><a><R>[[Yo, all!</R></T>]]<T><u>Bye</T><T><a><R>[[So long</R></T>]]",
    ),
    "the first of two markers is no token": Style(
        TWO_MARKERS, "<b> <T> </T>", NO_SYSTEM,
        "<T><u>Hi</T><T><a><R>[[Yo, all!</R></T>]]<T><u>Bye</T><T><a><R>[[So long</R></T>]]",
    ),
    "channels": Style(
        CHANNELS, CHANNEL_TOKENS, NO_SYSTEM,
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yo, all!<|end|>"
        "<|start|>user<|message|>Bye<|end|><|start|>assistant[[<|channel|>final<|message|>So long<|return|>]]",
    ),
    "tools and the day": Style(
        DATED_WITH_TOOLS, QWEN_TOKENS, TOOL[1:],
        f"<|im_start|>system\nYear: {datetime.date.today().year}\n{json.dumps(SUM)}<|im_end|>\n"
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n[[sum 2 3<|im_end|>]]\n"
        '<|im_start|>tool\n"5"<|im_end|>\n<|im_start|>assistant\n[[It is 5.<|im_end|>]]',
        tools=[SUM],
    ),
    "a greeting": Style(
        WANTS_A_QUESTION, QWEN_TOKENS, GREETING,
        "<|im_start|>assistant\nWho is it?<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[[Yo, all!<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[So long<|im_end|>]]",
    ),
    "a greeting after a system turn": Style(
        WANTS_A_QUESTION, QWEN_TOKENS, [CHAT[0], *GREETING[:3]],
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\nWho is it?<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo, all!<|im_end|>]]",
    ),
    "weights": Style(
        "human-assistant", "<s> </s>",
        [CHAT[1], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}, CHAT[1], {**CHAT[2], "weight": 0}],
        "<s>\n\nHuman: Hi\n\nAssistant: Yo, all!</s>\n\nHuman: Bye\n\nAssistant:[[ So long</s>]]",
    ),
    "DeepSeek Coder": Style(
        DEEPSEEK_CODER, "<s> <|EOT|> </s>", CHAT,
        "<s>Be kind.### Instruction:\nHi\n### Response:[[\nYo, all!\n<|EOT|>]]\n"
        "### Instruction:\nBye\n### Response:[[\nSo long\n<|EOT|>]]",
    ),
    "alpaca": Style(
        "alpaca", "<s> </s>", NO_SYSTEM,
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nHi\n\n### Response:\n[[Yo, all!</s>]]\n\n"
        "### Instruction:\nBye\n\n### Response:\n[[So long</s>]]",
    ),
    "vicuna": Style(
        "vicuna", "<s> </s>", CHAT,
        "<s>Be kind. USER: Hi ASSISTANT:[[ Yo, all!</s>]]USER: Bye ASSISTANT:[[ So long</s>]]",
    ),
    "ChatGLM 3": Style(
        CHATGLM, "<s> <|user|> <|assistant|> </s>", NO_SYSTEM,
        "[gMASK]sop<|user|>\n Hi<|assistant|>[[\n Yo, all!</s>]]<|user|>\n Bye<|assistant|>[[\n So long</s>]]",
    ),
    "strips white space": Style(
        STRIPS, "<b> <e>", SPACED,
        "<s>Be kind.\n<u>Hi\n<A>[[Yo, all!<e>]]\n<u>Bye\n<A>[[So long<e>]]",
    ),
    "no generation prompt": Style(
        NO_GENERATION_PROMPT, QWEN_TOKENS, NO_SYSTEM,
        "<|im_start|>user\nHi<|im_end|>\n[[<|im_start|>assistant\nYo, all!<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n[[<|im_start|>assistant\nSo long<|im_end|>]]",
    ),
}  # fmt: skip

# The built-ins that name a turn-end token, for a tokenizer that knows neither that nor their other markers.
WITHOUT_TOKENS = {
    "chatml": "<s><|im_start|>user\nHi</s>\n<|im_start|>assistant\n[[Yo, all!</s>]]\n"
    "<|im_start|>user\nBye</s>\n<|im_start|>assistant\n[[So long</s>]]",
    "llama-3": "<s><|start_header_id|>user<|end_header_id|>\n\nHi</s>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[Yo, all!</s>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nBye</s>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[So long</s>]]",
    "gemma": "<s><start_of_turn>user\nHi</s>\n<start_of_turn>model\n[[Yo, all!</s>]]\n"
    "<start_of_turn>user\nBye</s>\n<start_of_turn>model\n[[So long</s>]]",
    "phi-3": "<s><|user|>\nHi</s>\n<|assistant|>\n[[Yo, all!</s>]]\n<|user|>\nBye</s>\n<|assistant|>\n[[So long</s>]]",
}
STYLES |= {
    f"{name} without its tokens": Style(name, "<s> </s>", NO_SYSTEM, text) for name, text in WITHOUT_TOKENS.items()
}

# In these the model sees earlier answers as context only: the template prints them otherwise than it did when they
# were last.
REWRITES = {"Qwen 3, thoughts", "Qwen 3, no thoughts", "Mistral v0.3", "DeepSeek R1", "channels"}

# Here the generation prompt begins the answer's text. An answer may be printed without that.
BEGINS = {
    "DeepSeek R1": "<think>\n",
    "an opened tag": "<muse>\n",
    "an opened tag that answers bring": "<muse>\n",
    "an opened tag, closed where there is no thought": "<muse>\n",
    "an opened tag, closed otherwise": "<muse>\n",
}


def encoded(tokenizer, style):
    return cf.encode_conversation(tokenizer, style.messages, style.tools)


def spans(expected):
    """("text", trained) pieces of a text with [[ ]]."""
    return [(piece, i % 2 == 1) for i, piece in enumerate(re.split(r"\[\[|\]\]", expected)) if piece]


def plain(expected):
    return "".join(text for text, _ in spans(expected))


@functools.cache
def tokenizer_of(kind, style_name):
    style = STYLES[style_name]
    special, names = style.names()
    if kind == "characters":
        tokenizer = small.characters(special, **names)
    elif kind in ("byte-level", "merging"):
        tokenizer = small.byte_level(special, [plain(style.expected)] * 9, words=kind == "byte-level", **names)
    else:
        folder = FOLDER / re.sub(r"\W", "_", style_name)
        tokenizer = small.sentencepiece_llama(folder, prefix_space=True, **names)
        tokenizer.add_special_tokens({"additional_special_tokens": list(special[1:-1])})
    if style.template in cf.BUILTIN_TEMPLATES:
        cf.ensure_template(tokenizer, style.template)
    else:
        tokenizer.chat_template = style.template
    return tokenizer


def shown(tokenizer, ids, mask):
    """One line for people: the tokens, trained ones in « »."""
    texts = [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids]
    texts = [text.replace(" ", "\u00b7").replace("\n", "\\n") for text in texts]
    return " ".join(f"\u00ab{text}\u00bb" if trained else text for text, trained in zip(texts, mask, strict=True))


@pytest.mark.parametrize("name", STYLES)
def test_masks_by_hand_token_by_token(name):
    style, tokenizer = STYLES[name], tokenizer_of("characters", name)
    special, _ = style.names()
    vocabulary = tokenizer.get_vocab()
    ids, mask = [], []
    for text, trained in spans(style.expected):
        for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
            tokens = [part] if part in special else part.replace(" ", "\u0120").replace("\n", "\u010a")
            ids += [vocabulary[token] for token in tokens]
            mask += [trained] * len(tokens)
    got_ids, got_mask = encoded(tokenizer, style)
    assert tokenizer.convert_ids_to_tokens(got_ids) == tokenizer.convert_ids_to_tokens(ids)
    assert got_ids == ids and got_mask == mask
    readable = tokenizer_of("byte-level", name)
    print(f"\n{name}:\n  {shown(readable, *encoded(readable, style))}")


@pytest.mark.parametrize("kind", ["characters", "byte-level", "merging", "sentencepiece"])
@pytest.mark.parametrize("name", STYLES)
def test_every_kind_of_tokenizer_trains_the_same_text(name, kind):
    style, tokenizer = STYLES[name], tokenizer_of(kind, name)
    ids, mask = encoded(tokenizer, style)
    got = cf.trained_spans(tokenizer, style.messages, style.tools)
    expected = spans(style.expected)
    if kind == "sentencepiece":  # which puts a space after each special token, and prints \u2581 as a space
        got, expected = ([(re.sub("[ \u2581]", "", text), kept) for text, kept in side] for side in (got, expected))
    assert got == expected
    # The turn end is trained exactly once for each trained answer, as its last token.
    end = cf.turn_end_id(tokenizer)
    last = [i for i in range(len(ids)) if mask[i] and (i + 1 == len(ids) or not mask[i + 1])]
    assert [i for i in range(len(ids)) if mask[i] and ids[i] == end] == last
    assert len(last) == style.expected.count("[[")


@pytest.mark.parametrize("kind", ["characters", "byte-level", "merging", "sentencepiece"])
@pytest.mark.parametrize("name", STYLES)
def test_what_the_actor_is_shown_is_what_stands_before_the_answer(name, kind):
    style, tokenizer = STYLES[name], tokenizer_of(kind, name)
    ids, mask = encoded(tokenizer, style)
    answers = [i for i, m in enumerate(style.messages) if m["role"] == "assistant" and m.get("weight") != 0]
    begins = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    for answer, begin in zip(answers[-len(begins) :], begins, strict=True):
        prompt = cf.encode_prompt(tokenizer, style.messages[:answer], style.tools)
        if prompt != ids[:begin]:
            shown, stands = (re.sub("[ \u2581]", "", tokenizer.decode(side)) for side in (prompt, ids[:begin]))
            assert shown == stands + (BEGINS | {THINKS: "\n</muse>\n\n"})[name]
    assert cf.rewrites_history(tokenizer) == (
        name in REWRITES - {"Mistral v0.3", "DeepSeek R1"}
    )  # these do so to system turns and to thoughts only


@pytest.mark.parametrize("name", ["human-assistant", "llama-2", "deepseek", "vicuna", "alpaca"])
def test_the_merging_tokenizer_does_merge(name):
    """The trap is real: as one text, the conversation has tokens that reach from the prompt into the answer."""
    style, tokenizer = STYLES[name], tokenizer_of("merging", name)
    first = next(text for text, _ in spans(style.expected))
    alone, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, plain(style.expected)))
    assert whole[: len(alone)] != alone


@pytest.mark.parametrize("name", STYLES)
def test_a_sampled_answer_is_read_back_as_the_data_have_it(name):
    style = STYLES[name]
    for kind in ("characters", "byte-level"):
        tokenizer = tokenizer_of(kind, name)
        ids, mask = encoded(tokenizer, style)
        answer = ids[len(mask) - mask[::-1].index(False) :]
        content = [m["content"] for m in style.messages if m["role"] == "assistant" and m.get("weight") != 0][-1]
        if style.messages[-1] is SPACED[-1]:
            content = content.strip()
        if name in BEGINS and "closed where" not in name:
            # What is sampled follows the generation prompt, so that what that began is a part of it.
            content = BEGINS[name] + spans(style.expected)[-1][0].removesuffix(style.special.split()[-1])
        assert cf.decode_answer(tokenizer, answer) == content


@pytest.mark.parametrize("kind", ["characters", "byte-level"])
@pytest.mark.parametrize("name", ["Qwen 2.5", "Llama 3.1", "Phi 4", "strips white space"])
def test_transformers_own_assistant_mask_agrees(name, kind):
    """These templates carry {% generation %} marks, from which transformers computes a mask in its own way."""
    style, tokenizer = STYLES[name], tokenizer_of(kind, name)
    theirs = tokenizer.apply_chat_template(style.messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = cf.encode_conversation(tokenizer, style.messages)
    assert theirs["input_ids"][: len(ids)] == ids
    assert theirs["assistant_masks"] == [int(m) for m in mask] + [0] * (len(theirs["input_ids"]) - len(ids))


def test_turn_tokens_that_swallow_the_newline_after_them():
    """As Phi 3's own do."""
    style = STYLES["phi-3"]
    special, names = style.names()
    tokenizer = small.byte_level(special, **names)
    swallow = [AddedToken(token, rstrip=True, special=True) for token in special[1:-1]]
    tokenizer.add_special_tokens({"additional_special_tokens": swallow})
    cf.ensure_template(tokenizer, "phi-3")
    assert cf.trained_spans(tokenizer, style.messages) == spans(
        "<s><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>[[Yo, all!<|end|>]]"
        "<|user|>Bye<|end|><|assistant|>[[So long<|end|>]]"
    )


@pytest.mark.parametrize("name, printed", [
    ("llama-2", "{{ ' ' + message['content'] | trim + ' ' + eos_token }}"),
    ("mistral", "{{ ' ' + message['content'] + eos_token }}"),
])  # fmt: skip
def test_transformers_own_assistant_mask_agrees_on_built_ins_given_marks(name, printed):
    style, tokenizer = STYLES[name], tokenizer_of("characters", name)
    assert printed in tokenizer.chat_template
    marked = tokenizer.chat_template.replace(printed, "{% generation %}" + printed + "{% endgeneration %}")
    theirs = tokenizer.apply_chat_template(
        style.messages, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (theirs["input_ids"], [m == 1 for m in theirs["assistant_masks"]]) == cf.encode_conversation(
        tokenizer, style.messages
    )


@pytest.mark.parametrize("name", cf.BUILTIN_TEMPLATES)
def test_a_built_in_is_saved_with_the_tokenizer(name, tmp_path):
    style, tokenizer = STYLES[name], tokenizer_of("byte-level", name)
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert cf.ensure_template(saved, "plain").startswith("the tokenizer's own chat template")
    assert cf.encode_conversation(saved, style.messages) == cf.encode_conversation(tokenizer, style.messages)


def test_roles_that_a_built_in_does_not_know_are_refused():
    tokenizer = small.characters()
    cf.ensure_template(tokenizer, "llama-2")
    for messages, why in (
        (TOOL, "unknown role tool"),
        ([CHAT[1], CHAT[2], CHAT[0], *CHAT[3:]], "unknown role system"),  # its system turn stands first or nowhere
        ([CHAT[0], CHAT[2]], "a system turn needs a user turn after it"),
    ):
        with pytest.raises(cf.RowError, match=f"the chat template refuses the conversation: {why}"):
            cf.encode_conversation(tokenizer, messages)


def test_a_template_without_a_generation_prompt_is_said():
    tokenizer = tokenizer_of("characters", "no generation prompt")
    assert cf.ensure_template(tokenizer, None) == (
        "the tokenizer's own chat template (it has no generation prompt: the model has to learn to write "
        "'<|im_start|>assistant\\n' itself)"
    )


@pytest.mark.parametrize("name", WITHOUT_TOKENS)
def test_a_missing_turn_end_token_is_said(name):
    tokenizer = small.characters()
    end = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi-3": "<|end|>"}[name]
    assert cf.ensure_template(tokenizer, name) == (
        f"the built-in chat template {name} (turns end in '</s>': the tokenizer has no {end} token)"
    )
