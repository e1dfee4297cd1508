"""Reward sources: models of any tokenizer, functions, statistics, weights; what they may not do in silence."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from small_models import SIZE, save_reward
from small_tokenizers import characters, qwen_like
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from common import chat_format, reading
from common.batches import pad_left, pad_right
from common.engine import FrozenModel
from common.errors import RunFailed, UserError
from common.functions import Function
from common.generation import Rollout
from common.models import ScalarModel, load_scalar_model, load_tokenizer
from step3_rlhf import rewards
from step3_rlhf.rewards import Answers, RewardFunction, RewardModel, fuse

CPU = torch.device("cpu")
QUESTIONS = ["What is an apple pie?", "Why?", "Are bees kind to the happy ones?", "12+30=", "Tell me of the sea."]
TEXTS = ["An apple pie is tasty.", "Sure!", "", "42.", "Unhappy bees rarely"]
CUT = [False, False, False, False, True]


def answers_of(tokenizer, micro_size: int = 2, num_forwards: int = 3, rows: list[dict] | None = None) -> Answers:
    """What a rollout of these texts would look like: the last one was cut by length, so it has no turn end."""
    rows = rows or [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    end, prompts, responses = chat_format.turn_end_id(tokenizer), [], []
    for row, text, cut in zip(rows, TEXTS, CUT, strict=True):
        prompts.append(chat_format.encode_prompt(tokenizer, row["prompt"]))
        responses.append(tokenizer(text, add_special_tokens=False)["input_ids"] + [] * cut + [end] * (not cut))
    query, query_mask = pad_left(prompts, 5)
    response, mask = pad_right(responses, 6)
    rollout = Rollout(query, query_mask, response, mask, torch.zeros(response.shape), torch.tensor(CUT))
    return Answers(rows, TEXTS, rollout, micro_size, num_forwards)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_reward(tmp_path_factory.mktemp("reward"))


class Counting:
    """A frozen model that counts its forwards."""

    def __init__(self, folder: Path):
        model, _ = load_scalar_model(folder)
        self.frozen, self.sizes = FrozenModel(lambda zero3: model, "fp32", 0, False, CPU), []
        self.module = self.frozen.module

    def __call__(self, ids, mask):
        self.sizes.append(len(ids))
        return self.frozen(ids, mask)


def source_of(folder: Path, actor_tokenizer, norm: str = "none", mean: float = 0.0, std: float = 1.0) -> RewardModel:
    return RewardModel("reward", Counting(folder), load_tokenizer(folder), actor_tokenizer, norm, mean, std)


@pytest.fixture(scope="module")
def expected(folder) -> torch.Tensor:
    """Plain transformers on one conversation at a time, its text rendered by the reward model's own template."""
    tokenizer, plain = load_tokenizer(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for question, text, cut in zip(QUESTIONS, TEXTS, CUT, strict=True):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert whole.endswith("<|im_end|>\n")
        ids = tokenizer(whole.removesuffix("<|im_end|>\n" if cut else "\n"), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(plain(ids).logits.item())
    assert torch.tensor(scores).std() > 0.05
    return torch.tensor(scores)


# ---- reward models


def test_a_reward_model_of_the_same_tokens_scores_as_plain_transformers(folder, expected):
    source = source_of(folder, load_tokenizer(folder))
    assert source.reader.same_tokens
    torch.testing.assert_close(source(answers_of(load_tokenizer(folder))), expected, atol=1e-5, rtol=0)


def test_text_is_re_tokenised_for_a_model_of_other_tokens(folder, expected):
    actor_tokenizer = characters()
    actor_tokenizer.chat_template = chat_format.BUILTIN_TEMPLATES["human-assistant"]
    source = source_of(folder, actor_tokenizer)
    assert not source.reader.same_tokens
    torch.testing.assert_close(source(answers_of(actor_tokenizer)), expected, atol=1e-5, rtol=0)


def test_both_ways_agree_where_the_tokenizers_are_copies(folder):
    tokenizer = load_tokenizer(folder)
    source = source_of(folder, tokenizer)
    direct = source(answers_of(tokenizer))
    source.reader.same_tokens = False
    torch.testing.assert_close(source(answers_of(tokenizer)), direct, atol=1e-6, rtol=0)


def test_tokenizers_are_the_same_by_what_they_do_to_a_conversation():
    one, other = qwen_like(), qwen_like()
    other.pad_token = "<|fim_pad|>"
    assert reading.same_tokenizer(one, other)
    other.chat_template = other.chat_template.replace("Be kind.", "Be brief.")
    assert not reading.same_tokenizer(one, other)
    added = qwen_like()
    added.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert not reading.same_tokenizer(one, added)


@pytest.mark.parametrize(
    ("micro_size", "num_forwards", "sizes"), [(2, 3, [2, 2, 1]), (2, 4, [2, 2, 1, 1]), (5, 1, [5])]
)
def test_every_rank_runs_the_same_number_of_forwards(folder, expected, micro_size, num_forwards, sizes):
    source = source_of(folder, load_tokenizer(folder))
    scores = source(answers_of(load_tokenizer(folder), micro_size, num_forwards))
    assert source.model.sizes == sizes
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_scores_are_centred_and_standardised_by_the_models_statistics(folder, expected):
    tokenizer = load_tokenizer(folder)
    for norm, wanted in (
        ("none", expected),
        ("center", expected - 0.3),
        ("standardize", (expected - 0.3) / 0.5),
    ):
        scores = source_of(folder, tokenizer, norm, 0.3, 0.5)(answers_of(tokenizer))
        torch.testing.assert_close(scores, wanted, atol=2e-5, rtol=0)
    assert source_of(folder, tokenizer, "standardize", 0.3, 0.0)(answers_of(tokenizer)).isfinite().all()


def test_a_reward_model_that_scores_nan_is_no_model_without_an_opinion():
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZE, vocab_size=352, num_labels=1, pad_token_id=3)).eval()
    frozen = FrozenModel(lambda zero3: ScalarModel(model), "fp32", 0, False, CPU)
    with torch.no_grad():
        model.score.weight[0, 3] = math.nan  # after the check at the start, which would refuse it
    source = RewardModel("broken", frozen, qwen_like(), qwen_like(), "none", 0.0, 1.0)
    with pytest.raises(RunFailed, match="the reward model broken scored"):
        source(answers_of(qwen_like()))


def test_statistics_are_read_or_asked_for(tmp_path):
    assert rewards.read_stats(tmp_path, "none") == (0.0, 1.0)
    with pytest.raises(
        UserError, match=r"has no reward_stats.json, which --score_norm center needs.*--score_norm none"
    ):
        rewards.read_stats(tmp_path, "center")
    (tmp_path / "reward_stats.json").write_text(json.dumps({"mean": -1.5, "std": 2.0, "n": 10, "data_hash": "x"}))
    assert rewards.read_stats(tmp_path, "standardize") == (-1.5, 2.0)


# ---- functions (what they are given and may return: test_functions.py)


def test_a_functions_scores_become_a_tensor_and_silence_is_nan(capsys):
    rows = [{"prompt": [{"role": "user", "content": q}], "level": i} for i, q in enumerate(QUESTIONS)]
    seen = {}

    def function(prompts, completions, completion_ids, truncated, level, trainer_state):
        seen.update(ids=completion_ids, cut=truncated, level=level, state=trainer_state)
        return [1, None, -2.5, 0, 3]

    source = RewardFunction("mine", Function("reward mine", function), steps=9)
    answers = dataclasses.replace(answers_of(qwen_like(), rows=rows), step=4)
    scores = source(answers)
    assert scores.dtype == torch.float32 and scores[1].isnan()
    assert scores.nan_to_num(99).tolist() == [1, 99, -2.5, 0, 3]
    assert seen["level"] == [0, 1, 2, 3, 4] and seen["cut"] == CUT
    end = chat_format.turn_end_id(qwen_like())
    texts = [qwen_like()(text)["input_ids"] for text in TEXTS]
    assert seen["ids"] == [ids if cut else [*ids, end] for ids, cut in zip(texts, CUT, strict=True)]
    assert (seen["state"].global_step, seen["state"].max_steps) == (3, 9)  # three steps are done in the fourth


# ---- together


def test_sources_are_weighted_and_added_and_silence_adds_nothing():
    nan = math.nan
    one, other = torch.tensor([1.0, 2.0, nan, -1.0]), torch.tensor([0.5, nan, 3.0, 1.0])
    assert fuse([one, other], [2.0, -1.0]).tolist() == [1.5, 4.0, -3.0, -3.0]
    assert fuse([one[:2]], [0.5]).tolist() == [0.5, 1.0]


def test_every_source_has_a_name_of_its_own():
    specs = ["models/reward", "old/reward/", "rules.py:length", "sub/dir.py:length", "sub/dir.py:other", "owner/name"]
    assert rewards.short_names(specs) == ["reward1", "reward2", "length1", "length2", "other", "name"]
    assert rewards.short_names(["models/reward", "rules.py:length"]) == ["reward", "length"]


def test_a_response_that_no_source_scores_is_an_error():
    nan = math.nan
    with pytest.raises(UserError, match="no reward source has an opinion on response 1"):
        fuse([torch.tensor([1.0, nan]), torch.tensor([nan, nan])], [1.0, 1.0])
