"""PPO's losses: the clipped policy loss, the clipped value loss, and how the actor's terms add up.

Legend: B rows of a batch, R padded response length. Column t of a (B, R) tensor speaks of choosing `response[:, t]`;
mask (B, R) bool is True for every sampled token. Old-policy quantities keep the bare name, fresh ones (with gradient)
are `new_*`. All functions are pure.

A loss is the SUM over the mask and so is every number in `stats`: the caller divides by the count of the whole
optimiser step, over all micro-batches and ranks, so that the gradient does not depend on how the step was cut up. Stats
are detached scalar tensors, not floats: reading them out here would make a GPU wait.
"""

import torch
from torch import Tensor

from common.tensor_ops import MAX_LOG_RATIO, masked_sum, upcast


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, negated. All inputs (B, R) -> (loss sum, stats sums).

        ratio = exp(new_logprobs - logprobs)
        loss  = max(-A ratio, -A clip(ratio, 1 - cliprange_low, 1 + cliprange_high))

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7, with the sign turned. Two ranges
    instead of one: "clip-higher" of DAPO (Yu et al., 2025, section 3.1); equal ranges are plain PPO. With `dual_clip`
    c > 1 the loss where A < 0 is at most -A c (Ye et al., "Mastering Complex Control in MOBA Games", 2020).
    We differ in the log-ratio, cut off at +-20 before exp: one wild token costs its own gradient, not the run.

    Stats: ratio, ratio_sq; clipfrac: tokens where the clipped term decided, which have no gradient; dual_clipfrac:
    tokens where dual_clip did; approxkl: (log ratio)^2 / 2, the k2 estimate of KL(old || new), as in TRL.
    """
    # where() here stops, on the way back, the 0 * NaN that junk outside the mask makes of the gradient
    log_ratio = torch.where(mask, upcast(new_logprobs) - logprobs, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    is_dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        is_dual_clipped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(is_dual_clipped, ceiling, losses)
    stats = {
        "clipfrac": masked_sum(is_clipped.float(), mask),
        "dual_clipfrac": masked_sum(is_dual_clipped.float(), mask),
        "approxkl": masked_sum(0.5 * log_ratio.detach().square(), mask),
        "ratio": masked_sum(ratio.detach(), mask),
        "ratio_sq": masked_sum(ratio.detach().square(), mask),
    }
    return masked_sum(losses, mask), stats


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, mask: Tensor, *, cliprange_value: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss. All inputs (B, R) -> (loss sum, stats sums).

        clip(V) = values + clip(V - values, -cliprange_value, cliprange_value)
        loss    = 0.5 max((V - returns)^2, (clip(V) - returns)^2)          V = new_values

    OpenAI Baselines' ppo2, via lm-human-preferences; not in the PPO paper. cliprange_value None: 0.5 (V - returns)^2.
    There is no vf_coef: the critic is a model of its own with its own learning rate. Under Adam a factor on the whole
    loss would only move where gradient clipping begins.

    Stats: error: (V - returns)^2, unclipped and without the 0.5; clipfrac: tokens where the clipped term decided.
    """
    new_values = torch.where(mask, upcast(new_values), 0)  # stops 0 * NaN on the way back, as in policy_loss
    error = (new_values - returns).square()
    losses, is_clipped = error, torch.zeros_like(mask)
    if cliprange_value is not None:
        near_values = torch.clamp(new_values, values - cliprange_value, values + cliprange_value)
        clipped_error = (near_values - returns).square()
        losses, is_clipped = torch.maximum(error, clipped_error), clipped_error > error
    stats = {"error": masked_sum(error.detach(), mask), "clipfrac": masked_sum(is_clipped.float(), mask)}
    return 0.5 * masked_sum(losses, mask), stats


def actor_loss(
    policy: Tensor,
    entropy: Tensor | None,
    kl: Tensor | None,
    ptx: Tensor | None,
    *,
    entropy_coef: float,
    kl_loss_coef: float,
    ptx_coef: float,
) -> Tensor:
    """policy - entropy_coef * entropy + kl_loss_coef * kl + ptx_coef * ptx: the actor's whole objective, a scalar.

    Each term is a sum already divided by its own count: `policy_loss`, `masked_sum(entropy_of(...), mask)` and
    `kl.kl_loss` by the step's response tokens, the cross-entropy of pretraining text by its own tokens. A term whose
    coefficient is 0 need not be computed: pass None.

    The pretraining term is InstructGPT's (Ouyang et al., 2022, equation 2), the entropy bonus PPO's (2017, equation 9).
    """
    loss = policy
    if entropy_coef:
        loss = loss - entropy_coef * entropy
    if kl_loss_coef:
        loss = loss + kl_loss_coef * kl
    if ptx_coef:
        loss = loss + ptx_coef * ptx
    return loss
