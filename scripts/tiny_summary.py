"""The end of `run_all_tiny.sh`: one table, OUT/summary.json, and the lines to type next.

    python scripts/tiny_summary.py --out out/tiny
    python scripts/tiny_summary.py --write_reference out/tiny-1 out/tiny-2 out/tiny-3

Reads   OUT/settings, OUT/logs/*.seconds, OUT/{sft,reward}/stage.json, OUT/evaluation.json and its samples, and
        scripts/reference/DATASET.json: what reference runs with other seeds showed, where there are any
Writes  OUT/summary.json (or, with --write_reference, the reference file)

A figure's band is where 95 of 100 further seeds are expected: the prediction interval of a normal distribution,
mean +- t * sd * sqrt(1 + 1/n), over the n reference runs, cut at what the figure can be.
"""

import json
import math
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli
from common.errors import UserError

REFERENCES = Path(__file__).resolve().parent / "reference"
STAGES = {
    "data": "0 data, base model",
    "sft": "1 SFT",
    "reward": "2 reward model",
    "rlhf": "3 PPO",
    "evaluation": "evaluation",
}
# key in summary.json: (stage it belongs to, what it is)
FIGURES = {
    "sft_loss": ("sft", "loss on unseen prompts"),
    "rm_accuracy": ("reward", "accuracy on unseen pairs"),
    "kl": ("rlhf", "KL from SFT, nats an answer"),
    "gold_sft": ("evaluation", "gold score, SFT"),
    "gold_rlhf": ("evaluation", "gold score, PPO"),
    "gold_best_of_16": ("evaluation", "gold score, SFT, best of 16"),
    "on_topic_sft": ("evaluation", "on topic, SFT"),
    "on_topic_rlhf": ("evaluation", "on topic, PPO"),
    "distinct_responses": ("evaluation", "distinct answers, PPO"),
    "eos_rate": ("evaluation", "ended by itself, PPO"),
    "response_length_sft": ("evaluation", "tokens an answer, SFT"),
    "response_length_rlhf": ("evaluation", "tokens an answer, PPO"),
}
JUDGED = ("score", "best_of_16", "on_topic", "distinct_responses", "eos_rate", "kl", "response_length")
SHARES = ("rm_accuracy", "on_topic_sft", "on_topic_rlhf", "distinct_responses", "eos_rate")
GOLD = ("gold_sft", "gold_rlhf", "gold_best_of_16")
# What an answer may have: (the rubric's part, wanted or not, what it is). A lazy answer cannot name the topic, so the
# topic is looked at in the others only: else it would seem to be learned when lazy answers go.
QUALITIES = {
    "polite": ("polite", True, "polite openings"),
    "rude": ("rude", False, "fewer rude openings"),
    "lazy": ("lazy", False, "fewer lazy answers"),
    "closing": ("closing", True, "closing lines"),
    "repeated": ("repeated", False, "fewer repeated sentences"),
    "topic": ("on_topic", True, "the right topic, among answers that are not lazy"),
}
CHANCE = 3.0  # standard errors; a smaller difference of two shares is not called one
# run folder: the columns of its metrics.jsonl of which the reference keeps, at each step, the lowest and the highest
CURVES = {
    "sft": ("loss",),
    "reward": ("loss", "accuracy"),
    "rlhf": ("objective/scores", "objective/kl", "objective/entropy"),
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # n: t, n - 1 df


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="OUT", help="a finished run of run_all_tiny.sh")
    parser.add_argument("--write_reference", nargs="+", type=Path, metavar="OUT", help="runs that make the reference")
    parser.add_argument("--machine", default=None, help="with --write_reference: the words that describe the machine")
    args = parser.parse_args(argv)
    if (args.out is None) == (args.write_reference is None):
        parser.error("wanted either --out or --write_reference")
    return args


def main(argv=None) -> None:
    args = parse_args(argv)
    if args.write_reference:
        write_reference(args.write_reference, args.machine)
        return
    from common.checkpoint import atomic_write_text

    summary = summarise(args.out)
    atomic_write_text(args.out / "summary.json", json.dumps(summary, indent=1) + "\n")
    shuffled = settings_of(args.out)["SHUFFLE_PREFERENCES"] != "0"
    print_table(args.out, summary, {} if shuffled else bands(reference(args.out)))
    if not reference(args.out).exists():
        print(f"No reference runs of {dataset_of(args.out)} are kept: there is no band to hold these figures against.")
    if shuffled:
        print("Negative control: preferences were shuffled. Accuracy belongs near 0.5, and gold should not rise.")
    print_before_and_after(args.out)
    for _, heading, text in learned(summary):
        print(f"{heading}: {text}")
    print_next(args.out)


# ---- figures


def settings_of(out: Path) -> dict[str, str]:
    return dict(word.split("=") for word in read(out / "settings").split())


def dataset_of(out: Path) -> str:
    """tiny, tiny_zh or tiny+tiny_zh; only the last two are written down."""
    return settings_of(out).get("DATASET", "tiny")


def reference(out: Path) -> Path:
    """Where the reference runs of the same data are, if there are any."""
    return REFERENCES / f"{dataset_of(out)}.json"


def summarise(out: Path) -> dict:
    """The figures of one run, by the names of summary.json."""
    from common.json_files import many, number

    trained = {"sft": "eval_loss", "reward": "eval_accuracy"}
    sft, reward = (
        read_object(out / stage / "stage.json", {"metrics": {name: number}})["metrics"]
        for stage, name in trained.items()
    )
    models = read_object(out / "evaluation.json", {"models": many(dict.fromkeys(JUDGED, number))})["models"]
    if len(models) != 2:
        raise UserError(f"{out / 'evaluation.json'} is of {len(models)} models, wanted 2: SFT and PPO")
    before, after = models
    return {
        "seed": int(settings_of(out)["SEED"]),
        "sft_loss": sft["eval_loss"],
        "rm_accuracy": reward["eval_accuracy"],
        "gold_sft": before["score"],
        "gold_rlhf": after["score"],
        "gold_best_of_16": before["best_of_16"],
        "on_topic_sft": before["on_topic"],
        "on_topic_rlhf": after["on_topic"],
        "distinct_responses": after["distinct_responses"],
        "eos_rate": after["eos_rate"],
        "kl": after["kl"],
        "response_length_sft": before["response_length"],
        "response_length_rlhf": after["response_length"],
        "qualities": qualities(*samples_of(out)),
        "seconds": round(sum(seconds_of(out, stage) for stage in STAGES), 1),
    }


def samples_of(out: Path) -> tuple[list[dict], list[dict]]:
    """The answers of SFT and of PPO, to the same prompts in the same order."""
    from common.metrics import read_jsonl

    samples = read_jsonl(out / "evaluation.samples.jsonl")
    half = len(samples) // 2
    return samples[:half], samples[half:]


def qualities(before: list[dict], after: list[dict]) -> dict[str, list]:
    """Quality -> [its share in the first answers, in the second, "better", "worse" or "same"].

    "same": the difference is within what chance gives two samples of these sizes (`CHANCE`).
    """
    from step0_data.toy import rubric_counts

    def ticks(answers: list[dict]) -> list[dict[str, int]]:
        return [rubric_counts(a["prompt"][-1]["content"], a["response"], not a["truncated"]) for a in answers]

    first, second, found = ticks(before), ticks(after), {}
    for name, (part, is_wanted, _) in QUALITIES.items():
        groups = [[bool(t[part]) for t in group if part != "on_topic" or not t["lazy"]] for group in (first, second)]
        shares = [sum(group) / max(1, len(group)) for group in groups]
        both = sum(map(sum, groups)) / max(1, sum(map(len, groups)))
        spread = math.sqrt(both * (1 - both) * sum(1 / max(1, len(group)) for group in groups))
        gain = (shares[1] - shares[0]) * (1 if is_wanted else -1)
        found[name] = [*shares, "same" if abs(gain) <= CHANCE * spread else "better" if gain > 0 else "worse"]
    return found


def learned(summary: dict) -> list[tuple[str, str, str]]:
    """What PPO changed in the answers, in words: (level, heading, text), those that are there."""
    said = []
    headings = {
        "better": ("good", "Learned"),
        "worse": ("bad", "Worse than before"),
        "same": ("unclear", "Not learned"),
    }
    for change, (level, heading) in headings.items():
        parts = [
            f"{QUALITIES[name][2]} ({before:.0%} before, {after:.0%} after)"
            for name, (before, after, seen) in summary["qualities"].items()
            if seen == change
        ]
        if parts:
            said.append((level, heading, ", ".join(parts) + "."))
    return said


def seconds_of(out: Path, stage: str) -> float:
    path = out / "logs" / f"{stage}.seconds"
    try:
        return float(read(path))
    except ValueError as error:
        raise UserError(f"{path} holds {read(path)[:40]!r}, wanted a number of seconds") from error


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; run: OUT={path.parent} bash scripts/run_all_tiny.sh") from error


def read_object(path: Path, schema: dict) -> dict:
    """A json file of the run, which is as the schema says."""
    from common.json_files import read_json

    read(path)  # says what to do where there is none
    return read_json(path, schema, f"mend it, or make it again: OUT={path.parent} bash scripts/run_all_tiny.sh")


def bands(runs_file: Path) -> dict[str, tuple[float, float]]:
    """Figure -> (low, high), from committed reference runs; empty without them."""
    if not runs_file.exists():
        return {}
    from step0_data.toy import PERFECT

    runs = json.loads(runs_file.read_text())["runs"]
    n, found = len(runs), {}
    for name in FIGURES:
        values = [run[name] for run in runs]
        spread = statistics.stdev(values) or 1 / 256  # where all agree, one of 256 answers: a share is no finer
        centre, reach = statistics.mean(values), T_95[n] * spread * math.sqrt(1 + 1 / n)
        lowest, highest = (-math.inf, PERFECT) if name in GOLD else (0.0, 1.0 if name in SHARES else math.inf)
        found[name] = (max(centre - reach, lowest), min(centre + reach, highest))
    return found


def ranges(rows_of_runs: list[list[dict]]) -> dict[str, list]:
    """Metric -> [[lowest, highest] at its first step, the same over the last tenth of its steps], over all runs."""
    found = {}
    for name in dict.fromkeys(name for rows in rows_of_runs for row in rows for name in row if name != "step"):
        runs = [[row[name] for row in rows if row.get(name) is not None] for rows in rows_of_runs]
        first = [values[0] for values in runs if values]
        last = [value for values in runs for value in values[-max(1, len(values) // 10) :]]
        found[name] = [[float(f"{edge:.3g}") for edge in (min(part), max(part))] for part in (first, last)]
    return found


def write_reference(outs: list[Path], machine: str | None) -> None:
    from common.checkpoint import atomic_write_text
    from common.metrics import read_jsonl

    if len(outs) not in T_95:
        raise UserError(f"--write_reference wants {min(T_95)} to {max(T_95)} runs, got {len(outs)}")
    datasets = {dataset_of(out) for out in outs}
    if len(datasets) > 1:
        raise UserError(f"--write_reference wants runs of one DATASET, got {', '.join(sorted(datasets))}")
    path, (dataset,) = reference(outs[0]), datasets
    runs = [{name: value for name, value in summarise(out).items() if name != "qualities"} for out in outs]
    curves, seen = {}, {}
    for folder, names in CURVES.items():
        steps = [read_jsonl(out / folder / "metrics.jsonl") for out in outs]
        seen |= {f"{folder}: {name}": found for name, found in ranges(steps).items()}
        for name in names:
            at_each = list(zip(*([row[name] for row in rows] for rows in steps), strict=True))
            curves[f"{folder}: {name}"] = [[round(edge(values), 4) for values in at_each] for edge in (min, max)]
    commit = read_object(outs[0] / "sft" / "stage.json", {})["git_commit"]
    path.parent.mkdir(exist_ok=True)
    chosen = "" if dataset == "tiny" else f"DATASET={shlex.quote(dataset.replace('+', ' '))} "
    command = f"SEED=... {chosen}bash scripts/run_all_tiny.sh"
    # one line a run and a curve: a diff then shows what moved
    lines = [f' "command": {json.dumps(command)}, "machine": {json.dumps(machine)}']
    lines += [f' "commit": {json.dumps(commit)}']
    lines += [' "runs": [\n  ' + ",\n  ".join(map(json.dumps, runs)) + "\n ]"]
    for key, table in (("ranges", seen), ("curves", curves)):
        each = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in table.items()]
        lines += [f' "{key}": {{\n  ' + ",\n  ".join(each) + "\n }"]
    atomic_write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {path}")


# ---- the screen


def print_table(out: Path, summary: dict, known: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{out}, seed {summary['seed']}", title_justify="left")
    for name, justify in (("stage", "left"), ("seconds", "right"), ("figure", "left"), ("value", "right")):
        table.add_column(name, justify=justify)
    table.add_column("reference band", justify="right")
    table.add_column("")
    outside = 0
    for stage, title in STAGES.items():
        names = [name for name, (owner, _) in FIGURES.items() if owner == stage]
        for row, name in enumerate(names or [None]):
            cells = [title, f"{seconds_of(out, stage):.0f}"] if row == 0 else ["", ""]
            if name:
                cells += [FIGURES[name][1], f"{summary[name]:.3f}"]
            if name in known:
                low, high = known[name]
                inside = low <= summary[name] <= high
                outside += not inside
                cells += [f"{low:.2f} .. {high:.2f}", "inside" if inside else "OUTSIDE"]
            table.add_row(*cells)
    table.add_section()
    gain = summary["gold_rlhf"] - summary["gold_sft"]
    table.add_row("all", f"{summary['seconds']:.0f}", "gold score, PPO minus SFT", f"{gain:.3f}")
    console = Console()
    Console(width=None if console.is_terminal else 110).print(table)
    if not known:
        return
    verdict = f"{outside} of {len(known)} figures outside" if outside else f"all {len(known)} figures inside"
    print(f"{verdict} the band that 95 of 100 seeds should reach, by {reference(out).name}'s runs.")


def print_before_and_after(out: Path) -> None:
    from common.printing import printable

    pairs = list(zip(*samples_of(out), strict=True))  # one answer of each model: same prompt, same noise
    better, worse = (sum(sign * (b["score"] - a["score"]) > 0 for a, b in pairs) for sign in (1, -1))
    print(f"\nThe same prompt before and after: better in {better}, worse in {worse} of {len(pairs)}. The first three:")
    for before, after in pairs[:3]:
        assert before["prompt"] == after["prompt"]
        print(f"  {printable(before['prompt'][-1]['content'])}")
        for name, sample in (("SFT", before), ("PPO", after)):
            print(f"    {name} (gold {sample['score']:+.2f}): {printable(sample['response'])}")


def print_next(out: Path) -> None:
    print(f"""
Next, from {Path.cwd()}:
  source .venv/bin/activate
  python scripts/chat.py --model {out}/rlhf/actor          # talk to the result
  tensorboard --logdir {out}                               # its curves
and the same on your own data (json, jsonl or parquet), starting from any Hugging Face causal LM:
  python step0_data/prepare.py --dataset MY_PREFERENCES.jsonl --output_dir data
  python step1_sft/train.py --model MODEL --data data
  python step2_reward/train.py --model models/sft
  deepspeed step3_rlhf/train.py --actor models/sft --critic models/reward""")


if __name__ == "__main__":
    sys.exit(cli.run(main))
