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


def _byte_level(vocab_size: int, special: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def characters() -> PreTrainedTokenizerBase:
    """One token a byte; <s>, </s>; no pad."""
    backend = _byte_level(258, ["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


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


def sentencepiece_llama(folder: Path, prefix_space: bool = False) -> PreTrainedTokenizerBase:
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
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


def words() -> PreTrainedTokenizerBase:
    """Whole words and nothing else: any other word is <unk>."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "Human": 3, "Assistant": 4, ":": 5, "apple": 6}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
