"""Tensor algebra that more than one stage needs: log-probs, the response slice, masked sums, whitening.

Legend: B rows of a batch, Q padded prompt length, R padded response length, T = Q + R, V vocabulary.

Column t of every (B, R) tensor speaks of choosing `response[:, t]`. A mask is bool and True means "counts"; what lies
outside it, NaN included, changes neither a value nor a gradient. Every function is pure: no in-place change of its
inputs, no random numbers, no ranks. Sums over all ranks are the caller's business: reduce the numbers returned here.
"""

import math

import torch
from torch import Tensor

# exp() of a log-ratio beyond this is cut off: e^20 = 4.9e8 is far outside every clip range, e^89 overflows fp32.
MAX_LOG_RATIO = 20.0

# Work over the vocabulary goes in chunks of about this many elements: 1 MiB of fp32 stays in a core's cache, which on a
# CPU is 2-3 times faster than one pass over a whole (B, R, V) tensor, and no second fp32 copy of it is ever alive.
_CHUNK_ELEMENTS = 2**18

# Added to the variance inside the square root when whitening, as lm-human-preferences does.
_WHITEN_EPSILON = 1e-8


def upcast(x: Tensor) -> Tensor:
    """fp32 for fp16 and bf16 inputs; fp32 and fp64 pass through (fp64 so that gradients can be checked numerically)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _chunks(logits: Tensor) -> int:
    """Rows of dimension 0 that make one chunk."""
    return max(1, _CHUNK_ELEMENTS // max(1, math.prod(logits.shape[1:])))


def _log_softmax(logits: Tensor) -> Tensor:
    # dtype= lets CUDA convert inside the kernel, so a bf16 model needs no fp32 copy of its logits
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under the logits that chose it.

    logits (B, R, V) any float dtype, already divided by the temperature; tokens (B, R) long -> (B, R) fp32.

    log p(token) = logits[token] - logsumexp(logits), computed in fp32 whatever the input's dtype: in bf16 a log-prob
    has a grain of about 0.01, which alone would move PPO's ratio. `log_softmax` is torch's fused form of that
    difference and keeps one (B, R, V) fp32 tensor for backward, none under `no_grad`. The value of a row is the same to
    the last bit whichever rows share its batch and whether or not gradients are recorded.
    """
    rows = _chunks(logits)
    parts = [
        _log_softmax(some_logits).gather(-1, some_tokens.unsqueeze(-1)).squeeze(-1)
        for some_logits, some_tokens in zip(logits.split(rows), tokens.split(rows), strict=True)
    ]
    return torch.cat(parts)


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of each position's distribution, in nats.

    logits (B, R, V) any float dtype, already divided by the temperature -> (B, R) fp32.

    H = -sum_v p_v log p_v. A token ruled out with a logit of -inf adds 0 to the value and to the gradient.
    """
    parts = []
    for some_logits in logits.split(_chunks(logits)):
        logp = _log_softmax(some_logits)
        finite_logp = logp.clamp(min=torch.finfo(logp.dtype).min)  # 0 * -inf would be NaN
        parts.append(-(logp.exp() * finite_logp).sum(dim=-1))
    return torch.cat(parts)


def response_slice(x: Tensor, query_length: int) -> Tensor:
    """Cut the R columns that chose the response out of a tensor over the whole sequence.

    x (B, T, ...) such as logits or values; query_length Q -> (B, R, ...).

    A causal model's output at position p is its choice of token p + 1, so the response at Q .. T-1 was chosen at
    Q-1 .. T-2. This is the only place where that shift is written.
    """
    if not 1 <= query_length < x.size(1):
        raise ValueError(
            f"query_length is {query_length} in a sequence of {x.size(1)}: it has to be at least 1 (something has to "
            "choose the first response token) and leave room for a response"
        )
    return x[:, query_length - 1 : -1]


def position_ids_of(mask: Tensor) -> Tensor:
    """Position ids that count real tokens only, so that left padding does not move a row.

    mask (B, T) bool or 0/1 -> (B, T) long: 0 at the first real token; padding before it also reads 0.
    """
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def last_true(mask: Tensor) -> Tensor:
    """Index of the last True of each row; 0 for a row without one (check `mask.any(1)` where that matters).

    mask (B, R) bool, R at least 1 -> (B,) long.
    """
    columns = torch.arange(mask.size(1), device=mask.device)
    return torch.where(mask, columns, 0).amax(dim=1)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where mask is True, over everything or over one dimension. x and mask (B, R) -> scalar or (B,).

    Selected with `where`, not multiplied: 0 * NaN is NaN. The same product waits in the backward pass of whatever made
    x (exp, a product, a square), so a loss also puts its fresh input through `where` before the first such operation.
    """
    kept = torch.where(mask, x, 0)
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where mask is True; 0 where nothing is. x and mask (B, R) -> scalar or (B,).

    For metrics and for one row's own mean. A loss over micro-batches is a sum divided by the global count instead.
    """
    count = mask.sum() if dim is None else mask.sum(dim=dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of x where mask is True. x and mask (B, R) -> (3,) fp64.

    Moments of parts add up to the moments of the whole, so ranks may sum them before `whiten`.
    """
    kept = torch.where(mask, x, 0).double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale x to variance 1 and, with shift_mean, to mean 0; 0 outside the mask.

    x and mask (B, R); moments (3,) from `masked_moments`, summed over every part that is whitened together.
    Without shift_mean the mean stays what it was, as rewards want it: (x - mean) / std + mean.

    `whiten` of lm-human-preferences, but with the variance divided by n - 1, as TRL does, not by n. One value or none
    has variance 0 and whitens to its shift.
    """
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    whitened = (torch.where(mask, x, 0).double() - mean) * torch.rsqrt(variance + _WHITEN_EPSILON)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0).to(x.dtype)
