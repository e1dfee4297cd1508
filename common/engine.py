"""DeepSpeed engines, trained and frozen, and the one optimizer step that every stage runs.

The only file that builds engines. Whole-step normalisation lives here: a step is a list of micro-batches whose losses
are already divided by the *global* count of what they average over, so the result depends neither on how the rows are
cut into micro-batches nor on how many ranks share them.
"""

import contextlib
import dataclasses
import io
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import deepspeed  # noqa: I001  after common.distributed, which quiets it
import torch
from torch import nn

from common import adapters, distributed, ds_config, models, nonfinite
from common.errors import RunFailed, UserError


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW and its schedule. `warmup_steps` below 1 is a share of the run; `max_grad_norm` 0 does not clip."""

    learning_rate: float
    lr_scheduler_type: str
    min_lr_ratio: float
    warmup_steps: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class Engine:
    """How a model is held: precision ("fp32", "bf16", "fp16"), ZeRO stage, offload, recomputation, a user's json."""

    dtype: str
    zero_stage: int
    offload_optimizer: bool
    offload_param: bool
    gradient_checkpointing: bool
    ds_config: str | None


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports: sums over all micro-batches and ranks, by name (maxima where the name begins
    with `max_`); the gradient norm before clipping."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


# A loss function returns this micro-batch's share of the step's loss and named sums to be added up over the step.
LossFn = Callable[[object], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class TrainedModel:
    """A wrapped model in a DeepSpeed engine with its optimizer and schedule.

    Args:
        load: called with `zero3=` a DeepSpeed configuration or None; returns the wrapped model (`LanguageModel` or
            `ScalarModel`), sharded while loading in the first case.
        total_steps: optimizer steps of the whole run, for the schedule.
        hybrid_engine_tokens: switches DeepSpeed's hybrid engine on for that many tokens a row; 0 leaves it off.
    """

    def __init__(
        self,
        load: Callable[..., nn.Module],
        optim: Optim,
        engine: Engine,
        total_steps: int,
        device: torch.device,
        hybrid_engine_tokens: int = 0,
    ):
        config = _config(engine, optim, hybrid_engine_tokens)
        self.device, self.dtype, self.asked_stage = device, engine.dtype, engine.zero_stage
        self.zero_stage = config["zero_optimization"]["stage"]
        module = load(zero3=config if self.zero_stage == 3 else None)
        if engine.gradient_checkpointing:
            # Non-reentrant: under ZeRO-3 the reentrant kind gathers every weight once more.
            module.hf.activation_checkpointing_enable({"use_reentrant": False})
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(
            trainable,
            lr=optim.learning_rate,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_epsilon,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, optim))
        with _refusals(engine.ds_config), contextlib.redirect_stdout(io.StringIO()):  # some of its classes print memory
            self.engine, self.optimizer, _, self.schedule = deepspeed.initialize(
                model=module, optimizer=optimizer, lr_scheduler=schedule, config=config
            )
        self.module = self.engine.module
        self.module.train()
        models.check_reading(self.engine, self.module.hf, device, exact=engine.dtype == "fp32")

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        """The wrapped model's forward; every rank calls it equally often, since ZeRO-3 gathers weights inside."""
        return self.engine(*args, **kwargs)

    def train_step(
        self, micro_batches: Sequence, loss_fn: LossFn, step: int, rows: Sequence[Sequence[int]] = ()
    ) -> StepResult:
        """Runs the micro-batches of one optimizer step, then the step.

        Args:
            micro_batches: equally many on every rank (pad with rows of weight zero).
            loss_fn: returns (share, sums). The shares of all micro-batches on all ranks add up to the step's loss: each
                term is a sum over this micro-batch divided by that term's count over the whole step.
            step, rows: the step, and the row numbers of each micro-batch, that an error names.

        Raises:
            RunFailed: loss or gradient is not finite; nothing was updated.
        """
        shares = []
        world = distributed.world_size()
        sums: dict[str, torch.Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.engine.set_gradient_accumulation_boundary(last)
            share, parts = loss_fn(micro_batch)
            # DeepSpeed averages gradients over ranks; the shares are to be summed.
            self.engine.backward(share * world, scale_wrt_gas=False)
            distributed.accumulate(sums, parts | {"loss": share})
            shares.append(share.detach())
            if not last:
                self.engine.step()
        totals = distributed.sum_over_ranks(sums, self.device)
        if not math.isfinite(totals["loss"]):
            where = nonfinite.trace_loss(self.module, micro_batches, rows, [float(share) for share in shares], loss_fn)
            raise RunFailed(
                f"step {step}: the loss is {totals['loss']} ({where}); stopped before the update, weights are unchanged"
            )
        learning_rate = self.schedule.get_last_lr()[0]
        norm = self._stage0_norm()
        if norm is None or math.isfinite(norm):
            self.engine.step()  # which leaves the weights alone when it finds a gradient that is not finite
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        norm = float(norm) if norm is not None else math.nan
        if not math.isfinite(norm) and self.dtype != "fp16":  # there it is how the loss scale is found
            self.engine.set_gradient_accumulation_boundary(False)
            where = nonfinite.trace_gradient(
                self.module, micro_batches, rows, loss_fn, lambda loss: self.engine.backward(loss, scale_wrt_gas=False)
            )
            raise RunFailed(
                f"step {step}: the gradient norm is {norm} though the loss is {totals['loss']} ({where}); weights are "
                "unchanged"
            )
        return StepResult(totals, norm, learning_rate)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the model answers without gradients, in eval mode."""
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train()

    def describe(self) -> str:
        """Size, precision and sharding, for people."""
        parameters = list(self.module.parameters())
        sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
        trained = sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad)
        inside = f" (run as ZeRO-{self.zero_stage})" if self.zero_stage != self.asked_stage else ""
        how = f"ZeRO-{self.asked_stage}{inside}, {distributed.world_size()} rank(s), {self.dtype}"
        return f"{type(self.module.hf).__name__}: {sum(sizes):,} parameters, {trained:,} trained; {how}"

    def state(self) -> dict[str, torch.Tensor] | None:
        """The whole HF state on the main process's CPU, None on the others. A collective under ZeRO-3."""
        if self.zero_stage == 3:
            state = self.engine._zero3_consolidated_16bit_state_dict()
        else:
            state = self.module.state_dict() if distributed.is_main() else None
        return state and {name.removeprefix("hf."): value.detach().cpu() for name, value in state.items()}

    def writer(self, text, say: Callable[[str], None]) -> Callable[[Path], None]:
        """What writes the model as a HF folder with its tokenizer (`tokenizer.Prepared`), and opens both to see that
        they are those that were trained; for the main process to call. A collective."""
        with self.evaluating():
            trained = models.on_a_few_tokens(self, self.module.hf, self.device)
        state = self.state()

        def write(folder: Path) -> None:
            models.save_pretrained(self.module.hf, folder, state, text.tokenizer)
            state.clear()  # what is opened takes its place in memory
            text.check_saved(folder)
            if unseen := models.check_saved(folder, self.module.hf, trained):
                say(unseen)

        return write

    def save(self, folder: Path, name: str) -> None:
        """Writes everything training needs to go on into `folder/name`. A collective; for `load` only."""
        self.engine.save_checkpoint(str(folder), tag=name, save_latest=False)

    def load(self, folder: Path, name: str) -> None:
        """Takes up what `save` wrote, on as many ranks. Verify the files first: unpickling runs what they say."""
        path, _ = self.engine.load_checkpoint(str(folder), tag=name)
        # DeepSpeed does not raise, and the run would start from scratch without a word.
        assert path is not None, f"DeepSpeed found no {name} in {folder}"

    def checkpoint_bytes(self) -> int:
        """About what `save` writes over all ranks: weights, and fp32 weights and AdamW's moments of what is trained."""
        width = {"fp32": (4, 8), "bf16": (2, 12), "fp16": (2, 12)}[self.dtype]
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.module.parameters()]
        return sum(size * (width[0] + width[1] * is_trained) for size, is_trained in sizes)

    def _stage0_norm(self) -> float | None:
        """At stage 0 DeepSpeed keeps no norm; gradients are whole and already averaged here."""
        if self.zero_stage != 0:
            return None
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))


class FrozenModel:
    """A wrapped model that only answers: whole on each rank, or sharded in a ZeRO-3 inference engine.

    ZeRO 1 and 2 shard optimizer states and gradients, which a frozen model has none of: they mean 0 here.
    """

    def __init__(
        self, load: Callable[..., nn.Module], dtype: str, zero_stage: int, offload_param: bool, device: torch.device
    ):
        if zero_stage == 3:
            config = ds_config.build(zero_stage=3, dtype=dtype, offload_param=offload_param)
            self.module = load(zero3=config).requires_grad_(False)
            self._call = deepspeed.initialize(model=self.module, config=config)[0]
        else:
            if offload_param:
                raise UserError("--offload_frozen needs --frozen_zero_stage 3: only stage 3 shards the weights")
            self.module = self._call = load(zero3=None).to(device).requires_grad_(False)
        self.module.eval()
        models.check_reading(self._call, self.module.hf, device, exact=dtype == "fp32")

    @torch.no_grad()
    def __call__(self, *args, **kwargs) -> torch.Tensor:
        return self._call(*args, **kwargs)


class AdapterOff:
    """A trained model with its adapter switched off: the reference of a LoRA run, at the cost of no second copy."""

    def __init__(self, trained: TrainedModel):
        self.trained = trained

    @torch.no_grad()
    def __call__(self, *args, **kwargs) -> torch.Tensor:
        with adapters.switched_off(self.trained.module.hf):
            return self.trained(*args, **kwargs)


def lr_factor(step: int, total_steps: int, optim: Optim) -> float:
    """The learning rate of 0-based optimizer step `step`, as a share of the peak.

    Linear warm-up, above zero from the first step on; then constant, linear or half a cosine down to `min_lr_ratio`.
    """
    warmup = optim.warmup_steps * total_steps if optim.warmup_steps < 1 else optim.warmup_steps
    if step < warmup:
        return (step + 1) / (math.ceil(warmup) + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    falling = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * falling[optim.lr_scheduler_type]


def check(engine: Engine, optim: Optim, batch: dict[str, tuple[int, str]], role: str = "") -> None:
    """Refuses combinations that cannot run, before any model is loaded.

    Args:
        batch: {DeepSpeed's name of a batch size: (what it is, the flags that say so)}, see `batch_sizes`.
        role: "critic" for the model whose flags are called so.

    Raises:
        UserError: names the flags and the values, and what a --ds_config contradicts.
    """
    config = _config(engine, optim, 0, batch, role)
    if engine.ds_config:
        with _refusals(engine.ds_config):
            deepspeed.DeepSpeedConfig(config)
            _check_nvme(config)


@contextlib.contextmanager
def _refusals(ds_config_file: str | None) -> Iterator[None]:
    """Within it, whatever DeepSpeed raises is put down to the user's json, where there is one."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # pydantic's ValidationError, assertions, DeepSpeedConfigError, ...
        if ds_config_file is None:
            raise
        why = " ".join(str(error).split("For further information")[0].split())[:300]
        if not why:  # an assertion without a word
            why = f"{type(error).__name__} at `{traceback.extract_tb(error.__traceback__)[-1].line}`"
        raise UserError(f"--ds_config {ds_config_file}: DeepSpeed does not take it: {why}") from error


def batch_sizes(per_device: int, total: int, flags: str) -> dict[str, tuple[int, str]]:
    """The batch sizes of one optimizer step under DeepSpeed's names; `flags` are those that make up the total."""
    accumulation = math.ceil(total / (per_device * distributed.world_size()))
    return {
        "train_micro_batch_size_per_gpu": (per_device, f"--per_device_train_batch_size is {per_device}"),
        "gradient_accumulation_steps": (accumulation, f"{flags} make it {accumulation}"),
        "train_batch_size": (total, f"{flags} make it {total} on {distributed.world_size()} rank(s)"),
    }


def _config(engine: Engine, optim: Optim, hybrid_engine_tokens: int, batch: dict | None = None, role: str = "") -> dict:
    try:
        config = ds_config.build(
            zero_stage=engine.zero_stage,
            dtype=engine.dtype,
            max_grad_norm=optim.max_grad_norm,
            offload_optimizer=engine.offload_optimizer,
            offload_param=engine.offload_param,
            hybrid_engine_tokens=hybrid_engine_tokens,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if not engine.ds_config:
        return config
    try:
        theirs = ds_config.read(engine.ds_config)
    except (OSError, ValueError) as error:
        raise UserError(f"--ds_config {engine.ds_config}: {error}") from error
    try:
        config = ds_config.merge(config, theirs, _said(engine, optim, role) | (batch or {}))
        _check_offload(config["zero_optimization"], engine.zero_stage)
    except ValueError as error:
        raise UserError(f"--ds_config {engine.ds_config} {error}") from error
    return config


def _said(engine: Engine, optim: Optim, role: str) -> dict[str, tuple[object, str]]:
    """What flags decide, under DeepSpeed's names: (value, the flag that says so)."""

    def flag(name: str, value, own_for_critic: bool = False) -> tuple[object, str]:
        prefix = "critic_" if role == "critic" and own_for_critic else ""
        return value, f"--{prefix}{name} is {value}"

    rate, warmup = flag("learning_rate", optim.learning_rate, True), flag("warmup_steps", optim.warmup_steps)
    betas = [optim.adam_beta1, optim.adam_beta2]
    schedule = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}[optim.lr_scheduler_type]
    adamw = "the optimizer here is AdamW"
    precisions = {
        "fp32": ("fp32", "float32", "torch.float32", "float"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
        "fp16": ("fp16", "float16", "torch.float16", "half"),
    }
    sums = "fp16" if engine.dtype == "fp16" else "fp32"
    said = {
        "zero_optimization.stage": flag("zero_stage", engine.zero_stage, True),
        "gradient_clipping": flag("max_grad_norm", optim.max_grad_norm),
        "bf16.enabled": (engine.dtype == "bf16", f"--dtype is {engine.dtype}"),
        "bfloat16.enabled": (engine.dtype == "bf16", f"--dtype is {engine.dtype}"),
        "fp16.enabled": (engine.dtype == "fp16", f"--dtype is {engine.dtype}"),
        "torch_autocast.enabled": (False, f"--dtype is {engine.dtype}, and autocast is another way to train"),
        "data_types.param_dtype": (precisions[engine.dtype], f"--dtype is {engine.dtype}"),
        "data_types.grad_accum_dtype": (
            precisions[sums],
            f"with --dtype {engine.dtype} gradients are summed in {sums}",
        ),
        "optimizer.type": (("adamw", "adam"), adamw),
        "optimizer.params.adam_w_mode": (True, adamw),
        "optimizer.params.torch_adam": (True, "the optimizer here is torch's AdamW"),
        "optimizer.params.lr": rate,
        "optimizer.params.betas": (betas, f"--adam_beta1 and --adam_beta2 are {betas}"),
        "optimizer.params.eps": flag("adam_epsilon", optim.adam_epsilon),
        "optimizer.params.weight_decay": flag("weight_decay", optim.weight_decay, True),
        "scheduler.type": (
            (schedule.lower(),),
            f"--lr_scheduler_type is {optim.lr_scheduler_type}, which is {schedule}",
        ),
        "scheduler.params.warmup_min_lr": (0, "the warm-up here begins at 0"),
        "scheduler.params.warmup_max_lr": rate,
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.warmup_type": (("linear",), "the warm-up here is linear"),
        "scheduler.params.cos_min_ratio": flag("min_lr_ratio", optim.min_lr_ratio),
    }
    for name, is_on in (("offload_optimizer", engine.offload_optimizer), ("offload_param", engine.offload_param)):
        if is_on:
            said[f"zero_optimization.{name}.device"] = (("cpu",), f"--{name} means 'cpu'")
    return said


def _check_offload(zero: dict, zero_stage: int) -> None:
    """DeepSpeed says nothing where a json offloads what its stage does not shard."""
    for name, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        device = (zero.get(name) or {}).get("device") or "none"
        if device != "none" and zero_stage not in stages:
            wanted = " or ".join(map(str, stages))
            raise ValueError(
                f"has zero_optimization.{name}.device {device!r}, which needs --zero_stage {wanted}, seen {zero_stage}"
            )


def _check_nvme(config: dict) -> None:
    """DeepSpeed finds out only when the model is there already."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    for name in ("offload_optimizer", "offload_param"):
        section = config["zero_optimization"].get(name) or {}
        if section.get("device") != "nvme":
            continue
        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise ValueError(
                f"zero_optimization.{name}.device 'nvme' needs async_io, which needs libaio installed here"
            )
        if not section.get("nvme_path"):
            raise ValueError(f"zero_optimization.{name}.device 'nvme' needs {name}.nvme_path, a folder on that disk")
