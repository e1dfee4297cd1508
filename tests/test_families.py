"""Seven model families through all stages, each with its own kind of tokenizer; what a family cannot do is said.

The measure is plain transformers on unpadded rows, in float64. `-s` prints the cells of the README's table that were
run, with their seconds.
"""

import copy
import functools
import gc
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
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from small_models import FAMILIES, SIZE, save_family
from small_runs import answer, call, mistake, write_data
from test_docs import section, tables
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common import chat_format, hybrid_engine, models, tokenizer
from common.batches import collate_sft, pad_left
from common.engine import FrozenModel
from common.errors import UserError
from common.examples import tokenise_sft
from common.generation import SamplingParams, generate
from common.metrics import read_jsonl
from common.models import LanguageModel, load_causal_lm, load_scalar_model
from step1_sft import train as sft
from step2_reward import train as reward
from step3_rlhf import rewards
from step3_rlhf import train as rlhf

# DeepSpeed calls what torch is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["SFT", "reward model", "PPO", "LoRA", "ZeRO-3"]
every_family = pytest.mark.parametrize("name", FAMILIES)

QUESTIONS = ["What is an apple pie?", "Why?", "Are bees kind to the happy ones?", "12+30=", "Tell me of the sea."]
ANSWERS = ["Sure! An apple pie is tasty.", "No.", "Unhappy bees rarely sting.", "42", "Thank you, goodbye."]


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


CONVERSATIONS = [user(question) + answer(text) for question, text in zip(QUESTIONS, ANSWERS, strict=True)]
TWO_TURNS = CONVERSATIONS[0] + CONVERSATIONS[2]
PAIRS = [{"prompt": user(question), "chosen": answer("Sure!"), "rejected": answer("No.")} for question in QUESTIONS]

# Few numbers, so that a run takes a second; the folders are the defaults, models/sft, models/reward and models/rlhf.
FEW = " --report_to none --learning_rate 1e-3 --adam_epsilon 1e-5 "
SFT = FEW + "--model base --data ../data --max_steps 2 --per_device_train_batch_size 6 "
RM = FEW + "--model models/sft --max_steps 2 "
RL = FEW + (
    "--actor models/sft --critic models/reward --max_steps 2 --rollout_batch_size 4 --minibatch_size 4 "
    "--num_generations 2 --num_ppo_epochs 1 --max_completion_length 8 --critic_learning_rate 1e-3 "
)


@pytest.fixture(scope="module")
def cells():
    """(family, stage) -> seconds: what was run, printed at the end."""
    seconds: dict[tuple[str, str], float] = {}
    yield seconds
    print("\n" + "".join(f"{word:>14}" for word in ["", *STAGES]))
    for name in FAMILIES:
        row = [seconds.get((name, stage)) for stage in STAGES]
        print(f"{name:>14}" + "".join(f"{'-' if cell is None else f'{cell:.1f} s':>14}" for cell in row))


@pytest.fixture(scope="module")
def run(tmp_path_factory, cells):
    """run(family, stage): its folder, in which that stage and those before it have been run once."""
    root = tmp_path_factory.mktemp("families")
    conversations = [{"messages": messages} for messages in [*CONVERSATIONS, TWO_TURNS]]
    write_data(root / "data", sft=conversations, preference=PAIRS, prompts=[{"prompt": user(q)} for q in QUESTIONS])

    @functools.cache
    def run_once(name: str, stage: str) -> Path:
        folder, family = root / name, FAMILIES[name]
        template = f"--chat_template {family.template}" if family.template else ""
        module, words, before = {
            "SFT": (sft, SFT + template, None),
            "LoRA": (sft, SFT + template + " --max_steps 1 --lora_r 4 --learning_rate 1e-2 --output_dir lora", None),
            "reward model": (reward, RM, "SFT"),
            "PPO": (rlhf, RL, "reward model"),
            "ZeRO-3": (rlhf, RL + "--zero_stage 3 --frozen_zero_stage 3 --output_dir zero3", "reward model"),
        }[stage]
        if before:
            run_once(name, before)
        elif not (folder / "base").exists():
            save_family(folder / "base", family)
        start = time.time()
        assert call(module, words, folder) == 0, (name, stage)
        cells[name, stage] = time.time() - start
        return folder

    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage at each ZeRO-3 engine: it need not look through all that was imported
    yield run_once
    gc.unfreeze()


def rendered(folder: Path, messages: list[dict], stop: str) -> str:
    """The text of a conversation up to and including its last stop token, by the folder's own template."""
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    return text[: text.rindex(stop) + len(stop)]


def tokens(folder: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


def ids_of(folder: Path, stop: str) -> list[list[int]]:
    """Conversations of different lengths, as tokens."""
    return [tokens(folder, rendered(folder, messages, stop)) for messages in [*CONVERSATIONS, TWO_TURNS]]


def surrounded(rows: list[list[int]], left: int, right: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows flush right with `left` and `right` more columns, and junk where nothing is real."""
    ids, mask = pad_left(rows, 0)
    ids, mask = (torch.nn.functional.pad(x, (left, right)) for x in (ids, mask))
    return torch.where(mask, ids, torch.randint(vocab, ids.shape)), mask


def exact(auto: type, folder: Path) -> torch.nn.Module:
    return auto.from_pretrained(folder).double().eval()


# ---- three steps, and what they leave


@every_family
def test_the_three_steps_run_one_after_another(name, run):
    folder = run(name, "PPO")
    for part, stage in {
        "sft": "sft", "reward": "reward", "rlhf/actor": "rlhf-actor", "rlhf/critic": "rlhf-critic"
    }.items():  # fmt: skip
        assert json.loads((folder / "models" / part / "stage.json").read_text())["stage"] == stage
    for part in ("sft", "reward", "rlhf"):
        steps = read_jsonl(folder / "models" / part / "metrics.jsonl")
        assert len(steps) == 2 and all(math.isfinite(value) for step in steps for value in step.values())
    first = steps[0]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4) and first["val/ratio_first"] == pytest.approx(
        1, abs=1e-4
    )
    assert steps[1]["objective/kl"] != 0 and 0 <= first["rollout/logprob_gap_max"] < 1e-4


@every_family
def test_what_is_learned_first_is_what_plain_transformers_says(name, run):
    """The loss of step 1 is the cross-entropy of the answers, each with one stop token, under the base model."""
    folder, family = run(name, "SFT"), FAMILIES[name]
    model = exact(AutoModelForCausalLM, folder / "base")
    rows, size = model.get_input_embeddings().num_embeddings, len(AutoTokenizer.from_pretrained(folder / "models/sft"))
    if size > rows:  # the pad token's row is new: the mean of the others
        model.resize_token_embeddings(size, mean_resizing=False)
        model.get_input_embeddings().weight.data[rows:] = model.get_input_embeddings().weight.data[:rows].mean(0)
    total = count = 0
    for messages in [*CONVERSATIONS, TWO_TURNS]:
        whole = tokens(folder / "models/sft", rendered(folder / "models/sft", messages, family.stop))
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        for end in range(2, len(messages) + 1, 2):
            first_turns = rendered(folder / "models/sft", messages[:end], family.stop)
            if not rendered(folder / "models/sft", messages, family.stop).startswith(first_turns):
                assert name == "qwen3" and end < len(messages)  # its template drops the thoughts of earlier answers
                continue
            prompt = AutoTokenizer.from_pretrained(folder / "models/sft").apply_chat_template(
                messages[: end - 1], tokenize=False, add_generation_prompt=True
            )
            start, stop = (len(tokens(folder / "models/sft", text)) for text in (prompt, first_turns))
            total -= sum(float(logprobs[t - 1, whole[t]]) for t in range(start, stop))
            count += stop - start
    assert read_jsonl(folder / "models/sft/metrics.jsonl")[0]["loss"] == pytest.approx(total / count, rel=1e-5)


@every_family
def test_each_answer_trains_one_stop_token_and_padding_none(name, run):
    text = tokenizer.prepare(run(name, "SFT") / "base", 500, "", FAMILIES[name].template, False)
    stop = text.tokenizer.convert_tokens_to_ids(FAMILIES[name].stop)
    assert text.stop_ids[0] == stop and text.pad_id not in text.stop_ids
    rows = [{"messages": messages} for messages in [*CONVERSATIONS, TWO_TURNS]]
    batch = collate_sft(tokenise_sft(text.tokenizer, rows, 500)[0], text.pad_id)
    stops = (batch["labels"] == stop).sum(1).tolist()
    assert stops == [1, 1, 1, 1, 1, 1 if name == "qwen3" else 2]
    last = batch["attention_mask"].sum(1) - 1
    assert (batch["labels"].gather(1, last[:, None]) == stop).all()
    assert (batch["labels"][~batch["attention_mask"]] == -100).all() and (~batch["attention_mask"]).any()
    assert (batch["labels"] != text.pad_id).all()


PADS = {"llama": "<unk>", "mistral": "<unk>", "opt": "<pad>", "gpt_neox": "<|padding|>"}  # others: a new token


@every_family
def test_special_tokens_are_written_for_others_to_read(name, run):
    folder, family = run(name, "PPO"), FAMILIES[name]
    for part in ("sft", "rlhf/actor", "reward", "rlhf/critic"):
        path = folder / "models" / part
        ours, config = AutoTokenizer.from_pretrained(path), json.loads((path / "config.json").read_text())
        assert (ours.eos_token, ours.pad_token) == (family.stop, PADS.get(name, "<|pad|>"))
        stops = config["eos_token_id"]
        stops = [stops] if isinstance(stops, int) else stops
        assert (stops[0], config["pad_token_id"]) == (ours.eos_token_id, ours.pad_token_id)
        assert config["vocab_size"] == max(family.size["vocab_size"], len(ours))
        if part in ("sft", "rlhf/actor"):
            named = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
            named = [named] if isinstance(named, int) else named
            assert named[0] == ours.eos_token_id and ours.pad_token_id not in named
            assert set(named) >= set([family.eos] if isinstance(family.eos, int) else family.eos)


@every_family
def test_embeddings_are_saved_once_where_they_are_tied(name, run):
    for part in ("models/sft", "models/rlhf/actor"):
        folder = run(name, "PPO") / part
        model, stored = AutoModelForCausalLM.from_pretrained(folder), load_file(folder / "model.safetensors")
        tied = name in ("qwen2", "qwen3", "gpt2", "opt")
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        vocabulary_sized = [key for key, value in stored.items() if value.shape[0] == model.config.vocab_size]
        assert len(vocabulary_sized) == (1 if tied else 2), vocabulary_sized


def test_half_the_key_and_value_heads_stay_half(run):
    for name in ("llama", "qwen2", "qwen3", "mistral"):
        stored = load_file(run(name, "PPO") / "models/rlhf/actor/model.safetensors")
        assert stored["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
        assert stored["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)


# ---- the two forwards


@every_family
def test_logprobs_are_those_of_a_plain_unpadded_forward(name, run):
    """Learned positions, rotary ones and a window of 8 tokens alike."""
    folder = run(name, "PPO") / "models/rlhf/actor"
    ours, plain = LanguageModel(load_causal_lm(folder)), exact(AutoModelForCausalLM, folder)
    rows = ids_of(folder, FAMILIES[name].stop)
    with torch.no_grad():
        expected = [plain(torch.tensor([row])).logits[0].log_softmax(-1) for row in rows]
        for left, right in ((0, 0), (9, 0), (3, 4)):
            ids, mask = surrounded(rows, left, right, plain.config.vocab_size)
            logprobs = ours(ids, mask).log_softmax(-1)
            for row, wanted in enumerate(expected):
                torch.testing.assert_close(logprobs[row][mask[row]].double(), wanted, atol=2e-5, rtol=1e-5)
    assert max(map(len, rows)) > 16 and min(float(wanted.std()) for wanted in expected) > 0.3


@every_family
@pytest.mark.parametrize("part", ["reward", "rlhf/critic"])
def test_values_are_those_of_a_plain_unpadded_classifier(name, part, run):
    folder = run(name, "PPO") / "models" / part
    (ours, fresh), plain = load_scalar_model(folder), exact(AutoModelForSequenceClassification, folder)
    rows = ids_of(folder, FAMILIES[name].stop)[2:]
    plain.config.pad_token_id = None  # or it would take the last token that is not the pad one
    with torch.no_grad():
        expected = [torch.cat([plain(torch.tensor([row[: t + 1]])).logits[0] for t in range(len(row))]) for row in rows]
        for left, right in ((0, 0), (5, 2)):
            ids, mask = surrounded(rows, left, right, plain.config.vocab_size)
            values = ours(ids, mask)
            for row, wanted in enumerate(expected):
                torch.testing.assert_close(values[row][mask[row]].double(), wanted, atol=1e-5, rtol=1e-5)
    assert not fresh and torch.cat(expected).std() > 0.1


@every_family
def test_reward_statistics_are_the_scores_of_plain_transformers(name, run):
    """And plain transformers pads as it likes to: on the right, ends found by the pad token."""
    folder = run(name, "reward model") / "models/reward"
    plain, tok = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    texts = [
        rendered(folder, row["prompt"] + row[side], tok.eos_token) for side in ("chosen", "rejected") for row in PAIRS
    ]
    tok.padding_side = "right"
    with torch.no_grad():
        batch = tok(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        scores = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    stats = json.loads((folder / "reward_stats.json").read_text())
    assert stats["n"] == 10 and stats["mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert stats["std"] == pytest.approx(float(scores.std(correction=0)), abs=1e-5) and stats["std"] > 0.05
    chosen, rejected = scores.chunk(2)
    seen = json.loads((folder / "stage.json").read_text())["metrics"]
    assert seen["eval_margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert seen["eval_accuracy"] == pytest.approx(float((chosen > rejected).float().mean()), abs=1e-6)


def test_the_head_of_a_small_opt_reads_what_its_projection_leaves(tmp_path):
    """OPT 350m: layer norms after the blocks, no last one, hidden states projected to another width."""
    changes = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    save_family(tmp_path / "lm", FAMILIES["opt"], **changes)
    model, fresh = load_scalar_model(tmp_path / "lm", fresh_head_std=lambda width: 1 / width)
    assert fresh and model.hf.score.weight.shape == (1, 16)
    assert float(model.hf.score.weight.detach().square().mean().sqrt()) == pytest.approx(1 / 16, rel=0.5)
    plain = copy.deepcopy(model.hf).double()
    plain.config.pad_token_id = None
    rows = [[2, 9, 33, 101, 7], [2, 54]]
    with torch.no_grad():
        scores = model.score(*surrounded(rows, 3, 1, 340))
        for row, score in zip(rows, scores, strict=True):
            assert float(score) == pytest.approx(float(plain(torch.tensor([row])).logits), abs=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_reach_to_the_last_one(name, tmp_path):
    family = FAMILIES[name]
    limit = {"gpt2": "n_positions", "opt": "max_position_embeddings"}[name]
    folder = save_family(tmp_path, family, **{limit: 24})
    config = models.read_config(folder)
    models.check_length(config, 24, "--max_length")
    with pytest.raises(UserError, match="25 tokens a sequence asked for, the model has positions for 24"):
        models.check_length(config, 25, "--max_length")
    row = [(7 * t) % 300 + 5 for t in range(24)]
    ids, mask = surrounded([row, row[:5]], 6, 0, 300)
    with torch.no_grad():
        wanted = exact(AutoModelForCausalLM, folder)(torch.tensor([row])).logits[0]
        logits = LanguageModel(load_causal_lm(folder))(ids, mask)[0][mask[0]].double()
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-5)


# ---- rollouts


def prompts_of(folder: Path) -> list[list[int]]:
    """Prompts of different lengths, one of them three times."""
    tok = AutoTokenizer.from_pretrained(folder)
    texts = [tok.apply_chat_template(user(q), tokenize=False, add_generation_prompt=True) for q in QUESTIONS]
    return [tokens(folder, text) for text in [*texts, texts[1], texts[1]]]


def sampling(folder: Path, **changes) -> SamplingParams:
    tok = AutoTokenizer.from_pretrained(folder)
    defaults = {
        "max_new_tokens": 14, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "pad_id": tok.pad_token_id,
        "stop_ids": (tok.eos_token_id, *range(100, 140)),  # many, so that rows end at different times
    }  # fmt: skip
    return SamplingParams(**(defaults | changes))


@every_family
def test_greedy_tokens_equal_those_of_hf_generate(name, run):
    folder = run(name, "PPO") / "models/rlhf/actor"
    model, plain = load_causal_lm(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts, params = prompts_of(folder), sampling(folder, greedy=True)
    rollout = generate(model, prompts, params)
    for row, prompt in enumerate(prompts[:5]):
        wanted = plain.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=14, eos_token_id=list(params.stop_ids), pad_token_id=params.pad_id,
        )[0, len(prompt) :]  # fmt: skip
        assert rollout.response[row][rollout.mask[row]].tolist() == wanted.tolist()
    assert torch.equal(rollout.response[5], rollout.response[1])


@every_family
def test_sampled_tokens_have_the_logprobs_of_a_plain_forward(name, run):
    folder = run(name, "PPO") / "models/rlhf/actor"
    prompts, plain = prompts_of(folder), exact(AutoModelForCausalLM, folder)
    rollout = generate(load_causal_lm(folder), prompts, sampling(folder, temperature=1.5))
    lengths = rollout.mask.sum(1).tolist()
    assert len(set(lengths)) > 2, "rows that end at different times leave the batch at different times"
    for row, prompt in enumerate(prompts):
        response = rollout.response[row, : lengths[row]]
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 : -1]
        wanted = (logits / 1.5).log_softmax(-1).gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.rollout_logprobs[row, : lengths[row]].double(), wanted, atol=2e-5, rtol=1e-5)


SPARE = [name for name, family in FAMILIES.items() if family.size["vocab_size"] == 352]


@pytest.mark.parametrize("name", SPARE)
def test_ids_without_a_token_are_sampled_without_harm(name, run):
    """Embeddings have more rows than the tokenizer has tokens; an actor may pick one."""
    folder = run(name, "PPO") / "models/rlhf/actor"
    tok, params = AutoTokenizer.from_pretrained(folder), sampling(folder, temperature=4.0)
    rollout = generate(load_causal_lm(folder), prompts_of(folder) * 6, params)
    spare = (rollout.response >= len(tok)) & rollout.mask
    assert spare.any() and len(tok) < 352
    for row, response in enumerate(rollout.response.tolist()):
        ends = [t for t, token in enumerate(response) if token in params.stop_ids and rollout.mask[row, t]]
        assert rollout.truncated[row] == (not ends) and rollout.mask[row].sum() == (ends[0] + 1 if ends else 14)
        kept = [token for token, is_kept in zip(response, rollout.mask[row], strict=True) if is_kept]
        spelled = kept[: kept.index(tok.eos_token_id)] if tok.eos_token_id in kept else kept
        known = [token for token in spelled if token < len(tok)]
        text = chat_format.decode_answer(tok, kept)
        assert text.lstrip() == tok.decode(known, skip_special_tokens=True).lstrip()


def test_a_reward_model_without_the_actors_spare_rows_reads_the_text(run, tmp_path):
    """Models of one tokenizer differ in rows: Qwen2.5 0.5B has 151936, 7B has 152064."""
    folder = run("qwen2", "reward model") / "models/reward"
    small = AutoModelForSequenceClassification.from_pretrained(folder)
    tok = models.load_tokenizer(folder)
    small.resize_token_embeddings(len(tok))
    small.save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    frozen = FrozenModel(lambda zero3: load_scalar_model(tmp_path)[0], "fp32", 0, False, torch.device("cpu"))
    source = rewards.RewardModel("small", frozen, tok, models.load_tokenizer(folder), "none", 0.0, 1.0)
    assert source.reader.same_tokens
    actor = load_causal_lm(run("qwen2", "PPO") / "models/rlhf/actor")
    rollout = generate(actor, prompts_of(folder)[:5] * 4, sampling(folder, temperature=4.0))
    assert (rollout.response >= len(tok)).any()
    texts = [chat_format.decode_answer(tok, r[m].tolist()) for r, m in zip(rollout.response, rollout.mask, strict=True)]
    rows = [{"prompt": user(question)} for question in QUESTIONS * 4]
    scores = source(rewards.Answers(rows, texts, rollout, 8, 3)).tolist()
    beyond = ((rollout.response >= len(tok)) & rollout.mask).any(1).tolist()
    assert 0 < sum(beyond) < len(rows), "the test wants both kinds"
    for i, (row, text, cut) in enumerate(zip(rows, texts, rollout.truncated.tolist(), strict=True)):
        wanted = plain_score(small, tmp_path, row["prompt"], text, cut)
        if not beyond[i]:  # read as it was sampled, whatever its neighbours are
            ids = [*rollout.query[i][rollout.query_mask[i]].tolist(), *rollout.response[i][rollout.mask[i]].tolist()]
            with torch.no_grad():
                wanted = small(torch.tensor([ids])).logits.item()
        assert scores[i] == pytest.approx(wanted, abs=1e-5)


def test_a_critic_of_fewer_rows_grows_to_the_actors(run):
    folder = run("qwen2", "reward model")
    for part, auto in (("sft", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        model, tok = auto.from_pretrained(folder / "models" / part), models.load_tokenizer(folder / "models" / part)
        model.resize_token_embeddings(len(tok))
        model.save_pretrained(folder / "fewer" / part)
        tok.save_pretrained(folder / "fewer" / part)
    words = RL.replace("models/reward", "fewer/reward") + "--ref fewer/sft --reward models/reward --temperature 4 "
    assert call(rlhf, words + "--rollout_batch_size 16 --max_steps 1 --output_dir grown", folder) == 0
    config = json.loads((folder / "grown/critic/config.json").read_text())
    assert (
        config["vocab_size"] == 352
        and json.loads((folder / "fewer/reward/config.json").read_text())["vocab_size"] < 352
    )


# ---- LoRA and ZeRO-3


@every_family
def test_lora_leaves_a_whole_model_and_an_adapter(name, run):
    folder = run(name, "LoRA")
    base, whole = (AutoModelForCausalLM.from_pretrained(folder / part).eval() for part in ("base", "lora"))
    ids = torch.tensor(ids_of(folder / "lora", FAMILIES[name].stop)[:1])
    with torch.no_grad():
        before = base(ids).logits
        again = PeftModel.from_pretrained(base, folder / "lora/adapter")(ids).logits
        logits = whole(ids).logits[..., : again.shape[-1]]  # GPT-2's has grown by the pad token's row
    torch.testing.assert_close(logits, again, atol=1e-5, rtol=1e-5)
    assert (logits - before).abs().max() > 1e-3
    layers = {"gpt2": 4, "opt": 6, "gpt_neox": 4}.get(name, 7)
    stored = load_file(folder / "lora/adapter/adapter_model.safetensors")
    assert sum(".lora_" in tensor for tensor in stored) == 2 * 2 * layers, (
        "A and B of every linear layer of both blocks"
    )


@every_family
def test_sharded_weights_end_as_whole_ones_do(name, run):
    """All roles of PPO loaded, trained and saved under ZeRO-3."""
    whole, sharded = run(name, "PPO") / "models/rlhf", run(name, "ZeRO-3") / "zero3"
    for role in ("actor", "critic"):
        start, ours, theirs = (
            load_file(path / "model.safetensors")
            for path in (whole.parent / {"actor": "sft", "critic": "reward"}[role], whole / role, sharded / role)
        )
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            torch.testing.assert_close(theirs[key], value, atol=1e-4, rtol=0, msg=f"{role} {key}")
        assert max(float((value - start[key]).abs().max()) for key, value in ours.items()) > 5e-4


# ---- an actor of one family, a reward model of another


def plain_score(model, folder: Path, prompt: list[dict], text: str, cut: bool) -> float:
    """By plain transformers, of the text that the reward model's own template prints."""
    stop = AutoTokenizer.from_pretrained(folder).eos_token
    whole = rendered(folder, prompt + answer(text), stop)
    ids = tokens(folder, whole.removesuffix(stop) if cut else whole)
    with torch.no_grad():
        return float(model.eval()(torch.tensor([ids])).logits)


@pytest.mark.parametrize(("actor", "judge"), [("llama", "qwen2"), ("gpt2", "llama"), ("qwen3", "opt")])
def test_a_reward_model_of_another_family_scores_the_text(actor, judge, run):
    folder, other = run(actor, "SFT"), run(judge, "reward model") / "models/reward"
    words = RL.replace("models/reward", "models/sft") + f"--reward {other} --output_dir by_{judge} --sample_steps 1"
    assert call(rlhf, words, folder) == 0
    samples = read_jsonl(folder / f"by_{judge}/samples.jsonl")
    plain, mean = (
        AutoModelForSequenceClassification.from_pretrained(other),
        json.loads((other / "reward_stats.json").read_text())["mean"],
    )
    assert len(samples) == 6
    for row in samples:
        wanted = plain_score(plain, other, user(row["prompt"]), row["response"], row["truncated"])
        assert row["score"] + mean == pytest.approx(wanted, abs=1e-4)
    assert len({row["score"] for row in samples}) == 6
    critic, fresh = load_scalar_model(folder / f"by_{judge}/critic")
    assert not fresh and critic.hf.score.weight.abs().max() > 0, "from zero, it has learned"


# ---- what a family cannot do


def save_odd(folder: Path, config: transformers.PreTrainedConfig, model_class: type) -> None:
    """A model of no family above, with OPT's tokenizer and a chat template."""
    tok = FAMILIES["opt"].tokenizer(folder)
    tok.chat_template = chat_format.BUILTIN_TEMPLATES["human-assistant"]
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    tok.save_pretrained(folder)


@pytest.fixture(scope="module")
def odd(run, tmp_path_factory) -> Path:
    """A folder of models that lack something, beside whole ones and their data."""
    root = tmp_path_factory.mktemp("odd")
    for name in ("gpt2", "llama"):
        (root / name).symlink_to(run(name, "reward model"))
    (root / "data").symlink_to(root / "gpt2/../data")
    ids = {"vocab_size": 352, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
    blocks = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    save_odd(
        root / "t5",
        transformers.T5Config(**ids, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        transformers.T5ForConditionalGeneration,
    )
    save_odd(root / "bert", transformers.BertConfig(**ids, **SIZE), transformers.BertForMaskedLM)
    recurrent = transformers.RwkvConfig(**ids, hidden_size=32, num_hidden_layers=2, context_length=512)
    save_odd(root / "rwkv", recurrent, transformers.RwkvForCausalLM)
    save_odd(root / "granite", transformers.GraniteConfig(**ids, **SIZE), transformers.GraniteForCausalLM)
    save_odd(root / "gpt1", transformers.OpenAIGPTConfig(**ids, **blocks), transformers.OpenAIGPTLMHeadModel)
    save_odd(
        root / "bloom",
        transformers.BloomConfig(**ids, hidden_size=32, n_layer=2, n_head=4),
        transformers.BloomForCausalLM,
    )
    save_family(root / "opt", FAMILIES["opt"])
    for name, changes in {"short": {"n_positions": 60}, "shorter": {"n_positions": 30}}.items():
        folder = save_family(
            root / name, FAMILIES["gpt2"], auto=AutoModelForSequenceClassification, num_labels=1, **changes
        )
        AutoTokenizer.from_pretrained(root / "gpt2/models/sft").save_pretrained(folder)
    (root / "rule.py").write_text(
        "def short(prompts, completions): return [-len(c[0]['content']) for c in completions]\n"
    )
    return root


TALK = "--data data --output_dir out --report_to none "
ONE = TALK + "--max_steps 1 --rollout_batch_size 2 --minibatch_size 2 --max_completion_length 6 "
REFUSED = [
    (sft, "--model t5 " + TALK, "t5 is an encoder-decoder (t5); wanted a decoder-only language model"),
    (reward, "--model t5 " + TALK, "t5 is an encoder-decoder (t5); wanted a decoder-only language model"),
    (sft, "--model bert --max_length 500 " + TALK, "BertLMHeadModel: a token that comes later changes its output"),
    (
        reward,
        "--model bert --max_length 500 " + TALK,
        "bert is a BertForSequenceClassification, which has no linear head `score`",
    ),
    (sft, "--model rwkv --max_length 500 " + TALK, "RwkvForCausalLM: padding in front of a text changes its output"),
    (reward, "--model granite " + TALK, "transformers has no such class for granite models"),
    (
        rlhf,
        "--actor gpt1 --critic gpt1 --reward rule.py:short --max_prompt_length 400 " + ONE,
        "OpenAIGPTLMHeadModel cannot be sampled from here: it takes no key-value cache",
    ),
    (sft, "--model opt " + TALK, "no chat template; name one with --chat_template"),
    (
        sft,
        "--model opt --chat_template plain --max_length 2049 " + TALK,
        "--max_length: 2049 tokens a sequence asked for, the model has positions for 2048; lower to that or less",
    ),
    (
        sft,
        "--model bloom --attn_implementation sdpa " + TALK,
        "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention yet; "
        "--attn_implementation auto takes what the model has",
    ),
    (sft, "--model llama/base --attn_implementation flash_attention_2 " + TALK, "FlashAttention2 has been toggled on"),
    (
        rlhf,
        "--actor gpt2/models/sft --critic short --reward rule.py:short --max_prompt_length 60 " + ONE,
        "66 tokens a sequence asked for, short has positions for 60; lower to that or less",
    ),
    (
        rlhf,
        "--actor llama/models/sft --critic llama/models/sft --reward short --score_norm none --max_prompt_length 60 "
        + ONE,
        "66 tokens a sequence asked for, short has positions for 60; lower to that or less",
    ),
    (
        rlhf,
        "--actor llama/models/sft --critic gpt2/models/reward " + ONE,
        "--critic gpt2/models/reward has another tokenizer than the actor",
    ),
]


@pytest.mark.parametrize(("module", "words", "message"), REFUSED, ids=[f"{m.__name__[:5]} {w}" for m, w, _ in REFUSED])
def test_what_a_model_cannot_do_is_told_in_one_line(module, words, message, odd, capfd):
    assert message in mistake(odd, module, words, capfd)


def test_the_attention_kernel_is_the_models_own_unless_named(odd):
    assert load_causal_lm(odd / "bloom").config._attn_implementation == "eager"
    assert load_causal_lm(odd / "opt").config._attn_implementation == "sdpa"
    assert load_causal_lm(odd / "opt", attn_implementation="eager").config._attn_implementation == "eager"


def test_the_trial_of_padding_leaves_room_for_rounding_only(odd):
    for dtype in ("fp32", "bf16"):
        for folder in (odd / "opt", odd / "bloom", odd / "llama/base"):
            hf = load_causal_lm(folder, dtype)
            models.check_reading(LanguageModel(hf), hf, "cpu", exact=dtype == "fp32")

    def by_column(ids, mask):
        return hf(ids, attention_mask=mask.long(), position_ids=torch.arange(6)[None]).logits

    hf = load_causal_lm(odd / "opt")
    with pytest.raises(UserError, match="OPTForCausalLM: padding in front of a text changes its output"):
        models.check_reading(by_column, hf, "cpu", exact=True)


def test_a_model_whose_output_is_not_finite_is_refused_at_the_start(odd):
    hf = load_causal_lm(odd / "opt")
    with torch.no_grad():
        hf.model.decoder.layers[0].fc1.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="OPTForCausalLM: its output holds numbers that are not finite"):
        models.check_reading(LanguageModel(hf), hf, "cpu", exact=True)


def test_a_reward_model_says_which_text_it_cannot_read(run, odd):
    """Templates that know no system turn; more tokens than positions, found only when the text is there."""
    judge, actor = run("llama", "reward model") / "models/reward", run("gpt2", "SFT") / "models/sft"
    rollout = generate(load_causal_lm(actor), [[5, 6]], sampling(actor, max_new_tokens=2))

    def ask(path, actor_tokenizer, messages, text):
        frozen = FrozenModel(lambda zero3: load_scalar_model(path)[0], "fp32", 0, False, torch.device("cpu"))
        names = models.load_tokenizer(path), models.load_tokenizer(actor_tokenizer)
        source = rewards.RewardModel(path.name, frozen, *names, "none", 0.0, 1.0)
        return source(rewards.Answers([{"prompt": messages}], [text], rollout, 1, 1))

    assert ask(judge, actor, user("Hi"), "Yo").shape == (1,)
    with pytest.raises(UserError, match="the reward model reward cannot read a prompt: .*Only user and assistant"):
        ask(judge, actor, [{"role": "system", "content": "Be kind."}, *user("Hi")], "Yo")
    with pytest.raises(UserError, match="tokens for the reward model shorter, which has 30 positions; lower"):
        ask(odd / "shorter", judge, user("Hi"), "far too long " * 4)


# ---- the README's table


def test_the_readme_says_what_is_run_here():
    heading, *rows = tables(section("README.md", "Which models work"))[0]
    assert heading == ["family", *STAGES, "hybrid engine"]
    assert [row[0] for row in rows] == [family.title for family in FAMILIES.values()]
    for row, family in zip(rows, FAMILIES.values(), strict=True):
        assert row[1:-1] == ["yes"] * len(STAGES)
        assert row[-1] == ("policy" if has_policy(family) else "no policy"), family.title


def has_policy(family) -> bool:
    """Whether DeepSpeed knows how to replace a layer of this family; our own list has to say the same."""
    from deepspeed.module_inject.replace_policy import replace_policies

    known = set()
    for policy in replace_policies:
        policy(None)  # finds its layer class
        layers = policy._orig_layer_class or []
        known.update(layers if isinstance(layers, list) else [layers])
    config = transformers.AutoConfig.for_model(family.model_type, **family.size)
    model = AutoModelForCausalLM.from_config(config)
    found = any(type(module) in known for module in model.modules())
    obstacle = hybrid_engine.hybrid_obstacle(type(model).__name__, False, torch.device("cuda"))
    assert (obstacle is None) == found
    return found


# ---- in processes of their own

# Runs with nothing of this repository on its path, in another folder, without a network.
PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
root, names, conversations, found = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), {}
for name in names:
    for part in ("lora", "models/sft", "models/rlhf/actor", "zero3/actor", "models/reward", "models/rlhf/critic"):
        path = f"{root}/{name}/{part}"
        auto = AutoModelForCausalLM if part.endswith(("lora", "sft", "actor")) else AutoModelForSequenceClassification
        model, info = auto.from_pretrained(path, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
        seen = {"keys": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]))}
        if auto is AutoModelForCausalLM:
            seen["tied"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            prompts = [messages[:1] for messages in conversations[:2]]
            seen["answers"] = []
            for prompt in prompts:
                text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
                ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
                answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
                seen["answers"].append(answer[0, ids.shape[1] :].tolist())
        else:
            texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
            texts = [text[: text.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)] for text in texts]
            batch = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            seen["scores"] = scores.squeeze(-1).tolist()
        found[f"{name} {part}"] = seen
json.dump(found, open(sys.argv[4], "w"))
"""


@pytest.mark.slow
def test_a_new_process_with_plain_transformers_finds_the_same_models(run, tmp_path):
    folders = {name: run(name, "PPO") for name in FAMILIES}
    assert all(run(name, stage) for name in FAMILIES for stage in ("LoRA", "ZeRO-3"))
    words = [folders["llama"].parent, json.dumps(list(FAMILIES)), json.dumps(CONVERSATIONS), tmp_path / "found.json"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for place, seen in json.loads((tmp_path / "found.json").read_text()).items():
        name, part = place.split()
        folder, stop = folders[name] / part, FAMILIES[name].stop
        assert seen["keys"] == [], place
        if "scores" in seen:
            rows = [tokens(folder, rendered(folder, messages, stop)) for messages in CONVERSATIONS]
            scores = load_scalar_model(folder)[0].score(*surrounded(rows, 2, 2, 340))
            assert seen["scores"] == pytest.approx(scores.tolist(), abs=1e-5), place
        else:
            assert seen["tied"] == (name in ("qwen2", "qwen3", "gpt2", "opt")), place
            stops = tuple(models.stop_ids_of(folder, models.read_config(folder)))
            rollout = generate(
                load_causal_lm(folder),
                prompts_of(folder)[:2],
                sampling(folder, greedy=True, max_new_tokens=6, stop_ids=stops),
            )
            ours = [row[kept].tolist() for row, kept in zip(rollout.response, rollout.mask, strict=True)]
            assert seen["answers"] == ours, place


@pytest.mark.slow
def test_two_ranks_share_an_opt(run):
    """One run of PPO by torchrun, all roles sharded: the weights of one process."""
    folder = run("opt", "PPO")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    words = (RL + "--zero_stage 3 --frozen_zero_stage 3 --output_dir two").split()
    done = subprocess.run(
        [*torchrun, ROOT / "step3_rlhf/train.py", *words],
        cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "OPTForCausalLM: 91,936 parameters, 91,936 trained; ZeRO-3, 2 rank(s)" in done.stdout
    for role in ("actor", "critic"):
        ours, theirs = (load_file(folder / at / role / "model.safetensors") for at in ("models/rlhf", "two"))
        for key, value in ours.items():
            torch.testing.assert_close(theirs[key], value, atol=1e-4, rtol=0, msg=f"{role} {key}")
