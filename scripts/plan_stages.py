"""What one command of a recipe takes, from its flags: memory by item and phase, disk, seconds. For scripts/plan.py."""

import dataclasses
from pathlib import Path

from common import memory
from common.functions import is_function
from common.memory import How, Item, Shape

GIB = 2**30
# Rules of thumb for what a process takes on the host.
PROCESS_WITH_GPU, PROCESS_ON_CPU = 3 * GIB, 0.7 * GIB


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is there. gpu: bytes of one, None where ranks run on the CPU; host: free bytes of one machine."""

    ranks: int
    ranks_per_node: int
    gpu: float | None
    host: float


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one command takes. seconds: of one step; steps: None where the data decide.

    disk: of the finished folder; checkpoints: beside it while it runs, gone when it is finished.
    """

    name: str
    items: list[Item]
    folder: Path
    disk: float
    seconds: float
    steps: int | None
    checkpoints: float = 0.0


def plan(name: str, command, machine: Machine, lineage, args) -> Stage:
    """Memory, disk and time of one command. `lineage`: where its models come from (scripts/model_sizes.py)."""
    is_half = command.dtype in ("bf16", "fp16") or (command.dtype == "auto" and machine.gpu is not None)

    def shape(path: str, scalar: bool = False) -> Shape:
        return lineage.shape(path, scalar, command.trust_remote_code)

    def how(zero_stage: int = 0, offload_optimizer: bool = False, offload_param: bool = False) -> How:
        return How(
            weight_bytes=2 if is_half else 4,
            zero_stage=zero_stage,
            ranks=machine.ranks,
            ranks_per_node=machine.ranks_per_node,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            checkpointing=getattr(command, "gradient_checkpointing", False),
            eager=command.attn_implementation == "eager",
        )

    planner = {"rlhf": plan_rlhf, "evaluation": plan_evaluation}.get(name, plan_supervised)
    stage = planner(name, command, machine, shape, how, args)
    # What every process needs; and without GPUs, what would be on them is on the host.
    processes = 1 if name == "evaluation" else machine.ranks_per_node
    on_cpu = machine.gpu is None
    items = [dataclasses.replace(i, host=i.host + processes * i.gpu * on_cpu) for i in stage.items]
    items.append(Item("processes", memory.ALWAYS, 0, processes * (PROCESS_ON_CPU if on_cpu else PROCESS_WITH_GPU)))
    return dataclasses.replace(stage, items=items)


def plan_supervised(name: str, command, machine: Machine, shape, how, args) -> Stage:
    is_reward = name == "reward"
    model = shape(command.model_name_or_path, is_reward)
    held = how(command.zero_stage, command.offload_optimizer, command.offload_param)
    rows = command.per_device_train_batch_size * (1 + is_reward)  # a pair is two rows
    own_rows = rows * command.gradient_accumulation_steps
    tokens = own_rows * machine.ranks * command.max_length
    if command.max_tokens_per_micro_batch:  # as many long rows as it holds; an example that alone has more goes alone
        longest = command.max_tokens_per_micro_batch / command.max_length
        rows = min(own_rows * machine.ranks, max(1 + is_reward, longest))
    flops = training_passes(held) * forward_flops(model, tokens, command.max_length)
    trained = trained_parameters(model, command.lora_r)
    return Stage(
        name=name,
        items=memory.supervised(
            model, held, rows=rows, length=command.max_length, vocabulary=not is_reward, trained=trained
        ),
        folder=Path(command.output_dir),
        disk=held.weight_bytes * model.parameters,
        seconds=flops / (machine.ranks * args.tflops * 1e12),
        steps=command.max_steps or None,
        checkpoints=checkpoints(command, memory.checkpoint(model, held, trained)),
    )


def plan_rlhf(name: str, command, machine: Machine, shape, how, args) -> Stage:
    actor, critic = shape(command.actor), shape(command.critic, True)
    needs_ref = (command.kl_coef != 0 or command.kl_loss_coef != 0) and not (command.lora_r and not command.ref)
    ref = shape(command.ref or command.actor) if needs_ref else None
    rewards = [shape(spec, True) for spec in command.reward or [command.critic] if not is_function(spec)]
    critic_stage = command.zero_stage if command.critic_zero_stage is None else command.critic_zero_stage
    actor_how = how(command.zero_stage, command.offload_optimizer, command.offload_param)
    critic_how = dataclasses.replace(actor_how, zero_stage=critic_stage)
    trained = trained_parameters(actor, command.lora_r)
    critic_lora_r = command.lora_r if command.critic_lora_r is None else command.critic_lora_r
    critic_trained = trained_parameters(critic, critic_lora_r)
    own_rows = -(-command.rollout_batch_size // machine.ranks)
    decode_rows = min(own_rows, command.rollout_forward_batch_size or own_rows)
    micro_rows = logit_rows = min(command.per_device_train_batch_size, -(-command.minibatch_size // machine.ranks))
    if tokens := command.max_tokens_per_micro_batch:
        length = command.max_prompt_length + command.max_completion_length
        micro_rows, logit_rows = (
            min(command.minibatch_size, max(1, tokens / width)) for width in (length, command.max_completion_length + 1)
        )
    items = memory.ppo(
        actor,
        critic,
        ref,
        rewards,
        actor_how,
        critic_how,
        how(command.frozen_zero_stage, offload_param=command.offload_frozen),
        decode_rows=decode_rows,
        micro_rows=micro_rows,
        logit_rows=logit_rows,
        prompt=command.max_prompt_length,
        response=command.max_completion_length,
        divides_logits=command.temperature != 1,
        trained=trained,
        critic_trained=critic_trained,
    )
    one = memory.checkpoint(actor, actor_how, trained) + memory.checkpoint(critic, critic_how, critic_trained)
    length = command.max_prompt_length + command.max_completion_length
    tokens = command.rollout_batch_size * length
    scorers, learners = [actor, critic, *rewards, *([ref] if ref else [])], [actor, critic]
    passes = command.num_ppo_epochs * training_passes(actor_how)
    flops = sum(forward_flops(model, tokens, length) for model in scorers + passes * learners)
    decoding = command.max_completion_length * -(-own_rows // decode_rows) * args.decode_ms / 1000
    return Stage(
        name=name,
        items=items,
        folder=Path(command.output_dir),
        disk=actor_how.weight_bytes * (actor.parameters + critic.parameters),
        seconds=decoding + flops / (machine.ranks * args.tflops * 1e12),
        steps=command.max_steps or None,
        checkpoints=checkpoints(command, one),
    )


def plan_evaluation(name: str, command, machine: Machine, shape, how, args) -> Stage:
    judges = [shape(path, True) for path in (command.judge, command.reward) if path and not is_function(path)]
    judges += [shape(command.ref)] if command.ref else []
    rows = min(command.batch_size, command.num_samples)
    items = memory.evaluation(
        [shape(path) for path in command.model],
        judges,
        dataclasses.replace(how(), ranks=1, ranks_per_node=1),
        rows=rows,
        prompt=command.max_prompt_length,
        response=command.max_completion_length,
    )
    batches = -(-command.num_samples // rows) * len(command.model)
    seconds = batches * command.max_completion_length * args.decode_ms / 1000
    return Stage(name, items, folder=command.output.parent, disk=0.0, seconds=seconds, steps=1)


def trained_parameters(shape: Shape, lora_r: int) -> int | None:
    """None for all of them; of a LoRA run the adapters, on every linear layer whatever --lora_target_modules says."""
    return memory.adapter_parameters(shape, lora_r) if lora_r else None


def checkpoints(command, one: float) -> float:
    """Those kept, and the next, which is written before the oldest goes."""
    return (command.save_total_limit + 1) * one if command.save_steps else 0.0


def forward_flops(shape: Shape, tokens: int, length: int) -> float:
    """Two operations a weight and token, and attention to the half of the row that is seen."""
    return tokens * (2 * shape.parameters + 2 * shape.layers * shape.hidden * length)


def training_passes(how: How) -> int:
    """In forwards: one, a backward that costs two, and with checkpointing the forward once more."""
    return 4 if how.checkpointing else 3
