"""Runs PPO and supervised steps in a process group of any size and ZeRO stage, and writes down what came out.

Launched by test_ranks.py: torchrun --nproc_per_node N tests/ranks_worker.py MODELS OUT [REPLAY]. One launch runs every
ZeRO stage, since starting the processes takes far longer than the steps. REPLAY holds the responses that a run without
it sampled: they are fed to a second run of three steps, while a first one samples its own for one.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import deepspeed  # noqa: E402, I001
import one_rank  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402

from common import adapters, chat_format, cli, distributed, engine, generation, hybrid_engine, models, supervised  # noqa: E402
from common.batches import collate_sft  # noqa: E402
from common.examples import tokenise_prompts, tokenise_sft  # noqa: E402
from common.functions import Function  # noqa: E402
from step1_sft.loss import sft_loss  # noqa: E402
from step3_rlhf import rewards  # noqa: E402
from step3_rlhf.ppo_trainer import PPO, PPOTrainer  # noqa: E402

STEPS = 3
RESPONSES = 14  # neither 3 ranks nor micro-batches of 2 divide it or its halves
QUESTIONS = ["Hi", "What is the sea like today?", "Soup?", "How do I look after a cat, and what does it eat?", "Why"]


class Replay:
    """A sampler that returns recorded rollouts."""

    def __init__(self, rollouts: list[dict]):
        self.rollouts = rollouts

    def generate(self, prompts, params, step, rows):
        return generation.Rollout(**{name: value[rows] for name, value in self.rollouts[step - 1].items()})


class Recorder:
    """A sampler that remembers, whole, what another one sampled."""

    def __init__(self, sampler):
        self.sampler, self.rollouts = sampler, []

    def generate(self, prompts, params, step, rows):
        rollout = self.sampler.generate(prompts, params, step, rows)
        fill = {"query": params.pad_id, "response": params.pad_id}
        whole = {
            name: distributed.gather_rows(value, RESPONSES, fill.get(name, 0), left=name.startswith("query"))
            for name, value in vars(rollout).items()
        }
        self.rollouts.append({name: value.clone() for name, value in whole.items()})
        return rollout


def record_gradients(model: engine.TrainedModel, kept: list) -> None:
    """Keeps the whole gradients of the first optimizer step."""
    step = model.engine.step

    def stepping(*args):
        if model.engine.is_gradient_accumulation_boundary() and not kept:
            kept.append({name: safe_get_full_grad(p).clone() for name, p in model.module.named_parameters()})
        return step(*args)

    model.engine.step = stepping


def length_reward(prompts, completions, **columns):
    return [len(completion[0]["content"]) / 10 for completion in completions]


def run_ppo(folder: Path, stage: int, steps: int, replay: list | None, device) -> dict:
    tokenizer = models.load_tokenizer(folder / "actor")
    stop_ids = (*chat_format.stop_ids(tokenizer), *range(100, 140))  # many, so that lengths differ
    prompts, _ = tokenise_prompts(
        tokenizer, [{"prompt": [{"role": "user", "content": QUESTIONS[i % 5]}]} for i in range(RESPONSES)], 200
    )
    optim = engine.Optim(1e-3, "linear", 0.0, 0, 0.0, 0.9, 0.95, 1e-8, 1.0)
    options = engine.Engine("fp32", stage, False, False, stage == 3, None)
    load_lm = lambda zero3: models.LanguageModel(models.load_causal_lm(folder / "actor", zero3=zero3))  # noqa: E731
    load_scalar = lambda zero3: models.load_scalar_model(folder / "reward", zero3=zero3)[0]  # noqa: E731
    actor = engine.TrainedModel(load_lm, optim, options, 12, device)
    critic = engine.TrainedModel(load_scalar, optim, options, 12, device)
    ref = engine.FrozenModel(load_lm, "fp32", stage, False, device)
    reward = engine.FrozenModel(load_scalar, "fp32", stage, False, device)
    gradients: list = []
    record_gradients(actor, gradients)
    ppo = PPO(
        minibatch_size=7, per_device_train_batch_size=2, rollout_forward_batch_size=4, num_ppo_epochs=2,
        num_generations=1, kl_coef=0.1, kl_estimator="k1", kl_target=None, kl_horizon=1.0, kl_loss_coef=0.05,
        kl_loss_estimator="k2", entropy_coef=0.01, cliprange=0.2, cliprange_high=None, dual_clip=None,
        cliprange_value=0.2, gamma=1.0, lam=0.95, whiten_rewards=False, whiten_advantages=True, score_clip=5.0,
        missing_eos_penalty=1.0, length_penalty=None,
        critic_warmup_steps=0, seed=3,
    )  # fmt: skip
    sampling = generation.SamplingParams(10, 1.0, 1.0, 0, stop_ids, tokenizer.pad_token_id, 3)
    sampler = Recorder(hybrid_engine.RolloutEngine(actor, "native", 0, device))
    trainer = PPOTrainer(
        actor=actor,
        critic=critic,
        ref=ref,
        sampler=sampler if replay is None else Replay(replay),
        sources=[
            rewards.RewardModel("reward", reward, tokenizer, tokenizer, "none", 0.0, 1.0),
            rewards.RewardFunction("length", Function("length", length_reward)),
        ],
        weights=[1.0, 0.5],
        decode=lambda ids: chat_format.decode_answer(tokenizer, ids),
        ppo=ppo,
        sampling=sampling,
        say=print,
        exact=True,
    )
    metrics = [
        {name: float(value) for name, value in trainer.step(step, prompts)[0].items()} for step in range(1, steps + 1)
    ]
    state = actor.state()
    moved = [float(value.double().sum()) for value in (state or {}).values()]
    return {"metrics": metrics, "gradients": gradients[0], "rollouts": sampler.rollouts, "moved": moved}


def run_sft(folder: Path, stage: int, device, lora_r: int = 0) -> list[dict]:
    tokenizer = models.load_tokenizer(folder / "actor")
    rows = [
        {
            "messages": [
                {"role": "user", "content": QUESTIONS[i % 5]},
                {"role": "assistant", "content": "ab" * (i % 4 + 1)},
            ]
        }
        for i in range(11)
    ]
    examples, _ = tokenise_sft(tokenizer, rows, 200)
    optim = engine.Optim(1e-3, "cosine", 0.1, 1, 0.01, 0.9, 0.95, 1e-8, 1.0)

    def load(zero3):
        hf = models.load_causal_lm(folder / "actor", zero3=zero3)
        adapters.add(hf, adapters.Lora(lora_r, 8, 0.0, ["all-linear"]), 3)
        return models.LanguageModel(hf)

    model = engine.TrainedModel(load, optim, engine.Engine("fp32", stage, False, False, False, None), 3, device)

    def loss(batch):
        total, sums = sft_loss(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        return total, sums | {"max_length": batch["attention_mask"].sum(1).max()}

    task = supervised.Task(
        length=lambda example: len(example.ids),
        collate=lambda examples, filler: collate_sft(examples, tokenizer.pad_token_id, filler),
        loss=loss,
        count=lambda examples: sum(sum(example.mask[1:]) for example in examples),
        figures=lambda sums, count: {"accuracy": sums["correct"] / count, "longest": sums["max_length"]},
    )
    batches = supervised.Batches(6 // distributed.world_size(), 1, 1.0, 3, 1, 3)
    run = one_rank.Recorded()
    supervised.train(model, examples, examples[:5], task, batches, run)
    return list(run.rows.values())


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    replay = torch.load(sys.argv[3], weights_only=True) if len(sys.argv) > 3 else None
    device = distributed.start(2, 0)
    results = {}
    for stage in (0, 3):
        results[stage] = {
            "sampled": run_ppo(folder, stage, 1 if replay else STEPS, None, device),
            "sft": run_sft(folder, stage, device),
            "lora": run_sft(folder, stage, device, lora_r=2),
        }
        if replay is not None:
            results[stage]["replayed"] = run_ppo(folder, stage, STEPS, replay, device)
    if distributed.is_main():
        torch.save(results, out)
        print(json.dumps({"world": distributed.world_size(), "deepspeed": deepspeed.__version__}))
    distributed.stop()


if __name__ == "__main__":
    cli.launch(main)
