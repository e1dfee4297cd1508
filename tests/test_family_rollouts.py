"""Model families, tiny and random: read under padding, and sampled with their cache, as each row alone is read at once.

The measure is a plain forward without cache or padding. Recurrent, convolutional, sliding, latent and expert layers.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.batches import pad_left
from common.errors import UserError
from common.generation import SamplingParams, check_sampling, generate
from common.models import LanguageModel, check_reading, disable_noise

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
HALF = {"layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
DELTA = HALF | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
SSM = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
# A family's own names for these sizes, or its parts; every other family takes those of BASE.
SAMPLED = {
    "qwen3_5_text": DELTA, "qwen3_5_moe_text": DELTA, "qwen3_next": DELTA, "olmo_hybrid": HALF,
    "kimi_linear": LATENT | HALF | {"linear_num_heads": 2, "linear_head_dim": 8},
    "bailing_hybrid": LATENT | HALF | {"group_norm_size": 1},
    "mamba": {"state_size": 8}, "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": SSM | {"mamba_d_ssm": 64}, "bamba": SSM | {"attn_layer_indices": [1]},
    "granitemoehybrid": SSM | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "use_mamba_kernels": False, "attention_hidden_size": 64, "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8,
        "mamba_ngroups": 1, "chunk_size": 8, "use_mamba_kernels": False, "num_mem_blocks": 1, "adapter_rank": 4,
    },
    "lfm2": CONV, "lfm2_moe": CONV, "lfm3": CONV,
    "deepseek_v2": LATENT, "deepseek_v3": LATENT,
    "mistral": WINDOW, "gemma2": WINDOW, "gemma3_text": WINDOW, "gpt_oss": WINDOW, "phi3": WINDOW,
    "cohere2": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8, "num_heads": 4},
    "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    **{
        name: {} for name in (
            "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "ministral", "gemma", "cohere", "olmo",
            "olmo2", "olmo3", "olmoe", "gpt2", "gpt_bigcode", "gpt_neox", "bloom", "mpt", "phi", "phimoe", "stablelm",
            "starcoder2", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "smollm3", "nemotron", "minimax_m2",
            "exaone4", "ernie4_5", "nanochat", "seed_oss", "helium", "persimmon", "biogpt",
        )
    },
}  # fmt: skip
REFUSED = {
    "minimax": (HALF | {"block_size": 4}, "MiniMaxForCausalLM cannot be sampled from here: .*cache of its own"),
    "rwkv": ({}, "RwkvForCausalLM: padding in front of a text changes its output"),
    "xlstm": ({"qk_dim_factor": 1.0, "num_heads": 4}, "xLSTMForCausalLM: padding in front of a text changes"),
    "recurrent_gemma": (
        {"num_hidden_layers": 3, "attention_window_size": 8, "lru_width": 32},
        "RecurrentGemmaForCausalLM: padding in front of a text changes its output",
    ),
    "openai-gpt": ({}, "OpenAIGPTLMHeadModel cannot be sampled from here: it takes no key-value cache"),
    "bert": ({}, "BertLMHeadModel: a token that comes later changes its output"),
}


def build(name: str, changes: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(BASE | changes))).eval()


def checks(model: torch.nn.Module) -> None:
    check_reading(LanguageModel(model), model, "cpu", exact=True)
    check_sampling(model, exact=True)


@pytest.mark.parametrize("name", SAMPLED)
@torch.no_grad()
def test_padded_rows_and_sampled_tokens_say_what_a_row_alone_says(name):
    model = build(name, SAMPLED[name])
    checks(model)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in (5, 33, 20)]
    ids, mask = pad_left(prompts, 0)
    logits = LanguageModel(model)(ids, mask)
    for row, prompt in enumerate(prompts):
        wanted = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(logits[row][mask[row]], wanted, atol=1e-4, rtol=0)
    prompts += [prompts[0]] * 2  # equal prompts share one prefill, so their states are repeated
    params = SamplingParams(12, 1.0, 1.0, 0, tuple(range(30, 40)), 0, 5)
    rollout = generate(model, prompts, params)
    lengths = rollout.mask.sum(1).tolist()
    for row, prompt in enumerate(prompts):
        response = rollout.response[row, : lengths[row]]
        whole = torch.tensor([prompt + response.tolist()])
        logprobs = model(input_ids=whole, use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = logprobs.gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(rollout.rollout_logprobs[row, : lengths[row]], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_or_sampled_is_refused_at_start(name):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        checks(build(name, changes))


NOISY = {
    "llama": {"attention_dropout": 0.5}, "gpt2": {"resid_pdrop": 0.5}, "bloom": {"hidden_dropout": 0.5},
    "seed_oss": {"residual_dropout": 0.5}, "opt": {"layerdrop": 0.9},
    "phimoe": {}, "mixtral": {"router_jitter_noise": 0.5}, "minimax_m2": {"router_jitter_noise": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", NOISY)
@torch.no_grad()
def test_training_mode_says_what_eval_mode_says(name):
    """Dropout of any name, and routers that draw experts in training."""
    model = build(name, SAMPLED[name] | NOISY[name])
    ids = torch.randint(3, 90, (8, 20))
    wanted = model(input_ids=ids).logits
    assert not torch.equal(model.train()(input_ids=ids).logits, wanted)
    disable_noise(model.eval())
    torch.testing.assert_close(model.train()(input_ids=ids).logits, wanted, atol=0, rtol=0)


@torch.no_grad()
def test_noise_of_another_kind_in_training_is_refused_at_start():
    model = build("llama", {}).train()

    def noisy(ids, mask):
        return LanguageModel(model)(ids, mask) * (1.5 if model.training else 1)

    with pytest.raises(UserError, match="LlamaForCausalLM: training mode changes its output by .*trains without noise"):
        check_reading(noisy, model, "cpu", exact=True)


def test_whatever_a_family_raises_is_told_in_one_line():
    def raises(ids, mask):
        raise KeyError("linear_attention")

    message = "LlamaForCausalLM does not run on a few tokens .KeyError: 'linear_attention'.; wanted a causal"
    with pytest.raises(UserError, match=message):
        check_reading(raises, build("llama", {}), "cpu", exact=True)
