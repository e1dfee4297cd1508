"""Command lines of the four stages: names people bring, files of settings, what is refused, no flag without effect."""

import argparse
import ast
import dataclasses
import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from common import cli, names
from common.errors import RunFailed, Stopped, UserError

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["step0_data/prepare.py", "step1_sft/train.py", "step2_reward/train.py", "step3_rlhf/train.py"]
NEEDED = {
    "step0_data/prepare.py": [],
    "step1_sft/train.py": ["--model", "M"],
    "step2_reward/train.py": ["--model", "M"],
    "step3_rlhf/train.py": ["--actor", "A", "--critic", "C"],
}


def module_of(script: str):
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


def parse(script: str, *words, needed: bool = True):
    return module_of(script).parse_args([*(NEEDED[script] if needed else []), *map(str, words)])


def refused(capsys, script: str, *words, needed: bool = True) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        parse(script, *words, needed=needed)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


# ---- names people bring

SFT, RM, RL, DATA = "step1_sft/train.py", "step2_reward/train.py", "step3_rlhf/train.py", "step0_data/prepare.py"
CHAT = "DeepSpeed-Chat's name"
RENAMED = [
    (SFT, "--dataset", "X", "data", "X", None),
    (SFT, "--dataset_name", "X", "data", "X", None),
    (SFT, "--data_path", "X", "data", "X", CHAT),
    (SFT, "--model_name_or_path", "X", "model_name_or_path", "X", None),
    (SFT, "--max_seq_len", "77", "max_length", 77, CHAT),
    (SFT, "--num_warmup_steps", "5", "warmup_steps", 5.0, CHAT),
    (SFT, "--lr", "0.5", "learning_rate", 0.5, None),
    (SFT, "--deepspeed", "ds.json", "ds_config", "ds.json", None),
    (RM, "--dataset_name", "X", "data", "X", None),
    (RL, "--actor_model", "X", "actor", "X", None),
    (RL, "--critic_model", "X", "critic", "X", None),
    (RL, "--reward_model", "X", "reward", ["X"], None),
    (RL, "--ref_model", "X", "ref", "X", None),
    (RL, "--dataset", "X", "data", "X", None),
    (RL, "--sft_model_path", "X", "actor", "X", "TRL's name"),
    (RL, "--reward_model_path", "X", "reward", ["X"], "TRL's name"),
    (RL, "--reward_model_path", "X", "critic", "X", "TRL's name"),
    (RL, "--local_rollout_forward_batch_size", "9", "rollout_forward_batch_size", 9, "TRL's name"),
    (SFT, "--max_seq_length", "77", "max_length", 77, "TRL's name"),
    (SFT, "--torch_dtype", "bfloat16", "dtype", "bf16", "transformers' name"),
    (SFT, "--dtype", "float32", "dtype", "fp32", None),
    (SFT, "--warmup_ratio", "0.1", "warmup_steps", 0.1, "transformers' name"),
    (RL, "--max_new_tokens", "9", "max_completion_length", 9, "transformers' name"),
    (SFT, "--deepspeed_config", "ds.json", "ds_config", "ds.json", CHAT),
    (RL, "--print_answers_interval", "5", "sample_steps", 5, CHAT),
    (RL, "--critic_weight_decay", "0.5", "critic_weight_decay", 0.5, None),
    (SFT, "--learning-rate", "0.5", "learning_rate", 0.5, None),
    (SFT, "--data-path", "X", "data", "X", CHAT),
    (SFT, "--data_split", "2,4,4", "data_split", "2,4,4", None),
    (RL, "--response_length", "9", "max_completion_length", 9, "TRL's name"),
    (RL, "--cliprange_low", "0.1", "cliprange", 0.1, None),
    (RL, "--actor_model_name_or_path", "X", "actor", "X", CHAT),
    (RL, "--critic_model_name_or_path", "X", "critic", "X", CHAT),
    (RL, "--actor_learning_rate", "0.5", "learning_rate", 0.5, CHAT),
    (RL, "--critic_learning_rate", "0.5", "critic_learning_rate", 0.5, None),
    (RL, "--max_prompt_seq_len", "9", "max_prompt_length", 9, CHAT),
    (RL, "--max_answer_seq_len", "9", "max_completion_length", 9, CHAT),
    (RL, "--actor_zero_stage", "2", "zero_stage", 2, CHAT),
    (RL, "--critic_zero_stage", "2", "critic_zero_stage", 2, None),
    (RL, "--ppo_epochs", "3", "num_ppo_epochs", 3, CHAT),
    (SFT, "--per_device_training_batch_size", "3", "per_device_train_batch_size", 3, CHAT),
    (DATA, "--dataset_name", "X", "dataset", ["X"], None),
    (DATA, "--data_path", "X", "dataset", ["X"], None),
    (DATA, "--data", "X", "dataset", ["X"], None),
    (DATA, "--data_split", "1,2,3", "split", (1.0, 2.0, 3.0), None),
]
SWITCHES = [
    (RL, "--offload", "offload_optimizer", True),
    (RL, "--offload_reference_model", "offload_frozen", True),
    (RL, "--actor_gradient_checkpointing", "gradient_checkpointing", True),
    (RL, "--enable_hybrid_engine", "rollout_backend", "hybrid"),
    (RL, "--enable_tensorboard", "report_to", ["tensorboard"]),
    (RL, "--print_answers", "sample_steps", 1),
    (RL, "--offload_reward_model", "frozen_zero_stage", 3),
    (SFT, "--bf16", "dtype", "bf16"),
    (SFT, "--fp16", "dtype", "fp16"),
]


@pytest.mark.parametrize(("script", "name", "word", "dest", "value", "remark"), RENAMED)
def test_names_of_other_programs_are_ours(script, name, word, dest, value, remark, capsys):
    needed = [w for pair in zip(*[iter(NEEDED[script])] * 2, strict=True) if pair[0][2:] != dest for w in pair]
    for words in ([name, word], [f"{name}={word}"]):
        args = module_of(script).parse_args(words if dest == "model_name_or_path" else [*needed, *words])
        assert getattr(args, dest) == value
        notes = capsys.readouterr().err.splitlines()
        assert len(notes) == (remark is not None)
        name = "--" + name[2:].replace("-", "_")
        assert not notes or (notes[0].startswith(f"note: {name} ({remark}) is --") and notes[0].endswith(" here"))


@pytest.mark.parametrize(("script", "name", "dest", "value"), SWITCHES)
def test_switches_of_other_programs_are_ours(script, name, dest, value, capsys):
    default = getattr(parse(script), dest)
    for words in ([name], [name, "True"], [f"{name}=true"]):
        assert getattr(parse(script, *words), dest) == value and (value != default or dest == "report_to")
        note = capsys.readouterr().err
        assert note.startswith(f"note: {name} ({names.ALIASES[name][1]}) is --") and note.count("\n") == 1
    for words in ([name, "False"], [f"{name}=false"]):
        assert getattr(parse(script, *words), dest) == default
        assert capsys.readouterr().err in ("", f"note: {name} ({CHAT}) is --no-{dest} here\n")
    assert f"{name} takes true, false or nothing, seen 3" in refused(capsys, script, name, "3")


def test_what_was_written_out_wins_over_what_a_switch_implies():
    for words in (["--print_answers_interval", 5, "--print_answers"], ["--sample_steps", 5, "--print_answers"]):
        assert parse(RL, *words).sample_steps == 5
    assert parse(SFT, "--dtype", "fp32", "--bf16").dtype == "fp32"
    args = module_of(RL).parse_args(["--sft_model_path", "A", "--critic", "B", "--reward_model_path", "R"])
    assert (args.actor, args.critic, args.reward) == ("A", "B", ["R"])


def test_switches_may_say_true_or_false_as_transformers_has_it(capsys):
    name = "--gradient_checkpointing"
    for words in ([name], [name, "True"], [f"{name}=true"], ["--gradient-checkpointing", "true", "--seed", 3]):
        assert parse(SFT, *words).gradient_checkpointing is True, words
    for off in ([name, "false"], [f"{name}=False"], ["--no_gradient_checkpointing"], ["--no-gradient_checkpointing"]):
        assert parse(SFT, name, *off).gradient_checkpointing is False, off
    assert parse(SFT, "--offload_optimizer", "True", "--zero_stage", 1).offload_optimizer is True
    assert parse(SFT, "--offload_optimizer", "False").offload_optimizer is False
    assert f"{name} takes true, false or nothing, seen maybe" in refused(capsys, SFT, name, "maybe")


def test_deepspeeds_own_switch_asks_for_nothing():
    for words in (["--deepspeed"], ["--deepspeed", "--seed", "5"], ["--seed", "5", "--deepspeed"]):
        args = parse(SFT, *words)
        assert args.ds_config is None and args.seed in (1, 5)
    assert parse(SFT, "--deepspeed=ds.json").ds_config == "ds.json"
    assert parse(SFT, "--local_rank=3").local_rank == 3


def test_notes_are_said_once_however_many_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse(RL, "--ppo_epochs", 3)
    assert capsys.readouterr().err == ""


# ---- what is refused


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (SFT, ["--modle", "X"], "unknown flag --modle; the nearest is --model"),
        (SFT, ["--learning_rat=1"], "unknown flag --learning_rat; the nearest is --learning_rate"),
        (RL, ["--max_completion_lenght", "3"], "the nearest is --max_completion_length"),
        (RL, ["--kl", "3"], "the nearest is --kl_"),
        (DATA, ["--shuffle"], "the nearest is --shuffle_preferences"),
        (SFT, ["--zzzzzz"], "unknown flag --zzzzzz; see "),
        (SFT, ["X"], "--model takes one value, seen 2: M X"),
        (SFT, ["--seed", "x"], "argument --seed: invalid whole number value: 'x'"),
        (SFT, ["--seed"], "argument --seed: expected one argument"),
        (SFT, ["--seed", "1", "2"], "--seed takes one value, seen 2: 1 2"),
        (SFT, ["--data_path", "a", "b"], "seen 2: a b; step 0 makes one folder of several sources"),
        (RL, ["--reward", "a", "f.py:g"], "seen 2: a f.py:g; for several, repeat it: --reward a --reward f.py:g"),
        (RL, ["--reward_model_path"], "--reward_model_path takes one value, seen 0"),
        (SFT, ["--data_split", "1,2"], "1,2 is not three shares"),
        (SFT, ["--config"], "argument --config: expected one argument"),
        (SFT, ["--zero_stage", "4"], "argument --zero_stage: invalid choice: 4"),
        (SFT, ["--per_device_train_batch_size", "0"], "0 is out of range, wanted a whole number from 1;"),
        (SFT, ["--max_steps", "-1"], "-1 is out of range, wanted a whole number from 0;"),
        (SFT, ["--report_to", "tensorbord"], "invalid choice: 'tensorbord'"),
        (SFT, ["--learn", "1"], "unknown flag --learn; the nearest is --learning_rate"),  # no abbreviations
        (DATA, ["--split", "1,2"], "1,2 is not three shares"),
        (RL, ["--score_clip", "x"], "argument --score_clip: invalid number value: 'x'"),
    ],
)
def test_mistakes_are_told_in_one_line(script, words, message, capsys):
    assert message in refused(capsys, script, *words)


@pytest.mark.parametrize(
    ("script", "flag", "near"),
    [
        (SFT, "learning_rte", "learning_rate"),
        (SFT, "lerning_rate", "learning_rate"),
        (SFT, "epochs", "num_train_epochs"),
        (SFT, "warmup", "warmup_steps"),
        (SFT, "resume", "resume_from_checkpoint"),
        (SFT, "outputdir", "output_dir"),
        (RL, "clip_range", "cliprange"),
        (RL, "rollout_batchsize", "rollout_batch_size"),
        (RL, "generations", "num_generations"),
        (DATA, "data_set", "dataset"),
        *[(SFT, flag, None) for flag in ("frobnicate", "flux_capacitor", "compile", "debug", "noise", "wandb_project")],
        *[(RL, flag, None) for flag in ("judge", "curriculum", "replay_buffer", "agent", "tools", "port", "n")],
        *[(DATA, flag, None) for flag in ("language", "dedup_threshold", "packing_size", "mask")],
    ],
)
def test_only_a_close_name_is_named(script, flag, near, capsys):
    said = refused(capsys, script, f"--{flag}", "1")
    assert said.startswith(f"error: unknown flag --{flag}; {f'the nearest is --{near};' if near else 'see '}"), said


@pytest.mark.parametrize(
    ("script", "words", "truth"),
    [
        (RL, "--use_vllm", "there is no vLLM yet"),
        (RL, "--loss_type grpo", "there are no DPO, GRPO or other losses yet"),
        (RM, "--loss_type sigmoid", "there are no DPO, GRPO or other losses yet"),
        (RL, "--algorithm grpo", "PPO with a critic"),
        (SFT, "--load_in_4bit", "weights are not quantised"),
        (SFT, "--packing", "a row holds one conversation"),
        (RM, "--dpo_beta 0.1", "there is no DPO yet"),
        (RM, "--beta 0.1", "there is no DPO yet"),
        (RL, "--epsilon_high 0.28", "step 3's --cliprange_high is"),
        (RL, "--tensor_parallel_size 2", "--zero_stage 3"),
        (SFT, "--use_flash_attn", "--attn_implementation flash_attention_2"),
    ],
)
def test_what_is_not_there_yet_is_said_to_be_so(script, words, truth, capsys):
    said = refused(capsys, script, *words.split())
    assert said.startswith(f"error: there is no {words.split()[0]}") and truth in said and "nearest" not in said


def test_a_typing_error_is_told_before_what_is_missing(capsys):
    assert "the nearest is --actor" in refused(capsys, RL, "--actr", "A", "--critic", "C", needed=False)
    assert "are required: --critic" in refused(capsys, RL, "--actor", "A", needed=False)
    error = refused(capsys, SFT, "X", "--model", "M", needed=False)
    assert "unexpected word 'X': every value follows a --flag" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout_batch_size", 10, "--num_generations", 4], "--rollout_batch_size 10 .* --num_generations 4"),
        (["--rollout_batch_size", 10, "--minibatch_size", 4], "--rollout_batch_size 10 .* --minibatch_size 4"),
        (["--rollout_batch_size", 16, "--minibatch_size", 32], "--rollout_batch_size 16 .* --minibatch_size 32"),
        (["--kl_target", 3, "--kl_coef", 0], "--kl_coef 0 would stay 0"),
        (["--reward_weights", 1, 2], "--reward_weights has 2 numbers for 1 reward sources"),
        (["--reward", "a", "--reward", "b", "--reward_weights", 1], "has 1 numbers for 2 reward sources"),
    ],
)
def test_flags_that_contradict_each_other(words, message):
    with pytest.raises(UserError, match=message):
        parse(RL, *words)


def test_none_is_a_value_where_a_flag_can_be_off():
    args = parse(RL, "--score_clip", "none", "--missing_eos_penalty", "None", "--cliprange_value", "none")
    assert args.score_clip is args.missing_eos_penalty is args.cliprange_value is None
    assert (
        parse(RL, "--score_clip", "2.5").score_clip == 2.5 and parse(RL, "--length_penalty", "-1").length_penalty == -1
    )


def test_switches_can_be_turned_off_and_lists_repeat():
    assert parse(RL).whiten_advantages and not parse(RL, "--no-whiten_advantages").whiten_advantages
    assert parse(RL, "--whiten_rewards").whiten_rewards and not parse(RL).whiten_rewards
    args = parse(RL, "--reward", "a", "--reward=b", "--reward_weights", "1", "0.5")
    assert args.reward == ["a", "b"] and args.reward_weights == [1.0, 0.5]


# ---- numbers

# May be below 0: a reward can be weighed against another, and a penalty below 0 is a bonus.
SIGNED = {"--reward_weights", "--length_penalty", "--local_rank"}


def number_flags() -> list[tuple[str, str, argparse.Action]]:
    """(script, flag, its action) of every flag whose value is a number, in all scripts that have a command line."""
    found, parsers = [], []

    def catch(parser, *_):
        parsers.append(parser)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.Parser, "parse_args", catch)
        for script in sorted([*ROOT.glob("step*/*.py"), *ROOT.glob("scripts/*.py")]):
            if "cli.Parser(" not in script.read_text():
                continue
            name = script.relative_to(ROOT).as_posix()
            with pytest.raises(SystemExit):
                module_of(name).parse_args([])
            found += [(name, action.option_strings[-1], action) for action in parsers.pop()._actions if takes(action)]
    return found


def takes(action: argparse.Action) -> bool:
    """Whether a flag takes numbers: its type makes one of "1" and nothing of a word."""
    try:
        value = action.type("1") if action.type and action.choices is None else None
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return isinstance(value, int | float)


def test_every_number_has_a_range(capsys):
    flags = number_flags()
    assert len({script for script, _, _ in flags}) >= 8 and len(flags) > 90, "or this test looks at nothing"
    for script, flag, action in flags:
        below = "-1e31" if flag in SIGNED else "-1"
        for text in ("nan", "-nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "1e31", str(10**31), below, "", "0x"):
            with pytest.raises((ValueError, argparse.ArgumentTypeError)):
                action.type(text)
                print(f"{script} {flag} takes {text!r}")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--temperature", 0], "0 is out of range, wanted a number from 1e-06 to 100;"),
        (["--top_p", 0], "0 is out of range, wanted a number above 0 to 1;"),
        (["--top_p", 1.1], "1.1 is out of range"),
        (["--gamma", 1.5], "1.5 is out of range, wanted a number from 0 to 1;"),
        (["--lam", -0.1], "-0.1 is out of range"),
        (["--dual_clip", 1], "1 is out of range, wanted a number above 1 or none;"),
        (["--kl_target", 0], "0 is out of range, wanted a number above 0 or none;"),
        (["--score_clip", 0], "0 is out of range, wanted a number above 0 or none;"),
        (["--score_clip", -2], "-2 is out of range, wanted a number above 0 or none;"),
        (["--cliprange_high", -0.5], "-0.5 is out of range, wanted a number from 0 or none;"),
        (["--cliprange_value", -3], "-3 is out of range, wanted a number above 0 or none;"),
        (["--missing_eos_penalty", "nan"], "nan is out of range, wanted a number from 0 or none;"),
        (["--reward_weights", "inf"], "inf is out of range, wanted a number from -1e+06 to 1e+06;"),
        (["--seed", 2**65], f"{2**65} is out of range, wanted a whole number from 0 to 4294967295;"),
        (["--seed", "9" * 400], f"{'9' * 40}... is out of range"),
    ],
)
def test_a_number_out_of_range_is_told_with_its_range(words, wanted, capsys):
    assert f"argument {words[0]}: {wanted}" in refused(capsys, RL, *words)


def test_a_number_out_of_range_in_a_file_is_refused_too(tmp_path, capsys):
    for text in ("score_clip: .nan", "score_clip: -.inf", "seed: -1", "kl_target: 1e999"):
        assert "out of range" in refused(capsys, RL, "--config", config(tmp_path, text))


# ---- outside text in a line

NASTY = "oracle\x1b]2;title taken\x07\x1b[1A\x1b[2K\rdone: all is fine\nerror: \u202e\x9b2J"
SHOWN = r"oracle\x1b]2;title taken\x07\x1b[1A\x1b[2K\rdone: all is fine\nerror: \u202e\x9b2J"


def test_no_line_of_ours_is_obeyed_by_a_terminal(capsys, monkeypatch):
    def failing(error):
        def main():
            raise error

        return main

    assert cli.run(failing(UserError(NASTY))) == 2 and cli.run(failing(RunFailed(NASTY))) == 1
    assert cli.run(failing(Stopped(15, NASTY))) == 143
    assert capsys.readouterr().err == f"error: {SHOWN}\nerror: {SHOWN}\n{SHOWN}\n"
    cli.Parser("").note(NASTY)
    assert capsys.readouterr().err == f"note: {SHOWN}\n"
    assert SHOWN in refused(capsys, SFT, f"--{NASTY}=1").replace(r"\\", "\\")
    assert r"\x1b]2;" in refused(capsys, SFT, "--seed", NASTY)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:secret@hub.example/api", "https://***@hub.example/api"),
        ("http://user:se/c@ret@hub.example:80", "http://***@hub.example:80"),
        ("https://hf_token@hub.example", "https://***@hub.example"),
        ("https://hub.example:8080/a?b=c", "https://hub.example:8080/a?b=c"),
        ("mail me@example.org: 3 // 4", "mail me@example.org: 3 // 4"),
    ],
)
def test_a_password_in_an_address_is_not_shown(address, shown, capsys):
    def main():
        raise UserError(f"HF_ENDPOINT ({address}) cannot be reached")

    cli.run(main)
    assert capsys.readouterr().err == f"error: HF_ENDPOINT ({shown}) cannot be reached\n"


def test_nor_in_what_libraries_log(caplog):
    cli.run(lambda: logging.getLogger("huggingface_hub.utils").warning("HEAD %s\x1b[2J", "http://a:secret@b/c"))
    assert caplog.messages == [r"HEAD http://***@b/c\x1b[2J"]


# ---- refusals come before anything heavy


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        (RL, "--actor base --critic reward --reward nowhere.py:f", "there is no file nowhere.py"),
        (RL, "--actor base --critic reward --reward rewards.py", "which function of it?"),
        (RL, "--actor reward --critic reward", "is of stage 'reward', wanted 'sft'"),
        (RL, "--actor base --critic reward --output_dir done", "holds a finished run"),
        (RL, "--actor base --critic reward --data nowhere", "--data nowhere: no such folder"),
        (RM, "--model base", "--data is missing"),
        (RM, "--model base --output_dir mixed", "holds other things (notes)"),
        (SFT, "--model base --ds_config nowhere.json", "--ds_config nowhere.json: no such file"),
        (SFT, "--model base --resume_from_checkpoint nowhere", "--resume_from_checkpoint nowhere: no such folder"),
        (SFT, "--model base --report_to wandb", "the package is not installed"),
        ("scripts/evaluate.py", "--model base --judge nowhere.py:f", "there is no file nowhere.py"),
        ("scripts/evaluate.py", "--model reward --judge gold", "is of stage 'reward'"),
        ("scripts/chat.py", "--model reward", "is of stage 'reward'"),
        ("scripts/report.py", "nowhere", "nowhere: no such folder"),
        ("scripts/plan.py", "--num_gpus 3 --num_nodes 2 -- step1_sft/train.py --model base", "cannot be spread evenly"),
    ],
)
def test_what_needs_no_model_is_told_before_anything_heavy_is_loaded(tmp_path, script, words, said):
    for folder, stage in (("base", "base"), ("reward", "reward"), ("done/actor", "rlhf-actor")):
        record = {"stage": stage, "format_version": 1, "files": {}}
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "stage.json").write_text(json.dumps(record))
    (tmp_path / "mixed/notes").mkdir(parents=True)
    if "wandb" in words and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    command = [sys.executable, "-X", "importtime", ROOT / script, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = done.stderr.splitlines()
    told = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 2 and len(told) == 1 and told[0].startswith("error: ") and said in told[0], told
    loaded = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert not {"torch", "transformers", "deepspeed", "datasets"} & loaded


# ---- files of settings


def config(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


YAML = """
actor: A
critic: C
learning_rate: 1e-5      # yaml reads this as text
critic_learning_rate: 0.5
rollout_batch_size: 8
minibatch_size: 4
max_completion_length: "12"
whiten_advantages: false
offload_optimizer: true
zero_stage: 1
score_clip: none
missing_eos_penalty: null
reward: [a, b]
reward_weights: [1, 0.5]
report_to: none
run_name: 7
ppo_epochs: 3            # another program's name
kl-coef: 0.125
bf16: true
print_answers: false
offload_reference_model: true
per_device_eval_batch_size: 8
critic_dropout: null
stop_token: eos
deepspeed: ds.json
"""


def test_a_yaml_file_sets_flags_with_the_types_of_the_command_line(tmp_path):
    args = parse(RL, "--config", config(tmp_path, YAML), needed=False)
    assert (args.actor, args.critic, args.run_name) == ("A", "C", "7")
    assert args.learning_rate == 1e-5 and args.critic_learning_rate == 0.5 and args.kl_coef == 0.125
    assert (args.rollout_batch_size, args.max_completion_length, args.num_ppo_epochs) == (8, 12, 3)
    assert args.whiten_advantages is False and args.offload_optimizer is True and args.zero_stage == 1
    assert args.score_clip is None and args.missing_eos_penalty is None
    assert args.reward == ["a", "b"] and args.reward_weights == [1.0, 0.5] and args.report_to == ["none"]
    assert args.dtype == "bf16" and args.offload_frozen is True and args.frozen_zero_stage == 3
    assert args.ds_config == "ds.json" and args.sample_steps == parse(RL).sample_steps
    assert args.gamma == parse(RL).gamma, "what the file does not name keeps its default"


def test_the_command_line_wins(tmp_path):
    path = config(tmp_path, YAML)
    words = [
        "--kl_coef",
        1,
        "--config",
        path,
        "--whiten_advantages",
        "--reward",
        "c",
        "--reward_weights",
        2,
        "--actor=B",
    ]
    args = parse(RL, *words, needed=False)
    assert (args.kl_coef, args.whiten_advantages, args.actor) == (1.0, True, "B")
    assert args.reward == ["c"] and args.reward_weights == [2.0]


def test_json_and_stage_records_are_read_too(tmp_path):
    path = config(tmp_path, json.dumps({"model": "M", "seed": 5, "warmup_steps": 3}), "run.json")
    args = parse(SFT, f"--config={path}", needed=False)
    assert (args.model_name_or_path, args.seed, args.warmup_steps) == ("M", 5, 3.0)
    first = vars(parse(SFT, "--seed", 9, "--learning_rate", 0.25, "--config", path))
    record = config(tmp_path, json.dumps({"stage": "sft", "format_version": 1, "args": first, "seed": 9}), "stage.json")
    again = vars(parse(SFT, "--config", record, "--output_dir", "elsewhere", needed=False))
    assert again["config"] == str(record) and again["output_dir"] == "elsewhere"
    assert {**again, "config": None, "output_dir": None} == {**first, "config": None, "output_dir": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1", "unknown key 'learning_rte'; the nearest is learning_rate"),
        ("seed: x", "seed: argument --seed: invalid whole number value: 'x'"),
        ("seed: 1.5", "invalid whole number value: '1.5'"),
        ("seed: [1, 2]", "seed is a list, wanted one value"),
        ("seed:", "seed is empty; give it a value or leave it out"),
        ("zero_stage: 7", "invalid choice: 7"),
        ("per_device_train_batch_size: 0", "0 is out of range, wanted a whole number from 1;"),
        ("offload_optimizer: maybe", "offload_optimizer is 'maybe', wanted true or false"),
        ("gradient_checkpointing: 1", "gradient_checkpointing is 1, wanted true or false"),
        ("report_to: [tensorboard, x]", "invalid choice: 'x'"),
        ("lr: [1, 2]", "--lr takes one value, seen 2: 1 2"),
        ("lr: x", "invalid number value: 'x'"),
        ("seed: []", "seed is a list, wanted one value"),
        ("total_episodes: 100", "there is no --total_episodes here: --max_steps = total_episodes / --rollout_batch"),
        ("packing: true", "there is no --packing true here: a row holds one conversation; leave it out"),
        ("enable_ema: true", "there is no --enable_ema here: no moving average"),
    ],
)
def test_a_wrong_entry_names_file_and_key(tmp_path, text, message, capsys):
    path = config(tmp_path, text)
    error = refused(capsys, SFT, "--config", path)
    assert message.replace("argument --seed: ", "") in error.replace("argument --seed: ", "") and str(path) in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "neither yaml nor json: while parsing a flow sequence"),
        ("- 1\n- 2", "holds a list, wanted `flag: value` pairs"),
        ("", "holds null, wanted"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_list_of_settings(tmp_path, text, message):
    path = tmp_path / "none.yaml" if text is None else config(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        parse(SFT, "--config", path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# ---- exit codes


def raising(error: BaseException):
    def main():
        raise error

    return main


def test_exit_codes(capsys, monkeypatch):
    assert cli.run(lambda: None) == 0 and capsys.readouterr().err == ""
    assert cli.run(raising(UserError("--data x: no such folder"))) == 2
    assert capsys.readouterr().err == "error: --data x: no such folder\n"
    assert cli.run(raising(KeyboardInterrupt())) == 130 and "Ctrl-C" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # Python prints the traceback and exits with 1
        cli.run(raising(ZeroDivisionError()))
    monkeypatch.setenv("RANK", "2")
    assert cli.run(raising(UserError("x"))) == 2 and capsys.readouterr().err == "[rank 2] error: x\n"


# ---- every script

HEAVY = ["torch", "transformers", "deepspeed", "numpy", "pyarrow", "datasets"]
LOADED = f"""
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("exit", end.code, [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_mistakes_load_nothing_heavy(script, tmp_path):
    for word, code in (("--help", 0), ("--sed", 2)):
        done = subprocess.run(
            [sys.executable, "-c", LOADED, ROOT / script, word], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.stdout.splitlines()[-1] == f"exit {code} []", done.stderr
        if code == 0:
            help_text = done.stdout
            doc = module_of(script).__doc__
            assert doc.splitlines()[0] in help_text and "--config" in help_text and "Traceback" not in help_text


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_says_what_it_does_and_its_default(script, capsys):
    with pytest.raises(SystemExit):
        module_of(script).parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for dest in vars(parse(script)):
        if dest != "local_rank":
            assert f"--{dest}" in text, dest
    assert "--local_rank" not in text and "%(" not in text


def picked_fields(tree: ast.AST) -> set[str]:
    """Fields of the records that `cli.pick` fills from flags of the same names."""
    names = {
        ast.unparse(node.args[0]).split(".")[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cli.pick"
    }
    modules = [
        "common.adapters",
        "common.engine",
        "common.supervised",
        "common.runs",
        "common.generation",
        "common.hub",
        "common.tokens",
    ]
    modules.append("step3_rlhf.ppo_trainer")
    found = {}
    for module in map(importlib.import_module, modules):
        found |= {
            n: {f.name for f in dataclasses.fields(r)} for n, r in vars(module).items() if dataclasses.is_dataclass(r)
        }
    return set().union(*(found[name] for name in names))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read(script):
    tree = ast.parse((ROOT / script).read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
    ignored = {"config", "local_rank"}  # read by the parser; said by LOCAL_RANK
    assert vars(parse(script)).keys() - read - picked_fields(tree) == ignored
