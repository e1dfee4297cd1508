"""step3_rlhf/advantages.py against hand-worked cases and the double sum that defines GAE."""

import math

import pytest
import torch
from torch.testing import assert_close

from step3_rlhf.advantages import gae, shape_scores, token_rewards

NAN = math.nan
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def mask_of_lengths(lengths: list[int], width: int) -> torch.Tensor:
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


# ---- scores


def shape(scores, truncated, **changes):
    off = {"score_clip": None, "missing_eos_penalty": None, "length_penalty": None}
    lengths = torch.tensor([3, 10])
    return shape_scores(torch.tensor(scores), torch.tensor(truncated), lengths=lengths, **(off | changes)).tolist()


def test_scores_pass_through_when_everything_is_off():
    assert shape([7.0, -9.0], [True, False]) == [7, -9]


def test_score_clip_by_hand():
    assert shape([7.0, -9.0], [False, False], score_clip=5.0) == [5, -5]
    assert shape([2.0, -1.0], [False, False], score_clip=5.0) == [2, -1]


def test_missing_eos_penalty_is_charged_on_truncated_rows_only():
    assert shape([2.0, 2.0], [True, False], missing_eos_penalty=1.5) == [0.5, 2]
    assert shape([2.0, 2.0], [False, True], missing_eos_penalty=1.5) == [2, 0.5]


def test_length_penalty_by_hand():
    assert shape([2.0, 2.0], [False, False], length_penalty=0.25) == [2 - 0.75, 2 - 2.5]


def test_penalties_are_charged_after_the_clip():
    # at the lower limit a truncated response must still lose something
    assert shape([-9.0, -9.0], [True, False], score_clip=5.0, missing_eos_penalty=1.0) == [-6, -5]
    assert shape([9.0, 9.0], [True, False], score_clip=5.0, missing_eos_penalty=1.0, length_penalty=0.5) == [2.5, 0]


# ---- rewards


def test_token_rewards_by_hand():
    kl = torch.tensor([[1.0, 2.0, 3.0], [1.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = mask_of_lengths([3, 1, 0], 3)
    rewards = token_rewards(torch.tensor([10.0, 20.0, NAN]), kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, -1.0, 10 - 1.5], [20 - 0.5, 0, 0], [0, 0, 0]]


def test_the_stop_token_carries_the_score():
    # three sampled tokens, the third is the stop token: it is in the mask, so the score is paid for choosing it
    rewards = token_rewards(torch.tensor([1.0]), torch.zeros(1, 5), mask_of_lengths([3], 5), kl_coef=0.1)
    assert rewards.tolist() == [[0, 0, 1, 0, 0]]


def test_rewards_of_a_row_add_up_to_score_minus_toll():
    scores, kl, lengths = torch.randn(6), torch.randn(6, 8), [8, 1, 3, 5, 7, 2]
    rewards = token_rewards(scores, kl, mask_of_lengths(lengths, 8), kl_coef=0.3)
    for b, length in enumerate(lengths):
        wanted = scores[b].item() - 0.3 * sum(kl[b, :length].tolist())
        assert_close(sum(rewards[b].tolist()), wanted, **TIGHT)


# ---- GAE


def gae_by_definition(rewards, values, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, for one row of floats without padding."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def test_gae_by_hand():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.0, 1.5]])
    # deltas 1.4, 2.35, 1.5; gamma lam = 0.45
    advantages, returns = gae(rewards, values, mask_of_lengths([3], 3), gamma=0.9, lam=0.5)
    assert_close(advantages, torch.tensor([[2.76125, 3.025, 1.5]]), **TIGHT)
    assert_close(returns, torch.tensor([[3.26125, 4.025, 3.0]]), **TIGHT)


def test_gae_tells_gamma_from_lam():
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 0.0]])
    mask = mask_of_lengths([2], 2)
    assert gae(rewards, values + 1, mask, gamma=1.0, lam=0.0)[0].tolist() == [[0, 0]]  # delta_0 = 0 + 1 - 1
    assert gae(rewards, values + 1, mask, gamma=0.0, lam=1.0)[0].tolist() == [[-1, 0]]  # delta_0 = 0 + 0 - 1


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.6), (1.0, 1.0), (0.9, 0.0)])
def test_gae_matches_the_definition(gamma, lam):
    lengths, width = [9, 1, 4, 0, 7], 9
    rewards, values = torch.randn(5, width), torch.randn(5, width)
    mask = mask_of_lengths(lengths, width)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for b, length in enumerate(lengths):
        wanted = gae_by_definition(rewards[b, :length].tolist(), values[b, :length].tolist(), gamma, lam)
        assert_close(advantages[b].tolist(), wanted + [0.0] * (width - length), **TIGHT)
        wanted = [a + v for a, v in zip(wanted, values[b, :length].tolist(), strict=True)]
        assert_close(returns[b].tolist(), wanted + [0.0] * (width - length), **TIGHT)


def test_returns_with_lam_one_are_the_rewards_to_go():
    rewards, values = torch.randn(1, 6), torch.randn(1, 6)
    _, returns = gae(rewards, values, mask_of_lengths([6], 6), gamma=0.9, lam=1.0)
    wanted = [sum(0.9 ** (k - t) * rewards[0, k].item() for k in range(t, 6)) for t in range(6)]
    assert_close(returns[0].tolist(), wanted, **TIGHT)


def test_gae_does_not_bootstrap_after_the_last_token():
    # whatever the critic says beyond the end, also at full width (truncation is terminal)
    values = torch.tensor([[1.0, 2.0, 100.0], [1.0, 2.0, 3.0]])
    advantages, _ = gae(torch.zeros(2, 3), values, mask_of_lengths([2, 3], 3), gamma=1.0, lam=0.0)
    assert advantages.tolist() == [[1, -2, 0], [1, 1, -3]]


def test_gae_steps_over_tokens_that_the_policy_did_not_choose():
    gap = torch.tensor([[True, True, False, False, True]])
    rewards, values = torch.tensor([[1.0, 2.0, NAN, 50.0, 3.0]]), torch.tensor([[0.5, 1.0, 70.0, NAN, 1.5]])
    advantages, returns = gae(rewards, values, gap, gamma=0.9, lam=0.5)
    assert_close(advantages, torch.tensor([[2.76125, 3.025, 0.0, 0.0, 1.5]]), **TIGHT)
    assert_close(returns, torch.tensor([[3.26125, 4.025, 0.0, 0.0, 3.0]]), **TIGHT)
