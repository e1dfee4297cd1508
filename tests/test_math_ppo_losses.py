"""step3_rlhf/losses.py against hand-worked cases, float64 loops and numerical gradients."""

import math

import pytest
import torch
from torch.testing import assert_close

from step3_rlhf.losses import actor_loss, policy_loss, value_loss

NAN = math.nan
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def one_token(ratio: float, advantage: float, **settings):
    """Loss, gradient with respect to the new log-prob, and stats of a single token with that ratio."""
    new_logprobs = torch.tensor([[math.log(ratio) - 2.0]], requires_grad=True)
    settings = {"cliprange_low": 0.2, "cliprange_high": 0.2, "dual_clip": None} | settings
    old, advantages, mask = torch.tensor([[-2.0]]), torch.tensor([[advantage]]), torch.tensor([[True]])
    loss, stats = policy_loss(new_logprobs, old, advantages, mask, **settings)
    loss.backward()
    return loss.item(), new_logprobs.grad.item(), {name: value.item() for name, value in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),  # the first pass over a rollout: plain policy gradient
        (1.1, 2.0, -2.2, -2.2, 0),  # inside the range
        (1.5, 2.0, -2.4, 0.0, 1),  # a good token, already much likelier: no further push
        (0.5, 2.0, -1.0, -1.0, 0),  # a good token that became less likely: full push back
        (1.5, -2.0, 3.0, 3.0, 0),  # a bad token that became likelier: full push down
        (0.5, -2.0, 1.6, 0.0, 1),  # a bad token, already much less likely: no further push
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, gradient, clipped):
    got_loss, got_gradient, stats = one_token(ratio, advantage)
    assert_close(got_loss, loss, **TIGHT)
    assert_close(got_gradient, gradient, **TIGHT)
    assert stats["clipfrac"] == clipped


def test_clip_ranges_below_and_above_are_separate():
    assert_close(one_token(2.0, 1.0, cliprange_low=0.1, cliprange_high=0.4)[0], -1.4, **TIGHT)
    assert_close(one_token(0.1, -1.0, cliprange_low=0.1, cliprange_high=0.4)[0], 0.9, **TIGHT)


def test_dual_clip_limits_the_loss_of_bad_tokens_only():
    loss, gradient, stats = one_token(10.0, -2.0, dual_clip=3.0)
    assert_close((loss, gradient), (6.0, 0.0), **TIGHT)
    assert stats["dual_clipfrac"] == 1
    assert_close(one_token(10.0, -2.0)[:2], (20.0, 20.0), **TIGHT)  # off
    loss, gradient, stats = one_token(2.0, -2.0, dual_clip=3.0)  # below the ceiling
    assert_close((loss, gradient), (4.0, 4.0), **TIGHT)
    assert stats["dual_clipfrac"] == 0
    assert_close(one_token(0.1, 2.0, dual_clip=3.0)[:2], (-0.2, -0.2), **TIGHT)  # A > 0: not concerned


def test_policy_stats_by_hand():
    _, _, stats = one_token(1.5, 2.0)
    assert_close(stats["ratio"], 1.5, **TIGHT)
    assert_close(stats["ratio_sq"], 2.25, **TIGHT)
    assert_close(stats["approxkl"], 0.5 * math.log(1.5) ** 2, **TIGHT)


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_wild_ratio_stays_finite_and_gives_no_gradient(log_ratio, advantage):
    new_logprobs = torch.tensor([[log_ratio, 0.0]], requires_grad=True)
    ones, mask = torch.full((1, 2), advantage), torch.ones(1, 2, dtype=torch.bool)
    loss, stats = policy_loss(
        new_logprobs, torch.zeros(1, 2), ones, mask, cliprange_low=0.2, cliprange_high=0.2, dual_clip=None
    )
    loss.backward()
    assert loss.isfinite() and all(value.isfinite() for value in stats.values())
    assert_close(new_logprobs.grad, torch.tensor([[0.0, -advantage]]), **TIGHT)
    assert stats["ratio"].item() <= math.exp(20.0) * 1.001 + 1


def experience(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(4, 6, generator=generator, dtype=torch.float64) - 2
    new_logprobs = logprobs + 0.4 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[t < length for t in range(6)] for length in (6, 3, 0, 1)])
    return new_logprobs, logprobs, advantages, mask


def policy_by_loops(new_logprobs, logprobs, advantages, mask, low, high, dual):
    loss = clipfrac = dual_clipfrac = approxkl = ratio_sum = ratio_sq = 0.0
    for b in range(len(mask)):
        for t in range(len(mask[0])):
            if not mask[b][t]:
                continue
            log_ratio, a = new_logprobs[b][t] - logprobs[b][t], advantages[b][t]
            ratio = math.exp(log_ratio)
            surrogate = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            clipfrac += surrogate < ratio * a
            if dual is not None and a < 0 and surrogate < dual * a:
                surrogate, dual_clipfrac = dual * a, dual_clipfrac + 1
            loss -= surrogate
            approxkl += log_ratio**2 / 2
            ratio_sum += ratio
            ratio_sq += ratio**2
    stats = {"clipfrac": clipfrac, "dual_clipfrac": dual_clipfrac, "approxkl": approxkl}
    return loss, stats | {"ratio": ratio_sum, "ratio_sq": ratio_sq}


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.1, 0.3, None), (0.2, 0.2, 1.25)])
def test_policy_loss_matches_float64_loops(low, high, dual):
    batch = experience()
    wanted, wanted_stats = policy_by_loops(*(x.tolist() for x in batch), low, high, dual)
    assert wanted_stats["clipfrac"] > 0 and (wanted_stats["dual_clipfrac"] > 0) == (dual is not None)
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype) for x in batch[:3]]
        loss, stats = policy_loss(*inputs, batch[3], cliprange_low=low, cliprange_high=high, dual_clip=dual)
        assert_close(loss.item(), wanted, **TIGHT)
        assert stats.keys() == wanted_stats.keys()
        for name, value in wanted_stats.items():
            assert_close(stats[name].item(), float(value), **TIGHT)


def test_policy_gradient_is_the_numerical_one():
    new_logprobs, logprobs, advantages, mask = experience()

    def loss_of(x):
        return policy_loss(x, logprobs, advantages, mask, cliprange_low=0.2, cliprange_high=0.3, dual_clip=1.5)[0]

    assert torch.autograd.gradcheck(loss_of, new_logprobs.requires_grad_())


def test_stats_carry_no_gradient():
    new_logprobs, logprobs, advantages, mask = experience()
    new_logprobs.requires_grad_()
    settings = {"cliprange_low": 0.2, "cliprange_high": 0.2, "dual_clip": 3.0}
    _, stats = policy_loss(new_logprobs, logprobs, advantages, mask, **settings)
    _, value_stats = value_loss(new_logprobs, logprobs, advantages, mask, cliprange_value=0.2)
    assert not any(value.requires_grad for value in (stats | value_stats).values())


def test_losses_of_half_precision_inputs_are_computed_in_fp32():
    new_logprobs, logprobs, advantages, mask = (x if x.dtype == torch.bool else x.bfloat16() for x in experience())
    exact, _ = policy_by_loops(*(x.tolist() for x in (new_logprobs, logprobs, advantages, mask)), 0.2, 0.2, None)
    settings = {"cliprange_low": 0.2, "cliprange_high": 0.2, "dual_clip": None}
    loss, _ = policy_loss(new_logprobs, logprobs.float(), advantages.float(), mask, **settings)
    assert loss.dtype == torch.float32
    assert_close(loss.item(), exact, **TIGHT)
    loss, _ = value_loss(new_logprobs, logprobs.float(), advantages.float(), mask, cliprange_value=0.2)
    assert loss.dtype == torch.float32


# ---- the critic


@pytest.mark.parametrize(
    ("new_value", "target", "loss", "gradient", "clipped"),
    [  # old value 0, range 0.2
        (0.1, 1.0, 0.5 * 0.81, -0.9, 0),  # inside the range
        (2.0, 3.0, 0.5 * 2.8**2, 0.0, 1),  # moved far towards the target: no further push
        (2.0, 0.0, 0.5 * 4.0, 2.0, 0),  # moved far past the target: full push back
        (-2.0, -3.0, 0.5 * 2.8**2, 0.0, 1),  # the same downwards
        (-2.0, 3.0, 0.5 * 25.0, -5.0, 0),  # moved away from the target: full push back
    ],
)
def test_value_loss_by_hand(new_value, target, loss, gradient, clipped):
    new_values, mask = torch.tensor([[new_value]], requires_grad=True), torch.tensor([[True]])
    got, stats = value_loss(new_values, torch.zeros(1, 1), torch.tensor([[target]]), mask, cliprange_value=0.2)
    got.backward()
    assert_close(got.item(), loss, **TIGHT)
    assert_close(new_values.grad.item(), gradient, **TIGHT)
    assert stats["clipfrac"].item() == clipped
    assert_close(stats["error"].item(), (new_value - target) ** 2, **TIGHT)


def test_value_loss_without_clipping_is_half_the_squared_error():
    new_values, returns = torch.tensor([[2.0, 5.0]]), torch.tensor([[3.0, NAN]])
    mask = torch.tensor([[True, False]])
    loss, stats = value_loss(new_values, torch.zeros(1, 2), returns, mask, cliprange_value=None)
    assert loss.item() == 0.5 and stats["clipfrac"].item() == 0 and stats["error"].item() == 1


@pytest.mark.parametrize("cliprange_value", [0.2, 1.0, None])
def test_value_loss_matches_float64_loops(cliprange_value):
    values, moved, missed = torch.randn(3, 12, 6, dtype=torch.float64)
    new_values, returns, mask = values + 2 * moved, values + 2 * missed, torch.rand(12, 6) < 0.7
    loss = error = clipfrac = 0.0
    for b in range(12):
        for t in range(6):
            if mask[b, t]:
                v, old, r = new_values[b, t].item(), values[b, t].item(), returns[b, t].item()
                near = v if cliprange_value is None else min(max(v, old - cliprange_value), old + cliprange_value)
                loss += 0.5 * max((v - r) ** 2, (near - r) ** 2)
                error += (v - r) ** 2
                clipfrac += (near - r) ** 2 > (v - r) ** 2
    assert (clipfrac > 0) == (cliprange_value is not None)  # so the clip has something to decide
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype) for x in (new_values, values, returns)]
        got, stats = value_loss(*inputs, mask, cliprange_value=cliprange_value)
        assert_close(got.item(), loss, **TIGHT)
        assert_close([stats["error"].item(), stats["clipfrac"].item()], [error, float(clipfrac)], **TIGHT)


def test_value_gradient_is_the_numerical_one():
    new_values, values, returns, mask = experience(2)
    new_values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, values, returns, mask, cliprange_value=0.2)[0], new_values)


# ---- the actor's terms together


def test_actor_loss_by_hand():
    policy, entropy, kl, ptx = (torch.tensor(x) for x in (1.0, 10.0, 100.0, 1000.0))
    coefs = {"entropy_coef": 0.5, "kl_loss_coef": 0.25, "ptx_coef": 0.125}
    assert actor_loss(policy, entropy, kl, ptx, **coefs).item() == 1 - 5 + 25 + 125


def test_actor_loss_needs_no_term_whose_coefficient_is_zero():
    policy = torch.tensor(1.0)
    assert actor_loss(policy, None, None, None, entropy_coef=0.0, kl_loss_coef=0.0, ptx_coef=0.0).item() == 1
    junk = torch.tensor(NAN)
    assert actor_loss(policy, junk, junk, junk, entropy_coef=0.0, kl_loss_coef=0.0, ptx_coef=0.0).item() == 1
