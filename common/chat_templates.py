"""The built-in chat templates of `--chat_template`, for base models whose tokenizer brings none.

Each prints the text of the published template it is named after; comments say where not. All begin with BOS where the
tokenizer has one. What stands after an answer is the tokenizer's EOS, or a token named by `set turn_end`.

A space before an answer belongs to the answer, not to the generation prompt. Tokenizers glue a space to the word that
follows it ("\u2581Yes"), so a prompt ending in a space would be followed by "Yes" in rollouts and by "\u2581Yes" in any
text the model ever read. Text is trimmed only where the published template trims it: cleaning is step 0's business.
eos_token stands after an answer as a template variable, not as typed text, so that servers that know only the template
show later turns the same context that training did.
"""

_BOS = "{% if bos_token %}{{ bos_token }}{% endif %}"
_UNKNOWN_ROLE = "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"

_HUMAN_ASSISTANT = r"""
    BOS
    {% for message in messages %}
        {% if message['role'] == 'system' %}
            {% if not loop.first %}{{ '\n\n' }}{% endif %}{{ message['content'] }}
        {% elif message['role'] == 'user' %}
            {{ '\n\nHuman: ' + message['content'] }}
        {% elif message['role'] == 'assistant' %}
            {{ '\n\nAssistant:' }}{% if message['content'] %}{{ ' ' + message['content'] }}{% endif %}
            {% if eos_token %}{{ eos_token }}{% endif %}
        UNKNOWN_ROLE
    {% endfor %}
    {% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}
"""

# SmolLM2 and its kin declare <|im_start|> as their BOS; it must not stand there twice.
_CHATML = r"""
    {% set turn_end = '<|im_end|>' %}
    {% if bos_token and bos_token != '<|im_start|>' %}{{ bos_token }}{% endif %}
    {% for message in messages %}
        {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + turn_end + '\n' }}
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_PLAIN = r"""
    BOS
    {% for message in messages %}
        {{ message['content'] }}
        {% if message['role'] == 'system' %}{{ '\n\n' }}{% endif %}
        {% if message['role'] == 'assistant' and eos_token %}{{ eos_token }}{% endif %}
    {% endfor %}
"""

# Styles without a system turn put its text before the first question; with no question there it would be lost.
_FOLD_SYSTEM = r"""
    {% if messages[0]['role'] == 'system' %}
        {% if messages | length < 2 or messages[1]['role'] != 'user' %}
            {{ raise_exception('a system turn needs a user turn after it') }}
        {% endif %}
        {% set system = messages[0]['content'] %}{% set turns = messages[1:] %}
    {% else %}
        {% set system = none %}{% set turns = messages %}
    {% endif %}
"""

# As Llama-2-chat: a BOS for every question, text trimmed, a space on both sides of an answer.
_LLAMA_2 = r"""
    FOLD_SYSTEM
    {% for message in turns %}
        {% if message['role'] == 'user' %}
            {% set text = message['content'] %}
            {% if loop.first and system is not none %}
                {% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + text %}
            {% endif %}
            BOS
            {{ '[INST] ' + text | trim + ' [/INST]' }}
        {% elif message['role'] == 'assistant' %}
            {{ ' ' + message['content'] | trim + ' ' + eos_token }}
        UNKNOWN_ROLE
    {% endfor %}
"""

# As Llama-3-Instruct, which prints any role.
_LLAMA_3 = r"""
    {% set turn_end = '<|eot_id|>' %}
    BOS
    {% for message in messages %}
        {{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{ message['content'] | trim + turn_end }}
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# As Mistral-7B-Instruct-v0.2. Version 0.3 prints the system turn in the last question, which rewrites history.
_MISTRAL = r"""
    FOLD_SYSTEM
    BOS
    {% for message in turns %}
        {% if message['role'] == 'user' %}
            {{ ' [INST] ' }}{% if loop.first and system is not none %}{{ system + '\n\n' }}{% endif %}
            {{ message['content'] + ' [/INST]' }}
        {% elif message['role'] == 'assistant' %}
            {{ ' ' + message['content'] + eos_token }}
        UNKNOWN_ROLE
    {% endfor %}
"""

# As Gemma 3. Gemma 2 refuses a system turn and is otherwise the same.
_GEMMA = r"""
    {% set turn_end = '<end_of_turn>' %}
    FOLD_SYSTEM
    BOS
    {% for message in turns %}
        {% if message['role'] == 'user' %}
            {{ '<start_of_turn>user\n' }}{% if loop.first and system is not none %}{{ system + '\n\n' }}{% endif %}
        {% elif message['role'] == 'assistant' %}
            {{ '<start_of_turn>model\n' }}
        UNKNOWN_ROLE
        {{ message['content'] | trim + turn_end + '\n' }}
    {% endfor %}
    {% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# As Zephyr-7B-beta.
_ZEPHYR = r"""
    BOS
    {% for message in messages %}
        {% if message['role'] in ['system', 'user', 'assistant'] %}
            {{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}
        UNKNOWN_ROLE
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""

# As Phi-3-mini-instruct, without the EOS that it prints after a whole conversation.
_PHI_3 = r"""
    {% set turn_end = '<|end|>' %}
    BOS
    {% for message in messages %}
        {% if message['role'] in ['system', 'user', 'assistant'] %}
            {{ '<|' + message['role'] + '|>\n' + message['content'] + turn_end + '\n' }}
        UNKNOWN_ROLE
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""

# As DeepSeek-V2-Chat. Later ones have tokens for the turns and bring their template, base models included.
_DEEPSEEK = r"""
    BOS
    {% for message in messages %}
        {% if message['role'] == 'system' %}
            {{ message['content'] + '\n\n' }}
        {% elif message['role'] == 'user' %}
            {{ 'User: ' + message['content'] + '\n\n' }}
        {% elif message['role'] == 'assistant' %}
            {{ 'Assistant: ' + message['content'] + eos_token }}
        UNKNOWN_ROLE
    {% endfor %}
    {% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""

# The words of Stanford Alpaca, which had one question only, in the layout that others made of it for several.
_ALPACA = r"""
    BOS
    {% if messages[0]['role'] != 'system' %}
        {{ 'Below is an instruction that describes a task. ' }}
        {{ 'Write a response that appropriately completes the request.\n\n' }}
    {% endif %}
    {% for message in messages %}
        {% if message['role'] == 'system' %}
            {{ message['content'] + '\n\n' }}
        {% elif message['role'] == 'user' %}
            {{ '### Instruction:\n' + message['content'] + '\n\n' }}
        {% elif message['role'] == 'assistant' %}
            {{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}
        UNKNOWN_ROLE
    {% endfor %}
    {% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}
"""

# As Vicuna 1.1.
_VICUNA = r"""
    BOS
    {% if messages[0]['role'] != 'system' %}
        {{ 'A chat between a curious user and an artificial intelligence assistant. ' }}
        {{ "The assistant gives helpful, detailed, and polite answers to the user's questions. " }}
    {% endif %}
    {% for message in messages %}
        {% if message['role'] == 'system' %}
            {{ message['content'] + ' ' }}
        {% elif message['role'] == 'user' %}
            {{ 'USER: ' + message['content'] + ' ' }}
        {% elif message['role'] == 'assistant' %}
            {{ 'ASSISTANT: ' + message['content'] + eos_token }}
        UNKNOWN_ROLE
    {% endfor %}
    {% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""


def _joined(layout: str) -> str:
    """The template on one line: no white space of the layout above may reach the text."""
    for name, text in (("FOLD_SYSTEM", _FOLD_SYSTEM), ("UNKNOWN_ROLE", _UNKNOWN_ROLE), ("BOS", _BOS)):
        layout = layout.replace(name, text)
    return "".join(line.strip() for line in layout.splitlines())


BUILTIN_TEMPLATES = {
    "human-assistant": _joined(_HUMAN_ASSISTANT),
    "chatml": _joined(_CHATML),
    "plain": _joined(_PLAIN),
    "llama-2": _joined(_LLAMA_2),
    "llama-3": _joined(_LLAMA_3),
    "mistral": _joined(_MISTRAL),
    "gemma": _joined(_GEMMA),
    "zephyr": _joined(_ZEPHYR),
    "phi-3": _joined(_PHI_3),
    "deepseek": _joined(_DEEPSEEK),
    "alpaca": _joined(_ALPACA),
    "vicuna": _joined(_VICUNA),
}


def turn_end(name: str) -> str | None:
    """The token that a built-in template names to end a turn; None: it prints the tokenizer's EOS."""
    _, named, rest = BUILTIN_TEMPLATES[name].partition("{% set turn_end = '")
    return rest.partition("'")[0] if named else None


def ending_in_eos(name: str) -> str:
    """A built-in template for a tokenizer without that token."""
    return BUILTIN_TEMPLATES[name].replace(f"set turn_end = '{turn_end(name)}'", "set turn_end = eos_token")
