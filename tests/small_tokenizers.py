"""Real tokenizers, built in a second from a few sentences: one of each kind that the stages meet.

Not tests themselves. `characters` merges nothing, so that expected ids can be written down by hand.
"""

import json
from pathlib import Path

import sentencepiece
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT = [
    "Human: What is an apple pie?",
    "Assistant: Sure! An apple pie is tasty. Unhappy bees rarely sting the happy ones.",
    "Thank you, goodbye.  Two spaces, 1+2=3 and 12+30=42.",
    "<think>\nplease be kind\n</think>",
] * 40


def _byte_level(vocab_size: int, special: list[str], words: bool = True, text=TEXT) -> tokenizers.Tokenizer:
    """`words`: no token reaches beyond a word, as in GPT-2 and all that came after it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    return backend


def characters(special: tuple[str, ...] = ("<s>", "</s>"), **names) -> PreTrainedTokenizerBase:
    """One token a byte; <s>, </s>; no pad."""
    names = {"bos_token": "<s>", "eos_token": "</s>"} | names
    return PreTrainedTokenizerFast(tokenizer_object=_byte_level(256 + len(special), list(special)), **names)


def byte_level(special: tuple[str, ...], text=TEXT, words: bool = True, **names) -> PreTrainedTokenizerBase:
    """Byte-level BPE of a text, with special tokens. `words` False: words, spaces and signs are merged as they come."""
    return PreTrainedTokenizerFast(tokenizer_object=_byte_level(800, list(special), words, text), **names)


def gpt2_like() -> PreTrainedTokenizerBase:
    """Byte-level BPE with one special token for BOS, EOS, unknown and padding."""
    end = "<|endoftext|>"
    backend = _byte_level(340, [end])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end, pad_token=end)


def adds_bos() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose post-processor puts a BOS before any text."""
    backend = _byte_level(340, ["<s>", "</s>", "<pad>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


# As Qwen 2.5: a default system turn, no BOS, an EOS that is not the turn end.
QWEN_LIKE_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def qwen_like(template: str | None = QWEN_LIKE_TEMPLATE) -> PreTrainedTokenizerBase:
    """ChatML: special tokens for the turns, <|endoftext|> for both EOS and padding, as base models come."""
    backend = _byte_level(340, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


# As Qwen 3: a default empty thought in the last answer, and thoughts dropped from earlier ones.
QWEN3_LIKE_TEMPLATE = (
    "{%- for message in messages %}{%- set content = message['content'] %}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- if loop.last %}{%- set content = '<think>\\n\\n</think>\\n\\n' + content %}{%- endif %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# As Llama 2 and Mistral, which print the turn end after an answer and need BOS once, in front.
INST_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)


def byte_level_files(folder: Path, special: list[str], vocab_size: int = 340, **config) -> PreTrainedTokenizerBase:
    """`vocab.json` and `merges.txt` loaded through AutoTokenizer, as OPT, GPT-2, Qwen and Pythia come.

    Args:
        special: the first tokens of the vocabulary, never split.
        config: what `tokenizer_config.json` says, its `tokenizer_class` above all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(_byte_level(vocab_size, special).to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": special} | config))
    return AutoTokenizer.from_pretrained(folder)


def sentencepiece_llama(folder: Path, prefix_space: bool = False, **changes) -> PreTrainedTokenizerBase:
    """A trained `tokenizer.model` loaded through AutoTokenizer; `prefix_space`: as Llama 2, "a" becomes "\u2581a"."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix_space,
        user_defined_symbols=[] if prefix_space else ["\n"],
        pad_id=-1,
        minloglevel=2,
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": prefix_space,
        "add_prefix_space": prefix_space,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    } | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


# ---- the kinds that model families come with, each from the files and by the class of the real one

END = "<|endoftext|>"


def llama_2(folder: Path) -> PreTrainedTokenizerBase:
    """sentencepiece; BOS before any text, [INST], no pad token. Mistral's is of the same kind."""
    return sentencepiece_llama(folder, prefix_space=True, add_bos_token=True, chat_template=INST_TEMPLATE)


def qwen_2_instruct(folder: Path) -> PreTrainedTokenizerBase:
    """ChatML with an EOS that ends turns, and another token for padding."""
    turns = {"eos_token": "<|im_end|>", "pad_token": END, "chat_template": QWEN_LIKE_TEMPLATE}
    return byte_level_files(folder, [END, "<|im_start|>", "<|im_end|>"], tokenizer_class="Qwen2Tokenizer", **turns)


def qwen_3_base(folder: Path) -> PreTrainedTokenizerBase:
    """ChatML with thoughts; <|endoftext|> is EOS and pad, turns end in another token."""
    turns = {"eos_token": END, "pad_token": END, "chat_template": QWEN3_LIKE_TEMPLATE}
    return byte_level_files(folder, [END, "<|im_start|>", "<|im_end|>"], tokenizer_class="Qwen2Tokenizer", **turns)


def gpt_2(folder: Path) -> PreTrainedTokenizerBase:
    """BOS = EOS = <unk>, no pad token, no template."""
    return byte_level_files(folder, [END], tokenizer_class="GPT2Tokenizer")


def opt(folder: Path) -> PreTrainedTokenizerBase:
    """</s>, id 2, before any text and after it; pad has id 1; no template."""
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    return byte_level_files(folder, special, tokenizer_class="GPT2Tokenizer", add_bos_token=True, **names)


def pythia(folder: Path) -> PreTrainedTokenizerBase:
    """<|endoftext|> for everything, padding included, though there is a <|padding|>; no template."""
    names = dict.fromkeys(["bos_token", "eos_token", "unk_token", "pad_token"], END)
    return byte_level_files(folder, [END, "<|padding|>"], tokenizer_class="GPTNeoXTokenizer", **names)


def words() -> PreTrainedTokenizerBase:
    """Whole words and nothing else: any other word is <unk>."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "Human": 3, "Assistant": 4, ":": 5, "apple": 6}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
