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
    stop_ids = chat_format.stop_ids(tokenizer, models.stop_ids_of(path))
    _, _, pad_note = chat_format.choose_pad(tokenizer, config.get_text_config().vocab_size, stop_ids)
    return Prepared(tokenizer, config, stop_ids, f"template: {template}; {pad_note}")
