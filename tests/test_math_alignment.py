"""Left padding, position ids and the response slice together, on a real model: each token's log-prob is the one it
has when its prefix alone is shown to the model, without padding and without neighbours."""

import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from common.tensor_ops import logprobs_of, position_ids_of, response_slice

PROMPTS = [[5, 1, 9, 3, 7], [2, 8], [4]]
RESPONSES = [[3, 3, 0, 6], [1, 9, 9, 2], [7, 5, 0, 1]]


def test_padded_batch_equals_one_prefix_at_a_time():
    # GPT-2 has absolute positions, so a row that is moved by its padding gets other log-probs
    config = GPT2Config(vocab_size=11, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    model = GPT2LMHeadModel(config).eval()
    query_length = max(map(len, PROMPTS))
    padded = [[0] * (query_length - len(p)) + p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    input_ids = torch.tensor(padded)
    attention_mask = torch.tensor([[0] * (query_length - len(p)) + [1] * (len(p) + 4) for p in PROMPTS])
    with torch.no_grad():
        positions = position_ids_of(attention_mask)
        logits = model(input_ids, attention_mask=attention_mask, position_ids=positions).logits
        logprobs = logprobs_of(response_slice(logits, query_length), input_ids[:, query_length:])
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            for t, token in enumerate(response):
                next_logits = model(torch.tensor([prompt + response[:t]])).logits[0, -1].double()
                wanted = next_logits[token] - next_logits.exp().sum().log()
                assert_close(logprobs[row, t].double(), wanted, rtol=1e-5, atol=1e-5)
