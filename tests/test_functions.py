"""FILE.py:FUNCTION, rewards and judges: what they are given, what they may return, and how they may end."""

import asyncio
import decimal
import fractions
import functools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import functions
from common.errors import UserError
from common.functions import Function

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ["An apple pie is tasty.", " Sure!", "", "42.", "Unhappy bees rarely"]
CUT = [False, False, False, False, True]
IDS = [[1, 2], [3], [4], [5, 6, 7], [8]]


def rows_of(**columns) -> list[dict]:
    rows = [{"prompt": [{"role": "user", "content": f"Question {i}"}]} for i in range(5)]
    return [row | {name: values[i] for name, values in columns.items()} for i, row in enumerate(rows)]


def call(function, rows: list[dict] | None = None, timeout: float = 0.0) -> list:
    return Function("reward mine", function, timeout)(rows or rows_of(), TEXTS, CUT, IDS)


def refusal(function, rows: list[dict] | None = None, timeout: float = 0.0) -> str:
    with pytest.raises(UserError) as caught:
        call(function, rows, timeout)
    said = str(caught.value)
    assert said.startswith("reward mine ") and "\n" not in said, said
    return said


# ---- what a function is given


def test_a_function_gets_conversations_and_every_further_column():
    marks = [{"level": 1}, [1, 2], None, "text", 3.5]
    rows = rows_of(mark=marks)
    rows[0]["answer"] = "42"
    seen = {}

    def function(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, columns=columns)
        return [1, 2.5, None, -3, 0]

    assert call(function, rows) == [1, 2.5, None, -3, 0]
    assert seen["prompts"] == [row["prompt"] for row in rows]
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert seen["columns"].keys() >= {"mark", "answer", "truncated", "completion_ids"}
    assert seen["columns"]["mark"] == marks and seen["columns"]["completion_ids"] == IDS
    assert seen["columns"]["answer"] == ["42", None, None, None, None] and seen["columns"]["truncated"] == CUT


def test_a_function_gets_only_what_it_takes():
    rows = rows_of(answer=[row["prompt"][0]["content"] for row in rows_of()])
    assert call(lambda prompts, completions: [0.5] * 5, rows) == [0.5] * 5
    assert call(lambda completions, **_: [1] * 5, rows) == [1] * 5
    assert call(lambda prompts, completions, answer: [len(a) for a in answer], rows) == [10] * 5
    assert call(lambda prompts, completions, other=None: [float(other is None)] * 5, rows) == [1] * 5
    assert call(lambda prompts, completions, truncated: truncated, rows_of(truncated=[7] * 5)) == [7] * 5


def test_a_function_may_spoil_what_it_is_given():
    """Copies, and of every value its own: responses to one prompt share the prompt's row."""
    one = {"prompt": [{"role": "user", "content": "Hi"}], "tags": ["a"], "check": {"letter": "r"}}
    rows = [one] * 5

    def spoils(prompts, completions, tags, check, truncated, completion_ids):
        turns = []
        for prompt, said, tag, rule, ids in zip(prompts, completions, tags, check, completion_ids, strict=True):
            prompt += said
            prompt[0]["content"] = "spoilt"
            tag.clear()
            rule.pop("letter")
            ids.append(9)
            turns.append(len(prompt))
        for values in (prompts, completions, tags, check, truncated, completion_ids):
            values.clear()
        return turns

    for _ in range(3):
        assert call(spoils, rows) == [2] * 5
    assert one == {"prompt": [{"role": "user", "content": "Hi"}], "tags": ["a"], "check": {"letter": "r"}}
    assert IDS == [[1, 2], [3], [4], [5, 6, 7], [8]] and CUT == [False] * 4 + [True] and len(TEXTS) == 5


def test_what_a_function_sets_for_the_whole_process_is_put_back(tmp_path):
    def careless(prompts, completions):
        os.chdir(tmp_path)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return [0.0] * 5

    folder = os.getcwd()
    call(careless)
    assert os.getcwd() == folder and torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


# ---- functions written for TRL's GRPO, as its documentation has them


def reward_func(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def by_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_ground_truth(completions, ground_truth, **kwargs):
    found = [re.search(r"\d+", completion[0]["content"]) for completion in completions]
    return [1.0 if m and m[0] == truth else 0.0 for m, truth in zip(found, ground_truth, strict=True)]


def math_only(prompts, completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]


def logging(completions, log_extra=None, log_metric=None, **kwargs):
    log_extra("length", [len(completion[0]["content"]) for completion in completions])
    log_metric("mean_length", 3.0)
    return [0.5] * len(completions)


def schedule(prompts, completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(prompts)


async def awaited(prompts, completions, completion_ids, **kwargs):
    async def one(ids):
        await asyncio.sleep(0.001)
        return float(len(ids))

    return await asyncio.gather(*map(one, completion_ids))


def positional(prompts, completions, /, ground_truth=None, **kwargs):
    return [float(truth) for truth in ground_truth]


class Punisher:
    def __init__(self, most: int = 2):
        self.most = most

    def __call__(self, completion_ids, **kwargs):
        return [min(0.0, float(self.most - len(ids))) for ids in completion_ids]


def traced(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


TRL = [
    (reward_func, [22.0, 6.0, 0.0, 3.0, 19.0]),
    (by_ids, [2.0, 1.0, 1.0, 3.0, 1.0]),
    (by_ground_truth, [0.0, 0.0, 0.0, 1.0, 0.0]),
    (math_only, [1.0, None, None, 1.0, None]),
    (logging, [0.5] * 5),
    (schedule, [0.0] * 5),
    (awaited, [2.0, 1.0, 1.0, 3.0, 1.0]),
    (positional, [7.0, 8.0, 9.0, 42.0, 1.0]),
    (Punisher(), [0.0, 0.0, 0.0, -1.0, 0.0]),
    (functools.partial(math_only, task=["math", "code", "code", "math", "code"]), [1.0, None, None, 1.0, None]),
    (traced(by_ground_truth), [0.0, 0.0, 0.0, 1.0, 0.0]),
    (lambda prompts, completions, **_: [len(p) for p in prompts], [1] * 5),
]


@pytest.mark.parametrize("function, wanted", TRL, ids=[getattr(f, "__name__", type(f).__name__) for f, _ in TRL])
def test_functions_for_trl_run_unchanged(function, wanted, capsys):
    rows = rows_of(ground_truth=["7", "8", "9", "42", "1"], task=["math", "code", "code", "math", "code"])
    assert call(function, rows) == wanted
    note = "note: reward mine logs 'length', which is not kept here; only scores are\n"
    assert capsys.readouterr().err == note * (function is logging)


# ---- what a function may return


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, None, -2, 0],
        (1.0, 0.5, None, -2.0, 0.0),
        [True, fractions.Fraction(1, 2), None, decimal.Decimal("-2"), False],
        [np.float32(1), np.float64(0.5), None, np.int64(-2), np.bool_(False)],
        [torch.tensor(1.0), torch.tensor(0.5, dtype=torch.bfloat16), None, torch.tensor(-2), np.array(0.0)],
    ],
)
def test_numbers_of_all_kinds_are_scores(returned):
    found = call(lambda prompts, completions: returned)
    assert found == [1, 0.5, None, -2, 0] and {type(score) for score in found} == {float, type(None)}


@pytest.mark.parametrize("make", [np.array, torch.tensor, pd.Series, lambda x: torch.tensor(x, requires_grad=True)])
def test_arrays_of_numbers_are_scores(make):
    assert call(lambda prompts, completions: make([1.0, 0.5, 3.0, -2.0, 0.0])) == [1, 0.5, 3, -2, 0]


@pytest.mark.parametrize(
    "returned, words",
    [
        ([1.0] * 4, "4 scores for 5 responses; it has to give one for each"),
        ([], "0 scores for 5 responses"),
        (np.ones(6), "6 scores for 5 responses"),
        (None, "None, wanted a list of 5 numbers or None, one for each response"),
        (0.5, "0.5, wanted a list of 5 numbers"),
        (torch.tensor(0.5), "the Tensor tensor(0.5000), wanted a list"),
        (np.ones((5, 1)), "the ndarray array([[1.], [1.], [1.], [1.], [1.]]), wanted a list"),
        ("77777", "the text '77777', wanted a list"),
        (dict.fromkeys(range(5), 9.0), "the dictionary {0: 9.0, 1: 9.0"),
        (dict.fromkeys("abcde", 9.0).values(), "the dict_values dict_values([9.0"),
        ({1, 2, 3, 4, 5}, "the set {1, 2, 3, 4, 5}, wanted a list"),
        ((1.0 for _ in range(5)), "a generator, wanted a list"),
        (lambda: 1, "a function, wanted a list"),
        ([1, 2, "0.75", 4, 5], "the text '0.75' for response 2, ''; wanted a finite number, or None for no opinion"),
        ([1, "A", 3, 4, 5], "the text 'A' for response 1, ' Sure!'; wanted a finite number"),
        ([1, 2, [3], 4, 5], "[3] for response 2"),
        ([{"score": 1}, 2, 3, 4, 5], "the dictionary {'score': 1} for response 0, 'An apple pie is tasty.'"),
        ([1, 2, 3, 4, 1j], "the complex 1j for response 4"),
        ([1, 2, math.inf, 4, 5], "inf for response 2"),
        ([1, math.nan, 3, 4, 5], "nan for response 1, ' Sure!'; wanted a finite number, or None for no opinion"),
        ([1, 2, 3, 1e39, 5], "1e+39 for response 3, '42.'; wanted a finite number of at most 3.4e+38, or None"),
        ([1, 2, 3, -(10**60), 5], f"{-(10**60)!s:.60} for response 3"),
        ([10**500] * 5, f"{10**59} for response 0"),
        ([10**5000] * 5, "a number for response 0"),
        ([decimal.Decimal("sNaN")] * 5, "the Decimal Decimal('sNaN') for response 0"),
        ([np.str_("1")] * 5, "the str_ np.str_('1') for response 0"),
        (np.array(["1"] * 5), "the text '1' for response 0"),
        (np.array([1, 2, np.nan, 4, 5]), "nan for response 2"),
        ([torch.ones(2)] * 5, "the Tensor tensor([1., 1.]) for response 0"),
        ([object()] * 5, "a object for response 0"),
    ],
)
def test_what_is_no_list_of_scores_is_refused(returned, words):
    assert f"reward mine returned {words}" in refusal(lambda prompts, completions: returned)


@given(st.lists(st.none() | st.floats() | st.integers() | st.text(max_size=5) | st.booleans(), min_size=5, max_size=5))
def test_scores_are_taken_whole_or_not_at_all(returned):
    def is_score(x):
        return x is None or (not isinstance(x, str) and math.isfinite(np.float32(x)) and abs(x) <= 3.4028234e38)

    with np.errstate(over="ignore"):
        good = all(map(is_score, returned))
    if good:
        assert call(lambda prompts, completions: returned) == returned
    else:
        refusal(lambda prompts, completions: returned)


# ---- how a function may end


def test_an_exception_is_one_line_with_the_place(tmp_path):
    (tmp_path / "gone.py").write_text(
        "def judge(prompts, completions):\n    ask()\ndef ask():\n    raise ConnectionError('port 8123\\nis silent')\n"
    )
    function, _ = functions.load(f"{tmp_path / 'gone.py'}:judge", "--judge", "judge judge")
    with pytest.raises(UserError) as caught:
        function(rows_of(), TEXTS, CUT, IDS)
    assert str(caught.value) == (
        "judge judge failed on 5 responses, the first 'An apple pie is tasty.': ConnectionError: port 8123 is silent "
        "(gone.py line 4: raise ConnectionError('port 8123\\nis silent'))"
    )


@pytest.mark.parametrize("code", [0, 1, "bye", None])
def test_a_function_cannot_end_the_program(code):
    assert f"called sys.exit({code!r}) on 5 responses" in refusal(lambda completions, **_: sys.exit(code))


def test_nor_by_leaving_without_cleaning_up():
    leave = os._exit
    assert "called sys.exit(0) on 5 responses" in refusal(lambda completions, **_: os._exit(0))
    assert os._exit is leave


def test_a_child_that_a_function_forks_may_leave(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)

    def forks(prompts, completions):
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)  # a child is another process
            with pytest.raises(SystemExit):  # which `left` cannot end
                os._exit(7)
        return [0.0] * 5

    assert call(forks) == [0.0] * 5 and left == [7]


@pytest.mark.parametrize("kind", [StopIteration, RecursionError, GeneratorExit, asyncio.CancelledError, UserError])
def test_whatever_is_raised_is_the_functions_failure(kind):
    def raises(prompts, completions):
        raise kind("why")

    assert f"failed on 5 responses, the first 'An apple pie is tasty.': {kind.__name__}: why" in refusal(raises)


def test_a_function_that_takes_messages_for_text_is_told():
    said = refusal(lambda prompts, completions: [len(completion.split()) for completion in completions])
    assert 'a completion is a list of messages, its text is completion[-1]["content"]' in said


def test_ctrl_c_stays_ctrl_c():
    def interrupted(prompts, completions):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        call(interrupted, timeout=60)


def sleeps(prompts, completions):
    time.sleep(60)


def counts(prompts, completions):
    while True:
        pass


def matches(prompts, completions):  # holds the interpreter's lock for ever
    return [float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))) for _ in completions]


def forgives(prompts, completions):
    try:
        time.sleep(60)
    except:  # noqa: E722
        return [0.0] * len(completions)


async def waits(prompts, completions):
    await asyncio.sleep(60)


@pytest.mark.parametrize("function", [sleeps, counts, matches, forgives, waits])
def test_a_function_that_does_not_return_is_given_up(function):
    before, alarm, start = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL), time.monotonic()
    with pytest.raises(UserError) as caught:
        Function("reward mine", function, 0.2, __file__)(rows_of(), TEXTS, CUT, IDS)
    said = str(caught.value)
    assert "has not returned within --reward_timeout 0.2 seconds on 5 responses, the first 'An apple" in said
    assert "(test_functions.py line " in said or function in (forgives, waits)
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGALRM) is before  # and an alarm of somebody else's goes on
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (alarm[0] > 0)


def test_in_time_is_in_time():
    alarm = signal.getitimer(signal.ITIMER_REAL)
    assert call(lambda prompts, completions: [time.sleep(0.01)] * 5, timeout=30) == [None] * 5
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (alarm[0] > 0)


def test_what_swallows_every_interruption_is_ended_all_the_same():
    code = (
        "import sys, time\nsys.path.insert(0, '.')\nfrom common.functions import Function\n"
        "def stubborn(prompts, completions):\n"
        "    while True:\n        try:\n            time.sleep(60)\n        except BaseException:\n            pass\n"
        "row = {'prompt': [{'role': 'user', 'content': 'Hi'}]}\n"
        "Function('reward stubborn', stubborn, 0.2)([row], ['Ho'], [False], [[1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "in stubborn" in done.stderr


# ---- loading

CODE = """
import dataclasses
LEVEL = 3
def trl(completions, **kwargs): return [LEVEL] * len(completions)
def full(prompts, completions, answer, **columns): return [0.0] * len(prompts)
def bare(prompts, completions): return [1.0] * len(prompts)
def wrong(texts): return [0.0]
def half(completions): return [0.0]
def _hidden(): pass
class Judge:
    def __call__(self, completions, **_): return [2.0] * len(completions)
class Plain: pass
judge = Judge()
"""


def load(spec: str):
    return functions.load(spec, "--reward", "reward mine")


def test_functions_are_loaded_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text(CODE)  # does not get in the way of Python's own
    monkeypatch.chdir(tmp_path)
    for name in ("trl", "full", "bare"):
        assert functions.is_function(f"json.py:{name}")
        function, module = load(f"json.py:{name}")
        assert function.function.__name__ == name and module.LEVEL == 3
    for name, score in (("trl", 3), ("judge", 2), ("Judge", 2)):
        assert load(f"json.py:{name}")[0](rows_of(), TEXTS, CUT, IDS) == [score] * 5
    assert functions.load("step0_data/toy.py:gold", "--judge", "judge")[0].function.__name__ == "gold"
    assert not functions.is_function("models/reward")


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_mine.py").write_text("SCORE = 4\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_mine import SCORE\ndef f(prompts, completions): return [SCORE] * len(prompts)\n"
    )
    assert load(f"{tmp_path / 'mine.py'}:f")[0](rows_of(), TEXTS, CUT, IDS) == [4] * 5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nofile.py:f", "there is no file nofile.py; wanted FILE.py:FUNCTION or a model folder"),
        ("mine.py", "which function of it. wanted FILE.py:FUNCTION"),
        ("mine.py:f", "mine.py has no function f; it has trl, full, bare, wrong, half"),
        ("mine.py:LEVEL", "mine.py has no function LEVEL"),
        ("mine.py:Plain", "mine.py has no function Plain"),
        ("mine.py:wrong", r"wanted wrong\(prompts, completions, \*\*columns\), seen wrong\(texts\)"),
        ("mine.py:half", r"seen half\(completions\)"),
    ],
)
def test_what_is_no_reward_function_is_refused(tmp_path, monkeypatch, spec, words):
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        load(spec)
    assert f"--reward {spec}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(prompts, completions)\n", "SyntaxError: expected ':' (mine.py, line 1) (mine.py line 1)"),
        ("import os\nimport no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package', install it"),
        ("import os\nimport no_such_package\n", "(mine.py line 2: import no_such_package)"),
        ("from os import no_such_name\n", "ImportError: cannot import name 'no_such_name'"),
        ("x = 1\ny = 1 / 0\n", "ZeroDivisionError: division by zero (mine.py line 2: y = 1 / 0)"),
        ("import sys\nsys.exit(0)\n", "called sys.exit(0) while it was loaded (mine.py line 2: sys.exit"),
        ("import time\ntime.sleep(60)\n", "has not returned within --reward_timeout 0.2 seconds while it was loaded"),
        ("class f:\n    def __init__(self, key): pass\n    def __call__(self, **_): pass\n", "missing 1 required"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(tmp_path, code, words):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(UserError) as caught:
        functions.load(f"{tmp_path / 'mine.py'}:f", "--reward", "reward f", timeout=0.2)
    said = str(caught.value)
    assert said.startswith(f"--reward {tmp_path / 'mine.py'}:f ") and words in said and "\n" not in said, said


def test_a_column_that_the_data_lack_is_named():
    def function(prompts, completions, level, answer, truncated, completion_ids, trainer_state, extra=1):
        return [1] * 5

    assert refusal(function, rows_of(answer=[1] * 5)) == (
        "reward mine wants the column level; beside prompt the data has answer"
    )
    assert refusal(function) == "reward mine wants the column answer, level; beside prompt the data has none"
