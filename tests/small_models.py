"""Tiny random models with their tokenizers, saved as plain HF folders, for tests that need real ones."""

from pathlib import Path

import torch
from small_tokenizers import characters, gpt2_like, qwen_like
from transformers import (
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
