"""The tiny set: the rubric by hand, who sees which prompt, the noisy rater, the stated proportions."""

import math
import random
import re

import pytest

from common.errors import UserError
from step0_data import toy

QUESTION = "What do I need for guitar?"
POLITE, RUDE = "I am happy to help you.", "Stop wasting my time."
BODY = "A good book makes guitar more fun."
CLOSING = "I hope this helps you."


@pytest.fixture(scope="module")
def tiny():
    return toy.make_tiny(seed=1)


# Every value is added up by hand: topic 1.5 / -0.5, polite 1, rude -1.5, lazy -1, closing 0.75, repeated -0.5 each,
# beyond four sentences -0.25 each, unfinished -1.
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{POLITE} {BODY} {CLOSING}", 3.25),  # perfect: 1.5 + 1 + 0.75
        (BODY, 1.5),
        (f"{POLITE} {BODY}", 2.5),
        (f"{RUDE} {BODY} {CLOSING}", 1.5 - 1.5 + 0.75),
        (f"{BODY} {POLITE}", 1.5),  # courtesy counts as an opening only
        (f"{CLOSING} {BODY}", 1.5),  # and a closing line at the end only
        (BODY.replace("guitar", "chess"), -0.5),
        ("Just search for it on your phone.", -0.5 - 1),  # a lazy answer does not name the topic either
        (f"{BODY} Just search for it on your phone. I guess it is fine, whatever.", 1.5 - 1),  # lazy counts once
        (f"{BODY} {BODY}", 1.5 - 0.5),
        (f"{POLITE} {BODY} {BODY} {CLOSING}", 3.25 - 0.5),
        (f"{POLITE} {BODY} {BODY} {BODY} {CLOSING}", 3.25 - 2 * 0.5 - 0.25),
        (f"{BODY} One. Two. Three. Four. Five.", 1.5 - 2 * 0.25),
        ("A good book makes guitar more", 1.5 - 1),
        (f"{POLITE} {BODY} I hope this", 2.5 - 1),
        ("", -0.5 - 1),
        ("   \n ", -0.5 - 1),
        ("GUITAR!", 1.5),
        ("Guitars.", -0.5),  # a whole word, not a part of one
        ("guitar guitar guitar.", 1.5),
        (f"  {POLITE}   {BODY}\n\n{CLOSING}  ", 3.25),  # white space does not matter
        ("I  am HAPPY to help you. Guitar.", 2.5),
        ("Why do you bother me? Guitar.", 0.0),
        ("Learn singing. Then guitar.", 1.5),  # another topic beside it does no harm
    ],
)
def test_rubric_by_hand(answer, expected):
    assert toy.gold_score(QUESTION, answer) == pytest.approx(expected, abs=1e-12)


def test_a_two_word_topic_counts_by_its_last_word():
    assert toy.gold_score("How do I make fried rice?", "Rice.") == 1.5
    assert toy.gold_score("How do I make fried rice?", "Fried.") == -0.5


def test_an_answer_cut_by_length_is_unfinished_even_after_a_full_stop():
    assert toy.gold_score(QUESTION, BODY, finished=False) == 0.5
    assert toy.gold([QUESTION] * 2, [BODY] * 2, truncated=[False, True]) == [1.5, 0.5]


def test_gold_reads_messages_and_strings_and_ignores_other_columns():
    prompt, completion = [{"role": "user", "content": QUESTION}], [{"role": "assistant", "content": " " + BODY}]
    assert toy.gold([prompt, QUESTION], [completion, BODY], answer=[1, 2], margin=None) == [1.5, 1.5]
    assert toy.gold(prompts=[], completions=[]) == []
    rendered = f"\n\nHuman: {QUESTION}\n\nAssistant:"
    assert toy.gold([rendered], [BODY]) == [1.5]
    with_system = [{"role": "system", "content": "Talk of chess."}, *prompt]
    assert toy.on_topic(with_system, completion) and not toy.on_topic(with_system, "Chess.")


def test_gold_refuses_what_it_cannot_judge():
    with pytest.raises(UserError, match="finds none in 'What is love"):
        toy.gold(["What is love?"], ["Do not hurt me."])
    with pytest.raises(UserError, match="got 1 and 2"):
        toy.gold([QUESTION, QUESTION], [BODY])


def test_sizes_and_who_sees_which_prompt(tiny):
    prompts = toy.all_prompts()
    assert len({kind for kind, *_ in prompts}) == 4
    assert len({topic for _, topic, _, _ in prompts}) == 34
    assert len({question for _, _, question, _ in prompts}) == len(prompts) == 136
    assert sum(unseen for *_, unseen in prompts) == 28  # one in five
    sizes = {stage: {part: len(rows) for part, rows in parts.items()} for stage, parts in tiny.items()}
    assert sizes == {
        "sft": {"train": 5700, "eval": 300},
        "preference": {"train": 4000, "eval": 400},
        "prompts": {"train": 108, "eval": 28},
    }

    def asked(part):
        rows = [row for stage in tiny.values() for row in stage[part]]
        return {(row.get("prompt") or row["messages"])[0]["content"] for row in rows}

    assert asked("train") == {question for *_, question, unseen in prompts if not unseen}
    assert asked("eval") == {question for *_, question, unseen in prompts if unseen}
    seen_topics = {topic for _, topic, _, unseen in prompts if not unseen}
    assert len(seen_topics) == 34  # a new question about a known topic, never a new topic


def test_the_unseen_prompts_do_not_depend_on_the_seed(tiny):
    assert toy.prompt_rows(unseen=True) == tiny["prompts"]["eval"]  # and prompt_rows takes no seed


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tiny):
    assert toy.make_tiny(seed=1) == tiny
    assert toy.sft_rows(2, 20) != tiny["sft"]["train"][:20] == toy.sft_rows(1, 20)


def test_an_oracle_agrees_with_the_noisy_rater_as_often_as_stated(tiny):
    assert 0.935 < toy.oracle_accuracy(tiny["preference"]["train"]) < 0.965


def test_the_rater_follows_the_sigmoid():
    """At a gold difference of 1 the better answer wins with 1 / (1 + exp(-3)) = 0.9526."""
    rng = random.Random(0)
    lazy, useful = f"{BODY} Just search for it on your phone.", BODY  # 0.5 and 1.5
    assert toy.gold_score(QUESTION, useful) - toy.gold_score(QUESTION, lazy) == 1.0
    wins = sum(toy.noisy_rater(rng, QUESTION, useful, lazy) for _ in range(2000)) / 2000
    assert wins == pytest.approx(1 / (1 + math.exp(-3)), abs=0.015)
    wins = sum(toy.noisy_rater(rng, QUESTION, lazy, useful) for _ in range(2000)) / 2000
    assert wins == pytest.approx(1 / (1 + math.exp(3)), abs=0.015)


def test_qualities_come_in_the_stated_proportions(tiny):
    rows = [[m["content"] for m in row["messages"]] for row in tiny["sft"]["train"]]
    ticks = [toy.rubric_counts(question, answer) for question, answer in rows]
    share = {part: sum(bool(t[part]) for t in ticks) / len(ticks) for part in ticks[0]}
    stated = {"polite": 0.45, "rude": 0.30, "lazy": 0.30, "closing": 0.45, "repeated": 0.7 * 0.3}
    stated["off_topic"] = 0.3 + 0.7 * 0.25  # lazy bodies name no topic
    for part, expected in stated.items():
        assert share[part] == pytest.approx(expected, abs=0.02), part
    assert share["unfinished"] == 0
    mean_gold = sum(toy.gold_score(*row) for row in rows) / len(rows)
    assert 0.4 < mean_gold < 0.6  # room for reinforcement learning: a perfect answer has 3.25


def test_topics_are_told_apart_by_their_last_word():
    topics = [topic for kind in toy.TOPICS.values() for topic in kind]
    last = [topic.split()[-1] for topic in topics]
    assert len(set(last)) == 34
    templates = [*toy.LAZY, *toy.POLITE, *toy.RUDE, *toy.CLOSINGS]
    templates += [t for group in (*toy.USEFUL.values(), *toy.QUESTIONS.values()) for t in group]
    words = {word for t in templates for word in re.findall(r"\w+", t.replace("{topic}", "").lower())}
    assert not words & set(last)
    first = [word for topic in topics for word in topic.split()[:-1]]
    assert not set(first) & set(last)


def test_fixed_sentences_of_one_quality_are_no_other_quality():
    for opening in (*toy.POLITE, *toy.RUDE, *toy.CLOSINGS):
        assert len(toy.split_sentences(opening)) == 1, opening
    groups = [set(toy.POLITE), set(toy.RUDE), set(toy.CLOSINGS)]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 12
    for kind, topics in toy.TOPICS.items():
        for body in toy.USEFUL[kind]:
            counts = toy.rubric_counts(QUESTION, body.format(topic=topics[0]))
            assert not any(counts[p] for p in ("polite", "rude", "lazy", "closing", "repeated", "long", "unfinished"))
        for body in toy.LAZY:
            assert toy.rubric_counts(QUESTION, body.format(topic=topics[0]))["lazy"] == 1
