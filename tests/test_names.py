"""Names from DeepSpeed-Chat, TRL and transformers: each row of common/FLAGS.md is what the real parsers say to it."""

import argparse
import contextlib
import re
import shlex
from pathlib import Path

import pytest
from test_cli import DATA, NEEDED, RL, RM, SCRIPTS, SFT, module_of, parse, refused

from common import cli, names

PAGE = Path(cli.__file__).with_name("FLAGS.md")
# Flags that aliases and answers name and that are not there yet.
LATER = {"--ptx_coef"}


class Seen(Exception):
    pass


def actions(script: str) -> dict[str, argparse.Action]:
    """{option: what argparse knows of it} of an entry script."""
    found = {}

    def stop(parser, *_):
        found.update(parser._known())
        raise Seen

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Seen):
        patch.setattr(cli.Parser, "parse_args", stop)
        module_of(script).parse_args([])
    return found


# What step 3 counts over all ranks itself, before any table is asked.
COUNTED = {(RL, "--per_device_generation_batch_size"), (RL, "--per_device_training_batch_size")}
KNOWN = {script: actions(script) for script in SCRIPTS}
ALL_FLAGS = set().union(*KNOWN.values())


# ---- the page


def cells(text: str) -> str:
    return text.replace("|", "\\|")


def table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "".join(f"| {' | '.join(map(cells, line))} |\n" for line in lines)


def tables() -> list[str]:
    """What FLAGS.md has to hold."""
    aliases = [
        (f"`{name}`", f"`{' '.join(target).replace('{}', 'VALUE')}`", (remark or "short form").split("'")[0])
        for name, (target, remark) in sorted(names.ALIASES.items())
    ]
    accepted = [
        (f"`{name}`", "any" if values is None else " or ".join(f"`{value}`" for value in values), why)
        for name, (values, why) in sorted(names.NO_EFFECT.items())
    ]
    elsewhere = [(f"`{name}`", instead) for name, instead in sorted(names.ELSEWHERE.items())]
    return [
        table(("typed", "here", "from"), aliases),
        table(("typed", "with", "because"), accepted),
        table(("typed", "instead"), elsewhere),
    ]


def test_the_page_shows_the_tables():
    page = PAGE.read_text()
    for wanted in tables():
        assert wanted in page, f"common/FLAGS.md lacks this table:\n{wanted}"
    assert len(re.findall(r"^\| typed ", page, re.M)) == 3


# ---- each row, by the real parsers


def sample(action: argparse.Action) -> str | None:
    """A value that is not the default; None for a switch."""
    if action.nargs == 0:
        return None
    if action.choices:
        return str(
            next(choice for choice in action.choices if choice not in (action.default, [action.default], "auto"))
        )
    for value in ("7", "0.5", "7,1,1", "word"):
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            if action.type is None or action.type(value) != action.default:
                return value
    raise AssertionError(action)


def needed(script: str, *given: str) -> list[str]:
    pairs = zip(*[iter(NEEDED[script])] * 2, strict=True)
    given += ("--model",) if "--model_name_or_path" in given else ()
    return [word for flag, value in pairs if flag not in given for word in (flag, value)]


@pytest.mark.parametrize("name", names.ALIASES)
def test_an_alias_is_the_flag_it_stands_for(name, capsys):
    target, remark = names.ALIASES[name]
    places = [script for script in SCRIPTS if target[0] in KNOWN[script] and name not in KNOWN[script]]
    places = [script for script in places if (script, name) not in COUNTED]
    assert places or target[0] in LATER or name in ALL_FLAGS
    for script in places:
        value = sample(KNOWN[script][target[0]])
        takes_value = len(target) == 1 or "{}" in target
        ours = [word.replace("{}", str(value)) for word in target] + ([value] if len(target) == 1 and value else [])
        flags = [word for word in ours if word.startswith("--")]
        wanted = vars(module_of(script).parse_args([*needed(script, *flags), *ours]))
        capsys.readouterr()
        theirs = [name, value] if takes_value and value else [name]
        assert vars(module_of(script).parse_args([*needed(script, *flags), *theirs])) == wanted
        said = capsys.readouterr().err
        meaning = " ".join(ours[: len(target)])
        assert said == (f"note: {name} ({remark}) is {meaning} here\n" if remark else "")
        assert target[0] == "--report_to" or any(wanted[flag[2:]] != vars(parse(script))[flag[2:]] for flag in flags)


@pytest.mark.parametrize("name", names.NO_EFFECT)
def test_what_is_accepted_changes_nothing_and_is_told(name, capsys):
    accepted, why = names.NO_EFFECT[name]
    assert name not in ALL_FLAGS and name not in names.ALIASES
    for script in SCRIPTS:
        plain = vars(parse(script))
        capsys.readouterr()
        for value in accepted if accepted is not None else ("7", "word", "True"):
            assert vars(parse(script, name, value)) == vars(parse(script, f"{name}={value}")) == plain
            assert capsys.readouterr().err == f"note: {name} has no effect here: {why}\n" * 2
        if accepted is None or "true" in accepted:
            assert vars(parse(script, name)) == plain
        if accepted is not None:
            error = refused(capsys, script, name, "0.25")
            reason = names.ELSEWHERE.get(name, f"{why}; leave it out")
            assert error.startswith(f"error: there is no {name}") and f" here: {reason}; see " in error


@pytest.mark.parametrize("name", names.ELSEWHERE)
def test_what_is_elsewhere_is_refused_with_what_to_do_instead(name, capsys):
    places = [script for script in SCRIPTS if name not in KNOWN[script] and (script, name) not in COUNTED]
    assert places
    for script in places:
        target = names.ALIASES.get(name, ([""], None))[0][0]
        if target not in KNOWN[script]:
            error = refused(capsys, script, name, "0.25")
            assert error.startswith(f"error: there is no {name} here: {names.ELSEWHERE[name]}; see ")


def test_flags_named_in_the_answers_exist():
    answers = [*names.ELSEWHERE.values(), *(why for _, why in names.NO_EFFECT.values())]
    named = set(re.findall(r"--\w+", " ".join(answers)))
    scripts = set(re.findall(r"\w+/\w+\.py", " ".join(answers)))
    assert scripts and all((PAGE.parents[1] / script).is_file() for script in scripts)
    assert named - LATER <= ALL_FLAGS | {"--dataset"} and len(named) > 20


# ---- whole lists of other programs

# The flags of DeepSpeed-Chat's training/step*/main.py, old and new, with values its published scripts give them.
CHAT_BOTH = """
--data_path D --data_split 2,4,4 --data_output_path /tmp/x --model_name_or_path M --per_device_train_batch_size 8
--per_device_eval_batch_size 8 --max_seq_len 512 --learning_rate 9.65e-6 --weight_decay 0. --num_train_epochs 4
--gradient_accumulation_steps 1 --lr_scheduler_type cosine --num_warmup_steps 0 --output_dir O --seed 1234
--gradient_checkpointing --dropout 0.0 --disable_dropout --zero_stage 2 --deepspeed --offload --dtype bf16
--compute_fp32_loss --enable_tensorboard --tensorboard_path O --print_loss --local_rank 0
"""
CHAT_STEP3 = """
--data_path D --data_split 2,4,4 --data_output_path /tmp/x --actor_model_name_or_path A --critic_model_name_or_path C
--num_padding_at_beginning 1 --per_device_generation_batch_size 4 --per_device_training_batch_size 4
--generation_batches 1 --ppo_epochs 1 --max_prompt_seq_len 256 --max_answer_seq_len 256 --actor_learning_rate 9.65e-6
--critic_learning_rate 5e-6 --actor_weight_decay 0.1 --critic_weight_decay 0.1 --num_train_epochs 1
--lr_scheduler_type cosine --gradient_accumulation_steps 1 --num_warmup_steps 100 --output_dir O --seed 1234
--preprocessing_num_workers 4 --local_rank 0 --enable_hybrid_engine --inference_tp_size 1 --tp_gather_partition_size 8
--offload --dtype bf16 --offload_reference_model --offload_reward_model --actor_zero_stage 3 --critic_zero_stage 3
--actor_gradient_checkpointing --critic_gradient_checkpointing --disable_actor_dropout --disable_critic_dropout
--actor_dropout 0.0 --critic_dropout 0.0 --compute_fp32_loss --enable_tensorboard --tensorboard_path O --print_answers
--print_answers_interval 5 --deepspeed
"""
ACCEPTED = [
    (SFT, CHAT_BOTH),
    (RM, CHAT_BOTH + "--num_padding_at_beginning 1 --no_fused_kernels"),
    (RL, CHAT_STEP3),
]
REFUSED = [
    (SFT, "sft_only_data_path lora_module_name only_optimize_lora lora_learning_rate add_eot_token eot_token"),
    (SFT, "offload_optimizer_device offload_optimizer_nvme_path offload_optimizer_pin_memory offload_optimizer_ratio"),
    (SFT, "offload_optimizer_buffer_count offload_optimizer_fast_init offload_param_device offload_param_nvme_path"),
    (SFT, "offload_param_pin_memory offload_param_buffer_size offload_param_buffer_count offload_param_max_in_cpu"),
    (SFT, "aio_block_size aio_queue_depth aio_intra_op_parallelism aio_single_submit aio_overlap_events aio_use_gds"),
    (RM, "lora_module_name only_optimize_lora lora_learning_rate add_eot_token no_bf16_to_fp32_loss"),
    (RM, "eval_interval eval_iters"),
    (RL, "unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef unpin_actor_parameters enable_ema"),
    (RL, "release_inference_cache only_optimize_lora actor_lora_module_name critic_lora_module_name add_eot_token"),
    (RL, "actor_lora_learning_rate critic_lora_learning_rate enable_mixed_precision_lora align_overflow"),
    (RL, "enable_test_mode test_stop_step"),
]


@pytest.mark.parametrize(("script", "line"), ACCEPTED, ids=[SFT, RM, RL])
def test_deepspeed_chats_lines_are_understood(script, line, capsys):
    args = module_of(script).parse_args(shlex.split(line))
    notes = capsys.readouterr().err.splitlines()
    assert all(note.startswith("note: --") for note in notes) and len(notes) == len(set(notes)) > 10
    assert (args.output_dir, args.seed, args.data, args.data_split, args.num_train_epochs) == (
        "O", 1234, "D", "2,4,4", 1.0 if script == RL else 4.0,
    )  # fmt: skip
    assert args.learning_rate == 9.65e-6 and args.lr_scheduler_type == "cosine" and args.dtype == "bf16"
    assert args.offload_optimizer and args.gradient_checkpointing and args.zero_stage == (3 if script == RL else 2)
    if script == RL:
        assert (args.actor, args.critic, args.critic_learning_rate) == ("A", "C", 5e-6)
        assert (args.rollout_batch_size, args.minibatch_size, args.per_device_train_batch_size) == (4, 4, 4)
        assert (args.weight_decay, args.critic_weight_decay, args.num_ppo_epochs, args.warmup_steps) == (
            0.1,
            0.1,
            1,
            100,
        )
        assert (args.max_prompt_length, args.max_completion_length, args.sample_steps) == (256, 256, 5)
        assert (args.rollout_backend, args.offload_frozen, args.frozen_zero_stage) == ("hybrid", True, 3)
    else:
        assert (args.max_length, args.per_device_train_batch_size, args.warmup_steps) == (512, 8, 0.0)


@pytest.mark.parametrize(("script", "flags"), REFUSED)
def test_deepspeed_chats_other_flags_are_answered(script, flags, capsys):
    for flag in flags.split():
        assert refused(capsys, script, f"--{flag}", "1").startswith(f"error: there is no --{flag} here: ")


TRL_SFT = """
--model_name_or_path M --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 8
--learning_rate 2.0e-5 --num_train_epochs 1 --max_steps 5 --packing False --eval_strategy steps --eval_steps 100
--save_strategy no --logging_steps 25 --logging_dir logs --warmup_ratio 0.1 --lr_scheduler_type cosine --bf16 True
--gradient_checkpointing True --attn_implementation sdpa --torch_dtype bfloat16 --max_length 512 --seed 42
--report_to tensorboard --run_name x --remove_unused_columns False --dataset_num_proc 4 --optim adamw_torch
--adam_beta1 0.9 --adam_beta2 0.95 --adam_epsilon 1e-8 --max_grad_norm 1.0 --weight_decay 0.1 --assistant_only_loss
--dataloader_num_workers 2 --ddp_find_unused_parameters False --do_train --do_eval --logging_first_step --output_dir O
"""
TRL_PPO = """
--dataset_name D --learning_rate 3e-6 --output_dir O --per_device_train_batch_size 8 --sft_model_path A
--reward_model_path C --missing_eos_penalty 1.0 --stop_token eos --response_length 53 --num_ppo_epochs 1 --kl_coef 0.05
--cliprange 0.2 --cliprange_value 0.2 --gamma 1.0 --lam 0.95 --whiten_rewards False --temperature 0.7
--local_rollout_forward_batch_size 64 --kl_estimator k1 --bf16 --ds3_gather_for_generation True --eval_strategy no
"""


def test_lines_of_trl_are_understood(capsys):
    for script, more in ((SFT, ""), (RM, "--center_rewards_coefficient 0.01 --disable_dropout True")):
        args = module_of(script).parse_args(shlex.split(f"--dataset_name D {TRL_SFT} {more}"))
        assert (args.data, args.warmup_steps, args.dtype, args.gradient_checkpointing) == ("D", 0.1, "bf16", True)
        assert (args.max_length, args.eval_steps, args.max_steps, args.weight_decay) == (512, 100, 5, 0.1)
    args = module_of(RL).parse_args(shlex.split(TRL_PPO))
    assert (args.actor, args.critic, args.reward, args.data) == ("A", "C", ["C"], "D")
    assert (args.max_completion_length, args.rollout_forward_batch_size, args.temperature) == (53, 64, 0.7)
    assert args.dtype == "bf16" and not args.whiten_rewards and args.missing_eos_penalty == 1.0
    assert "unknown" not in capsys.readouterr().err


COUNTED_OTHERWISE = {
    "--total_episodes 10000": "--max_steps = total_episodes / --rollout_batch_size",
    "--num_mini_batches 4": "--minibatch_size = --rollout_batch_size / num_mini_batches",
    "--num_sample_generations 10": "--sample_steps = --max_steps / num_sample_generations",
    "--gradient_accumulation_steps 4": "x gradient_accumulation_steps x ranks",
    "--generation_batches 2": "per_device_generation_batch_size x generation_batches x ranks",
    "--batch_size 64": "--rollout_batch_size",
    "--mini_batch_size 8": "--minibatch_size responses make one optimizer step",
    "--stop_token_id 5": "set eos_token_id in the actor's generation_config.json",
    "--ddp_timeout 1800": "--timeout_minutes = ddp_timeout / 60",
}


@pytest.mark.parametrize("words", COUNTED_OTHERWISE)
def test_what_counts_something_else_is_answered_by_the_formula(words, capsys):
    assert COUNTED_OTHERWISE[words] in refused(capsys, RL, *words.split())


# ---- batch sizes per device


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("equals", [False, True])
def test_batch_sizes_per_device_are_counted_over_all_ranks(ranks, equals, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    words = "--per_device_generation_batch_size 4 --generation_batches 2 --per_device_training_batch_size 2"
    words = shlex.split(words + " --gradient_accumulation_steps 2")
    words = [f"{a}={b}" for a, b in zip(*[iter(words)] * 2, strict=True)] if equals else words
    args = parse(RL, *words)
    assert (args.rollout_batch_size, args.minibatch_size, args.per_device_train_batch_size) == (8 * ranks, 4 * ranks, 2)
    first, second = capsys.readouterr().err.splitlines()
    said = f"note: --per_device_generation_batch_size 4 x --generation_batches 2 x {ranks} rank(s) is"
    assert first == f"{said} --rollout_batch_size {8 * ranks} here"
    said = f"note: --per_device_training_batch_size 2 x --gradient_accumulation_steps 2 x {ranks} rank(s) is"
    assert second == f"{said} --minibatch_size {4 * ranks} here"
    args = parse(RL, "--per_device_generation_batch_size", 32)
    assert (args.rollout_batch_size, args.minibatch_size) == (32 * ranks, 32)


def test_batch_sizes_per_device_that_make_no_sense_are_refused(capsys):
    size = "--per_device_generation_batch_size"
    assert f"{size} and --rollout_batch_size say the same" in refused(capsys, RL, size, 4, "--rollout_batch_size", 4)
    for words in ([size], [size, "0"], [size, "x"], [size, "4", "5"], [size, "4", "--generation_batches", "0"]):
        assert f"{size} and --generation_batches are whole numbers of at least 1" in refused(capsys, RL, *words)
    assert "there is no --per_device_generation_batch_size here" in refused(capsys, SFT, size, 4)


def test_step_0_has_its_own_names(capsys):
    args = parse(DATA, "--data_path", "a", "b", "--data_split", "6,2,2", "--max_samples", 3)
    assert (args.dataset, args.split, args.max_rows) == (["a", "b"], (6.0, 2.0, 2.0), 3)
    assert capsys.readouterr().err == ""


def test_the_readmes_short_table_is_part_of_the_page():
    page, readme = (path.read_text() for path in (PAGE, PAGE.parent.parent / "README.md"))
    rows = readme.partition("| there | here | of |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(rows) > 10
    for row in rows:
        assert row in page, row
