"""One set of weights that both trains and generates: choosing the rollout back-end and switching to it.

`native` (default) decodes with `generation.generate`. Under ZeRO 0-2 it uses the training module itself; under ZeRO-3
it gathers every weight once per rollout phase into a plain copy, instead of once per layer and token, and frees the
copy afterwards. `hybrid` is DeepSpeed's hybrid engine, taken only where it runs and its greedy tokens equal native's.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import deepspeed  # noqa: I001  after common.distributed, which quiets it
import torch

from common import adapters, distributed
from common.engine import TrainedModel
from common.generation import Rollout, SamplingParams, check_sampling, generate, generate_with

# Weights gathered at once while a ZeRO-3 model is copied: what a rank holds besides the copy itself.
_GATHER_ELEMENTS = 200_000_000

# Prompts and new tokens of the check that compares the hybrid engine with the native loop.
_PARITY_PROMPTS, _PARITY_TOKENS = 4, 16


def hybrid_obstacle(model_class: str, has_adapter: bool, device: torch.device) -> str | None:
    """Why DeepSpeed's hybrid engine cannot run here, or None if it may.

    Args:
        model_class: the HF class, e.g. "LlamaForCausalLM".
        has_adapter: the model is trained by LoRA.
    """
    if device.type != "cuda":
        return "DeepSpeed's hybrid engine runs on CUDA only: its inference kernels have no CPU version"
    # The class names its injection policies look for (module_inject/replace_policy.py of DeepSpeed 0.19).
    supported = ("OPT", "GPT2LMHead", "GPTNeoX", "GPTJ", "GPTNeo", "Bloom", "Llama", "InternLM")
    if not model_class.startswith(supported):
        return f"DeepSpeed's hybrid engine has no policy for {model_class}"
    if has_adapter:
        return "DeepSpeed's hybrid engine knows its own kind of adapters only, not peft's"
    return None


def choose_backend(requested: str, model_class: str, has_adapter: bool, device: torch.device) -> tuple[str, str]:
    """The back-end to build for, and why, for people."""
    if requested == "native":
        return "native", "native decode loop"
    obstacle = hybrid_obstacle(model_class, has_adapter, device)
    return (
        ("native", f"native decode loop; {obstacle}")
        if obstacle
        else ("hybrid", "DeepSpeed's hybrid engine, to be checked")
    )


class RolloutEngine:
    """Generates with the current weights of a trained language model.

    Args:
        trained: the actor.
        backend: "native" or "hybrid"; the latter was built with `hybrid_engine_tokens` and is dropped for native when
            `check_parity` fails.
        batch_size: rows decoded at once per rank; 0 for all.

    Raises:
        UserError: the model cannot be sampled from.
    """

    def __init__(self, trained: TrainedModel, backend: str, batch_size: int, device: torch.device):
        self.trained, self.backend, self.batch_size, self.device = trained, backend, batch_size, device
        self._replica = _empty_copy(trained.module.hf, device) if trained.zero_stage == 3 else None
        with self.weights() as model:
            check_sampling(model, exact=trained.dtype == "fp32")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, step: int, rows: Sequence[int]
    ) -> Rollout:
        """Samples one response for each of this rank's prompts; ranks may finish at different times.

        A rank without prompts takes part in the gathering and returns an empty rollout.
        """
        if self.backend == "hybrid":
            return self._hybrid(prompts, params, step, rows)
        with self.weights() as model:
            if not prompts:
                return empty_rollout(self.device)
            return generate(model, prompts, params, step=step, rows=rows, batch_size=self.batch_size)

    @contextlib.contextmanager
    def weights(self) -> Iterator[torch.nn.Module]:
        """The HF model with all current weights on this rank, while in the block. A collective under ZeRO-3."""
        if self._replica is None:
            yield self.trained.module.hf
            return
        _fill(self._replica, self.trained.module.hf, self.device)
        try:
            yield self._replica
        finally:
            for parameter in self._replica.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)

    def check_parity(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams, say: Callable[[str], None]
    ) -> None:
        """Keeps the hybrid engine only if its greedy tokens equal the native loop's; says what was found."""
        if self.backend != "hybrid":
            return
        greedy = dataclasses.replace(params, greedy=True, max_new_tokens=min(_PARITY_TOKENS, params.max_new_tokens))
        prompts = list(itertools.islice(prompts, _PARITY_PROMPTS))
        rows = list(range(len(prompts)))
        with self.weights() as model:
            expected = generate(model, prompts, greedy, rows=rows)
        try:
            seen = self._hybrid(prompts, greedy, 0, rows)
            width = min(expected.mask.shape[1], seen.mask.shape[1])
            wrong = (expected.response[:, :width] != seen.response[:, :width]).any() or (
                expected.truncated != seen.truncated
            ).any()
            fault = "its greedy tokens differ from the native loop's" if wrong else None
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            fault = f"it failed: {type(error).__name__}: {error}"
        agreed = distributed.sum_over_ranks({"faults": float(fault is not None)}, self.device)["faults"] == 0
        if agreed:
            say(f"rollouts: DeepSpeed's hybrid engine; {len(prompts)} greedy responses equal the native loop's")
        else:
            self.backend = "native"
            say(f"rollouts: native; the hybrid engine was dropped since {fault or 'another rank found a fault'}")

    def _hybrid(self, prompts, params: SamplingParams, step: int, rows) -> Rollout:
        self.trained.engine.eval()
        try:
            return generate_with(self.trained.engine.generate, prompts, params, self.device, step=step, rows=rows)
        finally:
            self.trained.engine.train()


def empty_rollout(device: torch.device) -> Rollout:
    """A rollout of no rows, for a rank that has none."""
    ids = torch.zeros(0, 1, dtype=torch.long, device=device)
    mask = torch.zeros(0, 1, dtype=torch.bool, device=device)
    return Rollout(ids, mask, ids, mask, torch.zeros(0, 1, device=device), mask[:, 0])


def _empty_copy(sharded: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A model of the same class and configuration, not initialised, its weights without storage."""
    from transformers import initialization

    dtype = next(sharded.parameters()).dtype
    with initialization.no_init_weights(), torch.device(device):
        copy = type(sharded)._from_config(sharded.config, dtype=dtype)
    copy.tie_weights()
    adapters.add_like(copy, sharded)
    copy.eval().requires_grad_(False)
    for name, buffer in sharded.named_buffers():  # never sharded; some come with the weights, as a router's bias does
        copy.get_buffer(name).copy_(buffer)
    for parameter in copy.parameters():
        parameter.data = torch.empty(0, dtype=dtype, device=device)
    return copy


@torch.no_grad()
def _fill(copy: torch.nn.Module, sharded: torch.nn.Module, device: torch.device) -> None:
    """Gathers the shards, a bucket at a time, into the copy. Every rank walks the same buckets."""
    targets = dict(copy.named_parameters())
    sources = dict(sharded.named_parameters())
    assert targets.keys() == sources.keys(), "the rollout copy and the trained model have different weights"
    buckets, size = [[]], 0
    for name, source in sources.items():
        if buckets[-1] and size + source.ds_numel > _GATHER_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += source.ds_numel
    for bucket in buckets:
        with deepspeed.zero.GatheredParameters([sources[name] for name in bucket]):
            for name in bucket:
                targets[name].data = sources[name].data.clone()
