"""Command lines in the style of DeepSpeed-Chat and of articles, typed as they stand, from step 0 to step 3."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import save_llama

from common import checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
DEEPSPEED = Path(sys.executable).with_name("deepspeed")


def run(line: str, cwd: Path) -> tuple[str, str]:
    """stdout and stderr of a line as one types it: `python` is ours, scripts are those of this repository."""
    launcher, script, *words = shlex.split(line)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [sys.executable] if launcher == "python" else [DEEPSPEED, f"--master_port={port}"]
    done = subprocess.run([*start, ROOT / script, *words], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, done.stderr


def args_of(folder: Path) -> dict:
    return checkpoint.read_stage(folder)["args"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("typed")
    save_llama(root / "BASE")
    things = ["apple pie", "bees", "the happy ones", "goodbye", "an unhappy bee"]
    rows = [
        {"prompt": f"What is {thing} {n}?", "chosen": "Sure! It is tasty.", "rejected": "No."}
        for n in range(6)
        for thing in things
    ]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("python step0_data/prepare.py --data_path pairs.jsonl --data_split 2,4,4 --output_dir DATA", root)
    run(CHAT_1, root)
    run(CHAT_2, root)
    return root


CHAT_1 = """deepspeed step1_sft/train.py
   --data_path DATA --data_split 2,4,4 --model_name_or_path BASE --per_device_train_batch_size 4
   --per_device_eval_batch_size 4 --max_seq_len 128 --learning_rate 9.65e-6 --weight_decay 0. --num_train_epochs 1
   --gradient_accumulation_steps 1 --lr_scheduler_type cosine --num_warmup_steps 0 --seed 1234 --zero_stage 2
   --deepspeed --output_dir A"""
CHAT_2 = """deepspeed step2_reward/train.py
   --data_path DATA --data_split 2,4,4 --model_name_or_path A --num_padding_at_beginning 1
   --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --max_seq_len 128 --learning_rate 5e-5
   --weight_decay 0.1 --disable_dropout --num_train_epochs 1 --gradient_accumulation_steps 1
   --lr_scheduler_type cosine --num_warmup_steps 0 --seed 1234 --zero_stage 0 --deepspeed --output_dir C"""
# training_scripts/opt/single_node/run_1.3b.sh without --enable_ema, and run_llama2_7b.sh's offload and dropout.
CHAT_3 = """deepspeed step3_rlhf/train.py
   --data_path DATA --data_split 2,4,4 --actor_model_name_or_path A --critic_model_name_or_path C
   --num_padding_at_beginning 1 --per_device_generation_batch_size 4 --per_device_training_batch_size 2
   --generation_batches 1 --ppo_epochs 1 --max_answer_seq_len 8 --max_prompt_seq_len 64
   --actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.2
   --num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 2 --actor_gradient_checkpointing
   --critic_gradient_checkpointing --offload_reference_model --disable_actor_dropout --actor_dropout 0.0
   --num_warmup_steps 1 --deepspeed --seed 1234 --enable_hybrid_engine --actor_zero_stage 2 --critic_zero_stage 2
   --output_dir CHAT --enable_tensorboard --tensorboard_path CHAT"""


def test_deepspeed_chats_first_two_steps(world):
    args = args_of(world / "A")
    assert (args["seed"], args["zero_stage"], args["max_length"], args["learning_rate"]) == (1234, 2, 128, 9.65e-6)
    assert checkpoint.read_stage(world / "C")["stage"] == "reward" and args_of(world / "C")["weight_decay"] == 0.1


def test_deepspeed_chats_third_step(world):
    said, notes = run(CHAT_3, world)
    args = args_of(world / "CHAT/actor")
    assert (args["rollout_batch_size"], args["minibatch_size"], args["per_device_train_batch_size"]) == (4, 4, 2)
    assert (args["weight_decay"], args["critic_weight_decay"], args["frozen_zero_stage"]) == (0.1, 0.2, 3)
    assert "rollouts: " in said and notes.count("note: ") == 21
    assert "note: --num_padding_at_beginning has no effect here" in notes
    assert (world / "CHAT/metrics.jsonl").read_text().count("\n") >= 1


ARTICLES = {
    "OUT": "python step1_sft/train.py --model_name_or_path BASE --dataset_name DATA --per_device_train_batch_size 2 "
    "--max_seq_len 128 --num_train_epochs 1 --output_dir OUT",
    "RM": "python step2_reward/train.py --model_name_or_path A --dataset_name DATA --per_device_train_batch_size 2 "
    "--max_seq_len 128 --num_train_epochs 1 --output_dir RM",
    "models/rlhf/actor": "deepspeed step3_rlhf/train.py --actor_model A --critic_model C --dataset_name DATA "
    "--per_device_train_batch_size 2",
}


@pytest.mark.parametrize("folder", ARTICLES)
def test_lines_of_articles(world, folder):
    said, _ = run(ARTICLES[folder], world)
    assert f"done: {folder.removesuffix('/actor')}; next: " in said
    args = args_of(world / folder)
    assert args["per_device_train_batch_size"] == 2 and args["data"] == "DATA"


def test_after_sft_on_chats_alone_the_next_line_is_not_that_of_pairs(world):
    turns = [{"role": "user", "content": "Is 3 even?"}, {"role": "assistant", "content": "No."}]
    (world / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 9)
    run("python step0_data/prepare.py --dataset chats.jsonl --output_dir CHATS", world)
    said, _ = run("python step1_sft/train.py --model BASE --data CHATS --output_dir SFT --max_steps 1", world)
    assert "done: SFT; next: python scripts/chat.py --model SFT (these data have no pairs for step 2)" in said
    assert "next: python step2_reward/train.py" in run(ARTICLES["OUT"].replace(" OUT", " PAIRS"), world)[0]


def test_a_run_repeated_from_its_record_writes_the_same_bytes(world):
    if not (world / "OUT").exists():
        run(ARTICLES["OUT"], world)
    run("python step1_sft/train.py --config OUT/stage.json --output_dir AGAIN", world)
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (world / "OUT" / name).read_bytes() == (world / "AGAIN" / name).read_bytes(), name
    first, second = (checkpoint.read_stage(world / name) for name in ("OUT", "AGAIN"))
    assert first["args"] | {"output_dir": "", "config": ""} == second["args"] | {"output_dir": "", "config": ""}
    assert first["files"] == second["files"]
    assert (world / "OUT/model.safetensors").read_bytes() != (world / "BASE/model.safetensors").read_bytes()


def test_data_that_was_dealt_out_otherwise_is_refused(world):
    words = shlex.split(CHAT_1.replace("--data_split 2,4,4", "--data_split 6,2,2").replace("--output_dir A", ""))[2:]
    command = [sys.executable, ROOT / "step1_sft/train.py", *words, "--output_dir", "none"]
    done = subprocess.run(command, cwd=world, capture_output=True, text=True, env=os.environ, timeout=100)
    assert done.returncode == 2 and not (world / "none").exists()
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert errors == [
        "error: --data_split 6,2,2, but step 0 dealt DATA out by 2,4,4; prepare it again with --split 6,2,2, or leave "
        "--data_split out"
    ]
