"""Names that people bring from DeepSpeed-Chat, TRL, transformers and articles: what each of them is here.

Three tables. A flag of ours under another word is in `ALIASES`; what changes no result here, and can therefore be
accepted, in `NO_EFFECT`; all others in `ELSEWHERE`, with what to do instead. A name that counts something else than any
flag of ours (episodes, batches per device) is never an alias: its answer is the formula. FLAGS.md shows these tables.
"""

# One token stands for a flag with its value, more of them for a switch, "{}" is where the value goes otherwise. The
# second is whose name it is, for the line on the terminal, or None to stay quiet.
QUIET = None
CHAT, TRL, HF = "DeepSpeed-Chat's name", "TRL's name", "transformers' name"
ALIASES: dict[str, tuple[list[str], str | None]] = {
    "--dataset_name": (["--data"], QUIET),
    "--dataset": (["--data"], QUIET),
    "--model": (["--model_name_or_path"], QUIET),
    "--lr": (["--learning_rate"], QUIET),
    "--actor_model": (["--actor"], QUIET),
    "--critic_model": (["--critic"], QUIET),
    "--reward_model": (["--reward"], QUIET),
    "--ref_model": (["--ref"], QUIET),
    "--cliprange_low": (["--cliprange"], QUIET),
    # TRL's value model starts from the reward model, as the critic does here unless --critic says otherwise.
    "--reward_model_path": (["--critic", "{}", "--reward", "{}"], TRL),
    "--sft_model_path": (["--actor"], TRL),
    "--response_length": (["--max_completion_length"], TRL),
    "--init_kl_coef": (["--kl_coef"], TRL),
    "--beta": (["--kl_coef"], TRL),
    "--max_seq_length": (["--max_length"], TRL),
    "--local_rollout_forward_batch_size": (["--rollout_forward_batch_size"], TRL),
    "--bf16": (["--dtype", "bf16"], HF),
    "--fp16": (["--dtype", "fp16"], HF),
    "--torch_dtype": (["--dtype"], HF),
    "--activation_checkpointing": (["--gradient_checkpointing"], HF),
    "--warmup_ratio": (["--warmup_steps"], HF),
    "--max_new_tokens": (["--max_completion_length"], HF),
    "--data_path": (["--data"], CHAT),
    "--actor_model_name_or_path": (["--actor"], CHAT),
    "--critic_model_name_or_path": (["--critic"], CHAT),
    "--actor_learning_rate": (["--learning_rate"], CHAT),
    "--actor_weight_decay": (["--weight_decay"], CHAT),
    "--actor_zero_stage": (["--zero_stage"], CHAT),
    "--max_prompt_seq_len": (["--max_prompt_length"], CHAT),
    "--max_answer_seq_len": (["--max_completion_length"], CHAT),
    "--max_seq_len": (["--max_length"], CHAT),
    "--ppo_epochs": (["--num_ppo_epochs"], CHAT),
    "--unsup_coef": (["--ptx_coef"], CHAT),
    "--num_warmup_steps": (["--warmup_steps"], CHAT),
    "--offload": (["--offload_optimizer"], CHAT),
    "--offload_reference_model": (["--offload_frozen", "--frozen_zero_stage", "3"], CHAT),
    "--offload_reward_model": (["--offload_frozen", "--frozen_zero_stage", "3"], CHAT),
    "--actor_gradient_checkpointing": (["--gradient_checkpointing"], CHAT),
    "--critic_gradient_checkpointing": (["--gradient_checkpointing"], CHAT),
    "--enable_hybrid_engine": (["--rollout_backend", "hybrid"], CHAT),
    "--enable_tensorboard": (["--report_to", "tensorboard"], CHAT),
    "--lora_dim": (["--lora_r"], CHAT),
    "--actor_lora_dim": (["--lora_r"], CHAT),
    "--critic_lora_dim": (["--critic_lora_r"], CHAT),
    "--print_answers": (["--sample_steps", "1"], CHAT),
    "--print_answers_interval": (["--sample_steps"], CHAT),
    "--per_device_training_batch_size": (["--per_device_train_batch_size"], CHAT),
    "--deepspeed_config": (["--ds_config"], CHAT),
}


def _each(names: str, answer) -> dict:
    return dict.fromkeys((f"--{name}" for name in names.split()), answer)


# With these values (ANY: with all) they change no result here, and the second says why. A switch that is on is "true".
# With another value they are refused, for the same reason or for that in ELSEWHERE.
ANY, ON, OFF = None, ("true",), ("false",)
NO_EFFECT: dict[str, tuple[tuple[str, ...] | None, str]] = {
    # DeepSpeed-Chat
    "--num_padding_at_beginning": (ANY, "where a text begins is known from its length, whatever the model"),
    "--per_device_eval_batch_size": (ANY, "evaluation takes --per_device_train_batch_size, and no figure depends on it"),
    "--inference_tp_size": (("1",), "generation is not split over GPUs"),
    "--tp_gather_partition_size": (ANY, "generation is not split over GPUs"),
    **_each("dropout actor_dropout critic_dropout", (("0",), "the dropout of models is off in every stage")),
    **_each(
        "disable_dropout disable_actor_dropout disable_critic_dropout",
        (ON, "the dropout of models is off in every stage"),
    ),
    "--data_output_path": (ANY, "tokens are kept beside the data of step 0, or where --tokens_cache says"),
    "--tensorboard_path": (ANY, "curves are written to OUTPUT_DIR/tensorboard"),
    "--print_loss": (ANY, "metrics.jsonl has the loss of every step"),
    "--compute_fp32_loss": (ON, "losses are computed in fp32"),
    "--no_fused_kernels": (ANY, "the optimizer is torch's AdamW"),
    # transformers
    "--logging_dir": (ANY, "curves are written to OUTPUT_DIR/tensorboard"),
    "--logging_first_step": (ANY, "files get every step"),
    "--logging_strategy": (("steps",), "--logging_steps counts optimizer steps"),
    **_each("eval_strategy evaluation_strategy", (("steps", "no"), "steps 1 and 2 evaluate at the end, and every --eval_steps")),
    "--save_strategy": (("steps", "no"), "the finished model is always written, and checkpoints by --save_steps"),
    "--save_safetensors": (ON, "weights are written as safetensors"),
    **_each("do_train do_eval", (ON, "a stage trains, and steps 1 and 2 evaluate at the end")),
    "--overwrite_output_dir": (OFF, "a finished run is never overwritten"),
    "--optim": (("adamw_torch", "adamw_torch_fused"), "the optimizer is torch's AdamW"),
    **_each(
        "preprocessing_num_workers dataset_num_proc",
        (ANY, "20,000 rows or more become tokens on all cores"),
    ),
    **_each(
        "dataloader_num_workers dataloader_pin_memory",
        (ANY, "rows are read and batched by the training process"),
    ),
    "--remove_unused_columns": (ANY, "reward functions get all columns, and nothing else reads more than it needs"),
    "--ddp_find_unused_parameters": (ANY, "gradients are averaged by DeepSpeed"),
    **_each(
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        (ANY, "the non-reentrant kind is taken, with the same gradients"),
    ),
    "--average_tokens_across_devices": (ON, "a step's loss is its mean over all ranks"),
    "--use_cache": (ANY, "training forwards keep none, and rollouts always one"),
    "--disable_tqdm": (ANY, "bars are drawn on a terminal only"),
    "--pad_to_multiple_of": (ANY, "padding changes no result"),
    "--load_best_model_at_end": (OFF, "the model of the last step is written"),
    "--label_smoothing_factor": (("0",), "labels are not smoothed"),
    "--auto_find_batch_size": (OFF, "batch sizes are what the flags say"),
    "--group_by_length": (OFF, "--seed alone says which rows make a step"),
    "--torch_compile": (OFF, "nothing is compiled"),
    "--use_liger_kernel": (OFF, "models run as transformers has them"),
    "--tf32": (OFF, "torch's own setting holds"),
    # TRL
    "--stop_token": (("eos",), "a response ends at the stop tokens of the actor's tokenizer and generation_config.json"),
    "--ds3_gather_for_generation": (ON, "under ZeRO-3 the actor is gathered once for each rollout"),
    "--assistant_only_loss": (ON, "the loss is on every turn of the assistant"),
    **_each("packing padding_free eval_packing", (OFF, "a row holds one conversation")),
    "--truncation_mode": (("keep_start",), "--max_length cuts at the end"),
    "--shuffle_dataset": (ON, "rows are shuffled by --seed"),
    "--loss_type": (("nll",), "the loss is the negative log-likelihood"),
    "--activation_offloading": (OFF, "activations stay on the device; --gradient_checkpointing keeps fewer"),
}  # fmt: skip

_ALL_RANKS = "step 3 counts over all ranks:"
_SOURCES = "step 0 reads sources: python step0_data/prepare.py --dataset"
_JSON = "DeepSpeed's own settings go into a json, merged by --ds_config FILE:"
ELSEWHERE: dict[str, str] = {
    # DeepSpeed-Chat
    **_each(
        "generation_batches per_device_generation_batch_size",
        f"{_ALL_RANKS} --rollout_batch_size = per_device_generation_batch_size x generation_batches x ranks",
    ),
    "--gradient_accumulation_steps": f"{_ALL_RANKS} --minibatch_size = --per_device_train_batch_size x gradient_accumulation_steps x ranks",
    **_each("unsup_coef unsupervised_dataset_name unsupervised_dataset_config_name", "no pretraining loss is mixed in"),
    "--sft_only_data_path": f"{_SOURCES} PAIRS OTHERS; rows that are no pairs serve sft alone",
    "--enable_ema": "no moving average of the actor is kept; leave it out",
    "--align_overflow": "with --dtype bf16 nothing overflows; leave it out",
    **_each("enable_test_mode test_stop_step", "--max_steps N ends a run after N steps"),
    **_each("add_eot_token eot_token", "every answer ends with the tokenizer's own stop token; leave it out"),
    "--eval_interval": "--eval_steps counts optimizer steps: eval_interval / --gradient_accumulation_steps",
    "--eval_iters": "all that step 0 held out is evaluated; its --eval_fraction says how much that is",
    "--no_bf16_to_fp32_loss": "losses are computed in fp32; leave it out",
    "--unpin_actor_parameters": f'{_JSON} {{"hybrid_engine": {{"pin_parameters": false}}}}',
    "--release_inference_cache": f'{_JSON} {{"hybrid_engine": {{"release_inference_cache": true}}}}',
    **_each(
        "offload_optimizer_device offload_optimizer_nvme_path offload_optimizer_pin_memory offload_optimizer_ratio "
        "offload_optimizer_buffer_count offload_optimizer_fast_init",
        f"{_JSON} zero_optimization.offload_optimizer",
    ),
    **_each(
        "offload_param_device offload_param_nvme_path offload_param_pin_memory offload_param_buffer_size "
        "offload_param_buffer_count offload_param_max_in_cpu",
        f"{_JSON} zero_optimization.offload_param",
    ),
    **_each(
        "aio_block_size aio_queue_depth aio_intra_op_parallelism aio_single_submit aio_overlap_events aio_use_gds",
        f"{_JSON} aio",
    ),
    **_each(
        "only_optimize_lora lora_module_name actor_lora_module_name critic_lora_module_name",
        "with --lora_r only the adapters are trained; --lora_target_modules names the layers",
    ),
    **_each(
        "lora_learning_rate actor_lora_learning_rate critic_lora_learning_rate",
        "--learning_rate, and for the critic --critic_learning_rate, are those of whatever is trained",
    ),
    "--enable_mixed_precision_lora": "frozen weights are held in --dtype; leave it out",
    # transformers
    **_each("eval_strategy evaluation_strategy", "--eval_steps counts optimizer steps; 0: only at the end"),
    "--save_strategy": "--save_steps counts optimizer steps; the finished model is always written",
    **_each("do_train do_predict", "scripts/evaluate.py answers and judges without training"),
    "--eval_steps": "step 3 does not evaluate; scripts/evaluate.py judges answers to held-out prompts",
    **_each("bf16_full_eval fp16_full_eval", "evaluation is in --dtype too; leave it out"),
    "--save_only_model": "a checkpoint holds all that training needs to go on; the finished folder is the model alone",
    "--dataloader_drop_last": "the last step may be short, and its loss is the mean over its rows; leave it out",
    "--overwrite_output_dir": "a finished run is never overwritten; choose another --output_dir or remove the folder",
    "--optim": "the optimizer is torch's AdamW; to save memory see --zero_stage and --offload_optimizer",
    **_each("metric_for_best_model greater_is_better", "the model of the last step is written; leave it out"),
    "--neftune_noise_alpha": "no noise is added to embeddings; leave it out",
    "--lr_scheduler_kwargs": "--min_lr_ratio says where the schedule ends",
    "--ddp_timeout": "--timeout_minutes = ddp_timeout / 60",
    **_each("fsdp fsdp_config", "--zero_stage 3 shards weights, gradients and optimizer over the ranks"),
    **_each("use_cpu no_cuda", "an empty CUDA_VISIBLE_DEVICES in the environment hides the GPUs"),
    "--data_seed": "--seed is of everything drawn at random",
    "--hub_token": "set HF_TOKEN, or log in with `hf auth login`",
    # TRL
    "--ptx_coef": "no pretraining loss is mixed in",
    **_each(
        "algorithm algo rl_algorithm advantage_estimator adv_estimator",
        "PPO with a critic, and GAE by --gamma and --lam, is the one algorithm here; leave it out",
    ),
    "--loss_type": "step 1 learns by likelihood, step 2 by pairs, step 3 by PPO; there are no DPO, GRPO or other losses yet",
    **_each(
        "dpo dpo_beta label_smoothing reference_free f_divergence_type precompute_ref_log_probs rpo_alpha ld_alpha",
        "there is no DPO yet; pairs train a reward model (step 2), and that a policy (step 3)",
    ),
    "--beta": "in step 3 it is --kl_coef; there is no DPO yet",
    **_each(
        "use_vllm vllm vllm_mode vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout "
        "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_num_engines vllm_model_impl use_sglang",
        "there is no vLLM yet; step 3's --rollout_backend says what samples, in the processes that train",
    ),
    **_each("epsilon epsilon_low clip_eps", "step 3's --cliprange is the clip range, --cliprange_high that above 1"),
    "--epsilon_high": "step 3's --cliprange_high is the clip range above 1",
    "--num_iterations": "step 3's --num_ppo_epochs counts passes over a rollout batch",
    "--scale_rewards": "there is no GRPO yet; step 3's --whiten_advantages scales over the rollout batch",
    "--mask_truncated_completions": "step 3's --missing_eos_penalty charges a response cut by length",
    **_each("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "the reference stays as it is; leave it out"),
    **_each("reward_funcs remote_rm_url", "step 3's --reward takes reward folders and FILE.py:FUNCTION"),
    **_each(
        "tensor_parallel_size pipeline_parallel_size sequence_parallel_size context_parallel_size "
        "expert_parallel_size ring_attn_size",
        "models are not split over GPUs but by --zero_stage 3",
    ),
    **_each("flash_attn use_flash_attn flash_attention", "--attn_implementation flash_attention_2"),
    **_each("gradient_clipping clip_grad", "--max_grad_norm"),
    "--finetuning_type": "--lora_r above 0 asks for adapters, 0 for all weights",
    "--preset": "every number of the published variants is a flag of its own; see step3_rlhf/README.md",
    "--vf_coef": "the critic is a model of its own; --critic_learning_rate says how fast it learns",
    "--total_episodes": "--max_steps = total_episodes / --rollout_batch_size",
    "--num_mini_batches": "--minibatch_size = --rollout_batch_size / num_mini_batches",
    "--num_sample_generations": "--sample_steps = --max_steps / num_sample_generations",
    "--batch_size": f"{_ALL_RANKS} --rollout_batch_size; steps 1 and 2 per device: --per_device_train_batch_size",
    "--mini_batch_size": f"{_ALL_RANKS} --minibatch_size responses make one optimizer step",
    **_each(
        "world_size num_total_batches micro_batch_size local_batch_size local_mini_batch_size",
        "it follows from the batch sizes and the number of ranks; leave it out",
    ),
    "--stop_token_id": "set eos_token_id in the actor's generation_config.json (a list is allowed)",
    **_each("model_name_or_path model", "the models of step 3 are --actor and --critic, and --ref and --reward if wanted"),
    **_each("model_adapter_name ref_adapter_name", "with --lora_r the reference is the actor with its adapter off"),
    **_each("use_dora use_rslora lora_modules_to_save", "adapters are plain ones, on --lora_target_modules; leave it out"),
    "--packing_strategy": "a row holds one conversation; leave it out",
    "--use_peft": "--lora_r above 0 asks for adapters; leave it out",
    **_each("model_revision revision", "download that revision first and give its folder"),
    **_each(
        "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_compute_dtype use_bnb_nested_quant quantization_bit "
        "qlora use_qlora",
        "weights are not quantised; to save memory see --zero_stage, --offload_param and --lora_r",
    ),
    **_each("dataset_config dataset_config_name dataset_train_split dataset_test_split", f"{_SOURCES} NAME:CONFIG@SPLIT"),
    "--dataset_text_field": f"{_SOURCES} FILE; a column `text` is text for pretraining",
    "--dataset_streaming": "step 0 reads a source whole; its --max_rows takes the first rows",
    **_each("train_file validation_file", f"{_SOURCES} FILES; a train and a test file side by side stay a split"),
    **_each("max_train_samples max_eval_samples", f"{_SOURCES} FILE --max_rows N"),
    "--completion_only_loss": "the loss is on every turn of the assistant; leave it out",
    **_each("eos_token pad_token", "stop and pad tokens are the tokenizer's; leave it out"),
    "--chat_template_path": "--chat_template FILE serves where the tokenizer has none; else change it in the model's folder",
    "--model_init_kwargs": "see --dtype, --attn_implementation and --trust_remote_code",
}  # fmt: skip


def no_effect(name: str, values: list[str]) -> bool:
    """Whether this flag with these values changes nothing here. No value is a switch that is on."""
    if name not in NO_EFFECT:
        return False
    accepted = NO_EFFECT[name][0]
    said = " ".join(values).lower() or "true"
    return accepted is None or any(said == value or _same_number(said, value) for value in (*accepted, "none"))


def instead(name: str, values: list[str]) -> str | None:
    """What to say to a flag that cannot be accepted; None for a name nobody knows."""
    if name in ELSEWHERE:
        return f"there is no {name} here: {ELSEWHERE[name]}"
    if name in NO_EFFECT:
        return f"there is no {' '.join([name, *values])} here: {NO_EFFECT[name][1]}; leave it out"
    return None


def _same_number(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return False
