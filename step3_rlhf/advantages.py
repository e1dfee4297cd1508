"""From scores to advantages: shaped scores, per-token rewards, generalised advantage estimation.

Legend: B rows of a batch, R padded response length. Column t of a (B, R) tensor speaks of choosing `response[:, t]`;
mask (B, R) bool is True for every sampled token, the stop token included. `scores` (B,) is what the reward sources say
of a whole response; `rewards` (B, R) is what RL optimises. All functions are pure and want no gradient.
"""

import torch
from torch import Tensor

from common.tensor_ops import last_true


def shape_scores(
    scores: Tensor,
    truncated: Tensor,
    *,
    lengths: Tensor,
    score_clip: float | None,
    missing_eos_penalty: float | None,
    length_penalty: float | None,
) -> Tensor:
    """Clip the (already normalised) scores, then charge for truncation and for length. None turns a part off.

    scores (B,); truncated (B,) bool, True where the length limit and not a stop token ended the response;
    lengths (B,) sampled tokens of each response, stop token included -> (B,).

        score_clip           scores are limited to [-score_clip, score_clip]
        missing_eos_penalty  subtracted where truncated (TRL's flag of that name)
        length_penalty       subtracted once per token

    The order is normalise, clip, charge: the clip bounds what a reward model may say, and a charge applied before it
    could vanish in it: a response at the lower limit would then lose nothing by not stopping.
    """
    if score_clip is not None:
        scores = scores.clamp(-score_clip, score_clip)
    if missing_eos_penalty is not None:
        scores = torch.where(truncated, scores - missing_eos_penalty, scores)
    if length_penalty is not None:
        scores = scores - length_penalty * lengths
    return scores


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Per-token rewards: the KL toll on every token, the score on the last one.

    scores (B,); kl (B, R) per-token estimates (`kl.kl_estimate`); mask (B, R) bool -> (B, R), 0 outside the mask.

        r_t = -kl_coef * kl_t + [t is the last True token] * score

    Ziegler et al. 2019, equation 2, paid out token by token. A response without tokens has nothing to reward: zeros.
    """
    columns = torch.arange(mask.size(1), device=mask.device)
    is_last = (columns == last_true(mask).unsqueeze(1)) & mask  # (B, R)
    return torch.where(mask, -kl_coef * kl, 0) + torch.where(is_last, scores.unsqueeze(1), 0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the True tokens of each row.

    rewards, values (B, R); mask (B, R) bool -> (advantages, returns), both (B, R) and 0 outside the mask.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}        returns = A + V

    Schulman et al., "High-Dimensional Continuous Control Using GAE", 2016, equation 16, and its TD(lam) returns.
    V and A after the last True token are 0: a response ends there, also where the length limit ended it (no bootstrap).
    t+1 means the next True token, so tokens that the policy did not choose may stand in between (a tool's reply).
    """
    advantages, next_value, next_advantage = [], torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for reward, value, counts in zip(*(reversed(x.unbind(dim=1)) for x in (rewards, values, mask)), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage  # (B,)
        next_value = torch.where(counts, value, next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
        advantages.append(advantage)
    advantages = torch.where(mask, torch.stack(advantages[::-1], dim=1), 0)  # (B, R)
    return advantages, torch.where(mask, advantages + values, 0)
