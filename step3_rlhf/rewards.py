"""Where scores come from: reward models and plain Python functions, normalised, weighted and added up.

Legend: B rows, Q padded prompt length, R padded response length.
"""

import dataclasses
import math
from pathlib import Path
from typing import Protocol

import torch

from common import chat_format, json_files
from common.batches import pad_right
from common.engine import FrozenModel
from common.errors import UserError
from common.functions import Function, is_function
from common.generation import Rollout
from common.models import at_last_token
from common.reading import Reader


@dataclasses.dataclass(frozen=True)
class Answers:
    """Sampled responses of this rank, as tokens and as text.

    rows: the prompts' data rows (`prompt` messages and any extra columns); texts: the responses, decoded.
    num_forwards: micro-batches every rank runs through a model, equal everywhere; micro_size: rows in one. step: the RL
    step, counted from 1.
    """

    rows: list[dict]
    texts: list[str]
    rollout: Rollout
    micro_size: int
    num_forwards: int
    step: int = 1


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
        self.name, self.model = name, model
        self.reader = Reader(name, model.module.hf.config, tokenizer, actor_tokenizer)
        self.shift = 0.0 if norm == "none" else mean
        self.scale = max(std, 1e-6) if norm == "standardize" else 1.0

    def __call__(self, answers: Answers) -> torch.Tensor:
        rollout = answers.rollout
        device = rollout.response.device
        ids = torch.cat([rollout.query, rollout.response], 1)
        mask = torch.cat([rollout.query_mask, rollout.mask], 1)
        if len(ids) and not self.reader.takes(int(ids.max())):
            ids, mask = (x.to(device) for x in self._read(answers, ids, mask))
        scores = torch.zeros(len(ids), device=device)
        for number in range(answers.num_forwards):
            some = slice(number * answers.micro_size, (number + 1) * answers.micro_size)
            idle = some.start >= len(ids)  # nothing left here, but another rank's forward needs this one's shards
            some = slice(0, 1) if idle else some
            values = at_last_token(self.model(ids[some], mask[some]), mask[some])
            if not idle:
                scores[some] = values
        self.reader.check(scores)
        return (scores - self.shift) / self.scale

    def _read(self, answers: Answers, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same conversations row by row, each as this model can read it."""
        sampled = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        prompts, truncated = [row["prompt"] for row in answers.rows], answers.rollout.truncated.tolist()
        tools = map(chat_format.tools_of, answers.rows)
        return pad_right(list(map(self.reader.ids, prompts, sampled, answers.texts, truncated, tools)), 0)


class RewardFunction:
    """A user's function as a source.

    Args:
        steps: of the whole run, for functions that ask for TRL's `trainer_state`.
    """

    def __init__(self, name: str, function: Function, steps: int = 0):
        self.name, self.function, self.steps = name, function, steps

    def __call__(self, answers: Answers) -> torch.Tensor:
        rollout = answers.rollout
        ids = [row[kept].tolist() for row, kept in zip(rollout.response, rollout.mask, strict=True)]
        cut = rollout.truncated.tolist()
        scores = self.function(answers.rows, answers.texts, cut, ids, answers.step - 1, self.steps)
        values = [math.nan if score is None else score for score in scores]
        return torch.tensor(values, dtype=torch.float32, device=rollout.response.device)


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
    stats = json_files.read_json(path, {"mean": json_files.number, "std": json_files.number}, advice)
    least = 1e-6 if norm == "standardize" else 0.0
    if stats["std"] < least:
        why = ", for scores are divided by it" * (norm == "standardize")
        raise UserError(f"{path}: std is {stats['std']:g}, wanted at least {least:g}{why}; {advice}")
    return stats["mean"], stats["std"]
