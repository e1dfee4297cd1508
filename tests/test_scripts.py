"""The scripts around the stages: set-up, stage runner, recipe, evaluation, summary."""

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_models
import small_tokenizers
import torch
from stub_recipe import StubRecipe
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common.chat_format import decode_answer, encode_conversation, encode_prompt
from common.errors import UserError
from common.generation import Rollout
from common.metrics import read_jsonl
from common.models import load_tokenizer
from scripts import answers, evaluate, tiny_summary

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1}
SHELL = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])


def bash(*words, cwd=ROOT, **env):
    return subprocess.run(
        ["bash", *map(str, words)], cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse_and_stop_at_the_first_error(path):
    assert bash("-n", path).returncode == 0
    assert "\nset -euo pipefail\n" in path.read_text()


# ---- set-up, with a stub in place of Python: what is decided, not what pip does

STUB = """#!/usr/bin/env bash
# Stands for python. A copy of it becomes .venv/bin/python. Every `pip install` is a line of the log.
here=$(cd "$(dirname "$0")" && pwd)
version=${STUB_VERSION:-3.11.9}
[[ ! -e $here/version ]] || version=$(< "$here/version")
case "$*" in
    -V) echo "Python $version" ;;
    *version_info*) [[ $version != 3.10* ]] ;;
    *ensurepip*) [[ -z ${STUB_NO_VENV:-} ]] ;;
    *sys.prefix*) dirname "$here" ;;
    *sys.version*) echo "$version" ;;
    *torch.__version__*) echo "torch stub" ;;
    "-m venv --clear "*)
        rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo "$version" > "$4/bin/version"
        echo venv >> "$STUB_LOG" ;;
    "-m pip install "*) echo "pip ${@: -1}" >> "$STUB_LOG"; sleep "${STUB_SLEEP:-0}"; [[ -z ${STUB_NO_NETWORK:-} ]] ;;
    *) echo "stub: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def bare(tmp_path):
    """A folder with setup.sh and nothing set up; returns (folder, run, log of what was installed)."""
    root = tmp_path / "with a space"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    (root / "requirements.txt").write_text("# pins\ntorch==2.13.0   # why\nother==1\n")
    stub, log = tmp_path / "python-stub", tmp_path / "log"
    stub.write_text(STUB)
    stub.chmod(0o755)
    log.touch()

    def run(**env):
        log.write_text("")
        done = bash(root / "scripts" / "setup.sh", cwd="/", **{"PYTHON": str(stub), "STUB_LOG": str(log)} | env)
        return done, log.read_text().split("\n")[:-1]

    return root, run


WHOLE = ["venv", "pip torch==2.13.0", "pip requirements.txt"]


def test_setup_installs_once_and_again_only_when_something_changed(bare):
    root, run = bare
    assert run()[1] == WHOLE
    assert run()[1] == []
    (root / "requirements.txt").write_text("torch==2.13.1\n")
    assert run()[1] == ["pip torch==2.13.1", "pip requirements.txt"]
    assert run()[1] == []
    assert run(STUB_VERSION="3.12.1")[1] == ["venv", "pip torch==2.13.1", "pip requirements.txt"]
    moved = root.with_name("elsewhere")
    root.rename(moved)
    done = bash(
        moved / "scripts" / "setup.sh", PYTHON=str(root.parent / "python-stub"), STUB_LOG=str(root.parent / "log")
    )
    assert done.returncode == 0 and "venv" in (root.parent / "log").read_text(), done


def test_setup_repairs_an_interrupted_one(bare):
    root, run = bare
    done, log = run(STUB_NO_NETWORK="1")
    assert done.returncode == 2 and "error: installing into .venv failed" in done.stderr
    assert log == ["venv", "pip torch==2.13.0"]
    assert run()[1] == WHOLE
    assert run()[1] == []


def test_setup_completes_a_virtual_environment_of_the_users_own_and_never_empties_it(bare):
    root, run = bare
    (root / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(root.parent / "python-stub", root / ".venv" / "bin" / "python")
    (root / ".venv" / "theirs").touch()
    assert run(STUB_NO_NETWORK="1")[1] == ["pip torch==2.13.0"]
    assert run()[1] == ["pip torch==2.13.0", "pip requirements.txt"]
    assert (root / ".venv" / "theirs").exists()


@pytest.mark.parametrize(
    "env, words",
    [
        ({"PYTHON": "no-such-python"}, "PYTHON=no-such-python: no such program"),
        ({"STUB_VERSION": "3.10.2"}, "is Python 3.10.2; 3.11 or newer is needed"),
        ({"STUB_NO_VENV": "1"}, "has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"),
    ],
)
def test_setup_says_in_one_line_what_is_missing(bare, env, words):
    done, log = bare[1](**env)
    assert done.returncode == 2 and log == []
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr


def test_two_set_ups_at_once_install_once(bare):
    root, run = bare
    run(STUB_NO_NETWORK="1")  # leaves an unfinished one, which both would like to empty
    env = os.environ | {
        "PYTHON": str(root.parent / "python-stub"),
        "STUB_LOG": str(root.parent / "both"),
        "STUB_SLEEP": "0.2",
    }
    both = [subprocess.Popen(["bash", root / "scripts" / "setup.sh"], env=env, stdout=-1, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert (root.parent / "both").read_text().split("\n")[:-1] == WHOLE
    assert sum("another set-up is running" in text for text in said) == 1


# ---- one stage


def run_stage(tmp_path, *command, done=None):
    words = ["--name", "sft", "--done", str(done or tmp_path / "done"), "--logs", str(tmp_path / "logs"), "--"]
    return [sys.executable, str(ROOT / "scripts" / "run_stage.py"), *words, *command]


def test_a_stage_is_shown_kept_and_timed(tmp_path):
    done = subprocess.run(run_stage(tmp_path, "bash", "-c", "echo out; echo err >&2"), capture_output=True, text=True)
    assert done.returncode == 0 and "out\nerr\n" in done.stdout
    assert (tmp_path / "logs" / "sft.log").read_text() == "out\nerr\n"
    assert 0 <= float((tmp_path / "logs" / "sft.seconds").read_text()) < 5


def test_a_finished_stage_is_skipped(tmp_path):
    done = subprocess.run(run_stage(tmp_path, "false", done=tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and "finished already" in done.stdout and not (tmp_path / "logs").exists()


def test_a_failed_stage_shows_the_end_of_its_log_and_keeps_its_exit_code(tmp_path):
    code = "for i in $(seq 50); do echo line $i; done; exit 7"
    done = subprocess.run(run_stage(tmp_path, "bash", "-c", code), capture_output=True, text=True)
    assert done.returncode == 7
    assert "error: sft stopped with exit code 7" in done.stderr
    assert "| line 31\n" in done.stderr and "| line 50\n" in done.stderr and "| line 30\n" not in done.stderr
    assert not (tmp_path / "logs" / "sft.seconds").exists()
    assert subprocess.run(run_stage(tmp_path, "no-such-program"), capture_output=True).returncode == 127
    assert subprocess.run(run_stage(tmp_path, "bash", "-c", "kill -9 $$"), capture_output=True).returncode == 137


def test_a_stage_ends_when_its_command_does_though_a_child_lingers(tmp_path):
    done = subprocess.run(run_stage(tmp_path, "bash", "-c", "sleep 20 & echo gone"), capture_output=True, timeout=10)
    assert done.returncode == 0 and b"gone" in done.stdout


def test_on_a_terminal_a_stage_has_one_and_its_log_is_plain(tmp_path):
    code = "[[ -t 1 ]] && printf 'bar 1\\r\\033[2Kbar 2\\r\\033[2K\\033[31mstep\\033[0m 1\\nbar 3' && stty size <&1"
    reader, writer = pty.openpty()
    process = subprocess.Popen(run_stage(tmp_path, "bash", "-c", code), stdout=writer, stderr=writer)
    assert process.wait() == 0
    shown = os.read(reader, 65536)
    assert b"\x1b[31mstep" in shown
    assert (tmp_path / "logs" / "sft.log").read_text().startswith("step 1\nbar 3")


# ---- the recipe: the commands it gives, without running them


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """(folder, run) of run_all_tiny.sh; run returns what it did and its commands by stage."""
    stub = StubRecipe(tmp_path_factory.mktemp("recipe") / "root", "run_all_tiny.sh")
    return stub.root, stub.run


def test_the_recipe_calls_the_stages_in_order_with_seed_and_out(recipe, tmp_path):
    _, run = recipe
    out = str(tmp_path / "some where")
    done, commands = run(SEED="7", OUT=out)
    assert done.returncode == 0, done.stderr
    assert list(commands) == ["data", "sft", "reward", "rlhf", "evaluation"]
    for command in commands.values():
        assert command[command.index("--seed") + 1] == "7"
        assert any(word.startswith(out + "/") for word in command)
    assert "--shuffle_preferences" not in commands["data"]
    done, commands = run(SHUFFLE_PREFERENCES="1", LAUNCH="deepspeed --num_gpus 2")
    assert "--shuffle_preferences" in commands["data"]
    assert commands["sft"][:4] == ["deepspeed", "--num_gpus", "2", "step1_sft/train.py"]
    assert "out/tiny/sft" in commands["sft"], "OUT inside the repository is shown relative to it"


def test_the_recipe_takes_either_language_or_both(recipe):
    root, run = recipe
    done, commands = run(DATASET="tiny_zh")
    assert done.returncode == 0 and commands["data"][2:6] == [
        "--dataset",
        "tiny_zh",
        "--output_dir",
        "out/tiny_zh/data",
    ]
    assert "out/tiny_zh/sft" in commands["sft"]
    assert (root / "out" / "tiny_zh" / "settings").read_text() == "SEED=1 SHUFFLE_PREFERENCES=0 DATASET=tiny_zh\n"
    commands = run(DATASET="tiny tiny_zh")[1]
    assert commands["data"][3:7] == ["tiny", "tiny_zh", "--output_dir", "out/tiny+tiny_zh/data"]
    done, commands = run(DATASET="tiny_de")
    assert done.returncode == 2 and commands == {} and "DATASET=tiny_de is none of: tiny, tiny_zh" in done.stderr


def test_the_report_comes_last_and_its_failure_fails_nothing(recipe, tmp_path):
    root, run = recipe
    log = root / "log"
    assert run(OUT=str(tmp_path / "o"))[0].returncode == 0
    last = log.read_text().split("\n\0")[-2].split("\0")[:-1]
    assert last == ["scripts/report.py", str(tmp_path / "o")]
    python = root / ".venv" / "bin" / "python"
    whole = python.read_text()
    python.write_text(whole + '[[ $1 != scripts/report.py ]] || { echo "error: no chart" >&2; exit 2; }\n')
    done = run(OUT=str(tmp_path / "o"))[0]
    python.write_text(whole)
    assert done.returncode == 0 and "error: no chart\nno report page" in done.stderr


def test_the_recipe_refuses_to_mix_runs(recipe):
    root, run = recipe
    assert run(SEED="1", OUT=str(root / "mixed"))[0].returncode == 0
    done, commands = run(SEED="2", OUT=str(root / "mixed"))
    assert done.returncode == 2 and commands == {}
    assert "was made with SEED=1 SHUFFLE_PREFERENCES=0, now it is SEED=2" in done.stderr
    assert run(SEED="one")[0].returncode == 2


@pytest.mark.parametrize("stage", ["data", "sft", "reward", "rlhf", "evaluation"])
def test_every_flag_of_the_recipe_is_a_flag_of_its_stage(recipe, stage):
    import importlib

    program, *flags = recipe[1](OUT=str(recipe[0] / "flags"))[1][stage][1:]
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    module.parse_args(flags)  # an unknown flag would exit


# ---- evaluation, against plain transformers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with two random models `a` and `b`, a reward model `rm`, and prompts of uneven length."""
    root = small_models.save_talkers(tmp_path_factory.mktemp("models"))
    words = ["Hi", "What is an apple pie?", "Is a bee unhappy?", "x" * 99]
    rows = [{"prompt": [{"role": "user", "content": text}], "wanted": len(text)} for text in words]
    pq.write_table(pa.Table.from_pylist(rows), root / "prompts.parquet")
    (root / "judge.py").write_text(
        "def long(prompts, completions, wanted, truncated, **columns):\n"
        "    assert all(len(p[0]['content']) == w for p, w in zip(prompts, wanted))\n"
        "    return [len(c[0]['content']) - 5 * t for c, t in zip(completions, truncated)]\n"
        "def on_topic(prompt, completion):\n"
        "    return 'e' in completion[0]['content']\n"
        "def short_list(prompts, completions):\n"
        "    return []\n"
        "def abstains(prompts, completions):\n"
        "    return [None] * len(prompts)\n"
        "def nan(prompts, completions):\n"
        "    return [0.0] + [float('nan')] * (len(prompts) - 1)\n"
        "def boom(prompts, completions):\n"
        "    raise ValueError('my own mistake')\n"
        "def slow(prompts, completions):\n"
        "    while True: pass\n"
        "def best_only(prompts, completions):\n"
        "    return [1.0] * 20 if len(prompts) == 20 else exit(0)\n"
        "def needs_level(prompts, completions, level):\n"
        "    return level\n"
        "def counts_turns(prompts, completions):\n"
        "    return [len(prompt) for prompt, said in zip(prompts, completions) if not prompt.extend(said)]\n"
    )
    return root


def command(models, *words, names=("a", "b"), judge="long"):
    return [
        *("--model", *(str(models / name) for name in names), "--data", str(models / "prompts.parquet")),
        *("--judge", f"{models / 'judge.py'}:{judge}", "--num_samples", "20", "--max_completion_length", "12"),
        *("--max_prompt_length", "64", "--batch_size", "7", "--output", str(models / "out" / "e.json"), *words),
    ]


def plain_logprob(folder, ids, start, temperature):
    """log p of ids[start:], one row, no padding, float64."""
    logits = AutoModelForCausalLM.from_pretrained(folder).double()(torch.tensor([ids])).logits[0] / temperature
    logp = logits - logits.exp().sum(-1, keepdim=True).log()
    return sum(logp[t - 1, ids[t]].item() for t in range(start, len(ids)))


def test_evaluation_figures_are_what_the_samples_say(models, capsys):
    evaluate.main(command(models, "--ref", str(models / "a"), "--reward", str(models / "rm"), "--best_of", "3"))
    record = json.loads((models / "out" / "e.json").read_text())
    everything = read_jsonl(models / "out" / "e.samples.jsonl")
    shown = capsys.readouterr().out
    assert "3 held-out prompts, 1 set aside as too long" in shown
    assert record["num_samples"] == 20 and record["num_prompts"] == 3
    for entry, name in zip(record["models"], "ab", strict=True):
        mine = [row for row in everything if row["model"] == entry["model"] == str(models / name)]
        assert [row["row"] for row in mine] == [j % 3 for j in range(20)]
        assert entry["score"] == pytest.approx(np.mean([len(r["response"]) - 5 * r["truncated"] for r in mine]))
        assert entry["on_topic"] == pytest.approx(np.mean(["e" in row["response"] for row in mine]))
        assert entry["eos_rate"] == pytest.approx(np.mean([not row["truncated"] for row in mine]))
        assert 0 < entry["eos_rate"] < 1, "the test wants both kinds"
        assert entry["response_length"] == pytest.approx(np.mean([row["length"] for row in mine]))
        assert entry["distinct_responses"] == len({row["response"] for row in mine}) / 20
        low, high = entry["score_interval"]
        assert low < entry["score"] < high
        assert all(row["truncated"] == (row["length"] == 12) or row["length"] == 12 for row in mine)
    first, second = ([row for row in everything if row["model"] == str(models / name)] for name in "ab")
    assert [row["kl"] for row in first] == pytest.approx([0.0] * 20, abs=1e-5)
    assert record["models"][1]["kl"] == pytest.approx(np.mean([row["kl"] for row in second]))
    assert record["models"][1]["kl"] > 1, (
        "two models that know nothing of each other; k1 under its own samples is positive"
    )
    gaps = [b["score"] - a["score"] for a, b in zip(first, second, strict=True)]
    (found,) = record["differences"]
    assert found["score"] == pytest.approx(np.mean(gaps)) and found["score_interval"][0] <= found["score"]


def test_kl_and_reward_equal_plain_transformers(models):
    load = {"dtype": "fp32", "device": "cpu"}
    b, a = answers.Answerer(models / "b", **load), answers.Answerer(models / "a", **load)
    prompts = [[{"role": "user", "content": text}] for text in ("Hi", "What is an apple pie?")]
    sampling = {"max_new_tokens": 12, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "seed": 3, "batch_size": 4}
    drawn = b.sample(prompts, [0, 1, 0, 1, 0, 1], step=0, **sampling)
    assert {answer["truncated"] for answer in drawn} == {False, True}
    for answer, ours, theirs in zip(drawn, b.logprobs(drawn, 0.7, 4), a.logprobs(drawn, 0.7, 4), strict=True):
        assert answer["prompt_ids"] == encode_prompt(b.tokenizer, answer["prompt"])
        assert (answer["ids"][-1] in b.stop_ids) == (not answer["truncated"])
        assert answer["response"] == b.tokenizer.decode(answer["ids"], skip_special_tokens=True).removeprefix(" ")
        whole, start = answer["prompt_ids"] + answer["ids"], len(answer["prompt_ids"])
        assert ours == pytest.approx(plain_logprob(models / "b", whole, start, 0.7), abs=1e-4)
        assert theirs == pytest.approx(plain_logprob(models / "a", whole, start, 0.7), abs=1e-4)
    classifier = AutoModelForSequenceClassification.from_pretrained(models / "rm")
    for answer, score in zip(
        drawn, answers.RewardModel(models / "rm", batch_size=4, **load)(drawn, b.tokenizer), strict=True
    ):
        alone = classifier(torch.tensor([answer["prompt_ids"] + answer["ids"]])).logits.item()
        assert score == pytest.approx(alone, abs=1e-5)


def test_a_reward_model_with_another_tokenizer_reads_the_text(models):
    reward, other = answers.RewardModel(models / "rm", dtype="fp32", device="cpu"), small_tokenizers.qwen_like()
    classifier = AutoModelForSequenceClassification.from_pretrained(models / "rm")
    prompt, said = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "yes"}
    whole, _ = encode_conversation(reward.tokenizer, [*prompt, said])
    answer = {"prompt": prompt, "response": "yes", "prompt_ids": [5], "ids": [6]}
    for cut, ids in ((False, whole), (True, whole[:-1])):
        (score,) = reward([answer | {"truncated": cut}], other)
        assert score == pytest.approx(classifier(torch.tensor([ids])).logits.item(), abs=1e-5)


def test_models_answer_with_the_same_noise_and_a_twin_differs_by_nothing(models):
    evaluate.main(command(models, names=("a", "a")))
    (found,) = json.loads((models / "out" / "e.json").read_text())["differences"]
    assert found["score"] == 0 and found["score_interval"] == [0, 0]
    drawn = read_jsonl(models / "out" / "e.samples.jsonl")
    assert [row["response"] for row in drawn[:20]] == [row["response"] for row in drawn[20:]]


def test_the_best_of_n_is_the_reward_models_choice():
    scores = [1, 5, 2, -1, -1, -2]
    drawn = [{"row": i // 3, "number": i} for i in range(6)]
    assert evaluate.pick_best(drawn, scores, 3) == [{"row": 0, "number": 1}, {"row": 1, "number": 3}]


def test_the_interval_is_over_prompts():
    rows = [{"row": i % 2} for i in range(100)]
    # Two prompts with scores 0 and 1: a draw has both zeros, both ones or one of each, however many answers they have.
    assert evaluate.interval(rows, [row["row"] for row in rows], seed=1) == [0.0, 1.0]
    # Many prompts: close to the normal interval of the mean.
    scores = np.random.default_rng(0).normal(size=400).tolist()
    low, high = evaluate.interval([{"row": i} for i in range(400)], scores, seed=1)
    reach = 1.96 * np.std(scores) / math.sqrt(400)
    assert (low, high) == pytest.approx((np.mean(scores) - reach, np.mean(scores) + reach), abs=0.01)
    assert evaluate.interval(rows, [None] * 100, seed=1) is None


@pytest.mark.parametrize(
    "change, words",
    [
        (["--judge", "nothing"], "wanted FILE.py:FUNCTION or a model folder"),
        (["--judge", "missing.py:f"], "there is no file missing.py"),
        (["--judge", "step0_data/toy.py:silver"], "has no function silver"),
        (["--max_prompt_length", "3"], "none of 4 held-out prompts fits --max_prompt_length 3"),
        (["--data", "/nowhere"], "/nowhere: no such folder or file"),
        (["--model", "/nowhere/m"], "/nowhere/m: no such folder"),
    ],
)
def test_evaluation_says_what_is_wrong(models, change, words):
    with pytest.raises(UserError, match=words):
        evaluate.main(command(models, *change))


def test_a_judge_may_abstain_but_not_miscount(models):
    evaluate.main(command(models, judge="abstains"))
    entry = json.loads((models / "out" / "e.json").read_text())["models"][0]
    assert entry["score"] is None and entry["score_interval"] is None
    with pytest.raises(UserError, match="judge short_list returned 0 scores for 20 responses"):
        evaluate.main(command(models, judge="short_list"))


@pytest.mark.parametrize(
    "judge, words, kept",
    [
        ("nan", "judge nan returned nan for response 1, '", 20),
        ("boom", "judge boom failed on 20 responses, the first '.*ValueError: my own mistake .judge.py line 13", 20),
        ("slow", "judge slow has not returned within --reward_timeout 0.3 seconds on 20 responses", 20),
        ("best_only", "judge best_only called sys.exit.0. on 3 responses", 26),  # 20, and 2 each of 3 prompts
        ("needs_level", "judge needs_level wants the column level; beside prompt the data has wanted", 0),
    ],
)
def test_answers_outlive_a_judge_that_fails(models, judge, words, kept):
    flags = ["--reward_timeout", "0.3", "--best_of", "2", "--reward", str(models / "rm")]
    unjudged = models / "out" / "e.unjudged.jsonl"
    unjudged.unlink(missing_ok=True)
    with pytest.raises(UserError, match=words) as caught:
        evaluate.main(command(models, *flags, judge=judge))
    assert (
        (f"; the {kept} answers sampled so far are in {unjudged}" in str(caught.value))
        == unjudged.exists()
        == (kept > 0)
    )
    if kept:
        rows = read_jsonl(unjudged)
        assert len(rows) == kept and all(row["model"] == str(models / "a") and row["length"] <= 12 for row in rows)
        evaluate.main(command(models, judge="abstains"))
        assert not unjudged.exists()
        scored = [row for row in read_jsonl(models / "out" / "e.samples.jsonl") if row["model"] == str(models / "a")]
        assert [row["response"] for row in scored] == [row["response"] for row in rows[:20]]


def test_a_judge_may_spoil_what_it_is_given(models):
    """As in step 3: each model answers the prompts that the data have."""
    evaluate.main(command(models, judge="counts_turns", names=("a", "b", "a")))
    record = json.loads((models / "out" / "e.json").read_text())
    assert [entry["score"] for entry in record["models"]] == [2, 2, 2]
    assert record["differences"][1]["score"] == 0


# ---- models with spare rows


@pytest.fixture(scope="module")
def wide(models):
    """`wide`: model b with 40 rows more than its tokenizer has tokens, each now and then sampled."""
    hf = AutoModelForCausalLM.from_pretrained(models / "b")
    rows = hf.config.vocab_size
    hf.resize_token_embeddings(rows + 40, mean_resizing=False)
    with torch.no_grad():
        hf.get_output_embeddings().weight[rows:] = 0
    hf.save_pretrained(models / "wide")
    load_tokenizer(models / "b").save_pretrained(models / "wide")
    return models / "wide", rows


def test_what_lies_beyond_a_judges_rows_is_read_as_text(models, wide, capsys):
    folder, rows = wide
    judged = ["--judge", str(models / "rm"), "--reward", str(models / "rm")]
    evaluate.main(command(models, *judged, names=("wide",)))
    drawn = answers.Answerer(folder, "fp32", "cpu").sample(
        [[{"role": "user", "content": "Hi"}]], [0] * 20, step=0, max_new_tokens=12, temperature=1.0, top_p=1.0, top_k=0,
        seed=1, batch_size=20,
    )  # fmt: skip
    beyond = [answer for answer in drawn if max(answer["ids"]) >= rows]
    assert 3 <= len(beyond) <= 17, "the test wants both kinds"
    tokenizer, classifier = (
        load_tokenizer(models / "rm"),
        AutoModelForSequenceClassification.from_pretrained(models / "rm"),
    )
    scores = answers.RewardModel(models / "rm", "fp32", "cpu")(drawn, load_tokenizer(folder))
    for answer, score in zip(drawn, scores, strict=True):
        ids = answer["prompt_ids"] + answer["ids"]
        if answer in beyond:
            said = {"role": "assistant", "content": answer["response"]}
            ids, _ = encode_conversation(tokenizer, [*answer["prompt"], said])
            ids = ids[:-1] if answer["truncated"] else ids
        assert score == pytest.approx(classifier(torch.tensor([ids])).logits.item(), abs=1e-5)


def test_a_reference_of_another_size_is_refused_with_both(models, wide):
    folder, rows = wide
    words = f"--model {folder} may sample {rows + 40} tokens and --ref {models / 'a'} has rows for {rows}"
    with pytest.raises(UserError, match=words):
        evaluate.main(command(models, "--ref", str(models / "a"), names=("wide",)))
    evaluate.main(command(models, "--ref", str(folder), names=("a",)))  # the other way round nothing is missing
    assert json.loads((models / "out" / "e.json").read_text())["models"][0]["kl"] > 0


# ---- what a judge reads


@pytest.mark.parametrize(
    "template, ids, wanted",
    [
        ("chatml", "  def f():", "  def f():"),  # code that begins indented
        ("human-assistant", "  def f():", " def f():"),  # the first space is the template's
        ("no generation prompt", "\n\nAssistant: Cook it.", "Cook it."),
        ("no generation prompt", "Cook it.", "Cook it."),
        ("chatml", "Well?\n", "Well?\n"),
    ],
)
def test_a_judge_reads_what_ppos_reward_reads(models, tmp_path, template, ids, wanted, monkeypatch):
    shutil.copytree(models / "b", tmp_path / "m")
    texts = {
        "chatml": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        "no generation prompt": "{% for m in messages %}{% if m.role == 'user' %}{{ '\n\nHuman: ' + m.content }}"
        "{% else %}{{ '\n\nAssistant: ' + m.content + eos_token }}{% endif %}{% endfor %}",
    }
    if template in texts:
        (tmp_path / "m" / "chat_template.jinja").write_text(texts[template])
    model = answers.Answerer(tmp_path / "m", "fp32", "cpu")
    end = model.stop_ids[0]
    sampled = torch.tensor([model.tokenizer(ids, add_special_tokens=False)["input_ids"] + [end]])
    every = torch.ones_like(sampled).bool()
    rollout = Rollout(sampled, every, sampled, every, torch.zeros(sampled.shape), torch.tensor([False]))
    monkeypatch.setattr(answers, "generate", lambda *_, **__: rollout)
    (answer,) = model.sample([[{"role": "user", "content": "Hi"}]], [0], step=0, batch_size=1, **SAMPLING)
    assert answer["response"] == wanted == decode_answer(model.tokenizer, sampled[0].tolist(), model.stop_ids)
    assert model.text([*sampled[0, :-1].tolist(), end, 9, 9]) == wanted
    model.stop_ids = (end, sampled[0, 2].item())  # an ordinary token that ends answers is no part of them
    assert model.text(sampled[0, :3].tolist()) == model.text(sampled[0, :2].tolist())


# ---- the summary

FIGURES = {
    "seed": 3,
    "sft_loss": 1.25,
    "rm_accuracy": 0.875,
    "gold_sft": 0.4,
    "gold_rlhf": 2.6,
    "gold_best_of_16": 2.2,
    "on_topic_sft": 0.5,
    "on_topic_rlhf": 0.75,
    "distinct_responses": 0.7,
    "eos_rate": 1.0,
    "kl": 4.5,
    "response_length_sft": 20.0,
    "response_length_rlhf": 22.0,
    "seconds": 15.0,
}


@pytest.fixture
def finished_run(tmp_path):
    for folder in ("logs", "sft", "reward", "rlhf"):
        (tmp_path / folder).mkdir()
    (tmp_path / "settings").write_text("SEED=3 SHUFFLE_PREFERENCES=0\n")
    for i, stage in enumerate(("data", "sft", "reward", "rlhf", "evaluation"), 1):
        (tmp_path / "logs" / f"{stage}.seconds").write_text(f"{i}.0\n")
    (tmp_path / "sft" / "stage.json").write_text('{"metrics": {"loss": 9, "eval_loss": 1.25}, "git_commit": "abc"}')
    (tmp_path / "reward" / "stage.json").write_text('{"metrics": {"accuracy": 1, "eval_accuracy": 0.875}}')
    before = {"score": 0.4, "on_topic": 0.5, "best_of_16": 2.2, "response_length": 20.0, "kl": 0.0, "eos_rate": 0.9}
    after = {"score": 2.6, "on_topic": 0.75, "best_of_16": 2.9, "response_length": 22.0, "kl": 4.5, "eos_rate": 1.0}
    models = [before | {"distinct_responses": 0.9}, after | {"distinct_responses": 0.7}]
    (tmp_path / "evaluation.json").write_text(json.dumps({"models": models}))
    prompt = [{"role": "user", "content": "How?"}]
    rows = [{"prompt": prompt, "response": text, "score": score} for text, score in (("Meh.", -1.0), ("Gladly.", 2.0))]
    (tmp_path / "evaluation.samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_summary_has_exactly_these_keys(finished_run, capsys, monkeypatch):
    monkeypatch.setattr(tiny_summary, "REFERENCES", finished_run)
    tiny_summary.main(["--out", str(finished_run)])
    assert json.loads((finished_run / "summary.json").read_text()) == FIGURES
    shown = capsys.readouterr().out
    assert "before and after: better in" in shown and "  How?" in shown and "PPO (gold +2.00): Gladly." in shown
    assert f"scripts/chat.py --model {finished_run}/rlhf/actor" in shown
    assert "OUTSIDE" not in shown and "No reference runs of tiny are kept" in shown


def test_figures_are_held_against_the_reference_runs(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny_summary, "REFERENCES", tmp_path)
    # rm_accuracy 0.5, 0.6, 0.7: mean 0.6, sd 0.1, t of 2 degrees of freedom 4.303: 0.6 -+ 4.303 * 0.1 * sqrt(4 / 3)
    runs = [FIGURES | {"rm_accuracy": 0.5 + 0.1 * i, "gold_sft": 0.1 * i, "kl": 40.0 + i} for i in range(3)]
    (tmp_path / "tiny.json").write_text(json.dumps({"runs": runs}))
    bands = tiny_summary.bands(tmp_path / "tiny.json")
    assert bands["rm_accuracy"] == pytest.approx((0.6 - 0.49687, 1.0), abs=1e-4)  # a share does not exceed 1
    assert bands["gold_sft"] == pytest.approx((0.1 - 0.49687, 0.1 + 0.49687), abs=1e-4)
    # all three agree, at FIGURES' 1.0: 4.303 / 256 * sqrt(4 / 3) below, so 0.996 of a fourth seed is no surprise
    assert bands["eos_rate"] == pytest.approx((1 - 0.019409, 1.0), abs=1e-5)
    tiny_summary.main(["--out", str(finished_run)])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "OUTSIDE" in line and "KL from SFT" in line]
    assert "1 of 12 figures outside" in shown and "by tiny.json's runs" in shown and "No reference" not in shown
    (finished_run / "settings").write_text(
        "SEED=3 SHUFFLE_PREFERENCES=0 DATASET=tiny_zh\n"
    )  # another set, another band
    tiny_summary.main(["--out", str(finished_run)])
    assert "No reference runs of tiny_zh are kept" in capsys.readouterr().out


def test_the_negative_control_is_not_held_against_the_bands(finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny_summary, "REFERENCES", tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps({"runs": [FIGURES | {"kl": 99.0}] * 3}))
    (finished_run / "settings").write_text("SEED=3 SHUFFLE_PREFERENCES=1\n")
    tiny_summary.main(["--out", str(finished_run)])
    shown = capsys.readouterr().out
    assert "Negative control" in shown and "OUTSIDE" not in shown


def test_reference_runs_are_written_with_their_curves(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_summary, "REFERENCES", tmp_path / "reference")
    for folder, names in tiny_summary.CURVES.items():
        rows = [{"step": step} | dict.fromkeys(names, step / 3) for step in (1, 2)]
        (finished_run / folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_summary.main(["--write_reference", str(finished_run), str(finished_run), "--machine", "2 cores"])
    record = json.loads((tmp_path / "reference" / "tiny.json").read_text())
    assert record["runs"] == [FIGURES, FIGURES] and record["commit"] == "abc" and record["machine"] == "2 cores"
    assert record["curves"]["rlhf: objective/kl"] == [[0.3333, 0.6667]] * 2
    assert record["command"] == "SEED=... bash scripts/run_all_tiny.sh"
    (finished_run / "settings").write_text("SEED=3 SHUFFLE_PREFERENCES=0 DATASET=tiny+tiny_zh\n")
    tiny_summary.main(["--write_reference", str(finished_run), str(finished_run)])
    record = json.loads((tmp_path / "reference" / "tiny+tiny_zh.json").read_text())
    assert record["command"] == "SEED=... DATASET='tiny tiny_zh' bash scripts/run_all_tiny.sh"
    with pytest.raises(UserError, match="wants 2 to 10 runs, got 1"):
        tiny_summary.main(["--write_reference", str(finished_run)])


def test_an_unfinished_run_has_no_summary(tmp_path):
    with pytest.raises(UserError, match="run: OUT="):
        tiny_summary.main(["--out", str(tmp_path)])
