"""A base model from nothing: a sentencepiece tokenizer trained on the spot and an untrained Llama of about a million.

The tiny sets bring the texts to train the tokenizer on; `--train_tokenizer` takes those of any prepared data.
"""

import io
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from common import checkpoint
from common.chat_format import BUILTIN_TEMPLATES
from common.data import open_parquet, rows_of
from common.errors import UserError

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, INTERMEDIATE_SIZE = 128, 4, 4, 352
MAX_LENGTH = 1024  # the defaults of every stage fit; rotary positions cost nothing
MIN_VOCAB = 300
MAX_CHARACTERS = (
    20_000_000  # of more text a sample is taken: sentencepiece holds it in memory, some 35 bytes a character
)
MAX_LINE = 1000  # characters, so 4,000 bytes at most
TEXT_COLUMNS = {
    "sft": ["messages"],
    "preference": ["prompt", "chosen", "rejected"],
    "prompts": ["prompt"],
    "pretrain": ["text"],
}
SPACE_MARK = "\u2581"  # what sentencepiece writes for a space
LINE_ENDS = f"\n\r\0{SPACE_MARK}\u2585"  # it would leave out a line with one of the last three, unsaid
FIXED_PIECES = 260  # 4 special pieces and the 256 bytes
UNK, BOS, EOS, PAD = "<unk>", "<s>", "</s>", "<pad>"  # ids 0 to 3: four different tokens, so no mask ever has to guess


def write_base_model(folder: str | Path, texts: Iterable[str], seed: int, vocab_size: int) -> None:
    """Writes a finished stage-`base` folder that plain `AutoTokenizer` and `AutoModelForCausalLM` open.

    Args:
        texts: what the tokenizer is trained on.
        seed: of the model's weights. The same texts and seed give the same bytes.
    """
    args = {"vocab_size": vocab_size, "hidden_size": HIDDEN_SIZE, "num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}

    import torch
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which else warns about no GPU
    transformers.logging.disable_progress_bar()

    def write(staging: Path) -> None:
        write_tokenizer(staging, texts, vocab_size)
        write_model(staging, seed, vocab_size)

    checkpoint.publish(folder, "base", write, args=args, seed=seed, parents={}, data=None, metrics={})


class TooLittleText(UserError):
    """A tokenizer of this size cannot be trained on the text; `most`: the largest that can, if it is known."""

    def __init__(self, vocab_size: int, most: int | None, why: str):
        super().__init__(f"too little text for a tokenizer of {vocab_size} pieces: {why}; bring more text")
        self.most = most


def write_base_model_for(prepared: Path, seed: int, vocab_size: int) -> None:
    """PREPARED/base_model for any data: the tokenizer is trained on the text of all train rows.

    It has as many pieces as the text is enough for, `vocab_size` at most; fewer are said.

    The text is read twice. The first time characters are counted: at most half of the pieces that are to be learnt go
    to single characters, the most frequent ones, so that words get some too; rarer characters are spelled in bytes.

    Raises:
        UserError: a size that cannot be; too little text for it.
    """
    if vocab_size < MIN_VOCAB:
        raise UserError(f"--train_tokenizer {vocab_size}: wanted {MIN_VOCAB} or more; {FIXED_PIECES} are always there")
    counts = Counter()
    for text in staged_texts(prepared):
        counts.update(text)
    if not counts:
        raise UserError("--train_tokenizer: no stage has train rows; bring more rows, or a smaller --eval_fraction")
    if counts[SPACE_MARK]:
        print(
            f"note: the train rows have the character {SPACE_MARK} (U+2581) {counts[SPACE_MARK]} times; sentencepiece "
            "writes a space so, and the tokenizer reads it back as one"
        )
    for mark in LINE_ENDS:
        counts.pop(mark, None)
    spelled_in_bytes = [character for character, _ in counts.most_common()[(vocab_size - FIXED_PIECES) // 2 :]]
    ends = dict.fromkeys(map(ord, [*LINE_ENDS, *spelled_in_bytes]), "\n")
    share, rng = MAX_CHARACTERS / max(counts.total(), 1), random.Random(seed)
    texts = (text for text in staged_texts(prepared) if share >= 1 or rng.random() < share)
    lines = (line for text in texts for line in lines_of(text.translate(ends)))
    try:
        write_base_model(prepared / "base_model", lines, seed, vocab_size)
    except TooLittleText as error:
        if error.most is None or not MIN_VOCAB <= error.most < vocab_size:
            raise
        print(
            f"note: the train rows are enough for a tokenizer of {error.most} pieces, not of {vocab_size}: it has those"
        )
        write_base_model_for(prepared, seed, error.most)


def staged_texts(prepared: Path) -> Iterator[str]:
    """Every text of the train rows, with the word that the chat template puts before it."""
    for stage, columns in TEXT_COLUMNS.items():
        path = prepared / stage / "train.parquet"
        if not path.is_file():
            continue
        with open_parquet(path) as file:
            for batch in file.iter_batches(batch_size=1000, columns=columns):
                for row in rows_of(batch):
                    for value in row.values():
                        if isinstance(value, str):
                            yield value
                            continue
                        for message in value:
                            before = "Assistant" if message["role"] == "assistant" else "Human"
                            yield f"{before}: {message['content']}"


def lines_of(text: str) -> Iterator[str]:
    """Lines of a length that sentencepiece takes: longer ones it would leave out without a word."""
    for line in text.split("\n"):
        for start in range(0, len(line), MAX_LINE):
            yield line[start : start + MAX_LINE]


def write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """Trains a BPE tokenizer that changes no text: no normalisation, no added space, unknown characters as bytes."""
    import sentencepiece
    from transformers import AutoTokenizer

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            character_coverage=1.0,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        most = re.search(r"value <= (\d+)", str(error))
        why = f"it is enough for {most[1]} or fewer" if most else str(error)
        raise TooLittleText(vocab_size, int(most[1]) if most else None, why) from error
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


def write_model(folder: Path, seed: int, vocab_size: int) -> None:
    """An untrained Llama with tied embeddings.

    The initialisation is 1/sqrt(hidden) wide: with the library's 0.02 a model this small does not learn to name the
    topic in 400 steps.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from common import models

    config = LlamaConfig(
        vocab_size=vocab_size,
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
    models.check_saved(folder, model, models.on_a_few_tokens(models.LanguageModel(model), model, "cpu"))
