"""Model families, tiny and random, through all stages: trained, saved, and opened by plain transformers as the same.

Each stage is run by its own entry script on a few rows, and what it leaves is compared with what the trained engine
said. The README's table of families says what comes of each; `-s` prints it, with what a refusal says, and `RLHF_ALL=1`
takes every family in the place of some of each kind.
"""

import contextlib
import functools
import gc
import io
import os
import re
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from small_runs import answer, call, write_data
from small_tokenizers import qwen_like
from test_docs import code_spans, section, tables
from test_family_rollouts import BASE, REFUSED, SAMPLED
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

from common import engine
from common.metrics import read_jsonl
from step1_sft import train as sft
from step2_reward import train as reward
from step3_rlhf import train as rlhf

# DeepSpeed calls what torch is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

CHANGES = SAMPLED | {name: changes for name, (changes, _) in REFUSED.items()}
# Some of each kind: tied and untied, learned and linear positions, Conv1D, windows, experts, latent attention,
# recurrent, hybrid and convolutional layers, no classifier, and what is refused.
SOME = [
    "llama", "gpt2", "opt", "bloom", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "mamba2", "jamba",
    "qwen3_next", "lfm2_moe", "granite", "openai-gpt", "rwkv",
]  # fmt: skip
STAGES = ["SFT", "LoRA", "reward model", "PPO"]
OTHERS_CRITIC = "yes, another family's critic"
# What the README calls a refusal, and what the run says.
REFUSALS = {
    "no classifier": "transformers has no such class for .* models; take a model of another family",
    "no usable cache": "cannot be sampled from here: .*cache",
    "no score head": "which has no linear head `score`",
    "reads padding": "padding in front of a text changes its output",
    "not causal": "a token that comes later changes its output",
}

QUESTIONS = ["What is an apple pie?", "Why?", "Are bees kind to the happy ones?", "12+30="]
ANSWERS = ["Sure! An apple pie is tasty.", "No.", "Unhappy bees rarely sting.", "42"]
# A step takes as many rows as there are, so each sees the same batch.
FEW = " --data ../data --report_to none --adam_epsilon 1e-5 --lr_scheduler_type constant --warmup_steps 0"
ROWS = FEW + " --max_length 128 --max_steps 3 --per_device_train_batch_size 4"
SFT = ROWS + " --model base --learning_rate 3e-3"
LORA = ROWS + " --model base --learning_rate 1e-2 --lora_r 4"
RM = ROWS + " --model {} --learning_rate 1e-3"
RL = FEW + (
    " --actor {} --critic {} --max_steps 1 --rollout_batch_size 4 --minibatch_size 4 --num_ppo_epochs 1"
    " --max_prompt_length 96 --max_completion_length 8 --learning_rate 1e-3 --critic_learning_rate 1e-3"
)
IDS = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with data; each family gets one beside them."""
    root = tmp_path_factory.mktemp("families")
    rows = [
        ([{"role": "user", "content": text}], answer(reply)) for text, reply in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    other = answer("Thank you.")
    write_data(
        root / "data",
        sft=[{"messages": user + reply} for user, reply in rows],
        preference=[{"prompt": user, "chosen": reply, "rejected": other} for user, reply in rows],
        prompts=[{"prompt": user} for user, _ in rows],
    )
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage at each engine: it need not look through all that was imported
    yield root
    gc.unfreeze()


@pytest.fixture(scope="module")
def heard():
    """{is it a scalar model: what the engine that was saved last said to IDS}."""
    found, writer = {}, engine.TrainedModel.writer

    def listened(model, text, say):
        with model.evaluating():
            found[hasattr(model.module.hf, "score")] = model(IDS, torch.ones_like(IDS).bool()).float()
        return writer(model, text, say)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.TrainedModel, "writer", listened)
        yield found


@pytest.fixture(scope="module")
def through(root, heard):
    """through(family): {stage: what comes of it}, each run once; printed at the end."""
    start, seconds = time.time(), {}

    @functools.cache
    def run(name: str) -> dict[str, str]:
        nonlocal start
        folder = root / name
        save_base(folder / "base", name)
        row = {
            "SFT": outcome(folder, heard, sft, SFT, {"sft": "base"}),
            "LoRA": outcome(folder, heard, sft, LORA, {"lora": "base"}),
        }
        actor = "sft" if row["SFT"] == "yes" else "base"
        row["reward model"] = outcome(folder, heard, reward, RM.format(actor), {"reward": actor})
        critic = "reward"
        if row["reward model"] != "yes":
            assert name != "llama" and run("llama")
            critic = "../llama/reward"  # it has the same tokens
        row["PPO"] = outcome(
            folder, heard, rlhf, RL.format(actor, critic), {"rlhf/actor": actor, "rlhf/critic": critic}
        )
        if row["PPO"] == "yes" and critic != "reward":
            row["PPO"] = OTHERS_CRITIC
        seconds[name], start = (row, time.time() - start), time.time()
        return row

    yield run
    print("\n\n| family | " + " | ".join(STAGES) + " | seconds |\n" + "|---" * (len(STAGES) + 2) + "|")
    for name, (row, took) in seconds.items():
        print(f"| {name} | " + " | ".join(row[stage] for stage in STAGES) + f" | {took:.1f} |")


def save_base(folder: Path, name: str) -> None:
    tokenizer = qwen_like()
    tokenizer.pad_token = "<|fim_pad|>"
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(BASE | {"vocab_size": 352} | ids | CHANGES[name]))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def outcome(folder: Path, heard: dict, module, words: str, parents: dict[str, str]) -> str:
    """Runs a stage and looks at what it leaves: "yes", or the one line that refuses it."""
    written = next(iter(parents)).partition("/")[0]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = call(module, f"{words} --output_dir {written}", folder)
    if code:
        said = errors.getvalue()
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
        assert not (folder / written).exists() or not list((folder / written).glob("**/stage.json"))
        return said.removeprefix("error: ").strip()
    for part, parent in parents.items():
        compare(folder / part, folder / parent, heard)
    if module is not rlhf:
        first, *_, last = (row["loss"] for row in read_jsonl(folder / written / "metrics.jsonl"))
        assert last < first
    return "yes"


@torch.no_grad()
def compare(folder: Path, parent: Path, heard: dict) -> None:
    """Plain transformers opens a folder without a complaint, says what was trained, and all of it was trained."""
    is_scalar = folder.name in ("reward", "critic")
    model, plain = opened(folder, is_scalar), heard[is_scalar][:, -1] if is_scalar else heard[is_scalar]
    torch.testing.assert_close(model(IDS).logits.squeeze(-1), plain, atol=1e-4 * float(plain.std()), rtol=0)
    # By all their names: of a weight that layers share, the first name is not the same in every folder.
    old = dict(opened(parent, is_scalar, may_lack_head=True).named_parameters(remove_duplicate=False))
    same = {name for name, weight in model.named_parameters(remove_duplicate=False) if torch.equal(weight, old[name])}
    if folder.name == "lora":
        assert same and same != set(old)
        adapted = PeftModel.from_pretrained(opened(parent, False), folder / "adapter").eval()
        torch.testing.assert_close(adapted(IDS).logits, plain, atol=1e-4 * float(plain.std()), rtol=0)
    else:  # Phi-MoE's router has a gradient only where two experts nearly tie
        assert all(name.endswith(".mlp.router.weight") for name in same) and len(same) <= 2, same


def opened(folder: Path, is_scalar: bool, may_lack_head: bool = False) -> torch.nn.Module:
    auto = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    missing, unused, wrong = (set(info[f"{kind}_keys"]) for kind in ("missing", "unexpected", "mismatched"))
    if missing == {"score.weight"} and may_lack_head:
        missing, unused = set(), set()  # the language model's own head
    assert not missing | unused | wrong, (folder, missing, unused, wrong)
    return model.eval()


def readme() -> dict[str, list[str]]:
    """{family: the README's cells}."""
    heading, *rows = tables(section("README.md", "Which models work"))[1]
    assert heading[1:] == STAGES
    named = [(name, row[1:]) for row in rows for name in code_spans(row[0])]
    assert len(dict(named)) == len(named), "a family is in two rows"
    return dict(named)


def test_the_readme_names_every_family_that_is_tried():
    assert set(readme()) == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES if os.environ.get("RLHF_ALL") else SOME)
def test_a_family_is_trained_and_saved_or_refused_in_one_line(name, through):
    row = through(name)
    for stage, cell in zip(STAGES, readme()[name], strict=True):
        assert row[stage] == cell or re.search(REFUSALS[cell], row[stage]), (stage, row[stage])
    assert (row["reward model"] == "yes") <= (name in CLASSIFIERS)
