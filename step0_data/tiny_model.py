"""The base model of the tiny set: a sentencepiece tokenizer trained on the spot, an untrained Llama of 0.9 M."""

import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from common import checkpoint
from common.chat_format import BUILTIN_TEMPLATES
from common.errors import UserError

VOCAB_SIZE = 730  # 4 special pieces, 256 bytes, the rest words and parts of words
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, INTERMEDIATE_SIZE = 128, 4, 4, 352
MAX_LENGTH = 1024  # the defaults of every stage fit; rotary positions cost nothing
UNK, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"  # ids 0 to 3: four different tokens, so no mask ever has to guess


def write_base_model(folder: str | Path, texts: Sequence[str], seed: int) -> None:
    """Writes a finished stage-`base` folder that plain `AutoTokenizer` and `AutoModelForCausalLM` open.

    Args:
        texts: what the tokenizer is trained on.
        seed: of the model's weights. The same texts and seed give the same bytes.
    """
    args = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}

    import torch
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which else warns about no GPU
    transformers.logging.disable_progress_bar()

    def write(staging: Path) -> None:
        write_tokenizer(staging, texts)
        write_model(staging, seed)

    checkpoint.publish(folder, "base", write, args=args, seed=seed, parents={}, data=None, metrics={})


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Trains a BPE tokenizer that changes no text: no normalisation, no added space, unknown characters as bytes."""
    import sentencepiece
    from transformers import AutoTokenizer

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=VOCAB_SIZE,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            character_coverage=1.0,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"cannot train a tokenizer of {VOCAB_SIZE} pieces on {len(texts)} texts ({error}); give it more text"
        ) from error
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": False,  # the template writes whatever special tokens belong there
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "unk_token": UNK,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = BUILTIN_TEMPLATES["human-assistant"]
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, seed: int) -> None:
    """An untrained Llama with tied embeddings.

    The initialisation is 1/sqrt(hidden) wide: with the library's 0.02 a model this small does not learn to name the
    topic in 400 steps.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=1 / math.sqrt(HIDDEN_SIZE),
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.do_sample = True  # what RL samples from; greedy decoding would hide it
    model.save_pretrained(folder)
