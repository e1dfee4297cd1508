"""DeepSpeed configurations as plain dictionaries: ZeRO 0-3, offload, precision, the hybrid engine. Imports nothing.

Every key that changes results is written out, since DeepSpeed's defaults move between versions (gradient clipping and
`check_grad_overflow` both did within 0.19).
"""


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


# Keys of a user's file that flags decide: these are refused unless "auto" ...
_OURS_ALONE = {
    "train_batch_size": "--per_device_train_batch_size and --gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "optimizer": "--learning_rate, --weight_decay and --adam_*",
    "scheduler": "--lr_scheduler_type and --warmup_steps",
}
# ... and these have to say what the flags say.
_MUST_AGREE = {
    ("zero_optimization", "stage"): "--zero_stage",
    ("gradient_clipping",): "--max_grad_norm",
    ("bf16", "enabled"): "--dtype",
    ("fp16", "enabled"): "--dtype",
}


def merge(ours: dict, theirs: dict) -> dict:
    """Lays a user's DeepSpeed json over ours. "auto" means "as the flags say", as in the HF Trainer.

    Raises:
        ValueError: a key that a flag decides is set to another value; names the key, both values and the flag. Or the
            file does not have the form of a DeepSpeed json.
    """
    if not isinstance(theirs, dict):
        raise ValueError(f"--ds_config holds a {type(theirs).__name__}, wanted a json object")
    for key, flag in _OURS_ALONE.items():
        if key in theirs and not _is_auto(theirs[key]):
            raise ValueError(f'--ds_config sets {key!r}, which {flag} decides; remove it or write "auto"')
    for path, flag in _MUST_AGREE.items():
        seen, wanted = _look_up(theirs, path), _look_up(ours, path)
        if not (seen is None or _is_auto(seen) or seen == wanted or (seen is False and wanted is None)):
            name = ".".join(path)
            raise ValueError(
                f'--ds_config has {name} {seen!r}, the flags say {wanted!r}; change {flag} or write "auto"'
            )
    return _lay_over(ours, theirs)


def _is_auto(value) -> bool:
    """ "auto", or a section in which every number is."""
    if isinstance(value, dict):
        return all(_is_auto(part) for name, part in value.items() if name != "type")
    return value == "auto"


def _look_up(config: dict, path: tuple[str, ...]):
    for key in path:
        if not isinstance(config, dict) or key not in config:
            return None
        config = config[key]
    return config


def _lay_over(ours: dict, theirs: dict) -> dict:
    merged = dict(ours)
    for key, value in theirs.items():
        if isinstance(ours.get(key), dict) and not isinstance(value, dict) and not _is_auto(value):
            raise ValueError(f"--ds_config has {key} {value!r}, wanted a json object")
        if not _is_auto(value):
            merged[key] = _lay_over(ours.get(key, {}), value) if isinstance(value, dict) else value
    return merged
