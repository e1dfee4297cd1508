"""What looks wrong in prepared data: a tally of the rows of one file, and the warnings that tallies give.

A warning is one line: where, the numbers, and what to do. Lengths are of all rows of a file; the rest is counted over
a sample of them. All of it reads text only, but for what the caller has counted in tokens.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from step0_data.split import opening_of

FEW_TRAIN = 64  # one RL step of step 3, eight steps of steps 1 and 2, at their defaults
FEW_EVAL = 25  # an accuracy measured on 25 rows is known to within 0.2 at best
LENGTH_RATIO = 1.5  # chosen against rejected: half as long again
LENGTH_SHARE = 0.7  # of pairs: where "take the longer" is that good, a reward model needs nothing else to look trained
LENGTH_Z = 3.0  # standard errors from a fair coin; beyond it in one of 370 sets by chance
LEAK_CHARS = 20  # a shorter answer ("yes", "Paris", "12") stands in many prompts by right
LEAK_SHARE = 0.05  # of rows; "correct this sentence" asks for a copy now and then (Alpaca: 0.3 %)
SHORT_LEAK_SHARE = 0.5  # of rows, for short reference answers; by chance 6 % of GSM8K's numbers stand in the question
LABELS = 20  # as few different reference answers are labels ("A", "positive"), which prompts list
SAME_SHARE = 0.01  # of pairs that differ in white space or case only: such a pair teaches nothing
REPEAT_SHARE = 0.05  # of answers that are one and the same text: it is learned by heart, whatever is asked
ALIKE_SHARE = 0.5  # of rows that open alike: they go to one side, so the sides are far from the shares asked for
FEW_OPENINGS = 20  # to be dealt out; fewer than a fifth of the rows, or each row would be its own
OPENING_SHARE = 0.25  # of answers that begin with the same words
OPENING_RATIO = 0.5  # of the other side's answers with that opening to this side's: above it, it gives little away
OPENING_WORDS = 5  # "I am sorry, but I"; a Chinese character counts as a word
DIALOGUE_SHARE = 0.02  # of answers with a turn marker inside: enough for a model to learn to speak for the user
DIALOGUE_PROMPT_SHARE = 0.1  # of prompts, which quote dialogues more often
DIALOGUE_TEXT_SHARE = 0.5  # of pretraining texts: then they are conversations that a template has been through
CUT_SHARE = 0.1  # of rows over a stage's default length
LONG_ANSWER_SHARE = 0.5  # of answers over what step 3 samples by default
ASIDE_SHARE = 0.01  # of rows the chat template or the stage cannot use
AT_LEAST = 5  # rows, for any of these shares: fewer are an accident
SEARCHED = 100_000  # characters of a text: of a longer one only the beginning is looked at

# The stages' own defaults (a test holds them to their parsers), and what step 3 samples at most.
LIMITS = {
    "sft": (1024, "step 1 cuts conversations at --max_length 1024: raise it, or leave long rows out"),
    "preference": (1024, "step 2 cuts answers at --max_length 1024: raise it, or leave long rows out"),
    "prompts": (512, "step 3 drops the oldest turns over --max_prompt_length 512, then the row: raise it"),
}
MAX_COMPLETION_LENGTH = 256

_MARKER = re.compile(
    r"^[ \t]*(Human|User|Assistant|### ?Instruction|### ?Response|### ?Human|### ?Assistant|用户|助手|人类)[ \t]*[:：]"
    r"|<\|(im_start|im_end|eot_id|start_header_id|user|assistant|end|endoftext)\|>|\[/?INST\]|<(start|end)_of_turn>|</s>\s*\Z",
    re.MULTILINE,
)
_CJK = "\u3040-\u30ff\u3400-\u9fff"  # Japanese syllables, Chinese characters: written without spaces
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


@dataclass
class Tally:
    """What was counted in one file. Texts are called answer (sft), chosen and rejected, or text (pretrain)."""

    stage: str
    part: str
    rows: int = 0
    characters: dict[str, np.ndarray] = field(default_factory=dict)  # of each prompt, answer, ...: (rows,)
    sampled: int = 0
    repeats: dict[str, Counter] = field(default_factory=dict)  # text: (fingerprint, its beginning)
    openings: dict[str, Counter] = field(default_factory=dict)
    references: Counter = field(default_factory=Counter)  # the `answer` column of prompts
    first_turns: Counter = field(default_factory=Counter)  # what the split goes by, as fingerprints
    first_words: dict[bytes, str] = field(default_factory=dict)  # the user's, of each of these
    found: Counter = field(default_factory=Counter)  # what else was met, by name
    tokenised: int = 0  # rows tried with a tokenizer
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of each prompt, answer, ...
    cut: int = 0  # rows over the stage's default length
    set_aside: Counter = field(default_factory=Counter)  # why the stage cannot use a row

    @property
    def name(self) -> str:
        return f"{self.stage}/{self.part}"

    def add(self, row: dict) -> None:
        """Counts one row of the sample."""
        self.sampled += 1
        prompt, texts = parts_of(self.stage, row)
        prompt = [m | {"content": m["content"][:SEARCHED]} for m in prompt]
        texts = {name: text[:SEARCHED] for name, text in texts.items()}
        asked = _squeeze("\n".join(m["content"] for m in prompt if m["role"] != "assistant"))
        for name, text in texts.items():
            fingerprint = hashlib.sha256(text.encode()).digest()[:8], " ".join(text[:60].split())
            self.repeats.setdefault(name, Counter())[fingerprint] += 1
            words = list(_WORD.finditer(text[:200]))[:OPENING_WORDS]
            opening = " ".join(text[: words[-1].end()].split()) if words else ""
            self.openings.setdefault(name, Counter())[opening] += 1
        what = "text" if self.stage == "pretrain" else "answer"
        self.found[f"dialogue in {what}"] += any(_MARKER.search(text) for text in texts.values())
        if self.stage == "pretrain":
            return
        first = next(m["content"] for m in prompt if m["role"] == "user")
        key = hashlib.sha256(opening_of(prompt).encode()).digest()[:8]
        self.first_turns[key] += 1
        self.first_words.setdefault(key, " ".join(first[:60].split()))
        better = texts.get("chosen", texts.get("answer"))
        if better is not None and len(better.strip()) >= LEAK_CHARS and _squeeze(better) in asked:
            self.found["leak"] += 1
        last = _squeeze(prompt[-1]["content"])
        self.found["repeated"] += len(last) >= LEAK_CHARS and any(
            len(text) > len(last) and _squeeze(text).startswith(last) for text in texts.values()
        )
        if self.stage == "prompts" and row.get("answer") is not None:
            # GSM8K's answers are the worked solution with the number at the end.
            reference = _squeeze(str(row["answer"]).rpartition("####")[2])
            self.references[hashlib.sha256(reference.encode()).digest()[:8]] += 1
            self.found["reference"] += bool(reference) and _stands_in(reference, asked)
            self.found["long reference"] += len(reference) >= LEAK_CHARS and reference in asked
        if "rejected" in texts:
            self.found["same"] += len({"".join(text.split()).casefold() for text in texts.values()}) == 1
        self.found["dialogue in prompt"] += any(_MARKER.search(m["content"]) for m in prompt)


def parts_of(stage: str, row: dict) -> tuple[list[dict], dict[str, str]]:
    """(the prompt's messages, {name of a text: text}) of a row."""
    if stage == "pretrain":
        return [], {"text": row["text"]}
    if stage == "sft":
        return row["messages"][:-1], {"answer": row["messages"][-1]["content"]}
    sides = [name for name in ("chosen", "rejected") if stage == "preference"]
    return row["prompt"], {name: "\n".join(m["content"] for m in row[name]) for name in sides}


# The warnings --------------------------------------------------------------------------------------------------------


def warnings(tallies: Iterable[Tally]) -> list[str]:
    """One line for each thing that looks wrong. A stage's train part speaks for both, where it has rows."""
    files = {tally.name: tally for tally in tallies if tally.rows}
    stages = list(dict.fromkeys(tally.stage for tally in files.values()))
    rows = {name: tally.rows for name, tally in files.items()}
    sizes = {stage: (rows.get(f"{stage}/train", 0), rows.get(f"{stage}/eval", 0)) for stage in stages}
    alike = {}
    for stage in stages:
        told = _of_first_turns([files[name] for part in ("train", "eval") if (name := f"{stage}/{part}") in files])
        alike |= {stage: told} if told else {}
    lines = [*_of_sizes(sizes, alike), *(f"{stage}: {told}" for stage, told in alike.items())]
    for stage in stages:
        tally = files.get(f"{stage}/train") or files[f"{stage}/eval"]
        for check in (_of_length, _of_same, _of_leaks, _of_repeats, _of_openings, _of_dialogues, _of_tokens):
            lines += [f"{tally.name}: {line}" for line in check(tally)]
    return lines


def _of_first_turns(tallies: list[Tally]) -> str | None:
    """Of one stage: rows that open alike go to one side together, which no --eval_fraction can part."""
    turns = sum((tally.first_turns for tally in tallies), Counter())
    rows, different = turns.total(), len(turns)
    if rows < AT_LEAST:
        return None
    most, times = turns.most_common(1)[0]
    side = max(tallies, key=lambda tally: tally.first_turns[most])
    words = _quote(side.first_words[most])
    if times >= ALIKE_SHARE * rows:
        who = f"all {rows:,} rows" if different == 1 else f"{times:,} of {rows:,} rows ({times / rows:.1%})"
        told = f"{who} open alike, with {words}"
    elif different < FEW_OPENINGS and rows >= 5 * different:
        told = f"{rows:,} rows have only {different} different openings, most often {words}"
    else:
        return None
    alone = "and no row to the other" if len(tallies) == 1 else "whatever --eval_fraction says"
    return (
        f"{told}; rows with the same first turns go to one stage and to one side, here {side.part}, {alone}: take the "
        "turns that rows share out of them, or add rows that open otherwise"
    )


def _of_sizes(sizes: dict[str, tuple[int, int]], alike: Mapping[str, str]) -> Iterator[str]:
    """`sizes`: the rows of train and of eval of each stage. `alike`: the stages whose rows cannot be dealt out."""
    if untrained := [stage for stage, (train, _) in sizes.items() if not train and stage not in alike]:
        yield f"{', '.join(untrained)}: all rows fell into eval; more rows, or a smaller --eval_fraction, feed train"
    if few := [f"{stage} {train}" for stage, (train, _) in sizes.items() if 0 < train < FEW_TRAIN]:
        yield (
            f"train has few rows ({', '.join(few)}): enough to see it run, too few to learn from; add sources, or "
            "change the shares of --split"
        )
    judged = {stage: held_out for stage, (_, held_out) in sizes.items() if stage not in ("pretrain", *alike)}
    if unjudged := [stage for stage, held_out in judged.items() if not held_out]:
        yield (
            f"{', '.join(unjudged)}: no row is kept for evaluation, so nothing will tell learning from learning by "
            "heart; more rows, or a larger --eval_fraction, help"
        )
    if few := {stage: held_out for stage, held_out in judged.items() if 0 < held_out < FEW_EVAL}:
        told = ", ".join(f"{stage} {held_out}" for stage, held_out in few.items())
        yield (
            f"eval has few rows ({told}): an accuracy measured on {min(few.values())} is uncertain by "
            f"{0.98 / math.sqrt(min(few.values())):.2f} either way; more rows, or a larger --eval_fraction, help"
        )


def _of_length(tally: Tally) -> Iterator[str]:
    if "rejected" not in tally.characters:
        return
    chosen, rejected = tally.characters["chosen"], tally.characters["rejected"]
    longer, shorter = int((chosen > rejected).sum()), int((chosen < rejected).sum())
    n = longer + shorter
    if not n:
        return
    z = (longer - n / 2) / math.sqrt(n / 4)
    what, share = ("longer", longer / n) if z > 0 else ("shorter", shorter / n)
    long, short = (chosen, rejected) if z > 0 else (rejected, chosen)
    # The mean alone could be the work of one huge row: most pairs have to point the same way.
    if abs(z) >= LENGTH_Z and (share >= LENGTH_SHARE or long.mean() >= LENGTH_RATIO * short.mean()):
        yield (
            f"chosen is the {what} answer in {share:.0%} of {n:,} pairs of unequal length (z = {z:.1f}), on average "
            f"{chosen.mean():,.0f} against {rejected.mean():,.0f} characters; a reward model can learn length instead "
            "of quality and step 3 will follow it: balance the pairs by length, or give step 3 a second --reward, a "
            "function against length"
        )


def _of_same(tally: Tally) -> Iterator[str]:
    if _is_many(tally.found["same"], tally.sampled, SAME_SHARE):
        yield (
            f"chosen and rejected differ only in white space or case in {_of(tally, tally.found['same'], 'pairs')}; "
            "such pairs teach noise: remove them, or look at how the file was made"
        )


def _of_leaks(tally: Tally) -> Iterator[str]:
    if _is_many(tally.found["leak"], tally.sampled, LEAK_SHARE):
        which = "the chosen answer" if tally.stage == "preference" else "the answer"
        yield (
            f"{which} stands word for word in its prompt in {_of(tally, tally.found['leak'], 'rows')}; unless the task "
            "is to copy, the prompt was cut in the wrong place: look at rows in preview.md"
        )
    if _is_many(tally.found["repeated"], tally.sampled, LEAK_SHARE):
        yield (
            f"the answer begins with its own prompt in {_of(tally, tally.found['repeated'], 'rows')}; the model would "
            "learn to repeat the question: take it off the answers, or leave the prompt column out of pairs"
        )
    long, any_length = tally.found["long reference"], tally.found["reference"]
    is_label = len(tally.references) <= LABELS
    if _is_many(long, tally.sampled, LEAK_SHARE) or (
        not is_label and _is_many(any_length, tally.sampled, SHORT_LEAK_SHARE)
    ):
        yield (
            f"the column `answer` stands in the prompt in {_of(tally, max(long, any_length), 'rows')}, so step 3 would "
            "reward reading it off; right only where the prompt lists the choices: look at rows in preview.md"
        )


def _of_repeats(tally: Tally) -> Iterator[str]:
    for name, counter in tally.repeats.items():
        (_, beginning), times = counter.most_common(1)[0]
        if _is_many(times, tally.sampled, REPEAT_SHARE):
            yield (
                f"{_of(tally, times, f'{_text(name)}s')} are one and the same, {_quote(beginning)}; unless it is a "
                "label, the model learns it by heart: remove most copies"
            )


def _of_openings(tally: Tally) -> Iterator[str]:
    for name, counter in tally.openings.items():
        opening, times = counter.most_common(1)[0]
        if name == "text" or not _is_many(times, tally.sampled, OPENING_SHARE):
            continue
        told = f"{_of(tally, times, f'{_text(name)}s')} begin with {_quote(opening)}"
        if name == "answer":
            yield f"{told}; a refusal or a writer's habit would be learned for all questions: look at them"
            continue
        other = "rejected" if name == "chosen" else "chosen"
        against = tally.openings[other][opening]
        if against <= OPENING_RATIO * times:
            yield (
                f"{told}, and {against:,} {other} ones; a reward model can go by the first words alone: look at them, "
                "and take some of them out"
            )


def _of_dialogues(tally: Tally) -> Iterator[str]:
    shares = {"answer": DIALOGUE_SHARE, "prompt": DIALOGUE_PROMPT_SHARE, "text": DIALOGUE_TEXT_SHARE}
    for what, share in shares.items():
        times = tally.found[f"dialogue in {what}"]
        if not _is_many(times, tally.sampled, share):
            continue
        told = f"{_of(tally, times, 'rows')} have a turn marker (Human:, [INST], </s> or the like) inside the "
        if what == "text":
            yield (
                f"{told}text: these are dialogues, and here they serve as pretraining text only, not for steps 1 to 3; "
                "give the turns as messages"
            )
        else:
            yield (
                f"{told}{what}: probably a dialogue that was not taken apart, and the model would learn to write the "
                "user's turns; give the turns as messages"
            )


def _of_tokens(tally: Tally) -> Iterator[str]:
    aside = tally.set_aside.total()
    if _is_many(aside, tally.tokenised, ASIDE_SHARE):
        reason, times = tally.set_aside.most_common(1)[0]
        yield (
            f"the stage will set aside {_of(tally, aside, 'rows', tally.tokenised)} with this chat template ({times} "
            f"of them: {reason}); take another template or model, or repair the rows"
        )
    if tally.stage in LIMITS and _is_many(tally.cut, tally.tokenised, CUT_SHARE):
        yield f"{_of(tally, tally.cut, 'rows', tally.tokenised)} are too long; {LIMITS[tally.stage][1]}"
    answers = tally.tokens.get("answer", [])
    long = sum(n > MAX_COMPLETION_LENGTH for n in answers)
    if _is_many(long, len(answers), LONG_ANSWER_SHARE):
        yield (
            f"{_of(tally, long, 'answers', len(answers))} are longer than the {MAX_COMPLETION_LENGTH} tokens that step "
            "3 samples; a model that learned them seldom ends in time there: raise --max_completion_length"
        )


def _is_many(count: int, of: int, share: float) -> bool:
    return count >= AT_LEAST and count >= share * of


def _of(tally: Tally, count: int, noun: str, total: int | None = None) -> str:
    total = tally.sampled if total is None else total
    return f"{count:,} of {total:,} {'sampled ' if total < tally.rows else ''}{noun} ({count / total:.1%})"


def _text(name: str) -> str:
    return f"{name} answer" if name in ("chosen", "rejected") else name


def _quote(text: str) -> str:
    return '"' + "".join(c if c.isprintable() else " " for c in text) + '"'


def _squeeze(text: str) -> str:
    return " ".join(text.split()).casefold()


def _stands_in(reference: str, text: str) -> bool:
    """As a word of its own: 12 does not stand in 1,200."""
    return re.search(rf"(?<![0-9a-z.,]){re.escape(reference)}(?![a-z]|[.,]?[0-9])", text) is not None
