"""One page to look at a run: did it learn, curves, KL against reward, answers before and after, settings, time.

    python scripts/report.py out/tiny

Reads   OUT: the folder of a recipe (OUT/sft, OUT/reward, OUT/rlhf, ..., as far as they are there) or of one stage,
        finished or still running; OUT/evaluation.json and its samples, OUT/summary.json, OUT/logs; the metric tables
        in the steps' READMEs; what `--help` of a step says of its flags
Writes  OUT/report.html: one file that needs no other and no network; made anew each time

Only files are read; what is missing, torn or unreadable is said on the page.
"""

import base64
import hashlib
import json
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import cli
from common.printing import say

COUNTERS = ("num_tokens", "epoch", "episode")
NOT_PHASES = ("step", "time", "total")  # of timings.jsonl
SHOWN_STEPS = 8  # of samples.jsonl, spread evenly
SHOWN_FIRST, SHOWN_EXTREMES = 6, 3  # answers side by side: the file's first, and those that gained and lost most
LONGEST = 1500  # characters shown of a text
FEW_CURVES = 8  # so many of a stage are all shown at once
# Columns of the answers, and their names on the page.
DISTRIBUTIONS = {
    "score": "the judge's score",
    "reward": "the reward model's score",
    "length": "tokens an answer",
    "kl": "KL to the reference, nats",
}


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of a recipe or of one stage")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    out = parse_args(argv).out
    from common.checkpoint import atomic_write_text
    from scripts.report_files import find_runs, read_evaluation, read_object
    from scripts.report_glossary import read_chapters
    from scripts.report_words import verdict

    # 1. What is there.
    chapters, problems = read_chapters(), []
    runs = find_runs(out, chapters, problems)
    evaluation = read_evaluation(out, problems)
    summary = read_object(out / "summary.json", problems)
    shuffled = (out / "settings").is_file() and b"SHUFFLE_PREFERENCES=1" in (out / "settings").read_bytes()
    bands, reference = ({}, {}) if shuffled else tiny_reference(out, summary)

    # 2. What it says.
    level, headline, sentences = verdict(runs, evaluation, shuffled, tiny_qualities(summary))
    page = {
        "out": out,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "verdict": {"level": level, "headline": headline, "sentences": sentences},
        "missing": missing(out, runs, evaluation, chapters) + problems,
        "figures": figures(summary, bands),
        "answers": compared(evaluation) if evaluation else None,
        "stages": [stage_section(run, reference) for run in runs],
        "clock": clock(out, runs),
        "glossary": glossary(runs),
    }

    # 3. The page.
    html = render(page)
    atomic_write_text(out / "report.html", html)
    say(f"report: {out / 'report.html'} ({len(html.encode()) / 1e6:.1f} MB)")


# ---- the tiny recipe has figures to compare with


def tiny_reference(out: Path, summary: dict | None) -> tuple[dict[str, tuple[float, float]], dict]:
    """The bands of the figures, and what reference runs on the same data showed; nothing for runs on other data."""
    from scripts import tiny_summary

    if not summary or not summary.keys() >= tiny_summary.FIGURES.keys() or not (out / "settings").is_file():
        return {}, {}
    path = tiny_summary.reference(out)
    return (tiny_summary.bands(path), json.loads(path.read_text())) if path.exists() else ({}, {})


def tiny_qualities(summary: dict | None) -> list[tuple[str, str, str]]:
    """What was learned and what was not, where the recipe's summary says so."""
    from scripts.tiny_summary import learned

    try:
        return learned(summary)
    except (KeyError, TypeError, ValueError, AttributeError):  # no summary, an older one, or somebody else's file
        return []


def figures(summary: dict | None, bands: dict[str, tuple[float, float]]) -> list[dict]:
    """The figures of summary.json, each with its band, and where both lie on a common scale of 0 to 100."""
    from scripts.report_files import is_number
    from scripts.tiny_summary import FIGURES

    rows = []
    for name, (_, text) in FIGURES.items():
        value = (summary or {}).get(name)
        if not is_number(value):
            continue
        row = {"text": text, "value": value, "band": bands.get(name)}
        if row["band"]:
            low, high = row["band"]
            start, end = min(low, value), max(high, value)
            margin = 0.1 * (end - start) or 1
            places = [100 * (x - start + margin) / (end - start + 2 * margin) for x in (low, high, value)]
            row |= {"inside": low <= value <= high, "low": places[0], "high": places[1], "at": places[2]}
        rows.append(row)
    return rows


# ---- one stage


def stage_section(run, reference: dict) -> dict:
    from scripts import report_charts
    from scripts.report_files import points
    from scripts.report_words import progress

    cards, still = curve_cards(run, reference)
    first = [card for card in cards if card["on_console"]]
    if len(cards) <= FEW_CURVES or not first:
        first = cards
    by_step: dict[int, list[dict]] = {}
    for row in run.samples:
        by_step.setdefault(row["step"], []).append(row)
    steps, kl, scores = points(run.metrics, "objective/kl", "objective/scores")
    path = report_charts.path(f"{run.name}/path", kl, scores, steps) if len(set(kl)) > 1 else None
    phases = [name for name in dict.fromkeys(name for row in run.timings for name in row) if name not in NOT_PHASES]
    timed, *seconds = points(run.timings, *phases)
    parts = dict(zip(phases, seconds, strict=True))
    return {
        "id": anchor(run.name),
        "run": run,
        "status": "finished" if run.record else f"not finished: {progress(run)}",
        "counters": {name: run.values(name)[-1] for name in COUNTERS if run.values(name)},
        "path": path,
        "first": first,
        "more": [card for card in cards if card not in first],
        "still": still,
        "samples": {step: by_step[step] for step in spread(list(by_step), SHOWN_STEPS)},
        "sampled_steps": len(by_step),
        "settings": settings(run),
        "phases": phases,
        "seconds": report_charts.stack(f"{run.name}/seconds", timed, parts) if len(parts) > 1 and timed else None,
    }


def curve_cards(run, reference: dict) -> tuple[list[dict], dict[str, float]]:
    """A card for each metric, those of the console line first; and the metrics that never moved."""
    from common.metrics import LABELS, format_value
    from scripts import report_charts
    from scripts.report_files import points

    seen = dict.fromkeys(name for row in run.metrics for name in row)
    entries = run.chapter.entries if run.chapter else ()
    explained = [name for entry in entries for name in seen if entry.explains(name)]
    edges = {name: [name.replace("mean_", edge) for edge in ("min_", "max_")] for name in seen if "mean_" in name}
    edges = {name: low_high for name, low_high in edges.items() if seen.keys() >= set(low_high)}
    elsewhere = {"step", *COUNTERS, *sum(edges.values(), []), *(f"eval_{name}" for name in seen)}
    cards, still = [], {}
    for name in dict.fromkeys([*LABELS, *explained, *seen]):
        steps, values, *low_high = points(run.metrics, name, *edges.get(name, ()))
        if name in elsewhere or not values:
            continue
        held_out = dict(zip(*points(run.metrics, f"eval_{name}"), strict=True))
        if len(values) > 1 and len(set(map(format_value, values))) == 1 and not held_out:
            still[name] = values[0]
            continue
        grey = reference.get("curves", {}).get(f"{run.name}: {name}", [])
        drawn = {"held_out": held_out, "low_high": low_high, "reference": grey}
        chart = report_charts.curve(f"{run.name}/{name}", steps, values, **drawn)
        ends = f"{number(values[0])} → {number(values[-1])}" if len(values) > 1 else number(values[0])
        others = f"{len(reference.get('runs', ()))} reference runs, lowest to highest"
        marks = [("held out", "c2", held_out), ("min to max", "pale", low_high), (others, "grey", grey)]
        card = {"name": name, "chart": chart, "entry": run.chapter and run.chapter.find(name)}
        card["seen"] = seen_elsewhere(reference, run.name, name)
        card["ends"] = ends + (f", held out {number(list(held_out.values())[-1])}" if held_out else "")
        card["legend"] = [(word, colour) for word, colour, there in marks if there]
        cards.append(card | {"on_console": LABELS.get(name, "lr") != "lr"})
    return cards, still


def seen_elsewhere(reference: dict, stage: str, metric: str) -> str:
    """What the reference runs on the same data showed of a metric, in words; "" where there are none."""
    words = []
    for name, whose in ((metric, ""), (f"eval_{metric}", "held out ")):
        if found := reference.get("ranges", {}).get(f"{stage}: {name}"):
            first, last = (number(low) if low == high else f"{number(low)} to {number(high)}" for low, high in found)
            words.append(whose + (first if first == last else f"{first} at first, {last} at the end"))
    return f"{len(reference['runs'])} reference runs: {'; '.join(words)}" if words else ""


def spread(items: list, count: int) -> list:
    """At most `count` of the items, evenly, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def settings(run) -> dict | None:
    """The arguments of a finished run: those that are not the default, and the others; with their help."""
    from scripts.report_files import flags_of

    if not run.record:
        return None
    known = flags_of(ROOT / run.chapter.path.replace("README.md", "train.py")) if run.chapter else {}
    args = {name: value for name, value in run.record.get("args", {}).items() if name not in ("config", "local_rank")}
    order = list(known)
    rows: dict[bool, list] = {True: [], False: []}
    for name in sorted(args, key=lambda name: order.index(name) if name in known else len(order)):
        (words, default), value = known.get(name, ("", None)), args[name]
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        # No default in the help means none or off.
        is_default = str(value) == default or (default == "" and (value is None or value is False))
        rows[not is_default].append((name, shown, default, words))
    return {"changed": rows[True], "default": rows[False], "known": bool(known), "record": run.record}


def glossary(runs: list) -> list[dict]:
    """Of each step that ran, what its chapter says of the metrics and timings it wrote."""
    found = []
    for chapter in dict.fromkeys(run.chapter for run in runs if run.chapter):
        here = [run for run in runs if run.chapter == chapter]
        names = {name for run in here for row in run.metrics + run.timings for name in row} - {"step"}
        entries = [e for e in chapter.entries + chapter.timings if any(e.explains(name) for name in names)]
        unknown = sorted(name for name in names if not any(entry.explains(name) for entry in entries))
        found.append({"chapter": chapter, "entries": entries, "unknown": unknown})
    return found


# ---- answers, time, what is not there


def compared(evaluation) -> dict:
    """Figures and distributions by model, and answers to the same prompts side by side."""
    from scripts import report_charts
    from scripts.report_files import is_number

    labels = [evaluation.label(model) for model in evaluation.models]
    answers, charts = list(evaluation.answers.values()), []
    for column, title in DISTRIBUTIONS.items():
        groups = [[row[column] for row in rows if is_number(row.get(column))] for rows in answers]
        if len({value for group in groups for value in group}) < 2:
            continue
        # A model whose values are all equal would be one bar that dwarfs the others: it is said instead.
        same = [f" (all {number(group[0])})" if len(set(group)) == 1 else "" for group in groups]
        drawn = [[] if said else group for group, said in zip(groups, same, strict=True)]
        chart = report_charts.histogram(f"answers/{column}", drawn)
        charts.append((title, chart, [label + said for label, said in zip(labels, same, strict=True)]))
    pairs = [pair for pair in zip(*answers, strict=False) if len(pair) > 1]
    pairs = [pair for pair in pairs if all(row.get("prompt") == pair[0].get("prompt") for row in pair)]
    gains = {i: [row.get("score") for row in (pair[0], pair[-1])] for i, pair in enumerate(pairs)}
    gains = {i: after - before for i, (before, after) in gains.items() if is_number(before) and is_number(after)}
    order = sorted(gains, key=gains.get)
    names = dict.fromkeys(name for entry in evaluation.models.values() for name in entry if name != "model")
    return {
        "judge": evaluation.judge,
        "labels": labels,
        "charts": charts,
        "table": {name: [entry.get(name) for entry in evaluation.models.values()] for name in names},
        "pairs": {
            f"Side by side: the first {len(pairs[:SHOWN_FIRST])} of {len(pairs)}, not picked": pairs[:SHOWN_FIRST],
            "Those that gained most": [pairs[i] for i in order[::-1] if gains[i] > 0][:SHOWN_EXTREMES],
            "Those that lost most": [pairs[i] for i in order if gains[i] < 0][:SHOWN_EXTREMES],
        },
    }


def clock(out: Path, runs: list) -> list[dict]:
    """Seconds by stage: the whole as the recipe's log has it, cut into the phases of timings.jsonl."""
    from scripts.report_files import is_number
    from scripts.tiny_summary import STAGES

    known, logs = {run.name: run for run in runs}, {file.stem: file for file in (out / "logs").glob("*.seconds")}
    rows = []
    for name in sorted(known | logs, key=lambda name: (list(STAGES).index(name) if name in STAGES else 9, name)):
        phases: dict[str, float] = {}
        for row in known[name].timings if name in known else ():
            for phase, seconds in row.items():
                if phase not in ("step", "time") and is_number(seconds):
                    phases[phase] = phases.get(phase, 0.0) + seconds
        stepped = phases.pop("total", sum(phases.values()))
        try:
            whole = float(logs[name].read_text())
        except (KeyError, ValueError, OSError):
            whole = stepped
        phases = phases or ({"steps": stepped} if stepped else {})
        colours = dict(zip(phases, ("c1", "c2", "c3", "c4") * len(phases), strict=False)) | {"rest": "grey"}
        if whole > sum(phases.values()):
            phases["rest"] = whole - sum(phases.values())
        if whole:
            parts = [(phase, seconds, seconds / whole, colours[phase]) for phase, seconds in phases.items()]
            rows.append({"name": name, "seconds": whole, "parts": parts, "run": known.get(name)})
    return rows


def missing(out: Path, runs: list, evaluation, chapters: list) -> list[str]:
    """What a whole recipe would have left and is not there."""
    found = [f"{run.folder}: no readable stage.json: still running, or stopped" for run in runs if not run.record]
    if runs[0].folder == out:
        return found
    absent = [chapter.title for chapter in chapters if chapter not in [run.chapter for run in runs]]
    found += [f"{title}: no folder of it in {out}" for title in absent]
    if not evaluation:
        command = f"python scripts/evaluate.py --model {out}/sft {out}/rlhf/actor --judge JUDGE"
        found.append(f"No answers before and after; {command} --output {out}/evaluation.json makes them")
    return found


# ---- the page


def number(value, decimals: int | None = None) -> str:
    from common.metrics import format_value
    from scripts.report_files import is_number

    if not is_number(value):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return format_value(value) if decimals is None else f"{value:.{decimals}f}"


def anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "stage"


def text_of(prompt) -> str:
    """A prompt to read: messages with their roles, a lone question without, cut where it is very long."""
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        lines = [f"{message.get('role')}: {message.get('content')}" for message in prompt]
        prompt = "\n".join(lines) if len(prompt) != 1 else prompt[0].get("content")
    prompt = str(prompt)
    rest = len(prompt) - LONGEST
    return prompt if rest <= 0 else f"{prompt[:LONGEST]} ... ({rest} more characters)"


def breakable(text):
    """A path or a name that a narrow column may break at its slashes and underscores."""
    from markupsafe import Markup, escape

    from common.printing import printable

    return Markup(re.sub("[/_]", r"\g<0><wbr>", str(escape(printable(text)))))


def render(page: dict) -> str:
    """The page, from report.html. What comes from files is made harmless here, in one place.

    Control bytes and direction overrides become visible escapes, then all is escaped for HTML; and a policy in the
    page's head lets no script run but the page's own, and nothing be fetched.
    """
    import jinja2

    from common.metrics import format_seconds
    from common.printing import printable

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).resolve().parent),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # a field that a file lacks stays blank
        finalize=lambda value: value if hasattr(value, "__html__") else printable("-" if value is None else value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "text": text_of, "breakable": breakable}
    environment.filters |= {"seconds": format_seconds, "anchor": anchor}
    html = environment.get_template("report.html").render(page)
    script = re.search(r"<script>(.*?)</script>", html, re.S)[1]  # the page's own stands before all text from files
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return html.replace("SCRIPT_HASH", f"sha256-{digest}", 1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
