"""Language models and scalar heads of five families: padding changes nothing, what is saved is what is loaded."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import save_gpt2, save_llama, save_reward
from small_tokenizers import qwen_like
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    Qwen2Config,
)

from common import models, tokenizer
from common.errors import RunFailed, UserError
from common.models import LanguageModel, ScalarModel, load_causal_lm, load_scalar_model, load_tokenizer
from scripts import answers

VOCAB, PAD = 61, 0
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": LlamaConfig(**COMMON, **SIZE, num_key_value_heads=2, attention_dropout=0.3, initializer_range=0.2),
    "gpt2": GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
    "qwen2": Qwen2Config(**COMMON, **SIZE, num_key_value_heads=2, attention_dropout=0.3, initializer_range=0.2),
    "opt": OPTConfig(
        **COMMON, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, init_std=0.2, dropout=0.3, attention_dropout=0.3, layerdrop=0.3,
    ),
    "gpt_neox": GPTNeoXConfig(**COMMON, **SIZE, hidden_dropout=0.3, attention_dropout=0.3, initializer_range=0.2),
}  # fmt: skip
FAMILIES = sorted(CONFIGS)

# Rows of different lengths, pad id inside one of them: only the mask says what is real.
ROWS = [[5, 6, 7, 8, 9, 10, 11], [20], [30, PAD, 31, PAD], [40, 41]]


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    return {family: saved(tmp_path_factory, family, AutoModelForCausalLM) for family in FAMILIES}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    return {family: saved(tmp_path_factory, family, AutoModelForSequenceClassification) for family in FAMILIES}


def saved(tmp_path_factory, family, auto):
    config = copy.deepcopy(CONFIGS[family])
    if auto is AutoModelForSequenceClassification:
        config.num_labels = 1
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp(family)
    auto.from_config(config).save_pretrained(folder)
    return folder


def padded(left: int, right: int, order=None, junk: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows side by side with `left` columns of padding before the longest and `right` after it."""
    rows = [ROWS[i] for i in order or range(len(ROWS))]
    width = max(map(len, rows))
    ids = torch.randint(1, VOCAB, (len(rows), left + width + right)) if junk else torch.full((4, left + width), PAD)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = left + (width - len(row) if left else 0)
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = True
    return ids, mask


PADDINGS = [(3, 0, [0, 1, 2, 3]), (0, 3, [3, 0, 2, 1]), (5, 2, [2, 1, 3, 0])]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_plain_forward_in_float64_whatever_the_padding(family, language_models):
    ours = LanguageModel(load_causal_lm(language_models[family]))
    exact = AutoModelForCausalLM.from_pretrained(language_models[family]).double().eval()
    with torch.no_grad():
        expected = [exact(torch.tensor([row])).logits[0] for row in ROWS]
        for left, right, order in PADDINGS:
            ids, mask = padded(left, right, order)
            logits = ours(ids, mask)
            for i, row in enumerate(order):
                torch.testing.assert_close(logits[i][mask[i]].double(), expected[row], atol=1e-5, rtol=1e-5)
            last = ours(ids, mask, keep=3)
            assert last.shape == (4, 3, VOCAB)
            torch.testing.assert_close(last, logits[:, -3:], atol=1e-5, rtol=0)
    assert max(float(e.abs().max()) for e in expected) > 0.5  # or the tolerance above would say little


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_a_plain_forward_in_float64_whatever_the_padding(family, classifiers):
    ours, fresh = load_scalar_model(classifiers[family])
    assert not fresh
    exact = AutoModelForSequenceClassification.from_pretrained(classifiers[family]).double().eval()
    with torch.no_grad():
        expected = []
        for row in ROWS:  # the score of a prefix is the value at its last token
            prefixes = [exact(torch.tensor([row[: n + 1]])).logits[0, 0] for n in range(len(row)) if row[n] != PAD]
            expected.append((torch.stack(prefixes), [n for n in range(len(row)) if row[n] != PAD]))
        for left, right, order in PADDINGS:
            ids, mask = padded(left, right, order)
            values = ours(ids, mask)
            assert values.shape == ids.shape and values.dtype == torch.float32
            for i, row in enumerate(order):
                torch.testing.assert_close(
                    values[i][mask[i]][expected[row][1]].double(), expected[row][0], atol=1e-5, rtol=1e-5
                )


def test_a_bf16_models_scores_are_not_rounded_to_bf16(classifiers):
    """The head's product is that of its bf16 weights and bf16 inputs in more precision, in training and in scoring."""
    ours, _ = load_scalar_model(classifiers["llama"], "bf16")
    ids, mask = padded(*PADDINGS[0])
    seen = []
    ours.hf.score.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    values = ours(ids, mask)
    assert seen[0].dtype == torch.bfloat16 and ours.hf.score.weight.dtype == torch.bfloat16
    expected = seen[0].double() @ ours.hf.score.weight.double()[0]
    torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=1e-5)
    assert (values != values.bfloat16()).float().mean() > 0.9
    values[mask].sum().backward()
    assert ours.hf.score.weight.grad.dtype == torch.bfloat16 and ours.hf.score.weight.grad.abs().max() > 0
    plain = AutoModelForSequenceClassification.from_pretrained(classifiers["llama"], dtype=torch.bfloat16).eval()
    with torch.no_grad():
        rounded = plain.score(seen[0]).squeeze(-1).float()
    torch.testing.assert_close(values, rounded, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_logits_of_plain_transformers(family, classifiers):
    plain = AutoModelForSequenceClassification.from_pretrained(classifiers[family]).eval()
    ours, _ = load_scalar_model(classifiers[family])
    rows = [row for row in ROWS if PAD not in row]  # plain transformers finds the end by the pad id
    ids, mask = torch.full((3, 9), PAD), torch.zeros(3, 9, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), True
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask.long()).logits.squeeze(-1)
    torch.testing.assert_close(ours.score(ids, mask), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_off_in_training_mode(family, language_models, classifiers):
    ids, mask = padded(1, 1)
    for model in (
        LanguageModel(load_causal_lm(language_models[family])),
        load_scalar_model(classifiers[family])[0],
    ):
        quiet = model(ids, mask)
        model.train()
        assert torch.equal(model(ids, mask), quiet) and torch.equal(model(ids, mask), quiet)


def test_dropout_is_on_in_what_transformers_loads(language_models):
    """Else the test above would show nothing."""
    ids, mask = padded(1, 1)
    for family in FAMILIES:
        model = LanguageModel(AutoModelForCausalLM.from_pretrained(language_models[family], attn_implementation="sdpa"))
        model.train()
        assert not torch.equal(model(ids, mask), model(ids, mask)), family


# ---- saving and loading


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_is_loaded(family, tied, tmp_path):
    config = copy.deepcopy(CONFIGS[family])
    config.tie_word_embeddings = tied
    hf = AutoModelForCausalLM.from_config(config)
    model = LanguageModel(hf)
    state = {name.removeprefix("hf."): value for name, value in model.state_dict().items()}
    models.save_pretrained(hf, tmp_path, state, qwen_like())
    stored = load_file(tmp_path / "model.safetensors")
    assert all(value.numel() for value in stored.values())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied
    assert plain.state_dict().keys() == hf.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, hf.state_dict()[name]), name
    assert load_tokenizer(tmp_path).get_vocab() == qwen_like().get_vocab()
    ids, mask = padded(2, 0)
    assert torch.equal(LanguageModel(load_causal_lm(tmp_path))(ids, mask), model.eval()(ids, mask))


def test_the_state_is_written_and_not_the_models_own_weights(tmp_path):
    """Under ZeRO-3 the module holds shards; only the gathered state is whole."""
    hf = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    state = {name: value.clone() + 1 for name, value in hf.state_dict().items()}
    models.save_pretrained(hf, tmp_path, state, qwen_like())
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(value, state[name]), name


def test_saving_an_empty_or_a_lost_tensor_is_noticed(tmp_path, monkeypatch):
    hf = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    empty = hf.state_dict() | {"model.norm.weight": torch.zeros(0)}
    with pytest.raises(AssertionError, match=r"model\.norm\.weight was saved as \(0,\)"):
        models.save_pretrained(hf, tmp_path / "a", empty, qwen_like())
    lost = {name: value for name, value in hf.state_dict().items() if name != "lm_head.weight"}
    lost["model.extra.weight"] = torch.ones(3)
    monkeypatch.setattr(hf, "save_pretrained", lambda folder, state_dict: save_without_extra(folder, state_dict))
    with pytest.raises(AssertionError, match=r"model\.extra\.weight was not saved and no saved tensor equals it"):
        models.save_pretrained(hf, tmp_path / "b", lost, qwen_like())


def renamed(hf, folder):
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.base_layer.up_proj"] = state.pop("model.layers.0.mlp.up_proj.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def moved(hf, folder):
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"] *= 1.001
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def of_another_class(hf, folder):
    MistralForCausalLM(MistralConfig(**hf.config.to_dict() | {"architectures": None})).save_pretrained(folder)


@pytest.mark.parametrize(
    "damage, free, words",
    [
        (
            renamed,
            1e12,
            r"missing model\.layers\.0\.mlp\.up_proj\.weight; unexpected model\.layers\.0\.mlp\.base_layer",
        ),
        (renamed, 1.0, r"missing model\.layers\.0\.mlp\.up_proj\.weight; unexpected model\.layers\.0\.mlp\.base_layer"),
        (moved, 1e12, r"on five tokens its output is 0\.\d% of its spread away"),
        (of_another_class, 1e12, "it is a MistralForCausalLM there, a LlamaForCausalLM was trained"),
    ],
)
def test_a_saved_folder_that_plain_transformers_opens_as_another_model_is_an_error(
    damage, free, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "free_host_memory", lambda: free)
    hf = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    trained = models.on_a_few_tokens(LanguageModel(hf), hf, "cpu")
    models.save_pretrained(hf, tmp_path, hf.state_dict(), qwen_like())
    unseen = models.check_saved(tmp_path, hf, trained)
    assert unseen is None if free > 1 else "was not run once more: its names and shapes alone were checked" in unseen
    damage(hf, tmp_path)
    with pytest.raises(RunFailed, match=words):
        models.check_saved(tmp_path, hf, trained)


def test_a_model_of_nan_is_not_taken_for_what_was_trained(tmp_path):
    hf = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    trained = models.on_a_few_tokens(LanguageModel(hf), hf, "cpu")
    state = hf.state_dict() | {"model.norm.weight": torch.full_like(hf.model.norm.weight, torch.nan)}
    models.save_pretrained(hf, tmp_path, state, qwen_like())
    with pytest.raises(RunFailed, match="nan% of its spread"):
        models.check_saved(tmp_path, hf, trained)


def save_without_extra(folder, state):
    folder.mkdir()
    save_file({name: value.clone() for name, value in state.items() if "extra" not in name}, folder / "m.safetensors")


def test_a_reward_head_survives_saving(tmp_path):
    save_reward(tmp_path / "reward")
    model, _ = load_scalar_model(tmp_path / "reward")
    with torch.no_grad():
        model.hf.score.weight.normal_()
    state = {name.removeprefix("hf."): value for name, value in model.state_dict().items()}
    models.save_pretrained(model.hf, tmp_path / "again", state, qwen_like())
    again, fresh = load_scalar_model(tmp_path / "again")
    ids, mask = padded(0, 2)
    assert not fresh and torch.equal(again.score(ids, mask), model.score(ids, mask))


# ---- fresh heads


def test_a_fresh_reward_head_has_the_spread_of_its_width(tmp_path):
    save_llama(tmp_path)
    std = models.fresh_reward_head_std(32)
    assert std == 1 / math.sqrt(33)
    heads = []
    for seed in range(8):
        torch.manual_seed(99)  # the head depends on `seed`, not on what was drawn before
        model, fresh = load_scalar_model(tmp_path, fresh_head_std=models.fresh_reward_head_std, seed=seed)
        assert fresh
        heads.append(model.hf.score.weight.detach().squeeze(0).clone())
    pool = torch.cat(heads)
    assert abs(float(pool.mean())) < 4 * std / 16 and abs(float(pool.std()) / std - 1) < 0.2
    again, _ = load_scalar_model(tmp_path, fresh_head_std=models.fresh_reward_head_std, seed=3)
    assert torch.equal(again.hf.score.weight.squeeze(0), heads[3]) and not torch.equal(heads[0], heads[1])
    trunk = AutoModelForCausalLM.from_pretrained(tmp_path).model.state_dict()
    assert all(torch.equal(value, trunk[name]) for name, value in again.hf.model.state_dict().items())


def test_a_fresh_value_head_says_zero(tmp_path):
    save_llama(tmp_path)
    model, fresh = load_scalar_model(tmp_path, fresh_head_std=lambda width: 0.0)
    ids, mask = padded(1, 0)
    assert fresh and (model(ids, mask) == 0).all()


# ---- what is refused


def test_a_causal_lm_is_no_reward_model_and_the_other_way_round(tmp_path):
    save_llama(tmp_path / "lm")
    save_reward(tmp_path / "reward")
    with pytest.raises(UserError, match="has no trained scalar head; make one with `python step2_reward/train.py"):
        load_scalar_model(tmp_path / "lm")
    with pytest.raises(UserError, match=r"lacks weights of a causal language model: lm_head\.weight; is it a reward"):
        load_causal_lm(tmp_path / "reward")


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_a_folder_without_all_its_weights_is_refused(tmp_path, load):
    (save_llama if load is load_causal_lm else save_reward)(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "layers.1.mlp" in name]:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks weights.*layers.1.mlp.down_proj.weight") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_weights_of_another_shape_are_refused(tmp_path, load):
    (save_llama if load is load_causal_lm else save_reward)(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(
        UserError, match=r"could not be loaded as \w+: its weights have other shapes than its config.json says"
    ) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="classifies into 3 labels, wanted a reward model with 1"):
        load_scalar_model(tmp_path)


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for load, words in (
        (load_causal_lm, "no model configuration"),
        (load_scalar_model, "no model configuration"),
        (load_tokenizer, "no tokenizer could be loaded"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_model_that_is_too_short_is_refused(tmp_path):
    config = models.read_config(save_gpt2(tmp_path))
    models.check_length(config, 128, "--max_length")
    with pytest.raises(UserError, match="129 tokens a sequence asked for, the model has positions for 128"):
        models.check_length(config, 129, "--max_length")


def test_precisions():
    cpu = torch.device("cpu")
    assert models.choose_dtype("auto", cpu)[0] == "fp32" and "exact" in models.choose_dtype("auto", cpu)[1]
    assert models.choose_dtype("bf16", cpu)[0] == "bf16"
    with pytest.raises(UserError, match="--dtype fp16 does not train on a CPU"):
        models.choose_dtype("fp16", cpu)


def test_the_folder_is_loaded_in_the_precision_asked_for(tmp_path):
    save_llama(tmp_path)
    assert load_causal_lm(tmp_path, "bf16").dtype == torch.bfloat16
    assert load_causal_lm(tmp_path).dtype == torch.float32
    scalar, _ = load_scalar_model(tmp_path, "bf16", fresh_head_std=lambda width: 0.1)
    assert scalar.hf.dtype == torch.bfloat16 and scalar(*padded(0, 0)).dtype == torch.float32


# ---- special tokens and embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_grow_only_when_a_token_has_no_row(tmp_path, tied):
    hf = load_causal_lm(save_llama(tmp_path, tied=tied))
    rows = hf.get_input_embeddings().num_embeddings
    before = [hf.get_input_embeddings().weight.detach().clone(), hf.get_output_embeddings().weight.detach().clone()]
    assert not models.grow_embeddings(hf, rows - 5, None) and not models.grow_embeddings(hf, rows, None)
    assert models.grow_embeddings(hf, rows + 3, None)
    assert hf.get_input_embeddings().num_embeddings == hf.config.vocab_size == rows + 3
    assert (hf.get_output_embeddings().weight is hf.get_input_embeddings().weight) == tied
    for old, layer in zip(before, (hf.get_input_embeddings(), hf.get_output_embeddings()), strict=True):
        assert torch.equal(layer.weight[:rows], old)
        torch.testing.assert_close(layer.weight[rows:], old.mean(0).expand(3, -1))


def test_tokenizer_and_configurations_agree_on_pad_and_stop_tokens(tmp_path):
    hf = load_causal_lm(save_llama(tmp_path / "a"))
    tokenizer = load_tokenizer(tmp_path / "a")
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    models.set_special_tokens(hf, tokenizer, (end, other))
    models.save_pretrained(hf, tmp_path / "b", hf.state_dict(), tokenizer)
    config, generation = (
        json.loads((tmp_path / "b" / f"{n}.json").read_text()) for n in ("config", "generation_config")
    )
    again = load_tokenizer(tmp_path / "b")
    assert again.eos_token == "<|im_end|>" and again.pad_token == "<|fim_pad|>"
    assert config["eos_token_id"] == [end, other] and config["pad_token_id"] == again.pad_token_id
    assert generation["eos_token_id"] == [end, other] and generation["pad_token_id"] == again.pad_token_id
    models.set_special_tokens(hf, tokenizer, (end,))
    assert hf.generation_config.eos_token_id == hf.config.eos_token_id == end


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [7, 9]}, 5, [7, 9]),
        ({"eos_token_id": 0}, 5, [0]),  # the first token of a vocabulary is a token
        ({"temperature": 0.5, "do_sample": True}, [5, 6], [5, 6]),
        (None, [5, 6], [5, 6]),  # as merge tools write it
        (None, 5, [5]),
        (None, None, []),
    ],
)
def test_stop_tokens_in_transformers_order(tmp_path, generation, config, wanted):
    """generation_config.json, else config.json; and training, chat and evaluation stop at the same."""
    hf = load_causal_lm(save_llama(tmp_path))
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    record = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": config}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert models.stop_ids_of(tmp_path, models.read_config(tmp_path)) == wanted
    end = load_tokenizer(tmp_path).convert_tokens_to_ids("<|im_end|>")
    prepared = tokenizer.prepare(tmp_path, 40, "flags", None, False)
    assert prepared.stop_ids == answers.Answerer(tmp_path, "fp32", "cpu").stop_ids == (end, *wanted)
    prepared.fit(hf, None)  # and a folder that is saved names them all, in both files
    models.save_pretrained(hf, tmp_path / "saved", hf.state_dict(), prepared.tokenizer)
    for name in ("config", "generation_config"):
        saved = json.loads((tmp_path / "saved" / f"{name}.json").read_text())
        assert saved["eos_token_id"] == ([end, *wanted] if wanted else end)
    assert load_tokenizer(tmp_path / "saved").eos_token_id == end
    assert tokenizer.prepare(tmp_path / "saved", 40, "flags", None, False).stop_ids == (end, *wanted)


def test_a_torn_generation_config_is_an_error(tmp_path):
    save_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2')
    with pytest.raises(UserError, match="generation_config.json cannot be read"):
        models.stop_ids_of(tmp_path, models.read_config(tmp_path))


@pytest.mark.parametrize("eos", [True, 2.0, [2, True], {"2": 5}])
def test_stop_tokens_that_are_no_ids_are_an_error(tmp_path, eos):
    save_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is .*, wanted ids of tokens"):
        models.stop_ids_of(tmp_path, models.read_config(tmp_path))


def test_a_score_is_read_by_length_even_where_pad_ends_the_response(tmp_path):
    """Foreign folders with pad == EOS: plain transformers stops before the EOS, we read it."""
    save_reward(tmp_path)
    model = ScalarModel(AutoModelForSequenceClassification.from_pretrained(tmp_path).eval())
    pad = model.hf.config.pad_token_id
    ids = torch.tensor([[5, 6, pad, pad], [7, 8, 9, pad]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    values = model(ids, mask)
    assert torch.equal(model.score(ids, mask), values[[0, 1], [2, 3]])
