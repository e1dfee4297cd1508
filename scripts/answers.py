"""Sample answers to prompts and judge them: what evaluation tools share.

An answer is a dict: row (index of its prompt), prompt (messages), response (text), length (tokens, the stop token
included), truncated (cut by length), prompt_ids and ids, tools if the prompt has some; scorers add to it. A scorer is
called with a list of answers and the tokenizer of who gave them, and gives one number, or None for "cannot say", for
each.
"""

import torch

from common import chat_format, models, tensor_ops
from common.batches import pad_left, pad_right
from common.functions import Function
from common.generation import SamplingParams, check_sampling, generate
from common.reading import Reader


class Answerer:
    """A causal LM with its tokenizer: samples answers, and says how likely it finds given ones."""

    def __init__(self, path, dtype: str, device, chat_template: str | None = None, **load_flags):
        self.path, self.device = path, device
        self.tokenizer = models.load_tokenizer(path, load_flags.get("trust_remote_code", False))
        self.template = chat_format.ensure_template(self.tokenizer, chat_template)  # in words
        self.hf = models.load_causal_lm(path, dtype, device=device, **load_flags)
        models.check_reading(models.LanguageModel(self.hf), self.hf, device, exact=dtype == "fp32")
        check_sampling(self.hf, exact=dtype == "fp32")
        self.stop_ids = chat_format.stop_ids(self.tokenizer, models.stop_ids_of(path, self.hf.config))

    def sample(
        self, prompts: list[list[dict]], rows: list[int], *, step: int, batch_size: int, tools=None, **sampling
    ) -> list[dict]:
        """One answer to `prompts[row]` for each entry of `rows`; `tools[row]`, if any, are the definitions it has.

        The noise depends on (seed, step, position in `rows`) only, so every model draws with the same. `sampling`: see
        `params`.
        """
        params = self.params(**sampling)
        tools = tools or [None] * len(prompts)
        ids = {row: chat_format.encode_prompt(self.tokenizer, prompts[row], tools[row]) for row in set(rows)}
        rollout = generate(self.hf, [ids[row] for row in rows], params, step=step, batch_size=batch_size)
        answers = []
        for row, response, mask, cut in zip(rows, rollout.response, rollout.mask, rollout.truncated, strict=True):
            sampled = response[mask].tolist()
            answers.append(
                {
                    "row": row,
                    "prompt": prompts[row],
                    **({"tools": tools[row]} if tools[row] else {}),
                    "response": self.text(sampled),
                    "length": len(sampled),
                    "truncated": bool(cut),
                    "prompt_ids": ids[row],
                    "ids": sampled,
                }
            )
        return answers

    def text(self, ids: list[int]) -> str:
        """A response as people, rewards and judges read it."""
        return chat_format.decode_answer(self.tokenizer, ids, self.stop_ids)

    def params(self, *, temperature: float, **sampling) -> SamplingParams:
        """How this model samples and stops. `sampling`: max_new_tokens, top_p, top_k, seed; temperature 0: greedy."""
        pad = self.tokenizer.pad_token_id
        return SamplingParams(
            **sampling,
            temperature=temperature or 1.0,
            stop_ids=self.stop_ids,
            pad_id=self.stop_ids[0] if pad is None else pad,
            greedy=temperature == 0,
        )

    @torch.no_grad()
    def logprobs(self, answers: list[dict], temperature: float, batch_size: int) -> list[float]:
        """The log-prob of each whole answer, the stop token included, by forward passes as in training."""
        model, sums = models.LanguageModel(self.hf), []
        for batch in batches(answers, batch_size):
            query, query_mask = pad_left([answer["prompt_ids"] for answer in batch], 0)
            response, mask = pad_right([answer["ids"] for answer in batch], 0)
            ids, attention = torch.cat([query, response], 1), torch.cat([query_mask, mask], 1)
            logits = model(ids.to(self.device), attention.to(self.device), keep=response.shape[1] + 1) / temperature
            # of the kept positions, the first chose the first response token
            each = tensor_ops.logprobs_of(tensor_ops.response_slice(logits, 1), response.to(self.device))
            sums += tensor_ops.masked_sum(each.double().cpu(), mask.bool(), 1).tolist()
            del logits  # as large as the model; not beside those of the next batch
        return sums


class RewardModel:
    """A reward folder as a scorer."""

    def __init__(self, path, dtype: str, device, chat_template: str | None = None, batch_size: int = 64, **load_flags):
        self.path, self.batch_size, self.device, self.reader = path, batch_size, device, None
        self.tokenizer = models.load_tokenizer(path, load_flags.get("trust_remote_code", False))
        chat_format.ensure_template(self.tokenizer, chat_template)
        self.model, _ = models.load_scalar_model(path, dtype, device=device, **load_flags)
        models.check_reading(self.model, self.model.hf, device, exact=dtype == "fp32")

    def __call__(self, answers: list[dict], tokenizer) -> list[float]:
        if self.reader is None or self.reader.actor_tokenizer is not tokenizer:
            self.reader = Reader(self.path, self.model.hf.config, self.tokenizer, tokenizer)
        scores, read = [], self.reader.ids
        for batch in batches(answers, self.batch_size):
            each = [
                read(a["prompt"], a["prompt_ids"] + a["ids"], a["response"], a["truncated"], a.get("tools"))
                for a in batch
            ]
            tokens, mask = pad_right(each, 0)
            found = self.model.score(tokens.to(self.device), mask.to(self.device))
            self.reader.check(found)
            scores += found.tolist()
        return scores


class FunctionJudge:
    """A user's function as a scorer; `rows` are the data's, by the number that an answer has in `row`."""

    def __init__(self, function: Function, rows: list[dict]):
        self.function, self.rows = function, rows

    def __call__(self, answers: list[dict], tokenizer) -> list[float | None]:
        texts, cut, ids = ([answer[name] for answer in answers] for name in ("response", "truncated", "ids"))
        return self.function([self.rows[answer["row"]] for answer in answers], texts, cut, ids)


def batches(items: list, size: int) -> list[list]:
    """Consecutive pieces of `size`; the last may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]
