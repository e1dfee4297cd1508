"""The reward model's loss: Bradley-Terry on pairs of answers, with an optional margin and centring.

Legend: B pairs of a batch. A score is one number for a whole answer.
"""

import torch
from torch import Tensor

from common.tensor_ops import masked_sum, upcast


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None, weight: Tensor, *, center_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood that the chosen answer wins. All inputs (B,) -> (loss sum, stats sums).

    chosen, rejected: scores with gradient; margin: how much better chosen is said to be, or None; weight: 1 for a pair,
    0 for a filler row, whose scores may be anything and change neither loss, stats nor gradient.

        loss = sum of weight * [ -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2 ]

    Bradley-Terry as in Ouyang et al. 2022, equation 1; the margin is Llama 2's (Touvron et al. 2023, equation 2). The
    data fix only differences of scores, so scores drift unless something holds them: the last term does (Eisenstein et
    al., "Helping or Herding?", 2023; TRL's center_rewards_coefficient). 0 switches it off. Pairs of identical answers
    teach nothing and would add ln 2 each: the data code drops and counts them.

    Stats, detached and weighted: pairs: the weights; accuracy: chosen > rejected (a tie is not a win); margin:
    chosen - rejected, without the margin of the data; chosen, rejected: the scores; squares: theirs, in float64. And
    over the pairs that count (-inf if none does): max_score, the highest score; max_minus_score, minus the lowest.
    """
    counts = weight != 0
    # where() here keeps a filler's NaN out of the stats and, on the way back, 0 * NaN out of the gradient
    chosen, rejected = torch.where(counts, upcast(chosen), 0), torch.where(counts, upcast(rejected), 0)
    difference = chosen - rejected
    needed = difference if margin is None else difference - margin
    losses = -torch.nn.functional.logsigmoid(needed)
    if center_coef:
        losses = losses + center_coef * (chosen + rejected).square()
    scores = torch.stack([chosen.detach(), rejected.detach()])  # (2, B)
    stats = {
        "pairs": weight.sum(),
        "accuracy": (weight * (chosen > rejected)).sum(),
        "margin": (weight * difference.detach()).sum(),
        "chosen": (weight * chosen.detach()).sum(),
        "rejected": (weight * rejected.detach()).sum(),
        "squares": (weight * scores.double().square()).sum(),
        "max_score": torch.where(counts, scores, -torch.inf).max(),
        "max_minus_score": torch.where(counts, -scores, -torch.inf).max(),
    }
    return masked_sum(weight * losses, counts), stats
