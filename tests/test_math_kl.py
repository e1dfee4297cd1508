"""step3_rlhf/kl.py: estimators against the definition of KL, their gradients, the adaptive coefficient."""

import math

import pytest
import torch
from torch.testing import assert_close

from step3_rlhf.kl import adapt_kl_coef, kl_estimate, kl_loss

TIGHT = {"rtol": 1e-5, "atol": 1e-5}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def test_estimators_by_hand():
    # the policy says 1/2, the reference 1/4: d = ln 2
    logprobs, ref_logprobs = torch.tensor([[math.log(1 / 2)]]), torch.tensor([[math.log(1 / 4)]])
    assert_close(kl_estimate(logprobs, ref_logprobs, "k1").item(), math.log(2), **TIGHT)
    assert_close(kl_estimate(logprobs, ref_logprobs, "k2").item(), math.log(2) ** 2 / 2, **TIGHT)
    assert_close(kl_estimate(logprobs, ref_logprobs, "k3").item(), 1 / 2 - 1 + math.log(2), **TIGHT)


def two_policies() -> tuple[list[float], list[float]]:
    return [0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.4, 0.1]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    policy, reference = two_policies()
    exact = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    samples = kl_estimate(torch.tensor([policy]).log(), torch.tensor([reference]).log(), estimator)[0]
    assert_close(sum(p * k for p, k in zip(policy, samples.tolist(), strict=True)), exact, **TIGHT)


def test_k2_and_k3_are_never_negative():
    logprobs, ref_logprobs = -5 * torch.rand(4, 50), -5 * torch.rand(4, 50)
    assert kl_estimate(logprobs, ref_logprobs, "k2").min() >= 0
    assert kl_estimate(logprobs, ref_logprobs, "k3").min() >= 0
    assert kl_estimate(logprobs, ref_logprobs, "k1").min() < 0  # so the two lines above could have failed


def test_estimators_match_float64_loops():
    logprobs, ref_logprobs = -5 * torch.rand(3, 6), -5 * torch.rand(3, 6)
    for b in range(3):
        for t in range(6):
            d = logprobs[b, t].item() - ref_logprobs[b, t].item()
            for estimator, wanted in (("k1", d), ("k2", d * d / 2), ("k3", math.exp(-d) - 1 + d)):
                got = kl_estimate(logprobs, ref_logprobs, estimator)[b, t].item()
                assert_close(got, wanted, rtol=1e-5, atol=2e-5)


def test_k3_of_nearly_equal_policies_keeps_its_precision():
    d = (
        2.0**-12
    )  # exact in fp32, whose grain around 1 is larger than the result: exp(-d) - 1 + d gives 0 or twice too much
    got = kl_estimate(torch.tensor([[d]]), torch.tensor([[0.0]]), "k3").item()
    assert_close(got, d**2 / 2 - d**3 / 6, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [-500.0, 500.0])
def test_far_apart_policies_stay_finite(estimator, d):
    new_logprobs = torch.tensor([[d]], requires_grad=True)
    loss = kl_loss(new_logprobs, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), estimator=estimator)
    loss.backward()
    assert loss.isfinite() and new_logprobs.grad.isfinite().all()


def test_k3_gradient_never_points_away_from_the_reference():
    new_logprobs = torch.tensor([[-60.0, -30.0, -3.0, 0.0]], requires_grad=True)  # far less likely than the reference
    kl_loss(new_logprobs, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), estimator="k3").backward()
    assert (new_logprobs.grad <= 0).all()


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="'k4' is unknown: choose k1, k2 or k3"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def expected_gradient(estimator: str, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over the policy's own tokens of the gradient of kl_loss: weight each token by its probability."""
    logits = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    total = torch.zeros_like(logits)
    for token, probability in enumerate(logprobs.exp().tolist()):
        mask = torch.ones(1, 1, dtype=torch.bool)
        loss = kl_loss(logprobs[token].view(1, 1), reference[token].view(1, 1), mask, estimator=estimator)
        total += probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    return total


def test_gradients_are_what_the_docstring_says():
    policy, reference = (torch.tensor(p, dtype=torch.float64).log() for p in two_policies())
    logits = policy.clone().requires_grad_()
    p, q = torch.softmax(logits, -1), reference.exp()
    reverse = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)[0]  # KL(policy || reference)
    forward = torch.autograd.grad((q * (q / p).log()).sum(), logits)[0]  # KL(reference || policy)
    assert_close(expected_gradient("k1", policy, reference), torch.zeros(4, dtype=torch.float64), **EXACT)
    assert_close(expected_gradient("k2", policy, reference), reverse, **EXACT)
    assert_close(expected_gradient("k3", policy, reference), forward, **EXACT)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_sums_over_the_mask_and_passes_gradcheck(estimator):
    new_logprobs = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.randn(2, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    by_hand = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    expected = sum(
        by_hand(new_logprobs[b, t].item() - ref_logprobs[b, t].item()) for b in range(2) for t in range(4) if mask[b, t]
    )
    assert_close(kl_loss(new_logprobs, ref_logprobs, mask, estimator=estimator).item(), expected, **EXACT)
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, ref_logprobs, mask, estimator=estimator), new_logprobs)


# ---- the adaptive coefficient


@pytest.mark.parametrize(
    ("current_kl", "expected"),
    [
        (6.0, 0.1),  # on target: unchanged
        (6.6, 0.1 * (1 + 0.1 * 64 / 1000)),  # 10% above
        (5.4, 0.1 * (1 - 0.1 * 64 / 1000)),  # 10% below
        (60.0, 0.1 * (1 + 0.2 * 64 / 1000)),  # far above: error cut at 0.2
        (-1.0, 0.1 * (1 - 0.2 * 64 / 1000)),  # far below: error cut at -0.2
    ],
)
def test_adaptive_coefficient_by_hand(current_kl, expected):
    assert_close(adapt_kl_coef(0.1, current_kl, target=6.0, horizon=1000.0, n=64), expected, **EXACT)


def test_adaptive_coefficient_settles_the_kl_at_its_target():
    kl_coef, target = 1.0, 6.0
    for _ in range(2000):
        current_kl = 1.2 / kl_coef  # a world in which the KL is inversely proportional to its price
        kl_coef = adapt_kl_coef(kl_coef, current_kl, target, horizon=1000.0, n=64)
    assert_close(1.2 / kl_coef, target, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10.0), (-1.0, 10.0), (6.0, 0.0)])
def test_adaptive_coefficient_refuses_a_target_or_horizon_of_zero(target, horizon):
    with pytest.raises(ValueError, match="have to be positive"):
        adapt_kl_coef(0.1, 1.0, target, horizon, 8)
