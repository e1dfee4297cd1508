"""Every key that a DeepSpeed json can have (0.19), and whether it is heeded here: a table, read by `ds_config.merge`.

A key is written with dots between sections; one that ends in `.*` is for all that has no line of its own in its
section. Its rule is a kind, or a pair: the values that change nothing, and why any other is refused.
"""

HEEDED = "heeded"  # whatever DeepSpeed itself takes: memory, speed, what is printed; no promise of ours depends on it
FLAGS = "flags"  # what flags decide: compared with them, and then left out
SWITCH, COUNT, DTYPE = "true or false", "a whole number of at least 1", "fp32, bf16 or fp16"  # DeepSpeed does not look

Rule = str | tuple[tuple, str]

_MEAN = "losses here are scaled for one mean of the gradients over all ranks"
_MASTERS = "weights and AdamW's moments are in fp32 here beside those that train in 16 bits"
_ADAMW = "the optimizer here is torch's AdamW, where it is offloaded too"
_QUANTISED = "weights and gradients are not quantised: the policy that samples has to be the one that trains"
_RECOMPUTE = "--gradient_checkpointing recomputes activations, by torch's own means"
_CURVES = "curves go where --report_to says"
_BATCHES = "the data and the batch flags decide which rows make a step"
_SAVED = "checkpoints here have one form, are complete when written, and are seen by all ranks"
_PARALLEL = "ranks share the data here, never a layer or a model"


def _each(rule: Rule, section: str, names: str) -> dict[str, Rule]:
    """One rule for several keys of a section ("" for the top)."""
    return {f"{section}.{name}".lstrip("."): rule for name in names.split()}


def _old(of: str) -> tuple[tuple, str]:
    return (False,), f"that is an old name; write {of}"


# fmt: off
KEYS: dict[str, Rule] = {
    # What flags say.
    **_each(FLAGS, "", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"),
    **_each(FLAGS, "", "optimizer.* scheduler.* bf16.enabled bfloat16.enabled fp16.enabled torch_autocast.enabled"),
    **_each(FLAGS, "", "zero_optimization.stage data_types.param_dtype data_types.grad_accum_dtype"),
    # Gradients and precision.
    "gradient_allreduce_op": (("mean",), _MEAN),
    "prescale_gradients": ((False,), _MEAN),
    "gradient_predivide_factor": ((1,), _MEAN),
    "managed_gradient_accumulation": ((True,), "each step here says itself where its micro-batches end"),
    "communication_data_type": DTYPE,
    "data_types.buffer_dtype": (("fp32",), "positions computed in 16 bits are wrong in long texts"),
    "data_types.keep_in_fp32_modules": HEEDED,
    "bf16.immediate_grad_update": SWITCH,
    "bf16.check_grad_overflow": ((True,), "an update from numbers that are not finite is never made"),
    **_each(((False,), _MASTERS), "bf16", "bf16_master_weights_and_grads bf16_optimizer_states"),
    "fp16.fp16_master_weights_and_grads": ((False,), _MASTERS),
    "fp16.auto_cast": ((False,), "models here take token ids, which are not cast"),
    **_each(HEEDED, "fp16", "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis"),
    "fp16.min_loss_scale": HEEDED,
    # ZeRO.
    **_each(HEEDED, "zero_optimization", """
        contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
        allgather_bucket_size overlap_comm sub_group_size ignore_unused_parameters round_robin_gradients
        parameter_alignment zero_hpz_partition_size memory_efficient_linear override_module_apply
        log_trace_cache_warnings enable_sanity_checks leaf_module.*
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"""),
    **_each(HEEDED, "zero_optimization.offload_optimizer", "device nvme_path buffer_count pin_memory"),
    **_each(HEEDED, "zero_optimization.offload_optimizer", "pipeline_read pipeline_write fast_init"),
    **_each(HEEDED, "zero_optimization.offload_param", "device nvme_path buffer_count pin_memory"),
    **_each(HEEDED, "zero_optimization.offload_param", "buffer_size max_in_cpu"),
    **_each(COUNT, "aio", "block_size queue_depth intra_op_parallelism"),
    **_each(SWITCH, "aio", "single_submit overlap_events use_gds"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": ((True,), "without it no model could be saved"),
    "zero_optimization.compute_grad_norm": ((True,), "every step's gradient norm is checked and logged"),
    "zero_optimization.load_from_fp32_weights": ((True,), "a resumed run goes on from the same fp32 weights"),
    "zero_optimization.stage3_module_granularity_threshold": ((0,), "small modules are then not gathered"),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has no such stage any more"),
    "zero_optimization.zenflow": ((), "an update is complete before the next forward"),
    "zero_optimization.offload_optimizer.ratio": ((1,), _ADAMW),
    "zero_optimization.offload_optimizer.super_offload": ((False,), _ADAMW),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": ((0.8,), _ADAMW),
    "zero_optimization.save_muon_momentum_buffer_in_memory": ((False,), _ADAMW),
    "zero_allow_untested_optimizer": ((True,), _ADAMW),
    "zero_force_ds_cpu_optimizer": ((False,), _ADAMW),
    **_each(((False,), _QUANTISED), "zero_optimization", "zero_quantized_weights zero_quantized_nontrainable_weights"),
    "zero_optimization.zero_quantized_gradients": ((False,), _QUANTISED),
    "zero_optimization.elastic_checkpoint": ((False,), _SAVED),
    "zero_optimization.pipeline_loading_checkpoint": ((False,), _PARALLEL),
    "zero_optimization.cpu_offload": _old("zero_optimization.offload_optimizer.device 'cpu'"),
    "zero_optimization.cpu_offload_param": _old("zero_optimization.offload_param.device 'cpu'"),
    "zero_optimization.cpu_offload_use_pin_memory": _old("pin_memory in the two offload sections"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _old("stage3_gather_16bit_weights_on_model_save"),
    # Rollouts.
    "hybrid_engine.enabled": ((False,), "--rollout_backend hybrid switches it on"),
    "hybrid_engine.max_out_tokens": ((), "--max_prompt_length and --max_completion_length decide it"),
    **_each(HEEDED, "hybrid_engine", "inference_tp_size release_inference_cache pin_parameters enable_cuda_graph"),
    "hybrid_engine.tp_gather_partition_size": HEEDED,
    # Printing and timing.
    **_each(SWITCH, "", "dump_state memory_breakdown wall_clock_breakdown disable_python_gc"),
    **_each(COUNT, "", "steps_per_print vocabulary_size"),
    "log_level": (("debug", "info", "warning", "error", "critical"), "these are the levels of DeepSpeed's log"),
    **_each(HEEDED, "", "comms_logger.* timers.* flops_profiler.*"),
    # What has its place elsewhere, or none here.
    **_each(((False,), _CURVES), "", "tensorboard.enabled wandb.enabled comet.enabled csv_monitor.enabled"),
    "autotuning.enabled": ((False,), "a run does not look for its own settings; scripts/plan.py counts memory"),
    "compile.deepcompile": ((False,), "nothing is compiled here"),
    "data_efficiency.enabled": ((False,), _BATCHES),
    "expert_parallel.enabled": ((False,), _PARALLEL),
    # What does nothing while it is off.
    **_each(HEEDED, "", "tensorboard.* wandb.* comet.* csv_monitor.* autotuning.* compile.* data_efficiency.*"),
    **_each(HEEDED, "", "expert_parallel.* torch_autocast.*"),
    "dataloader_drop_last": ((False,), _BATCHES),
    **_each(((False,), _RECOMPUTE), "activation_checkpointing", "partition_activations cpu_checkpointing profile"),
    "activation_checkpointing.contiguous_memory_optimization": ((False,), _RECOMPUTE),
    "activation_checkpointing.synchronize_checkpoint_boundary": ((False,), _RECOMPUTE),
    "activation_checkpointing.number_checkpoints": ((), _RECOMPUTE),
    "checkpoint.tag_validation": HEEDED,
    **_each(((False,), _SAVED), "checkpoint", "load_universal use_node_local_storage parallel_write.pipeline_stage"),
    "checkpoint.checkpoint_serialization": ((True,), _SAVED),
    **_each(((), _SAVED), "", "checkpoint.writer.* datastates_ckpt.*"),
    "disable_allgather": ((False,), "it does nothing in DeepSpeed 0.19"),
    **_each(((0,), _PARALLEL), "tensor_parallel", "autotp_size"),
    **_each(((), _PARALLEL), "", "tensor_parallel.* pipeline.* seq_parallel_communication_data_type"),
    "sequence_parallel_size": ((1,), _PARALLEL),
    "use_data_before_expert_parallelism": ((False,), _PARALLEL),
    "weight_quantization.*": ((), _QUANTISED),
}
# fmt: on
SECTIONS = {".".join(key.split(".")[:count]) for key in KEYS for count in range(1, key.count(".") + 1)}
# What DeepSpeed has taken out; it says of each why it refuses it.
REMOVED = (
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula"),
    *("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
)


def rule_of(key: str) -> Rule | None:
    """The key's own rule, or that of the smallest section with one for all in it; None: DeepSpeed has no such key."""
    parts = key.split(".")
    names = [key, *(".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1))]
    return next((KEYS[name] for name in names if name in KEYS), None)
