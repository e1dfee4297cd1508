"""Proximal policy optimisation on language: one RL step is collect experience, compute advantages, update.

Sources: Ziegler et al. 2019 and Stiennon et al. 2020 (the objective), Schulman et al. 2017 (PPO), Huang et al. 2024
(the implementation details).

Legend: N responses of the step over all ranks, B of a micro-batch, R padded response length. Rollout batch (N) >
minibatch (one optimizer step) > micro-batch (one forward on one rank).
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from common import distributed
from common.engine import AdapterOff, FrozenModel, StepResult, TrainedModel
from common.examples import PromptExample
from common.generation import Rollout, SamplingParams
from common.hybrid_engine import RolloutEngine
from common.metrics import Stopwatch
from common.tensor_ops import entropy_of, logprobs_of, masked_moments, masked_sum, response_slice, whiten
from step3_rlhf import experience as exp
from step3_rlhf import ppo_metrics
from step3_rlhf.advantages import gae, shape_scores, token_rewards
from step3_rlhf.kl import adapt_kl_coef, kl_estimate, kl_loss
from step3_rlhf.losses import actor_loss, policy_loss, value_loss
from step3_rlhf.rewards import Answers, Source, fuse


@dataclasses.dataclass(frozen=True)
class PPO:
    """Every number of the algorithm; the flags of the same names in step3_rlhf/train.py explain them."""

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
    max_tokens_per_micro_batch: int = 0


@dataclasses.dataclass
class PPOTrainer:
    """The roles of RLHF and the step that joins them.

    actor, critic: trained. ref: None when no KL coefficient asks for one. sampler: generates with the actor's weights.
    sources, weights: what scores responses. decode: response ids -> text. say: prints a line. exact: True in fp32,
    where a mismatch of sampler and trainer is an error and not a rounding.
    """

    actor: TrainedModel
    critic: TrainedModel
    ref: FrozenModel | AdapterOff | None
    sampler: RolloutEngine
    sources: list[Source]
    weights: list[float]
    decode: Callable[[list[int]], str]
    ppo: PPO
    sampling: SamplingParams
    say: Callable[[str], None]
    exact: bool

    def __post_init__(self):
        self.kl_coef = self.ppo.kl_coef
        self.episodes = 0

    def counters(self) -> dict:
        """What goes on from step to step besides the engines, for a checkpoint."""
        return {"kl_coef": self.kl_coef, "episodes": self.episodes}

    def restore(self, counters: dict) -> None:
        """Takes up what `counters` gave; an empty dict is the beginning."""
        self.kl_coef = counters.get("kl_coef", self.kl_coef)
        self.episodes = counters.get("episodes", self.episodes)

    def step(self, step: int, prompts: list[PromptExample], num_samples: int = 3) -> tuple[dict, dict, list[dict]]:
        """One RL step (counted from 1) on its prompts, the same list on every rank.

        Returns metrics, seconds by phase, and the first `num_samples` responses as rows for samples.jsonl.
        """
        ppo, clock, seconds = self.ppo, Stopwatch(), {}
        prompts = [prompt for prompt in prompts for _ in range(ppo.num_generations)]

        # 1. Sample a response to every prompt; each rank takes its share.
        own = list(distributed.rank_rows(len(prompts)))
        rollout = self.sampler.generate([prompts[row].ids for row in own], self.sampling, step, own)
        seconds["generate"] = clock.seconds()

        # 2. Score whole responses.
        plan = exp.forward_plan(len(prompts), ppo.rollout_forward_batch_size)
        texts = [self.decode(ids[kept].tolist()) for ids, kept in zip(rollout.response, rollout.mask, strict=True)]
        answers = Answers([prompts[row].row for row in own], texts, rollout, plan.size, plan.count, step)
        by_source = [source(answers) for source in self.sources]  # (rows of this rank,) each
        seconds["score"] = clock.seconds()

        # 3. Log-probs under policy and reference, and values, all before any update; then every rank gets every row.
        computed = self.old_quantities(rollout, plan) | {"scores": fuse(by_source, self.weights)}
        experience = exp.gather(rollout, computed, len(prompts), self.sampling.pad_id)
        ppo_metrics.check_finite(step, experience)
        ppo_metrics.check_sampler(step, experience, self.exact, self.say)
        seconds["forward"] = clock.seconds()

        # 4. Rewards: the KL toll on every token, the shaped score on the last one.
        mask = experience.mask
        kl = kl_estimate(experience.logprobs, experience.ref_logprobs, ppo.kl_estimator)  # (N, R)
        shaped = shape_scores(
            experience.scores,
            experience.truncated,
            lengths=mask.sum(1),
            score_clip=ppo.score_clip,
            missing_eos_penalty=ppo.missing_eos_penalty,
            length_penalty=ppo.length_penalty,
        )
        rewards = token_rewards(shaped, kl, mask, self.kl_coef)  # (N, R)
        if ppo.whiten_rewards:
            rewards = whiten(rewards, mask, masked_moments(rewards, mask), shift_mean=False)

        # 5. Advantages and returns; advantages are whitened over the whole rollout batch.
        advantages, returns = gae(rewards, experience.values, mask, ppo.gamma, ppo.lam)
        if ppo.whiten_advantages:
            advantages = whiten(advantages, mask, masked_moments(advantages, mask))

        # 6. Several epochs of minibatches, shuffled over the responses of all ranks.
        update_metrics = self.update(step, experience, advantages, returns)
        seconds["update"] = clock.seconds()

        # 7. What happened; the KL coefficient for the next step.
        self.episodes += len(prompts)
        metrics = ppo_metrics.objective_metrics(experience, kl, shaped, self.kl_coef) | update_metrics
        for source, scores in zip(self.sources, by_source, strict=True):
            metrics |= ppo_metrics.source_metrics(source.name, distributed.gather_rows(scores, len(prompts)))
        metrics["episode"] = self.episodes
        if ppo.kl_target is not None:
            seen_kl = float(metrics["objective/kl"])
            self.kl_coef = adapt_kl_coef(self.kl_coef, seen_kl, ppo.kl_target, ppo.kl_horizon, len(prompts))
        return metrics, seconds | {"total": sum(seconds.values())}, self.samples(prompts[:num_samples], experience, kl)

    @torch.no_grad()
    def old_quantities(self, rollout: Rollout, plan: exp.ForwardPlan) -> dict[str, Tensor]:
        """Log-probs, entropy, reference log-probs and values of this rank's responses, each (rows, R)."""
        found = {
            name: torch.zeros_like(rollout.rollout_logprobs)
            for name in ("logprobs", "entropy", "ref_logprobs", "values")
        }
        for rows, is_idle in exp.scoring_forwards(rollout, plan):
            part = exp.rows_of(rollout, rows)
            ids, seen = exp.sequence(part)
            response, width = part["response"], part["response"].shape[1]
            logits = self.response_logits(self.actor, ids, seen, width)
            computed = {"logprobs": logprobs_of(logits, response), "entropy": entropy_of(logits)}
            del logits  # a number for each word of the vocabulary, at each token: too large to stand beside others
            computed["ref_logprobs"] = computed["logprobs"]
            if self.ref is not None:
                computed["ref_logprobs"] = logprobs_of(self.response_logits(self.ref, ids, seen, width), response)
            computed["values"] = response_slice(self.critic(ids, seen), part["query"].shape[1])
            if not is_idle:
                for name, values in computed.items():
                    found[name][rows, :width] = values.where(part["mask"], 0.0)
        return found

    def update(self, step: int, experience: exp.Experience, advantages: Tensor, returns: Tensor) -> dict:
        """`num_ppo_epochs` passes over the rollout batch, one optimizer step of actor and critic a minibatch."""
        ppo, total = self.ppo, len(experience.mask)
        actor_results: list[StepResult] = []
        critic_results: list[StepResult] = []
        counts = []
        for epoch in range(ppo.num_ppo_epochs):
            order = exp.permutation(ppo.seed, step, epoch, total)
            for start in range(0, total, ppo.minibatch_size):
                rows = order[start : start + ppo.minibatch_size]
                count = float(experience.mask[rows].sum())  # what every mean of this optimizer step is taken over
                sizes = ppo.per_device_train_batch_size, ppo.max_tokens_per_micro_batch
                batches = exp.micro_batches(rows, experience, advantages, returns, *sizes)
                dealt = [batch.rows for batch in batches]
                critic_results.append(
                    self.critic.train_step(batches, lambda batch, n=count: self.critic_share(batch, n), step, dealt)
                )
                counts.append(count)
                if step > ppo.critic_warmup_steps:
                    actor_results.append(
                        self.actor.train_step(batches, lambda batch, n=count: self.actor_share(batch, n), step, dealt)
                    )
                if len(actor_results) == 1:
                    ppo_metrics.check_first_ratio(
                        step, actor_results[0].sums["ratio"] / counts[0], self.exact, self.say
                    )
        return ppo_metrics.update_metrics(actor_results, critic_results, counts)

    def actor_share(self, batch: exp.MicroBatch, count: float) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the actor's loss over `count` tokens, and sums for the metrics."""
        ppo = self.ppo
        logits = self.response_logits(self.actor, batch.ids, batch.seen, batch.response.shape[1])
        new_logprobs = logprobs_of(logits, batch.response)
        policy, sums = policy_loss(
            new_logprobs,
            batch.logprobs,
            batch.advantages,
            batch.mask,
            cliprange_low=ppo.cliprange,
            cliprange_high=ppo.cliprange if ppo.cliprange_high is None else ppo.cliprange_high,
            dual_clip=ppo.dual_clip,
        )
        sums["policy_loss"] = policy.detach()
        entropy = masked_sum(entropy_of(logits), batch.mask) if ppo.entropy_coef else None
        divergence = None
        if ppo.kl_loss_coef:
            divergence = kl_loss(new_logprobs, batch.ref_logprobs, batch.mask, estimator=ppo.kl_loss_estimator)
            sums["kl_loss"] = divergence.detach()
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

    def critic_share(self, batch: exp.MicroBatch, count: float) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the critic's loss over `count` tokens, and sums for the metrics."""
        new_values = response_slice(self.critic(batch.ids, batch.seen), batch.query_length)
        loss, sums = value_loss(
            new_values, batch.values, batch.returns, batch.mask, cliprange_value=self.ppo.cliprange_value
        )
        return loss / count, sums

    def response_logits(self, model: Callable, ids: Tensor, seen: Tensor, width: int) -> Tensor:
        """The logits that chose the last `width` tokens, (B, width, V), at the sampling temperature."""
        logits = response_slice(model(ids, seen, keep=width + 1), 1)
        return logits if self.sampling.temperature == 1.0 else logits / self.sampling.temperature

    def samples(self, prompts: list[PromptExample], experience: exp.Experience, kl: Tensor) -> list[dict]:
        """The responses to the step's first prompts, readable."""
        kl_sum, lengths = masked_sum(kl, experience.mask, dim=1).tolist(), experience.mask.sum(1).tolist()
        return [
            {
                "row": row,
                "prompt": prompt.row["prompt"][-1]["content"],
                "response": self.decode(experience.response[row][experience.mask[row]].tolist()),
                "score": float(experience.scores[row]),
                "kl": kl_sum[row],
                "length": lengths[row],
                "truncated": bool(experience.truncated[row]),
            }
            for row, prompt in enumerate(prompts)
        ]
