"""The supervised fine-tuning loss: next-token cross-entropy on the labelled tokens.

Legend: B rows of a batch, T sequence length, V vocabulary, N labelled tokens.
"""

import torch
from torch import Tensor

from common.tensor_ops import entropy_of, logprobs_of

IGNORE_INDEX = -100


def sft_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of every labelled token given what stands before it.

    logits (B, T, V) any float dtype; labels (B, T) long, aligned with the input ids, -100 where a token carries no loss
    (the prompt, padding) -> (loss sum, stats sums). The shift happens here: logits at p answer for the label at p + 1.

        loss = -sum over labelled tokens of log p(token | tokens before it)

    A sum, not a mean: the caller divides by the labelled tokens of the whole optimiser step, so that a token weighs the
    same whatever micro-batch it sits in (the mean of transformers' own loss, taken per micro-batch, does not do that).
    The label of position 0 has nothing before it and never counts.

    Stats, detached: tokens: labelled tokens; correct: those that are the most likely token (mean_token_accuracy when
    divided); entropy: of the distributions that chose them, in nats.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # (B, T)
    labelled = targets != IGNORE_INDEX
    # Only labelled rows enter the softmax: the prompt costs nothing and junk there reaches no gradient.
    logits, targets = logits[labelled], targets[labelled]  # (N, V), (N,)
    loss_sum = -logprobs_of(logits, targets).sum()
    logits = logits.detach()
    stats = {
        "tokens": labelled.sum(),
        "correct": (logits.argmax(dim=-1) == targets).sum(),
        "entropy": entropy_of(logits).sum(),
    }
    return loss_sum, stats
