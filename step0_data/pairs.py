"""Preferences: the forms that say which of two or more answers to a prompt is the better one.

Of a list with scores or ranks, the best answer and the worst become one pair. The margin of a pair is the difference
of their scores; a rank, or a count of votes, says which is better and not by how much, and gives none.
"""

import re

from step0_data.columns import LISTS, QUESTION, REJECTED, SCORES, Cells, has, number, says
from step0_data.turns import (
    BadRow,
    Record,
    assistant,
    check_answer,
    check_prompt,
    dialogue_of,
    has_user,
    kind,
    message,
    messages_of,
    prompt_of,
    unwritten,
)

_PROMPT = ("prompt", "conversations", "instruction", *QUESTION, "input")
_TEXTS = ("response", "text", "content", "answer", "completion", "output", "value")  # of an answer in a list
_MARKS = ("overall_score", "score", "rating", "reward", "rank")
_MARK = r"((?:overall_|avg_|average_)?(?:score|rating|reward|rank))"
_MARK_BESIDE = re.compile(rf"(?:{_MARK}[-_ .](chosen|rejected)|(chosen|rejected)[-_ .]{_MARK})", re.IGNORECASE)
_NO_PROMPT = re.compile(
    r"(?:.*[-_ ])?(?:id|idx|index|uuid|hash|source|dataset|subset|split|model|category|type|topic|lang|language|date)",
    re.IGNORECASE,
)  # columns of text that say where a row comes from, not what was asked


# chosen + rejected ---------------------------------------------------------------------------------------------------


def is_pair(row: dict) -> bool:
    """Also where one of the two is null: half a pair is a mistake, and nothing else."""
    return bool("chosen" in row and any(name in row for name in REJECTED) and has(row, "chosen", *REJECTED))


def pair(row: Cells) -> Record:
    """`chosen` + `rejected`, with a `prompt`, Alpaca's or ShareGPT's in front, or with the prompt inside both."""
    name = has(row, *REJECTED) or next(name for name in REJECTED if name in row)
    for column in ("chosen", name):
        if not has(row, column):
            raise BadRow(f"{column} is null, and the other answer of the pair is not", "give it an answer")
    prompt, is_open, answers = _prompt_side(row, (row.take("chosen"), row.take(name)))
    chosen, rejected = (
        _answer_side(answer_in(row, column, has(row, *_PROMPT), it), column, prompt is not None)
        for column, it in zip(("chosen", name), answers, strict=True)
    )
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("chosen and rejected are of different kinds", "make both strings or both lists of messages")
    if isinstance(chosen, str) and prompt is None:
        _check_no_other_text(row)
        prompt, chosen, rejected = _split_common_text(chosen, rejected)
        prompt = with_system(row, prompt)
    if isinstance(chosen, str):
        chosen, rejected = _answers(chosen, rejected, is_open=is_open)
    elif has_user(chosen) or has_user(rejected):  # whole conversations
        for column, messages in (("chosen", chosen), (name, rejected)):
            check_answer(messages, column)
        shared = _shared_prefix(chosen, rejected)
        said, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        prompt = with_system(row, _told_twice(prompt, said) if prompt else said)
    if has(row, "messages") and "messages" not in row.taken:
        told = messages_of(row["messages"], "messages")
        if told in ([*prompt, *chosen], [*prompt, *rejected], prompt):
            row.take("messages")
    check_prompt(prompt)
    for column, answer in (("chosen", chosen), (name, rejected)):
        check_answer(answer, column)
    if max(len(chosen), len(rejected)) > 1:
        raise BadRow("chosen and rejected part before the last turn", "let them differ in the last answer only")
    margin, aside = _margin(row)
    return Record(prompt, chosen, rejected, margin, set_aside=aside or unweighted([*chosen, *rejected]))


def _margin(row: Cells) -> tuple[float | None, str | None]:
    """(by how much the chosen answer is better, why the pair is set aside), of the margin and the scores beside it."""
    margin = _number_in(row, "margin", row.take)
    if margin is not None and margin < 0:
        return None, "its margin is negative: the rejected answer is the better one"
    sides = {}
    for column in row:
        if isinstance(column, str) and (found := _MARK_BESIDE.fullmatch(column.strip())):
            mark, side = (found[1] or found[4]).lower(), (found[2] or found[3]).lower()
            sides.setdefault(mark, {})[side] = column
    for mark, columns in sides.items():
        scores = [_number_in(row, columns[side], row.read) for side in ("chosen", "rejected") if side in columns]
        if len(scores) < 2 or None in scores:
            continue
        is_rank = mark.endswith("rank")
        difference = scores[1] - scores[0] if is_rank else scores[0] - scores[1]
        if difference == 0:
            return None, f"chosen and rejected have the same {mark}"
        if difference < 0:
            return None, f"by its {mark} the rejected answer is the better one"
        if margin is None and not is_rank:
            margin = difference
    return margin, None


def _number_in(row: Cells, column: str, read) -> float | None:
    """The number in a cell; None where it is empty."""
    value = read(column)
    if not says(value):
        return None
    found = number(value)
    if found is None:
        said = f"{value!r}" if isinstance(value, (str, int, float)) and not isinstance(value, bool) else kind(value)
        raise BadRow(f"{column} is {said}", "wanted a number")
    return found


def unweighted(answers: list[dict]) -> str | None:
    """Why a row is set aside whose weights leave nothing of one of these answers."""
    return "an answer has weight 0: it is not to be trained" if any("weight" in it for it in answers) else None


def _prompt_side(row: Cells, answers: tuple) -> tuple[list[dict] | None, bool, tuple]:
    """The prompt, whether it is a dialogue that the answers go on with, and the answers, as far as it has part of them.

    (None, False, answers) where no column has it.
    """
    column = has(row, *_PROMPT)
    if column == "conversations":
        return with_system(row, messages_of(row.take(column), column)), False, answers
    if column in ("instruction", "input"):
        return alpaca_prompt(row), False, answers
    if column is None and has(row, "messages"):  # all turns but the answer; or the whole of it, told again by `chosen`
        messages = messages_of(row["messages"], "messages")
        if messages and messages[-1]["role"] == "assistant":
            return None, False, answers
        row.take("messages")
        return with_system(row, messages), False, answers
    if column in QUESTION and isinstance(row[column], dict) and "full_text" in row[column]:  # webgpt's question
        return *prompt_of(row.take(column)["full_text"], column), answers
    if not column:
        return None, False, answers
    row.take(column)
    value, answers = _with_the_name_in_the_prompt(row[column], answers)
    return *whole_prompt(row, column, value), answers


def _with_the_name_in_the_prompt(prompt, answers: tuple) -> tuple:
    """rlhf-reward-datasets ends its dialogues with the question and begins both answers with "Assistant:"."""
    is_so = isinstance(prompt, str) and all(isinstance(a, str) and a.lstrip().startswith("Assistant:") for a in answers)
    dialogue = dialogue_of(prompt) if is_so else None
    if not dialogue or dialogue[0]["role"] != "user" or dialogue[-1]["role"] != "user":
        return prompt, answers
    in_a_line = "Assistant:" in prompt and "\n\nAssistant:" not in prompt
    open_prompt = prompt.rstrip() + (" " if in_a_line else "\n\n") + "Assistant:"
    return open_prompt, tuple(answer.lstrip().removeprefix("Assistant:") for answer in answers)


def answer_in(row: Cells, column: str, prompt_column: str | None, value):
    """An answer; messages that stand in the cell as JSON text become messages.

    Raises:
        BadRow: the prompt beside it is plain text, so that the answer may be meant to be just that text.
    """
    found = unwritten(value, column)
    beside_text = prompt_column and isinstance(unwritten(row[prompt_column], prompt_column), str)
    if found is not value and beside_text:
        raise BadRow(f"{column} is messages written as text, and the prompt is plain text", "write both as messages")
    return found


def _answers(*texts: str, is_open: bool) -> list[list[dict]]:
    """Each text as an answer; as the last turn of a dialogue it loses the white space around it, as the others do."""
    return [[assistant(text.strip() if is_open else text)] for text in texts]


def _answer_side(value, column: str, has_prompt: bool) -> str | list[dict]:
    """`chosen` or `rejected`: a plain string, or messages (a dialogue in one string becomes messages)."""
    if not isinstance(value, str):
        return messages_of(value, column)
    dialogue = dialogue_of(value)
    is_whole = dialogue and has_user(dialogue) and (len(dialogue) > 1 or not has_prompt)
    if has_prompt and is_whole and dialogue[0]["role"] == "assistant":
        is_whole = False
    if dialogue and not has_prompt and not is_whole:
        raise BadRow("the dialogue has no Human turn, so nothing was asked", "add a prompt column or remove the row")
    return dialogue if is_whole else value


def _told_twice(prompt: list[dict], shared: list[dict]) -> list[dict]:
    """The prompt where a column and both conversations tell it: all of it or a part.

    Raises:
        BadRow: it is not so.
    """
    first, second = ([m["content"].strip() for m in it] for it in (prompt, shared))
    if any(second[at : at + len(first)] == first for at in range(len(second) - len(first) + 1)):
        return shared
    if second and first[-len(second) :] == second:
        return prompt
    raise BadRow("the prompt is not what chosen and rejected begin with", "give the turns once, in prompt or in both")


def _shared_prefix(first: list[dict], second: list[dict]) -> int:
    """How many messages two conversations share, up to the answers they differ in (or the last, if they are equal)."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    while shared and (shared == min(len(first), len(second)) or first[shared - 1]["role"] == "assistant"):
        shared -= 1
    return shared


def _check_no_other_text(row: Cells) -> None:
    """A prompt is cut out of two answers only where no column can be the prompt."""
    way_out = "or take the column out, and what both answers begin with is the prompt"
    for column, value in row.items():
        name = str(column).strip()
        if column in _PROMPT:
            raise BadRow(f"there is no prompt: {column} is {kind(value)}", f"fill it; {way_out}")
        if column in row.taken or name == "system" or _MARK_BESIDE.fullmatch(name) or _NO_PROMPT.fullmatch(name):
            continue
        if _holds_text(value):
            raise BadRow(f"there is no prompt: is it the column {column}?", f"say --columns prompt={column}; {way_out}")


def _holds_text(value) -> bool:
    """Whether it is text that may have been asked, or holds some."""
    if isinstance(value, dict):
        value = [it for name, it in value.items() if not _NO_PROMPT.fullmatch(str(name))]
    if isinstance(value, (list, tuple)):
        return any(map(_holds_text, value))
    return isinstance(value, str) and bool(value.strip()) and number(value) is None


def _split_common_text(first: str, second: str) -> tuple[list[dict], str, str]:
    """The prompt inside two plain strings is what they share, up to the last white space of it."""
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    shared = max(first.rfind(" ", 0, shared), first.rfind("\n", 0, shared))
    if shared < 1:
        raise BadRow("there is no prompt: chosen and rejected share no beginning", "add a prompt column")
    return [message("user", first[:shared])], first[shared:].lstrip(), second[shared:].lstrip()


# Lists of answers with scores or ranks -------------------------------------------------------------------------------


def is_scored(row: dict) -> bool:
    column = has(row, *LISTS)
    if not column or not isinstance(row[column], list):
        return False
    return bool(has(row, *SCORES)) or any(isinstance(it, dict) and has(it, *_MARKS) for it in row[column])


def scored(row: Cells) -> Record:
    """Best against worst; answers without a score are left out, and of equal ones the first is taken."""
    column, marks = has(row, *LISTS), has(row, *SCORES)
    answers = row.take(column)
    if marks:
        scores = row.take(marks)
        if not isinstance(scores, list) or len(scores) != len(answers):
            size = f"has {len(scores)}" if isinstance(scores, list) else f"is {kind(scores)}"
            raise BadRow(f"{column} has {len(answers)} entries and {marks} {size}", "give every answer its score")
    else:
        marks = next(mark for it in answers if isinstance(it, dict) and (mark := has(it, *_MARKS)))
        scores = [it.get(marks) if isinstance(it, dict) else None for it in answers]
    items = [it for it in answers if isinstance(it, dict)]
    row.leave_out(
        f"{column}.{key}" for it in items for key, value in it.items() if key not in (*_TEXTS, marks) and says(value)
    )
    is_rank = marks in ("rank", "ranks")
    known = [(number(score), answer) for score, answer in zip(scores, answers, strict=True)]
    known = [
        (-score if is_rank else score, _text_of(row, answer, column)) for score, answer in known if score is not None
    ]
    if len(known) < 2:
        raise BadRow(f"{column} has fewer than two answers with a score", "give every answer its score")
    best, worst = max(known, key=lambda it: it[0]), min(known, key=lambda it: it[0])
    return _verdict(row, best, worst, has_margin=not is_rank)


def _text_of(row: Cells, answer, column: str) -> str:
    if isinstance(answer, dict):
        texts = {key: answer[key] for key in _TEXTS if isinstance(answer.get(key), str)}
        if len(set(texts.values())) > 1:
            raise BadRow(f"{column} has an answer with {' and '.join(texts)}", "keep one of them")
        answer = next(iter(texts.values()), None)
    if not isinstance(answer, str):
        raise BadRow(f"{column} has an answer without text", f"wanted text or {{{', '.join(_TEXTS[:3])}: ...}}")
    if unwritten(answer, column) is not answer:
        raise BadRow(f"{column} has an answer that is messages written as text", "write the answer's own text")
    return answer


def _verdict(row: Cells, best: tuple, worst: tuple, has_margin: bool) -> Record:
    """The pair of two (score, answer); equal scores say nothing about which is better."""
    prompt, is_open, texts = _prompt_side(row, (best[1], worst[1]))
    chosen, rejected = _answers(*texts, is_open=is_open)
    check_prompt(prompt)
    check_answer(chosen, "the better answer")
    check_answer(rejected, "the worse answer")
    difference = best[0] - worst[0]
    aside = None if difference else "no answer scores better than another"
    return Record(prompt, chosen, rejected, difference if has_margin and difference else None, set_aside=aside)


# Two answers side by side: WebGPT's and Stanford's -------------------------------------------------------------------


def is_webgpt(row: dict) -> bool:
    return {"answer_0", "answer_1", "score_0", "score_1"} <= row.keys()


def webgpt(row: Cells) -> Record:
    scores = [number(row.take(f"score_{side}")) for side in "01"]
    if None in scores:
        raise BadRow("score_0 or score_1 is no number", "give both answers a score")
    ranked = sorted(zip(scores, (text_in(row, f"answer_{side}") for side in "01"), strict=True), key=lambda it: -it[0])
    row.leave_out(name for name in row if str(name).endswith(("_0", "_1")))  # quotes and tokens of one answer
    return _verdict(row, ranked[0], ranked[1], has_margin=True)


def is_shp(row: dict) -> bool:
    return {"history", "human_ref_A", "human_ref_B", "labels"} <= row.keys()


def shp(row: Cells) -> Record:
    """`labels` is 1 where comment A was preferred. Its votes depend on how many people passed by: no margin."""
    label = number(row.take("labels"))
    if label not in (0, 1):
        raise BadRow(f"labels is {row['labels']!r}", "wanted 1 (A is preferred) or 0 (B is)")
    a, b = ((score, text_in(row, f"human_ref_{side}")) for score, side in ((label, "A"), (1 - label, "B")))
    row.leave_out(name for name in row if str(name).endswith(("_A", "_B")))
    row.leave_out(("seconds_difference", "score_ratio"))
    row["prompt"], row["history"] = text_in(row, "history"), ""
    return _verdict(row, *sorted((a, b), reverse=True), has_margin=False)


def text_in(row: Cells, column: str) -> str:
    """The text of a cell."""
    value = row.take(column)
    if not isinstance(value, str):
        raise BadRow(f"{column} is {kind(value)}", "wanted text")
    if unwritten(value, column) is not value:
        raise BadRow(f"{column} is messages written as text", "wanted plain text; messages go under prompt or messages")
    return value


# Prompts in several columns ------------------------------------------------------------------------------------------


def alpaca_prompt(row: Cells) -> list[dict]:
    """Instruction and input (or Dolly's context), a line each; the one that is there where the other is empty."""
    columns = [column for column in ("instruction", has(row, "input") or "context") if has(row, column)]
    row.take("instruction", "input", *columns)
    return with_system(row, [*_history(row), message("user", "\n".join(text_in(row, column) for column in columns))])


def whole_prompt(row: Cells, column: str, value=None) -> tuple[list[dict], bool]:
    """`prompt_of` a column (or of what was made of its value), with what `system` and `history` have in front of it."""
    cell = row.take(column)
    prompt, is_open = prompt_of(cell if value is None else value, column)
    return with_system(row, [*_history(row), *prompt]), is_open


def _history(row: Cells) -> list[dict]:
    turns = row.take("history") if has(row, "history") else []
    row.take("history")
    pairs = isinstance(turns, list) and all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in turns)
    if not pairs or not all(isinstance(text, str) for turn in turns for text in turn):
        raise BadRow("history is no list of pairs of strings", 'wanted [["question", "answer"], ...]')
    return [message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def with_system(row: Cells, messages: list[dict]) -> list[dict]:
    """The messages with the text of a `system` column in front."""
    row.take("system")
    if not has(row, "system"):
        return messages
    first = message("system", text_in(row, "system"))
    if messages and messages[0]["role"] == "system":
        if messages[0] != first:
            raise BadRow("there are two system texts, in the column system and in the messages", "remove one of them")
        return messages
    return [first, *messages]
