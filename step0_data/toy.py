"""The built-in sets `tiny` and `tiny_zh`: templated dialogues, a gold rubric to tick off by hand, a noisy rater.

Each set has its own language and its own tables (`toy_en.py`, `toy_zh.py`); composing and scoring are the same and are
here. Thirty-four topics in four kinds, times four questions a kind, make 136 prompts. An answer is put together from
qualities that are drawn independently of each other: a polite or rude opening, the right topic or another one, a useful
or a lazy body, a closing line, a repetition. `gold` knows the rubric and is only ever used to measure. The reward model
of step 2 sees no score, only which of two answers a noisy rater preferred; whether its score (the proxy) and `gold`
rise together under RL is what these sets let you watch.

Everything here is pure Python and a function of its arguments: the same seed gives the same text on every machine.
Where a function takes `lang`, that is a module of tables.
"""

import functools
import hashlib
import math
import random
import re
from collections.abc import Sequence
from types import ModuleType

from common.errors import UserError
from step0_data import toy_en, toy_zh

SETS = {"tiny": toy_en, "tiny_zh": toy_zh}  # the name for --dataset: the tables

# How often an answer has a quality. Openings: polite, rude, else none. Repetition is drawn for useful bodies only.
P_POLITE, P_RUDE, P_OFF_TOPIC, P_LAZY, P_REPEATED, P_CLOSING = 0.45, 0.30, 0.25, 0.30, 0.30, 0.45
RATER_SHARPNESS = 3.0  # P(first preferred) = sigmoid(3 * (gold(first) - gold(second)))

SFT_ROWS, SFT_EVAL_ROWS = 5700, 300
PAIRS, EVAL_PAIRS = 4000, 400


# Prompts --------------------------------------------------------------------------------------------------------------


def is_unseen(topic: str, question: str, lang: ModuleType = toy_en) -> bool:
    """True for one (topic, question template) pair in five, by a stable hash: the same pairs for every seed."""
    digest = hashlib.sha256(f"{lang.SPLIT_SALT}|{topic}|{question}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 5 == 0


def all_prompts(lang: ModuleType = toy_en) -> list[tuple[str, str, str, bool]]:
    """(kind, topic, question text, unseen) for the 136 prompts, in a fixed order."""
    return [
        (kind, topic, question.format(topic=topic), is_unseen(topic, question, lang))
        for kind in lang.TOPICS
        for topic in lang.TOPICS[kind]
        for question in lang.QUESTIONS[kind]
    ]


# Answers --------------------------------------------------------------------------------------------------------------


def compose_answer(rng: random.Random, kind: str, topic: str, lang: ModuleType = toy_en) -> str:
    """One answer with independently drawn qualities."""
    draw = rng.random()
    opening = rng.choice(lang.POLITE) if draw < P_POLITE else rng.choice(lang.RUDE) if draw < P_POLITE + P_RUDE else ""
    if rng.random() < P_OFF_TOPIC:
        topic = rng.choice([other for other in lang.TOPICS[kind] if other != topic])
    lazy = rng.random() < P_LAZY
    body = rng.choice(lang.LAZY if lazy else lang.USEFUL[kind]).format(topic=topic)
    repetition = body if not lazy and rng.random() < P_REPEATED else ""
    closing = rng.choice(lang.CLOSINGS) if rng.random() < P_CLOSING else ""
    return lang.SPACE.join(part for part in (opening, body, repetition, closing) if part)


def noisy_rater(rng: random.Random, question: str, first: str, second: str) -> bool:
    """True when the rater prefers the first answer. Clear differences are mostly judged right, near ties are a coin."""
    difference = gold_score(question, first) - gold_score(question, second)
    return rng.random() < 1.0 / (1.0 + math.exp(-RATER_SHARPNESS * difference))


def sft_rows(seed: int, n: int, unseen: bool = False, lang: ModuleType = toy_en) -> list[dict]:
    rng = random.Random(
        f"sft/{unseen}/{seed}"
    )  # a str seed goes through SHA-512: stable across machines, unlike hash()
    pool = [p for p in all_prompts(lang) if p[3] == unseen]
    rows = []
    for _ in range(n):
        kind, topic, question, _ = rng.choice(pool)
        rows.append({"messages": [_user(question), _assistant(compose_answer(rng, kind, topic, lang))]})
    return rows


def preference_rows(seed: int, n: int, unseen: bool = False, lang: ModuleType = toy_en) -> list[dict]:
    rng = random.Random(f"preference/{unseen}/{seed}")
    pool = [p for p in all_prompts(lang) if p[3] == unseen]
    rows = []
    while len(rows) < n:
        kind, topic, question, _ = rng.choice(pool)
        first, second = compose_answer(rng, kind, topic, lang), compose_answer(rng, kind, topic, lang)
        if gold_score(question, first) == gold_score(question, second):
            continue  # nothing to prefer: draw again
        chosen, rejected = (first, second) if noisy_rater(rng, question, first, second) else (second, first)
        rows.append({"prompt": [_user(question)], "chosen": [_assistant(chosen)], "rejected": [_assistant(rejected)]})
    return rows


def prompt_rows(unseen: bool = False, lang: ModuleType = toy_en) -> list[dict]:
    return [{"prompt": [_user(question)]} for _, _, question, is_eval in all_prompts(lang) if is_eval == unseen]


def make_tiny(seed: int, names: Sequence[str] = ("tiny",)) -> dict[str, dict[str, list[dict]]]:
    """{stage: {"train": rows, "eval": rows}}. Train prompts serve every stage, the unseen ones only the eval files.

    Of several sets, each gives the rows that it has by itself, in turns: half of every file is in each language.
    """
    made = [_make_set(seed, SETS[name]) for name in names]
    return {
        stage: {
            part: [row for turn in zip(*(m[stage][part] for m in made), strict=True) for row in turn] for part in parts
        }
        for stage, parts in made[0].items()
    }


def _make_set(seed: int, lang: ModuleType) -> dict[str, dict[str, list[dict]]]:
    return {
        "sft": {"train": sft_rows(seed, SFT_ROWS, False, lang), "eval": sft_rows(seed, SFT_EVAL_ROWS, True, lang)},
        "preference": {
            "train": preference_rows(seed, PAIRS, False, lang),
            "eval": preference_rows(seed, EVAL_PAIRS, True, lang),
        },
        "prompts": {"train": prompt_rows(False, lang), "eval": prompt_rows(True, lang)},
    }


def vocab_size(names: Sequence[str]) -> int:
    """4 special pieces, 256 bytes, the rest words and parts of words: the same number for each language."""
    return 260 + 470 * len(names)


def tokenizer_texts(seed: int, names: Sequence[str] = ("tiny",)) -> list[str]:
    """What the tiny tokenizer is trained on: the SFT text, with the words the chat template puts before each turn.

    Its few pieces go where they matter. Topics are added until each word of them is one piece: whether an answer names
    the topic is then the same token again, which a model this small can see. Answers count three times as much as
    questions, so that they fit into 40 tokens.
    """
    texts = []
    for lang in (SETS[name] for name in names):
        rows = [[m["content"] for m in row["messages"]] for row in sft_rows(seed, SFT_ROWS, lang=lang)]
        topics = " ".join(topic for kind in lang.TOPICS.values() for topic in kind)
        whole = [f"Assistant: {answer}" for _, answer in rows]
        whole += [f"Human: {question}" for question, _ in rows[::3]] + [f" {topics}"] * 300
        if lang.SPACE:
            texts += whole
        else:  # where no space tells words apart, cutting does: else a topic would grow together with its neighbours
            cut = re.compile(f"({'|'.join(_topic_of_word(lang))}| )")
            texts += [part for text in whole for part in cut.split(text) if part]
    return texts


# The rubric -----------------------------------------------------------------------------------------------------------

# part: (points, what earns them). A perfect answer (on topic, polite, with a closing) scores 1.5 + 1 + 0.75 = 3.25.
RUBRIC = {
    "on_topic": (1.5, "the last word of the question's topic (in Chinese: the topic) is named"),
    "off_topic": (-0.5, "it is not"),
    "polite": (1.0, "the first sentence is a polite opening"),
    "rude": (-1.5, "the first sentence is a rude opening"),
    "lazy": (-1.0, "a lazy sentence occurs"),
    "closing": (0.75, "the last sentence is a closing line"),
    "repeated": (-0.5, "for each sentence that was said before"),
    "long": (-0.25, "for each sentence beyond four"),
    "unfinished": (-1.0, "the answer was cut off, or does not end in . ! or ? (。！？)"),
}
PERFECT = sum(RUBRIC[part][0] for part in ("on_topic", "polite", "closing"))


@functools.cache
def _topic_of_word(lang: ModuleType) -> dict[str, str]:
    return {topic.split()[-1]: topic for kind in lang.TOPICS.values() for topic in kind}


@functools.cache
def _topic_words(lang: ModuleType) -> re.Pattern:
    return re.compile(f"{lang.WORD_EDGE}({'|'.join(_topic_of_word(lang))}){lang.WORD_EDGE}", re.IGNORECASE)


@functools.cache
def _fixed(lang: ModuleType) -> dict[str, set[str]]:
    """The sentences that make an answer polite, rude, lazy or closed, as `split_sentences` gives them."""
    groups = {"polite": lang.POLITE, "rude": lang.RUDE, "lazy": lang.LAZY, "closing": lang.CLOSINGS}
    return {part: {sentence.lower() for sentence in group} for part, group in groups.items()}


def split_sentences(answer: str, lang: ModuleType = toy_en) -> list[str]:
    """Sentences in lower case, white space as the language has it; the last one may be unfinished."""
    ends = lang.SENTENCE_ENDS
    found = re.findall(f"[^{ends}]*[{ends}]+|[^{ends}]+$", answer)
    return [s for s in (lang.SPACE.join(sentence.split()).lower() for sentence in found) if s]


def topic_of(question: str) -> tuple[ModuleType, str]:
    """The language of a question of these sets, and the topic that it asks about: the last one it names."""
    found = [(m.end(), lang, m[1]) for lang in SETS.values() for m in _topic_words(lang).finditer(question)]
    if not found:
        raise UserError(f"gold knows the tiny sets' topics only, finds none in {question[:80]!r}; bring another judge")
    _, lang, word = max(found, key=lambda it: it[0])
    return lang, _topic_of_word(lang)[word.lower()]


def rubric_counts(question: str, answer: str, finished: bool = True) -> dict[str, int]:
    """How often each part of the rubric applies: the ticks, before the points. The question decides the language.

    finished: False for an answer that a length limit cut off.
    """
    lang, topic = topic_of(question)
    sentences, fixed = split_sentences(answer, lang), _fixed(lang)
    first, last = (sentences[0], sentences[-1]) if sentences else ("", "")
    named = topic.split()[-1] in {word.lower() for word in _topic_words(lang).findall(answer)}
    return {
        "on_topic": int(named),
        "off_topic": int(not named),
        "polite": int(first in fixed["polite"]),
        "rude": int(first in fixed["rude"]),
        "lazy": int(any(s in fixed["lazy"] for s in sentences)),
        "closing": int(last in fixed["closing"]),
        "repeated": len(sentences) - len(set(sentences)),
        "long": max(0, len(sentences) - 4),
        "unfinished": int(not finished or not answer.rstrip().endswith(tuple(lang.SENTENCE_ENDS))),
    }


def gold_score(question: str, answer: str, finished: bool = True) -> float:
    """The rubric's score of one answer: points times ticks."""
    return sum(RUBRIC[part][0] * count for part, count in rubric_counts(question, answer, finished).items())


def on_topic(prompt: str | Sequence[dict], completion: str | Sequence[dict]) -> bool:
    """Whether the completion names the last word of the prompt's topic."""
    return bool(rubric_counts(_text(prompt, "user"), _text(completion, "assistant"))["on_topic"])


def gold(
    prompts: Sequence, completions: Sequence, *, truncated: Sequence[bool] | None = None, **columns
) -> list[float]:
    """The gold score as a reward function of TRL's signature. It measures; no stage trains on it.

    prompts, completions: lists of message lists, or of strings. truncated: where the caller knows which answers a
    length limit cut off; those count as unfinished even if they happen to stop after a full stop. Without it, an
    answer is unfinished when it does not end as a sentence does. Other columns are ignored.
    """
    if len(prompts) != len(completions):
        raise UserError(f"gold wants as many completions as prompts, got {len(completions)} and {len(prompts)}")
    cut = [False] * len(prompts) if truncated is None else truncated
    return [
        gold_score(_text(p, "user"), _text(c, "assistant"), not t)
        for p, c, t in zip(prompts, completions, cut, strict=True)
    ]


def oracle_accuracy(rows: Sequence[dict]) -> float:
    """Share of pairs whose chosen answer has the higher gold score (a tie counts half): the ceiling of step 2."""
    credit = 0.0
    for row in rows:
        better, worse = gold([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
        credit += 1.0 if better > worse else 0.5 if better == worse else 0.0
    return credit / len(rows)


def _text(value: str | Sequence[dict], role: str) -> str:
    """The last message of that role, or the string itself."""
    if isinstance(value, str):
        return value
    return next((m["content"] for m in reversed(value) if m["role"] == role), "")


def _user(content: str) -> dict:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}
