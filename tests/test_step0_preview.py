"""preview.md and its warnings: each warning fires and stays silent just below its threshold; what a page shows."""

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_tokenizers

from common.chat_format import BUILTIN_TEMPLATES
from common.errors import UserError
from step0_data import checks, preview
from step1_sft.train import parse_args as sft_args
from step2_reward.train import parse_args as reward_args
from step3_rlhf.train import parse_args as rl_args


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def sft(*turns):
    return {"messages": [user(t) if i % 2 == 0 else bot(t) for i, t in enumerate(turns)]}


def pair(prompt, chosen, rejected):
    return {"prompt": [user(prompt)], "chosen": [bot(chosen)], "rejected": [bot(rejected)]}


def prompt(text, **columns):
    return {"prompt": [user(text)], **columns}


def demonstrations(n):
    """Rows that nothing is wrong with: every text begins and ends in its own way."""
    return [sft(f"{i} is what?", f"{i} is a number of its own kind, {i * i} squared.") for i in range(n)]


def pairs(n):
    return [pair(f"{i} is what?", f"{i} is fine and well", f"{i} is poor and weak") for i in range(n)]


def tally_of(stage, rows, part="train"):
    tally = checks.Tally(stage, part, len(rows))
    for row in rows:
        tally.add(row)
    if stage == "preference":
        tally.characters = {
            side: np.array([len(row[side][0]["content"]) for row in rows]) for side in ("chosen", "rejected")
        }
    return tally


def warned(stage, rows):
    """Warnings about the rows, without those about how few they are."""
    lines = checks.warnings([tally_of(stage, rows), checks.Tally(stage, "eval", 25)])
    return [line for line in lines if not line.startswith("train has few rows")]


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def write(folder, **stages):
    """Parquet files as step 0 writes them: {stage: train rows, or (train, eval)}."""
    for stage, rows in stages.items():
        (folder / stage).mkdir(parents=True)
        for part, some in zip(("train", "eval"), rows if isinstance(rows, tuple) else (rows, []), strict=True):
            if some:
                columns = {}
                for name, value in some[0].items():
                    kind = MESSAGES if isinstance(value, list) else None
                    columns[name] = pa.array([row[name] for row in some], kind)
                pq.write_table(pa.table(columns), folder / stage / f"{part}.parquet")
    return folder


def characters(template="plain"):
    tokenizer = small_tokenizers.characters()
    tokenizer.chat_template = BUILTIN_TEMPLATES.get(template)
    return tokenizer


# The warnings ---------------------------------------------------------------------------------------------------------


def test_rows_that_nothing_is_wrong_with():
    assert warned("sft", demonstrations(200)) == warned("preference", pairs(200)) == []
    assert warned("prompts", [prompt(f"{i}?", answer=i + 1) for i in range(200)]) == []
    assert warned("pretrain", [{"text": f"{i} words"} for i in range(200)]) == []


@pytest.mark.parametrize(
    ("train", "held_out", "expected"),
    [
        (64, 25, []),
        (63, 25, ["train has few rows (sft 63): enough to see it run"]),
        (64, 24, ["eval has few rows (sft 24): an accuracy measured on 24 is uncertain by 0.20 either way"]),
        (64, 4, ["eval has few rows (sft 4): an accuracy measured on 4 is uncertain by 0.49 either way"]),
        (64, 0, ["sft: no row is kept for evaluation"]),
        (0, 25, ["sft: all rows fell into eval"]),
    ],
)
def test_few_rows(train, held_out, expected):
    lines = checks.warnings([checks.Tally("sft", "train", train), checks.Tally("sft", "eval", held_out)])
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


def test_pretraining_text_needs_no_evaluation():
    assert checks.warnings([checks.Tally("pretrain", "train", 64)]) == []


def sized(*groups):
    """Pairs of given lengths: (how many, characters of chosen, of rejected)."""
    rows = []
    for n, chosen, rejected in groups:
        rows += [
            pair(
                f"{len(rows) + i}?",
                f"{len(rows) + i:03}".ljust(chosen, "x"),
                f"{len(rows) + i:03}!".ljust(rejected, "y"),
            )
            for i in range(n)
        ]
    return rows


def test_length_predicts_the_choice():
    (line,) = warned("preference", sized((70, 11, 10), (30, 10, 11), (50, 9, 9)))
    assert line.startswith(
        "preference/train: chosen is the longer answer in 70% of 100 pairs of unequal length (z = 4.0)"
    )
    assert warned("preference", sized((69, 11, 10), (31, 10, 11))) == []
    assert warned("preference", sized((7, 11, 10), (3, 10, 11))) == []  # z = 1.3: a coin does that
    (line,) = warned("preference", sized((70, 10, 11), (30, 11, 10)))
    assert "chosen is the shorter answer in 70% of 100 pairs of unequal length (z = -4.0)" in line
    assert warned("preference", sized((100, 9, 9))) == []


def test_chosen_is_much_longer():
    """65 of 100 is z = 3.0; means 16.5 and 10.35 are 1.59 apart, 15.2 and 10.35 only 1.47."""
    (line,) = warned("preference", sized((65, 20, 10), (35, 10, 11)))
    assert "in 65% of 100 pairs of unequal length (z = 3.0), on average 16 against 10 characters" in line
    assert warned("preference", sized((65, 18, 10), (35, 10, 11))) == []
    assert warned("preference", sized((64, 40, 10), (36, 10, 11))) == []
    assert warned("preference", sized((1, 100_000, 10), (50, 11, 10), (49, 10, 11))) == []  # one huge row
    (line,) = warned("preference", sized((65, 10, 20), (35, 11, 10)))
    assert "chosen is the shorter answer in 65%" in line


def test_rows_that_open_alike_cannot_be_dealt_out():
    """They go to one side together: advice about --eval_fraction would be of no use."""

    def greeted(n, greeting):
        first = [{"role": "system", "content": "You repair clocks."}, user(greeting), bot("What is broken?")]
        rows = [pair("", f"{i} times it is", f"{i} is no digit") for i in range(n)]
        return [row | {"prompt": [*first, user(f"clock {i}")]} for i, row in enumerate(rows)]

    def told(train, held_out=()):
        sides = [tally_of("preference", rows, part) for part, rows in (("train", train), ("eval", held_out)) if rows]
        return [line for line in checks.warnings(sides) if "few rows" not in line]

    (line,) = told(greeted(400, "Good  Morning"))
    assert line == (
        'preference: all 400 rows open alike, with "Good Morning"; rows with the same first turns go to one stage and '
        "to one side, here train, and no row to the other: take the turns that rows share out of them, or add rows "
        "that open otherwise"
    )
    assert "all 400 rows open alike" in told(greeted(200, "Hi ") + greeted(200, "hi"))[0]  # as the split has it
    (line,) = told([], greeted(400, "Hi"))
    assert "all 400 rows open alike" in line and "here eval, and no row to the other" in line
    (line,) = told(greeted(300, "Hi") + pairs(200), pairs(60))
    assert "300 of 560 rows (53.6%) open alike" in line and "here train, whatever --eval_fraction says" in line
    (line,) = told(greeted(140, "Hi") + greeted(140, "Hello") + greeted(140, "Good day"))
    assert "420 rows have only 3 different openings" in line
    assert told(greeted(200, "Hi") + pairs(300), pairs(60)) == [] == told(pairs(400), pairs(60))


def test_pairs_that_differ_in_white_space_or_case_only():
    same = [pair(f"{i}!", f"{i} Of  course\n", f"{i} of course") for i in range(5)]
    (line,) = warned("preference", pairs(495) + same)
    assert "differ only in white space or case in 5 of 500 pairs (1.0%)" in line
    assert warned("preference", pairs(496) + same[:4]) == []
    assert warned("preference", pairs(496) + same) == []  # 5 of 501


def test_an_answer_that_stands_in_its_prompt():
    text = "All things flow, {}."  # 20 characters with two digits
    leaks = [sft(f"Who said: {text.format(i)} ?", text.format(i).upper()) for i in range(10, 15)]
    assert len(leaks[0]["messages"][1]["content"]) == 20
    (line,) = warned("sft", demonstrations(95) + leaks)
    assert line.startswith("sft/train: the answer stands word for word in its prompt in 5 of 100 rows (5.0%)")
    assert warned("sft", demonstrations(96) + leaks[:4]) == []
    assert warned("sft", demonstrations(96) + leaks) == []  # 5 of 101
    short = [sft(f"Who said: All flows, my {i}?", f"All flows, my {i}") for i in range(1000, 1010)]  # 18 characters
    assert warned("sft", short) == []
    again = [sft(f"{i}?", f"{i}: nobody knows that", "Sure?", f"{i}: nobody knows that") for i in range(10)]
    assert warned("sft", again) == []  # the assistant repeats itself: no leak
    leaks = [pair(f"Now say: All this is well {i}.", f"All this is well {i}.", f"{i}") for i in range(10, 15)]
    (line,) = warned("preference", pairs(95) + leaks)
    assert "the chosen answer stands word for word in its prompt in 5 of 100 rows" in line


def test_a_reference_answer_that_stands_in_its_prompt():
    open_ = [prompt(f"It is {i}. Is it?", answer=i) for i in range(20)]
    hidden = [
        prompt(f"What is half of 2{i}0, 1{i} or {i}5?", answer=i) for i in range(20, 40)
    ]  # only as part of numbers
    (line,) = warned("prompts", open_ + hidden)
    assert "the column `answer` stands in the prompt in 20 of 40 rows (50.0%)" in line
    assert warned("prompts", open_[:19] + hidden) == []
    (line,) = warned("prompts", [prompt(f"So {i}", answer=f"Long working out. #### {i}") for i in range(21)])
    assert "in 21 of 21 rows" in line
    # Labels, which prompts list by right, are few and different.
    labels = [
        prompt(f"{i}: choose from {' '.join(f'L{n}' for n in range(21))}", answer=f"L{i % 20}") for i in range(80)
    ]
    assert warned("prompts", labels) == []
    assert len(warned("prompts", [row | {"answer": f"L{i % 21}"} for i, row in enumerate(labels)])) == 1
    long = [prompt(f"{i}. twenty letters and so on", answer="TWENTY letters  and so on") for i in range(5)]
    assert len(warned("prompts", long + [prompt(f"{i}?", answer="no") for i in range(95)])) == 1
    assert warned("prompts", long + [prompt(f"{i}?", answer="no") for i in range(96)]) == []


def test_one_answer_again_and_again():
    (line,) = warned("sft", demonstrations(95) + [sft(f"{i}!", "I cannot.") for i in range(5)])
    assert '5 of 100 answers (5.0%) are one and the same, "I cannot."' in line
    assert warned("sft", demonstrations(96) + [sft(f"{i}!", "I cannot.") for i in range(5)]) == []
    assert warned("sft", demonstrations(4) + [sft(f"{i}!", "I cannot.") for i in range(4)]) == []  # an accident
    lazy = [pair(f"{i}!", f"{i} is all I say", "I do not know.") for i in range(5)]
    (line,) = warned("preference", pairs(95) + lazy)
    assert "5 of 100 rejected answers (5.0%) are one and the same" in line
    (line,) = warned("pretrain", [{"text": "Cookies?"}] * 5 + [{"text": str(i)} for i in range(95)])
    assert "5 of 100 texts (5.0%) are one and the same" in line


def test_answers_that_begin_the_same_way():
    refusals = [sft(f"{i}!", f"I'm sorry, but I  cannot do {i}") for i in range(5)]
    (line,) = warned("sft", demonstrations(15) + refusals)
    assert '5 of 20 answers (25.0%) begin with "I\'m sorry, but I cannot"' in line
    assert warned("sft", demonstrations(16) + refusals) == []
    chinese = [sft(f"{i}!", f"对不起，我不能{i}") for i in range(5)]
    (line,) = warned("sft", demonstrations(15) + chinese)
    assert 'begin with "对不起，我"' in line

    def sides(chosen, rejected):
        """20 pairs, of which the first few have a chosen, or a rejected, answer with this opening."""
        start = "It is sad but true:"
        return [
            pair(
                f"{i}!",
                f"{start} {i}" if i < chosen else f"c{i} so",
                f"{start} no, {i}" if i < rejected else f"r{i} so",
            )
            for i in range(20)
        ]

    (line,) = warned("preference", sides(8, 4))
    assert '8 of 20 chosen answers (40.0%) begin with "It is sad but true:", and 4 rejected ones' in line
    assert warned("preference", sides(8, 5)) == []
    assert any("8 of 20 rejected answers" in line for line in warned("preference", sides(0, 8)))


def test_a_dialogue_that_was_not_taken_apart():
    swallowed = [sft(f"{i}!", f"{i} yes.\n\nHuman: And {i}?") for i in range(5)]
    (line,) = warned("sft", demonstrations(245) + swallowed)
    assert line.startswith("sft/train: 5 of 250 rows (2.0%) have a turn marker")
    assert warned("sft", demonstrations(246) + swallowed) == []
    assert warned("sft", [sft(f"{i}!", f"{i}: I like the Human: it is kind") for i in range(9)]) == []
    assert warned("sft", [sft(f"{i}!", f"{i}: <s>old</s> new, or {i}") for i in range(9)]) == []  # HTML
    for marker in ("<|im_start|>", "[INST]", "\n用户：", "### Response:", "User :", "### Human:", "<end_of_turn>"):
        assert len(warned("sft", [sft(f"{i}!", f"{marker} {i}") for i in range(5)])) >= 1, marker
    whole = [prompt(f"{i}\n\nHuman: x\n\nAssistant:") for i in range(5)]
    (line,) = warned("prompts", whole + [prompt(f"{i}?") for i in range(45)])
    assert "5 of 50 rows (10.0%)" in line and "inside the prompt" in line
    assert warned("prompts", whole + [prompt(f"{i}?") for i in range(46)]) == []


def test_stop_tokens_written_as_text():
    for stop in ("</s>", "<|endoftext|>", "<|end|> ", "</s>\n"):
        (line,) = warned("sft", [sft(f"{i}!", f"{i} it is. {stop}") for i in range(5)])
        assert "5 of 5 rows (100.0%) have a turn marker" in line and "inside the answer" in line, stop


def test_dialogues_that_became_pretraining_text():
    dialogues = [{"text": f"### Human: {i}?\n### Assistant: {i}!"} for i in range(5)]
    plain = [{"text": f"{i} is a number."} for i in range(5)]
    (line,) = warned("pretrain", dialogues + plain)
    assert line.startswith("pretrain/train: 5 of 10 rows (50.0%) have a turn marker")
    assert "they serve as pretraining text only" in line
    assert warned("pretrain", dialogues + plain + [{"text": "the eleventh"}]) == []


def test_answers_that_begin_with_their_own_prompt():
    question = "What is the square {}"  # 20 characters with one digit
    again = [sft(question.format(i), f"what is  THE square {i}? It is {i * i}") for i in range(5)]
    assert len(again[0]["messages"][0]["content"]) == 20
    (line,) = warned("sft", demonstrations(95) + again)
    assert line.startswith("sft/train: the answer begins with its own prompt in 5 of 100 rows (5.0%)")
    assert warned("sft", demonstrations(96) + again) == []  # 5 of 101
    assert warned("sft", [sft(f"{i} is it?", f"{i} is it? No, and {i}") for i in range(9)]) == []  # a short one
    later = [sft(question.format(i), f"{i} squared? " + question.format(i)) for i in range(9)]
    assert warned("sft", later) == []
    both = [pair(question.format(i), f"{question.format(i)} {i}a", f"{question.format(i)} {i}b") for i in range(5)]
    (line,) = warned("preference", pairs(95) + both)
    assert "preference/train: the answer begins with its own prompt in 5 of 100 rows" in line


def test_where_train_has_no_rows_eval_is_looked_at():
    lines = checks.warnings([tally_of("sft", [sft(f"{i}!", "No.") for i in range(30)], "eval")])
    assert lines[0].startswith("sft: all rows fell") and lines[1].startswith("sft/eval: 30 of 30 answers")


def test_the_limits_are_the_stages_own_defaults():
    line = ["--model", "m", "--data", "d", "--output_dir", "o"]
    rl = rl_args(["--actor", "a", "--critic", "c", "--data", "d", "--output_dir", "o"])
    assert checks.LIMITS["sft"][0] == sft_args(line).max_length
    assert checks.LIMITS["preference"][0] == reward_args(line).max_length
    assert checks.LIMITS["prompts"][0] == rl.max_prompt_length
    assert rl.max_completion_length == checks.MAX_COMPLETION_LENGTH
    assert rl.rollout_batch_size == checks.FEW_TRAIN == 8 * sft_args(line).per_device_train_batch_size


# With a tokenizer: one token a byte; "plain" is <s>, the texts, and </s> after an answer ------------------------------


def test_rows_over_the_default_lengths(tmp_path):
    def lengths(stage, rows):
        folder = write(tmp_path / f"{stage}-{random.random()}", **{stage: rows})
        return [line for line in preview.page(folder, [], characters())[1] if "too long" in line]

    def long(extra):
        return [sft(f"{i:02}", f"{i:02}".ljust(1020 + extra, "x")) for i in range(5)]

    fine = [sft(f"{i:02}", f"{i:02}") for i in range(45)]
    assert lengths("sft", long(0) + fine) == []  # 1 + 2 + 1020 + 1 = 1024
    (line,) = lengths("sft", long(1) + fine)
    assert line.startswith(
        "sft/train: 5 of 50 rows (10.0%) are too long; step 1 cuts conversations at --max_length 1024"
    )
    assert lengths("sft", long(1) + fine + fine[:1]) == []  # 5 of 51

    def both(chosen, rejected):
        return [pair(f"{i:02}", f"{i:02}".ljust(chosen, "x"), f"{i:02}".ljust(rejected, "y")) for i in range(5)]

    assert lengths("preference", both(1020, 1020)) == []
    assert (
        "step 2" in lengths("preference", both(1020, 1021))[0] and "step 2" in lengths("preference", both(1021, 9))[0]
    )
    assert lengths("prompts", [prompt(f"{i}".ljust(511)) for i in range(5)]) == []
    assert (
        "5 of 5 rows (100.0%) are too long; step 3"
        in lengths("prompts", [prompt(f"{i}".ljust(512)) for i in range(5)])[0]
    )


def test_answers_longer_than_step_3_samples(tmp_path):
    """255 letters and the turn end are 256 tokens."""
    long, short = ([sft(f"{i}", f"{i}".ljust(n, "x")) for i in range(11)] for n in (256, 255))
    _, warnings = preview.page(write(tmp_path / "a", sft=long[:10] + short[:10]), [], characters())
    assert any("10 of 20 answers (50.0%) are longer than the 256 tokens" in line for line in warnings)
    _, warnings = preview.page(write(tmp_path / "b", sft=long[:10] + short), [], characters())
    assert not any("256 tokens" in line for line in warnings)


def test_rows_the_template_refuses_are_counted_and_shown(tmp_path):
    tokenizer = characters()
    tokenizer.chat_template = small_tokenizers.INST_TEMPLATE
    system = {"messages": [{"role": "system", "content": "Be kind."}, user("Hi"), bot("Hello")]}
    text, warnings = preview.page(write(tmp_path, sft=[system] * 5 + [sft("Hi", "Hello")]), [], tokenizer)
    (line,) = [line for line in warnings if "will set aside" in line]
    assert "5 of 6 rows (83.3%) with this chat template (5 of them: the chat template refuses the conversation)" in line
    assert "(the stage will set this row aside: the chat template refuses the conversation" in text
    assert ")\n[messages] system: Be kind.\n[messages] user: Hi\n" in text


@pytest.mark.parametrize(("tokenised", "told"), [(500, True), (501, False)])
def test_few_rows_that_the_template_refuses_are_no_warning(tokenised, told):
    tally = checks.Tally("sft", "train", 1000, tokenised=tokenised, set_aside=Counter({"no": 3, "never": 2}))
    lines = checks.warnings([tally, checks.Tally("sft", "eval", 25)])
    assert ["set aside 5 of 500 sampled rows (1.0%) with this chat template (3 of them: no)" in x for x in lines] == (
        [True] if told else []
    )


def test_a_huge_row_is_too_long_without_being_tokenised(tmp_path):
    rows = [sft(f"{i}", "x" * 50_000) for i in range(5)]
    text, warnings = preview.page(write(tmp_path, sft=rows), [], characters())
    assert any("5 of 5 rows (100.0%) are too long" in line for line in warnings)
    assert "Lengths in tokens" not in text and len(text) < 10_000


def test_a_tokenizer_without_a_template_is_told_and_text_is_shown(tmp_path):
    tokenizer = small_tokenizers.characters()
    text, warnings = preview.page(write(tmp_path, sft=demonstrations(3)), [], tokenizer)
    assert "the tokenizer has no chat template" in warnings[0] and "--chat_template: human-assistant" in warnings[0]
    assert "[messages] user: 0 is what?" in text and "Lengths in tokens" not in text
    tokenizer.save_pretrained(tmp_path / "model")
    assert preview.load_tokenizer(tmp_path / "model", None).chat_template is None
    assert preview.load_tokenizer(tmp_path / "model", "plain").chat_template == BUILTIN_TEMPLATES["plain"]
    with pytest.raises(UserError, match="neither a built-in"):
        preview.load_tokenizer(tmp_path / "model", "no-such-thing")


# What a page shows ----------------------------------------------------------------------------------------------------


def test_what_is_trained_stands_between_marks(tmp_path):
    rows = {
        "sft": [sft("Hi", "Hello", "Why?", "So.")],
        "preference": [pair("Hi", "Yes", "No") | {"margin": 0.5}],
        "prompts": [{"prompt": [user("Hi"), bot("Oh"), user("2?")], "answer": "4", "chosen": 1}],
        "pretrain": [{"text": "Once."}],
    }
    text, _ = preview.page(write(tmp_path, **rows), [])
    for shown in (
        "[messages] user: Hi\n[messages] assistant: ⟦Hello⟧\n[messages] user: Why?\n[messages] assistant: ⟦So.⟧",
        "[prompt] user: Hi\n[chosen] assistant: ⟦Yes⟧\n[rejected] assistant: ⟦No⟧\n[margin] 0.5",
        "[prompt] user: Hi\n[prompt] assistant: Oh\n[prompt] user: 2?\n[sampled] assistant: ⟦⟧\n[answer] 4\n[chosen] 1",
        "[text] ⟦Once.⟧",
    ):
        assert f"\n```\n{shown}\n```\n" in text
    text, _ = preview.page(tmp_path, [], characters("human-assistant"))
    for shown in (
        "<s>\n\nHuman: Hi\n\nAssistant:⟦ Hello</s>⟧\n\nHuman: Why?\n\nAssistant:⟦ So.</s>⟧",
        "[prompt] <s>\n\nHuman: Hi\n\nAssistant:\n[chosen] ⟦ Yes</s>⟧\n[rejected] ⟦ No</s>⟧\n[margin] 0.5",
        "<s>\n\nHuman: Hi\n\nAssistant: Oh</s>\n\nHuman: 2?\n\nAssistant:⟦⟧\n[answer] 4\n[chosen] 1",
        "[text] ⟦Once.⟧",
    ):
        assert f"\n```\n{shown}\n```\n" in text


def test_a_space_that_some_tokenizers_drop_is_shown(tmp_path):
    """Decoded alone, a Llama 2 tokenizer's ids lose the space they begin with."""
    text, _ = preview.page(write(tmp_path, sft=[sft("Hi", "Hello")]), [], small_tokenizers.llama_2(tmp_path / "model"))
    assert "[INST] Hi [/INST]⟦ Hello</s>⟧\n" in text


def test_texts_that_hold_the_marks_fences_or_control_characters(tmp_path):
    rows = [sft("```\nx\n```", "a ⟦⟦b⟧ \x1b[31m \u202e\r\n\tc")]
    text, _ = preview.page(write(tmp_path, sft=rows), [])
    assert (
        "\n````\n[messages] user: ```\nx\n```\n[messages] assistant: ⟦⟦⟦a ⟦⟦b⟧ \\x1b[31m \\u202e\\r\n\tc⟧⟧⟧\n````\n"
        in text
    )
    assert "between ⟦⟦⟦ and ⟧⟧⟧" in text


def test_a_text_of_brackets_alone_does_not_swell_the_page(tmp_path):
    text, _ = preview.page(write(tmp_path, sft=[sft("?", "⟦" * 100_000)]), [])
    assert len(text) < 10_000


def test_long_texts_and_dialogues_are_cut_in_the_middle(tmp_path):
    turns = [f"turn {i} " for i in range(30)]
    text, _ = preview.page(write(tmp_path, sft=[sft(*turns), sft("Hi", "a" * 5000 + "z")]), [])
    assert "turn 0 " in text and "turns not shown: 22 ..." in text and "turn 22 " not in text and "turn 23 " in text
    assert text.count("[messages] user: turn") + text.count("[messages] assistant: ⟦turn") == 8
    assert "aaa ... 4,301 characters are not shown ... aaa" in text and "az⟧" in text


def test_lengths_are_those_of_every_row(tmp_path, monkeypatch):
    """Against len() over all rows, with several batches and row groups, and characters outside the basic plane."""
    monkeypatch.setattr(preview, "_BATCH", 7)
    monkeypatch.setattr(preview, "_SAMPLE", 10)
    rng = random.Random(0)

    def text():
        return "".join(rng.choices(["a", "é", "中", "😀", "\x00", "\n"], k=rng.randrange(1, 400)))

    conversations = [sft(*(text() for _ in range(2 * rng.randrange(1, 4)))) for _ in range(50)]
    judged = [
        {"prompt": [user(text()), bot(text()), user(text())], "chosen": [bot(text())], "rejected": [bot(text())]}
        for _ in range(50)
    ]
    folder = write(tmp_path, sft=conversations, preference=judged, pretrain=[{"text": text()} for _ in range(50)])
    table = pq.read_table(folder / "sft/train.parquet")
    pq.write_table(table, folder / "sft/train.parquet", row_group_size=11)
    found = {path.parent.name: preview._read(path, None)[0].characters for path in folder.glob("*/train.parquet")}
    sums = [[len(m["content"]) for m in row["messages"]] for row in conversations]
    assert found["sft"]["prompt"].tolist() == [sum(row[:-1]) for row in sums]
    assert found["sft"]["answer"].tolist() == [row[-1] for row in sums]
    for name in ("prompt", "chosen", "rejected"):
        assert found["preference"][name].tolist() == [sum(len(m["content"]) for m in row[name]) for row in judged]
    texts = pq.read_table(folder / "pretrain/train.parquet")["text"].to_pylist()
    assert found["pretrain"]["text"].tolist() == list(map(len, texts))


def test_of_large_files_a_sample_is_read_and_said_so(tmp_path, monkeypatch):
    rows = demonstrations(300)
    text, _ = preview.page(write(tmp_path / "a", sft=rows), [])
    assert text.count("Row ") == 3 and "Row 1:\n" in text
    monkeypatch.setattr(preview, "_SAMPLE", 100)
    monkeypatch.setattr(preview, "_TOKENISED", 20)
    monkeypatch.setattr(preview, "_BATCH", 16)
    boring = [sft(f"{i}", "x" * 300) for i in range(300)]
    text, warnings = preview.page(write(tmp_path / "b", sft=boring), [], characters())
    assert text == preview.page(tmp_path / "b", [], characters())[0]  # the same rows each time
    assert any(line.startswith("sft/train: 100 of 100 sampled answers (100.0%) are one") for line in warnings)
    assert any(line.startswith("sft/train: 20 of 20 sampled answers (100.0%) are longer") for line in warnings)
    assert "| sft/train | answer |  300 | 300 |" in text and "| sft/train | answer |   20 | 301 |" in text


def test_percentiles_by_hand(tmp_path):
    """Of texts of 1, 2, ... 101 characters 5 % are shorter than 6, and so on."""
    folder = write(tmp_path, pretrain=[{"text": "x" * n} for n in random.Random(1).sample(range(1, 102), 101)])
    text, _ = preview.page(folder, [])
    assert "| pretrain/train | text |  101 |  6 |  51 |  96 | 100 | 101 |" in text


def test_the_page_begins_with_warnings_and_counts(tmp_path):
    """The ledger below them is of a real run in test_step0_prepare.py."""
    text, warnings = preview.page(write(tmp_path, sft=(demonstrations(2), demonstrations(1))), [])
    assert len(warnings) == 2
    told = f"**Look at these before you train:**\n\n- {warnings[0]}\n- {warnings[1]}"
    assert text.startswith(
        f"# Prepared data\n\n{told}\n\n```\nstage          train    eval\nsft                2       1\n"
    )
    text, warnings = preview.page(write(tmp_path / "fine", sft=(demonstrations(64), demonstrations(25))), [])
    assert warnings == [] and text.startswith("# Prepared data\n\nNo warnings.")
