"""How a reward model reads what an actor has said: by the very tokens where both have the same, else by the text."""

import torch

from common import chat_format
from common.errors import RunFailed, UserError
from common.models import positions_of


class Reader:
    """A reward model's view of an actor's sampled conversations.

    Args:
        name: of the reward model, for errors.
        config: its HF configuration.
        tokenizer, actor_tokenizer: its own, and that of the actor.
    """

    def __init__(self, name: str, config, tokenizer, actor_tokenizer):
        self.name, self.tokenizer, self.actor_tokenizer = name, tokenizer, actor_tokenizer
        self.same_tokens = same_tokenizer(tokenizer, actor_tokenizer)
        self.rows, self.limit = config.get_text_config().vocab_size, positions_of(config)

    def takes(self, highest: int) -> bool:
        """Whether ids up to this one can be read as they are.

        An actor may have spare rows that this model has not; what it samples there has no text.
        """
        return self.same_tokens and highest < self.rows

    def ids(
        self, prompt: list[dict], sampled: list[int], text: str, truncated: bool, tools: list[dict] | None = None
    ) -> list[int]:
        """A conversation in this model's tokens; an answer cut by length gets no turn end here either.

        Args:
            prompt: its messages. sampled: the actor's ids of prompt and response. text: the response.
            tools: definitions that stand in the prompt.

        Raises:
            UserError: the template refuses the prompt, or the model has too few positions.
        """
        ids = sampled
        if not self.takes(max(sampled)):
            try:
                answer = {"role": "assistant", "content": text}
                ids = chat_format.encode_scored(self.tokenizer, [*prompt, answer], truncated, tools)
            except chat_format.RowError as error:
                raise UserError(f"the reward model {self.name} cannot read a prompt: {error}") from error
        if len(ids) > self.limit:
            raise UserError(
                f"a response with its prompt is {len(ids)} tokens for the reward model {self.name}, which has "
                f"{self.limit} positions; lower --max_prompt_length or --max_completion_length"
            )
        return ids

    def check(self, scores: torch.Tensor) -> None:
        """Raises RunFailed unless all scores are finite."""
        if not scores.isfinite().all():
            raise RunFailed(f"the reward model {self.name} scored {scores.tolist()!s:.200}: its weights are damaged")


def same_tokenizer(one, other) -> bool:
    """Whether two tokenizers give the same ids to the same conversation, turn ends included."""
    return (
        one.get_vocab() == other.get_vocab()
        and one.chat_template == other.chat_template
        and chat_format.turn_end_id(one) == chat_format.turn_end_id(other)
    )
