"""A model's tokenizer made ready for a stage: template, stop tokens and pad token, checked against the model's limits.

The three training stages start with this, so that a prompt is the same tokens in all of them.
"""

import dataclasses
from pathlib import Path

from torch import nn

from common import chat_format, models


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A tokenizer with all that training and sampling ask of it.

    config: the model's HF configuration. stop_ids: tokens that end a response, the trained turn end first. note: which
    template and pad token were taken, for people.
    """

    tokenizer: object
    config: object
    stop_ids: tuple[int, ...]
    note: str

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def fit(self, hf: nn.Module, zero3: dict | None) -> bool:
        """Gives a model a row for every token and the same special tokens. True: embedding rows were added.

        A critic or a reference of another size gets as many rows as the actor: Qwen2.5 7B has 128 more than 0.5B, and
        what lies beyond the tokenizer can be sampled all the same.
        """
        rows = max(len(self.tokenizer), self.config.get_text_config().vocab_size)
        grown = models.grow_embeddings(hf, rows, zero3)
        models.set_special_tokens(hf, self.tokenizer, self.stop_ids)
        return grown


def prepare(
    path: str | Path, max_length: int, length_flags: str, chat_template: str | None, trust_remote_code: bool
) -> Prepared:
    """Reads tokenizer and configuration of a model folder or hub name, no weights.

    Args:
        max_length: tokens of the longest sequence the stage will make.
        length_flags: the flags that decide it, for the error.
        chat_template: a built-in name or a jinja file, used where the tokenizer has no template of its own.

    Raises:
        UserError: no tokenizer, no template, or more positions asked for than the model has.
    """
    config = models.read_config(path, trust_remote_code)
    tokenizer = models.load_tokenizer(path, trust_remote_code)
    models.check_length(config, max_length, length_flags)
    template = chat_format.ensure_template(tokenizer, chat_template)
    stop_ids = chat_format.stop_ids(tokenizer, models.stop_ids_of(path, config))
    _, _, pad_note = choose_pad(tokenizer, config.get_text_config().vocab_size, stop_ids)
    return Prepared(tokenizer, config, stop_ids, f"template: {template}; {pad_note}")


# ---- the pad token

_PAD_NAMES = ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|fim_pad|>", "<|vision_pad|>")
_RESERVED_PREFIXES = ("<|reserved_special_token_", "<|reserved_", "<reserved_", "<unused", "[unused")


def choose_pad(tokenizer, num_embeddings: int, extra_stop_ids: tuple[int, ...] = ()) -> tuple[int, bool, str]:
    """Give the tokenizer a pad token that is not a stop token; return (id, whether a token was added, words to print).

    With pad == EOS, other people's code drops the EOS from labels, masks and end-of-sequence look-ups. Taken, in
    this order: the present pad token; a reserved token; <unk> where the tokenizer can spell any text without it;
    a new token, which costs nothing where the embedding has a spare row. `num_embeddings` is the model's rows;
    with a new id beyond it the caller has to grow the embedding to id + 1.
    """
    stops = {chat_format.turn_end_id(tokenizer), tokenizer.eos_token_id, *extra_stop_ids}
    taken = stops | {tokenizer.bos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in stops:
        return tokenizer.pad_token_id, False, f"pad token {tokenizer.pad_token!r}, the tokenizer's own"

    markers = {t: i for t, i in chat_format.marker_ids(tokenizer).items() if i not in taken and i < num_embeddings}
    reserved = sorted((t for t in markers if t.startswith(_RESERVED_PREFIXES)), key=markers.get)
    for text in [t for t in _PAD_NAMES if t in markers] + reserved:
        tokenizer.pad_token = text
        return markers[text], False, f"pad token {text!r}, a reserved token of the tokenizer"

    unk = tokenizer.unk_token_id
    if unk is not None and unk not in taken and unk < num_embeddings:
        # A byte-level vocabulary never yields <unk>; elsewhere it is a real token of real texts.
        rare = tokenizer("\u4e2d\U0001f9ff\u0378\ue000\U0010fffd\x07", add_special_tokens=False)["input_ids"]
        if unk not in rare:
            tokenizer.pad_token = tokenizer.unk_token
            return unk, False, f"pad token {tokenizer.unk_token!r}, which this tokenizer needs for no text"

    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    pad_id = tokenizer.pad_token_id
    if pad_id < num_embeddings:
        return pad_id, True, f"pad token '<|pad|>' added as id {pad_id}, a spare row of the embedding"
    grow = f"the embedding grows from {num_embeddings} to {pad_id + 1} rows"
    return pad_id, True, f"pad token '<|pad|>' added as id {pad_id}: {grow}"
