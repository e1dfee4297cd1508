"""common/tensor_ops.py against hand-worked cases and float64 definitions."""

import math
import statistics

import pytest
import torch
from torch.testing import assert_close

from common import tensor_ops
from common.tensor_ops import (
    entropy_of,
    last_true,
    logprobs_of,
    masked_mean,
    masked_moments,
    masked_sum,
    position_ids_of,
    response_slice,
    upcast,
    whiten,
)

NAN, INF = math.nan, math.inf
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def softmax_by_loop(logits: list[float]) -> list[float]:
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


# ---- log-probs and entropy


def test_logprobs_by_hand():
    logits = torch.tensor([[[0.0, math.log(2), math.log(5)]]])  # p = 1/8, 2/8, 5/8
    for token, probability in enumerate([1 / 8, 2 / 8, 5 / 8]):
        assert_close(logprobs_of(logits, torch.tensor([[token]])).item(), math.log(probability), **TIGHT)


def test_logprobs_match_the_definition():
    logits, tokens = 5 * torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    expected = [[math.log(softmax_by_loop(logits[b, r].tolist())[tokens[b, r]]) for r in range(5)] for b in range(3)]
    assert_close(logprobs_of(logits, tokens), torch.tensor(expected), **TIGHT)


def test_logprobs_match_torch_cross_entropy():
    logits, tokens = torch.randn(4, 6, 50), torch.randint(50, (4, 6))
    expected = -torch.nn.functional.cross_entropy(logits.transpose(1, 2).double(), tokens, reduction="none")
    assert_close(logprobs_of(logits, tokens).double(), expected, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logprobs_of_half_precision_logits_are_fp32(dtype):
    logits, tokens = (3 * torch.randn(2, 3, 40)).to(dtype), torch.randint(40, (2, 3))
    result = logprobs_of(logits, tokens)
    exact = torch.log_softmax(logits.double(), -1).gather(-1, tokens[..., None]).squeeze(-1)
    assert result.dtype == torch.float32
    assert_close(result.double(), exact, **TIGHT)
    assert entropy_of(logits).dtype == torch.float32


def test_logprobs_survive_large_logits():
    logits = torch.tensor([[[1000.0, 0.0, -1000.0]]])
    assert logprobs_of(logits, torch.tensor([[0]])).item() == 0
    assert logprobs_of(logits, torch.tensor([[2]])).item() == -2000


@pytest.mark.parametrize("function", ["logprobs", "entropy"])
def test_values_do_not_depend_on_chunks_batch_or_recording(function, monkeypatch):
    logits, tokens = torch.randn(6, 9, 33), torch.randint(33, (6, 9))

    def compute(x, t):
        return logprobs_of(x, t) if function == "logprobs" else entropy_of(x)

    whole = compute(logits, tokens)
    assert torch.equal(compute(logits[2:3], tokens[2:3]), whole[2:3])  # to the last bit
    assert torch.equal(compute(logits.clone().requires_grad_(), tokens).detach(), whole)
    for elements in (1, 2 * 9 * 33, 4 * 9 * 33):  # 1, 2 and 4 rows a chunk
        monkeypatch.setattr(tensor_ops, "_CHUNK_ELEMENTS", elements)
        assert torch.equal(compute(logits, tokens), whole)


def test_logprobs_and_entropy_of_nothing():
    assert logprobs_of(torch.randn(0, 4, 5), torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4)
    assert entropy_of(torch.randn(2, 0, 5)).shape == (2, 0)
    assert logprobs_of(torch.randn(0, 5), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_gradients_of_logprobs_and_entropy():
    logits, tokens = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (2, 3))
    assert torch.autograd.gradcheck(lambda x: logprobs_of(x, tokens), logits)
    assert torch.autograd.gradcheck(entropy_of, logits)


def test_entropy_by_hand():
    uniform = torch.full((1, 1, 4), 7.0)
    assert_close(entropy_of(uniform).item(), math.log(4), **TIGHT)
    uneven = torch.tensor([[[math.log(1.0), math.log(3.0)]]])  # p = 1/4, 3/4
    assert_close(entropy_of(uneven).item(), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), **TIGHT)


def test_entropy_matches_torch_distributions():
    logits = 3 * torch.randn(3, 4, 20)
    assert_close(entropy_of(logits), torch.distributions.Categorical(logits=logits).entropy(), **TIGHT)


def test_entropy_of_tokens_ruled_out():
    logits = torch.tensor([[[0.0, 0.0, -INF]]], requires_grad=True)
    entropy = entropy_of(logits)
    entropy.sum().backward()
    assert_close(entropy.item(), math.log(2), **TIGHT)
    assert_close(logits.grad, torch.zeros(1, 1, 3), **TIGHT)


# ---- alignment


def test_response_slice_by_hand():
    x = torch.arange(6).repeat(2, 1)  # T = 6; outputs at 1..4 choose the tokens at 2..5
    assert response_slice(x, 2).tolist() == [[1, 2, 3, 4]] * 2
    assert response_slice(x.unsqueeze(-1), 5).shape == (2, 1, 1)


def test_response_slice_finds_the_logits_that_chose_the_response():
    # a model that is certain of the next token: one-hot logits at p for the token at p + 1
    sequence, query_length = torch.tensor([[7, 3, 9, 1, 4, 2], [5, 5, 0, 8, 6, 2]]), 2
    logits = torch.full((2, 6, 10), -100.0)
    logits[:, :-1].scatter_(2, sequence[:, 1:, None], 100.0)
    logprobs = logprobs_of(response_slice(logits, query_length), sequence[:, query_length:])
    assert logprobs.abs().max() < 1e-5


@pytest.mark.parametrize("query_length", [0, -1, 6, 7])
def test_response_slice_refuses_a_query_or_response_of_no_length(query_length):
    with pytest.raises(ValueError, match=f"query_length is {query_length} in a sequence of 6"):
        response_slice(torch.zeros(1, 6), query_length)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_position_ids_count_real_tokens(dtype):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).to(dtype)
    positions = position_ids_of(mask)
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert positions.dtype == torch.long


def test_last_true_by_hand():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    assert last_true(mask).tolist() == [1, 3, 2, 0, 0]


# ---- masked sums


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_junk_outside_the_mask_reaches_neither_value_nor_gradient(junk):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for function, expected, slope in ((masked_sum, 8.0, 1.0), (masked_mean, 8 / 3, 1 / 3)):
        x = torch.tensor([[1.0, 2.0, junk], [5.0, junk, junk]], requires_grad=True)
        result = function(x, mask)
        result.backward()
        assert_close(result.item(), expected, **TIGHT)
        assert_close(x.grad, slope * mask.float(), **TIGHT)


def test_masked_sum_and_mean_by_row():
    x = torch.tensor([[1.0, 2.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert masked_sum(x, mask, dim=1).tolist() == [3, 5, 0]
    assert masked_mean(x, mask, dim=1).tolist() == [1.5, 5, 0]


def test_mean_of_nothing_is_zero():
    assert masked_mean(torch.tensor([[NAN]]), torch.tensor([[False]])).item() == 0


def test_upcast_widens_halves_only():
    for given, wanted in (
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ):
        assert upcast(torch.zeros(1, dtype=getattr(torch, given))).dtype == getattr(torch, wanted)


# ---- whitening


def test_moments_by_hand():
    moments = masked_moments(torch.tensor([[1.0, 2.0], [3.0, NAN]]), torch.tensor([[True, True], [True, False]]))
    assert moments.tolist() == [3, 6, 14]
    assert moments.dtype == torch.float64


def test_whiten_by_hand():
    # 1, 2, 3, 4: mean 5/2, variance 5/3 with n - 1
    x, mask = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, 99.0]]), torch.tensor([[True, True, False]] * 2)
    std = math.sqrt(5 / 3)
    expected = torch.tensor([[-1.5 / std, -0.5 / std, 0.0], [0.5 / std, 1.5 / std, 0.0]])
    moments = masked_moments(x, mask)
    assert_close(whiten(x, mask, moments), expected, **TIGHT)
    assert_close(whiten(x, mask, moments, shift_mean=False), torch.where(mask, expected + 2.5, 0), **TIGHT)


def test_whiten_matches_the_statistics_module():
    x, mask = torch.randn(7, 9) * 3 + 40, torch.rand(7, 9) < 0.6
    kept = x[mask].tolist()
    expected = (x.double() - statistics.mean(kept)) / statistics.stdev(kept)
    assert_close(whiten(x, mask, masked_moments(x, mask)).double()[mask], expected[mask], **TIGHT)


def test_whitened_values_have_mean_zero_and_variance_one():
    x, mask = torch.randn(8, 16) * 5 - 3, torch.rand(8, 16) < 0.7
    kept = whiten(x, mask, masked_moments(x, mask))[mask].tolist()
    assert abs(statistics.mean(kept)) < 1e-5
    assert abs(statistics.variance(kept) - 1) < 1e-5


def test_whiten_from_added_moments_equals_whiten_of_the_whole():
    x, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.7
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    moments = sum(masked_moments(x[part], mask[part]) for part in parts)
    pieces = torch.cat([whiten(x[part], mask[part], moments) for part in parts])
    assert_close(pieces, whiten(x, mask, masked_moments(x, mask)), rtol=0, atol=1e-6)


def test_whiten_keeps_its_precision_far_from_zero():
    x = torch.tensor([[10000.0, 10000.0625, 10000.125]])  # exact in fp32; variance 1/256
    mask = torch.ones_like(x, dtype=torch.bool)
    assert_close(whiten(x, mask, masked_moments(x, mask)), torch.tensor([[-1.0, 0.0, 1.0]]), **TIGHT)


def test_whiten_of_one_value_none_or_equal_ones_is_finite():
    x = torch.tensor([[3.0, NAN]])
    for mask in (torch.tensor([[True, False]]), torch.tensor([[False, False]])):
        assert whiten(x, mask, masked_moments(x, mask)).tolist() == [[0, 0]]
    x, mask = torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)
    assert whiten(x, mask, masked_moments(x, mask)).abs().max() < 1e-3
