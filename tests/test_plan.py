"""The plan: sizes from configurations, commands read as typed, folders not yet written, what fits and what would."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_models
import small_tokenizers
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common import adapters, cli, memory, models
from common.errors import UserError
from scripts import model_sizes, plan
from scripts.plan_stages import GIB

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """A disk on which all of it fits, whatever this machine has."""
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: SimpleNamespace(free=900 * GIB))


# What published models have in their configurations, and the parameters of their weight files.
COLUMNS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
PUBLISHED = {  # model_type, the columns, vocab_size, tied; parameters
    "Qwen2.5-0.5B": ("qwen2", (24, 896, 4864, 14, 2), 151936, True, 494_032_768),
    "Qwen2.5-1.5B": ("qwen2", (28, 1536, 8960, 12, 2), 151936, True, 1_543_714_304),
    "Qwen2.5-7B": ("qwen2", (28, 3584, 18944, 28, 4), 152064, False, 7_615_616_512),
    "Llama-2-7b": ("llama", (32, 4096, 11008, 32, 32), 32000, False, 6_738_415_616),
    "Llama-3-8B": ("llama", (32, 4096, 14336, 32, 8), 128256, False, 8_030_261_248),
    "Mistral-7B-v0.1": ("mistral", (32, 4096, 14336, 32, 8), 32000, False, 7_241_732_096),
}


def published(name: str) -> dict:
    kind, sizes, vocabulary, tied, _ = PUBLISHED[name]
    config = {"model_type": kind, "vocab_size": vocabulary, "tie_word_embeddings": tied, "dtype": "bfloat16"}
    return config | dict(zip(COLUMNS, sizes, strict=True))


def write_config(folder: Path, config: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_they_are_known_to_have(name, tmp_path):
    shape, stored = model_sizes.read_shape(write_config(tmp_path, published(name)), False, False)
    assert shape.parameters == PUBLISHED[name][-1] and stored == 2
    assert shape.largest == shape.vocabulary * shape.hidden


SMALL = {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
FAMILIES = {
    "LlamaConfig": SMALL | {"num_key_value_heads": 2},
    "MistralConfig": SMALL | {"num_key_value_heads": 2},
    "Qwen2Config": SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3Config": SMALL | {"num_key_value_heads": 2, "head_dim": 10},
    "GemmaConfig": SMALL | {"num_key_value_heads": 1, "head_dim": 8},
    "GPTNeoXConfig": SMALL,
    "GPT2Config": {"vocab_size": 99, "n_embd": 24, "n_layer": 3, "n_head": 4},
    "OPTConfig": {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40,
                  "word_embed_proj_dim": 24},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_model_itself(family, tmp_path):
    config = getattr(transformers, family)(**FAMILIES[family], pad_token_id=0)
    config.save_pretrained(tmp_path)
    for scalar, auto in ((False, AutoModelForCausalLM), (True, AutoModelForSequenceClassification)):
        if scalar:
            config.num_labels = 1
        model = auto.from_config(config)
        shape, stored = model_sizes.read_shape(str(tmp_path), scalar, False)
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert stored == 2, "a configuration that does not say is taken for bf16"
        assert (shape.layers, shape.hidden, shape.heads) == (3, 24, 4)
        assert shape.intermediate == (96 if family == "GPT2Config" else 40)
        assert shape.kv_heads == FAMILIES[family].get("num_key_value_heads", 4)
        assert shape.head_dim == FAMILIES[family].get("head_dim", 6)


# ---- a plan


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> tuple[str, str]:
    """Folders of Qwen2.5-7B and 1.5B without weights, with small tokenizers."""
    root = tmp_path_factory.mktemp("bases")
    found = []
    for name in ("Qwen2.5-7B", "Qwen2.5-1.5B"):
        found.append(write_config(root / name, published(name)))
        small_tokenizers.qwen_like().save_pretrained(found[-1])
    return tuple(found)


def recipe(bases, folder, *, sft="", rlhf="", evaluation="") -> list[str]:
    flags = "--zero_stage 3 --gradient_checkpointing --dtype bf16"
    text = f"""
        -- deepspeed --num_gpus 8 step1_sft/train.py --model {bases[0]} --output_dir {folder}/sft {flags} {sft}
        -- python step2_reward/train.py --model {bases[1]} --output_dir {folder}/reward {flags}
        -- step3_rlhf/train.py --actor {folder}/sft --critic {folder}/reward --output_dir {folder}/rlhf {flags}
           --frozen_zero_stage 3 --rollout_batch_size 512 {rlhf}
        -- python scripts/evaluate.py --model {folder}/sft {folder}/rlhf/actor --judge {folder}/reward
           --ref {folder}/sft --output {folder}/evaluation.json {evaluation}"""
    return text.split()


MACHINE = ["--num_gpus", "8", "--gpu_gb", "79", "--host_gb", "900"]


def planned(words, capsys) -> dict:
    plan.main([*words[: words.index("--")], "--json", *words[words.index("--") :]])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("tokens", "rows"), [(8192, 8), (1, 1), (10**9, 16)])
def test_micro_batches_by_tokens_are_planned_as_rows_of_full_length(bases, tmp_path, capsys, tokens, rows):
    """At 1024 tokens a row; a row that alone has more is a forward of its own, and a step of 16 rows has no more."""
    line = f"step1_sft/train.py --model {bases[1]} --data {tmp_path} --output_dir {tmp_path}/o --max_length 1024"
    steps = f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {16 // rows}".split()
    one = ["--num_gpus", "1", "--gpu_gb", "900", "--host_gb", "900", "--", *line.split()]
    seen = planned([*one, *steps, "--max_tokens_per_micro_batch", str(tokens)], capsys)
    assert seen["stages"] == planned([*one, *steps], capsys)["stages"]


def test_a_recipe_is_planned_before_any_of_it_is_there(bases, tmp_path, capsys):
    seen = planned([*MACHINE, *recipe(bases, tmp_path)], capsys)
    assert list(seen["stages"]) == ["sft", "reward", "rlhf", "evaluation"] and seen["does_not_fit"] == []
    sft, reward, rlhf = (seen["stages"][name] for name in ("sft", "reward", "rlhf"))
    assert sft["gpu"]["items"]["weights"] == [2 * 7_615_616_512 / 8] * 4
    assert sft["gpu"]["items"]["optimizer"] == [12 * 7_615_616_512 / 8] * 4
    scalar = 1_543_714_304 + 1536  # the head
    assert reward["disk"] == 2 * scalar and rlhf["disk"] == 2 * (7_615_616_512 + scalar)
    assert rlhf["gpu"]["phases"][1:3] == ["rollout", "score"]
    assert rlhf["gpu"]["items"]["gathered copy"][1] == 2 * 7_615_616_512
    assert rlhf["gpu"]["items"]["frozen models"][1] == pytest.approx(2 * (7_615_616_512 + scalar) / 8)
    # 64 responses a rank, 512 + 256 tokens, 28 layers of 4 heads of 128, keys and values in 2 bytes
    assert rlhf["gpu"]["items"]["KV cache"][1] == 64 * 768 * 28 * 4 * 128 * 2 * 2


def test_seconds_are_floating_point_operations_by_hand(bases, tmp_path, capsys):
    words = [*MACHINE[:4], "--host_gb", "900", "--tflops", "100", "--decode_ms", "20", *recipe(bases, tmp_path)]
    stages = planned(words, capsys)["stages"]
    forward = 2 * 7_615_616_512 + 2 * 28 * 3584 * 1024
    assert stages["sft"]["seconds"] == pytest.approx(4 * forward * 8 * 8 * 1024 / (8 * 1e14))
    scalar = 2 * (1_543_714_304 + 1536) + 2 * 28 * 1536 * 1024  # a pair is two rows
    assert stages["reward"]["seconds"] == pytest.approx(4 * scalar * 8 * 8 * 2 * 1024 / (8 * 1e14))
    tokens, length = 512 * 768, 768
    actor = 2 * 7_615_616_512 + 2 * 28 * 3584 * length
    critic = 2 * (1_543_714_304 + 1536) + 2 * 28 * 1536 * length
    # policy and reference, critic and reward model; then two epochs of both learners, 4 forwards each
    flops = tokens * (2 * actor + 2 * critic + 2 * 4 * (actor + critic))
    assert stages["rlhf"]["seconds"] == pytest.approx(256 * 0.020 + flops / (8 * 1e14))


def test_the_tables_say_what_it_is_and_what_it_is_not(bases, tmp_path, capsys):
    plan.main([*MACHINE, *recipe(bases, tmp_path, sft="--max_steps 100")])
    said = capsys.readouterr().out
    assert "8 GPUs of 79 GiB" in said and "nothing of it was measured" in said
    for word in ("rollout", "gathered copy", "KV cache", "logits", "frozen models", "together", "host memory", "disk:"):
        assert word in said
    assert "keeps up 300 TFLOP/s" in said and said.count(" s a step") == 3 and " s in all" in said
    assert said.count("GPU hours") == 2  # where the steps are known


def test_what_does_not_fit_is_refused_with_a_change_that_helps(bases, tmp_path, capsys):
    with pytest.raises(UserError) as caught:
        plan.main(["--num_gpus", "4", "--gpu_gb", "70", *MACHINE[4:], *recipe(bases, tmp_path)])
    said = str(caught.value)
    assert said.startswith("rlhf takes ") and "GiB of each GPU (rollout), 63.0 can be used" in said
    hint = said.partition("it would fit with ")[2]
    assert hint == "--rollout_forward_batch_size 16 --batch_size 16"
    small = recipe(bases, tmp_path, rlhf="--rollout_forward_batch_size 16", evaluation="--batch_size 16")
    plan.main(["--num_gpus", "4", "--gpu_gb", "70", *MACHINE[4:], *small])
    with pytest.raises(UserError, match="it would fit with .*--offload_optimizer"):
        plan.main(["--num_gpus", "1", *MACHINE[2:], *recipe(bases, tmp_path)])
    with pytest.raises(UserError, match=r"GiB of host memory \(load\), 10.0 can be used"):
        plan.main([*MACHINE[:4], "--host_gb", "10", *recipe(bases, tmp_path)])
    sft = recipe(bases, tmp_path)[: recipe(bases, tmp_path).index("python") - 1]
    with pytest.raises(UserError, match="it would fit on 4 such GPUs"):  # the host is too small to offload to
        plan.main(["--num_gpus", "1", "--gpu_gb", "79", "--host_gb", "30", *sft])
    with pytest.raises(UserError, match="no flag makes it fit here"):
        plan.main(["--num_gpus", "8", "--gpu_gb", "2", "--host_gb", "900", *recipe(bases, tmp_path)])


def test_what_is_of_this_machine_is_said_with_the_flag_for_another(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(plan.memory, "free_host_memory", lambda: 10 * GIB)
    with pytest.raises(UserError) as caught:
        plan.main([*MACHINE[:4], *recipe(bases, tmp_path)])
    said = str(caught.value)
    assert said.endswith(
        "the GPUs hold it, the host does not: it takes a machine with more memory; that is of this machine; for "
        "another give --host_gb"
    )
    with pytest.raises(UserError) as caught:
        plan.main([*MACHINE[:4], "--host_gb", "10", *recipe(bases, tmp_path)])
    assert "this machine" not in str(caught.value) and "no flag makes it fit" not in str(caught.value)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    with pytest.raises(UserError, match="that is of this machine; for another give --disk_gb"):
        plan.main([*MACHINE, *recipe(bases, tmp_path)])
    plan.main([*MACHINE, "--disk_gb", "400", *recipe(bases, tmp_path)])
    with pytest.raises(UserError, match=r"take 392.4 GiB of disk, 300.0 are free; make room"):
        plan.main([*MACHINE, "--disk_gb", "300", *recipe(bases, tmp_path)])


def test_a_hub_that_does_not_answer_is_asked_nothing(tmp_path):
    """The client's own retries take half a minute."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://user:secret@127.0.0.1:{closed.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/plan.py", *MACHINE, "--", "step1_sft/train.py", "--model", "Qwen/Qwen2.5-7B"],
        capture_output=True,
        text=True,
        env=environment | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)},
    )
    note, error = done.stderr.splitlines()
    assert done.returncode == 2 and "Retrying" not in done.stderr and "secret" not in done.stderr
    assert note.startswith("note: http://***@127.0.0.1:") and error.startswith("error: no model configuration")


def test_a_full_disk_is_seen_before_anything_is_written(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    with pytest.raises(UserError, match=r"take 392.4 GiB of disk, 1.0 are free; make room") as caught:
        plan.main([*MACHINE, *recipe(bases, tmp_path)])
    assert "would fit" not in str(caught.value) and f"{tmp_path}/sft and {tmp_path}/reward" in str(caught.value)


def test_a_finished_stage_takes_nothing_and_stands_for_itself(bases, tmp_path, capsys):
    write_config(tmp_path / "sft", published("Qwen2.5-0.5B"))  # what is there counts
    small_tokenizers.qwen_like().save_pretrained(tmp_path / "sft")
    (tmp_path / "sft" / "stage.json").write_text("{}")
    stages = planned([*MACHINE, *recipe(bases, tmp_path)], capsys)["stages"]
    assert list(stages) == ["reward", "rlhf", "evaluation"]
    assert stages["rlhf"]["gpu"]["items"]["gathered copy"][1] == 2 * 494_032_768


def test_without_gpus_everything_is_on_the_host(bases, tmp_path, capsys):
    words = ["--num_gpus", "2", "--gpu_gb", "0", "--host_gb", "900", *recipe(bases, tmp_path)]
    words = [word if word != "bf16" else "auto" for word in words]
    sft = planned(words, capsys)["stages"]["sft"]
    assert sft["gpu"]["items"]["weights"][0] == 4 * 7_615_616_512 / 2  # auto is fp32 here
    assert sft["host"]["items"]["weights"] == [2 * size for size in sft["gpu"]["items"]["weights"]]
    assert sft["host"]["items"]["processes"][0] == 2 * 0.7 * GIB
    with pytest.raises(UserError, match="GiB of host memory"):
        plan.main(["--num_gpus", "2", "--gpu_gb", "0", "--host_gb", "20", *recipe(bases, tmp_path)])


def test_host_memory_is_counted_a_machine(bases, tmp_path, capsys):
    offloaded = recipe(bases, tmp_path, sft="--offload_optimizer")
    one = planned([*MACHINE, *offloaded], capsys)["stages"]["sft"]["host"]["items"]
    two = planned(["--num_gpus", "16", "--num_nodes", "2", *MACHINE[2:], *offloaded], capsys)
    two = two["stages"]["sft"]["host"]["items"]
    assert one["optimizer"][0] == 20 * 7_615_616_512 and two["optimizer"][0] == 10 * 7_615_616_512
    assert one["processes"] == two["processes"]
    with pytest.raises(UserError, match="--num_gpus 9 cannot be spread evenly over --num_nodes 2"):
        plan.main(["--num_gpus", "9", "--num_nodes", "2", *MACHINE[2:], *offloaded])


def test_a_reward_function_takes_no_memory(tmp_path, bases, capsys):
    command = f"-- step3_rlhf/train.py --actor {bases[1]} --critic {bases[1]} --output_dir {tmp_path}/rlhf"
    alone = planned([*MACHINE, *command.split(), "--reward", "r.py:f"], capsys)["stages"]["rlhf"]["gpu"]["items"]
    judged = planned([*MACHINE, *command.split(), "--reward", bases[1]], capsys)["stages"]["rlhf"]["gpu"]["items"]
    free = planned([*MACHINE, *command.split(), "--reward", "r.py:f", "--kl_coef", "0"], capsys)["stages"]["rlhf"]
    scalar = 2 * (1_543_714_304 + 1536)
    assert judged["frozen models"][1] - alone["frozen models"][1] == scalar
    assert "frozen models" not in free["gpu"]["items"], "no KL, no reference"


# ---- models that do not go together


@pytest.mark.parametrize("what", ["vocabulary", "template"])
def test_two_models_that_do_not_read_the_same_tokens_are_refused_at_once(what, bases, tmp_path):
    other = write_config(tmp_path / "other", published("Qwen2.5-0.5B"))
    tokenizer = small_tokenizers.qwen_like()
    if what == "vocabulary":
        tokenizer.add_tokens(["<|another|>"])
    else:
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "helper")
    tokenizer.save_pretrained(other)
    words = {"vocabulary": "has another tokenizer than", "template": "has another chat template than"}[what]
    with pytest.raises(UserError, match=words) as caught:
        plan.main([*MACHINE, *recipe((bases[0], other), tmp_path)])
    assert str(caught.value).startswith(f"{other} ")


def test_a_template_named_for_both_makes_them_go_together(bases, tmp_path, capsys):
    plain = []
    for name in ("Qwen2.5-7B", "Qwen2.5-1.5B"):
        plain.append(write_config(tmp_path / name, published(name)))
        tokenizer = small_tokenizers.qwen_like()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(plain[-1])
    words = recipe(plain, tmp_path)
    with pytest.raises(UserError, match="has no chat template; name one with --chat_template"):
        plan.main([*MACHINE, *words])
    for script in ("step1_sft/train.py", "step2_reward/train.py"):
        words[words.index(script) + 1 : words.index(script) + 1] = ["--chat_template", "chatml"]
    plan.main([*MACHINE, *words])


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing to plan; give the commands you are about to run"),
        ("-- ls -l", "no plan for `ls -l`; wanted a command of step1_sft/train.py"),
        ("-- python step0_data/prepare.py", "no plan for `python step0_data/prepare.py`"),
        ("-- step1_sft/train.py --model NOWHERE/x/y", "no model configuration could be loaded from"),
    ],
)
def test_mistakes_are_one_line(words, said):
    with pytest.raises(UserError, match=said):
        plan.main(f"--num_gpus 1 --gpu_gb 79 {words}".split())


def test_a_hub_name_that_cannot_be_reached_says_what_to_do(tmp_path):
    words = ["--num_gpus", "8", "--gpu_gb", "79", "--", "step1_sft/train.py", "--model", "somebody/gated-7b"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/plan.py", *words],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr
    assert "somebody/gated-7b" in errors[0] and "go online, or for a gated model accept its terms" in errors[0]


def test_a_download_counts_unless_it_is_in_the_cache(bases, tmp_path, monkeypatch, capsys):
    """A hub name is known by its configuration; here a folder plays the hub's part."""
    read = model_sizes.models.read_config
    monkeypatch.setattr(
        model_sizes.models, "read_config", lambda path, remote: read(bases[0] if path == "hub/name" else path, remote)
    )
    words = [*MACHINE, "--", "step1_sft/train.py", "--model", "hub/name", "--output_dir", str(tmp_path / "sft")]
    words += ["--save_steps", "0"]
    words += ["--zero_stage", "3", "--gradient_checkpointing"]
    disks = planned(words, capsys)["disks"]
    assert sum(disk["need"] for disk in disks) == 2 * 2 * 7_615_616_512  # the download, and the folder of step 1
    monkeypatch.setattr(model_sizes, "is_cached", lambda name: True)
    assert sum(disk["need"] for disk in planned(words, capsys)["disks"]) == 2 * 7_615_616_512


def test_commands_are_checked_by_their_own_parsers(capsys):
    with pytest.raises(SystemExit) as caught:
        plan.main(
            ["--num_gpus", "1", "--gpu_gb", "79", "--", "step1_sft/train.py", "--model", "x", "--lerning_rate", "1"]
        )
    assert caught.value.code == 2 and "--learning_rate" in capsys.readouterr().err
    assert cli.run(lambda: plan.main([])) == 2


def test_small_models_used_here_are_really_small(tmp_path):
    """Guards the fixtures: a tokenizer without weights must not hide a model that cannot be built."""
    folder = small_models.save_llama(tmp_path / "llama")
    shape, _ = model_sizes.read_shape(str(folder), False, False)
    assert shape.parameters < 100_000


def test_adapters_are_counted_as_peft_makes_them(tmp_path):
    folder = small_models.save_llama(tmp_path / "llama")
    hf = models.load_causal_lm(folder)
    adapters.add(hf, adapters.Lora(4, 8, 0.0, ["all-linear"]), 0)
    shape, _ = model_sizes.read_shape(str(folder), False, False)
    trained = sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad)
    assert memory.adapter_parameters(shape, 4) == trained
    how = memory.How(weight_bytes=2)
    assert memory.checkpoint(shape, how, trained) == 2 * shape.parameters + 12 * trained
