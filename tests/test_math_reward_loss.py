"""step2_reward/loss.py against hand-worked cases, float64 loops and numerical gradients."""

import math

import pytest
import torch
from torch.testing import assert_close

from step2_reward.loss import pairwise_loss

NAN = math.nan
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def one_pair(chosen, rejected, margin=None, weight=1.0, center_coef=0.0):
    chosen, rejected = torch.tensor([chosen], requires_grad=True), torch.tensor([rejected], requires_grad=True)
    margin = None if margin is None else torch.tensor([margin])
    loss, stats = pairwise_loss(chosen, rejected, margin, torch.tensor([weight]), center_coef=center_coef)
    loss.backward()
    stats = {name: value.item() for name, value in stats.items()}
    return loss.item(), chosen.grad.item(), rejected.grad.item(), stats


def test_pairwise_loss_by_hand():
    # chosen leads by ln 3: the model gives it 3/4
    loss, chosen_grad, rejected_grad, stats = one_pair(2.0 + math.log(3), 2.0)
    assert_close((loss, chosen_grad, rejected_grad), (-math.log(3 / 4), -1 / 4, 1 / 4), **TIGHT)
    assert stats["accuracy"] == 1
    assert_close((stats["margin"], stats["rejected"], stats["pairs"]), (math.log(3), 2.0, 1.0), **TIGHT)
    assert_close(stats["chosen"], 2.0 + math.log(3), **TIGHT)


def test_a_pair_in_the_wrong_order_costs_more():
    loss, chosen_grad, _, stats = one_pair(0.0, math.log(3))
    assert_close((loss, chosen_grad), (-math.log(1 / 4), -3 / 4), **TIGHT)
    assert stats["accuracy"] == 0


def test_a_tie_costs_ln_2_and_is_no_win():
    loss, _, _, stats = one_pair(1.0, 1.0)
    assert_close(loss, math.log(2), **TIGHT)
    assert stats["accuracy"] == 0


def test_a_margin_asks_for_a_lead():
    # a lead of 1 + ln 3 with a margin of 1 asked for: as good as ln 3 without
    loss, _, _, stats = one_pair(1 + math.log(3), 0.0, margin=1.0)
    assert_close(loss, -math.log(3 / 4), **TIGHT)
    assert_close(stats["margin"], 1 + math.log(3), **TIGHT)  # the model's own lead


def test_centring_holds_the_sum_of_scores_at_zero():
    loss, chosen_grad, rejected_grad, _ = one_pair(3.0, 3.0 - math.log(3), center_coef=0.1)
    total = 6 - math.log(3)
    assert_close(loss, -math.log(3 / 4) + 0.1 * total**2, **TIGHT)
    assert_close((chosen_grad, rejected_grad), (-1 / 4 + 0.2 * total, 1 / 4 + 0.2 * total), **TIGHT)
    assert_close(one_pair(5.0, 5.0 - math.log(3))[0], -math.log(3 / 4), **TIGHT)  # off: the level does not matter


@pytest.mark.parametrize("junk", [NAN, math.inf, 1e30])
def test_a_row_of_weight_zero_contributes_nothing_whatever_it_holds(junk):
    chosen, rejected = torch.tensor([1.0, junk], requires_grad=True), torch.tensor([0.5, -junk], requires_grad=True)
    margin, weight = torch.tensor([0.1, junk]), torch.tensor([1.0, 0.0])
    loss, stats = pairwise_loss(chosen, rejected, margin, weight, center_coef=0.01)
    loss.backward()
    alone, alone_stats = pairwise_loss(chosen[:1], rejected[:1], margin[:1], weight[:1], center_coef=0.01)
    assert torch.equal(loss, alone)
    assert stats == alone_stats
    assert chosen.grad[1] == 0 and rejected.grad[1] == 0


def test_a_batch_of_fillers_has_zero_loss_and_gradient():
    chosen = torch.tensor([NAN, 1.0], requires_grad=True)
    loss, _ = pairwise_loss(chosen, torch.zeros(2), None, torch.zeros(2), center_coef=0.01)
    loss.backward()
    assert loss.item() == 0 and chosen.grad.tolist() == [0, 0]


def test_extreme_scores_stay_finite():
    loss, chosen_grad, _, _ = one_pair(-1000.0, 1000.0)
    assert (loss, chosen_grad) == (2000.0, -1.0)
    assert one_pair(1000.0, -1000.0)[:2] == (0.0, 0.0)


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("center_coef", [0.0, 0.05])
def test_loss_and_stats_match_float64_loops(with_margin, center_coef):
    chosen, rejected, margin = torch.randn(8), torch.randn(8), torch.rand(8)
    weight = torch.tensor([1.0, 1.0, 0.0, 2.0, 1.0, 0.0, 0.5, 1.0])
    wanted = dict.fromkeys(("loss", "pairs", "accuracy", "margin", "chosen", "rejected", "squares"), 0.0)
    seen = []
    for c, r, m, w in zip(*(x.tolist() for x in (chosen, rejected, margin, weight)), strict=True):
        probability = 1 / (1 + math.exp(-(c - r - (m if with_margin else 0.0))))
        wanted["loss"] += w * (-math.log(probability) + center_coef * (c + r) ** 2)
        wanted["pairs"] += w
        wanted["accuracy"] += w * (c > r)
        wanted["margin"] += w * (c - r)
        wanted["chosen"] += w * c
        wanted["rejected"] += w * r
        wanted["squares"] += w * (c * c + r * r)
        seen += [c, r] if w else []
    wanted |= {"max_score": max(seen), "max_minus_score": -min(seen)}
    loss, stats = pairwise_loss(chosen, rejected, margin if with_margin else None, weight, center_coef=center_coef)
    assert_close({"loss": loss.item()} | {k: v.item() for k, v in stats.items()}, wanted, **TIGHT)


def test_gradient_is_the_numerical_one():
    chosen, rejected = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margin, weight = torch.rand(5, dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda c, r: pairwise_loss(c, r, margin, weight, center_coef=0.1)[0], (chosen, rejected)
    )


@pytest.mark.parametrize("sizes", [[1] * 6, [4, 2], [1, 5]])
def test_splitting_a_batch_changes_no_gradient(sizes):
    scores, weight = torch.randn(2, 6), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    whole, parts = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    (pairwise_loss(whole[0], whole[1], None, weight, center_coef=0.01)[0] / weight.sum()).backward()
    for part, some_weight in zip(parts.split(sizes, dim=1), weight.split(sizes), strict=True):
        loss, _ = pairwise_loss(part[0], part[1], None, some_weight, center_coef=0.01)
        (loss / weight.sum()).backward()
    assert_close(parts.grad, whole.grad, rtol=1e-6, atol=1e-8)


def test_bf16_scores_are_compared_in_fp32():
    chosen, rejected = torch.tensor([2.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    loss, _ = pairwise_loss(chosen, rejected, None, torch.ones(1), center_coef=0.0)
    assert loss.dtype == torch.float32
    assert_close(loss.item(), math.log(1 + math.exp(-1)), **TIGHT)
