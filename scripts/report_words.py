"""Did it learn? The report's top box: a headline and sentences, each with a level: good, bad, unclear or plain."""

import math
import time

from common.metrics import format_seconds
from scripts.report_files import Evaluation, Run, is_number

Sentence = tuple[str, str, str]  # level, of whom, what


def verdict(
    runs: list[Run], evaluation: Evaluation | None, shuffled: bool, qualities: list[Sentence]
) -> tuple[str, str, list[Sentence]]:
    """Level, headline and sentences. Only held-out answers before a judge decide; the rest is what training shows.

    qualities: what the judge's rubric found learned and not learned, if there is one.
    """
    if evaluation and evaluation.differences:
        level, headline, sentences = judged(evaluation)
        sentences += qualities
    else:
        level, headline = "unclear", "Not judged yet."
        text = "Below is what training says of itself. Whether answers got better, only a judge can tell."
        sentences = [(level, "", text)]
    if shuffled:
        text = "A coin decided which answers are preferred, on purpose. This run should not learn."
        sentences.insert(0, ("plain", "Negative control", text))
    return level, headline, sentences + [(level, run.title, text) for run in runs for level, text in in_words(run)]


def judged(evaluation: Evaluation) -> tuple[str, str, list[Sentence]]:
    """The last model against the first one."""
    model, difference = list(evaluation.differences.items())[-1]
    first, last = next(iter(evaluation.models.values())), evaluation.models.get(model, {})
    before, after, gain = first.get("score"), last.get("score"), difference.get("score")
    low, high = difference.get("score_interval") or (None, None)
    if not all(map(is_number, (before, after, gain, low, high))):
        return "unclear", "Cannot tell: the judge has no opinion.", []
    level, headline = "unclear", "Cannot tell: the difference is within chance."
    if low > 0:
        level, headline = "good", "Yes. On unseen prompts its answers got better."
    if high < 0:
        level, headline = "bad", "No. On unseen prompts its answers got worse."
    text = f"{evaluation.judge} gave {before:.2f} before and {after:.2f} after: {gain:+.2f}, "
    said = [(level, f"{text}with a 95% interval of {low:+.2f} to {high:+.2f}.")]
    if level == "unclear":
        said.append(("plain", "More --num_samples make the interval narrower."))
    liked, likes, distinct, ended = first.get("reward"), *map(last.get, ("reward", "distinct_responses", "eos_rate"))
    if level == "bad" and is_number(liked) and is_number(likes) and likes > liked:
        text = f"The reward model liked them more, {liked:.2f} before and {likes:.2f} after: over-optimisation."
        said.append(("bad", f"{text} Raise --kl_coef, or train for fewer steps."))
    if is_number(distinct) and distinct < 0.3:
        said.append(("bad", f"Only {distinct:.0%} of the answers differ from one another: it has collapsed."))
    if is_number(ended) and ended < 0.9:
        said.append(("bad", f"Only {ended:.0%} of the answers ended by themselves, the others were cut."))
    return level, headline, [(level, "The judge", text) for level, text in said]


def in_words(run: Run) -> list[tuple[str, str]]:
    """What the metrics of one stage come to."""
    said = []
    scores, accuracies, losses = map(run.values, ("objective/scores", "eval_accuracy", "loss"))
    if scores:
        text = f"In {run.steps} steps the reward of sampled answers went from {scores[0]:.2f} to {scores[-1]:.2f}"
        if kls := run.values("objective/kl"):
            text += f", {kls[-1]:.1f} nats (KL) away from where it started"
        if lengths := run.values("completions/mean_length"):
            text += f"; {lengths[0]:.0f} tokens an answer became {lengths[-1]:.0f}"
        said.append(("plain" if scores[-1] > scores[0] else "unclear", f"{text}."))
    elif accuracies:
        text = f"It puts the better answer first in {accuracies[-1]:.0%} of unseen pairs; a coin would in 50%."
        said.append(("plain" if accuracies[-1] > 0.55 else "bad", text))
    elif losses:
        unseen = run.values("eval_loss")
        text = f"In {run.steps} steps the loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
        text += f", {unseen[-1]:.2f} on unseen data" if unseen else ""
        said.append(("plain" if losses[-1] < losses[0] else "unclear", f"{text}{perplexity(run, unseen or losses)}."))
    for name in dict.fromkeys(name for row in run.metrics for name in row):
        odd = [row["step"] for row in run.metrics if name in row and not is_number(row[name])]
        if odd:
            said.append(("bad", f"{name} was no finite number at {len(odd)} of its steps, first at step {odd[0]}."))
    if not run.record:
        said.append(("unclear", f"Not finished: {progress(run)}."))
    return said


def perplexity(run: Run, losses: list[float]) -> str:
    if not run.values("mean_token_accuracy"):  # the loss of another kind of model
        return ""
    return f": as unsure of each token as between {math.exp(min(losses[-1], 50)):.3g} equally likely ones"


def progress(run: Run) -> str:
    """How far a run that has not finished has come."""
    if not run.metrics:
        return "no step has been written yet"
    ends = [row["time"] for row in run.timings if is_number(row.get("time"))]
    when = f", {format_seconds(max(0, time.time() - ends[-1]))} before this page was made" if ends else ""
    return f"step {run.steps} is the last one written{when}"
