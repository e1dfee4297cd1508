#!/usr/bin/env bash
# A 7B model on the GPUs of one machine: will it fit, data, SFT, reward model, PPO, and what changed.
# Not run on GPUs yet: what is tested is the same file on two CPU ranks with tiny models.
#
#   bash scripts/run_all_7b.sh
#   BASE_MODEL=tiny REWARD_BASE=tiny DATASETS=pairs.jsonl NUM_GPUS=2 MAX_STEPS=2 bash scripts/run_all_7b.sh      on a CPU
#
#   BASE_MODEL, REWARD_BASE   folders or hub names of one family (Qwen/Qwen2.5-7B, Qwen/Qwen2.5-1.5B): the critic starts
#                             as the reward model and reads the actor's tokens, so tokenizer and template must be one
#   DATASETS                  preference data: files, folders or hub names, blanks between them (Anthropic/hh-rlhf)
#   CHAT_TEMPLATE             used where a base model brings none (chatml)
#   NUM_GPUS                  of this machine (all that are visible); without any GPU, ranks on the CPU
#   OFFLOAD=1                 optimizer states in host memory: for fewer or smaller GPUs
#   SFT_FLAGS, REWARD_FLAGS, RLHF_FLAGS, EVALUATION_FLAGS     more flags of that stage; they win over those below
#   MAX_STEPS                 optimizer steps of SFT and reward model, and RL steps, at most (0: one pass over the data)
#   IGNORE_PLAN=1             go on though the plan says that it cannot fit
#   LAUNCH, NUM_NODES         several machines: LAUNCH="deepspeed --hostfile hosts" NUM_NODES=2 NUM_GPUS=16 (of all)
#   SEED, OUT (out/7b), PYTHON, PIP_EXTRA_INDEX_URL     as in run_all_tiny.sh; what is finished in OUT is not run again
set -euo pipefail

main() { # one function, so that bash has read all of it before it starts: the file may change meanwhile
source "$(dirname "$0")/recipe.sh"
base=$(here "${BASE_MODEL:-Qwen/Qwen2.5-7B}")
reward_base=$(here "${REWARD_BASE:-Qwen/Qwen2.5-1.5B}")
datasets=()
for dataset in ${DATASETS:-Anthropic/hh-rlhf}; do datasets+=("$(here "$dataset")"); done
begin out/7b
max_steps=${MAX_STEPS:-0}
read -ra sft_flags <<< "${SFT_FLAGS:-}"
read -ra reward_flags <<< "${REWARD_FLAGS:-}"
read -ra rlhf_flags <<< "${RLHF_FLAGS:-}"
read -ra evaluation_flags <<< "${EVALUATION_FLAGS:-}"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
num_gpus=${NUM_GPUS:-$gpus}
[[ $num_gpus =~ ^[1-9][0-9]*$ && $max_steps =~ ^[0-9]+$ ]] || {
    echo "error: NUM_GPUS=$num_gpus MAX_STEPS=$max_steps: wanted whole numbers, and a GPU;" \
        "with NUM_GPUS=2 and tiny models the recipe runs on a CPU" >&2
    exit 2
}
((gpus == 0 || num_gpus <= gpus)) || [[ -n ${LAUNCH:-} ]] || {
    echo "error: NUM_GPUS=$num_gpus, but $gpus are visible; for several machines set LAUNCH and NUM_NODES too" >&2
    exit 2
}
# bf16 needs no loss scaling and every GPU that a 7B model fits has it; on a CPU `auto` is fp32.
if ((gpus)); then dtype=bf16 launch="deepspeed --num_gpus $num_gpus"
else dtype=auto launch="deepspeed --num_accelerators $num_gpus"; fi
if ((gpus)) && [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then # DeepSpeed would ignore it beside --num_gpus
    CUDA_VISIBLE_DEVICES=$(cut -d, -f "1-$num_gpus" <<< "$CUDA_VISIBLE_DEVICES")
    launch=deepspeed
fi
read -ra launch <<< "${LAUNCH:-$launch}"
same_settings "SEED=$seed BASE_MODEL=$base REWARD_BASE=$reward_base DATASETS=${datasets[*]} MAX_STEPS=$max_steps"

engine=(--dtype "$dtype" --zero_stage 3 --gradient_checkpointing)
engine+=(--save_steps 0.25 --save_total_limit 1 --resume_from_checkpoint) # a checkpoint of PPO takes 120 GB
[[ ${OFFLOAD:-0} == 0 ]] || engine+=(--offload_optimizer)
template=(--chat_template "${CHAT_TEMPLATE:-chatml}")
# Rows of an optimizer step / (8 in one forward x GPUs); the rest of the division is left out, and one forward is least.
accumulate() { local n=$(($1 / (8 * num_gpus))); echo $((n > 0 ? n : 1)); }

# Where the settings come from is in the README, "The 7B recipe".
# Step 1. The answers people chose, once.
sft=(step1_sft/train.py --model "$base" --data "$out/data" --output_dir "$out/sft" --seed "$seed"
    "${engine[@]}" "${template[@]}" --max_length 1024
    --per_device_train_batch_size 8 --gradient_accumulation_steps "$(accumulate 128)"
    --num_train_epochs 1 --max_steps "$max_steps"
    --learning_rate 1e-5 --lr_scheduler_type cosine --min_lr_ratio 0.1 --warmup_steps 0.03
    --weight_decay 0.1 --adam_beta1 0.9 --adam_beta2 0.95 --max_grad_norm 1.0
    --eval_steps 100 --logging_steps 5 "${sft_flags[@]}")

# Step 2. Which of two answers people prefer, once: more passes overfit.
reward=(step2_reward/train.py --model "$reward_base" --data "$out/data" --output_dir "$out/reward" --seed "$seed"
    "${engine[@]}" "${template[@]}" --max_length 1024
    --per_device_train_batch_size 8 --gradient_accumulation_steps "$(accumulate 256)"
    --num_train_epochs 1 --max_steps "$max_steps"
    --learning_rate 9e-6 --lr_scheduler_type cosine --min_lr_ratio 0.1 --warmup_steps 0.03
    --weight_decay 0.1 --adam_beta1 0.9 --adam_beta2 0.95 --max_grad_norm 1.0
    --eval_steps 100 --logging_steps 5 "${reward_flags[@]}")

# Step 3. PPO: 512 answers a step, each used once. They are decoded and scored 64 at a time on each GPU.
rlhf=(step3_rlhf/train.py --actor "$out/sft" --critic "$out/reward" --reward "$out/reward" --data "$out/data"
    --output_dir "$out/rlhf" --seed "$seed"
    "${engine[@]}" --frozen_zero_stage 3 --rollout_backend native
    --num_train_epochs 1 --max_steps "$max_steps"
    --rollout_batch_size 512 --minibatch_size 64 --num_ppo_epochs 1
    --per_device_train_batch_size 8 --rollout_forward_batch_size 64
    --max_prompt_length 512 --max_completion_length 512 --temperature 1.0 --top_p 1.0 --top_k 0
    --kl_coef 0.05 --kl_estimator k1 --score_norm standardize --score_clip 5 --missing_eos_penalty 1.0
    --gamma 1.0 --lam 0.95 --whiten_advantages --cliprange 0.2 --cliprange_value 0.2
    --learning_rate 1e-6 --critic_learning_rate 9e-6 --lr_scheduler_type constant --warmup_steps 0.03
    --weight_decay 0.1 --adam_beta1 0.9 --adam_beta2 0.95 --adam_epsilon 1e-5 --max_grad_norm 1.0
    --logging_steps 1 --sample_steps 10 "${rlhf_flags[@]}")

# The same held-out prompts before and after. The judge is what PPO was trained to please: it says whether training did
# its work, not whether answers are better. For that: EVALUATION_FLAGS="--judge /path/to/file.py:FUNCTION".
evaluation=(scripts/evaluate.py --model "$out/sft" "$out/rlhf/actor" --data "$out/data"
    --judge "$out/reward" --ref "$out/sft" --num_samples 256 --temperature 1.0
    --max_prompt_length 512 --max_completion_length 512 --batch_size 32 --dtype "$dtype"
    --seed "$seed" --output "$out/evaluation.json" "${evaluation_flags[@]}")

# Memory and disk, by arithmetic, before anything large is downloaded.
python scripts/plan.py --num_gpus "$num_gpus" --num_nodes "${NUM_NODES:-1}" \
    -- "${sft[@]}" -- "${reward[@]}" -- "${rlhf[@]}" -- "${evaluation[@]}" || {
    [[ ${IGNORE_PLAN:-0} == 1 ]] || {
        echo "stopped before anything was loaded. Flags go into SFT_FLAGS, REWARD_FLAGS, RLHF_FLAGS or" \
            "EVALUATION_FLAGS; IGNORE_PLAN=1 goes on anyway" >&2
        exit 2
    }
    echo "going on, as IGNORE_PLAN=1 says"
}

# Step 0. Real data have rows that cannot be used (HH: empty answers): they are set aside and counted.
stage data "$out/data/manifest.json" python step0_data/prepare.py \
    --dataset "${datasets[@]}" --on_bad_row skip --output_dir "$out/data" --seed "$seed"
[[ -f $out/data/prompts/eval.parquet ]] || {
    echo "error: DATASETS hold too few prompts: none is left to evaluate on; give more and remove $out" >&2
    exit 2
}
stage sft "$out/sft/stage.json" "${launch[@]}" "${sft[@]}"
stage reward "$out/reward/stage.json" "${launch[@]}" "${reward[@]}"
stage rlhf "$out/rlhf/actor/stage.json" "${launch[@]}" "${rlhf[@]}"
stage evaluation "$out/evaluation.json" python "${evaluation[@]}"
report
echo "talk to it: python scripts/chat.py --model $out/rlhf/actor"
}
main
