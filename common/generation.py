"""Sampling responses: the decode loop, its records, and noise that is a function of (seed, step, row, position).

Legend: B rows, Q padded prompt length, R response length, V vocabulary. Prompts are left-padded, responses
right-padded. Works with any HF causal language model that takes a key-value cache.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import DynamicCache, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicLayer

from common.batches import pad_left
from common.errors import UserError
from common.tensor_ops import position_ids_of

# Finished rows are dropped from the batch once they make up this share of it; copying the cache costs about one step.
_COMPACT_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample. `top_p` 1 and `top_k` 0 leave the distribution whole; `greedy` ignores temperature and noise."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]
    pad_id: int
    seed: int
    greedy: bool = False


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Sampled responses. `mask` is True for every sampled token, the stop token included.

    query (B, Q) long, query_mask (B, Q) bool; response (B, R) long, mask (B, R) bool; rollout_logprobs (B, R) fp32, of
    logits / temperature over the whole vocabulary, recorded while sampling, 0 outside the mask; truncated (B,) bool:
    cut by length before a stop token.
    """

    query: torch.Tensor
    query_mask: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    truncated: torch.Tensor


@torch.no_grad()
def check_sampling(model: torch.nn.Module, exact: bool) -> None:
    """Refuses a model that `generate` would sample wrongly or not at all, by trying it on a few tokens.

    Rows of different length are read together, and go on repeated, reordered and dropped; each has to say what it says
    alone, read at once and without a cache.

    Args:
        exact: the model computes in fp32; otherwise rounding is given some room.

    Raises:
        UserError: names the model's class and what is wrong.
    """
    name = f"{type(model).__name__} cannot be sampled from here"
    if "cache" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name}: it takes no key-value cache; wanted a causal language model that does")
    device, vocabulary = model.device, model.config.get_text_config().vocab_size
    texts = [[vocabulary * part // 11 for part in parts] for parts in ((1, 2, 3, 4, 5), (6, 7))]
    was_training = model.training
    model.eval()
    try:
        ids, mask = (x.to(device) for x in pad_left(texts, 0))
        reader = Reader(model, 7)
        reader(ids, mask.long(), position_ids_of(mask))
        for rows, part in (([1, 0, 1], 8), ([2, 1], 9)):
            texts = [[*texts[row], vocabulary * part // 11] for row in rows]
            ids, mask = (x.to(device) for x in pad_left(texts, 0))
            reader.keep(torch.tensor(rows, device=device))
            seen = reader(ids[:, -1:], mask.long(), position_ids_of(mask)[:, -1:])
        alone = [model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0, -1] for text in texts]
    except Exception as error:  # whatever a family raises that keeps its past in another way
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{name}: decoding with its cache ends in {type(error).__name__}: {why}") from error
    finally:
        model.train(was_training)
    wanted = torch.stack(alone).float().to(seen.device)
    moved, spread = (seen.float() - wanted).abs().mean(), wanted.std(correction=0)
    if not moved <= spread * (1e-3 if exact else 0.1):
        raise UserError(
            f"{name}: what it says token by token with its cache differs by {float(moved / spread):.1%} of the spread "
            "from what it says to the whole text; wanted a causal language model whose cache is exact"
        )


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    step: int = 0,
    rows: Sequence[int] | None = None,
    batch_size: int = 0,
) -> Rollout:
    """Samples one response for each prompt with the native decode loop.

    Args:
        model: a HF causal language model that `check_sampling` lets pass, whole on one device; its mode is restored.
        prompts: token ids, none empty. Equal prompts share one prefill.
        step, rows: with `params.seed`, the key of the noise; `rows` are global row numbers (default 0, 1, ...). A row's
            noise depends on nothing else. On a CPU in fp32 nor do its tokens: not on the other rows, their order,
            padding or the batch size. A GPU in 16 bits rounds by the shape of the batch, and a near tie may then fall
            the other way.
        batch_size: rows decoded at once; 0 for all.
    """
    device = next(model.parameters()).device
    rows = list(range(len(prompts)) if rows is None else rows)
    noise = uniform_noise(params.seed, step, rows, params.max_new_tokens).to(device)
    # Rows of similar length share a batch, so little of it is padding.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), tuple(prompts[i])))
    size = batch_size or len(prompts)
    was_training = model.training
    model.eval()
    try:
        parts = []
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            parts.append(_decode(model, [prompts[i] for i in batch], noise[batch], params))
    finally:
        model.train(was_training)
    back = torch.tensor(order, device=device).argsort()
    response = _join([p[0] for p in parts], params.pad_id)[back]
    mask = _join([p[1] for p in parts], False)[back]
    logprobs = _join([p[2] for p in parts], 0.0)[back]
    truncated = torch.cat([p[3] for p in parts])[back]
    query, query_mask = (x.to(device) for x in pad_left(prompts, params.pad_id))
    return Rollout(query, query_mask, response, mask, logprobs, truncated)


def generate_with(
    hf_generate: Callable[..., object],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    device: torch.device,
    *,
    step: int = 0,
    rows: Sequence[int] | None = None,
) -> Rollout:
    """The same samples through anything with the signature of HF `generate`: DeepSpeed's hybrid engine, or HF.

    The choice of each token is made by a logits processor with our noise, so every back-end draws the same tokens.
    """
    rows = list(range(len(prompts)) if rows is None else rows)
    query, query_mask = (x.to(device) for x in pad_left(prompts, params.pad_id))
    picker = _Picker(params, uniform_noise(params.seed, step, rows, params.max_new_tokens).to(device), query.shape[1])
    tokens = hf_generate(
        query,
        attention_mask=query_mask.long(),
        max_new_tokens=params.max_new_tokens,
        do_sample=False,
        eos_token_id=list(params.stop_ids),
        pad_token_id=params.pad_id,
        logits_processor=LogitsProcessorList([picker]),
    )
    response = tokens[:, query.shape[1] :]
    mask, truncated = mask_of(response, params.stop_ids)
    logprobs = torch.stack(picker.logprobs, 1) if picker.logprobs else torch.zeros(response.shape, device=device)
    return Rollout(query, query_mask, response.where(mask, params.pad_id), mask, logprobs.where(mask, 0.0), truncated)


def uniform_noise(seed: int, step: int, rows: Sequence[int], length: int) -> torch.Tensor:
    """Uniform numbers in [0, 1), (rows, length) fp64: a counter-based generator (Philox) keyed by seed, step and row.

    The first n of a row are the same whatever `length` is.
    """
    draws = [np.random.Generator(np.random.Philox(key=(seed % 2**64, step), counter=(0, 0, 0, row))) for row in rows]
    return torch.from_numpy(np.stack([draw.random(length) for draw in draws])) if draws else torch.zeros(0, length)


def choose(logits: torch.Tensor, noise: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks one token a row by inverting the distribution function at `noise`.

    Args:
        logits: (B, V).
        noise: (B,) uniform in [0, 1).

    Returns:
        tokens (B,) and their log-probs (B,) fp32 under the whole (untruncated) distribution at `params.temperature`.
    """
    logprobs = torch.log_softmax(logits.float() / params.temperature, -1)
    if params.greedy:
        tokens = logits.argmax(-1)
    else:
        is_whole = params.top_p >= 1 and params.top_k == 0
        kept = logprobs.exp() if is_whole else torch.softmax(_truncate(logprobs, params.top_k, params.top_p), -1)
        # fp64: in fp32 a running sum over a large vocabulary swallows rare tokens.
        cumulative = kept.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # Strictly below the total, also where the product rounds up to it: what lies beyond has no probability.
        target = torch.minimum(noise.to(cumulative)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        # The clamp is for NaN logits only: their log-prob is NaN too, and the trainer stops on it.
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def mask_of(response: torch.Tensor, stop_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """True up to and including the first stop token, (B, R) bool; and which rows have none, (B,) bool."""
    stops = torch.isin(response, torch.tensor(stop_ids, device=response.device, dtype=response.dtype))
    return stops.cumsum(1) - stops.long() == 0, ~stops.any(1)


class _Picker(LogitsProcessor):
    """Turns greedy HF generation into our sampling: leaves only the chosen token possible, and keeps its log-prob."""

    def __init__(self, params: SamplingParams, noise: torch.Tensor, query_length: int):
        self.params, self.noise, self.query_length = params, noise, query_length
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens, logprobs = choose(scores, self.noise[:, input_ids.shape[1] - self.query_length], self.params)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer in one block, written in place: no concatenation of the whole past at each token."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def _cache_for(model: torch.nn.Module, capacity: int) -> Cache:
    """A preallocated cache where every layer keeps the whole past; HF's own where one slides or is recurrent."""
    cache = DynamicCache(config=model.config)
    if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers):
        return Cache(layers=[_PreallocatedLayer(capacity) for _ in cache.layers])
    return cache


class Reader:
    """A causal language model with the keys, values and states of what it has read: it goes on from there.

    Args:
        capacity: tokens a row can have at most.
    """

    def __init__(self, model: torch.nn.Module, capacity: int):
        self.model, self.cache = model, _cache_for(model, capacity)
        self.gives_mask, self.gives_it_later = True, _masks_each_token(model)

    def __call__(self, ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last position, (B, V).

        Args:
            ids: (B, n) the next tokens of each row.
            attention_mask: (B, all tokens read so far and these).
            position_ids: (B, n).
        """
        output = self.model(
            input_ids=ids,
            attention_mask=attention_mask if self.gives_mask else None,
            position_ids=position_ids,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.gives_mask = self.gives_it_later
        return output.logits[:, -1]

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows, in this order; a row may be named more than once."""
        # Not `batch_select_indices`: recurrent layers lack it, or have one that leaves their states as they are.
        self.cache.reorder_cache(rows)


def _masks_each_token(model: torch.nn.Module) -> bool:
    """Whether the attention mask is given with each new token too, as the model's own generation would have it.

    Recurrent models read every column of it as a token of this forward.
    """
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    if prepare in (None, GenerationMixin.prepare_inputs_for_generation):
        return True
    ids = torch.ones(1, 2, dtype=torch.long)
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=1, attention_mask=ids, use_cache=True, is_first_iteration=False
    )
    return inputs.get("attention_mask") is not None


def _decode(model, prompts: list, noise: torch.Tensor, params: SamplingParams):
    """Prefill and decode of one batch. Returns response, mask, logprobs (rows, steps run) and truncated (rows,)."""
    device, limit = noise.device, params.max_new_tokens
    unique = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    ids, prompt_mask = (x.to(device) for x in pad_left(unique, params.pad_id))
    width = ids.shape[1]
    reader = Reader(model, width + limit)
    logits = reader(ids, prompt_mask.long(), position_ids_of(prompt_mask))
    if len(unique) < len(prompts):
        index = {prompt: i for i, prompt in enumerate(unique)}
        expand = torch.tensor([index[tuple(prompt)] for prompt in prompts], device=device)
        reader.keep(expand)
        logits, prompt_mask = logits[expand], prompt_mask[expand]

    rows = len(prompts)
    response = torch.full((rows, limit), params.pad_id, device=device)
    logprobs = torch.zeros(rows, limit, device=device)
    lengths = torch.full((rows,), limit, device=device)
    truncated = torch.ones(rows, dtype=torch.bool, device=device)
    stop_ids = torch.tensor(params.stop_ids, device=device)
    # What is still being decoded: its row in the batch, its attention mask, its next position, whether it has stopped.
    alive = torch.arange(rows, device=device)
    attention = torch.ones(rows, width + limit, dtype=torch.long, device=device)
    attention[:, :width] = prompt_mask
    position = prompt_mask.sum(1)
    stopped = torch.zeros(rows, dtype=torch.bool, device=device)
    for t in range(limit):
        tokens, logprob = choose(logits, noise[alive, t], params)
        response[alive, t] = tokens  # what a stopped row goes on to sample is masked below
        logprobs[alive, t] = logprob
        stops = torch.isin(tokens, stop_ids) & ~stopped
        lengths[alive[stops]] = t + 1
        truncated[alive[stops]] = False
        stopped = stopped | stops
        num_stopped = int(stopped.sum())
        if num_stopped == len(alive) or t == limit - 1:
            break
        if num_stopped >= _COMPACT_SHARE * len(alive):
            keep = (~stopped).nonzero().squeeze(1)
            reader.keep(keep)
            alive, attention, position, tokens, stopped = (
                x[keep] for x in (alive, attention, position, tokens, stopped)
            )
        logits = reader(tokens[:, None], attention[:, : width + t + 1], position[:, None])
        position = position + 1
    mask = torch.arange(t + 1, device=device) < lengths[:, None]
    return response[:, : t + 1].where(mask, params.pad_id), mask, logprobs[:, : t + 1].where(mask, 0.0), truncated


def _truncate(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """-inf outside the `top_k` most likely tokens (0: all) and outside the smallest set that holds `top_p` (1: all)."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        before = torch.softmax(ordered, -1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter(-1, index, ordered)
    return logits


def _join(parts: list[torch.Tensor], fill) -> torch.Tensor:
    """Stacks (rows, steps) parts whose numbers of steps differ."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts])
