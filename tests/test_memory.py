"""The memory arithmetic against hand-worked numbers, DeepSpeed's own estimators, and tensors counted one by one."""

import contextlib
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys

import memory_worker
import one_rank
import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from tensor_bytes import Meter, alive
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Qwen2Config

from common import engine, generation, hybrid_engine, memory, models
from common.examples import PromptExample
from common.functions import Function
from common.memory import How, Shape
from common.models import LanguageModel, ScalarModel
from scripts.model_sizes import read_shape
from step1_sft.loss import sft_loss
from step3_rlhf import rewards
from step3_rlhf.ppo_trainer import PPO, PPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

# 8e9 parameters in 8 pieces of 1e9; the largest weight has 5e8. What follows is in units of 1e9 bytes.
EIGHT = Shape(8_000_000_000, 500_000_000, 32, 4096, 14336, 32, 8, 128, 128256)


def sums(items, place="gpu", phase="update", without=("buffers",)) -> float:
    return sum(getattr(i, place) for i in items if i.phase in (phase, None) and i.name not in without) / 1e9


# ---- by hand


@pytest.mark.parametrize(
    ("stage", "between", "backward", "update"),
    [
        # weights 16, a rank's part of fp32 weights and moments 12, sums of gradients in fp32 32, always
        (0, 60, 60, 60),
        (1, 60, 60, 60),
        # of the sums, a rank's part 4, gone between steps; in the update its largest gradient twice in fp32, 8 x 0.5
        (2, 28, 28 + 4, 28 + 4 + 4),
        # weights 2, optimizer 12, sums 4, always; in the update the sums once more
        (3, 18, 18, 18 + 4),
    ],
)
def test_training_states_by_hand(stage, between, backward, update):
    items = memory.trained_model(EIGHT, How(2, stage, ranks=8), ("train", "update"))
    assert sums(items, phase="") == between
    assert sums(items, phase="train") == backward
    assert sums(items, phase="update") == update


def test_in_fp32_nothing_is_converted_and_only_zero_0_has_no_second_copy():
    for stage, between in ((0, 32 + 64), (2, 32 + 12), (3, 4 + 4 + 12)):
        assert sums(memory.trained_model(EIGHT, How(4, stage, ranks=8), ("train", "update")), phase="") == between


def test_adapters_cost_what_is_trained_and_the_rest_only_its_weights():
    items = memory.trained_model(EIGHT, How(2, 3, ranks=8), ("train", "update"), trained=80_000_000)
    assert sums(items, phase="") == pytest.approx(2 + 0.01 * (4 + 12))
    assert sums(items, phase="update") == pytest.approx(2 + 0.01 * (4 + 12 + 4))


def test_offload_moves_the_optimizer_to_the_host_with_gradients():
    how = How(2, 3, ranks=16, ranks_per_node=8, offload_optimizer=True)
    items = memory.trained_model(EIGHT, how, ("train", "update"))
    assert sums(items, phase="update") == 1  # bf16 weights, a sixteenth
    assert sums(items, "host") == 8 * 0.5 * (12 + 4 + 4)  # of eight ranks
    items = memory.trained_model(EIGHT, dataclasses.replace(how, offload_param=True), ("train", "update"))
    assert sums(items, phase="update") == 0 and sums(items, "host") == 8 * 0.5 * (12 + 4 + 4 + 2)


def test_zero_3_buffers_are_deepspeeds_limits():
    """1e9 live weights, a bucket of 5e8 gradients, the largest gradient (5e8) and its copy, 2 bytes each; the bucket
    once more in fp32."""
    items = memory.trained_model(EIGHT, How(2, 3, ranks=8), ("train", "update"))
    assert sums(items, phase="train", without=("weights", "gradients", "optimizer")) == 2 + 1 + 2 + 2
    assert sums(items, phase="update", without=("weights", "gradients", "optimizer", "update")) == 1


def test_a_frozen_model_is_two_bytes_a_parameter_or_a_share_of_them():
    assert memory.frozen_model(EIGHT, How(2, 0, ranks=8)).gpu == 16e9
    assert memory.frozen_model(EIGHT, How(2, 3, ranks=8)).gpu == 2e9
    offloaded = memory.frozen_model(EIGHT, How(2, 3, ranks=8, ranks_per_node=4, offload_param=True))
    assert (offloaded.gpu, offloaded.host) == (0, 8e9)


def test_kv_cache_by_hand():
    """Keys and values, 32 layers, 8 heads of 128, 2 bytes: 131,072 bytes a token of Llama 3 8B."""
    assert memory.kv_cache(EIGHT, 2, 1, 1) == 131_072
    assert memory.kv_cache(EIGHT, 2, 64, 1024) == 64 * 1024 * 131_072


def test_peaks_are_sums_of_what_is_there_together():
    items = [
        memory.Item("a", None, 1, 5),
        memory.Item("b", "train", 2),
        memory.Item("b", "update", 3),
        memory.Item("c", "load", 0, 9),
    ]
    assert memory.phases(items) == ["load", "train", "update"]
    assert memory.peak(items, "gpu") == ("update", 4) and memory.peak(items, "host") == ("load", 14)
    assert memory.by_item(items, "gpu", ["train", "update"]) == {"a": [1, 1], "b": [2, 3]}


def test_the_rl_step_by_hand():
    """One layer of everything, fp32, two rows of 3 + 5 tokens: small enough to add up on paper."""
    tiny = Shape(1000, 100, 1, 10, 20, 2, 1, 5, 50)
    how, ref = (How(4, stage, ranks=2, ranks_per_node=2, checkpointing=True) for stage in (3, 0))
    items = memory.ppo(
        tiny, tiny, tiny, [tiny], how, how, ref, decode_rows=2, micro_rows=1, logit_rows=1, prompt=3, response=5
    )
    phases = memory.phases(items)
    table = {
        name: dict(zip(phases, sizes, strict=True)) for name, sizes in memory.by_item(items, "gpu", phases).items()
    }
    assert table["weights"]["rollout"] == 2 * 4 * 500 and table["frozen models"]["rollout"] == 2 * 4000
    assert table["optimizer"]["score"] == 2 * 12 * 500 and table["gradients"]["score"] == 2 * 4 * 500
    assert table["gathered copy"] == {phase: 4000 if phase == "rollout" else 0 for phase in phases}
    assert table["KV cache"]["rollout"] == 2 * 4 * 5 * 2 * 8
    # prompts: 6 tokens x (3 x 30 numbers + 3 of the mask); a step: keys and values on 2 heads, 28 bytes a logit
    assert table["activations"]["rollout"] == max(6 * 4 * (90 + 3), 2 * 4 * 2 * 8 * 10 + 2 * 50 * 28)
    assert table["logits"]["score"] == 50 * 6 * (2 * 4 + 8)  # of actor or reference, for 5 + 1 positions
    assert table["logits"]["actor"] == 50 * 6 * (12 + 8)
    layer = 4 * 4 * 20 + 10 * 4 * 10 + 4 * 8
    assert table["activations"]["critic"] == 8 * (4 * 10 + layer + 4 * (5 * 10 + 2 * 20))
    assert table["update"]["actor update"] == table["update"]["critic update"] == 4 * 500
    assert sums(items, "host", "save") * 1e9 == 4000 and sums(items, "host", "load") * 1e9 == 2 * 4000


# ---- against DeepSpeed's estimators


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_deepspeed_estimates_for_zero_3(nodes):
    """Theirs: weights 2, optimizer 12, fp32 gradients 4, and 4 bytes for the largest layer, which is in our buffers.
    Left out there: the gradients in bf16, which stay (2), and their flat copy in the update (2)."""
    _, gpu, layer = estimate_zero3_model_states_mem_needs(
        EIGHT.parameters, EIGHT.largest, num_gpus_per_node=8, num_nodes=nodes, cpu_offload=False
    )
    how = How(2, 3, ranks=8 * nodes, ranks_per_node=8)
    ours = sums(memory.trained_model(EIGHT, how, ("train", "update")))
    assert ours - (gpu - layer) / 1e9 == 4 * 8 / how.ranks


def test_what_deepspeed_estimates_for_zero_2():
    """Theirs: weights 2, then 18 in pieces: gradients 2 and 4, optimizer 12. Ours has the gradients' flat copy (2) too.
    Its host figure is for a model that every rank builds there in fp32 (4); ours are loaded in bf16 (2)."""
    host, gpu = estimate_zero2_model_states_mem_needs(
        EIGHT.parameters, num_gpus_per_node=8, cpu_offload=False, additional_buffer_factor=1
    )
    how = How(2, 2, ranks=8, ranks_per_node=8)
    assert sums(memory.trained_model(EIGHT, how, ("train", "update"))) - gpu / 1e9 == 2
    assert memory.loading((EIGHT, how)).host == host / 2


def test_what_deepspeed_estimates_with_offload():
    """ZeRO-3, theirs: 16 on the host, times 1.5 to be safe. Ours: 20, as counted, with the gradients in fp32 twice."""
    host, gpu, layer = estimate_zero3_model_states_mem_needs(
        EIGHT.parameters, EIGHT.largest, 8, cpu_offload=True, cpu_offload_params=False, additional_buffer_factor=1
    )
    how = How(2, 3, ranks=8, ranks_per_node=8, offload_optimizer=True)
    items = memory.trained_model(EIGHT, how, ("train", "update"))
    assert sums(items) == (gpu - layer) / 1e9
    assert sums(items, "host") - host / 1e9 == 4 * 8


# ---- engines, counted


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """(shape of a small Llama, what two ranks of every setting held)."""
    folder = tmp_path_factory.mktemp("engines")
    # Matrices above 100,000 elements, which ZeRO-3 shards; buckets so small that they do not count.
    config = LlamaConfig(
        hidden_size=384, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=1024
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    sizes = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 1000)
    (folder / "small_buckets.json").write_text(json.dumps({"zero_optimization": sizes}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    done = subprocess.run(
        [*torchrun, memory_worker.__file__, folder],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_shape(str(folder / "model"), False, False)[0], json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(memory_worker.SETTINGS)), ids=lambda i: str(memory_worker.SETTINGS[i]))
def test_engines_hold_what_the_arithmetic_says(engines, index, monkeypatch):
    shape, found = engines[0], engines[1][index]
    dtype, stage, offload, _ = memory_worker.SETTINGS[index]
    if stage or dtype == "bf16":  # stage 0 in fp32 has a bucket of its own, which no setting makes smaller
        monkeypatch.setattr(memory, "_REDUCE_BUCKET", 1000)
    how = How(2 if dtype == "bf16" else 4, stage, ranks=2, offload_optimizer=offload)
    items = memory.trained_model(shape, how, ("train", "update"), found["trained"])

    def said(phase, *without):
        return 1e9 * sum(sums(items, place, phase, without) for place in ("gpu", "host"))

    assert said("", *([] if offload else ["buffers"])) == pytest.approx(found["between"], rel=0.01)
    assert said("update", *([] if offload else ["buffers"])) == pytest.approx(found["update"], rel=0.02)
    # Buffers in the backward pass are limits, which a small model need not reach.
    assert said("train", "buffers") * 0.999 < found["backward"] < said("train") * 1.03


# ---- one forward, counted


def small(family=LlamaConfig, layers=2, **changes):
    sizes = {
        "hidden_size": 64, "intermediate_size": 352, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 50,
    }  # fmt: skip
    config = family(**(sizes | changes))
    c = config
    return config, Shape(
        0, 0, layers, c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, 16, c.vocab_size
    )


def build(config, dtype, attention, checkpointing):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(config, dtype=models.DTYPES[dtype], attn_implementation=attention)
    if checkpointing:
        hf.activation_checkpointing_enable({"use_reentrant": False})
    return LanguageModel(hf).train()


def some_tokens(rows=2, length=256):
    ids = torch.randint(0, 50, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, :3] = False
    return ids, mask


def saved_bytes(model) -> int:
    """What autograd keeps for the backward pass, each storage once, parameters aside."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*some_tokens(), keep=1)
    del output
    return sum(kept.values())


CASES = [(dtype, attention, c) for dtype in ("bf16", "fp32") for attention in ("sdpa", "eager") for c in (False, True)]


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize(("dtype", "attention", "checkpointing"), CASES)
def test_a_layer_keeps_what_the_formula_says(family, dtype, attention, checkpointing):
    """By the difference of four layers and two, in which what is around the layers goes out."""
    how = How(2 if dtype == "bf16" else 4, checkpointing=checkpointing, eager=attention == "eager")
    seen, said = [], []
    for layers in (2, 4):
        config, shape = small(family, layers)
        seen.append(saved_bytes(build(config, dtype, attention, checkpointing)))
        said.append(memory.activations_for_backward(shape, how, 2, 256))
    assert said[1] - said[0] == pytest.approx(seen[1] - seen[0], rel=0.01)


@pytest.mark.parametrize(("dtype", "attention", "checkpointing"), CASES)
def test_forward_and_backward_reach_the_formulas_peak(dtype, attention, checkpointing):
    how = How(2 if dtype == "bf16" else 4, checkpointing=checkpointing, eager=attention == "eager")
    config, shape = small()
    model = build(config, dtype, attention, checkpointing)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Meter() as training:
        model(*some_tokens(), keep=1).float().sum().backward()
    assert 0.99 < memory.activations_for_backward(shape, how, 2, 256) / training.peak < (1.3 if how.eager else 1.12)
    with Meter() as scoring, torch.no_grad():
        model(*some_tokens(), keep=1)
    assert 0.97 < memory.activations(shape, how, 2, 256) / scoring.peak < (1.4 if how.eager else 1.15)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_logits_reach_the_formulas_peak(dtype):
    rows, length, vocabulary = 6, 40, 40000
    shape, how = Shape(0, 0, 0, 4, 0, 0, 0, 0, vocabulary), How(2 if dtype == "bf16" else 4)
    hidden = torch.randn(rows, length, 4, dtype=models.DTYPES[dtype], requires_grad=True)
    head = torch.randn(vocabulary, 4, dtype=models.DTYPES[dtype])
    labels = torch.randint(0, vocabulary, (rows, length))
    with Meter() as meter:
        loss, _ = sft_loss(hidden @ head.T, labels)
        loss.backward()
    assert 1.0 < memory.logits_for_backward(shape, how, rows, length) / meter.peak < 1.25


def test_kv_cache_is_the_caches():
    config, shape = small()
    model = build(config, "bf16", "sdpa", False).hf.eval()
    ids, mask = some_tokens(3, 20)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask.long(), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert memory.kv_cache(shape, 2, 3, 20) == held


# ---- one RL step, counted


class Watch:
    """The most bytes alive in each phase of a step, since `start`."""

    def __init__(self):
        self.start, self.most = alive(), {}

    @contextlib.contextmanager
    def phase(self, name: str):
        held = alive() - self.start
        with Meter() as meter:
            yield
        self.most[name] = max(self.most.get(name, 0), held + meter.peak)

    def during(self, owner, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def watched(*args, **kwargs):
            with self.phase(name):
                return inner(*args, **kwargs)

        setattr(owner, method, watched)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 0), ("bf16", 3), ("fp32", 0)])
def test_an_rl_step_takes_at_most_what_is_said_and_little_less(dtype, stage, tmp_path, monkeypatch):
    device = one_rank.start()
    rows, prompt, response, micro, vocabulary = 16, 48, 48, 4, 4000
    config, shape = small(hidden_size=128, head_dim=32, vocab_size=vocabulary, layers=4, num_labels=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "actor")
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    monkeypatch.setattr(memory, "_REDUCE_BUCKET", 1000)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 1000}}))
    optim = engine.Optim(1e-4, "constant", 0.0, 0, 0.0, 0.9, 0.95, 1e-8, 1.0)
    options = engine.Engine(dtype, stage, False, False, True, str(tmp_path / "ds.json"))
    watch = Watch()

    def language_model(zero3):
        return LanguageModel(models.load_causal_lm(tmp_path / "actor", dtype, zero3=zero3))

    def scalar_model(zero3) -> ScalarModel:
        return models.load_scalar_model(tmp_path / "reward", dtype, zero3=zero3)[0]

    actor = engine.TrainedModel(language_model, optim, options, 10, device)
    critic = engine.TrainedModel(scalar_model, optim, options, 10, device)
    ref = engine.FrozenModel(language_model, dtype, stage, False, device)
    reward = engine.FrozenModel(scalar_model, dtype, stage, False, device)
    sampler = hybrid_engine.RolloutEngine(actor, "native", 0, device)
    sampling = generation.SamplingParams(response, 1.0, 1.0, 0, (3,), 0, 3)
    ppo = PPO(
        minibatch_size=8, per_device_train_batch_size=micro, rollout_forward_batch_size=0, num_ppo_epochs=1,
        num_generations=1, kl_coef=0.1, kl_estimator="k1", kl_target=None, kl_horizon=1.0, kl_loss_coef=0.0,
        kl_loss_estimator="k2", entropy_coef=0.0, cliprange=0.2, cliprange_high=None, dual_clip=None,
        cliprange_value=0.2, gamma=1.0, lam=0.95, whiten_rewards=False, whiten_advantages=True, score_clip=5.0,
        missing_eos_penalty=1.0, length_penalty=None, critic_warmup_steps=0, seed=1,
    )  # fmt: skip
    source = rewards.RewardFunction("none", Function("none", lambda completions, **_: [0.0] * len(completions)))
    trainer = PPOTrainer(
        actor, critic, ref, sampler, [source], [1.0], lambda ids: "", ppo, sampling, say=print, exact=False
    )
    prompts = [
        PromptExample([random.randrange(5, vocabulary) for _ in range(prompt)], {"prompt": [{"content": ""}]})
        for _ in range(rows)
    ]
    trainer.step(1, prompts)  # the optimizer's moments come to be in the first step
    watch.during(sampler, "generate", "rollout")
    watch.during(trainer, "old_quantities", "score")
    for model, name in ((actor, "actor"), (critic, "critic")):
        watch.during(model, "train_step", name)
    trainer.step(2, prompts)

    count = read_shape(str(tmp_path / "actor"), False, False)[0]
    scalar = read_shape(str(tmp_path / "reward"), True, False)[0]
    assert dataclasses.replace(count, parameters=0, largest=0, head_dim=16) == shape
    how = How(2 if dtype == "bf16" else 4, stage, checkpointing=True)
    items = memory.ppo(
        count, scalar, count, [scalar], how, how, how,
        decode_rows=rows, micro_rows=micro, logit_rows=micro, prompt=prompt, response=response,
    )  # fmt: skip
    said = {phase: memory.held(items, "gpu", phase) for phase in memory.phases(items)}
    said |= {name: max(said[name], said.get(f"{name} update", 0)) for name in ("actor", "critic")}
    for phase, seen in watch.most.items():
        assert 0.99 < said[phase] / seen < 1.25, (phase, said[phase], seen)
    assert reward.module is not None and set(watch.most) == {"rollout", "score", "actor", "critic"}
