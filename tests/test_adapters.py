"""LoRA: only adapters move, off means the base model, what is saved is whole, and peft reads the adapter back."""

import json
import re

import one_rank
import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from small_models import SIZE, save_gpt2, save_llama, save_reward
from small_tokenizers import qwen_like
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from common import adapters, checkpoint, generation, hybrid_engine, models
from common import tokenizer as tokenizer_
from common.adapters import Lora
from common.engine import AdapterOff, Engine, FrozenModel, Optim, TrainedModel
from common.errors import UserError
from scripts import merge_adapter

# DeepSpeed calls what torch is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LORA = Lora(lora_r=3, lora_alpha=12, lora_dropout=0.0, lora_target_modules=["all-linear"])
IDS = torch.tensor([[5, 9, 260, 41, 7], [3, 3, 17, 200, 8]])
OPTIM = Optim(1e-2, "constant", 0.0, 0, 0.1, 0.9, 0.95, 1e-6, 1.0)
MASK = torch.ones_like(IDS, dtype=torch.bool)


def with_random_adapter(hf, lora=LORA):
    adapters.add(hf, lora, seed=1)
    for name, parameter in hf.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return hf


def language_model(zero3=None, *, folder, lora=LORA):
    hf = models.load_causal_lm(folder, zero3=zero3)
    adapters.add(hf, lora, seed=1)
    return models.LanguageModel(hf)


def trained(folder, stage: int) -> TrainedModel:
    options = Engine("fp32", stage, False, False, stage == 3, None)
    return TrainedModel(lambda zero3: language_model(zero3, folder=folder), OPTIM, options, 3, one_rank.start())


def train(model: TrainedModel) -> None:
    for step in range(1, 4):
        model.train_step([IDS], lambda ids: (cross_entropy(model(ids, MASK)[:, :-1].mT, ids[:, 1:]), {}), step)


@pytest.mark.parametrize("save", [save_llama, save_gpt2, save_reward])
def test_a_saved_folder_is_whole_and_peft_reads_its_adapter(save, tmp_path):
    base, out = save(tmp_path / "base"), tmp_path / "out"
    if save is save_reward:
        plain_class, hf = AutoModelForSequenceClassification, models.load_scalar_model(base)[0].hf
    else:
        plain_class, hf = AutoModelForCausalLM, models.load_causal_lm(base)
    with torch.no_grad():
        before = hf(IDS).logits
        with_random_adapter(hf)
        if save is save_reward:
            hf.score.weight.mul_(2)
        adapted = hf(IDS).logits
        models.save_pretrained(hf, out, hf.state_dict(), models.load_tokenizer(base))
        plain = plain_class.from_pretrained(out)
        again = PeftModel.from_pretrained(plain_class.from_pretrained(base), out / "adapter")
        assert (adapted - before).abs().max() > 1e-2
        torch.testing.assert_close(plain(IDS).logits, adapted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again(IDS).logits, adapted, atol=1e-6, rtol=1e-6)
        merged = again.merge_and_unload().state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, merged[name], atol=1e-6, rtol=1e-5, msg=name)


def test_an_adapter_that_is_off_leaves_the_base_model(tmp_path):
    base = save_llama(tmp_path / "base")
    hf = models.load_causal_lm(base)
    before = hf(IDS).logits
    with_random_adapter(hf)
    with adapters.switched_off(hf):
        assert torch.equal(hf(IDS).logits, before)
    assert not torch.allclose(hf(IDS).logits, before, atol=1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_adapters_are_trained_and_alike_under_every_zero_stage(stage, tmp_path):
    base = save_llama(tmp_path / "base")
    model, measure = trained(base, stage), trained(base, 0)
    train(model)
    train(measure)
    plain = models.load_causal_lm(base).state_dict()
    wanted = measure.state()
    moved = 0
    for name, value in model.state().items():
        if ".lora_" in name:
            torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-5, msg=name)
            moved += float(value.abs().max()) > 0 and "lora_B" in name
        else:
            assert torch.equal(value, plain[name.replace(".base_layer.", ".")]), name
    assert moved == 14  # seven linear layers in each of two blocks


@pytest.mark.parametrize("stage", [0, 3])
def test_the_reference_is_the_base_model_and_rollouts_use_the_adapter(stage, tmp_path):
    base = save_llama(tmp_path / "base")
    model = trained(base, stage)
    train(model)
    with torch.no_grad():
        plain = FrozenModel(lambda zero3: language_model(folder=base, lora=Lora(0, 1, 0, [])), "fp32", 0, False, "cpu")
        reference = AdapterOff(model)(IDS, MASK)
        torch.testing.assert_close(reference, plain(IDS, MASK), atol=1e-6, rtol=1e-5)
        assert (model(IDS, MASK) - reference).abs().max() > 1e-2

        params = generation.SamplingParams(6, 1.0, 1.0, 0, (1,), 0, 3, greedy=True)
        sampler = hybrid_engine.RolloutEngine(model, "native", 0, one_rank.start())
        rollout = sampler.generate(IDS.tolist(), params, 1, [0, 1])
        whole = torch.cat([rollout.query, rollout.response], 1)
        logits = model(whole, torch.ones_like(whole, dtype=torch.bool))[:, IDS.shape[1] - 1 : -1]
        assert torch.equal(logits.argmax(-1)[rollout.mask], rollout.response[rollout.mask])


def test_the_same_seed_draws_the_same_adapter_whatever_was_drawn_before(tmp_path):
    base = save_llama(tmp_path / "base")
    one, other = models.load_causal_lm(base), models.load_causal_lm(base)
    adapters.add(one, LORA, seed=4)
    torch.rand(3)
    before = torch.get_rng_state()
    adapters.add(other, LORA, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def two_tokens_more(folder, tied: bool):
    """A base model whose owner gave the tokenizer two tokens that it has no rows for, 352 and 353."""
    save_llama(folder, tied=tied)
    tokenizer = models.load_tokenizer(folder)
    spare = [f"<|spare_{i}|>" for i in range(12)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*spare, "<|turn|>", "<|end|>"]})
    tokenizer.save_pretrained(folder)
    return tokenizer_.prepare(folder, 64, "--max_length", None, False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_are_trained_saved_and_read_by_peft(tied, stage, tmp_path):
    text = two_tokens_more(tmp_path / "base", tied)
    ids = torch.tensor([[5, 352, 260, 353, 7], [352, 3, 353, 200, 8]])
    said = []

    def load(zero3):
        hf = models.load_causal_lm(tmp_path / "base", zero3=zero3)
        said.extend(text.fit(hf, zero3, LORA, 1))
        return models.LanguageModel(hf)

    model = TrainedModel(load, OPTIM, Engine("fp32", stage, False, False, False, None), 3, one_rank.start())
    assert said[-1] == "tokens whose rows are trained: <|turn|>, <|end|>"
    for step in range(1, 4):
        model.train_step([ids], lambda ids: (cross_entropy(model(ids, MASK)[:, :-1].mT, ids[:, 1:]), {}), step)
    with torch.no_grad():
        adapted = model(ids, MASK)
        model.writer(text, pytest.fail)(tmp_path / "out")
        assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not tied
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter")
        torch.testing.assert_close(plain(ids).logits, adapted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again(ids).logits, adapted, atol=1e-5, rtol=1e-5)
        if stage == 3:  # what samples from a sharded model is a copy of it
            sampler = hybrid_engine.RolloutEngine(model, "native", 0, one_rank.start())
            with sampler.weights() as replica:
                torch.testing.assert_close(replica(ids).logits, adapted, atol=1e-5, rtol=1e-5)
    base = models.load_causal_lm(tmp_path / "base").state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        now = plain.state_dict()[name]
        assert torch.equal(now[:352], base[name]) and len(now) == 354
        assert (now[352:] - base[name].mean(0)).abs().max() > 1e-3 and not torch.equal(now[352], now[353])


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_trained_rows_are_those_of_the_whole_matrices(tied, tmp_path):
    text = two_tokens_more(tmp_path / "base", tied)
    ids = torch.tensor([[5, 352, 260, 353, 7], [352, 3, 353, 200, 8]])
    whole, rows = (models.load_causal_lm(tmp_path / "base") for _ in range(2))
    text.fit(whole, None)
    text.fit(rows, None, LORA, 1)
    for hf in (whole, rows):
        cross_entropy(hf(ids).logits[:, :-1].mT, ids[:, 1:]).backward()
    for name in ("get_input_embeddings", "get_output_embeddings"):
        expected = getattr(whole, name)().weight.grad[352:]
        torch.testing.assert_close(getattr(rows, name)().delta.grad, expected, atol=1e-7, rtol=1e-5)


def test_rows_are_trained_of_tokens_that_the_template_writes_and_nobody_trained(tmp_path):
    """A token may have a row and mean nothing: base models come with reserved rows of zeros, or all alike."""
    save_llama(tmp_path, tied=False)
    text = tokenizer_.prepare(tmp_path, 64, "--max_length", None, False)
    start, end = text.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    hf = models.load_causal_lm(tmp_path)
    assert len(text.fit(hf, None, LORA, 1)) == 1  # the adapters alone
    for name, spoil in (
        ("get_input_embeddings", lambda w: w[end].zero_()),
        ("get_output_embeddings", lambda w: w[end].copy_(w.mean(0))),
        ("get_output_embeddings", lambda w: w[end].copy_(w[345] * 1.0001)),  # 345 is a spare row
    ):
        hf = models.load_causal_lm(tmp_path)
        with torch.no_grad():
            spoil(getattr(hf, name)().weight)
        assert text.fit(hf, None, LORA, 1)[-1] == "tokens whose rows are trained: <|im_end|>"
        assert hf.get_output_embeddings().ids.tolist() == [end] and start != end


def test_the_critics_rows_are_trained_too_and_rows_that_are_off_are_the_base_models(tmp_path):
    text = two_tokens_more(tmp_path / "base", True)
    model, _ = models.load_scalar_model(tmp_path / "base", fresh_head_std=lambda width: 0.5)
    text.fit(model.hf, None, LORA, 1)
    ids = torch.tensor([[5, 352, 260, 353, 7]])
    before = model(ids, MASK[:1])
    with torch.no_grad():
        model.hf.get_input_embeddings().delta.normal_()
        after = model(ids, MASK[:1])
        assert (after - before)[0, 1:].abs().min() > 1e-4 and torch.equal(after[0, 0], before[0, 0])
        with adapters.switched_off(model.hf):
            assert torch.equal(model(ids, MASK[:1]), before)
        models.save_pretrained(model.hf, tmp_path / "out", model.hf.state_dict(), text.tokenizer)
        again = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out" / "adapter", num_labels=1)
        plain, _ = models.load_scalar_model(tmp_path / "out")
        torch.testing.assert_close(plain(ids, MASK[:1]), after, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again(ids).logits[:, 0], after[:, -1], atol=1e-5, rtol=1e-5)


def test_a_layer_that_is_not_there_is_named(tmp_path):
    hf = models.load_causal_lm(save_llama(tmp_path / "base"))
    for names in (["c_attn"], ["q_proj", "c_attn"]):
        with pytest.raises(UserError, match="--lora_target_modules c_attn: no layer is called that; there are down_pr"):
            adapters.add(hf, Lora(2, 4, 0.0, names), 0)


def test_embeddings_and_a_tied_output_layer_are_refused_before_training(tmp_path):
    save_llama(tmp_path / "base")
    for name, words in (("embed_tokens", "embeddings cannot be adapted"), ("lm_head", "the output layer is tied")):
        with pytest.raises(UserError, match=f"--lora_target_modules: {words}"):
            adapters.add(models.load_causal_lm(tmp_path / "base"), Lora(2, 4, 0.0, ["q_proj", name]), 0)


def test_what_is_trained_is_said(tmp_path):
    hf = models.load_scalar_model(save_reward(tmp_path / "reward"))[0].hf
    said = adapters.add(hf, Lora(2, 4, 0.0, ["q_proj", "v_proj"]), 0)
    assert said == "adapters of rank 2 in q_proj, v_proj; the scalar head is trained too"
    trained = {name.split(".")[-4] if "lora" in name else name for name, p in hf.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj", "score.weight"}


def olmoe():
    return AutoConfig.for_model(
        "olmoe", **SIZE, vocab_size=352, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=3
    )


def llama4():
    size = {"intermediate_size_mlp": 48, "num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8}
    return AutoConfig.for_model("llama4_text", **SIZE, **size, vocab_size=352, pad_token_id=3, bos_token_id=0)


def qwen2_moe():
    size = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    return AutoConfig.for_model("qwen2_moe", **SIZE, **size, num_key_value_heads=2, vocab_size=352, pad_token_id=3)


@pytest.mark.parametrize(
    "config, left_out",
    [(olmoe, "experts"), (llama4, "experts, router"), (qwen2_moe, "experts, shared_expert_gate")],
)
def test_experts_and_routers_are_left_as_they_are_and_what_is_saved_is_the_trained_model(config, left_out, tmp_path):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "base")
    qwen_like().save_pretrained(tmp_path / "base")
    said = []

    def load(zero3):
        hf = models.load_causal_lm(tmp_path / "base", zero3=zero3)
        said.append(adapters.add(hf, LORA, seed=1))
        return models.LanguageModel(hf)

    model = TrainedModel(load, OPTIM, Engine("fp32", 0, False, False, False, None), 3, one_rank.start())
    assert said[0].endswith(f"; left as they are: {left_out}")
    train(model)
    with torch.no_grad():
        adapted = model(IDS, MASK)
        text = tokenizer_.prepare(tmp_path / "base", 8, "--max_length", None, False)
        text.fit(model.module.hf, None)
        model.writer(text, pytest.fail)(tmp_path / "out")
        plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        torch.testing.assert_close(plain(IDS).logits, adapted, atol=1e-4, rtol=1e-4)
        again = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out" / "adapter"
        )
        torch.testing.assert_close(again(IDS).logits, adapted, atol=1e-4, rtol=1e-4)


def test_a_layer_that_cannot_be_adapted_is_named(tmp_path):
    hf = AutoModelForCausalLM.from_config(llama4())
    for name, words in (("router", "Llama4Router"), ("experts", "Llama4TextExperts")):
        with pytest.raises(UserError, match=rf"--lora_target_modules {name}: .*{name} is a {words} and cannot be"):
            adapters.add(hf, Lora(2, 4, 0.0, ["q_proj", name]), 0)
    reward = models.load_scalar_model(save_reward(tmp_path))[0].hf
    with pytest.raises(UserError, match=r"--lora_target_modules score: .*the scalar head, trained as it is"):
        adapters.add(reward, Lora(2, 4, 0.0, ["score"]), 0)


def foreign(kind: str, base, folder):
    """An adapter as somebody else's program leaves it, with weights that change the model; what it answers."""
    hf = AutoModelForCausalLM.from_pretrained(base)
    config = {
        "lora": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "dora": LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
        "ia3": IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        "head": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
        "prompt": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    }[kind]
    torch.manual_seed(5)
    model = get_peft_model(hf, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model(input_ids=IDS).logits.detach()


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "head"])
def test_an_adapter_of_others_is_refused_with_the_command_that_makes_a_model_of_it(kind, tmp_path, monkeypatch):
    """The right output is that of peft's own model, before anything of ours has seen it."""
    base = save_llama(tmp_path / "base", tied=False)
    expected = foreign(kind, base, tmp_path / "lora")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--actor lora holds an adapter .*, and a whole model is wanted") as refused:
        checkpoint.require_stage("lora", "--actor", ("sft",))
    command = re.search("`python scripts/merge_adapter.py (.*)`", str(refused.value))[1]
    merge_adapter.main(command.split())
    merged = AutoModelForCausalLM.from_pretrained("lora-merged")
    torch.testing.assert_close(merged(IDS).logits.detach(), expected, atol=1e-5, rtol=1e-5)
    assert (models.load_causal_lm(base)(IDS).logits - expected).abs().max() > 1e-2
    assert models.load_tokenizer("lora-merged").get_vocab() == qwen_like().get_vocab()
    assert checkpoint.require_stage("lora-merged", "--actor", ("sft",)) is None


def test_an_adapter_beside_a_model_is_seen_by_whatever_reads_the_folder(tmp_path, monkeypatch):
    """transformers puts such an adapter in by itself, and nothing but the adapter would be trained."""
    monkeypatch.chdir(tmp_path)
    expected = foreign("lora", save_llama(tmp_path / "both"), tmp_path / "both")
    for read in (
        lambda: checkpoint.require_stage("both", "--model", ("sft",)),
        lambda: models.read_config("both"),
        lambda: models.load_causal_lm("both"),
        lambda: tokenizer_.prepare("both", 8, "--max_length", None, False),
    ):
        with pytest.raises(UserError, match="holds an adapter beside a model .*--output_dir both-merged`"):
            read()
    merge_adapter.main(["--adapter", "both", "--output_dir", "both-merged"])
    torch.testing.assert_close(models.load_causal_lm("both-merged")(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_adapters_that_are_no_part_of_the_weights_or_of_another_model_are_refused_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    foreign("prompt", save_llama(tmp_path / "base", tied=False), tmp_path / "prompt")
    with pytest.raises(UserError, match="a PROMPT_TUNING adapter cannot be folded into weights"):
        merge_adapter.main(["--adapter", "prompt", "--output_dir", "merged"])
    foreign("lora", tmp_path / "base", tmp_path / "lora")
    save_gpt2(tmp_path / "other")
    with pytest.raises(UserError, match="--adapter lora does not fit GPT2LMHeadModel"):
        merge_adapter.main(["--adapter", "lora", "--base", "other", "--output_dir", "merged"])
    with pytest.raises(UserError, match="--output_dir base is there already"):
        merge_adapter.main(["--adapter", "lora", "--output_dir", "base"])
    with pytest.raises(UserError, match="--adapter base: no adapter of peft could be read there"):
        merge_adapter.main(["--adapter", "base", "--output_dir", "merged"])
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "./gone"}))
    with pytest.raises(UserError, match=r"from \./gone: .*; give the adapter's base model with --base DIR"):
        merge_adapter.main(["--adapter", "lora", "--output_dir", "merged"])
    (tmp_path / "lora/adapter_config.json").write_text("[")
    with pytest.raises(UserError, match=r"lora/adapter_config\.json is no json of an adapter"):
        checkpoint.require_stage("lora", "--actor", ("sft",))


def test_the_adapter_of_a_stage_names_its_base_wherever_it_is_opened_from(tmp_path, monkeypatch):
    save_llama(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    for name, wanted in (("./base", str(tmp_path / "base")), ("owner/model", "owner/model")):
        hf = models.load_causal_lm("./base")
        hf.config._name_or_path = name
        adapters.add(hf, LORA, 1)
        adapters.save(hf, tmp_path / name.replace("/", "-"), hf.state_dict(), None)
        config = json.loads((tmp_path / name.replace("/", "-") / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == wanted
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stage.json").write_text("{}")
    (tmp_path / ".-base").rename(tmp_path / "out/adapter")
    with pytest.raises(UserError, match="--ref out/adapter is only the adapter of out, .*; give that"):
        checkpoint.require_stage("out/adapter", "--ref", ("sft",))
