"""Preferences: the forms that say which of two or more answers to a prompt is the better one.

Of a list with scores or ranks, the best answer and the worst become one pair. The margin of a pair is the difference
of their scores; a rank, or a count of votes, says which is better and not by how much, and gives none.
"""

from step0_data.columns import ALPACA, LISTS, QUESTION, REJECTED, SCORES, has, number, rest
from step0_data.turns import (
    BadRow,
    Record,
    assistant,
    check_answer,
    check_prompt,
    dialogue_of,
    message,
    messages_of,
    prompt_of,
)

_PROMPT = ("prompt", "conversations", "instruction", *QUESTION)
_TEXTS = ("response", "text", "content", "answer", "completion", "output", "value")  # of an answer in a list
_MARKS = ("overall_score", "score", "rating", "reward", "rank")


# chosen + rejected ---------------------------------------------------------------------------------------------------


def is_pair(row: dict) -> bool:
    """Also where one of the two is null: half a pair is a mistake, and nothing else."""
    return bool("chosen" in row and any(name in row for name in REJECTED) and has(row, "chosen", *REJECTED))


def pair(row: dict) -> Record:
    """`chosen` + `rejected`, with a `prompt`, Alpaca's or ShareGPT's in front, or with the prompt inside both."""
    name = has(row, *REJECTED) or next(name for name in REJECTED if name in row)
    for column in ("chosen", name):
        if not has(row, column):
            raise BadRow(f"{column} is null, and the other answer of the pair is not", "give it an answer")
    row = _with_the_name_in_the_prompt(row, name)
    prompt, is_open = _prompt_side(row)
    chosen, rejected = (_answer_side(row[column], column, prompt is not None) for column in ("chosen", name))
    used = {"chosen", name, "prompt", "conversations", "messages", "margin", *ALPACA}
    if not has(row, "prompt", "conversations", "instruction"):
        used |= set(QUESTION)

    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("chosen and rejected are of different kinds", "make both strings or both lists of messages")
    if isinstance(chosen, str) and prompt is None:
        prompt, chosen, rejected = _split_common_text(chosen, rejected)
        prompt = with_system(row, prompt)
    if isinstance(chosen, str):
        chosen, rejected = _answers(chosen, rejected, is_open=is_open)
    elif chosen and rejected and (chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant"):
        # Whole conversations: what both share is the prompt, whatever a `prompt` column repeats of it.
        for column, messages in (("chosen", chosen), (name, rejected)):
            check_answer(messages, column)
        shared = _shared_prefix(chosen, rejected)
        prompt, chosen, rejected = with_system(row, chosen[:shared]), chosen[shared:], rejected[shared:]
    check_prompt(prompt)
    if max(len(chosen), len(rejected)) > 1:
        raise BadRow("chosen and rejected part before the last turn", "let them differ in the last answer only")
    for column, answer in (("chosen", chosen), (name, rejected)):
        check_answer(answer, column)
    margin = number(row.get("margin"))
    if margin is None and row.get("margin") not in (None, ""):
        raise BadRow(f"margin is {row['margin']!r}", "wanted a number")
    return Record(prompt, chosen, rejected, margin, extra=rest(row, used))


def _prompt_side(row: dict) -> tuple[list[dict] | None, bool]:
    """The prompt and whether it is a dialogue that the answers go on with; (None, False) where no column has it."""
    column = has(row, *_PROMPT)
    if column == "conversations":
        return with_system(row, messages_of(row[column], column)), False
    if column == "instruction":
        return alpaca_prompt(row), False
    if column is None and has(row, "messages"):  # all turns but the answer; or the whole of it, told again by `chosen`
        messages = with_system(row, messages_of(row["messages"], "messages"))
        return (None if messages and messages[-1]["role"] == "assistant" else messages), False
    if column in QUESTION and isinstance(row[column], dict) and "full_text" in row[column]:  # webgpt's question
        return prompt_of(row[column]["full_text"], column)
    return whole_prompt(row, column) if column else (None, False)


def _with_the_name_in_the_prompt(row: dict, rejected: str) -> dict:
    """rlhf-reward-datasets ends its dialogues with the question and begins both answers with "Assistant:"."""
    prompt, answers = row.get("prompt"), [row["chosen"], row[rejected]]
    is_so = isinstance(prompt, str) and all(isinstance(a, str) and a.lstrip().startswith("Assistant:") for a in answers)
    dialogue = dialogue_of(prompt) if is_so else None
    if not dialogue or dialogue[0]["role"] != "user" or dialogue[-1]["role"] != "user":
        return row
    chosen, other = (answer.lstrip().removeprefix("Assistant:") for answer in answers)
    in_a_line = "Assistant:" in prompt and "\n\nAssistant:" not in prompt
    open_prompt = prompt.rstrip() + (" " if in_a_line else "\n\n") + "Assistant:"
    return row | {"prompt": open_prompt, "chosen": chosen, rejected: other}


def _answers(*texts: str, is_open: bool) -> list[list[dict]]:
    """Each text as an answer; as the last turn of a dialogue it loses the white space around it, as the others do."""
    return [[assistant(text.strip() if is_open else text)] for text in texts]


def _answer_side(value, column: str, has_prompt: bool) -> str | list[dict]:
    """`chosen` or `rejected`: a plain string, or messages (a dialogue in one string becomes messages)."""
    if not isinstance(value, str):
        return messages_of(value, column)
    dialogue = dialogue_of(value)
    if dialogue and not has_prompt and dialogue[0]["role"] == "assistant":
        raise BadRow("the dialogue begins with an Assistant turn", "begin it with a Human turn or remove the row")
    is_whole = dialogue and dialogue[0]["role"] == "user" and (len(dialogue) > 1 or not has_prompt)
    return dialogue if is_whole else value


def _shared_prefix(first: list[dict], second: list[dict]) -> int:
    """How many messages two conversations share, up to the answers they differ in (or the last, if they are equal)."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    while shared and (shared == min(len(first), len(second)) or first[shared - 1]["role"] == "assistant"):
        shared -= 1
    return shared


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


def scored(row: dict) -> Record:
    """Best against worst; answers without a score are left out, and of equal ones the first is taken."""
    column, marks = has(row, *LISTS), has(row, *SCORES)
    answers = row[column]
    if marks:
        scores = row[marks]
        if not isinstance(scores, list) or len(scores) != len(answers):
            size = f"has {len(scores)}" if isinstance(scores, list) else f"is a {type(scores).__name__}"
            raise BadRow(f"{column} has {len(answers)} entries and {marks} {size}", "give every answer its score")
    else:
        marks = next(mark for it in answers if isinstance(it, dict) and (mark := has(it, *_MARKS)))
        scores = [it.get(marks) if isinstance(it, dict) else None for it in answers]
    is_rank = marks in ("rank", "ranks")
    known = [(number(score), answer) for score, answer in zip(scores, answers, strict=True)]
    known = [(-score if is_rank else score, _text_of(answer, column)) for score, answer in known if score is not None]
    if len(known) < 2:
        raise BadRow(f"{column} has fewer than two answers with a score", "give every answer its score")
    best, worst = max(known, key=lambda it: it[0]), min(known, key=lambda it: it[0])
    return _verdict(row, best, worst, used={column, marks}, has_margin=not is_rank)


def _text_of(answer, column: str) -> str:
    text = answer.get(has(answer, *_TEXTS)) if isinstance(answer, dict) else answer
    if not isinstance(text, str):
        raise BadRow(f"{column} has an answer without text", f"wanted a string or {{{', '.join(_TEXTS[:3])}: ...}}")
    return text


def _verdict(row: dict, best: tuple, worst: tuple, used: set[str], has_margin: bool) -> Record:
    """The pair of two (score, answer); equal scores say nothing about which is better."""
    prompt, is_open = _prompt_side(row)
    chosen, rejected = _answers(best[1], worst[1], is_open=is_open)
    check_prompt(prompt)
    check_answer(chosen, "the better answer")
    check_answer(rejected, "the worse answer")
    difference = best[0] - worst[0]
    aside = None if difference else "no answer scores better than another"
    extra = rest(row, used | {*_PROMPT, "messages", *ALPACA})
    return Record(prompt, chosen, rejected, difference if has_margin and difference else None, None, extra, aside)


# Two answers side by side: WebGPT's and Stanford's -------------------------------------------------------------------


def is_webgpt(row: dict) -> bool:
    return {"answer_0", "answer_1", "score_0", "score_1"} <= row.keys()


def webgpt(row: dict) -> Record:
    scores = [number(row[f"score_{side}"]) for side in "01"]
    if None in scores:
        raise BadRow("score_0 or score_1 is no number", "give both answers a score")
    ranked = sorted(zip(scores, (_string(row, f"answer_{side}") for side in "01"), strict=True), key=lambda it: -it[0])
    own = {name for name in row if name.endswith(("_0", "_1"))}  # quotes and tokens of one answer are not the prompt's
    return _verdict(row, ranked[0], ranked[1], used=own, has_margin=True)


def is_shp(row: dict) -> bool:
    return {"history", "human_ref_A", "human_ref_B", "labels"} <= row.keys()


def shp(row: dict) -> Record:
    """`labels` is 1 where comment A was preferred. Its votes depend on how many people passed by: no margin."""
    label = number(row["labels"])
    if label not in (0, 1):
        raise BadRow(f"labels is {row['labels']!r}", "wanted 1 (A is preferred) or 0 (B is)")
    a, b = ((score, _string(row, f"human_ref_{side}")) for score, side in ((label, "A"), (1 - label, "B")))
    own = {name for name in row if name.endswith(("_A", "_B"))} | {"labels", "seconds_difference", "score_ratio"}
    row = {"prompt": _string(row, "history")} | rest(row, {"history", "prompt"})
    return _verdict(row, *sorted((a, b), reverse=True), used=own, has_margin=False)


def _string(row: dict, column: str) -> str:
    if not isinstance(row[column], str):
        raise BadRow(f"{column} is a {type(row[column]).__name__}", "wanted a string")
    return row[column]


# Prompts in several columns ------------------------------------------------------------------------------------------


def alpaca_prompt(row: dict) -> list[dict]:
    parts = [_string(row, column) for column in ("instruction", has(row, "input", "context")) if column]  # Dolly's name
    return with_system(row, [*_history(row), message("user", "\n".join(parts))])


def whole_prompt(row: dict, column: str) -> tuple[list[dict], bool]:
    """`prompt_of` a column, with what the columns `system` and `history` have in front of it."""
    prompt, is_open = prompt_of(row[column], column)
    return with_system(row, [*_history(row), *prompt]), is_open


def _history(row: dict) -> list[dict]:
    turns = row["history"] if has(row, "history") else []
    pairs = isinstance(turns, list) and all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in turns)
    if not pairs or not all(isinstance(text, str) for turn in turns for text in turn):
        raise BadRow("history is no list of pairs of strings", 'wanted [["question", "answer"], ...]')
    return [message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def with_system(row: dict, messages: list[dict]) -> list[dict]:
    """The messages with the text of a `system` column in front."""
    if not has(row, "system"):
        return messages
    first = message("system", _string(row, "system"))
    if messages and messages[0]["role"] == "system":
        if messages[0] != first:
            raise BadRow("there are two system texts, in the column system and in the messages", "remove one of them")
        return messages
    return [first, *messages]
