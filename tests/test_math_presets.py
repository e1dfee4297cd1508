"""The three published objectives that the presets promise, each computed a second time here from its formula.

The second computation is float64, in loops, from the formulas as the literature and those programs state them, and
shares no code with ours. Fixed here: which of our settings gives which variant.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from common.tensor_ops import entropy_of, logprobs_of, masked_moments, masked_sum, response_slice, whiten
from step1_sft.loss import sft_loss
from step3_rlhf.advantages import gae, shape_scores, token_rewards
from step3_rlhf.kl import kl_estimate, kl_loss
from step3_rlhf.losses import actor_loss, policy_loss, value_loss

B, Q, R, V = 4, 3, 6, 9
LENGTHS = [6, 2, 4, 1]
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def rollout():
    """Random fp32 stand-ins for everything the models would say, plus their python lists for the second computation."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = torch.randint(V, (B, Q + R), generator=generator)
    mask = torch.tensor([[t < length for t in range(R)] for length in LENGTHS])
    logits = 2 * randn(B, Q + R, V)
    logprobs = -2.5 + 0.5 * randn(B, R)
    return {
        "tokens": tokens,
        "mask": mask,
        "logits": logits,  # of the policy being trained
        "logprobs": logprobs,  # of the policy that sampled
        "ref_logprobs": logprobs + 0.3 * randn(B, R),
        "values": randn(B, R),
        "new_values": randn(B, R),
        "scores": 6 * randn(B),
        "ptx_logits": randn(2, 5, V),
        "ptx_labels": torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, -100, -100]]),
    }


# ---- the second computation


def distribution(logits):
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def reference(x, *, kl_coef, score_clip, gamma, lam, whitened, cliprange, cliprange_value, beta, lambda_kl, alpha):
    """Actor and critic loss of one rollout by the formulas; cells are (row, t) of sampled tokens."""
    x = {name: value.tolist() for name, value in x.items()}
    cells = [(b, t) for b in range(B) for t in range(LENGTHS[b])]
    advantages, returns = {}, {}
    for b in range(B):
        n = LENGTHS[b]
        score = x["scores"][b] if score_clip is None else max(-score_clip, min(score_clip, x["scores"][b]))
        toll = [-kl_coef * (x["logprobs"][b][t] - x["ref_logprobs"][b][t]) for t in range(n)]
        rewards = [toll[t] + (score if t == n - 1 else 0.0) for t in range(n)]
        values = x["values"][b][:n] + [0.0]
        deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
        for t in range(n):
            advantages[b, t] = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n))
            returns[b, t] = advantages[b, t] + values[t]
    if whitened:  # TRL's masked_whiten: variance with n - 1, 1e-8 under the root
        mean = sum(advantages.values()) / len(cells)
        variance = sum((a - mean) ** 2 for a in advantages.values()) / (len(cells) - 1)
        advantages = {cell: (a - mean) / math.sqrt(variance + 1e-8) for cell, a in advantages.items()}
    policy = critic = entropy = kl = 0.0
    for b, t in cells:
        p = distribution(x["logits"][b][Q + t - 1])
        new_logprob = math.log(p[x["tokens"][b][Q + t]])
        ratio = math.exp(new_logprob - x["logprobs"][b][t])
        clipped = max(1 - cliprange, min(1 + cliprange, ratio))
        policy -= min(ratio * advantages[b, t], clipped * advantages[b, t])
        entropy -= sum(q * math.log(q) for q in p)
        kl += 0.5 * (new_logprob - x["ref_logprobs"][b][t]) ** 2
        v, old, target = x["new_values"][b][t], x["values"][b][t], returns[b, t]
        near = max(old - cliprange_value, min(old + cliprange_value, v))
        critic += 0.5 * max((v - target) ** 2, (near - target) ** 2)
    ptx, ptx_tokens = 0.0, 0
    for b, row in enumerate(x["ptx_labels"]):
        for p, label in enumerate(row[1:]):
            if label != -100:
                ptx -= math.log(distribution(x["ptx_logits"][b][p])[label])
                ptx_tokens += 1
    n = len(cells)
    actor = policy / n - beta * entropy / n + lambda_kl * kl / n + alpha * ptx / ptx_tokens
    return actor, critic / n


# ---- ours


def ours(x, *, kl_coef, score_clip, gamma, lam, whitened, cliprange, cliprange_value, beta, lambda_kl, alpha):
    mask, count = x["mask"], x["mask"].sum()
    scores = shape_scores(
        x["scores"],
        torch.zeros(B, dtype=torch.bool),
        lengths=mask.sum(1),
        score_clip=score_clip,
        missing_eos_penalty=None,
        length_penalty=None,
    )
    rewards = token_rewards(scores, kl_estimate(x["logprobs"], x["ref_logprobs"], "k1"), mask, kl_coef)
    advantages, returns = gae(rewards, x["values"], mask, gamma, lam)
    if whitened:
        advantages = whiten(advantages, mask, masked_moments(advantages, mask))
    logits = response_slice(x["logits"], Q)
    new_logprobs = logprobs_of(logits, x["tokens"][:, Q:])
    ranges = {"cliprange_low": cliprange, "cliprange_high": cliprange, "dual_clip": None}
    policy, _ = policy_loss(new_logprobs, x["logprobs"], advantages, mask, **ranges)
    critic, _ = value_loss(x["new_values"], x["values"], returns, mask, cliprange_value=cliprange_value)
    ptx, ptx_stats = sft_loss(x["ptx_logits"], x["ptx_labels"])
    actor = actor_loss(
        policy / count,
        masked_sum(entropy_of(logits), mask) / count,
        kl_loss(new_logprobs, x["ref_logprobs"], mask, estimator="k2") / count,
        ptx / ptx_stats["tokens"],
        entropy_coef=beta,
        kl_loss_coef=lambda_kl,
        ptx_coef=alpha,
    )
    return actor.item(), (critic / count).item()


BASE = {"kl_coef": 0.1, "score_clip": None, "gamma": 1.0, "lam": 0.95, "whitened": False}
BASE |= {"cliprange": 0.2, "cliprange_value": 0.2, "beta": 0.0, "lambda_kl": 0.0, "alpha": 0.0}
VARIANTS = {
    "trl": BASE | {"kl_coef": 0.05, "whitened": True},
    "deepspeed-chat": BASE | {"score_clip": 5.0},
    "deepspeed-chat with entropy bonus and KL loss": BASE | {"score_clip": 5.0, "beta": 0.01, "lambda_kl": 0.2},
    "colossal": BASE | {"alpha": 0.9},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_preset_equals_its_formula(name, rollout):
    assert_close(ours(rollout, **VARIANTS[name]), reference(rollout, **VARIANTS[name]), **TIGHT)


def test_every_setting_of_the_variants_makes_a_difference(rollout):
    """Guards the comparison above: had a setting no effect on these numbers, that test could not notice its absence."""
    everything = BASE | {"score_clip": 5.0, "gamma": 0.9, "beta": 0.01, "lambda_kl": 0.2, "alpha": 0.9}
    base = reference(rollout, **everything)
    changes = {"kl_coef": 0.2, "score_clip": None, "gamma": 1.0, "lam": 0.9, "whitened": True, "cliprange": 0.4}
    changes |= {"cliprange_value": 0.5, "beta": 0.02, "lambda_kl": 0.1, "alpha": 0.5}
    for name, value in changes.items():
        changed = reference(rollout, **(everything | {name: value}))
        assert max(abs(a - b) for a, b in zip(base, changed, strict=True)) > 1e-3, name
