"""PPO's metrics by the names TRL users know, and the checks before an update: finite, and of the same tokens.

README.md of this folder has each name's formula and healthy range.
"""

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from common import distributed
from common.engine import StepResult
from common.errors import RunFailed
from common.tensor_ops import masked_mean, masked_sum
from step3_rlhf.experience import Experience

# In fp32 the sampler, the scoring forward and the training forward compute the same numbers up to rounding. Beyond the
# first figure they do not see the same tokens, positions or weights. In 16 bits rounding itself reaches the second. A
# GPU takes other kernels for other shapes of a batch, which round differently; its figures are estimates.
LIMITS = {"cpu": (1e-4, 1e-2), "cuda": (1e-3, 5e-2)}


def objective_metrics(experience: Experience, kl: Tensor, shaped_scores: Tensor, kl_coef: float) -> dict:
    """Means over the step's responses. kl (N, R); shaped_scores (N,): after clipping and penalties."""
    mask = experience.mask
    lengths = mask.sum(1).double()
    kl_sum = masked_sum(kl, mask, dim=1)
    gap = (experience.rollout_logprobs - experience.logprobs).abs()
    return {
        "objective/kl": kl_sum.mean(),
        "objective/entropy": masked_sum(-experience.logprobs, mask, dim=1).mean(),
        "objective/non_score_reward": (-kl_coef * kl_sum).mean(),
        "objective/rlhf_reward": (shaped_scores - kl_coef * kl_sum).mean(),
        "objective/scores": experience.scores.mean(),
        "objective/scores_std": experience.scores.std(correction=0),
        "policy/entropy_avg": masked_mean(experience.entropy, mask),
        "val/num_eos_tokens": (~experience.truncated).sum(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": experience.truncated.double().mean(),
        "rollout/logprob_gap_mean": masked_mean(gap, mask),
        "rollout/logprob_gap_max": gap.where(mask, 0).max(),
        "kl_coef": kl_coef,
    }


def update_metrics(actor: list[StepResult], critic: list[StepResult], counts: list[float]) -> dict:
    """Means over the step's minibatches. counts: response tokens in each; actor: empty while the critic warms up."""

    def average(results: list[StepResult], name: str) -> float:
        return float(np.mean([result.sums[name] / count for result, count in zip(results, counts, strict=True)]))

    metrics = {
        "loss/value_avg": float(np.mean([result.sums["loss"] for result in critic])),
        "val/error": average(critic, "error"),
        "val/clipfrac_avg": average(critic, "clipfrac"),
        "critic/grad_norm": float(np.mean([result.grad_norm for result in critic])),
        "critic/lr": critic[-1].learning_rate,
    }
    if actor:
        ratio = average(actor, "ratio")
        metrics |= {
            "loss/policy_avg": average(actor, "policy_loss"),
            "policy/approxkl_avg": average(actor, "approxkl"),
            "policy/clipfrac_avg": average(actor, "clipfrac"),
            "val/ratio": ratio,
            "val/ratio_var": max(0.0, average(actor, "ratio_sq") - ratio**2),
            "val/ratio_first": actor[0].sums["ratio"] / counts[0],
            "policy/grad_norm": float(np.mean([result.grad_norm for result in actor])),
            "lr": actor[-1].learning_rate,
        }
        if "kl_loss" in actor[0].sums:
            metrics["loss/kl_avg"] = average(actor, "kl_loss")
    return metrics


def source_metrics(name: str, scores: Tensor) -> dict:
    """Mean and spread of one reward source over the responses it had an opinion on; scores (N,), NaN for none."""
    known = scores[~scores.isnan()]
    mean, std = (known.mean(), known.std(correction=0)) if len(known) else (math.nan, math.nan)
    return {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}


def check_finite(step: int, experience: Experience) -> None:
    """Looks at everything the update will be made of, before it.

    Raises:
        RunFailed: some number is not finite; names tensor, responses and the ranks that computed them.
    """
    mask = experience.mask
    tensors = {name: getattr(experience, name) for name in ("rollout_logprobs", "logprobs", "ref_logprobs", "values")}
    bad = {name: (~tensor.isfinite() & mask).any(1) for name, tensor in tensors.items()}
    bad["scores"] = ~experience.scores.isfinite()
    for name, rows in bad.items():
        if rows.any():
            numbers = rows.nonzero().flatten().tolist()
            ranks = sorted({number % distributed.world_size() for number in numbers})
            shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
            raise RunFailed(
                f"step {step}: {name} of the responses {shown} (rank {', '.join(map(str, ranks))}) are not finite; "
                "stopped before the update, weights are unchanged"
            )


def check_sampler(step: int, experience: Experience, exact: bool, say: Callable[[str], None]) -> None:
    """Compares the log-probs recorded while sampling with those of the scoring forward.

    Raises:
        RunFailed: `exact` (fp32) and they differ.
    """
    gap = (experience.rollout_logprobs - experience.logprobs).abs().where(experience.mask, 0)
    tolerance, rounding = LIMITS[gap.device.type]
    if exact and not gap.max() <= tolerance:  # NaN fails too
        row = int(gap.amax(1).argmax())
        raise RunFailed(
            f"step {step}, response {row}: the sampler's log-probs differ from the trainer's by up to {gap.max():.2e} "
            f"in fp32 (tolerance {tolerance}): they do not see the same tokens, positions or weights"
        )
    mean = float(masked_mean(gap, experience.mask))
    if not exact and mean > rounding:
        say(f"warning: step {step}: sampler and trainer differ by {mean:.3f} nats a token on average")


def check_first_ratio(step: int, ratio: float, exact: bool, say: Callable[[str], None], device: str) -> None:
    """Before its first update the policy is the one that sampled, so the first minibatch's mean ratio is 1.

    Args:
        device: "cpu" or "cuda", where it was computed.

    Raises:
        RunFailed: `exact` (fp32) and it is not.
    """
    tolerance, rounding = LIMITS[device]
    if exact and not abs(ratio - 1) <= tolerance:
        raise RunFailed(
            f"step {step}: the first minibatch's ratio is {ratio:.6f} in fp32, wanted 1: the training forward does not "
            "reproduce the scoring forward (dropout left on, other padding, or other weights)"
        )
    if not abs(ratio - 1) <= rounding:
        say(f"warning: step {step}: the first minibatch's ratio is {ratio:.4f}, wanted 1")
