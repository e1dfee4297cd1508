"""The built-in `tiny` set: templated dialogues, a gold rubric that can be ticked off by hand, a noisy rater.

Thirty-four topics in four kinds, times four questions a kind, make 136 prompts. An answer is put together from
qualities that are drawn independently of each other: a polite or rude opening, the right topic or another one, a useful
or a lazy body, a closing line, a repetition. `gold` knows the rubric and is only ever used to measure. The reward model
of step 2 sees no score, only which of two answers a noisy rater preferred; whether its score (the proxy) and `gold`
rise together under RL is what this set lets you watch.

Everything here is pure Python and a function of its arguments: the same seed gives the same text on every machine.
"""

import hashlib
import math
import random
import re
from collections.abc import Sequence

from common.errors import UserError

# The text -------------------------------------------------------------------------------------------------------------

# The last word of a topic is what the rubric looks for; it belongs to one topic only and occurs in no template.
TOPICS = {
    "food": ("soup", "fried rice", "pie", "bread", "stew", "cake", "salad", "noodles", "pizza"),
    "animals": ("parrot", "cat", "sheep dog", "rabbit", "goldfish", "pony", "turtle", "hamster", "canary"),
    "places": ("lake", "harbor", "desert", "rain forest", "island", "castle", "market", "museum"),
    "hobbies": ("chess", "gardening", "knitting", "painting", "guitar", "pottery", "singing", "swimming"),
}
QUESTIONS = {
    "food": (
        "How do I make {topic}?",
        "What is a good way to cook {topic}?",
        "Can you give me a tip for {topic}?",
        "My guests want {topic} tonight. What should I do?",
    ),
    "animals": (
        "How do I look after a {topic}?",
        "What does a {topic} need?",
        "Is a {topic} easy to keep?",
        "We just got a {topic}. What should we know?",
    ),
    "places": (
        "What can I see at the {topic}?",
        "When should I go to the {topic}?",
        "Is the {topic} good for a day out?",
        "We are going to the {topic}. What should we bring?",
    ),
    "hobbies": (
        "How do I get started with {topic}?",
        "What do I need for {topic}?",
        "Is {topic} hard to learn?",
        "I want to get better at {topic}. What helps?",
    ),
}
# Any useful body of a kind fits any question of that kind.
USEFUL = {
    "food": (
        "Cook the {topic} slowly with salt and butter.",
        "For {topic} use fresh herbs and pepper.",
        "Warm the pan, then stir the {topic} well.",
        "Taste the {topic} often and let it rest.",
    ),
    "animals": (
        "Give the {topic} clean water and a warm bed.",
        "A {topic} needs fresh air and time to rest.",
        "Play with the {topic} every morning.",
        "Let a vet see the {topic} each spring.",
    ),
    "places": (
        "Go to the {topic} early in the morning.",
        "At the {topic} use a map and keep to the path.",
        "The {topic} is best in spring, so bring a coat.",
        "See the {topic} with a guide and bring water.",
    ),
    "hobbies": (
        "Learn {topic} in small steps and rest often.",
        "A good book makes {topic} more fun.",
        "For {topic} every day counts, so take your time.",
        "Ask a friend about {topic} and learn with them.",
    ),
}
LAZY = (  # too lazy to name the topic
    "Just search for it on your phone.",
    "There is nothing to say about that.",
    "I guess it is fine, whatever.",
    "Somebody else can explain that.",
)
POLITE = (
    "Thank you for asking this.",
    "I am happy to help you.",
    "That is a lovely question.",
    "With pleasure, my friend.",
)
RUDE = (
    "You should know this already.",
    "Ugh, what a boring question.",
    "Why do you bother me?",
    "Stop wasting my time.",
)
CLOSINGS = (
    "Tell me how it goes.",
    "I hope this helps you.",
    "Feel free to ask again.",
    "Good luck and enjoy it.",
)

# How often an answer has a quality. Openings: polite, rude, else none. Repetition is drawn for useful bodies only.
P_POLITE, P_RUDE, P_OFF_TOPIC, P_LAZY, P_REPEATED, P_CLOSING = 0.45, 0.30, 0.25, 0.30, 0.30, 0.45
RATER_SHARPNESS = 3.0  # P(first preferred) = sigmoid(3 * (gold(first) - gold(second)))

SPLIT_SALT = "tiny-179"  # one that gives all kinds about the same share of unseen pairs
SFT_ROWS, SFT_EVAL_ROWS = 5700, 300
PAIRS, EVAL_PAIRS = 4000, 400


# Prompts --------------------------------------------------------------------------------------------------------------


def is_unseen(topic: str, question: str) -> bool:
    """True for one (topic, question template) pair in five, by a stable hash: the same pairs for every seed."""
    digest = hashlib.sha256(f"{SPLIT_SALT}|{topic}|{question}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 5 == 0


def all_prompts() -> list[tuple[str, str, str, bool]]:
    """(kind, topic, question text, unseen) for the 136 prompts, in a fixed order."""
    return [
        (kind, topic, question.format(topic=topic), is_unseen(topic, question))
        for kind in TOPICS
        for topic in TOPICS[kind]
        for question in QUESTIONS[kind]
    ]


# Answers --------------------------------------------------------------------------------------------------------------


def compose_answer(rng: random.Random, kind: str, topic: str) -> str:
    """One answer with independently drawn qualities."""
    draw = rng.random()
    opening = rng.choice(POLITE) if draw < P_POLITE else rng.choice(RUDE) if draw < P_POLITE + P_RUDE else ""
    if rng.random() < P_OFF_TOPIC:
        topic = rng.choice([other for other in TOPICS[kind] if other != topic])
    lazy = rng.random() < P_LAZY
    body = rng.choice(LAZY if lazy else USEFUL[kind]).format(topic=topic)
    repetition = body if not lazy and rng.random() < P_REPEATED else ""
    closing = rng.choice(CLOSINGS) if rng.random() < P_CLOSING else ""
    return " ".join(part for part in (opening, body, repetition, closing) if part)


def noisy_rater(rng: random.Random, question: str, first: str, second: str) -> bool:
    """True when the rater prefers the first answer. Clear differences are mostly judged right, near ties are a coin."""
    difference = gold_score(question, first) - gold_score(question, second)
    return rng.random() < 1.0 / (1.0 + math.exp(-RATER_SHARPNESS * difference))


def sft_rows(seed: int, n: int, unseen: bool = False) -> list[dict]:
    rng = random.Random(
        f"sft/{unseen}/{seed}"
    )  # a str seed goes through SHA-512: stable across machines, unlike hash()
    pool = [p for p in all_prompts() if p[3] == unseen]
    rows = []
    for _ in range(n):
        kind, topic, question, _ = rng.choice(pool)
        rows.append({"messages": [_user(question), _assistant(compose_answer(rng, kind, topic))]})
    return rows


def preference_rows(seed: int, n: int, unseen: bool = False) -> list[dict]:
    rng = random.Random(f"preference/{unseen}/{seed}")
    pool = [p for p in all_prompts() if p[3] == unseen]
    rows = []
    while len(rows) < n:
        kind, topic, question, _ = rng.choice(pool)
        first, second = compose_answer(rng, kind, topic), compose_answer(rng, kind, topic)
        if gold_score(question, first) == gold_score(question, second):
            continue  # nothing to prefer: draw again
        chosen, rejected = (first, second) if noisy_rater(rng, question, first, second) else (second, first)
        rows.append({"prompt": [_user(question)], "chosen": [_assistant(chosen)], "rejected": [_assistant(rejected)]})
    return rows


def prompt_rows(unseen: bool = False) -> list[dict]:
    return [{"prompt": [_user(question)]} for _, _, question, is_eval in all_prompts() if is_eval == unseen]


def make_tiny(seed: int) -> dict[str, dict[str, list[dict]]]:
    """{stage: {"train": rows, "eval": rows}}. Train prompts serve every stage, the unseen ones only the eval files."""
    return {
        "sft": {"train": sft_rows(seed, SFT_ROWS), "eval": sft_rows(seed, SFT_EVAL_ROWS, unseen=True)},
        "preference": {"train": preference_rows(seed, PAIRS), "eval": preference_rows(seed, EVAL_PAIRS, unseen=True)},
        "prompts": {"train": prompt_rows(), "eval": prompt_rows(unseen=True)},
    }


def tokenizer_texts(stages: dict) -> list[str]:
    """What the tiny tokenizer is trained on: the SFT text, with the words the chat template puts before each turn.

    Its few pieces go where they matter. Topics are added until each word of them is one piece: whether an answer names
    the topic is then the same token again, which a model this small can see. Answers count three times as much as
    questions, so that they fit into 40 tokens.
    """
    rows = [[m["content"] for m in row["messages"]] for row in stages["sft"]["train"]]
    topics = " ".join(topic for kind in TOPICS.values() for topic in kind)
    answers = [f"Assistant: {answer}" for _, answer in rows]
    return answers + [f"Human: {question}" for question, _ in rows[::3]] + [f" {topics}"] * 300


# The rubric -----------------------------------------------------------------------------------------------------------

# part: (points, what earns them). A perfect answer (on topic, polite, with a closing) scores 1.5 + 1 + 0.75 = 3.25.
RUBRIC = {
    "on_topic": (1.5, "the last word of the question's topic is named"),
    "off_topic": (-0.5, "it is not"),
    "polite": (1.0, "the first sentence is a polite opening"),
    "rude": (-1.5, "the first sentence is a rude opening"),
    "lazy": (-1.0, "a lazy sentence occurs"),
    "closing": (0.75, "the last sentence is a closing line"),
    "repeated": (-0.5, "for each sentence that was said before"),
    "long": (-0.25, "for each sentence beyond four"),
    "unfinished": (-1.0, "the answer was cut off, or does not end in . ! or ?"),
}

_TOPIC_OF_WORD = {topic.split()[-1]: topic for kind in TOPICS.values() for topic in kind}
_TOPIC_WORDS = re.compile(r"\b(" + "|".join(_TOPIC_OF_WORD) + r")\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?]*[.!?]+|[^.!?]+$")
_POLITE, _RUDE, _LAZY, _CLOSINGS = ({t.lower() for t in group} for group in (POLITE, RUDE, LAZY, CLOSINGS))


def split_sentences(answer: str) -> list[str]:
    """Sentences in lower case, one space between words; they end in . ! or ?, but for a last unfinished one."""
    return [s for s in (" ".join(m.split()).lower() for m in _SENTENCE.findall(answer)) if s]


def topic_of(question: str) -> str:
    """The topic a question of the tiny set asks about."""
    found = _TOPIC_WORDS.findall(question)
    if not found:
        raise UserError(f"gold knows the tiny set's topics only, finds none in {question[:80]!r}; bring another judge")
    return _TOPIC_OF_WORD[found[-1].lower()]


def rubric_counts(question: str, answer: str, finished: bool = True) -> dict[str, int]:
    """How often each part of the rubric applies: the ticks, before the points.

    finished: False for an answer that a length limit cut off.
    """
    sentences = split_sentences(answer)
    first, last = (sentences[0], sentences[-1]) if sentences else ("", "")
    named = topic_of(question).split()[-1] in {word.lower() for word in _TOPIC_WORDS.findall(answer)}
    return {
        "on_topic": int(named),
        "off_topic": int(not named),
        "polite": int(first in _POLITE),
        "rude": int(first in _RUDE),
        "lazy": int(any(s in _LAZY for s in sentences)),
        "closing": int(last in _CLOSINGS),
        "repeated": len(sentences) - len(set(sentences)),
        "long": max(0, len(sentences) - 4),
        "unfinished": int(not finished or not answer.rstrip().endswith((".", "!", "?"))),
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
    answer is unfinished when it does not end in . ! or ?. Other columns are ignored.
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
