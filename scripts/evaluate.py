"""Score what models answer to held-out prompts: sampled as in training, judged by something they were not trained on.

    python scripts/evaluate.py --model models/sft models/rlhf/actor --data data --judge step0_data/toy.py:gold

Reads   the held-out prompts of a step-0 folder (DATA/prompts/eval.parquet), or any parquet file with a `prompt` column;
        HF causal-LM folders; a judge: FILE.py:FUNCTION with TRL's signature, or a reward-model folder
Writes  OUTPUT.json (one entry a model, and each model's difference to the first) and OUTPUT.samples.jsonl, every answer
        (OUTPUT.unjudged.jsonl: those so far, when scoring them has failed)

Every model answers the same prompts with the same sampling noise, so differences are paired. Intervals are 95%
bootstrap intervals over prompts, since answers to one prompt are not independent. One process.
"""

import json
import math
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli
from common.errors import RunFailed, UserError
from common.printing import printable, say

MODEL_STAGES = ("sft", "rlhf-actor", "dpo", "base")


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument_group("what is compared").add_argument
    flag("--model", nargs="+", required=True, metavar="DIR", help="causal-LM folders; the first is the baseline")
    flag("--data", metavar="PATH", help="step-0 folder or parquet file; default: what the first model was trained on")
    flag(
        "--judge",
        required=True,
        help="FILE.py:FUNCTION (TRL's reward signature) or a reward folder",
    )
    flag("--reward", metavar="DIR", help="reward model: adds its own mean score, and picks for --best_of")
    flag("--ref", metavar="DIR", help="reference model: adds the KL distance to it")
    cli.add_timeout_flag(flag.__self__)
    flag = parser.add_argument_group("sampling").add_argument
    flag("--num_samples", type=cli.positive, default=256, help="answers a model, spread evenly over the prompts")
    flag("--best_of", type=cli.natural, default=0, help="also judge the best of N answers a prompt; 0: off")
    flag("--temperature", type=cli.temperature, default=1.0, help="divides the logits; 0: greedy")
    flag("--top_p", type=cli.top_p, default=1.0, help="smallest set of tokens with this probability; 1: off")
    flag("--top_k", type=cli.natural, default=0, help="the likeliest K tokens; 0: off")
    flag("--max_prompt_length", type=cli.positive, default=512, help="tokens; longer prompts are set aside and counted")
    flag("--max_completion_length", type=cli.positive, default=256, help="tokens, the stop token included")
    flag("--seed", type=cli.seed, default=1, help="of the sampling noise and the bootstrap")
    flag = parser.add_argument_group("run").add_argument
    flag("--output", type=Path, default=Path("evaluation.json"), metavar="FILE", help="where the figures go")
    flag("--batch_size", type=cli.positive, default=64, help="answers generated or scored at once")
    flag("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="auto: bf16 where the GPU has it")
    flag("--show", type=cli.natural, default=2, help="prompts whose answers are printed")
    cli.add_model_flags(parser)
    args = parser.parse_args(argv)
    if args.best_of and not args.reward:
        parser.error("--best_of needs --reward, the model that picks the best answer")
    return args


def main(argv=None) -> None:
    args = parse_args(argv)
    from common import checkpoint, functions, metrics

    # 1. What can be wrong is found out before anything large is loaded.
    parents = [checkpoint.require_stage(path, "--model", MODEL_STAGES) for path in args.model]
    if args.ref:
        checkpoint.require_stage(args.ref, "--ref", MODEL_STAGES)
    for flag, path in (("--reward", args.reward), ("--judge", args.judge)):
        if path and Path(path).is_dir():
            checkpoint.require_stage(path, flag, ("reward",))
        elif flag == "--judge":
            functions.require_file(path, flag)
    rows = held_out_prompts(args.data, parents[0])

    # 2. Each model answers the same prompts, and its answers are scored.
    unjudged = Unjudged(args.output.with_suffix(".unjudged.jsonl"))
    try:
        entries, answers = answer_and_score(args, rows, unjudged)
    except (UserError, RunFailed) as error:
        raise type(error)(f"{error}{unjudged.where()}") from error

    # 3. Files, table, a few answers to read.
    record = {
        "judge": args.judge,
        "num_samples": args.num_samples,
        "num_prompts": len({answer["row"] for answer in answers[0]}),
        "sampling": {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "max_completion_length")},
        "seed": args.seed,
        "models": entries,
        "differences": [
            {"model": model, "minus": args.model[0]} | difference(these, answers[0], args.seed)
            for model, these in zip(args.model[1:], answers[1:], strict=True)
        ],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    samples_file = args.output.with_suffix(".samples.jsonl")
    lines = [metrics.json_line({"model": m} | a) for m, these in zip(args.model, answers, strict=True) for a in these]
    checkpoint.atomic_write_text(samples_file, "".join(lines))
    checkpoint.atomic_write_text(args.output, json.dumps(record, indent=1) + "\n")
    unjudged.file.unlink()
    print_table(args, record)
    print_answers(args, answers)
    say(f"written: {args.output} and {samples_file}")


def held_out_prompts(data: str | None, parent: dict | None) -> list[dict]:
    """The held-out rows of a step-0 folder (default: the parent model's), or all rows of a parquet file."""
    from common.data import locate_or_inherit, read_rows

    files = locate_or_inherit(data, parent, "prompts")
    for note in files.notes:
        say(note)
    file = files.train if data is not None and Path(data).is_file() else files.eval
    if file is None:
        raise UserError(
            f"{files.train.parent} has no eval.parquet: no prompt was kept for evaluation; prepare more rows, or "
            "with a larger --eval_fraction, and train on that"
        )
    recorded = (parent or {}).get("data")
    if recorded and recorded["hash"] != files.hash and file == files.eval:
        say(f"note: the first model was trained on {recorded['path']}: what is held out here may not have been there")
    return read_rows(file)


class Unjudged:
    """Answers in a file until they have scores: sampling is most of the work, and a judge may fail or never return."""

    def __init__(self, file: Path):
        self.file, self.lines = file, []

    def add(self, model: str, answers: list[dict]) -> None:
        from common import checkpoint, metrics

        self.lines += [metrics.json_line({"model": model} | without_ids(answer)) for answer in answers]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.atomic_write_text(self.file, "".join(self.lines))

    def where(self) -> str:
        return f"; the {len(self.lines)} answers sampled so far are in {self.file}" if self.lines else ""


def without_ids(answer: dict) -> dict:
    return {name: value for name, value in answer.items() if name not in ("prompt_ids", "ids")}


def answer_and_score(args, rows: list[dict], unjudged: Unjudged) -> tuple[list[dict], list[list[dict]]]:
    """For each model: its entry in the report, and its answers. One model is in memory at a time."""
    import torch

    from common import chat_format, functions, models
    from common import tokenizer as tokenizer_
    from scripts.answers import Answerer, FunctionJudge, RewardModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, reason = models.choose_dtype(args.dtype, device)
    print(f"dtype {reason}")
    load = {name: getattr(args, name) for name in ("chat_template", "attn_implementation", "trust_remote_code")}
    load |= {"dtype": dtype, "device": device}

    judging = [path for path in (args.reward, args.judge) if path and Path(path).is_dir()]
    # Rows that every model can be shown: the comparison needs the same prompts.
    tokenizers = [models.load_tokenizer(path, args.trust_remote_code) for path in args.model]
    for tokenizer in tokenizers:
        chat_format.ensure_template(tokenizer, args.chat_template)
    lengths = [longest(tokenizers, row) for row in rows]
    fitting = [row for row, length in zip(rows, lengths, strict=True) if length <= args.max_prompt_length]
    if not fitting:
        raise UserError(f"none of {len(rows)} held-out prompts fits --max_prompt_length {args.max_prompt_length}")
    aside = f", {len(rows) - len(fitting)} set aside as too long or malformed" if len(fitting) < len(rows) else ""
    print(f"{len(fitting)} held-out prompts{aside}")
    whole = max(length for length in lengths if length <= args.max_prompt_length) + args.max_completion_length
    for path in filter(None, (*args.model, args.ref)):
        config = models.read_config(path, args.trust_remote_code)
        models.check_length(config, whole, "--max_prompt_length and --max_completion_length", whose=path)
    if args.ref:
        check_reference(args, tokenizers)
    texts = [(i, text) for i, row in enumerate(fitting[:256]) for text in tokenizer_.texts_of(row)]
    others = [models.load_tokenizer(path, args.trust_remote_code) for path in judging]
    for path, tokenizer in zip([*args.model, *judging], [*tokenizers, *others], strict=True):
        if said := tokenizer_.check_round_trip(tokenizer, texts, path):
            print(said)

    on_topic = None
    if Path(args.judge).is_dir():
        judge = RewardModel(args.judge, batch_size=args.batch_size, **load)
    else:
        name = f"judge {args.judge.rpartition(':')[2]}"
        function, module = functions.load(args.judge, "--judge", name, args.reward_timeout)
        function.require(set(fitting[0]))
        judge, on_topic = FunctionJudge(function, fitting), on_topic_of(module, function)
    reward = RewardModel(args.reward, batch_size=args.batch_size, **load) if args.reward else None
    ref = Answerer(args.ref, **load) if args.ref else None

    prompts, n = [row["prompt"] for row in fitting], args.num_samples
    spread = [j % len(prompts) if n >= len(prompts) else j * len(prompts) // n for j in range(n)]
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "seed", "batch_size")}
    sampling["tools"] = list(map(chat_format.tools_of, fitting))
    sampling["max_new_tokens"] = args.max_completion_length
    entries, everything = [], []
    model = None
    for path in args.model:
        del model  # its memory is needed for the next one
        model = Answerer(path, **load)
        answers = model.sample(prompts, spread, step=0, **sampling)
        unjudged.add(path, answers)
        columns = {"score": judge(answers, model.tokenizer)}
        if reward:
            columns["reward"] = reward(answers, model.tokenizer)
        if on_topic:
            columns["on_topic"] = list(map(bool, FunctionJudge(on_topic, fitting)(answers, model.tokenizer)))
        if ref:
            ours, theirs = (m.logprobs(answers, args.temperature or 1.0, args.batch_size) for m in (model, ref))
            columns["kl"] = [a - b for a, b in zip(ours, theirs, strict=True)]  # k1, summed over the answer
        entry = {"model": path, "score": mean(columns["score"])}
        entry["score_interval"] = interval(answers, columns["score"], args.seed)
        entry |= {name: mean(values) for name, values in columns.items() if name != "score"}
        entry["distinct_responses"] = len({answer["response"] for answer in answers}) / n
        entry["eos_rate"] = mean([not answer["truncated"] for answer in answers])
        entry["response_length"] = mean([answer["length"] for answer in answers])
        if args.best_of:
            each = [row for row in range(len(prompts)) for _ in range(args.best_of)]
            several = model.sample(prompts, each, step=1, **sampling)
            unjudged.add(path, several)
            picked = pick_best(several, reward(several, model.tokenizer), args.best_of)
            scores = judge(picked, model.tokenizer)
            entry[f"best_of_{args.best_of}"] = mean(scores)
            entry[f"best_of_{args.best_of}_interval"] = interval(picked, scores, args.seed)
        entries.append(entry)
        named = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        everything.append([without_ids(answer) | more for answer, more in zip(answers, named, strict=True)])
    return entries, everything


def longest(tokenizers: list, row: dict) -> float:
    """Tokens of a row's prompt where it has most of them; infinitely many where a template refuses it."""
    from common import chat_format

    try:
        prompt, tools = row["prompt"], chat_format.tools_of(row)
        return max(len(chat_format.encode_prompt(tokenizer, prompt, tools)) for tokenizer in tokenizers)
    except chat_format.RowError:
        return math.inf


def check_reference(args, tokenizers: list) -> None:
    """The reference has to read the very ids that each model samples.

    Raises:
        UserError: it has another vocabulary, or fewer rows of the embedding.
    """
    from common import models

    vocabulary = models.load_tokenizer(args.ref, args.trust_remote_code).get_vocab()
    configs = [models.read_config(path, args.trust_remote_code) for path in (args.ref, *args.model)]
    rows = [config.get_text_config().vocab_size for config in configs]
    for path, tokenizer, size in zip(args.model, tokenizers, rows[1:], strict=True):
        if tokenizer.get_vocab() != vocabulary:
            raise UserError(f"--ref {args.ref} has another vocabulary than --model {path}: no KL between them")
        if size > rows[0]:
            raise UserError(
                f"--model {path} may sample {size} tokens and --ref {args.ref} has rows for {rows[0]}: no KL between "
                "them; take a reference of the same size, or leave --ref out"
            )


def on_topic_of(module, judge):
    """A judge's file may also say whether an answer is on topic: on_topic(prompt, completion) -> bool."""
    from common.functions import Function

    function = getattr(module, "on_topic", None)
    if not callable(function) or not {"prompt", "completion"} <= Function("on_topic", function).takes:
        return None

    def each(prompts, completions):
        return [bool(function(prompt, said)) for prompt, said in zip(prompts, completions, strict=True)]

    return Function("on_topic", each, judge.timeout, judge.file)


def pick_best(answers: list[dict], scores: list[float], n: int) -> list[dict]:
    """Of every n consecutive answers the one with the best score (the first of equals)."""
    return [answers[max(range(i, i + n), key=scores.__getitem__)] for i in range(0, len(answers), n)]


# ---- figures


def mean(values: list) -> float | None:
    """The mean of what is not None: a judge may abstain."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def interval(answers: list[dict], values: list, seed: int, draws: int = 4000) -> list[float] | None:
    """95% percentile bootstrap interval of the mean; whole prompts are drawn, each with all of its answers.

    None for a single prompt.
    """
    import numpy as np

    groups: dict[int, list[float]] = {}
    for answer, value in zip(answers, values, strict=True):
        if value is not None:
            groups.setdefault(answer["row"], []).append(value)
    if len(groups) < 2:  # resampling one says nothing about others
        return None
    sums, counts = (np.array([function(group) for group in groups.values()], float) for function in (sum, len))
    drawn = np.random.default_rng(seed).integers(len(groups), size=(draws, len(groups)))
    return np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5]).tolist()


def difference(answers: list[dict], baseline: list[dict], seed: int) -> dict:
    """Mean score minus the baseline's, answer by answer (same prompt, same noise), with its interval."""
    pairs = [(a["score"], b["score"]) for a, b in zip(answers, baseline, strict=True)]
    values = [None if None in pair else pair[0] - pair[1] for pair in pairs]
    return {"score": mean(values), "score_interval": interval(answers, values, seed)}


# ---- the screen


def print_table(args, record: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    def text(value) -> str:
        if isinstance(value, list):
            return f"{value[0]:.2f} .. {value[1]:.2f}"
        return "-" if value is None else f"{value:.3f}"

    names = {
        "score": "judge's score",
        "reward": "reward model's score",
        "on_topic": "on topic",
        "kl": "KL to the reference",
        "distinct_responses": "distinct answers",
        "eos_rate": "ended by itself",
        "response_length": "tokens an answer",
        f"best_of_{args.best_of}": f"best of {args.best_of}: judge's score",
    }
    title = f"{record['num_samples']} answers to {record['num_prompts']} held-out prompts"
    table = Table(title=title, title_justify="left")
    table.add_column(args.judge, overflow="fold")
    for path in args.model:
        table.add_column(path, justify="right", overflow="fold")
    for key in list(record["models"][0])[1:]:
        label = names.get(key, "  95% interval" if key.endswith("_interval") else key)
        table.add_row(label, *(text(entry[key]) for entry in record["models"]))
    if record["differences"]:
        table.add_row("score, difference to the first", "", *(text(d["score"]) for d in record["differences"]))
        table.add_row("  95% interval", "", *(text(d["score_interval"]) for d in record["differences"]))
    Console().print(table)


def print_answers(args, answers: list[list[dict]]) -> None:
    from common.metrics import format_value

    for same_prompt in list(zip(*answers, strict=True))[: args.show]:
        print(f"prompt: {printable(same_prompt[0]['prompt'][-1]['content'])}")
        for path, answer in zip(args.model, same_prompt, strict=True):
            facts = f"score {format_value(answer['score'])}" + ", cut by length" * answer["truncated"]
            print(textwrap.indent(f"{path} ({facts}):\n  {printable(answer['response'])}", "  "))


if __name__ == "__main__":
    sys.exit(cli.run(main))
