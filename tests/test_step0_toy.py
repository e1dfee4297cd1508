"""The tiny sets, English and Chinese: the rubric by hand, who sees which prompt, the noisy rater, the proportions."""

import math
import random
import re

import pytest

from common.errors import UserError
from step0_data import toy, toy_en, toy_zh

QUESTION = "What do I need for guitar?"
POLITE, RUDE = "I am happy to help you.", "Stop wasting my time."
BODY = "A good book makes guitar more fun."
CLOSING = "I hope this helps you."
LANGUAGES = pytest.mark.parametrize("lang", [toy_en, toy_zh], ids=["en", "zh"])


@pytest.fixture(scope="module")
def tiny():
    return toy.make_tiny(seed=1)


@pytest.fixture(scope="module")
def tiny_zh():
    return toy.make_tiny(seed=1, names=["tiny_zh"])


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


QUESTION_ZH = "学吉他要准备什么？"
POLITE_ZH, RUDE_ZH = "很高兴能帮到你。", "别浪费我的时间。"
BODY_ZH = "有个好老师，学吉他会轻松很多。"
CLOSING_ZH = "希望对你有帮助。"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{POLITE_ZH}{BODY_ZH}{CLOSING_ZH}", 3.25),
        (BODY_ZH, 1.5),
        (f"{RUDE_ZH}{BODY_ZH}{CLOSING_ZH}", 1.5 - 1.5 + 0.75),
        (f"{BODY_ZH}{POLITE_ZH}", 1.5),
        (f"{CLOSING_ZH}{BODY_ZH}", 1.5),
        (BODY_ZH.replace("吉他", "围棋"), -0.5),
        ("上网搜一下就知道了。", -0.5 - 1),
        (f"{BODY_ZH}上网搜一下就知道了。差不多就行，随便吧。", 1.5 - 1),
        (f"{BODY_ZH}{BODY_ZH}", 1.5 - 0.5),
        (f"{POLITE_ZH}{BODY_ZH}{BODY_ZH}{BODY_ZH}{CLOSING_ZH}", 3.25 - 2 * 0.5 - 0.25),
        (f"{BODY_ZH}一。二！三？四。五。", 1.5 - 2 * 0.25),
        ("有个好老师，学吉他会轻松", 1.5 - 1),
        (f"{POLITE_ZH}{BODY_ZH}希望对你", 2.5 - 1),
        ("有个好老师，学吉他会轻松很多.", 1.5 - 1),  # a half-width full stop ends no Chinese sentence
        ("", -0.5 - 1),
        ("吉他！", 1.5),
        ("学吉他的人很多。", 1.5),  # no space has to stand around a topic
        (f"  {POLITE_ZH} {BODY_ZH}\n{CLOSING_ZH} ", 3.25),  # white space does not matter
        ("谢谢你的 提问。吉他。", 2.5),
        ("这你都不知道？吉他。", 0.0),
        ("先学唱歌，再学吉他。", 1.5),
        ("A good book makes guitar more fun.", -0.5 - 1),  # the wrong language: neither the topic nor an end
    ],
)
def test_rubric_by_hand_in_chinese(answer, expected):
    assert toy.gold_score(QUESTION_ZH, answer) == pytest.approx(expected, abs=1e-12)


def test_gold_judges_both_languages_side_by_side():
    rendered = f"\n\nHuman: {QUESTION_ZH}\n\nAssistant:"
    assert toy.gold([QUESTION, rendered, QUESTION], [BODY, BODY_ZH, BODY_ZH]) == [1.5, 1.5, -0.5 - 1]
    assert toy.gold_score(f"{QUESTION_ZH} {QUESTION}", BODY) == 1.5  # the last topic named is what is asked
    assert toy.gold_score(f"{QUESTION} {QUESTION_ZH}", BODY_ZH) == 1.5


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


@LANGUAGES
def test_sizes_and_who_sees_which_prompt(lang, tiny, tiny_zh):
    prompts, tiny = toy.all_prompts(lang), tiny if lang is toy_en else tiny_zh
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
    unseen = [kind for kind, _, _, unseen in prompts if unseen]
    assert sorted(unseen.count(kind) for kind in lang.TOPICS) == [6, 7, 7, 8]


def test_both_sets_together_take_turns(tiny, tiny_zh):
    both = toy.make_tiny(seed=1, names=["tiny", "tiny_zh"])
    for stage, parts in both.items():
        for part, rows in parts.items():
            assert rows[::2] == tiny[stage][part] and rows[1::2] == tiny_zh[stage][part]


def test_the_unseen_prompts_do_not_depend_on_the_seed(tiny):
    assert toy.prompt_rows(unseen=True) == tiny["prompts"]["eval"]  # and prompt_rows takes no seed


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tiny):
    assert toy.make_tiny(seed=1) == tiny
    assert toy.sft_rows(2, 20) != tiny["sft"]["train"][:20] == toy.sft_rows(1, 20)


def test_an_oracle_agrees_with_the_noisy_rater_as_often_as_stated(tiny, tiny_zh):
    assert 0.935 < toy.oracle_accuracy(tiny["preference"]["train"]) < 0.965
    assert 0.935 < toy.oracle_accuracy(tiny_zh["preference"]["train"]) < 0.965


def test_the_rater_follows_the_sigmoid():
    """At a gold difference of 1 the better answer wins with 1 / (1 + exp(-3)) = 0.9526."""
    rng = random.Random(0)
    lazy, useful = f"{BODY} Just search for it on your phone.", BODY  # 0.5 and 1.5
    assert toy.gold_score(QUESTION, useful) - toy.gold_score(QUESTION, lazy) == 1.0
    wins = sum(toy.noisy_rater(rng, QUESTION, useful, lazy) for _ in range(2000)) / 2000
    assert wins == pytest.approx(1 / (1 + math.exp(-3)), abs=0.015)
    wins = sum(toy.noisy_rater(rng, QUESTION, lazy, useful) for _ in range(2000)) / 2000
    assert wins == pytest.approx(1 / (1 + math.exp(3)), abs=0.015)


@LANGUAGES
def test_qualities_come_in_the_stated_proportions(lang, tiny, tiny_zh):
    made = tiny if lang is toy_en else tiny_zh
    rows = [[m["content"] for m in row["messages"]] for row in made["sft"]["train"]]
    ticks = [toy.rubric_counts(question, answer) for question, answer in rows]
    share = {part: sum(bool(t[part]) for t in ticks) / len(ticks) for part in ticks[0]}
    stated = {"polite": 0.45, "rude": 0.30, "lazy": 0.30, "closing": 0.45, "repeated": 0.7 * 0.3}
    stated["off_topic"] = 0.3 + 0.7 * 0.25  # lazy bodies name no topic
    for part, expected in stated.items():
        assert share[part] == pytest.approx(expected, abs=0.02), part
    assert share["unfinished"] == 0
    mean_gold = sum(toy.gold_score(*row) for row in rows) / len(rows)
    assert 0.4 < mean_gold < 0.6  # room for reinforcement learning: a perfect answer has 3.25


def templates_of(lang):
    fixed = [*lang.LAZY, *lang.POLITE, *lang.RUDE, *lang.CLOSINGS]
    return fixed + [t for group in (*lang.USEFUL.values(), *lang.QUESTIONS.values()) for t in group]


def test_a_chinese_topic_is_found_where_it_was_put_and_nowhere_else():
    """Chinese has no edges of words: two neighbours could make a third topic."""
    topics = [topic for kind in toy_zh.TOPICS.values() for topic in kind]
    assert len(set(topics)) == 34 and not [(a, b) for a in topics for b in topics if a != b and a in b]
    sentences = templates_of(toy_zh)
    for first in sentences:
        for second in ("", *sentences):  # also across two sentences
            text = first.format(topic="饺子") + second.format(topic="")
            assert [t for t in topics if t in text] == (["饺子"] if "{topic}" in first else []), text
        for topic in topics:
            assert [t for t in topics if t in first.format(topic=topic)] == ([topic] if "{topic}" in first else [])


def test_the_chinese_text_is_chinese_and_in_full_width():
    for text in templates_of(toy_zh):
        assert re.fullmatch("[\u4e00-\u9fff，]+[。？]", text.replace("{topic}", "书法")), text


def test_topics_are_told_apart_by_their_last_word():
    topics = [topic for kind in toy_en.TOPICS.values() for topic in kind]
    last = [topic.split()[-1] for topic in topics]
    assert len(set(last)) == 34
    templates = templates_of(toy_en)
    words = {word for t in templates for word in re.findall(r"\w+", t.replace("{topic}", "").lower())}
    assert not words & set(last)
    first = [word for topic in topics for word in topic.split()[:-1]]
    assert not set(first) & set(last)


@LANGUAGES
def test_fixed_sentences_of_one_quality_are_no_other_quality(lang):
    for opening in (*lang.POLITE, *lang.RUDE, *lang.CLOSINGS):
        assert len(toy.split_sentences(opening, lang)) == 1, opening
    groups = [set(lang.POLITE), set(lang.RUDE), set(lang.CLOSINGS)]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 12
    question = QUESTION if lang is toy_en else QUESTION_ZH
    for kind, topics in lang.TOPICS.items():
        for body in lang.USEFUL[kind]:
            counts = toy.rubric_counts(question, body.format(topic=topics[0]))
            assert not any(counts[p] for p in ("polite", "rude", "lazy", "closing", "repeated", "long", "unfinished"))
        for body in lang.LAZY:
            assert toy.rubric_counts(question, body.format(topic=topics[0]))["lazy"] == 1
