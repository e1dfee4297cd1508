"""Mistakes on the command line: exit code 2, one line of what was seen, wanted and to do, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import one_rank
import pytest
import small_tokenizers
from small_models import SIZE, save_gpt2, save_llama, save_reward
from small_runs import answer, mistake, snapshot, write_data
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from common import checkpoint, distributed
from step1_sft import train as sft
from step2_reward import train as reward
from step3_rlhf import train as rlhf

ROOT = Path(__file__).resolve().parents[1]
USER = [{"role": "user", "content": "What is an apple pie?"}]


def publish(folder: Path, stage: str, save, data: dict | None = None) -> None:
    options = {"args": {}, "seed": 1, "parents": {}, "data": data, "metrics": {}}
    checkpoint.publish(folder, stage, save, **options)


def save_scored(folder: Path) -> None:
    save_reward(folder)
    (folder / "reward_stats.json").write_text(json.dumps({"mean": 0.0, "std": 1.0, "n": 2, "data_hash": "x"}))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with models of every stage, good and bad, and data, whole and partial."""
    root = tmp_path_factory.mktemp("world")
    rows = {
        "sft": [{"messages": USER + answer("Sure!")}] * 3,
        "preference": [{"prompt": USER, "chosen": answer("Sure!"), "rejected": answer("No.")}] * 3,
        "prompts": [{"prompt": USER}] * 3,
    }
    for name, stages in {
        "data": rows,
        "pairs": {"preference": rows["preference"]},
        "sentences": {"sft": rows["sft"]},
        "equal": {"preference": [rows["preference"][0] | {"rejected": answer("Sure!")}]},
    }.items():
        write_data(root / name, **stages)
    (root / "empty/sft").mkdir(parents=True)
    import pyarrow.parquet as pq

    table = pq.read_table(root / "data/sft/train.parquet")
    pq.write_table(table.slice(0, 0), root / "empty/sft/train.parquet")
    (root / "texts").mkdir()
    (root / "texts/notes.txt").write_text("nothing prepared")

    recorded = {"path": str(root / "data"), "hash": json.loads((root / "data/manifest.json").read_text())["hash"]}
    publish(root / "sft", "sft", save_llama, recorded)
    publish(root / "reward", "reward", save_scored)
    publish(root / "unscored", "reward", save_reward)
    publish(root / "changed", "sft", save_llama, recorded | {"hash": "of other data"})
    publish(root / "damaged", "sft", save_llama)
    weights = bytearray((root / "damaged/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (root / "damaged/model.safetensors").write_bytes(weights)
    publish(root / "rlhf/actor", "rlhf-actor", save_llama)
    publish(root / "rlhf/critic", "rlhf-critic", save_reward)
    (root / "unfinished").mkdir()
    save_llama(root / "foreign")
    save_reward(root / "classifier")
    save_gpt2(root / "gpt2")
    (root / "lora").mkdir()
    (root / "lora/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "sft"}')
    # transformers takes Qwen2's own class of tokenizer for whatever stands beside a Qwen2 model
    mixed = AutoConfig.for_model("qwen2", **SIZE, vocab_size=360, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(mixed).save_pretrained(root / "mixed")
    small_tokenizers.llama_2(root / "pieces").save_pretrained(root / "mixed")
    save_scored(root / "mixed-rm")
    (root / "mixed-rm/config.json").write_text(
        json.dumps(json.loads((root / "mixed-rm/config.json").read_text()) | {"model_type": "qwen2"})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "mixed-rm" / name).write_bytes((root / "mixed" / name).read_bytes())
    config = json.loads((save_llama(root / "short") / "config.json").read_text())
    (root / "short/config.json").write_text(json.dumps(config | {"max_position_embeddings": 70}))
    labels = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    LlamaForSequenceClassification(labels).save_pretrained(save_reward(root / "labels"))
    (root / "nothing").mkdir()
    (root / "nothing/config.json").write_text("{}")
    (root / "file").write_text("mine")
    (root / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    code = "def good(prompts, completions, **columns): return [0.0] * len(prompts)\ndef bad(texts): return []\n"
    (root / "rewards.py").write_text(code)
    return root


SFT = "--model sft --output_dir out "
RM = "--model sft --output_dir out "
RL = "--actor sft --critic reward --output_dir out --max_prompt_length 64 --max_completion_length 8 "
MAKE_REWARD = "make it with `python step2_reward/train.py"

CASES = [
    # the model
    (sft, "--model reward --data data", "--model reward is of stage 'reward', wanted 'base' or 'sft'"),
    (sft, "--model ./nowhere --data data", "--model ./nowhere: no such folder (looked in "),
    (sft, "--model models/base --data data", "--model models/base: no such folder"),
    (sft, "--model owner/no-such-model --data data", "from owner/no-such-model: no such folder here, and of the hub: "),
    (sft, "--model unfinished --data data", "no finished model there (neither stage.json nor config.json)"),
    (sft, "--model damaged --data data", "damaged/model.safetensors differs from what its stage wrote"),
    (sft, "--model file --data data", "--model file is a file; wanted a model folder"),
    (sft, "--model rlhf --data data", "did you mean rlhf/actor?"),
    (sft, "--model nothing --data data", "no model configuration could be loaded from nothing"),
    (sft, "--model classifier --data data", "lacks weights of a causal language model: lm_head.weight"),
    (sft, "--model gpt2 --data data --max_length 64", "no chat template; name one with --chat_template"),
    (sft, "--model gpt2 --data data --max_length 64 --chat_template x", "--chat_template x: neither a built-in"),
    (
        sft,
        "--model gpt2 --data data --max_length 129",
        "129 tokens a sequence asked for, the model has positions for 128",
    ),
    (reward, "--model rlhf/critic --data data", "is of stage 'rlhf-critic', wanted 'sft'"),
    (reward, "--model labels --data data", "classifies into 3 labels, wanted a reward model with 1"),
    (
        sft,
        "--model lora --data data",
        "--model lora holds an adapter (LORA of sft), and a whole model is wanted; merge it",
    ),
    (
        reward,
        "--model lora --data data",
        "first: `python scripts/merge_adapter.py --adapter lora --output_dir lora-merged`",
    ),
    (rlhf, RL + "--data data --ref lora", "--ref lora holds an adapter"),
    (rlhf, RL.replace("sft", "lora") + "--data data --lora_r 2", "--actor lora holds an adapter"),
    (rlhf, RL + "--data data --reward lora", "--reward lora holds an adapter"),
    (
        rlhf,
        RL + "--data data --ref gpt2",
        "--ref gpt2 has another tokenizer than the actor, whose tokens it has to read",
    ),
    (rlhf, RL + "--data data --ref short", "72 tokens a sequence asked for, short has positions for 70"),
    # the tokenizer
    (
        sft,
        "--model mixed --data data --max_length 64",
        "does not give the text back: words lose the spaces between them",
    ),
    (
        reward,
        "--model mixed --data data --max_length 64",
        "transformers opens it as Qwen2Tokenizer for this type of model",
    ),
    (rlhf, RL + "--data data --reward mixed-rm", "--reward mixed-rm: the tokenizer (Qwen2Tokenizer) does not give"),
    # the data
    (sft, "--model foreign", "--data is missing and the parent model records none"),
    (sft, "--model changed", "has changed since the parent model was trained"),
    (sft, SFT + "--data nowhere", "--data nowhere: no such folder or file; make it with `python step0_data"),
    (sft, SFT + "--data pairs", "--data pairs has no sft data, only preference"),
    (sft, SFT + "--data texts", "--data texts is no prepared data (it holds notes.txt)"),
    (sft, SFT + "--data file", "file is not a readable parquet file"),
    (sft, SFT + "--data pairs/preference/train.parquet", "has the columns prompt, chosen, rejected but sft data needs"),
    (sft, SFT + "--data empty", "the file is empty; these are the rows of empty/sft/train.parquet"),
    (sft, SFT + "--max_length 3", "none of 3 rows can be used; 3 set aside: no answer begins within --max_length 3"),
    (reward, RM + "--data sentences", "--data sentences has no preference data, only sft"),
    (reward, RM + "--data sentences", "or do without a reward model: step 3 takes --reward FILE.py:FUNCTION"),
    (reward, RM + "--data equal", "none of 1 rows can be used; 1 set aside: chosen and rejected are equal"),
    (reward, RM + "--max_length 3", "3 set aside: prompt over 2 tokens even without its older turns"),
    (rlhf, RL + "--data pairs", "--data pairs has no prompts data, only preference"),
    (rlhf, RL.replace("64", "3"), "3 set aside: over --max_prompt_length 3 even without its older turns"),
    # the output folder
    (sft, "--model sft --output_dir reward", "reward holds a finished run; choose another --output_dir"),
    (rlhf, RL.replace("out ", "rlhf "), "rlhf holds a finished run"),
    (rlhf, RL.replace("out ", "sft "), "sft holds a finished run"),
    (reward, "--model sft --output_dir file", "file is a file; choose a folder"),
    (reward, "--model sft --output_dir file/deeper", "file is a file; choose a folder"),
    # the engine
    (sft, SFT + "--dtype fp16", "--dtype fp16 does not train on a CPU"),
    (sft, SFT + "--offload_optimizer", "--offload_optimizer needs --zero_stage 1, 2 or 3"),
    (reward, RM + "--offload_param --zero_stage 2", "--offload_param needs --zero_stage 3, seen 2"),
    (rlhf, RL + "--zero_stage 3 --critic_zero_stage 0 --offload_param", "--offload_param needs --zero_stage 3, seen 0"),
    (rlhf, RL + "--offload_frozen", "--offload_frozen needs --frozen_zero_stage 3"),
    (sft, SFT + "--ds_config ds.json", "ds.json has zero_optimization.stage 2, but --zero_stage is 0; change one"),
    (sft, SFT + "--ds_config nowhere.json", "--ds_config nowhere.json: "),
    (sft, SFT + "--report_to wandb", "--report_to wandb: the package is not installed"),
    # the roles of step 3
    (rlhf, "--actor reward --critic reward", "--actor reward is of stage 'reward', wanted 'sft'"),
    (rlhf, "--actor sft --critic sft", "sft is of stage 'sft'; name what scores: --reward"),
    (rlhf, "--actor sft --critic rlhf", "did you mean rlhf/critic?"),
    (rlhf, "--actor sft --critic rlhf/critic", "rlhf/critic is of stage 'rlhf-critic'; name what scores: --reward"),
    (rlhf, "--actor sft --critic unfinished", "--critic unfinished: no finished model there"),
    (rlhf, RL + "--ref reward", "--ref reward is of stage 'reward', wanted 'sft'"),
    (rlhf, RL + "--reward sft", "--reward sft is of stage 'sft', wanted 'reward'; " + MAKE_REWARD),
    (rlhf, RL + "--reward damaged", "--reward damaged is of stage 'sft'"),
    (rlhf, RL + "--reward foreign", "foreign has no reward_stats.json, which --score_norm center needs"),
    (rlhf, RL + "--reward foreign --score_norm none", "foreign has no trained scalar head; make one with"),
    (rlhf, RL.replace("reward", "unscored"), "unscored has no reward_stats.json, which --score_norm center needs"),
    (rlhf, RL + "--reward nofile.py:good", "there is no file nofile.py"),
    (rlhf, RL + "--reward rewards.py:goood", "rewards.py has no function goood; it has good, bad"),
    (rlhf, RL + "--reward rewards.py:bad", "wanted bad(prompts, completions, **columns), seen bad(texts)"),
    (rlhf, RL + "--reward rewards.py:good --reward_weights 1 2", "--reward_weights has 2 numbers for 1 reward sources"),
    (rlhf, RL.replace("reward ", "gpt2 ") + "--reward rewards.py:good", "--critic gpt2 has another tokenizer"),
    (
        rlhf,
        RL + "--rollout_batch_size 10",
        "10 is not a multiple of --minibatch_size 32; change one of them, for example --minibatch_size 2",
    ),
    (rlhf, RL + "--num_generations 3", "--rollout_batch_size 64 is not a multiple of --num_generations 3"),
    (rlhf, RL + "--max_prompt_length 2041", "2049 tokens a sequence asked for, the model has positions for 2048"),
    # the words
    (rlhf, RL + "--rollout_bach_size 8", "unknown flag --rollout_bach_size; the nearest is --rollout_batch_size"),
    (sft, SFT + "--output_dir data", "--output_dir data holds other things (manifest.json"),
    (reward, "--config sft/stage.json --output_dir out", "--config sft/stage.json is of stage 'sft', wanted 'reward'"),
    (sft, SFT + "--save_steps -3", "argument --save_steps: -3 is out of range, wanted a number from 0;"),
    (sft, SFT + "--learning_rate nan", "argument --learning_rate: nan is out of range, wanted a number from 0;"),
    (sft, SFT + "--adam_beta2 1.5", "argument --adam_beta2: 1.5 is out of range, wanted a number from 0 to 0.99999"),
    (sft, SFT + "--num_train_epochs 0", "argument --num_train_epochs: 0 is out of range, wanted a number from 1e-06"),
    (sft, SFT + "--weight_decay x", "argument --weight_decay: invalid number value: 'x'"),
    (sft, SFT + "--config nowhere.yaml", "--config nowhere.yaml cannot be read: "),
    (sft, SFT + "--config ds.json", "ds.json: unknown key 'zero_optimization'"),
]


@pytest.mark.parametrize(("module", "words", "message"), CASES, ids=[f"{m.__name__[:5]} {w}" for m, w, _ in CASES])
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(module, words, message, world, capfd):
    assert message in mistake(world, module, words, capfd)


def test_a_folder_that_another_run_writes_to_is_refused(world, capfd):
    run = checkpoint.RunFolder(world / "busy")
    try:
        words = "--model sft --output_dir busy"
        assert f"busy is being written by process {os.getpid()}" in mistake(world, sft, words, capfd)
    finally:
        run.release()


@pytest.mark.parametrize(
    ("flags", "responses"),
    [("--rollout_batch_size 2 --minibatch_size 2 --max_steps 1", 2), ("--num_train_epochs 1", 3)],
)
def test_every_rank_needs_a_response(flags, responses, world, monkeypatch, capfd):
    one_rank.start()
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    error = mistake(world, rlhf, RL + flags, capfd)
    assert f"a step of {responses} responses is less than the 4 ranks" in error


def test_as_a_process_too(world):
    """Found only while the model loads, when the output folder exists: the process takes it away at its exit."""
    before = snapshot(world)
    words = [
        sys.executable,
        ROOT / "step1_sft/train.py",
        "--model",
        "classifier",
        "--data",
        "data",
        "--output_dir",
        "out",
    ]
    done = subprocess.run(words, cwd=world, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: classifier lacks weights of a causal language model: lm_head.weight")
    assert "writing to out" in done.stdout and snapshot(world) == before


@pytest.mark.parametrize(
    "script", ["step0_data/prepare.py --dataset tiny", "step1_sft/train.py --model sft --data data"]
)
def test_without_the_environment_it_says_how_to_get_it(script, world):
    words = [sys.executable, "-S", *(ROOT / script).as_posix().split(), "--output_dir", "out"]  # -S: no site-packages
    done = subprocess.run(words, cwd=world, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: the package ") and "source .venv/bin/activate" in done.stderr
    assert not (world / "out").exists()


@pytest.mark.slow
def test_two_ranks_say_one_line(world):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [*launcher, str(ROOT / "step1_sft/train.py"), *(SFT + "--max_length 100000").split()]
    done = subprocess.run(words, cwd=world, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: --max_length: 100000 tokens a sequence asked for")
