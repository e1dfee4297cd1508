"""Tiny random models with their tokenizers, saved as plain HF folders, for tests that need real ones."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import small_tokenizers
import torch
from small_tokenizers import characters, gpt2_like, qwen_like
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from common.chat_format import BUILTIN_TEMPLATES

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _config(**changes) -> LlamaConfig:
    return LlamaConfig(**(SIZE | {"vocab_size": 352, "num_key_value_heads": 2, "initializer_range": 0.1} | changes))


def save_llama(folder: Path, seed: int = 0, tied: bool = True) -> Path:
    """A Llama with ChatML, grouped-query attention and spare embedding rows."""
    tokenizer = qwen_like()
    tokenizer.pad_token = "<|fim_pad|>"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(tie_word_embeddings=tied, pad_token_id=tokenizer.pad_token_id))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_reward(folder: Path, seed: int = 1) -> Path:
    """A one-label Llama classifier of the same tokenizer."""
    tokenizer = qwen_like()
    tokenizer.pad_token = "<|fim_pad|>"
    torch.manual_seed(seed)
    config = _config(num_labels=1, pad_token_id=tokenizer.pad_token_id)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_gpt2(folder: Path, seed: int = 0) -> Path:
    """A GPT-2: learned positions, dropout on, BOS = EOS = pad, no chat template."""
    tokenizer = gpt2_like()
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_talkers(root: Path) -> Path:
    """Folders `a` and `b`, Llamas that speak in single characters and end now and then, and `rm`, a reward model."""
    tokenizer = characters()
    tokenizer.chat_template = BUILTIN_TEMPLATES["human-assistant"]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=160,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.lm_head.weight.data[tokenizer.eos_token_id] *= 2  # ends often enough to be seen
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_pretrained(root / "a", num_labels=1).save_pretrained(root / "rm")
    tokenizer.save_pretrained(root / "rm")
    return root


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model as the hub has it.

    title: its name in the README. model_type: transformers' name. size: what its configuration says, `vocab_size` the
    rows of its embedding. tokenizer: makes it in a folder; of the byte-level ones it has 340 tokens, of the others 360.
    stop: the token that ends an answer. eos: what its generation configuration names. template: --chat_template, where
    the tokenizer has none.
    """

    title: str
    model_type: str
    size: dict
    tokenizer: Callable
    stop: str
    eos: int | list[int]
    template: str | None = None


_GROUPED = SIZE | {"num_key_value_heads": 2, "initializer_range": 0.2}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.2}
FAMILIES = {
    "llama": Family("Llama", "llama", _GROUPED | {"vocab_size": 360}, small_tokenizers.llama_2, "</s>", 2),
    "qwen2": Family(
        "Qwen2", "qwen2", _GROUPED | {"vocab_size": 352, "tie_word_embeddings": True},
        small_tokenizers.qwen_2_instruct, "<|im_end|>", [2, 0],
    ),
    "qwen3": Family(
        "Qwen3", "qwen3", _GROUPED | {"vocab_size": 352, "tie_word_embeddings": True, "head_dim": 8},
        small_tokenizers.qwen_3_base, "<|im_end|>", 0,
    ),
    "gpt2": Family(
        "GPT-2", "gpt2", _GPT2 | {"vocab_size": 340}, small_tokenizers.gpt_2, "<|endoftext|>", 0, "human-assistant"
    ),
    "opt": Family(
        "OPT", "opt", _OPT | {"vocab_size": 352, "word_embed_proj_dim": 32},
        small_tokenizers.opt, "</s>", 2, "human-assistant",
    ),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia", "gpt_neox", SIZE | {"vocab_size": 352, "initializer_range": 0.2},
        small_tokenizers.pythia, "<|endoftext|>", 0, "human-assistant",
    ),
    "mistral": Family(
        "Mistral", "mistral", _GROUPED | {"vocab_size": 360, "sliding_window": 8},
        small_tokenizers.llama_2, "</s>", 2,
    ),
}  # fmt: skip


def save_family(folder: Path, family: Family, seed: int = 0, auto: type = AutoModelForCausalLM, **changes) -> Path:
    """A random model of a family with its own kind of tokenizer, as it comes from the hub; `changes` to its size."""
    tokenizer = family.tokenizer(folder)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    config = AutoConfig.for_model(family.model_type, **(ids | family.size | changes))
    torch.manual_seed(seed)
    model = auto.from_config(config)
    if getattr(model, "generation_config", None):
        model.generation_config.eos_token_id = family.eos
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
