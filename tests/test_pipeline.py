"""The four scripts one after another as a user runs them, by three launchers: whole folders, and the same weights."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import save_gpt2

from common import chat_format, checkpoint, models
from common.batches import pad_left
from common.metrics import read_jsonl

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
DEEPSPEED = [str(Path(sys.executable).with_name("deepspeed"))]

# A GPT-2: learned positions, dropout in its configuration, one token for BOS, EOS and pad and no row for another.
SFT = (
    "--learning_rate 1e-3 --adam_epsilon 1e-5 --max_length 90 --max_steps 3 --eval_steps 2 --lr_scheduler_type constant"
)
RM = "--learning_rate 1e-3 --adam_epsilon 1e-5 --max_length 90 --max_steps 3"
RL = (
    "--learning_rate 1e-3 --critic_learning_rate 1e-3 --adam_epsilon 1e-5 --max_steps 2 --rollout_batch_size 9 "
    "--minibatch_size 3 --per_device_train_batch_size 2 --rollout_forward_batch_size 4 --max_prompt_length 60 "
    "--max_completion_length 7 --sample_steps 1 --reward rewards.py:short --reward_weights 1 0.5"
)
ZERO3 = "--zero_stage 3 --offload_optimizer --gradient_checkpointing"


def rows() -> str:
    things = ["apple pie", "bees", "the happy ones", "goodbye", "Two spaces", "an unhappy bee", "12+30"]
    pairs = [
        {"prompt": f"What is {thing} {n}?", "chosen": f"Sure! {thing} is tasty.", "rejected": "No." * (1 + n % 2)}
        for n in range(9)
        for thing in things
    ]
    return "".join(json.dumps(pair) + "\n" for pair in pairs)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(command: list[str], script: str, flags: str, cwd: Path) -> str:
    launcher = [*command]
    if command is TORCHRUN:
        launcher.append(f"--master_port={free_port()}")
    if command[0] in DEEPSPEED:
        launcher.append(f"--master_port={free_port()}")
    start = time.time()
    done = subprocess.run(
        [*launcher, str(ROOT / script), *flags.split()],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    print(f"{time.time() - start:.1f} s: {Path(launcher[0]).name} {script} {flags}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder all runs live in, and what they printed."""
    root = tmp_path_factory.mktemp("pipeline")
    save_gpt2(root / "base")
    (root / "pairs.jsonl").write_text(rows())
    (root / "rewards.py").write_text(
        "def short(prompts, completions, **columns): return [-len(c[0]['content']) / 10 for c in completions]\n"
    )
    two = [*DEEPSPEED, "--num_accelerators=2"]
    template = "--chat_template human-assistant"
    said = {
        "data": launch(PYTHON, "step0_data/prepare.py", "--dataset pairs.jsonl --eval_fraction 0.4", root),
        # One process, ZeRO-0, everything where it lands by default: data/, models/sft, models/reward.
        "sft": launch(
            PYTHON, "step1_sft/train.py",
            f"--model base --data data --per_device_train_batch_size 6 {template} {SFT}", root,
        ),
        "reward": launch(
            PYTHON, "step2_reward/train.py", f"--model models/sft --per_device_train_batch_size 6 {RM}", root
        ),
        "rlhf": launch(
            PYTHON, "step3_rlhf/train.py",
            f"--actor models/sft --critic models/reward --output_dir rlhf --reward models/reward {RL}", root,
        ),
        # DeepSpeed's launcher, two ranks, ZeRO-3 for every role, the same global batches.
        "zero3/sft": launch(
            two, "step1_sft/train.py",
            f"--model base --data data --output_dir zero3/sft {template} --per_device_train_batch_size 3 {SFT} {ZERO3}",
            root,
        ),
        "zero3/reward": launch(
            two, "step2_reward/train.py",
            "--model zero3/sft --output_dir zero3/reward --per_device_train_batch_size 1 "
            f"--gradient_accumulation_steps 3 {RM} {ZERO3}", root,
        ),
        "zero3/rlhf": launch(
            two, "step3_rlhf/train.py",
            "--actor zero3/sft --critic zero3/reward --output_dir zero3/rlhf --reward zero3/reward "
            f"--frozen_zero_stage 3 --offload_frozen {RL} {ZERO3}", root,
        ),
        # torchrun, two ranks, ZeRO-0.
        "torchrun": launch(
            TORCHRUN, "step3_rlhf/train.py",
            f"--actor models/sft --critic models/reward --output_dir torchrun --reward models/reward {RL}", root,
        ),
        # The line of the README, but for the lengths, which this model is too short for, and the number of steps.
        "as typed": launch(
            DEEPSPEED, "step3_rlhf/train.py", "--actor models/sft --critic models/reward "
            "--max_prompt_length 60 --max_completion_length 7 --max_steps 1", root,
        ),
    }  # fmt: skip
    return root, said


FOLDERS = {
    "models/sft": "sft", "models/reward": "reward", "rlhf/actor": "rlhf-actor", "rlhf/critic": "rlhf-critic",
    "zero3/sft": "sft", "zero3/reward": "reward", "zero3/rlhf/actor": "rlhf-actor", "zero3/rlhf/critic": "rlhf-critic",
    "torchrun/actor": "rlhf-actor", "torchrun/critic": "rlhf-critic",
    "models/rlhf/actor": "rlhf-actor", "models/rlhf/critic": "rlhf-critic",
}  # fmt: skip
RUNS = {
    "models/sft": 3,
    "models/reward": 3,
    "rlhf": 2,
    "zero3/sft": 3,
    "zero3/reward": 3,
    "zero3/rlhf": 2,
    "torchrun": 2,
}

CONVERSATIONS = [
    [{"role": "user", "content": "What is an apple pie?"}, {"role": "assistant", "content": "Sure! It is tasty."}],
    [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "Thank you."}, {"role": "assistant", "content": "Two spaces, 1+2=3 and 12+30=42."}],
]

# Runs without this repository on its path, in another folder, with no network: what anybody can do with our folders.
PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

for name in ("common", "step1_sft", "tests"):
    try:
        __import__(name)
        sys.exit(f"{name} can be imported")
    except ImportError:
        pass
root, folders, conversations = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
found = {}
for folder, stage in folders.items():
    path = f"{root}/{folder}"
    is_scalar = stage in ("reward", "rlhf-critic")
    auto = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    model, info = auto.from_pretrained(path, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    tokenizer.padding_side = "right"
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found[folder] = {
        "keys": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])),
        "finite": all(bool(torch.isfinite(p).all()) and p.numel() > 0 for p in model.parameters()),
        "labels": model.config.num_labels if is_scalar else None,
        "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "template": tokenizer.chat_template,
        "config": [model.config.eos_token_id, model.config.pad_token_id],
        "rows": [model.get_input_embeddings().num_embeddings, len(tokenizer), model.config.vocab_size],
        "scores": logits.squeeze(-1).tolist() if is_scalar else None,
    }
    if not is_scalar:
        generation = GenerationConfig.from_pretrained(path)
        found[folder]["generation"] = [generation.eos_token_id, generation.pad_token_id]
        prompt = tokenizer.apply_chat_template(
            conversations[0][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
        found[folder]["generated"] = answer.shape[1] - prompt["input_ids"].shape[1]
json.dump(found, open(sys.argv[4], "w"))
"""


@pytest.fixture(scope="module")
def opened(run, tmp_path_factory) -> dict:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    words = [
        sys.executable,
        "-I",
        "-c",
        PLAIN,
        run[0],
        json.dumps(FOLDERS),
        json.dumps(CONVERSATIONS),
        elsewhere / "out",
    ]
    done = subprocess.run(
        words, cwd=elsewhere, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((elsewhere / "out").read_text())


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_opens_whole_with_plain_transformers(folder, opened):
    found = opened[folder]
    assert found["keys"] == [] and found["finite"]
    assert len(set(found["rows"])) == 1, "tokenizer, embedding and configuration count the same tokens"
    if FOLDERS[folder] in ("reward", "rlhf-critic"):
        assert found["labels"] == 1
    else:
        assert 1 <= found["generated"] <= 3


@pytest.mark.parametrize("folder", FOLDERS)
def test_tokenizer_and_configurations_agree(folder, opened):
    found = opened[folder]
    assert found["pad"] is not None and found["pad"] != found["eos"]
    assert found["config"] == [found["eos"], found["pad"]]
    assert found["template"] == chat_format.BUILTIN_TEMPLATES["human-assistant"]
    if "generation" in found:
        assert found["generation"] == [found["eos"], found["pad"]]


@pytest.mark.parametrize("folder", [folder for folder, stage in FOLDERS.items() if stage in ("reward", "rlhf-critic")])
def test_plain_transformers_scores_as_training_does(folder, run, opened):
    tokenizer = models.load_tokenizer(run[0] / folder)
    model, fresh = models.load_scalar_model(run[0] / folder)
    encoded = [chat_format.encode_conversation(tokenizer, messages)[0] for messages in CONVERSATIONS]
    scores = model.score(*pad_left(encoded, 7))
    assert not fresh and scores.tolist() == pytest.approx(opened[folder]["scores"], abs=1e-5)
    assert scores.std() > 1e-3


@pytest.mark.parametrize("folder", FOLDERS)
def test_records_are_complete_and_match_their_files(folder, run):
    path, stage = run[0] / folder, FOLDERS[folder]
    checkpoint.verify(path)
    record = checkpoint.read_stage(path)
    assert record["stage"] == stage and record["seed"] == 1 and record["args"]["seed"] == 1
    present = {p.relative_to(path).as_posix() for p in path.iterdir() if p.is_file()}
    files = set(record["files"])
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files <= present
    assert ("reward_stats.json" in files) == (stage == "reward")
    assert present - files - {"stage.json"} <= {"metrics.jsonl", "timings.jsonl", "samples.jsonl"}, "nothing left over"
    manifest = json.loads((run[0] / "data/manifest.json").read_text())
    assert record["data"]["path"] == str(run[0] / "data") and record["data"]["hash"] == manifest["hash"]
    assert record["packages"].keys() >= {"torch", "deepspeed", "transformers"}
    parents = {"sft": {"model"}, "reward": {"model"}}.get(stage, {"actor", "critic"})
    assert parents <= record["parents"].keys()
    for parent in record["parents"].values():
        recorded = Path(parent["path"]) / "stage.json"
        assert parent["sha256"] == (checkpoint.hash_file(recorded) if recorded.exists() else None)
    steps = read_jsonl((path if stage in ("sft", "reward") else path.parent) / "metrics.jsonl")
    assert record["metrics"].keys() == steps[-1].keys() - {"step"}
    for name, value in record["metrics"].items():
        assert value == steps[-1][name], name


@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_logged_once(name, run):
    folder, steps = run[0] / name, list(range(1, RUNS[name] + 1))
    metrics = read_jsonl(folder / "metrics.jsonl")
    timings = read_jsonl(folder / "timings.jsonl")
    assert [row["step"] for row in metrics] == [row["step"] for row in timings] == steps
    assert all(0 < row["total"] < 100 and row["time"] > 1e9 for row in timings)
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    if "rlhf" in name or name == "torchrun":
        samples = read_jsonl(folder / "samples.jsonl")
        assert {row["step"] for row in samples} == set(steps)
        assert all({"generate", "update", "total"} <= row.keys() for row in timings)
        fields = {"step", "row", "prompt", "response", "score", "kl", "length", "truncated"}
        assert all(row.keys() == fields for row in samples)
        assert all(row["val/ratio_first"] == pytest.approx(1, abs=1e-4) for row in metrics)
    else:
        assert not (folder / "samples.jsonl").exists()
        assert ["eval_loss" in row for row in metrics] == (
            [False, True, True] if "sft" in name else [False, False, True]
        )
    assert list((folder / "tensorboard").iterdir()) and not list(folder.glob(".*"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


SAME = [("models/sft", "zero3/sft"), ("models/reward", "zero3/reward")]
SAME += [(f"rlhf/{role}", f"{other}/{role}") for role in ("actor", "critic") for other in ("zero3/rlhf", "torchrun")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_launchers_ranks_and_stages_end_with_the_same_weights(one, other, run):
    ours, theirs = weights(run[0] / one), weights(run[0] / other)
    parent = {
        "models/sft": "base",
        "models/reward": "models/sft",
        "rlhf/actor": "models/sft",
        "rlhf/critic": "models/reward",
    }
    before = weights(run[0] / parent[one])
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    moved = [
        value - before[name] for name, value in ours.items() if name in before and value.shape == before[name].shape
    ]
    assert max(float(move.abs().max()) for move in moved) > 1e-3, "or the comparison says little"


def test_metrics_agree_over_launchers_ranks_and_stages(run):
    for one, other in (
        ("models/sft", "zero3/sft"),
        ("models/reward", "zero3/reward"),
        ("rlhf", "zero3/rlhf"),
        ("rlhf", "torchrun"),
    ):
        for ours, theirs in zip(*(read_jsonl(run[0] / name / "metrics.jsonl") for name in (one, other)), strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                if "logprob_gap" not in name:
                    assert theirs[name] == pytest.approx(value, abs=5e-4, rel=5e-4), (other, name)


def test_what_is_printed_says_where_things_are_and_what_comes_next(run):
    root, said = run
    assert "next: python step1_sft/train.py" in said["data"]
    assert "writing to models/sft" in said["sft"] and "pad token '<|pad|>' added as id 340" in said["sft"]
    assert "embeddings: grown to 341 rows" in said["sft"] and "embeddings: grown to 341 rows" in said["zero3/sft"]
    assert f"data: {root}/data (as the parent model was trained on)" in said["reward"]
    assert "scalar head: fresh" in said["reward"]
    assert "next: python step3_rlhf/train.py --actor models/sft --critic models/reward" in said["reward"]
    assert "ZeRO-3, 2 rank(s), fp32" in said["zero3/rlhf"] and "ZeRO-0, 2 rank(s), fp32" in said["torchrun"]
    assert "writing to models/rlhf" in said["as typed"]
    assert "next: python scripts/chat.py --model models/rlhf/actor" in said["as typed"]
    for name, text in said.items():
        assert "Traceback" not in text and text.count("done: ") == (name != "data"), name
