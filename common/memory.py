"""How much memory a stage takes, by item and by phase: arithmetic on sizes, nothing measured here but what
is free.

Legend: N parameters, t of them trained, P ranks, w bytes of a weight (2 in bf16 and fp16, 4 in fp32), L layers,
h hidden size, i width of the feed-forward part, V vocabulary, rows x length tokens of one forward.

Every row is taken at full length, so a run needs what is said here or less. What our engines hold was counted tensor by
tensor on CPU (tests/test_memory.py); the layers' formulas are exact for Llama and Qwen2 and 0.8 to 2 times the truth
for other families. What a GPU adds by itself (CUDA, NCCL, fragmentation) is not in here.
"""

import dataclasses
import os
from pathlib import Path

from common.ds_config import stage_inside

# DeepSpeed's own defaults, in elements: the gradients reduced at once, the gathered weights alive at once under ZeRO-3,
# and how much of a shard is converted to fp32 at once in an update.
_REDUCE_BUCKET, _LIVE_WEIGHTS, _SUB_GROUP = 5e8, 1e9, 1e9
# Ours: weights gathered at once while the rollout copy is filled (common/hybrid_engine.py).
_GATHER_BUCKET = 2e8

# Phases in the order of time. ALWAYS: from the first step to the last.
PHASES = ("load", "train", "update", "rollout", "score", "critic", "critic update", "actor", "actor update", "save")
ALWAYS = None


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one model. largest: elements of its largest single weight, nearly always an embedding."""

    parameters: int
    largest: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class How:
    """How a model is held. ranks_per_node share one host. eager: attention that writes its scores down."""

    weight_bytes: int
    zero_stage: int = 0
    ranks: int = 1
    ranks_per_node: int = 1
    offload_optimizer: bool = False
    offload_param: bool = False
    checkpointing: bool = False
    eager: bool = False


@dataclasses.dataclass(frozen=True)
class Item:
    """Bytes of one thing: on each GPU, and on each host. phase: when it is there; ALWAYS: in every phase."""

    name: str
    phase: str | None
    gpu: float
    host: float = 0.0


def phases(items: list[Item]) -> list[str]:
    """The phases that occur, in the order of time."""
    return [phase for phase in PHASES if any(item.phase == phase for item in items)]


def held(items: list[Item], place: str, phase: str) -> float:
    """Bytes on the "gpu" or the "host" in one phase, with what is always there."""
    return sum(getattr(item, place) for item in items if item.phase in (phase, ALWAYS))


def peak(items: list[Item], place: str) -> tuple[str, float]:
    """The phase in which most is held, and how much that is."""
    return max(((phase, held(items, place, phase)) for phase in phases(items)), key=lambda pair: pair[1])


def by_item(items: list[Item], place: str, some_phases: list[str]) -> dict[str, list[float]]:
    """Bytes of each item that takes any, one number for each of these phases."""
    names = dict.fromkeys(item.name for item in items if getattr(item, place))
    return {name: [held([i for i in items if i.name == name], place, p) for p in some_phases] for name in names}


# ---- models in their engines


def trained_model(shape: Shape, how: How, phases: tuple[str, str], trained: int | None = None) -> list[Item]:
    """A model with gradients and AdamW, as `engine.TrainedModel` holds it between and in its steps.

        bytes a parameter       ZeRO-0     1            2           3
        weights                 2          2            2           2/P
        optimizer               12/P       12/P         12/P        12/P    fp32 weights 4, two moments 8
        sums of gradients       4          4            4/P         4/P     ZeRO-2 drops them between steps
        update                                                      4/P     a copy of the sums

    In bf16, where ZeRO-0 runs as ZeRO-1 and gradients are summed in fp32. (fp16 sums in fp16: less between steps, up to
    4 bytes more in the update.) In fp32, where ZeRO-0 keeps no second copy of the weights:

        weights                 4          4            4           4/P
        optimizer               8          12/P         12/P        12/P
        gradients, backward     4          4 + 4/P      8/P         4/P     under ZeRO-3 they are always there
        gradients, update       4          4/P          4/P         4/P
        update                             4/P          4/P         4/P     gradients in one piece

    All but the weights is of the t trained parameters only. With offload the host holds the optimizer with gradients
    twice, and the update is there; under ZeRO-1 in bf16 the GPU keeps all gradients in both widths.

    Args:
        phases: names of its backward pass and of its update.
        trained: parameters that learn; all of them, if not given. Of adapters it is their own number.
    """
    w, (backward, update) = how.weight_bytes, phases
    is_half = w < 4
    stage = stage_inside(how.zero_stage, "bf16" if is_half else "fp32")
    whole = shape.parameters if trained is None else trained
    part, largest = whole / how.ranks, min(shape.largest, whole)
    optimizer = (8 + (4 if stage else 0)) * (part if stage else whole)
    items = [_weights(shape, how)]
    if how.offload_optimizer:
        # fp32, for the update, and as they arrive; in fp32 under ZeRO-2 also the sum of earlier micro-batches.
        as_arrived = 4 if stage == 3 else w + (w if stage == 2 and not is_half else 0)
        items.append(Item("optimizer", ALWAYS, 0, how.ranks_per_node * (optimizer + (4 + as_arrived) * part)))
        if stage < 3:
            sums = 4 * (whole if stage == 1 else part) if is_half else 0
            arriving = w * {1: whole, 2: 0 if is_half else part}[stage]
            items += [Item("gradients", backward, sums + arriving), Item("gradients", update, sums)]
            # The largest gradient on its way to the host, at both ends.
            items.append(Item("buffers", ALWAYS, w * shape.largest, how.ranks_per_node * w * shape.largest))
    else:
        items.append(Item("optimizer", ALWAYS, optimizer))
        if stage == 3 or (is_half and stage == 1):
            items.append(Item("gradients", ALWAYS, 4 * (part if stage == 3 else whole)))
        elif is_half:
            items += [Item("gradients", phase, 4 * part) for phase in phases]
        else:
            at_backward, at_update = {0: (whole, whole), 1: (whole + part, part), 2: (2 * part, part)}[stage]
            items += [Item("gradients", backward, w * at_backward), Item("gradients", update, w * at_update)]
        if stage == 3 or (stage and not is_half):
            items.append(Item("update", update, 4 * (min(part, _SUB_GROUP) if stage == 3 else part)))
    # Gradients on their way to the other ranks: a bucket, in fp32 beside it where it is not, and the largest one with
    # its copies.
    bucket = min(whole, _REDUCE_BUCKET)
    if not (is_half and stage == 1 and not how.offload_optimizer):  # whose sums are one piece already
        items.append(Item("buffers", ALWAYS if stage == 3 else backward, w * bucket))
        if is_half:
            items.append(Item("buffers", backward, 4 * bucket))
    copies = {1: 8, 2: 16, 3: 2 * w}[stage] if is_half else 2 * w
    items.append(Item("buffers", backward, copies * largest + gathered(shape, how)))
    if is_half and stage == 2 and not how.offload_optimizer:
        items.append(Item("update", update, 8 * largest))
    return items


def adapter_parameters(shape: Shape, rank: int) -> int:
    """Of LoRA on every linear layer of a block: rank x (inputs + outputs), for a gated feed-forward part."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return rank * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))


def checkpoint(shape: Shape, how: How, trained: int | None = None) -> float:
    """What a checkpoint of this engine takes on disk, over all ranks."""
    optimizer = 12 if how.weight_bytes < 4 else 8
    return _whole(shape, how) + optimizer * (shape.parameters if trained is None else trained)


def frozen_model(shape: Shape, how: How) -> Item:
    """A model that only answers: whole on each rank, or a share of it under ZeRO-3."""
    return dataclasses.replace(_weights(shape, how), name="frozen models")


def gathered(shape: Shape, how: How) -> float:
    """Whole weights alive at once while a ZeRO-3 model runs; nothing for one that is whole already."""
    return how.weight_bytes * min(shape.parameters, _LIVE_WEIGHTS) if how.zero_stage == 3 else 0.0


def loading(*models: tuple[Shape, How]) -> Item:
    """On the host, while the largest model is read: one copy under ZeRO-3, where one rank reads, else one a rank."""
    copies = [(1 if how.zero_stage == 3 else how.ranks_per_node) * _whole(shape, how) for shape, how in models]
    return Item("loading", "load", 0, max(copies))


def saving(*models: tuple[Shape, How]) -> Item:
    """On the host of the first rank, while the largest model is written: all of it."""
    return Item("saving", "save", 0, max(_whole(shape, how) for shape, how in models))


def _whole(shape: Shape, how: How) -> float:
    return how.weight_bytes * shape.parameters


def _weights(shape: Shape, how: How) -> Item:
    share = how.weight_bytes * shape.parameters / (how.ranks if how.zero_stage == 3 else 1)
    if how.offload_param:
        return Item("weights", ALWAYS, 0, share * how.ranks_per_node)
    return Item("weights", ALWAYS, share)


# ---- one forward


def kv_cache(shape: Shape, weight_bytes: int, rows: int, length: int) -> float:
    """Keys and values of every layer for rows x length tokens."""
    return 2 * weight_bytes * shape.layers * shape.kv_heads * shape.head_dim * rows * length


def activations_for_backward(shape: Shape, how: How, rows: int, length: int) -> float:
    """What forward and backward hold between them, the vocabulary aside.

    A layer keeps 4 tensors as wide as its feed-forward part and about 12 as wide as the hidden state (norms run in fp32
    and keep that copy). With checkpointing it keeps its input, w h a token, and only the layer at work has the rest.
    """
    w, h, i = how.weight_bytes, shape.hidden, shape.intermediate
    attention = ((4 + (w if w < 4 else 0)) * shape.heads if how.eager else w) * length
    layer = 4 * w * i + (12 * w if w < 4 else 10 * w) * h + attention
    layers = shape.layers * w * h + layer if how.checkpointing else shape.layers * layer
    at_work = w * (5 * h + 2 * i + (shape.heads * length if how.eager else 0))
    return rows * length * (layers + at_work)


def activations(shape: Shape, how: How, rows: int, length: int) -> float:
    """What a forward without gradients holds at its widest: one layer's feed-forward part, or its attention."""
    w = how.weight_bytes
    attention = 10 * shape.heads * length if how.eager else w * length
    return rows * length * (w * 3 * (shape.intermediate + shape.hidden) + attention)


def logits_for_backward(shape: Shape, how: How, rows: int, length: int) -> float:
    """Logits with their log-softmax in fp32; in the backward pass three of their size; and the row at work."""
    w = how.weight_bytes
    return shape.vocabulary * length * (rows * max(w + 4, 3 * w) + 8)


def logits(shape: Shape, how: How, rows: int, length: int, copies: int = 1) -> float:
    """Logits without gradients, `copies` of them alive at once, and the fp32 work on one row."""
    return shape.vocabulary * length * (copies * rows * how.weight_bytes + 8)


def sampling(shape: Shape, how: How, rows: int, prompt: int, response: int) -> list[Item]:
    """Decoding `rows` at once: the cache, and the wider of reading the prompts and of one decoding step."""
    w, length = how.weight_bytes, prompt + response
    # Grouped keys and values are spread over all heads where there is a mask; the distribution is summed in fp64.
    spread = 2 * w * rows * length * shape.heads * shape.head_dim if shape.kv_heads < shape.heads else 0
    step = spread + rows * shape.vocabulary * (w + 24)
    return [
        Item("KV cache", "rollout", kv_cache(shape, w, rows, length)),
        Item("activations", "rollout", max(step, activations(shape, how, rows, prompt))),
    ]


# ---- whole stages


def supervised(
    shape: Shape, how: How, *, rows: int, length: int, vocabulary: bool, trained: int | None = None
) -> list[Item]:
    """Steps 1 and 2: `rows` sequences in one forward; with `vocabulary`, logits at every token of them."""
    items = trained_model(shape, how, ("train", "update"), trained)
    items.append(Item("activations", "train", activations_for_backward(shape, how, rows, length)))
    if vocabulary:
        items.append(Item("logits", "train", logits_for_backward(shape, how, rows, length)))
    return [*items, loading((shape, how)), saving((shape, how))]


def ppo(
    actor: Shape,
    critic: Shape,
    ref: Shape | None,
    rewards: list[Shape],
    actor_how: How,
    critic_how: How,
    frozen_how: How,
    *,
    decode_rows: int,
    micro_rows: float,
    logit_rows: float,
    prompt: int,
    response: int,
    divides_logits: bool = False,
    trained: int | None = None,
    critic_trained: int | None = None,
) -> list[Item]:
    """Step 3: rollout, score, then the updates of critic and actor.

    Args:
        ref: None if there is none, or if it is the actor without its adapter.
        decode_rows: responses decoded, and scored, at once on one rank; micro_rows: in one training forward.
        logit_rows: the same, with prompts so short that as many responses as can be share a forward.
        divides_logits: the temperature is not 1, so logits are there twice for a moment.
        trained, critic_trained: parameters that learn; all of them, if not given.
    """
    frozen = [*rewards, *([ref] if ref else [])]
    length = prompt + response
    items = trained_model(actor, actor_how, ("actor", "actor update"), trained)
    items += trained_model(critic, critic_how, ("critic", "critic update"), critic_trained)
    items += [frozen_model(shape, frozen_how) for shape in frozen]

    if actor_how.zero_stage == 3:
        items.append(Item("gathered copy", "rollout", _whole(actor, actor_how)))
        bucket = max(actor.largest, min(actor.parameters, _GATHER_BUCKET))
        items.append(Item("buffers", "rollout", actor_how.weight_bytes * bucket))
    items += sampling(actor, actor_how, decode_rows, prompt, response)

    copies = 1 + divides_logits  # of the actor, then of the reference
    items.append(Item("logits", "score", logits(actor, actor_how, decode_rows, response + 1, copies)))
    widest = max([actor, critic, *frozen], key=lambda shape: shape.intermediate + shape.hidden)
    items.append(Item("activations", "score", activations(widest, actor_how, decode_rows, length)))
    whole = [gathered(actor, actor_how), gathered(critic, critic_how), *(gathered(s, frozen_how) for s in frozen)]
    items.append(Item("buffers", "score", max(whole)))

    items.append(Item("activations", "critic", activations_for_backward(critic, critic_how, micro_rows, length)))
    items.append(Item("activations", "actor", activations_for_backward(actor, actor_how, micro_rows, length)))
    items.append(Item("logits", "actor", logits_for_backward(actor, actor_how, logit_rows, response + 1)))
    learners = (actor, actor_how), (critic, critic_how)
    return [*items, loading(*learners, *((shape, frozen_how) for shape in frozen)), saving(*learners)]


def evaluation(models: list[Shape], judges: list[Shape], how: How, *, rows: int, prompt: int, response: int):
    """scripts/evaluate.py: one process; the judges and one model at a time, whole."""
    largest = max(models, key=lambda shape: shape.parameters)
    items = [Item("weights", ALWAYS, _whole(largest, how)), *(frozen_model(shape, how) for shape in judges)]
    items += sampling(largest, how, rows, prompt, response)
    # Before and after the temperature.
    items.append(Item("logits", "score", logits(largest, how, rows, response + 1, copies=2)))
    items.append(Item("activations", "score", activations(largest, how, rows, prompt + response)))
    return [*items, loading(*((shape, how) for shape in [*models, *judges]))]


def free_host_memory() -> float:
    """What the kernel calls available, within the limit of a container if there is one; without a kernel that says so,
    all there is."""
    seen = Path("/proc/meminfo")
    if not seen.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":") for line in seen.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int(limit.with_name("memory.current").read_text())
        stat = dict(line.split() for line in limit.with_name("memory.stat").read_text().splitlines())
        used -= int(stat.get("inactive_file", 0))  # files read or written lately, given up when memory is wanted
        available = min(available, int(limit.read_text()) - used)
    return available
