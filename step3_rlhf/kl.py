"""How far the policy has moved from the reference: per-token KL estimates, the KL loss, the adaptive coefficient.

Legend: B rows of a batch, R padded response length. Log-probs and masks are (B, R); column t speaks of choosing
`response[:, t]`. All functions are pure.
"""

import torch
from torch import Tensor

from common.tensor_ops import MAX_LOG_RATIO, masked_sum

# Ziegler et al. clip the controller's relative error to +-0.2: one step never moves the coefficient by more than
# 0.2 * n / horizon of itself, however far the KL has run.
MAX_RELATIVE_ERROR = 0.2


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Single-sample estimate of KL(policy || reference) at each token, in nats.

    logprobs, ref_logprobs (B, R) of tokens drawn from the policy; estimator "k1", "k2" or "k3" -> (B, R).

    With d = log policy - log reference (Schulman, "Approximating KL Divergence", 2020):
        k1 = d                  unbiased, may be negative, high variance
        k2 = d^2 / 2            biased, never negative, low variance
        k3 = exp(-d) - 1 + d    unbiased, never negative, low variance unless the policies are far apart

    The values are what the toll in the rewards needs; there they carry no gradient. For gradients see `kl_loss`.
    We differ in k3 only beyond d < -20, where d is cut off before exp can overflow.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # the whole of d is cut, not exp(-d) alone: what would remain of the gradient there points the wrong way
        difference = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-difference) + difference
    raise ValueError(f"KL estimator {estimator!r} is unknown: choose k1, k2 or k3")


def kl_loss(new_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """KL to the reference as a differentiable term of the actor's loss (GRPO's way): sum over mask, a scalar.

    new_logprobs (B, R) with gradient, ref_logprobs (B, R), mask (B, R) bool. The caller divides by the global count.

    A good estimate of a value need not have a good gradient (Tang and Munos, "On a few pitfalls in KL divergence
    gradient estimation for RL", 2025). Over tokens drawn from the current policy pi, with d as in `kl_estimate`:
        k1   grad log pi                    zero on average: this term does nothing but add noise
        k2   d grad log pi                  the token-level gradient of KL(pi || ref): what one wants
        k3   (1 - exp(-d)) grad log pi      the gradient of KL(ref || pi), equal to k2's to first order in d
    So k2 is right, k3 close while d is small, k1 useless as a loss although it is the right one in the rewards. None
    corrects for tokens drawn from an older policy: after a rollout's first optimiser step all three are approximate.
    """
    new_logprobs = torch.where(mask, new_logprobs, 0)  # stops 0 * NaN on the way back, where exp makes it
    return masked_sum(kl_estimate(new_logprobs, ref_logprobs, estimator), mask)


def adapt_kl_coef(kl_coef: float, current_kl: float, target: float, horizon: float, n: int) -> float:
    """The KL coefficient for the next step, steered so that the KL settles at `target`.

    current_kl: nats per response, mean over the step's responses; target: the same unit; n: responses in the step;
    horizon: responses over which the controller acts. Raises ValueError unless target and horizon are positive.

    Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2:
        e = clip((current_kl - target) / target, -0.2, 0.2),    kl_coef <- kl_coef * (1 + K e)
    with K = n / horizon, as their code has it (the paper prints K = 0.1).
    """
    if not (target > 0 and horizon > 0):
        raise ValueError(f"KL target {target} and horizon {horizon} have to be positive")
    error = (current_kl - target) / target
    error = max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, error))
    return kl_coef * (1 + error * n / horizon)
