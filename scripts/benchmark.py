"""Speed as ratios: native rollouts and whole PPO steps against what others need for the same work, side by side.

    python scripts/benchmark.py
    python scripts/benchmark.py --only ppo --model 2m --peer ~/trl/bin/python --output benchmark.json

Reads   nothing: the models are random Llamas, built on the spot. --peer: a Python that has TRL 1.12, the last release
        with PPO (python -m venv ~/trl; ~/trl/bin/pip install torch==2.13.0 trl==1.12.0)
Writes  --output FILE, if asked: every single timing

Both sides of a line do the same work and take turns (A B A B ...) after one run each that is not counted. Shown are
medians, their ratio (above 1: ours is faster), and the lowest and highest ratio of two neighbouring runs: how far to
trust it. Seconds mean something on a quiet machine only.

rollout  `common.generation.generate` against transformers' `model.generate`: left-padded prompts of half to whole
         --prompt tokens, exactly --new tokens each, sampled from the whole distribution. Ours records log-probs too.
zero3    the same out of a ZeRO-3 engine, gathering of the weights included, against `model.generate` of a plain model.
ppo      one RL step of step3_rlhf, fp32: rollout, reward model, old and reference log-probs, values, then --epochs
         passes of --minibatches optimizer steps of actor and critic; prompts of --prompt tokens, every response at full
         length. The peer takes a step of its own PPO: the same rows, weights, lengths, epochs and batches.
Left out: several ranks, and anything about what is learned.
"""

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli
from common.errors import UserError

PEER = Path(__file__).with_name("benchmark_trl.py")
VOCABULARY = 4096
SHAPES = {  # embeddings are not tied: 1.9 and 29.9 million parameters
    "2m": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4},
    "30m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
}
Seconds = dict[str, float]  # of one run, by phase; "total" is always among them
Side = Callable[[int], Seconds]  # called with the number of the run, from 1 on


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument_group("work").add_argument
    flag("--only", nargs="+", default=list(MEASURES), choices=list(MEASURES), help="what to compare")
    flag("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="Llamas of 1.9 and 30 M parameters")
    flag("--rows", type=cli.positive, default=32, help="responses")
    flag("--prompt", type=cli.positive, default=32, help="tokens of the longest prompt")
    flag("--new", type=cli.positive, default=64, help="tokens of every response")
    flag = parser.add_argument_group("PPO step").add_argument
    flag("--epochs", type=cli.positive, default=1, help="passes over the responses (TRL's own default is 4)")
    flag("--minibatches", type=cli.positive, default=1, help="optimizer steps in one pass; divides --rows")
    flag("--micro", type=cli.natural, default=0, help="rows in one training forward; 0: the whole minibatch")
    flag("--zero_stage", type=int, default=0, choices=[0, 1, 2, 3], help="of our actor and critic")
    flag("--peer", metavar="PYTHON", help="interpreter of an environment with TRL 1.12; default: no peer")
    flag = parser.add_argument_group("run").add_argument
    flag("--repeat", type=cli.positive, default=5, help="counted runs a side")
    flag("--threads", type=cli.natural, default=0, help="0: one for each core this process may use")
    flag("--seed", type=cli.seed, default=1, help="of weights, prompts and sampling")
    flag("--output", type=Path, metavar="FILE", help="json with every timing")
    args = parser.parse_args(argv)
    args.threads = args.threads or len(os.sched_getaffinity(0))
    if args.rows % args.minibatches:
        parser.error(f"--rows {args.rows} is not a multiple of --minibatches {args.minibatches}")
    minibatch = args.rows // args.minibatches
    args.micro = args.micro or minibatch
    if minibatch % args.micro:
        parser.error(f"--micro {args.micro} does not divide the minibatch of {minibatch} rows")
    return args


def main(argv=None) -> None:
    args = parse_args(argv)
    peer_versions = check_peer(args.peer) if args.peer else None
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when torch is imported, here and in the peer

    # 1. What this is measured on.
    import torch

    from common import distributed

    torch.set_num_threads(args.threads)
    device = distributed.start(timeout_minutes=10, seed=args.seed)
    facts = where_and_what(args, peer_versions)
    for name, fact in facts.items():
        print(f"{name}: {fact}", flush=True)

    # 2. Measure, one comparison at a time.
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.model:
            folder = Path(scratch) / model
            write_models(folder, SHAPES[model], args.seed)
            records += [MEASURES[name](args, folder, device) | {"model": model} for name in args.only]
    distributed.stop()

    # 3. Show.
    print_table(records)
    if args.output:
        args.output.write_text(json.dumps({"facts": facts, "records": records}, indent=1) + "\n")
        print(f"written: {args.output}")


# ---- what is compared


def rollout(args, folder: Path, device) -> dict:
    from common import models
    from common.generation import generate

    hf = models.load_causal_lm(folder / "actor", device=device)
    prompts = draw_prompts(args, shortest=-(-args.prompt // 2))
    ours = full_rollout(args, lambda run: generate(hf, prompts, sampling(args), step=run))
    return compare("native rollout", args, ours, "generate", model_generate(args, hf, prompts))


def zero3(args, folder: Path, device) -> dict:
    from common import models
    from common.hybrid_engine import RolloutEngine

    plain = models.load_causal_lm(folder / "actor", device=device)
    sampler = RolloutEngine(trained(args, folder, device, "actor", zero_stage=3), "native", 0, device)
    prompts, rows = draw_prompts(args, shortest=-(-args.prompt // 2)), list(range(args.rows))
    ours = full_rollout(args, lambda run: sampler.generate(prompts, sampling(args), run, rows))
    return compare("ZeRO-3 rollout", args, ours, "generate", model_generate(args, plain, prompts))


def ppo(args, folder: Path, device) -> dict:
    prompts = draw_prompts(args, shortest=args.prompt)
    ours = ppo_step(args, ppo_trainer(args, folder, device), prompts)
    if not args.peer:
        return compare("PPO step", args, ours)
    with TrlPeer(args, folder, prompts) as peer:
        return compare("PPO step", args, ours, "TRL", peer.step)


MEASURES = {"rollout": rollout, "zero3": zero3, "ppo": ppo}


def compare(what: str, args, ours: Side, name: str | None = None, other: Side | None = None) -> dict:
    """Lets the sides take turns: medians by side, the ratio of the medians, the range of neighbours' ratios."""
    sides = {"ours": ours} | ({name: other} if name else {})
    runs: dict[str, list[Seconds]] = {side: [] for side in sides}
    for number in range(args.repeat + 1):
        for side, run in sides.items():
            gc.collect()
            time.sleep(0.1)  # the other side's worker threads spin a while before they sleep
            seconds = run(number + 1)
            if number:
                runs[side].append(seconds)
    totals = {side: [seconds["total"] for seconds in runs[side]] for side in sides}
    medians = {side: statistics.median(total) for side, total in totals.items()}
    tokens = None if what == "PPO step" else args.rows * args.new
    record = {"what": what, "tokens": tokens, "seconds": medians, "runs": runs}
    if name:
        ratios = [theirs / own for own, theirs in zip(totals["ours"], totals[name], strict=True)]
        record |= {"ratio": medians[name] / medians["ours"], "lowest": min(ratios), "highest": max(ratios)}
    return record


# ---- a rollout: our side, transformers' side


def sampling(args):
    from common.generation import SamplingParams

    # A stop id outside the vocabulary is never sampled. Pad may be any id: no mask of ours is derived from one.
    return SamplingParams(args.new, 1.0, 1.0, 0, stop_ids=(VOCABULARY,), pad_id=0, seed=args.seed)


def full_rollout(args, generate: Callable) -> Side:
    def run(number: int) -> Seconds:
        start = time.perf_counter()
        mask = generate(number).mask
        seconds = time.perf_counter() - start
        assert mask.shape == (args.rows, args.new) and mask.all(), "a response ended early: the sides' work differs"
        return {"total": seconds}

    return run


def model_generate(args, hf, prompts: list[list[int]]) -> Side:
    from common.batches import pad_left

    query, mask = (x.to(hf.device) for x in pad_left(prompts, 0))
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def run(_: int) -> Seconds:
        start = time.perf_counter()
        tokens = hf.generate(query, attention_mask=mask.long(), max_new_tokens=args.new, **settings)
        seconds = time.perf_counter() - start
        assert tokens.shape == (args.rows, query.shape[1] + args.new), "a response ended early: the sides' work differs"
        return {"total": seconds}

    return run


# ---- a PPO step: our side


def step3_flags(args, folder: Path, **changes):
    """What makes the step of step3_rlhf/train.py TRL's: raw scores, no penalties, one learning rate, its batches."""
    from step3_rlhf import train

    flags = {
        "actor": folder / "actor",
        "critic": folder / "reward",
        "rollout_batch_size": args.rows,
        "minibatch_size": args.rows // args.minibatches,
        "per_device_train_batch_size": args.micro,
        "num_ppo_epochs": args.epochs,
        "learning_rate": 3e-6,
        "critic_learning_rate": 3e-6,
        "score_clip": "none",
        "missing_eos_penalty": "none",
        "dtype": "fp32",
        "zero_stage": args.zero_stage,
        "seed": args.seed,
    } | changes
    return train.parse_args([word for name, value in flags.items() for word in (f"--{name}", str(value))])


def trained(args, folder: Path, device, role: str, **changes):
    """Actor or critic in its engine, as train.py builds it."""
    from common import engine, models

    def load(zero3):
        if role == "critic":
            return models.load_scalar_model(folder / "reward", device=device, zero3=zero3)[0]
        return models.LanguageModel(models.load_causal_lm(folder / "actor", device=device, zero3=zero3))

    flags = step3_flags(args, folder, **changes)
    steps = (args.repeat + 1) * args.epochs * args.minibatches
    return engine.TrainedModel(load, cli.pick(engine.Optim, flags), cli.pick(engine.Engine, flags), steps, device)


def ppo_trainer(args, folder: Path, device):
    from common import chat_format, models
    from common.engine import FrozenModel
    from common.hybrid_engine import RolloutEngine
    from step3_rlhf.ppo_trainer import PPO, PPOTrainer
    from step3_rlhf.rewards import RewardModel

    words, actor = tokenizer(), trained(args, folder, device, "actor")

    def load_ref(zero3):
        return models.LanguageModel(models.load_causal_lm(folder / "actor", device=device))

    def load_reward(zero3):
        return models.load_scalar_model(folder / "reward", device=device)[0]

    reward = FrozenModel(load_reward, "fp32", 0, False, device)
    return PPOTrainer(
        actor=actor,
        critic=trained(args, folder, device, "critic"),
        ref=FrozenModel(load_ref, "fp32", 0, False, device),
        sampler=RolloutEngine(actor, "native", 0, device),
        sources=[RewardModel("reward", reward, words, words, "none", 0.0, 1.0)],
        weights=[1.0],
        decode=lambda ids: chat_format.decode_answer(words, ids),
        ppo=cli.pick(PPO, step3_flags(args, folder)),
        sampling=sampling(args),
        say=print,
        exact=True,
    )


def ppo_step(args, trainer, prompts: list[list[int]]) -> Side:
    from common.examples import PromptExample

    examples = [PromptExample(ids, {"prompt": [{"role": "user", "content": "w2"}]}) for ids in prompts]

    def run(number: int) -> Seconds:
        start = time.perf_counter()
        metrics, seconds, _ = trainer.step(number, examples)
        total = time.perf_counter() - start
        assert metrics["completions/min_length"] == args.new, "a response ended early: the sides' work differs"
        phases = {name: value for name, value in seconds.items() if name != "total"}
        return phases | {"rest": total - sum(phases.values()), "total": total}

    return run


# ---- a PPO step: TRL's side


def check_peer(python: str) -> dict[str, str]:
    """Versions in the peer's environment.

    Raises:
        UserError: it has no PPO of TRL.
    """
    try:
        found = subprocess.run([python, str(PEER), "--check"], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--peer {python}: {error.strerror}; wanted a Python interpreter") from error
    if found.returncode:
        raise UserError(f"--peer {python}: {found.stderr.strip().splitlines()[-1]}")
    return json.loads(found.stdout)


class TrlPeer:
    """benchmark_trl.py in the peer's Python: builds TRL's trainer once, then takes a step whenever asked."""

    def __init__(self, args, folder: Path, prompts: list[list[int]]):
        work = {name: getattr(args, name) for name in ("new", "epochs", "minibatches", "micro", "threads", "seed")}
        work |= {"actor": str(folder / "actor"), "reward": str(folder / "reward"), "prompts": prompts}
        # One step more than will be asked for: when TRL's loop ends it would go on to other things.
        work |= {"pad_id": VOCABULARY, "steps": args.repeat + 2}
        (folder / "work.json").write_text(json.dumps(work))
        self.errors = (folder / "peer.stderr").open("w+")
        # Not the launcher's variables that `distributed.start` has set: the peer would join our process group.
        group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        self.process = subprocess.Popen(
            [args.peer, str(PEER), str(folder / "work.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={name: value for name, value in os.environ.items() if name not in group},
            text=True,
        )

    def __enter__(self):
        self._answer()  # "ready"
        return self

    def __exit__(self, *_):
        self.process.stdin.close()  # it then ends
        self.process.wait(timeout=30)
        self.errors.close()

    def step(self, number: int) -> Seconds:
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        seconds = json.loads(self._answer())
        self._answer()  # "ready" for the next
        return seconds

    def _answer(self) -> str:
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise RuntimeError(f"the peer ended:\n{self.errors.read()[-3000:]}")
        return answer


# ---- models, prompts, facts, table


def write_models(folder: Path, shape: dict, seed: int) -> None:
    """Random weights as HF folders, so that both sides load the same: actor/ (and reference), reward/ (and critic)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, logging

    logging.disable_progress_bar()
    shape = shape | {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "num_labels": 1}
    config = LlamaConfig(bos_token_id=None, eos_token_id=None, pad_token_id=0, **shape)
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder / "actor")
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")


def draw_prompts(args, shortest: int) -> list[list[int]]:
    """Random ids, lengths evenly spread from `shortest` to --prompt."""
    import numpy as np

    rng = np.random.default_rng(args.seed)
    lengths = rng.permutation(np.linspace(shortest, args.prompt, args.rows).round().astype(int))
    return [rng.integers(1, VOCABULARY, length).tolist() for length in lengths]


def tokenizer():
    """One word a token: a step also decodes its responses."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from common.chat_format import BUILTIN_TEMPLATES

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w1")
    made.chat_template = BUILTIN_TEMPLATES["plain"]
    return made


def where_and_what(args, peer_versions: dict[str, str] | None) -> dict[str, str]:
    def git(*words: str) -> str:
        command = ["git", "-C", str(PEER.parent), *words]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    commit = (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if git("diff", "HEAD") else "")
    ours = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "deepspeed"))
    facts = {
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {args.threads} threads a side, "
        f"load {os.getloadavg()[0]:.1f} at the start",
        "versions": f"Python {platform.python_version()}, {ours}; commit {commit}",
        "work": f"{args.rows} rows, prompts up to {args.prompt} tokens, {args.new} new tokens, fp32; "
        f"{args.repeat} counted runs a side",
    }
    if "ppo" in args.only:
        batches = f"{args.epochs} epoch(s) of {args.minibatches} minibatch(es), {args.micro} rows a forward"
        facts["PPO"] = f"{batches}; ours with ZeRO-{args.zero_stage}"
    if peer_versions:
        facts["peer"] = ", ".join(f"{name} {found}" for name, found in peer_versions.items())
    return facts


def print_table(records: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    def table(title: str, *columns: str, words: int) -> Table:
        """The first `words` columns hold words, the others numbers."""
        made = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
        for number, name in enumerate(columns):
            made.add_column(name, justify="left" if number < words else "right", no_wrap=True)
        return made

    console = Console()
    columns = ("", "model", "against", "unit", "ours", "theirs", "ratio", "low", "high")
    shown = table("medians; ratio above 1: ours is faster", *columns, words=4)
    for record in records:
        own, *others = record["seconds"]
        speeds = [
            f"{record['tokens'] / seconds:,.0f}" if record["tokens"] else f"{seconds:.3f}"
            for seconds in record["seconds"].values()
        ]
        ratios = [f"{record[name]:.2f}" for name in ("ratio", "lowest", "highest") if others]
        unit = "tok/s" if record["tokens"] else "s"
        shown.add_row(record["what"], record["model"], *(others or ["-"]), unit, *speeds, *ratios)
    console.print(shown)

    steps = [record for record in records if not record["tokens"]]
    if not steps:
        return
    phases = list(dict.fromkeys(phase for r in steps for runs in r["runs"].values() for phase in runs[0]))
    phases = [phase for phase in phases if phase != "total"] + ["total"]
    shown = table("one PPO step, median seconds by phase", "model", "side", *phases, words=2)
    for record in steps:
        for side, runs in record["runs"].items():
            medians = {phase: statistics.median(seconds[phase] for seconds in runs) for phase in runs[0]}
            cells = (f"{medians[phase]:.3f}" if phase in medians else "-" for phase in phases)
            shown.add_row(record["model"], side, *cells)
    console.print(shown)


if __name__ == "__main__":
    sys.exit(cli.run(main))
