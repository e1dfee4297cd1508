"""step1_sft/loss.py against transformers' own loss, float64 loops and hand-worked cases."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers.loss.loss_utils import ForCausalLMLoss

from step1_sft.loss import sft_loss

TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def batch(seed=0, rows=4, length=7, vocabulary=13):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, length, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.4] = -100
    return logits, labels


def test_sft_loss_by_hand():
    # position 0 says 1/4, 3/4 and the token at 1 is the second; position 1 says 1/2, 1/2; position 2 chooses nothing
    logits = torch.tensor([[[1.0, 3.0], [1.0, 1.0], [1.0, 99.0]]]).log()
    loss, stats = sft_loss(logits, torch.tensor([[0, 1, 0]]))
    assert_close(loss.item(), -math.log(3 / 4) - math.log(1 / 2), **TIGHT)
    assert stats["tokens"].item() == 2
    assert stats["correct"].item() == 2  # torch's argmax takes the first of equals
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) + math.log(2)
    assert_close(stats["entropy"].item(), entropy, **TIGHT)


def test_labels_of_minus_100_do_not_count():
    logits = torch.tensor([[[1.0, 3.0], [1.0, 1.0], [1.0, 99.0]]]).log()
    loss, stats = sft_loss(logits, torch.tensor([[-100, 1, -100]]))
    assert_close(loss.item(), -math.log(3 / 4), **TIGHT)
    assert stats["tokens"].item() == 1


def test_a_model_that_knows_the_next_token_has_no_loss():
    labels = torch.tensor([[7, 3, 9, 1], [5, 5, 0, 8]])
    logits = torch.full((2, 4, 10), -50.0)
    logits[:, :-1].scatter_(2, labels[:, 1:, None], 50.0)
    loss, stats = sft_loss(logits, labels)
    assert loss.item() < 1e-5
    assert stats["correct"].item() == stats["tokens"].item() == 6


@pytest.mark.parametrize("seed", range(3))
def test_sft_loss_is_transformers_loss_times_its_count(seed):
    logits, labels = batch(seed)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, stats = sft_loss(ours, labels)
    mean = ForCausalLMLoss(theirs, labels, vocab_size=logits.size(-1))
    (loss / stats["tokens"]).backward()
    mean.backward()
    assert_close((loss / stats["tokens"]).item(), mean.item(), **TIGHT)
    assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_sft_loss_and_stats_match_float64_loops():
    logits, labels = batch()
    loss = correct = entropy = tokens = 0.0
    for b in range(labels.size(0)):
        for p in range(labels.size(1) - 1):
            label = labels[b, p + 1].item()
            if label == -100:
                continue
            weights = [math.exp(x) for x in logits[b, p].tolist()]
            probabilities = [w / sum(weights) for w in weights]
            loss -= math.log(probabilities[label])
            entropy -= sum(q * math.log(q) for q in probabilities)
            correct += max(probabilities) == probabilities[label]
            tokens += 1
    got, stats = sft_loss(logits, labels)
    wanted = {"tokens": tokens, "correct": correct, "entropy": entropy}
    assert_close(got.item(), loss, **TIGHT)
    assert stats.keys() == wanted.keys()
    assert_close({name: float(value) for name, value in stats.items()}, wanted, **TIGHT)


def test_sft_gradient_is_the_numerical_one():
    logits, labels = batch(rows=2, length=4, vocabulary=5)
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, labels)[0], logits.double().requires_grad_())


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_junk_logits_at_unlabelled_positions_change_nothing(junk):
    logits, labels = batch()
    chooses = torch.zeros_like(labels, dtype=torch.bool)  # positions whose logits choose a labelled token
    chooses[:, :-1] = labels[:, 1:] != -100
    clean = logits.clone().requires_grad_()
    dirty = torch.where(chooses[..., None], logits, junk).requires_grad_()
    results = []
    for x in (clean, dirty):
        loss, stats = sft_loss(x, labels)
        loss.backward()
        results.append([loss, *stats.values(), x.grad])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_more_padding_changes_nothing():
    logits, labels = batch()
    loss, stats = sft_loss(logits, labels)
    wide_logits = torch.cat([logits, torch.full((4, 3, 13), math.nan)], dim=1)
    wide_loss, wide_stats = sft_loss(wide_logits, torch.cat([labels, torch.full((4, 3), -100)], dim=1))
    assert_close((wide_loss, wide_stats), (loss, stats), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1], [1, 3]])
def test_splitting_a_batch_changes_no_gradient(sizes):
    logits, labels = batch()
    count = (labels[:, 1:] != -100).sum()
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (sft_loss(whole, labels)[0] / count).backward()
    for some_logits, some_labels in zip(parts.split(sizes), labels.split(sizes), strict=True):
        (sft_loss(some_logits, some_labels)[0] / count).backward(retain_graph=True)
    assert_close(parts.grad, whole.grad, rtol=1e-6, atol=1e-8)


def test_a_batch_without_labels_has_zero_loss_and_zero_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss, stats = sft_loss(logits, torch.full((2, 3), -100))
    loss.backward()  # the filler micro-batch of a rank that ran out of rows
    assert loss.item() == 0 and stats["tokens"].item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))


def test_loss_of_bf16_logits_is_computed_in_fp32():
    logits, labels = batch()
    rounded = logits.bfloat16()
    loss, _ = sft_loss(rounded, labels)
    assert loss.dtype == torch.float32
    assert_close(loss.item(), sft_loss(rounded.double(), labels)[0].item(), **TIGHT)
