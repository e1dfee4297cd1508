#!/usr/bin/env bash
# The whole pipeline on a laptop: data, SFT, reward model, PPO, and whether it helped. No GPU, no hub, no account.
#
#   bash scripts/run_all_tiny.sh                   sets up .venv, runs everything, ends with a table and a page
#   SEED=2 OUT=out/tiny-2 bash scripts/run_all_tiny.sh
#
#   SEED                  of data, models and sampling (1)
#   DATASET               tiny (English), tiny_zh (Chinese), or "tiny tiny_zh": one model for both (tiny)
#   OUT                   where everything goes (out/DATASET); what is finished there is not run again
#   PYTHON, PIP_EXTRA_INDEX_URL       see scripts/setup.sh
#   LAUNCH                what starts a stage (python), for example LAUNCH="deepspeed --num_accelerators 2"; steps 1 and 2
#                         count their batches per process, so two processes train on twice the rows
#   SHUFFLE_PREFERENCES=1 negative control: who is preferred is decided by a coin, so nothing can be learned in step 2
set -euo pipefail

[[ $# == 0 ]] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; echo "error: settings go in front: SEED=2 bash $0" >&2; exit 2; }

main() { # one function, so that bash has read all of it before it starts: the file may change meanwhile
source "$(dirname "$0")/recipe.sh"
shuffle=${SHUFFLE_PREFERENCES:-0}
read -ra dataset <<< "${DATASET:-tiny}"
sets=$(IFS=+; echo "${dataset[*]}") # tiny+tiny_zh: a word for folders and settings
[[ $sets =~ ^(tiny|tiny_zh|tiny\+tiny_zh)$ ]] || {
    echo "error: DATASET=${DATASET:-} is none of: tiny, tiny_zh, \"tiny tiny_zh\"" >&2; exit 2; }
begin "out/$sets"
read -ra launch <<< "${LAUNCH:-python}"
settings="SEED=$seed SHUFFLE_PREFERENCES=$shuffle"
[[ $sets == tiny ]] || settings+=" DATASET=$sets"
same_settings "$settings"

# Step 0. Templated dialogues, a sentencepiece tokenizer and an untrained Llama of 0.9 M parameters, made on the spot.
prepare=(python step0_data/prepare.py --dataset "${dataset[@]}" --output_dir "$out/data" --seed "$seed")
[[ $shuffle == 0 ]] || prepare+=(--shuffle_preferences)
stage data "$out/data/manifest.json" "${prepare[@]}"

# Step 1. Learn to answer at all: next-token loss on the answers, which are polite or rude, useful or lazy.
stage sft "$out/sft/stage.json" "${launch[@]}" step1_sft/train.py \
    --model "$out/data/base_model" --data "$out/data" --output_dir "$out/sft" --seed "$seed" \
    --per_device_train_batch_size 32 --gradient_accumulation_steps 1 --max_steps 400 --max_length 128 \
    --learning_rate 3e-3 --lr_scheduler_type cosine --min_lr_ratio 0.1 --warmup_steps 20 \
    --weight_decay 0.01 --adam_beta1 0.9 --adam_beta2 0.95 --max_grad_norm 1.0 \
    --eval_steps 200 --logging_steps 20 --resume_from_checkpoint

# Step 2. Learn which of two answers people prefer: a scalar head on the SFT model, a loss on score differences.
stage reward "$out/reward/stage.json" "${launch[@]}" step2_reward/train.py \
    --model "$out/sft" --data "$out/data" --output_dir "$out/reward" --seed "$seed" \
    --per_device_train_batch_size 24 --gradient_accumulation_steps 1 --max_steps 150 --max_length 128 \
    --learning_rate 1e-3 --lr_scheduler_type linear --min_lr_ratio 0.0 --warmup_steps 0 \
    --weight_decay 0.0 --adam_beta1 0.9 --adam_beta2 0.95 --max_grad_norm 1.0 \
    --eval_steps 150 --logging_steps 10 --resume_from_checkpoint

# Step 3. Answer as the reward model likes, without straying far from SFT: PPO.
stage rlhf "$out/rlhf/actor/stage.json" "${launch[@]}" step3_rlhf/train.py \
    --actor "$out/sft" --critic "$out/reward" --reward "$out/reward" --data "$out/data" \
    --output_dir "$out/rlhf" --seed "$seed" \
    --max_steps 25 --rollout_batch_size 64 --num_ppo_epochs 2 --minibatch_size 32 --per_device_train_batch_size 32 \
    --max_prompt_length 64 --max_completion_length 40 --temperature 1.0 --top_p 1.0 --top_k 0 \
    --kl_coef 0.15 --kl_estimator k1 --score_norm center --score_clip 5 --missing_eos_penalty 1.0 \
    --gamma 1.0 --lam 0.95 --whiten_advantages --cliprange 0.2 --cliprange_value 0.5 \
    --learning_rate 2e-4 --critic_learning_rate 1e-3 --lr_scheduler_type constant --warmup_steps 0 \
    --weight_decay 0.0 --adam_beta1 0.9 --adam_beta2 0.95 --max_grad_norm 1.0 \
    --logging_steps 1 --sample_steps 5 --resume_from_checkpoint

# Did it help? The same held-out prompts before and after, judged by the rubric that no stage was trained on.
stage evaluation "$out/evaluation.json" python scripts/evaluate.py \
    --model "$out/sft" "$out/rlhf/actor" --data "$out/data" --judge step0_data/toy.py:gold \
    --reward "$out/reward" --ref "$out/sft" --best_of 16 --num_samples 256 --temperature 1.0 \
    --max_completion_length 40 --seed "$seed" --output "$out/evaluation.json"

python scripts/tiny_summary.py --out "$out"

echo
report
}
main; exit # in one line: nothing more is read from the file
