"""run_all_7b.sh: the commands it gives, its plan on 8 GPUs as the README shows it, and a whole run on two CPU ranks."""

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_tokenizers
import torch
from small_models import SIZE
from stub_recipe import StubRecipe
from test_docs import fenced, tables
from test_plan import published
from transformers import LlamaConfig, LlamaForCausalLM

from common import checkpoint
from common.errors import UserError
from common.metrics import read_jsonl
from scripts import plan

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["data", "sft", "reward", "rlhf", "evaluation"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return StubRecipe(tmp_path_factory.mktemp("recipe") / "root", "run_all_7b.sh")


def flags_of(stage: str, command: list[str]) -> dict:
    """The stage's own parser over its command, whatever launches it."""
    at = next(i for i, word in enumerate(command) if word.endswith(".py"))
    module = importlib.import_module(command[at].removesuffix(".py").replace("/", "."))
    return vars(module.parse_args(command[at + 1 :]))


def test_on_eight_gpus_everything_has_its_default(recipe, tmp_path):
    done, commands = recipe.run(GPUS="8", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(commands) == STAGES
    for stage in ("sft", "reward", "rlhf"):
        assert commands[stage][:3] == ["deepspeed", "--num_gpus", "8"]
        flags = flags_of(stage, commands[stage])
        assert (flags["dtype"], flags["zero_stage"], flags["gradient_checkpointing"]) == ("bf16", 3, True)
        assert (flags["offload_optimizer"], flags["max_steps"], flags["num_train_epochs"]) == (False, 0, 1)
    data, sft, reward, rlhf, evaluation = (flags_of(stage, commands[stage]) for stage in STAGES)
    assert data["dataset"] == ["Anthropic/hh-rlhf"] and data["on_bad_row"] == "skip"
    assert sft["model_name_or_path"] == "Qwen/Qwen2.5-7B" and reward["model_name_or_path"] == "Qwen/Qwen2.5-1.5B"
    assert 8 * sft["per_device_train_batch_size"] * sft["gradient_accumulation_steps"] == 128
    assert 8 * reward["per_device_train_batch_size"] * reward["gradient_accumulation_steps"] == 256
    assert rlhf["actor"] == sft["output_dir"] and rlhf["critic"] == reward["output_dir"]
    assert rlhf["reward"] == [reward["output_dir"]] and rlhf["frozen_zero_stage"] == 3
    assert evaluation["model"] == [sft["output_dir"], f"{rlhf['output_dir']}/actor"]
    assert evaluation["judge"] == reward["output_dir"] and evaluation["ref"] == sft["output_dir"]
    assert evaluation["max_completion_length"] == rlhf["max_completion_length"]


def test_the_plan_comes_first_and_sees_the_very_commands(recipe, tmp_path):
    _, commands = recipe.run(GPUS="8", OUT=str(tmp_path))
    assert [call[0] for call in recipe.calls] == ["scripts/plan.py"] + 5 * ["scripts/run_stage.py"] + [
        "scripts/report.py"
    ]
    asked = recipe.calls[0]
    assert asked[1:5] == ["--num_gpus", "8", "--num_nodes", "1"]
    planned = plan.split(asked[asked.index("--") + 1 :], "--")
    assert planned == [commands[s][3:] for s in ("sft", "reward", "rlhf")] + [commands["evaluation"][1:]]


def test_a_plan_that_does_not_fit_stops_everything_unless_it_is_ignored(recipe, tmp_path):
    done, commands = recipe.run(GPUS="8", OUT=str(tmp_path / "a"), PLAN_SAYS="2")
    assert done.returncode == 2 and commands == {} and "IGNORE_PLAN=1 goes on anyway" in done.stderr
    done, commands = recipe.run(GPUS="8", OUT=str(tmp_path / "b"), PLAN_SAYS="2", IGNORE_PLAN="1")
    assert list(commands) == ["data"], "the stub prepares no data, which the recipe notices"
    assert "DATASETS hold too few prompts" in done.stderr and done.returncode == 2


@pytest.fixture(autouse=True)
def prepared(tmp_path):
    """Where a test's OUT is its own folder, held-out prompts lie there as if step 0 had run."""
    (tmp_path / "data" / "prompts").mkdir(parents=True)
    (tmp_path / "data" / "prompts" / "eval.parquet").touch()


def test_overrides_reach_their_stages(recipe, tmp_path):
    (tmp_path / "base").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    done, commands = recipe.run(
        cwd=tmp_path, GPUS="8", NUM_GPUS="3", OUT=str(tmp_path), BASE_MODEL="base", REWARD_BASE="hub/name",
        DATASETS="a.jsonl b.jsonl hub/pairs", MAX_STEPS="7", SEED="5", OFFLOAD="1", CHAT_TEMPLATE="human-assistant",
        SFT_FLAGS="--max_length 77", REWARD_FLAGS="--max_length 78", EVALUATION_FLAGS="--judge j.py:f",
        RLHF_FLAGS="--kl_coef 0.5 --rollout_batch_size 64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data, sft, reward, rlhf, evaluation = (flags_of(stage, commands[stage]) for stage in STAGES)
    assert data["dataset"] == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "hub/pairs"]
    assert sft["model_name_or_path"] == str(tmp_path / "base") and reward["model_name_or_path"] == "hub/name"
    assert commands["rlhf"][:3] == ["deepspeed", "--num_gpus", "3"]
    assert all(flags["max_steps"] == 7 and flags["offload_optimizer"] for flags in (sft, reward, rlhf))
    assert all(flags["seed"] == 5 for flags in (data, sft, reward, rlhf, evaluation))
    assert sft["chat_template"] == reward["chat_template"] == "human-assistant"
    assert (sft["max_length"], reward["max_length"]) == (77, 78)
    assert (rlhf["kl_coef"], rlhf["rollout_batch_size"], evaluation["judge"]) == (0.5, 64, "j.py:f")
    assert sft["gradient_accumulation_steps"] == 128 // 24 and reward["gradient_accumulation_steps"] == 256 // 24


def test_many_gpus_still_run_one_forward_a_step(recipe, tmp_path):
    done, commands = recipe.run(
        GPUS="8", NUM_GPUS="64", NUM_NODES="8", LAUNCH="deepspeed --hostfile hosts", OUT=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert commands["sft"][:3] == ["deepspeed", "--hostfile", "hosts"]
    assert flags_of("sft", commands["sft"])["gradient_accumulation_steps"] == 1
    assert recipe.calls[0][1:5] == ["--num_gpus", "64", "--num_nodes", "8"]


def test_only_gpus_that_are_visible_are_used(recipe, tmp_path):
    """DeepSpeed's --num_gpus takes the machine's first ones, whatever CUDA_VISIBLE_DEVICES says."""
    _, commands = recipe.run(GPUS="4", CUDA_VISIBLE_DEVICES="2,3,6,7", NUM_GPUS="3", OUT=str(tmp_path))
    assert commands["sft"][:2] == ["deepspeed", "step1_sft/train.py"]
    assert (recipe.root / "log.gpus").read_text() == "2,3,6\n" and recipe.calls[0][2] == "3"
    done, commands = recipe.run(GPUS="4", NUM_GPUS="8", OUT=str(tmp_path))
    assert done.returncode == 2 and commands == {} and "NUM_GPUS=8, but 4 are visible" in done.stderr


def test_without_a_gpu_it_asks_for_a_number_of_ranks(recipe, tmp_path):
    done, commands = recipe.run(OUT=str(tmp_path))
    assert done.returncode == 2 and commands == {} and "with NUM_GPUS=2 and tiny models" in done.stderr
    done, commands = recipe.run(OUT=str(tmp_path), NUM_GPUS="2")
    assert commands["sft"][:3] == ["deepspeed", "--num_accelerators", "2"]
    assert flags_of("sft", commands["sft"])["dtype"] == "auto", "bf16 on a CPU would be slow"
    assert recipe.run(OUT=str(tmp_path), NUM_GPUS="2", MAX_STEPS="many")[0].returncode == 2


def test_runs_of_other_models_or_data_are_not_mixed(recipe, tmp_path):
    assert recipe.run(GPUS="8", OUT=str(tmp_path))[0].returncode == 0
    for changed in ({"BASE_MODEL": "x/y"}, {"DATASETS": "x/y"}, {"MAX_STEPS": "3"}, {"SEED": "2"}):
        done, commands = recipe.run(GPUS="8", OUT=str(tmp_path), **changed)
        assert done.returncode == 2 and commands == {} and "choose another OUT or remove" in done.stderr
    # Fewer GPUs and other batches finish what was begun.
    assert recipe.run(GPUS="4", OUT=str(tmp_path), OFFLOAD="1", RLHF_FLAGS="--max_steps 5")[0].returncode == 0


# ---- the plan of the default recipe, as the README shows it


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """A disk on which all of it fits, whatever this machine has."""
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: SimpleNamespace(free=900 * plan.GIB))


@pytest.fixture(scope="module")
def default_plan(recipe, tmp_path_factory):
    """(words, text) of the plan of the bare command on 8 GPUs of 79 GiB; folders play the part of the hub's models."""
    root = tmp_path_factory.mktemp("plan")
    for name in ("Qwen2.5-7B", "Qwen2.5-1.5B"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(published(name)))
        small_tokenizers.qwen_like().save_pretrained(root / name)
    recipe.run(GPUS="8", OUT=str(root / "out"), IGNORE_PLAN="1")
    words = [w.replace("Qwen/Qwen2.5", f"{root}/Qwen2.5") for w in recipe.calls[0][1:]]
    words = ["--gpu_gb", "79", "--host_gb", "500", *words]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.shutil, "disk_usage", lambda _: SimpleNamespace(free=900 * plan.GIB))
        plan.main(words)
    return words, said.getvalue()


def test_the_default_fits_on_eight_80_gb_gpus_but_not_on_less_without_changes(default_plan):
    words, said = default_plan
    together = re.findall(r"^together +(.*?) *$", said, re.M)
    assert len(together) == 4 and max(float(size) for row in together for size in row.split()) < 0.9 * 79
    words = list(words)
    words[words.index("--num_gpus") + 1] = "2"
    with pytest.raises(UserError, match="it would fit with .*--offload_optimizer"):
        plan.main(words)


def test_the_readme_shows_the_plan_as_it_is(default_plan):
    """The tables word for word; what hangs on this machine (free memory and disk) aside."""
    shown = next(block for block in fenced("README.md", "") if block.startswith("Plan for 8 GPUs"))

    def fixed(text: str) -> list[str]:
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return [re.sub(r"for .*?, free|free [\d.]+", "free", line) for line in lines if not line.startswith("disk")]

    assert fixed(shown) == fixed(default_plan[1])


def test_the_readmes_costs_are_the_plans(default_plan, capsys):
    """Seconds of the plan; HH's 160,800 pairs, of which 5 % are held out, in shares of 20, 40 and 40 %; 8 GPUs."""
    words = default_plan[0]
    plan.main(["--json", *words])
    stages = json.loads(capsys.readouterr().out)["stages"]
    table = next(t for t in tables((ROOT / "README.md").read_text()) if t[0][-1] == "GPU hours")
    said = {row[0]: [float(re.match(r"[\d.]+", cell)[0]) for cell in row[1:]] for row in table[1:]}
    rows = 160_800 * 0.95
    steps = {"SFT": 0.2 * rows / 128, "reward model": 0.4 * rows / 256, "PPO": 0.4 * rows / 512, "evaluation": 1}
    assert [round(steps[name]) for name in ("SFT", "reward model", "PPO")] == [239, 239, 119]
    for name, stage in zip(said, stages.values(), strict=True):
        assert said[name][0] == pytest.approx(stage["seconds"], rel=0.02), name
        assert said[name][1] == pytest.approx(stage["seconds"] * steps[name] * 8 / 3600, rel=0.1), name


# ---- the whole of it, on two CPU ranks


def save_base(folder: Path, hidden: int) -> str:
    """A tiny Llama that often stops by itself, with the tokenizer and template of its family."""
    tokenizer = small_tokenizers.qwen_like()
    tokenizer.pad_token = "<|fim_pad|>"
    torch.manual_seed(0)
    sizes = SIZE | {"hidden_size": hidden, "vocab_size": 352, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=tokenizer.pad_token_id))
    model.lm_head.weight.data[tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_whole_run_on_two_cpu_ranks(tmp_path):
    # This repository, but for set-up: the environment that runs the tests is the one that it would make.
    root = tmp_path / "root"
    root.mkdir()
    for name in ("common", "step0_data", "step1_sft", "step2_reward", "step3_rlhf"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "scripts" / "setup.sh").write_text("exit 0\n")
    (root / ".venv").symlink_to(Path(sys.executable).parent.parent)
    things = ["apple pie", "bees", "the happy ones", "goodbye", "Two spaces", "an unhappy bee", "12+30"]
    rows = [
        {"prompt": f"What is {thing} {n}?", "chosen": f"Sure! {thing} is tasty.", "rejected": "No." * (1 + n % 2)}
        for n in range(30)
        for thing in things
    ]
    bad = [{"prompt": "Why?", "chosen": "", "rejected": "No."}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + bad))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    small = "--max_prompt_length 64 --max_completion_length 8"
    env = {
        "BASE_MODEL": save_base(tmp_path / "base", 32), "REWARD_BASE": save_base(tmp_path / "small", 16),
        "DATASETS": "pairs.jsonl", "NUM_GPUS": "2", "MAX_STEPS": "2", "OUT": "out",
        "LAUNCH": f"deepspeed --num_accelerators 2 --master_port {port}", "OMP_NUM_THREADS": "1",
        # The recipe's sizes, made small.
        "SFT_FLAGS": "--max_length 128 --gradient_accumulation_steps 1",
        "REWARD_FLAGS": "--max_length 128 --gradient_accumulation_steps 1",
        "RLHF_FLAGS": f"{small} --rollout_batch_size 16 --minibatch_size 8 --per_device_train_batch_size 2",
        "EVALUATION_FLAGS": f"{small} --num_samples 16",
    }  # fmt: skip

    def run() -> str:
        done = subprocess.run(
            ["bash", root / "scripts/run_all_7b.sh"], cwd=tmp_path, env=os.environ | env, capture_output=True,
            text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    said, out = run(), tmp_path / "out"
    assert said.index("Plan for 2 ranks on a CPU") < said.index("== data") and "GPU hours" not in said
    assert "1 set aside: chosen is an empty answer" in said
    assert said.count("ZeRO-3, 2 rank(s), fp32") == 4 and "precision fp32" in said
    assert "text is re-tokenised" not in said, "the reward model reads the actor's very tokens"
    for folder, stage in (
        ("sft", "sft"),
        ("reward", "reward"),
        ("rlhf/actor", "rlhf-actor"),
        ("rlhf/critic", "rlhf-critic"),
    ):
        checkpoint.verify(out / folder)
        assert checkpoint.read_stage(out / folder)["stage"] == stage
    assert [len(read_jsonl(out / run / "metrics.jsonl")) for run in ("sft", "reward", "rlhf")] == [2, 2, 2]
    assert json.loads((out / "reward/config.json").read_text())["hidden_size"] == 16
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert [Path(entry["model"]).name for entry in evaluation["models"]] == ["sft", "actor"]
    assert evaluation["models"][0]["kl"] == pytest.approx(0, abs=1e-5) and evaluation["models"][1]["kl"] != 0
    assert {path.name for path in (out / "logs").glob("*.log")} == {f"{stage}.log" for stage in STAGES}
    assert shlex.split(said.splitlines()[-1])[-1] == str(out / "rlhf/actor")

    again = run()
    assert again.count("finished already") == 5 and "deepspeed" not in again
