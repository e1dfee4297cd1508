"""Proximal policy optimisation on language: one RL step is collect experience, compute advantages, update.

Ziegler et al. 2019 and Stiennon et al. 2020 (the objective), Schulman et al. 2017 (PPO), Huang et al. 2024 (the details).

Legend: N responses of the step over all ranks, B of a micro-batch, Q padded prompt length, R padded response length.
Rollout batch (N) > minibatch (one optimizer step) > micro-batch (one forward on one rank).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from common import data, distributed
from common.engine import FrozenModel, StepResult, TrainedModel
from common.generation import Rollout, SamplingParams
from common.hybrid_engine import RolloutEngine
from common.metrics import Stopwatch
from common.tensor_ops import entropy_of, logprobs_of, masked_mean, masked_moments, masked_sum, response_slice, whiten
from step3_rlhf import rewards as reward_sources
from step3_rlhf.advantages import gae, shape_scores, token_rewards
from step3_rlhf.kl import adapt_kl_coef, kl_estimate, kl_loss
from step3_rlhf.losses import actor_loss, policy_loss, value_loss

# In fp32 sampler, scorer and trainer compute the same numbers; beyond this they do not speak of the same tokens.
FP32_TOLERANCE = 1e-4
LOW_PRECISION_WARNING = 1e-2


@dataclasses.dataclass(frozen=True)
class PPO:
    """Every number of the algorithm; the flags of step3_rlhf/train.py of the same names explain them."""

    minibatch_size: int
    per_device_train_batch_size: int
    rollout_forward_batch_size: int
    num_ppo_epochs: int
    num_generations: int
    kl_coef: float
    kl_estimator: str
    kl_target: float | None
    kl_horizon: float
    kl_loss_coef: float
    kl_loss_estimator: str
    entropy_coef: float
    cliprange: float
    cliprange_high: float | None
    dual_clip: float | None
    cliprange_value: float | None
    gamma: float
    lam: float
    whiten_rewards: bool
    whiten_advantages: bool
    score_clip: float | None
    missing_eos_penalty: float | None
    length_penalty: float | None
    critic_warmup_steps: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Experience:
    """Everything the update needs, for all N responses, the same on every rank. (N, R) unless said otherwise.

    Old-policy quantities: logprobs, ref_logprobs, values were computed once, by the weights that sampled.
    """

    query: torch.Tensor  # (N, Q)
    query_mask: torch.Tensor  # (N, Q) bool
    response: torch.Tensor
    mask: torch.Tensor  # bool
    rollout_logprobs: torch.Tensor
    truncated: torch.Tensor  # (N,) bool
    scores: torch.Tensor  # (N,) as fused, before clipping and penalties
    logprobs: torch.Tensor
    entropy: torch.Tensor
    ref_logprobs: torch.Tensor
    values: torch.Tensor

    def rows(self, index: list[int]) -> "Experience":
        """Some rows, without the columns in which all of them are padding."""
        part = {field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **_trim(part))


class PPOTrainer:
    """Holds the four roles and runs RL steps.

    Args:
        ref: None when no KL coefficient asks for one.
        sources, weights: reward sources and their weights.
        say: prints a line.
        exact: True in fp32, where a mismatch of sampler and trainer is an error and not a rounding.
    """

    def __init__(
        self,
        *,
        actor: TrainedModel,
        critic: TrainedModel,
        ref: Callable | FrozenModel | None,
        sampler: RolloutEngine,
        sources: list,
        weights: list[float],
        decode: Callable[[list[int]], str],
        ppo: PPO,
        sampling: SamplingParams,
        device: torch.device,
        say: Callable[[str], None],
        exact: bool,
    ):
        self.actor, self.critic, self.ref, self.sampler = actor, critic, ref, sampler
        self.sources, self.weights, self.decode = sources, weights, decode
        self.ppo, self.sampling, self.device, self.say, self.exact = ppo, sampling, device, say, exact
        self.kl_coef = ppo.kl_coef
        self.episodes = 0

    def step(self, step: int, prompts: list[data.PromptExample]) -> tuple[dict, dict, list[dict]]:
        """One RL step on this step's prompts (the same list on every rank).

        Returns metrics, seconds by phase, and the sampled responses as rows for samples.jsonl.
        """
        ppo, clock, seconds = self.ppo, Stopwatch(), {}
        prompts = [prompt for prompt in prompts for _ in range(ppo.num_generations)]

        # 1. Sample a response to every prompt.
        mine = distributed.rank_rows(len(prompts))
        rollout = self.sampler.generate([prompts[i].ids for i in mine], self.sampling, step, list(mine))
        seconds["generate"] = clock.seconds()

        # 2. Score the whole responses.
        texts = [self.decode(ids[kept].tolist()) for ids, kept in zip(rollout.response, rollout.mask, strict=True)]
        by_source = self._score([prompts[i].row for i in mine], texts, rollout, len(prompts))
        seconds["score"] = clock.seconds()

        # 3. Log-probs under the policy and the reference, and the critic's values, all before any update.
        experience = self._experience(rollout, by_source, len(prompts))
        seconds["forward"] = clock.seconds()

        # 4. Rewards: the KL toll on every token, the shaped score on the last one.
        mask, lengths = experience.mask, experience.mask.sum(1)
        kl = kl_estimate(experience.logprobs, experience.ref_logprobs, ppo.kl_estimator)  # (N, R)
        shaped = shape_scores(
            experience.scores,
            experience.truncated,
            lengths=lengths,
            score_clip=ppo.score_clip,
            missing_eos_penalty=ppo.missing_eos_penalty,
            length_penalty=ppo.length_penalty,
        )
        rewards = token_rewards(shaped, kl, mask, self.kl_coef)  # (N, R)
        if ppo.whiten_rewards:
            rewards = whiten(rewards, mask, masked_moments(rewards, mask), shift_mean=False)

        # 5. Advantages and returns, whitened over the whole rollout batch.
        advantages, returns = gae(rewards, experience.values, mask, ppo.gamma, ppo.lam)
        if ppo.whiten_advantages:
            advantages = whiten(advantages, mask, masked_moments(advantages, mask))

        # 6. Several epochs of minibatches, shuffled over all ranks' responses.
        update_metrics = self._update(step, experience, advantages, returns)
        seconds["update"] = clock.seconds()

        # 7. What happened.
        self.episodes += len(prompts)
        metrics = self._objective_metrics(experience, kl, shaped) | update_metrics
        for source, scores in zip(self.sources, by_source, strict=True):
            everyone = distributed.gather_rows(scores, len(prompts))
            known = everyone[~everyone.isnan()]
            metrics[f"rewards/{source.name}/mean"] = known.mean()
            metrics[f"rewards/{source.name}/std"] = known.std(correction=0)
        if ppo.kl_target is not None:
            kl_per_response = metrics["objective/kl"]
            self.kl_coef = adapt_kl_coef(
                self.kl_coef, float(kl_per_response), ppo.kl_target, ppo.kl_horizon, len(prompts)
            )
        seconds["total"] = sum(seconds.values())
        return metrics, seconds, self._samples(prompts, experience, kl)

    def _score(self, rows: list[dict], texts: list[str], rollout: Rollout, total: int) -> list[torch.Tensor]:
        micro_size, num_forwards = self._forward_plan(total)
        answers = reward_sources.Answers(rows, texts, rollout, micro_size, num_forwards)
        return [source(answers) for source in self.sources]

    @torch.no_grad()
    def _experience(self, rollout: Rollout, by_source: list[torch.Tensor], total: int) -> Experience:
        """Runs the scoring forwards over this rank's rows and joins the rows of all ranks."""
        logprobs = torch.zeros_like(rollout.rollout_logprobs)
        entropy, ref_logprobs, values = logprobs.clone(), logprobs.clone(), logprobs.clone()
        for index, is_idle in self._forward_chunks(rollout, total):
            part = _trim({f.name: getattr(rollout, f.name)[index] for f in dataclasses.fields(rollout)})
            ids, seen = _sequence(part)
            width = part["response"].shape[1]
            logits = self._logits(self.actor, ids, seen, width)
            found = {"logprobs": logprobs_of(logits, part["response"]), "entropy": entropy_of(logits)}
            del logits
            found["ref_logprobs"] = found["logprobs"]
            if self.ref is not None:
                found["ref_logprobs"] = logprobs_of(self._logits(self.ref, ids, seen, width), part["response"])
            found["values"] = response_slice(self.critic(ids, seen), part["query"].shape[1])
            if is_idle:
                continue
            kept = part["mask"]
            for name, target in (
                ("logprobs", logprobs),
                ("entropy", entropy),
                ("ref_logprobs", ref_logprobs),
                ("values", values),
            ):
                target[index, :width] = torch.where(kept, found[name], 0.0)
        fields = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}
        fields |= {"logprobs": logprobs, "entropy": entropy, "ref_logprobs": ref_logprobs, "values": values}
        fields["scores"] = reward_sources.fuse(by_source, self.weights)
        pad = {"query": self.sampling.pad_id, "response": self.sampling.pad_id}
        return Experience(
            **{
                name: distributed.gather_rows(tensor, total, fill=pad.get(name, 0), left=name.startswith("query"))
                for name, tensor in fields.items()
            }
        )

    def _update(self, step: int, experience: Experience, advantages: torch.Tensor, returns: torch.Tensor) -> dict:
        ppo, total = self.ppo, len(experience.mask)
        warming_up = step <= ppo.critic_warmup_steps
        actor_results: list[StepResult] = []
        critic_results: list[StepResult] = []
        counts: list[float] = []
        for epoch in range(ppo.num_ppo_epochs):
            order = permutation(ppo.seed, step, epoch, total)
            for start in range(0, total, ppo.minibatch_size):
                rows = order[start : start + ppo.minibatch_size]
                counts.append(float(experience.mask[rows].sum()))
                micro_batches = list(self._micro_batches(rows, experience, advantages, returns))

                def critic_share(batch, count=counts[-1]):
                    return self._critic_loss(batch, count)

                def actor_share(batch, count=counts[-1]):
                    return self._actor_loss(batch, count)

                critic_results.append(self.critic.train_step(micro_batches, critic_share, step))
                if not warming_up:
                    actor_results.append(self.actor.train_step(micro_batches, actor_share, step))
                    if len(actor_results) == 1:
                        self._check_first_ratio(step, actor_results[0].sums["ratio"] / counts[0])
        return self._update_metrics(actor_results, critic_results, counts)

    def _actor_loss(self, batch: "MicroBatch", count: float) -> tuple[torch.Tensor, dict]:
        ppo, part = self.ppo, batch.experience
        logits = self._logits(self.actor, batch.ids, batch.seen, part.response.shape[1])
        new_logprobs = logprobs_of(logits, part.response)
        policy, sums = policy_loss(
            new_logprobs,
            part.logprobs,
            batch.advantages,
            batch.mask,
            cliprange_low=ppo.cliprange,
            cliprange_high=ppo.cliprange if ppo.cliprange_high is None else ppo.cliprange_high,
            dual_clip=ppo.dual_clip,
        )
        sums["policy_loss"] = policy
        entropy = divergence = None
        if ppo.entropy_coef:
            entropy = masked_sum(entropy_of(logits), batch.mask)
        if ppo.kl_loss_coef:
            divergence = kl_loss(new_logprobs, part.ref_logprobs, batch.mask, estimator=ppo.kl_loss_estimator)
            sums["kl_loss"] = divergence
        loss = actor_loss(
            policy,
            entropy,
            divergence,
            None,
            entropy_coef=ppo.entropy_coef,
            kl_loss_coef=ppo.kl_loss_coef,
            ptx_coef=0.0,
        )
        return loss / count, sums

    def _critic_loss(self, batch: "MicroBatch", count: float) -> tuple[torch.Tensor, dict]:
        part = batch.experience
        new_values = response_slice(self.critic(batch.ids, batch.seen), part.query.shape[1])
        loss, sums = value_loss(
            new_values, part.values, batch.returns, batch.mask, cliprange_value=self.ppo.cliprange_value
        )
        return loss / count, sums

    def _logits(self, model: Callable, ids: torch.Tensor, seen: torch.Tensor, width: int) -> torch.Tensor:
        """Logits that chose the response, (B, R, V), at the sampling temperature."""
        logits = response_slice(model(ids, seen, keep=width + 1), 1)
        return logits if self.sampling.temperature == 1.0 else logits / self.sampling.temperature

    def _micro_batches(self, rows: list[int], experience: Experience, advantages, returns) -> Iterator["MicroBatch"]:
        """This rank's share of a minibatch; similar lengths together. A rank with nothing left runs a row of weight zero."""
        lengths = (experience.query_mask.sum(1) + experience.mask.sum(1)).tolist()
        rows = sorted(rows, key=lambda row: lengths[row])
        dealt = data.rank_micro_batches(
            rows, distributed.rank(), distributed.world_size(), self.ppo.per_device_train_batch_size
        )
        for micro in dealt:
            part = experience.rows(micro or rows[:1])
            ids, seen = _sequence(vars(part))
            width = part.mask.shape[1]
            counts = part.mask if micro else torch.zeros_like(part.mask)
            index = micro or rows[:1]
            yield MicroBatch(part, ids, seen, counts, advantages[index, :width], returns[index, :width])

    def _forward_plan(self, total: int) -> tuple[int, int]:
        """Rows in one scoring forward, and how many forwards every rank runs."""
        most = -(-total // distributed.world_size())
        size = self.ppo.rollout_forward_batch_size or most
        return size, -(-most // size)

    def _forward_chunks(self, rollout: Rollout, total: int) -> Iterator[tuple[list[int], bool]]:
        """Row numbers of this rank's scoring forwards, similar lengths together; True marks one whose result is not used."""
        lengths = (rollout.query_mask.sum(1) + rollout.mask.sum(1)).tolist()
        order = sorted(range(len(lengths)), key=lambda row: lengths[row])
        size, num_forwards = self._forward_plan(total)
        for number in range(num_forwards):
            index = order[number * size : (number + 1) * size]
            yield (index, False) if index else ([0], True)

    def _objective_metrics(self, experience: Experience, kl: torch.Tensor, shaped: torch.Tensor) -> dict:
        mask = experience.mask
        lengths = mask.sum(1).double()
        kl_sum = masked_sum(kl, mask, dim=1)
        gap = (experience.rollout_logprobs - experience.logprobs).abs()
        worst_gap = float(torch.where(mask, gap, 0).max())
        if self.exact and worst_gap > FP32_TOLERANCE:
            raise FloatingPointError(
                f"the sampler's log-probs differ from the trainer's by up to {worst_gap:.2e} in fp32 (tolerance {FP32_TOLERANCE}): "
                "they do not see the same tokens, positions or weights"
            )
        if not self.exact and float(masked_mean(gap, mask)) > LOW_PRECISION_WARNING:
            self.say(
                f"warning: sampler and trainer differ by {float(masked_mean(gap, mask)):.3f} nats a token on average"
            )
        return {
            "objective/kl": kl_sum.mean(),
            "objective/entropy": masked_sum(-experience.logprobs, mask, dim=1).mean(),
            "objective/non_score_reward": (-self.kl_coef * kl_sum).mean(),
            "objective/rlhf_reward": (shaped - self.kl_coef * kl_sum).mean(),
            "objective/scores": experience.scores.mean(),
            "objective/scores_std": experience.scores.std(correction=0),
            "policy/entropy_avg": masked_mean(experience.entropy, mask),
            "val/num_eos_tokens": (~experience.truncated).sum(),
            "completions/mean_length": lengths.mean(),
            "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(),
            "completions/clipped_ratio": experience.truncated.double().mean(),
            "rollout/logprob_gap_mean": masked_mean(gap, mask),
            "rollout/logprob_gap_max": worst_gap,
            "kl_coef": self.kl_coef,
            "episode": self.episodes,
        }

    def _update_metrics(self, actor: list[StepResult], critic: list[StepResult], counts: list[float]) -> dict:
        def mean(results: list[StepResult], name: str) -> float:
            return (
                float(np.mean([r.sums[name] / c for r, c in zip(results, counts, strict=True)]))
                if results
                else math.nan
            )

        metrics = {
            "loss/value_avg": float(np.mean([r.sums["loss"] for r in critic])),
            "val/error": mean(critic, "error"),
            "val/clipfrac_avg": mean(critic, "clipfrac"),
            "critic/grad_norm": float(np.mean([r.grad_norm for r in critic])),
            "critic/lr": critic[-1].learning_rate,
        }
        if actor:
            ratio = mean(actor, "ratio")
            metrics |= {
                "loss/policy_avg": mean(actor, "policy_loss"),
                "policy/approxkl_avg": mean(actor, "approxkl"),
                "policy/clipfrac_avg": mean(actor, "clipfrac"),
                "val/ratio": ratio,
                "val/ratio_var": max(0.0, mean(actor, "ratio_sq") - ratio**2),
                "val/ratio_first": actor[0].sums["ratio"] / counts[0],
                "policy/grad_norm": float(np.mean([r.grad_norm for r in actor])),
                "lr": actor[-1].learning_rate,
            }
            if self.ppo.kl_loss_coef:
                metrics["loss/kl_avg"] = mean(actor, "kl_loss")
        return metrics

    def _check_first_ratio(self, step: int, ratio: float) -> None:
        """Before the first update the policy is the one that sampled: the ratio is 1."""
        if self.exact and abs(ratio - 1) > FP32_TOLERANCE:
            raise FloatingPointError(
                f"step {step}: the first minibatch's ratio is {ratio:.6f} in fp32, wanted 1: the training forward does not "
                "reproduce the scoring forward (dropout left on, other padding, or other weights)"
            )
        if not self.exact and abs(ratio - 1) > LOW_PRECISION_WARNING:
            self.say(f"warning: step {step}: the first minibatch's ratio is {ratio:.4f}, wanted 1")

    def _samples(self, prompts: list[data.PromptExample], experience: Experience, kl: torch.Tensor) -> list[dict]:
        kl_sum = masked_sum(kl, experience.mask, dim=1).tolist()
        lengths = experience.mask.sum(1).tolist()
        return [
            {
                "row": row,
                "prompt": prompts[row].row["prompt"][-1]["content"],
                "response": self.decode(experience.response[row][experience.mask[row]].tolist()),
                "score": float(experience.scores[row]),
                "kl": kl_sum[row],
                "length": lengths[row],
                "truncated": bool(experience.truncated[row]),
            }
            for row in range(len(prompts))
        ]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One forward: some rows of the experience, their sequences, and what counts in the loss."""

    experience: Experience
    ids: torch.Tensor  # (B, T)
    seen: torch.Tensor  # (B, T) bool: attention
    mask: torch.Tensor  # (B, R) bool: loss
    advantages: torch.Tensor  # (B, R)
    returns: torch.Tensor  # (B, R)


def permutation(seed: int, step: int, epoch: int, total: int) -> list[int]:
    """The order of all N responses in one PPO epoch: a function of its arguments, the same on every rank."""
    noise = np.random.Generator(np.random.Philox(key=(seed % 2**64, step), counter=(0, 0, 1, epoch))).random(total)
    return np.argsort(noise, kind="stable").tolist()


def _trim(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drops query columns on the left and response columns on the right in which every row is padding."""
    queries = part["query_mask"].any(0)
    first = int(queries.long().argmax())
    width = max(1, int(part["mask"].any(0).sum()))
    trimmed = {}
    for name, tensor in part.items():
        if name.startswith("query"):
            trimmed[name] = tensor[:, first:]
        else:
            trimmed[name] = tensor[:, :width] if tensor.dim() > 1 else tensor
    return trimmed


def _sequence(part: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and response side by side, (B, Q + R), and what attention may see."""
    return torch.cat([part["query"], part["response"]], 1), torch.cat([part["query_mask"], part["mask"]], 1)
