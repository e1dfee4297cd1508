"""DeepSpeed configurations as plain dictionaries: ZeRO 0-3, offload, precision, the hybrid engine, a user's own json.

Every key that changes results is written out, since DeepSpeed's defaults move between versions (gradient clipping and
`check_grad_overflow` both did within 0.19).
"""

import difflib


def build(
    *,
    zero_stage: int,
    dtype: str,
    max_grad_norm: float = 0.0,
    offload_optimizer: bool = False,
    offload_param: bool = False,
    hybrid_engine_tokens: int = 0,
) -> dict:
    """The configuration of one engine, trained or frozen.

    Args:
        zero_stage: 0 whole copies, 1 sharded optimizer states, 2 and gradients, 3 and weights.
        dtype: "fp32", "bf16" or "fp16".
        max_grad_norm: global gradient norm to clip to; 0 for no clipping.
        offload_optimizer, offload_param: keep those shards in host memory.
        hybrid_engine_tokens: longest prompt + response for DeepSpeed's hybrid engine; 0 leaves it off.

    Raises:
        ValueError: offload asked for at a stage that does not shard what is to be moved.
    """
    if offload_optimizer and zero_stage == 0:
        raise ValueError("--offload_optimizer needs --zero_stage 1, 2 or 3: at stage 0 every rank keeps its own states")
    if offload_param and zero_stage != 3:
        raise ValueError(f"--offload_param needs --zero_stage 3, seen {zero_stage}: only stage 3 shards the weights")
    zero = {"stage": zero_stage, "overlap_comm": zero_stage == 3, "contiguous_gradients": True}
    if zero_stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 100_000}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config = {
        # How many micro-batches make one optimizer step is `engine.train_step`'s business, not DeepSpeed's.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        # torch's AdamW everywhere: exact under offload, and nothing is compiled.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 200}
    if hybrid_engine_tokens:
        config["hybrid_engine"] = {
            "enabled": True,
            "max_out_tokens": hybrid_engine_tokens,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        }
    return config


# What DeepSpeed 0.19 looks for at the top of a json; it passes over all else without a word.
# fmt: off
TOP_LEVEL = (
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last",
    "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler",
    "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown", "optimizer", "pipeline",
    "prescale_gradients", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size",
    "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown",
    "wandb", "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
# fmt: on
# What flags alone decide: compared with them, and then left out. Steps, sizes and schedules are not DeepSpeed's here.
_DECIDED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
)


def merge(ours: dict, theirs: dict, said: dict[str, tuple[object, str]]) -> dict:
    """Lays a user's DeepSpeed json over ours. "auto", and null, mean "as the flags say", as in the HF Trainer.

    Args:
        said: {key, with dots for sections: (value, who says so)} for what flags decide. A batch size that is not in it
            is left out without a look.

    Raises:
        ValueError: a key that a flag decides has another value (names the key, both values and the flag), a key that
            DeepSpeed does not know (names the nearest), or a file that has not the form of a DeepSpeed json.
    """
    if not isinstance(theirs, dict):
        raise ValueError(f"--ds_config holds a {type(theirs).__name__}, wanted a json object")
    for key in theirs:
        if key not in TOP_LEVEL:
            near = difflib.get_close_matches(key, TOP_LEVEL, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"--ds_config has {key!r}, which is no key of DeepSpeed{hint}")
    for key, seen in _leaves(theirs):
        if seen is None or seen == "auto":
            continue
        if key in said and not _same(seen, said[key][0]):
            raise ValueError(f'--ds_config has {key} {seen!r}, but {said[key][1]}; change one, or write "auto"')
        if key not in said and key.split(".")[0] in ("optimizer", "scheduler"):
            raise ValueError(f"--ds_config has {key} {seen!r}, which has no counterpart here; remove it")
    return _lay_over(ours, {key: value for key, value in theirs.items() if key not in _DECIDED})


def _leaves(config: dict, prefix: str = "") -> list[tuple[str, object]]:
    """(key with dots, value) of everything that is no section."""
    found = []
    for name, value in config.items():
        is_section = isinstance(value, dict)
        found += _leaves(value, f"{prefix}{name}.") if is_section else [(f"{prefix}{name}", value)]
    return found


def _same(seen, wanted) -> bool:
    if isinstance(wanted, list):
        return isinstance(seen, list) and len(seen) == len(wanted) and all(map(_same, seen, wanted))
    if isinstance(wanted, tuple):  # names of one thing
        return str(seen).lower() in wanted
    return seen == wanted and isinstance(seen, bool) == isinstance(wanted, bool)


def _lay_over(ours: dict, theirs: dict) -> dict:
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None or value == "auto":
            continue
        if isinstance(ours.get(key), dict) and not isinstance(value, dict):
            raise ValueError(f"--ds_config has {key} {value!r}, wanted a json object")
        merged[key] = _lay_over(ours.get(key) or {}, value) if isinstance(value, dict) else value
    return merged
