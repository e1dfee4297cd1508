"""Where scores come from: reward models and plain Python functions, normalised, weighted and added up.

Legend: B rows, Q padded prompt length, R padded response length.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from common import chat_format, json_files
from common.batches import pad_right
from common.engine import FrozenModel
from common.errors import RunFailed, UserError
from common.functions import is_function
from common.generation import Rollout
from common.models import at_last_token, positions_of


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sampled responses of this rank, as tokens and as text.

    rows: the prompts' data rows (`prompt` messages and any extra columns); texts: the responses, decoded.
    num_forwards: micro-batches every rank runs through a model, equal everywhere; micro_size: rows in one.
    """

    rows: list[dict]
    texts: list[str]
    rollout: Rollout
    micro_size: int
    num_forwards: int


class Source(Protocol):
    """Scores whole responses: NaN means "no opinion" on that row."""

    name: str

    def __call__(self, answers: Answers) -> torch.Tensor: ...  # (B,) fp32


class RewardModel:
    """A sequence classifier that scores responses, with its own tokenizer if it differs from the actor's.

    Args:
        mean, std: of its scores on held-out preference data (`reward_stats.json`).
        norm: "none", "center" (subtract the mean) or "standardize" (and divide by the spread).
    """

    def __init__(self, name: str, model: FrozenModel, tokenizer, actor_tokenizer, norm: str, mean: float, std: float):
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.config = model.module.hf.config
        self.same_tokens = same_tokenizer(tokenizer, actor_tokenizer)
        self.shift = 0.0 if norm == "none" else mean
        self.scale = max(std, 1e-6) if norm == "standardize" else 1.0

    def __call__(self, answers: Answers) -> torch.Tensor:
        rollout = answers.rollout
        device = rollout.response.device
        ids = torch.cat([rollout.query, rollout.response], 1)
        mask = torch.cat([rollout.query_mask, rollout.mask], 1)
        # An actor may have spare rows that this model has not; what it samples there has no text.
        if not self.same_tokens or (len(ids) and ids.max() >= self.config.get_text_config().vocab_size):
            ids, mask = (x.to(device) for x in self._retokenise(answers))
        scores = torch.zeros(len(ids), device=device)
        for number in range(answers.num_forwards):
            some = slice(number * answers.micro_size, (number + 1) * answers.micro_size)
            idle = some.start >= len(ids)  # nothing left here, but another rank's forward needs this one's shards
            some = slice(0, 1) if idle else some
            values = at_last_token(self.model(ids[some], mask[some]), mask[some])
            if not idle:
                scores[some] = values
        if not scores.isfinite().all():
            raise RunFailed(f"the reward model {self.name} scored {scores.tolist()}: its weights are damaged")
        return (scores - self.shift) / self.scale

    def _retokenise(self, answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
        """The same conversations in this model's tokens; an answer cut by length gets no turn end here either."""
        try:
            rows = [
                chat_format.encode_scored(self.tokenizer, [*row["prompt"], {"role": "assistant", "content": text}], cut)
                for row, text, cut in zip(answers.rows, answers.texts, answers.rollout.truncated.tolist(), strict=True)
            ]
        except chat_format.RowError as error:
            raise UserError(f"the reward model {self.name} cannot read a prompt: {error}") from error
        limit = positions_of(self.config)
        if (longest := max(map(len, rows), default=0)) > limit:
            raise UserError(
                f"a response with its prompt is {longest} tokens for the reward model {self.name}, which has positions "
                f"for {limit}; lower --max_prompt_length or --max_completion_length"
            )
        return pad_right(rows, self.tokenizer.pad_token_id or 0)


class RewardFunction:
    """Any Python function with TRL's signature: f(prompts, completions, **columns) -> list[float | None].

    Prompts and completions are message lists; `columns` are the data's further columns, and `truncated`, as far as the
    function takes them.
    """

    def __init__(self, name: str, function: Callable):
        self.name, self.function = name, function
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes = {parameter.name for parameter in by_name}
        self.needs = {parameter.name for parameter in by_name if parameter.default is parameter.empty}

    def __call__(self, answers: Answers) -> torch.Tensor:
        names = {name for row in answers.rows for name in row} - {"prompt"}
        given = {name: [row.get(name) for row in answers.rows] for name in sorted(names)}
        given.setdefault("truncated", answers.rollout.truncated.tolist())
        if lacking := self.needs - given.keys() - {"prompts", "completions"}:
            there = ", ".join(sorted(names)) or "none"
            raise UserError(
                f"reward {self.name} wants the column {', '.join(sorted(lacking))}; beside prompt the data has {there}"
            )
        given["prompts"] = [row["prompt"] for row in answers.rows]
        given["completions"] = [[{"role": "assistant", "content": text}] for text in answers.texts]
        scores = self.function(**{name: v for name, v in given.items() if self.takes_all or name in self.takes})
        try:
            values = [math.nan if score is None else float(score) for score in scores]
        except TypeError as error:
            raise UserError(f"reward {self.name} returned {scores!r:.80}, wanted a list of numbers or None") from error
        if len(values) != len(answers.rows):
            raise UserError(f"reward {self.name} returned {len(values)} scores for {len(answers.rows)} responses")
        found = torch.tensor(values, dtype=torch.float32, device=answers.rollout.response.device)
        for row, (score, finite) in enumerate(zip(scores, found.isfinite().tolist(), strict=True)):
            if score is not None and not finite:
                raise UserError(
                    f"reward {self.name} returned {score} for response {row} of this rank; wanted a finite number, or "
                    "None for no opinion"
                )
        return found


def fuse(scores: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The weighted sum over sources, (B,); a source without an opinion (NaN) adds nothing.

    Raises:
        UserError: a row that no source scored.
    """
    stacked = torch.stack(scores)
    if (silent := stacked.isnan().all(0)).any():
        row = int(silent.nonzero()[0])
        raise UserError(f"no reward source has an opinion on response {row} of this rank; at least one has to score it")
    return (stacked.nan_to_num(0.0) * torch.tensor(weights, device=stacked.device)[:, None]).sum(0)


def short_names(specs: list[str]) -> list[str]:
    """What metrics call each source: the last part of its folder, or its function; numbered where two would be one."""
    names = [spec.rpartition(":")[2] if is_function(spec) else Path(spec).name for spec in specs]
    return [name if names.count(name) == 1 else f"{name}{names[:i].count(name) + 1}" for i, name in enumerate(names)]


def read_stats(folder: str | Path, norm: str) -> tuple[float, float]:
    """Mean and spread of a reward model's scores; (0, 1) if they are not needed.

    Raises:
        UserError: needed, and not there or not to be used.
    """
    path = Path(folder) / "reward_stats.json"
    if norm == "none":
        return 0.0, 1.0
    if not path.exists():
        raise UserError(
            f"{folder} has no reward_stats.json, which --score_norm {norm} needs; "
            "use --score_norm none or train it with step2_reward/train.py"
        )
    advice = "train it again with step2_reward/train.py, or use --score_norm none"
    advice = "train it again with step2_reward/train.py, or use --score_norm none"
    stats = json_files.read_json(path, {"mean": json_files.number, "std": json_files.number}, advice)
    least = 1e-6 if norm == "standardize" else 0.0
    if stats["std"] < least:
        why = ", for scores are divided by it" * (norm == "standardize")
        raise UserError(f"{path}: std is {stats['std']:g}, wanted at least {least:g}{why}; {advice}")
    return stats["mean"], stats["std"]


def same_tokenizer(one, other) -> bool:
    """Whether two tokenizers give the same ids to the same conversation, turn ends included."""
    return (
        one.get_vocab() == other.get_vocab()
        and one.chat_template == other.chat_template
        and chat_format.turn_end_id(one) == chat_format.turn_end_id(other)
    )
