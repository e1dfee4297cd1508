"""The decode loop: a fake policy with known output, agreement with HF generate, and what a row may depend on."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from common import generation
from common.generation import SamplingParams, choose, generate, generate_with, uniform_noise

VOCAB = 61
CPU = torch.device("cpu")


def params(**changes) -> SamplingParams:
    defaults = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop_ids": (3, 7),
        "pad_id": 0,
        "seed": 5,
    }
    return SamplingParams(**(defaults | changes))


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


PROMPTS = [[11, 12, 13], [20], [30, 31, 32, 33, 34, 35, 36], [11, 12, 13], [40, 41], [11, 12, 13]]


class CountingPolicy(torch.nn.Module):
    """Always says "the last token + 1", with probability 1 up to e^-40: what a sampler must return is known exactly."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = LlamaConfig(num_hidden_layers=1)

    def forward(self, input_ids, attention_mask, position_ids, cache, use_cache, logits_to_keep):
        assert attention_mask.shape[1] == cache.get_seq_length() + input_ids.shape[1]
        cache.layers[0].update(*[torch.zeros(input_ids.shape[0], 1, input_ids.shape[1], 1)] * 2)
        assert (position_ids[:, -1] == attention_mask.sum(1) - 1).all()
        logits = torch.full((*input_ids.shape, VOCAB), -40.0)
        logits.scatter_(-1, (input_ids + 1)[..., None] % VOCAB, 0.0)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_a_counting_policy_counts_until_its_stop_token():
    rollout = generate(CountingPolicy(), [[5], [1, 2], [30, 31], [6]], params(max_new_tokens=4))
    assert rollout.response.tolist() == [[6, 7, 0, 0], [3, 0, 0, 0], [32, 33, 34, 35], [7, 0, 0, 0]]
    assert rollout.mask.tolist() == [[True, True, False, False], [True] + [False] * 3, [True] * 4, [True] + [False] * 3]
    assert rollout.truncated.tolist() == [False, False, True, False]
    assert rollout.query.tolist() == [[0, 5], [1, 2], [30, 31], [0, 6]]
    assert rollout.query_mask.tolist() == [[False, True], [True, True], [True, True], [False, True]]


def test_a_stop_token_as_the_very_last_token_is_not_truncation():
    rollout = generate(CountingPolicy(), [[1]], params(max_new_tokens=2))
    assert rollout.response.tolist() == [[2, 3]] and rollout.truncated.tolist() == [False]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_tokens_equal_those_of_hf_generate(family, request):
    model = request.getfixturevalue(family)
    rollout = generate(model, PROMPTS, params(greedy=True))
    for row, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=12,
            do_sample=False, eos_token_id=[3, 7], pad_token_id=0,
        )[0, len(prompt) :]  # fmt: skip
        assert rollout.response[row][rollout.mask[row]].tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recorded_logprobs_are_those_of_a_plain_forward_in_float64(family, request):
    model = request.getfixturevalue(family)
    rollout = generate(model, PROMPTS, params(temperature=0.7))
    exact = type(model)(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    for row, prompt in enumerate(PROMPTS):
        response = rollout.response[row][rollout.mask[row]].tolist()
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + response])).logits[0] / 0.7
        for t, token in enumerate(response):
            at = logits[len(prompt) - 1 + t]
            expected = float(at[token] - at.logsumexp(0))
            assert math.isclose(rollout.rollout_logprobs[row, t], expected, abs_tol=2e-5)
        assert (rollout.rollout_logprobs[row, len(response) :] == 0).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_depends_on_its_own_prompt_and_number_only(family, request):
    model = request.getfixturevalue(family)
    together = generate(model, PROMPTS, params(), step=4)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], params(), step=4, rows=[row])
        assert alone.response[0][alone.mask[0]].tolist() == together.response[row][together.mask[row]].tolist()
        kept = alone.rollout_logprobs[0][alone.mask[0]]
        torch.testing.assert_close(kept, together.rollout_logprobs[row][together.mask[row]], atol=1e-5, rtol=0)
    backwards = generate(model, PROMPTS[::-1], params(), step=4, rows=[5, 4, 3, 2, 1, 0], batch_size=4)
    width = together.mask.shape[1]
    assert torch.equal(backwards.mask.flip(0)[:, :width], together.mask)
    assert torch.equal(backwards.response.flip(0)[:, :width], together.response)


def test_the_same_prompt_in_other_rows_or_steps_is_answered_differently(llama):
    rollout = generate(llama, [PROMPTS[0]] * 8, params(max_new_tokens=8, stop_ids=(VOCAB,)))
    assert len({tuple(response) for response in rollout.response.tolist()}) == 8
    later = generate(llama, [PROMPTS[0]] * 8, params(max_new_tokens=8, stop_ids=(VOCAB,)), step=1)
    assert not torch.equal(rollout.response, later.response)


def test_other_back_ends_draw_the_same_tokens(llama):
    native = generate(llama, PROMPTS, params(), step=2)
    other = generate_with(llama.generate, PROMPTS, params(), CPU, step=2)
    width = native.mask.shape[1]
    assert torch.equal(native.response, other.response[:, :width]) and torch.equal(native.mask, other.mask[:, :width])
    assert torch.equal(native.truncated, other.truncated)
    torch.testing.assert_close(native.rollout_logprobs, other.rollout_logprobs[:, :width], atol=1e-5, rtol=0)


def test_a_longer_limit_only_appends(llama):
    short = generate(llama, PROMPTS, params(max_new_tokens=5))
    long = generate(llama, PROMPTS, params(max_new_tokens=12))
    assert torch.equal(long.response[:, :5].where(short.mask, 0), short.response)


def test_training_mode_is_restored_and_weights_untouched(llama):
    before = {name: value.clone() for name, value in llama.state_dict().items()}
    llama.train()
    generate(llama, PROMPTS[:2], params())
    assert llama.training
    llama.eval()
    assert all(torch.equal(value, before[name]) for name, value in llama.state_dict().items())


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).log_softmax(-1)
    n = 20_000
    tokens, logprobs = choose(logits.expand(n, 4), uniform_noise(1, 0, range(n), 1)[:, 0], params(temperature=0.5))
    expected = torch.softmax(logits[0] / 0.5, 0)
    seen = torch.bincount(tokens, minlength=4) / n
    assert (seen - expected).abs().max() < 4 * math.sqrt(0.25 / n)
    torch.testing.assert_close(logprobs.exp(), expected[tokens])


def test_inverting_the_distribution_never_picks_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    noise = torch.tensor([0.0, 0.25, 0.5, 0.999999999999])
    tokens, _ = choose(logits.expand(4, 5), noise, params())
    assert tokens.tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [({"top_k": 2}, {2, 3}), ({"top_p": 0.5}, {3}), ({"top_p": 0.7}, {2, 3}), ({"top_k": 3, "top_p": 0.99}, {1, 2, 3})],
)
def test_top_k_and_top_p_keep_the_most_likely_tokens(changes, allowed):
    logits = torch.tensor([[0.05, 0.1, 0.3, 0.55]]).log()  # the smallest set that holds 0.7 is {3, 2}
    n = 2000
    tokens, logprobs = choose(logits.expand(n, 4), uniform_noise(2, 0, range(n), 1)[:, 0], params(**changes))
    assert set(tokens.tolist()) == allowed
    torch.testing.assert_close(logprobs, logits[0][tokens])  # recorded under the whole distribution


def test_noise_is_a_function_of_seed_step_row_and_position():
    noise = uniform_noise(3, 7, [0, 5, 9], 6)
    assert torch.equal(uniform_noise(3, 7, [9, 0], 4), noise[[2, 0], :4])
    for other in (uniform_noise(4, 7, [0], 6), uniform_noise(3, 8, [0], 6), uniform_noise(3, 7, [1], 6)):
        assert not torch.equal(other, noise[:1])
    assert noise.min() >= 0 and noise.max() < 1


def test_the_cache_is_preallocated_only_where_every_layer_keeps_the_whole_past(llama):
    assert type(generation._cache_for(llama, 8)) is not DynamicCache
    sliding = SimpleNamespace(
        config=LlamaConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    )
    sliding.config.sliding_window = 4
    assert type(generation._cache_for(sliding, 8)) is DynamicCache
