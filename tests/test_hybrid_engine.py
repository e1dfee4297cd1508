"""Choosing the rollout back-end: DeepSpeed's hybrid engine only where it can run and draws the native loop's tokens."""

from types import SimpleNamespace

import pytest
import torch
from small_models import save_llama

from common import hybrid_engine, models
from common.generation import SamplingParams, generate

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PARAMS = SamplingParams(8, 1.0, 1.0, 0, (2,), 3, 1)
PROMPTS = [[10, 11, 12], [20], [30, 31]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.load_causal_lm(save_llama(tmp_path_factory.mktemp("model")))


class FakeEngine:
    """What a hybrid engine offers, over a plain model's own generate."""

    def __init__(self, generate):
        self.generate, self.modes = generate, []

    def eval(self):
        self.modes.append("eval")

    def train(self):
        self.modes.append("train")


def rollout_engine(model, engine_generate) -> hybrid_engine.RolloutEngine:
    engine, module = FakeEngine(engine_generate), SimpleNamespace(hf=model)
    trained = SimpleNamespace(module=module, zero_stage=0, dtype="fp32", engine=engine)
    return hybrid_engine.RolloutEngine(trained, "hybrid", 0, CPU)


def test_native_is_taken_as_asked():
    assert hybrid_engine.choose_backend("native", "LlamaForCausalLM", False, CUDA)[0] == "native"


@pytest.mark.parametrize(
    ("device", "model_class", "has_adapter", "backend", "reason"),
    [
        (CPU, "LlamaForCausalLM", False, "native", "CUDA only"),
        (CUDA, "Qwen3ForCausalLM", False, "native", "no policy for Qwen3ForCausalLM"),
        (CUDA, "LlamaForCausalLM", False, "hybrid", "to be checked"),
        (CUDA, "LlamaForCausalLM", True, "native", "adapters"),
        (CUDA, "OPTForCausalLM", False, "hybrid", "to be checked"),
    ],
)
def test_the_capability_check_says_why(device, model_class, has_adapter, backend, reason):
    chosen, why = hybrid_engine.choose_backend("hybrid", model_class, has_adapter, device)
    assert chosen == backend and reason in why


def test_an_engine_that_draws_the_same_tokens_is_kept(model):
    said = []
    engine = rollout_engine(model, model.generate)
    engine.check_parity(PROMPTS, PARAMS, said.append)
    assert engine.backend == "hybrid" and "equal the native loop's" in said[0]
    sampled = engine.generate(PROMPTS, PARAMS, 3, [0, 1, 2])
    native = generate(model, PROMPTS, PARAMS, step=3)
    width = native.mask.shape[1]
    assert torch.equal(sampled.response[:, :width], native.response)
    assert engine.trained.engine.modes[-2:] == ["eval", "train"]  # back in training mode


def test_an_engine_that_draws_other_tokens_is_dropped(model):
    def wrong(ids, **kwargs):
        tokens = model.generate(ids, **kwargs)
        tokens[1, ids.shape[1]] = (tokens[1, ids.shape[1]] + 1) % 300
        return tokens

    said = []
    engine = rollout_engine(model, wrong)
    engine.check_parity(PROMPTS, PARAMS, said.append)
    assert engine.backend == "native" and "greedy tokens differ" in said[0]


def test_an_engine_that_fails_is_dropped(model):
    def fails(ids, **kwargs):
        raise RuntimeError("no kernel image is available")

    said = []
    engine = rollout_engine(model, fails)
    engine.check_parity(PROMPTS, PARAMS, said.append)
    assert engine.backend == "native" and "no kernel image" in said[0]
    assert engine.generate(PROMPTS, PARAMS, 1, [0, 1, 2]).mask.any()
