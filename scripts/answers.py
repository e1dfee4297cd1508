"""Sample answers to prompts and judge them: what evaluation tools share.

An answer is a dict: row (index of its prompt), prompt (messages), response (text), length (tokens, the stop token
included), truncated (cut by length), prompt_ids and ids; scorers add to it. A scorer is called with a list of answers
and gives one number, or None for "cannot say", for each.
"""

import inspect

import torch

from common import chat_format, models, tensor_ops
from common.batches import pad_left, pad_right
from common.errors import UserError
from common.generation import SamplingParams, check_sampling, generate


class Answerer:
    """A causal LM with its tokenizer: samples answers, and says how likely it finds given ones."""

    def __init__(self, path, dtype: str, device, chat_template: str | None = None, **load_flags):
        self.path, self.device = path, device
        self.tokenizer = models.load_tokenizer(path, load_flags.get("trust_remote_code", False))
        self.template = chat_format.ensure_template(self.tokenizer, chat_template)  # in words
        self.hf = models.load_causal_lm(path, dtype, device=device, **load_flags)
        models.check_reading(models.LanguageModel(self.hf), self.hf, device, exact=dtype == "fp32")
        check_sampling(self.hf, exact=dtype == "fp32")
        self.stop_ids = chat_format.stop_ids(self.tokenizer, self.hf.generation_config.eos_token_id)

    def sample(
        self, prompts: list[list[dict]], rows: list[int], *, step: int, batch_size: int, **sampling
    ) -> list[dict]:
        """One answer to `prompts[row]` for each entry of `rows`.

        The noise depends on (seed, step, position in `rows`) only, so every model draws with the same. `sampling`: see
        `params`.
        """
        params = self.params(**sampling)
        ids = {row: chat_format.encode_prompt(self.tokenizer, prompts[row]) for row in set(rows)}
        rollout = generate(self.hf, [ids[row] for row in rows], params, step=step, batch_size=batch_size)
        answers = []
        for row, response, mask, cut in zip(rows, rollout.response, rollout.mask, rollout.truncated, strict=True):
            sampled = response[mask].tolist()
            text = sampled if cut else sampled[:-1]
            answers.append(
                {
                    "row": row,
                    "prompt": prompts[row],
                    # the space after "Assistant:" is the template's
                    "response": self.tokenizer.decode(text, skip_special_tokens=True).removeprefix(" "),
                    "length": len(sampled),
                    "truncated": bool(cut),
                    "prompt_ids": ids[row],
                    "ids": sampled,
                }
            )
        return answers

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
    """A reward folder as a scorer: of the very ids where it reads the prompt as the actor does, else of the text."""

    def __init__(self, path, dtype: str, device, chat_template: str | None = None, batch_size: int = 64, **load_flags):
        self.tokenizer = models.load_tokenizer(path, load_flags.get("trust_remote_code", False))
        chat_format.ensure_template(self.tokenizer, chat_template)
        self.model, _ = models.load_scalar_model(path, dtype, device=device, **load_flags)
        models.check_reading(self.model, self.model.hf, device, exact=dtype == "fp32")
        self.batch_size, self.device = batch_size, device

    def __call__(self, answers: list[dict]) -> list[float]:
        scores = []
        for batch in batches(answers, self.batch_size):
            tokens, mask = pad_right([self._ids(answer) for answer in batch], 0)
            scores += self.model.score(tokens.to(self.device), mask.to(self.device)).tolist()
        return scores

    def _ids(self, answer: dict) -> list[int]:
        prompt = chat_format.encode_prompt(self.tokenizer, answer["prompt"])
        if prompt == answer["prompt_ids"]:
            return prompt + answer["ids"]
        return chat_format.encode_scored(self.tokenizer, [*answer["prompt"], *messages_of(answer)], answer["truncated"])


class FunctionJudge:
    """A function of TRL's signature, `f(prompts, completions, **columns)`, as a scorer.

    `columns` are the extra columns of the prompt's row, and `truncated`, as far as the function takes them.
    """

    def __init__(self, function, rows: list[dict]):
        self.function, self.rows = function, rows
        parameters = inspect.signature(function).parameters
        names = {"truncated", *(name for row in rows for name in row)} - {"prompt"}
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.columns = sorted(names if takes_all else names & set(parameters))

    def __call__(self, answers: list[dict]) -> list[float | None]:
        columns = {
            name: [a["truncated"] if name == "truncated" else self.rows[a["row"]].get(name) for a in answers]
            for name in self.columns
        }
        prompts, completions = [a["prompt"] for a in answers], [messages_of(a) for a in answers]
        scores = self.function(prompts=prompts, completions=completions, **columns)
        if len(scores) != len(answers):
            raise UserError(
                f"the judge gave {len(scores)} scores for {len(answers)} answers; it has to give one for each"
            )
        return [None if score is None else float(score) for score in scores]


def messages_of(answer: dict) -> list[dict]:
    """The response as a conversation's next messages."""
    return [{"role": "assistant", "content": answer["response"]}]


def batches(items: list, size: int) -> list[list]:
    """Consecutive pieces of `size`; the last may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]
