"""The RL step against its definition written out in float64 loops; what it may not depend on; where the score lands."""

import copy
import dataclasses
import math

import one_rank
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from common import engine, generation, hybrid_engine
from common.errors import RunFailed
from common.examples import PromptExample
from common.functions import Function
from common.models import LanguageModel, ScalarModel
from step3_rlhf import experience as exp
from step3_rlhf import ppo_metrics, ppo_trainer, rewards
from step3_rlhf.ppo_trainer import PPO, PPOTrainer

# DeepSpeed calls what torch is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

VOCAB, PAD, EOS = 29, 0, 2
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    initializer_range=0.3, pad_token_id=PAD, num_labels=1,
)  # fmt: skip

# (prompt, response, score): of different lengths; the pad id inside one; two of the responses were cut by length.
ROWS = [
    ([5, 6, 7, 8], [9, 10, EOS], 1.0),
    ([11], [12, 13, 14, 15, 16], -0.5),
    ([17, 18], [EOS], 7.5),
    ([19, 20, 21], [22, PAD, 23, 24, EOS], 0.25),
    ([25, 26], [27, 28, 3, 4, 5], 0.5),
]
LIMIT = 5
BASE = PPO(
    minibatch_size=5, per_device_train_batch_size=2, rollout_forward_batch_size=2, num_ppo_epochs=2, num_generations=1,
    kl_coef=0.3, kl_estimator="k1", kl_target=None, kl_horizon=100.0, kl_loss_coef=0.0, kl_loss_estimator="k2",
    entropy_coef=0.0, cliprange=0.1, cliprange_high=None, dual_clip=None, cliprange_value=0.1, gamma=0.97, lam=0.9,
    whiten_rewards=False, whiten_advantages=True, score_clip=2.0, missing_eos_penalty=1.0, length_penalty=None,
    critic_warmup_steps=0, seed=3,
)  # fmt: skip
OPTIM = engine.Optim(
    learning_rate=1e-2, lr_scheduler_type="linear", min_lr_ratio=0.0, warmup_steps=0, weight_decay=0.0,
    adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-5, max_grad_norm=1.0,
)  # fmt: skip
TOTAL_STEPS = 20


def actor_model(seed: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG).eval()


def critic_model() -> LlamaForSequenceClassification:
    torch.manual_seed(2)
    model = LlamaForSequenceClassification(CONFIG).eval()
    with torch.no_grad():
        model.score.weight *= 3
    return model


def token_logprobs(model, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """Log-probs (length, V) of every choice in a response: one plain forward, no padding."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits - logits.logsumexp(-1, keepdim=True)


class FixedSampler:
    """Answers each prompt with its response in ROWS; padding holds junk, as it may."""

    def __init__(self, temperature: float = 1.0, rows=ROWS):
        self.rows, self.temperature, self.model = {tuple(p): r for p, r, _ in rows}, temperature, actor_model().double()

    def generate(self, prompts, params, step, rows):
        responses = [self.rows[tuple(prompt)] for prompt in prompts]
        n, q, r = len(prompts), max(map(len, prompts)), max(map(len, responses))
        query, query_mask = torch.full((n, q), 7), torch.zeros(n, q, dtype=torch.bool)
        response, mask = torch.full((n, r), 9), torch.zeros(n, r, dtype=torch.bool)
        logprobs = torch.zeros(n, r)
        for i, (prompt, answer) in enumerate(zip(prompts, responses, strict=True)):
            query[i, q - len(prompt) :], query_mask[i, q - len(prompt) :] = torch.tensor(prompt), True
            response[i, : len(answer)], mask[i, : len(answer)] = torch.tensor(answer), True
            with torch.no_grad():
                chosen = token_logprobs(self.model, prompt, answer, self.temperature)
            logprobs[i, : len(answer)] = chosen[range(len(answer)), answer].float()
        truncated = torch.tensor([EOS not in answer for answer in responses])
        return generation.Rollout(query, query_mask, response, mask, logprobs, truncated)


class CurrentSampler(FixedSampler):
    """Fixed responses, scored by the actor as it is now: what a sampler would have recorded."""

    def __init__(self, trainer: PPOTrainer):
        super().__init__(trainer.sampling.temperature)
        self.trainer = trainer

    def generate(self, prompts, params, step, rows):
        self.model.load_state_dict({name: value.double() for name, value in self.trainer.actor.state().items()})
        return super().generate(prompts, params, step, rows)


def prompts_of(rows=ROWS) -> list[PromptExample]:
    return [PromptExample(prompt, {"prompt": [{"role": "user", "content": str(prompt)}]}) for prompt, _, _ in rows]


def score_source(rows=ROWS):
    known = {str(prompt): score for prompt, _, score in rows}
    return function_source("known", lambda prompts, completions, **_: [known[p[0]["content"]] for p in prompts])


def function_source(name: str, function):
    return rewards.RewardFunction(name, Function(name, function))


def trainer_of(ppo: PPO = BASE, *, temperature=1.0, ref=True, sampler=None, exact=True, say=print, **changes):
    device = one_rank.start()
    options, optim = engine.Engine("fp32", 0, False, False, False, None), changes.pop("optim", OPTIM)
    ref_model = engine.FrozenModel(lambda zero3: LanguageModel(actor_model(seed=4)), "fp32", 0, False, device)
    sampling = generation.SamplingParams(LIMIT, temperature, 1.0, 0, (EOS,), PAD, 3)
    fields = {
        "actor": engine.TrainedModel(lambda zero3: LanguageModel(actor_model()), optim, options, TOTAL_STEPS, device),
        "critic": engine.TrainedModel(lambda zero3: ScalarModel(critic_model()), optim, options, TOTAL_STEPS, device),
        "ref": ref_model if ref else None,
        "sampler": sampler or FixedSampler(temperature),
        "sources": [score_source()],
        "weights": [1.0],
        "decode": lambda ids: " ".join(map(str, ids)),
        "ppo": ppo,
        "sampling": sampling,
        "say": say,
        "exact": exact,
    }
    return PPOTrainer(**(fields | changes))


# ---- the definition, in float64, one row and one token at a time


def definition(ppo: PPO, temperature: float, orders: list[list[int]], ref: bool = True) -> dict:
    """Metrics, first gradients and final weights of one RL step. Nothing of the project is called here."""
    actor, critic, reference = actor_model().double(), critic_model().double(), actor_model(seed=4).double()
    n = len(ROWS)

    def choices(model, i):
        prompt, response, _ = ROWS[i]
        logp = token_logprobs(model, prompt, response, temperature)
        return logp[range(len(response)), response], -(logp.exp() * logp).sum(-1)

    def values_of(i):
        prompt, response, _ = ROWS[i]
        hidden = critic.model(torch.tensor([prompt + response])).last_hidden_state[0]
        return (hidden @ critic.score.weight[0])[len(prompt) - 1 : -1]

    with torch.no_grad():
        old = [choices(actor, i) for i in range(n)]
        logprobs, entropies = [o[0] for o in old], [o[1] for o in old]
        ref_logprobs = [choices(reference, i)[0] for i in range(n)] if ref else logprobs
        values = [values_of(i) for i in range(n)]

    rewards_by_row, kls, shaped = [], [], []
    for i, (_, response, score) in enumerate(ROWS):
        d = logprobs[i] - ref_logprobs[i]
        kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[ppo.kl_estimator]
        score = max(-ppo.score_clip, min(ppo.score_clip, score))
        if EOS not in response:
            score -= ppo.missing_eos_penalty
        if ppo.length_penalty:
            score -= ppo.length_penalty * len(response)
        token_rewards = -ppo.kl_coef * kl
        token_rewards[-1] += score
        rewards_by_row.append(token_rewards)
        kls.append(kl)
        shaped.append(score)
    if ppo.whiten_rewards:
        pool = torch.cat(rewards_by_row)
        rewards_by_row = [(r - pool.mean()) / (pool.var() + 1e-8).sqrt() + pool.mean() for r in rewards_by_row]

    advantages, returns = [], []
    for i in range(n):
        length = len(values[i])
        row = torch.zeros(length, dtype=torch.float64)
        for t in range(length):
            for later in range(t, length):
                after = values[i][later + 1] if later + 1 < length else 0.0
                delta = rewards_by_row[i][later] + ppo.gamma * after - values[i][later]
                row[t] += (ppo.gamma * ppo.lam) ** (later - t) * delta
        advantages.append(row)
        returns.append(row + values[i])
    if ppo.whiten_advantages:
        pool = torch.cat(advantages)
        advantages = [(a - pool.mean()) / (pool.var() + 1e-8).sqrt() for a in advantages]

    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
        for m in (actor, critic)
    ]
    found = {
        name: [] for name in ("policy", "value", "ratio", "ratio_sq", "clip", "kl", "vclip", "error", "norm", "vnorm")
    }
    gradients, update = None, 0
    for order in orders:
        for start in range(0, n, ppo.minibatch_size):
            rows = order[start : start + ppo.minibatch_size]
            count = sum(len(ROWS[i][1]) for i in rows)
            sums = dict.fromkeys(found, 0.0)
            actor_loss = critic_loss = 0.0
            for i in rows:
                new, entropy = choices(actor, i)
                new_values = values_of(i)
                for t in range(len(new)):
                    ratio = (new[t] - logprobs[i][t]).exp()
                    high = ppo.cliprange if ppo.cliprange_high is None else ppo.cliprange_high
                    unclipped = -advantages[i][t] * ratio
                    clipped = -advantages[i][t] * ratio.clamp(1 - ppo.cliprange, 1 + high)
                    loss = unclipped if unclipped >= clipped else clipped
                    if ppo.dual_clip and advantages[i][t] < 0 and loss > -ppo.dual_clip * advantages[i][t]:
                        loss = -ppo.dual_clip * advantages[i][t]
                    sums["policy"] += loss.item()
                    sums["ratio"] += ratio.item()
                    sums["ratio_sq"] += ratio.item() ** 2
                    sums["clip"] += float(clipped > unclipped)
                    sums["kl"] += (new[t] - logprobs[i][t]).item() ** 2 / 2
                    d = new[t] - ref_logprobs[i][t]
                    actor_loss = actor_loss + loss - ppo.entropy_coef * entropy[t] + ppo.kl_loss_coef * d**2 / 2
                    error = (new_values[t] - returns[i][t]) ** 2
                    near = values[i][t] + (new_values[t] - values[i][t]).clamp(
                        -ppo.cliprange_value, ppo.cliprange_value
                    )
                    near_error = (near - returns[i][t]) ** 2
                    critic_loss = critic_loss + 0.5 * (error if error >= near_error else near_error)
                    sums["error"] += error.item()
                    sums["vclip"] += float(near_error > error)
            sums["value"] = critic_loss.item()
            for model, loss in ((actor, actor_loss / count), (critic, critic_loss / count)):
                model.zero_grad()
                loss.backward()
            gradients = gradients or {
                role: {name: p.grad.clone() for name, p in model.named_parameters()}
                for role, model in (("actor", actor), ("critic", critic))
            }
            for model, optimizer, norm in ((actor, optimizers[0], "norm"), (critic, optimizers[1], "vnorm")):
                total = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
                sums[norm] = total * count
                for parameter in model.parameters():
                    parameter.grad *= min(1.0, 1.0 / max(total, 1e-9))
                optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / TOTAL_STEPS)
                optimizer.step()
            update += 1
            for name in found:
                found[name].append(sums[name] / count)

    def mean(items):
        return float(torch.tensor(list(items), dtype=torch.float64).mean())

    every = {name: mean(values) for name, values in found.items()}
    kl_sums = [kl.sum().item() for kl in kls]
    metrics = {
        "objective/kl": mean(kl_sums),
        "objective/entropy": mean(-lp.sum().item() for lp in logprobs),
        "objective/non_score_reward": -ppo.kl_coef * mean(kl_sums),
        "objective/rlhf_reward": mean(shaped) - ppo.kl_coef * mean(kl_sums),
        "objective/scores": mean(score for _, _, score in ROWS),
        "policy/entropy_avg": torch.cat(entropies).mean().item(),
        "val/num_eos_tokens": 3,
        "completions/mean_length": 3.8,
        "completions/min_length": 1,
        "completions/max_length": 5,
        "completions/clipped_ratio": 0.4,
        "rewards/known/mean": mean(score for _, _, score in ROWS),
        "kl_coef": ppo.kl_coef,
        "episode": 5,
        "loss/policy_avg": every["policy"],
        "loss/value_avg": every["value"],
        "policy/approxkl_avg": every["kl"],
        "policy/clipfrac_avg": every["clip"],
        "policy/grad_norm": every["norm"],
        "critic/grad_norm": every["vnorm"],
        "val/ratio": every["ratio"],
        "val/ratio_var": every["ratio_sq"] - every["ratio"] ** 2,
        "val/ratio_first": 1.0,
        "val/clipfrac_avg": every["vclip"],
        "val/error": every["error"],
        "lr": 1e-2 * (1 - (update - 1) / TOTAL_STEPS),
    }
    weights = {"actor": actor.state_dict(), "critic": critic.state_dict()}
    return {"metrics": metrics, "gradients": gradients, "weights": weights, "returns": returns}


def first_gradients(model: engine.TrainedModel) -> dict:
    """Filled with the whole gradients of the first optimizer step."""
    kept, step = {}, model.engine.step

    def stepping(*args):
        if model.engine.is_gradient_accumulation_boundary() and not kept:
            kept.update({n.removeprefix("hf."): p.grad.clone() for n, p in model.module.named_parameters()})
        return step(*args)

    model.engine.step = stepping
    return kept


ORDERS = [[3, 0, 4, 1, 2], [1, 2, 0, 4, 3]]
VARIANTS = {
    "plain": ({}, 1.0),
    "minibatches": ({"minibatch_size": 2}, 1.0),
    "temperature": ({"minibatch_size": 3}, 0.7),
    "k3 and raw advantages": ({"kl_estimator": "k3", "whiten_advantages": False, "cliprange_high": 0.15}, 1.0),
    "whitened rewards": ({"whiten_rewards": True, "kl_estimator": "k2", "length_penalty": 0.1}, 1.0),
    "loss terms": ({"entropy_coef": 0.02, "kl_loss_coef": 0.1, "kl_coef": 0.0, "dual_clip": 1.02}, 1.0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_equals_its_definition_in_float64(variant, monkeypatch):
    changes, temperature = VARIANTS[variant]
    ppo = dataclasses.replace(BASE, **changes)
    monkeypatch.setattr(exp, "permutation", lambda seed, step, epoch, total: ORDERS[epoch])
    expected = definition(ppo, temperature, ORDERS)
    trainer = trainer_of(ppo, temperature=temperature)
    gradients = {"actor": first_gradients(trainer.actor), "critic": first_gradients(trainer.critic)}
    metrics, _, samples = trainer.step(1, prompts_of(), num_samples=9)
    for name, value in expected["metrics"].items():
        assert float(metrics[name]) == pytest.approx(value, abs=1e-5, rel=1e-5), name
    for role in ("actor", "critic"):
        for name, gradient in expected["gradients"][role].items():
            torch.testing.assert_close(
                gradients[role][name].double(), gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        state = getattr(trainer, role).state()
        for name, value in expected["weights"][role].items():
            torch.testing.assert_close(
                state[name].double(), value, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert expected["metrics"]["val/clipfrac_avg"] > 0.1 and expected["metrics"]["policy/clipfrac_avg"] > 0.1
    for sample, (prompt, response, score) in zip(samples, ROWS, strict=True):
        assert (sample["prompt"], sample["response"]) == (str(prompt), " ".join(map(str, response)))
        assert (sample["score"], sample["length"]) == (score, len(response))
        assert sample["truncated"] == (EOS not in response)
    assert sum(sample["kl"] for sample in samples) / 5 == pytest.approx(expected["metrics"]["objective/kl"], abs=1e-5)


# ---- what a step does not depend on


def outcome(trainer: PPOTrainer, prompts=None, steps: int = 1):
    trainer.sampler = CurrentSampler(trainer)
    for step in range(1, steps + 1):
        metrics, _, samples = trainer.step(step, prompts or prompts_of(), num_samples=9)
    return metrics, samples, trainer.actor.state() | {f"critic {n}": v for n, v in trainer.critic.state().items()}


def assert_same(one, other, tolerance: float = 2e-6):
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        if not name.startswith("rollout/logprob_gap"):  # rounding itself
            assert float(other[0][name]) == pytest.approx(float(value), abs=tolerance, rel=tolerance), name
    for name, value in one[2].items():
        torch.testing.assert_close(other[2][name], value, atol=20 * tolerance, rtol=0, msg=name)


@pytest.mark.parametrize(("train", "forward"), [(1, 1), (2, 3), (3, 0)])
def test_micro_batch_sizes_change_nothing(train, forward):
    ppo = dataclasses.replace(BASE, minibatch_size=3, kl_loss_coef=0.1, entropy_coef=0.01)
    whole = dataclasses.replace(ppo, per_device_train_batch_size=5, rollout_forward_batch_size=5)
    cut = dataclasses.replace(ppo, per_device_train_batch_size=train, rollout_forward_batch_size=forward)
    assert_same(outcome(trainer_of(whole), steps=2), outcome(trainer_of(cut), steps=2))


@pytest.mark.parametrize(("most", "forwards"), [(1, [1, 1, 1]), (16, [2, 1]), (1000, [3])])
def test_micro_batches_by_tokens_change_nothing(most, forwards):
    ppo = dataclasses.replace(BASE, minibatch_size=3, kl_loss_coef=0.2, entropy_coef=0.1)
    plain, by_tokens = trainer_of(ppo), trainer_of(dataclasses.replace(ppo, max_tokens_per_micro_batch=most))
    expected, seen = plain.step(1, prompts_of())[0], []
    train_step = by_tokens.actor.train_step
    by_tokens.actor.train_step = lambda batches, *rest: seen.append(batches) or train_step(batches, *rest)
    found = by_tokens.step(1, prompts_of())[0]
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=2e-5, abs=2e-6
    )
    for name, value in plain.actor.state().items():
        torch.testing.assert_close(by_tokens.actor.state()[name], value, atol=1e-5, rtol=0, msg=name)
    for batches in seen:
        assert all(batch.ids.numel() <= most or len(batch.ids) == 1 for batch in batches)
    assert any(sorted((len(batch.ids) for batch in batches), reverse=True) == forwards for batches in seen)


def test_permuting_the_prompts_permutes_the_samples_and_changes_nothing_else():
    order = [4, 2, 0, 3, 1]
    straight = outcome(trainer_of())
    permuted = outcome(trainer_of(), prompts_of([ROWS[i] for i in order]))
    assert_same(straight, permuted)
    for place, row in enumerate(order):
        assert permuted[1][place]["response"] == straight[1][row]["response"]
        assert permuted[1][place]["kl"] == pytest.approx(straight[1][row]["kl"], abs=1e-5)


def test_without_kl_no_reference_is_needed_and_nothing_changes():
    ppo = dataclasses.replace(BASE, kl_coef=0.0)
    with_ref, without = outcome(trainer_of(ppo)), outcome(trainer_of(ppo, ref=False))
    assert with_ref[0].pop("objective/kl") != 0 and without[0].pop("objective/kl") == 0
    assert_same(with_ref, without)


# ---- scores, truncation, warm-up, the KL coefficient


def rewards_seen(trainer: PPOTrainer, monkeypatch, step: int = 1) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The token rewards of a step, the mask, and the metrics."""
    seen, gae = [], ppo_trainer.gae
    monkeypatch.setattr(
        ppo_trainer, "gae", lambda r, v, m, gamma, lam: (seen.append((r, m)), gae(r, v, m, gamma, lam))[1]
    )
    metrics = trainer.step(step, prompts_of())[0]
    return *seen[0], metrics


def test_the_score_lands_on_the_last_token_and_truncation_is_charged(monkeypatch):
    ppo = dataclasses.replace(BASE, kl_coef=0.0, missing_eos_penalty=3.0, score_clip=5.0)
    seen, mask, _ = rewards_seen(trainer_of(ppo, ref=False), monkeypatch)
    assert seen.tolist() == [
        [0, 0, 1.0, 0, 0],  # on the EOS
        [0, 0, 0, 0, -0.5 - 3.0],
        [5.0, 0, 0, 0, 0],  # 7.5 clipped
        [0, 0, 0, 0, 0.25],
        [0, 0, 0, 0, 0.5 - 3.0],
    ]
    assert mask.sum(1).tolist() == [3, 5, 1, 5, 5]


def test_sources_are_weighted_and_reported_apart(monkeypatch):
    ppo = dataclasses.replace(BASE, kl_coef=0.0, missing_eos_penalty=None, score_clip=None)
    some = function_source("some", lambda prompts, completions, **_: [1.0, None, None, 2.0, None])
    trainer = trainer_of(ppo, ref=False, sources=[score_source(), some], weights=[1.0, 10.0])
    metrics = trainer.step(1, prompts_of())[0]
    assert float(metrics["rewards/some/mean"]) == 1.5 and float(metrics["rewards/some/std"]) == 0.5
    assert float(metrics["objective/scores"]) == pytest.approx((1 + 10 - 0.5 + 7.5 + 0.25 + 20 + 0.5) / 5)


def test_while_the_critic_warms_up_the_actor_stays_as_it_is():
    trainer = trainer_of(dataclasses.replace(BASE, critic_warmup_steps=1))
    before = copy.deepcopy(outcome_state(trainer))
    metrics = trainer.step(1, prompts_of())[0]
    after = copy.deepcopy(outcome_state(trainer))
    assert all(torch.equal(after["actor"][name], value) for name, value in before["actor"].items())
    assert not all(torch.equal(after["critic"][name], value) for name, value in before["critic"].items())
    assert "loss/value_avg" in metrics and not {"loss/policy_avg", "val/ratio", "lr"} & metrics.keys()
    metrics = trainer.step(2, prompts_of())[0]
    assert not all(torch.equal(outcome_state(trainer)["actor"][name], v) for name, v in after["actor"].items())
    assert float(metrics["val/ratio_first"]) == pytest.approx(1.0, abs=1e-5)
    assert metrics["lr"] == pytest.approx(1e-2 * (1 - 1 / TOTAL_STEPS)), "the actor's schedule starts with the actor"


def outcome_state(trainer: PPOTrainer) -> dict:
    return {"actor": trainer.actor.state(), "critic": trainer.critic.state()}


@pytest.mark.parametrize("target", [0.01, 1000.0])
def test_the_kl_coefficient_is_steered_to_its_target(target, monkeypatch):
    ppo = dataclasses.replace(BASE, kl_target=target, kl_horizon=50.0, num_ppo_epochs=1)
    trainer = trainer_of(ppo)
    first = trainer.step(1, prompts_of())[0]
    error = max(-0.2, min(0.2, (float(first["objective/kl"]) - target) / target))
    coefficient = 0.3 * (1 + error * 5 / 50)
    assert abs(error) == 0.2 and trainer.kl_coef == pytest.approx(coefficient)
    trainer.sampler = CurrentSampler(trainer)
    seen, _, second = rewards_seen(trainer, monkeypatch, step=2)
    assert first["kl_coef"] == 0.3 and second["kl_coef"] == pytest.approx(coefficient)
    toll = float(second["objective/non_score_reward"])
    assert toll == pytest.approx(-coefficient * float(second["objective/kl"]), rel=1e-5) and second["episode"] == 10
    assert float(seen.sum() / 5) == pytest.approx(float(second["objective/rlhf_reward"]), rel=1e-5)


# ---- the first ratio is 1, at every step


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_several_epochs_on_sampled_responses_start_every_step_at_ratio_one(temperature):
    ppo = dataclasses.replace(BASE, num_ppo_epochs=4, minibatch_size=2, kl_loss_coef=0.05)
    said = []
    slow = engine.Optim(**(vars(OPTIM) | {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}))
    trainer = trainer_of(ppo, temperature=temperature, say=said.append, optim=slow)
    trainer.sampler = hybrid_engine.RolloutEngine(trainer.actor, "native", 0, one_rank.start())
    responses = []
    for step in (1, 2, 3):
        metrics, seconds, samples = trainer.step(step, prompts_of(), num_samples=9)
        assert float(metrics["val/ratio_first"]) == pytest.approx(1.0, abs=1e-5)
        assert float(metrics["rollout/logprob_gap_max"]) < 1e-5
        assert abs(float(metrics["val/ratio"]) - 1) > 1e-4, "four epochs move the policy"
        assert set(seconds) == {"generate", "score", "forward", "update", "total"}
        responses.append([sample["response"] for sample in samples])
    assert responses[0] != responses[1] and not said


def test_several_responses_to_a_prompt_stand_side_by_side():
    ppo = dataclasses.replace(BASE, num_generations=3, minibatch_size=6)
    trainer = trainer_of(ppo)
    trainer.sampler = hybrid_engine.RolloutEngine(trainer.actor, "native", 0, one_rank.start())
    metrics, _, samples = trainer.step(1, prompts_of(ROWS[:2]), num_samples=9)
    assert [sample["prompt"] for sample in samples] == [str(ROWS[0][0])] * 3 + [str(ROWS[1][0])] * 3
    assert len({sample["response"] for sample in samples[:3]}) > 1 and metrics["episode"] == 6


class WrongSampler(FixedSampler):
    """Records log-probs of other weights."""

    def __init__(self, nats: float):
        super().__init__()
        self.nats = nats

    def generate(self, prompts, params, step, rows):
        rollout = super().generate(prompts, params, step, rows)
        logprobs = rollout.rollout_logprobs.clone()
        logprobs[3, 2] += self.nats
        return dataclasses.replace(rollout, rollout_logprobs=logprobs)


def test_a_sampler_of_other_weights_stops_the_run_before_any_update():
    trainer = trainer_of(sampler=WrongSampler(3.5e-4))
    before = copy.deepcopy(outcome_state(trainer))
    with pytest.raises(RunFailed, match=r"step 1, response 3: the sampler's log-probs differ .* 3\.\d+e-04"):
        trainer.step(1, prompts_of())
    after = outcome_state(trainer)
    assert all(torch.equal(after[role][n], value) for role in after for n, value in before[role].items())
    trainer_of(sampler=WrongSampler(5e-5)).step(1, prompts_of())


@pytest.mark.parametrize("name", ["rollout_logprobs", "logprobs", "ref_logprobs", "values", "scores"])
def test_what_is_not_finite_stops_the_run_before_any_update(name, monkeypatch):
    trainer, gather = trainer_of(), exp.gather

    def spoilt(*args):
        experience = gather(*args)
        tensor = getattr(experience, name)
        tensor[[1, 3]] = math.inf
        return experience

    monkeypatch.setattr(exp, "gather", spoilt)
    before = copy.deepcopy(outcome_state(trainer))
    with pytest.raises(RunFailed, match=rf"step 1: {name} of the responses 1, 3 \(rank 0\) are not finite; stopped"):
        trainer.step(1, prompts_of())
    after = outcome_state(trainer)
    assert all(torch.equal(after[role][n], value) for role in after for n, value in before[role].items())


def test_in_low_precision_a_gap_is_told_and_not_fatal():
    said = []
    trainer_of(sampler=WrongSampler(1.0), exact=False, say=said.append).step(1, prompts_of())
    assert said == ["warning: step 1: sampler and trainer differ by 0.053 nats a token on average"]  # 1 / 19 tokens


def test_a_first_ratio_that_is_not_one_stops_the_run_or_is_told():
    said = []
    ppo_metrics.check_first_ratio(4, 1 + 9e-5, True, said.append)
    ppo_metrics.check_first_ratio(4, 1.005, False, said.append)
    assert not said
    for ratio in (1 + 2e-4, 1 - 2e-4, math.nan):
        with pytest.raises(RunFailed, match="step 4: the first minibatch's ratio is"):
            ppo_metrics.check_first_ratio(4, ratio, True, said.append)
    for ratio in (1.02, math.nan):
        ppo_metrics.check_first_ratio(4, ratio, False, said.append)
    assert len(said) == 2 and said[0] == "warning: step 4: the first minibatch's ratio is 1.0200, wanted 1"


def test_dropout_left_on_is_found(monkeypatch):
    trainer = trainer_of()
    trainer.actor.module.hf.model.layers[0].self_attn.attention_dropout = 0.5
    old = PPOTrainer.old_quantities

    def in_eval_mode(self, *args):
        self.actor.module.eval()
        try:
            return old(self, *args)
        finally:
            self.actor.module.train()

    monkeypatch.setattr(PPOTrainer, "old_quantities", in_eval_mode)
    with pytest.raises(RunFailed, match="step 1: the first minibatch's ratio is"):
        trainer.step(1, prompts_of())


# ---- how a step is cut up


def test_the_order_of_an_epoch_is_a_function_of_seed_step_and_epoch():
    order = exp.permutation(1, 2, 3, 50)
    assert sorted(order) == list(range(50)) and order == exp.permutation(1, 2, 3, 50)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert exp.permutation(*other, 50) != order
    firsts = torch.bincount(torch.tensor([exp.permutation(1, s, 0, 4)[0] for s in range(2000)]), minlength=4)
    assert (firsts - 500).abs().max() < 4 * math.sqrt(2000 * 0.25 * 0.75)


@pytest.mark.parametrize(
    ("responses", "size", "expected"), [(7, 3, (3, 3)), (7, 0, (7, 1)), (6, 3, (3, 2)), (1, 4, (4, 1))]
)
def test_forward_plan_by_hand(responses, size, expected):
    assert dataclasses.astuple(exp.forward_plan(responses, size)) == expected


def test_scoring_forwards_cover_every_row_once_and_idle_when_there_is_none():
    rollout = FixedSampler().generate([p for p, _, _ in ROWS], None, 1, None)
    forwards = list(exp.scoring_forwards(rollout, exp.ForwardPlan(size=2, count=4)))
    assert sorted(row for rows, idle in forwards if not idle for row in rows) == [0, 1, 2, 3, 4]
    assert [idle for _, idle in forwards] == [False, False, False, True] and forwards[3][0] == [0]


def test_rows_are_cut_to_their_own_widths():
    rollout = FixedSampler().generate([p for p, _, _ in ROWS], None, 1, None)
    part = exp.rows_of(rollout, [2, 0])
    assert part["query"].tolist() == [[7, 7, 17, 18], [5, 6, 7, 8]] and part["response"].shape == (2, 3)
    part = exp.rows_of(rollout, [2])
    assert part["query"].tolist() == [[17, 18]] and part["response"].tolist() == [[EOS]]
    ids, seen = exp.sequence(exp.rows_of(rollout, [1, 2]))
    assert ids.tolist() == [[7, 11, 12, 13, 14, 15, 16], [17, 18, EOS, 9, 9, 9, 9]]
    assert seen.tolist() == [[False] + [True] * 6, [True] * 3 + [False] * 4]
