"""What holds for every masked function: padding, junk, row order, splitting, purity."""

import math

import pytest
import torch
from torch.testing import assert_close

from common.tensor_ops import masked_mean, masked_moments, masked_sum, whiten
from step3_rlhf.advantages import gae, token_rewards
from step3_rlhf.kl import kl_loss
from step3_rlhf.losses import policy_loss, value_loss

LENGTHS = [7, 3, 0, 1, 5]  # a full row, an empty row, a row of one token


def experience(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), 7)
    names = [
        "logprobs",
        "new_logprobs",
        "ref_logprobs",
        "values",
        "new_values",
        "advantages",
        "returns",
        "rewards",
        "kl",
    ]
    batch = {name: 0.5 * torch.randn(shape, generator=generator) for name in names}
    batch["scores"] = torch.randn(len(LENGTHS), generator=generator)
    batch["mask"] = torch.tensor([[t < length for t in range(7)] for length in LENGTHS])
    return batch


def policy(x):
    settings = {"cliprange_low": 0.2, "cliprange_high": 0.3, "dual_clip": 3.0}
    return policy_loss(x["new_logprobs"], x["logprobs"], x["advantages"], x["mask"], **settings)


def value(x):
    return value_loss(x["new_values"], x["values"], x["returns"], x["mask"], cliprange_value=0.2)


def kl_term(x, estimator):
    return kl_loss(x["new_logprobs"], x["ref_logprobs"], x["mask"], estimator=estimator), {}


# (loss sum, stats sums) of a batch; the gradient is taken with respect to the named input
LOSSES = {
    "policy_loss": (policy, "new_logprobs"),
    "value_loss": (value, "new_values"),
    "kl_loss k1": (lambda x: kl_term(x, "k1"), "new_logprobs"),
    "kl_loss k2": (lambda x: kl_term(x, "k2"), "new_logprobs"),
    "kl_loss k3": (lambda x: kl_term(x, "k3"), "new_logprobs"),
    "masked_sum": (lambda x: (masked_sum(x["values"], x["mask"]), {}), "values"),
}

# (B, R) or (B,) results, row by row
ROW_WISE = {
    "token_rewards": lambda x: [token_rewards(x["scores"], x["kl"], x["mask"], 0.1)],
    "gae": lambda x: list(gae(x["rewards"], x["values"], x["mask"], 0.99, 0.95)),
    "whiten": lambda x: [whiten(x["rewards"], x["mask"], masked_moments(x["rewards"], x["mask"]))],
    "whiten, mean kept": lambda x: [whiten(x["rewards"], x["mask"], masked_moments(x["rewards"], x["mask"]), False)],
    "masked_sum by row": lambda x: [masked_sum(x["values"], x["mask"], dim=1)],
    "masked_mean by row": lambda x: [masked_mean(x["values"], x["mask"], dim=1)],
}


def loss_and_gradient(name, batch):
    function, wrt = LOSSES[name]
    batch = batch | {wrt: batch[wrt].clone().requires_grad_()}
    loss, stats = function(batch)
    loss.backward()
    return loss.detach(), stats, batch[wrt].grad


def with_junk(batch, junk, only=None):
    """The batch with junk outside the mask, in every (B, R) tensor or in the named one only."""
    names = [k for k, v in batch.items() if v.dim() == 2 and k != "mask"] if only is None else [only]
    return batch | {k: torch.where(batch["mask"], batch[k], junk) for k in names}


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", LOSSES)
def test_junk_in_padding_changes_no_loss_stat_or_gradient(name, junk):
    clean = loss_and_gradient(name, experience())
    assert clean[2].abs().sum() > 0
    for only in (None, "new_logprobs", "logprobs", "ref_logprobs", "advantages", "new_values", "values", "returns"):
        assert_close(loss_and_gradient(name, with_junk(experience(), junk, only)), clean, rtol=0, atol=0)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ROW_WISE)
def test_junk_in_padding_changes_no_row(name, junk):
    clean, dirty = (ROW_WISE[name](batch) for batch in (experience(), with_junk(experience(), junk)))
    assert_close(dirty, clean, rtol=0, atol=0)


def with_more_padding(batch, columns=4):
    pad = torch.full((len(LENGTHS), columns), math.nan)
    wider = {k: torch.cat([v, pad], dim=1) if v.dim() == 2 and k != "mask" else v for k, v in batch.items()}
    return wider | {"mask": torch.cat([batch["mask"], torch.zeros(len(LENGTHS), columns, dtype=torch.bool)], dim=1)}


@pytest.mark.parametrize("name", LOSSES)
def test_more_padding_changes_no_loss(name):
    narrow, wide = loss_and_gradient(name, experience()), loss_and_gradient(name, with_more_padding(experience()))
    assert_close(wide[:2], narrow[:2], rtol=1e-6, atol=1e-6)
    assert_close(wide[2][:, :7], narrow[2], rtol=0, atol=0)
    assert not wide[2][:, 7:].any()


@pytest.mark.parametrize("name", ROW_WISE)
def test_more_padding_changes_no_row(name):
    narrow, wide = ROW_WISE[name](experience()), ROW_WISE[name](with_more_padding(experience()))
    for a, b in zip(narrow, wide, strict=True):
        assert_close(b[:, :7] if b.dim() == 2 else b, a, rtol=0, atol=1e-6)
        assert b.dim() == 1 or not b[:, 7:].any()


ORDER = torch.tensor([3, 0, 4, 2, 1])


@pytest.mark.parametrize("name", LOSSES)
def test_permuting_rows_permutes_the_gradient(name):
    batch = experience()
    plain, shuffled = (loss_and_gradient(name, x) for x in (batch, {k: v[ORDER] for k, v in batch.items()}))
    assert_close(shuffled[:2], plain[:2], rtol=1e-6, atol=1e-6)
    assert_close(shuffled[2], plain[2][ORDER], rtol=0, atol=0)


@pytest.mark.parametrize("name", ROW_WISE)
def test_permuting_rows_permutes_the_rows(name):
    batch = experience()
    plain, shuffled = (ROW_WISE[name](x) for x in (batch, {k: v[ORDER] for k, v in batch.items()}))
    for a, b in zip(plain, shuffled, strict=True):
        assert_close(b, a[ORDER], rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [4, 1], [1, 4], [2, 3]])
@pytest.mark.parametrize("name", LOSSES)
def test_splitting_a_batch_changes_no_sum_and_no_gradient(name, sizes):
    batch = experience()
    whole_loss, whole_stats, whole_gradient = loss_and_gradient(name, batch)
    chunks = {k: v.split(sizes) for k, v in batch.items()}
    parts = [loss_and_gradient(name, {k: v[i] for k, v in chunks.items()}) for i in range(len(sizes))]
    count = batch["mask"].sum()
    assert_close(sum(part[0] for part in parts) / count, whole_loss / count, rtol=1e-6, atol=1e-6)
    assert_close(torch.cat([part[2] for part in parts]) / count, whole_gradient / count, rtol=1e-6, atol=1e-8)
    for key, total in whole_stats.items():
        assert_close(sum(part[1][key] for part in parts), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*LOSSES, *ROW_WISE])
def test_inputs_are_left_as_they_were(name):
    batch = experience()
    before = {k: v.clone() for k, v in batch.items()}
    loss_and_gradient(name, batch) if name in LOSSES else ROW_WISE[name](batch)
    assert all(torch.equal(batch[k], before[k]) for k in batch)


@pytest.mark.parametrize("name", [*LOSSES, *ROW_WISE])
def test_the_random_generator_is_left_as_it_was(name):
    batch, before = experience(), torch.get_rng_state()
    loss_and_gradient(name, batch) if name in LOSSES else ROW_WISE[name](batch)
    assert torch.equal(torch.get_rng_state(), before)
