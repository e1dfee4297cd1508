"""The metrics logger: what lands in the files, what reaches the screen, what a crash leaves behind."""

import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import metrics
from common.errors import UserError
from common.metrics import MetricsLogger, read_jsonl

ROOT = Path(__file__).resolve().parent.parent
FILES = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")


def make(folder, **kwargs):
    return MetricsLogger(folder, **{"total_steps": 10, "report_to": "none", "title": "test"} | kwargs)


def test_every_step_reaches_the_files_and_only_timings_know_the_clock(tmp_path, capsys):
    with make(tmp_path, logging_steps=5) as log:
        for step in range(1, 11):
            log.log(step, {"loss": torch.tensor(1.5), "lr": 1 / step, "val/num_eos_tokens": 3}, {"rollout": 0.25})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[2] == {"step": 3, "loss": 1.5, "lr": 1 / 3, "val/num_eos_tokens": 3}
    timings = read_jsonl(tmp_path / "timings.jsonl")
    assert [set(row) for row in timings] == [{"step", "time", "rollout"}] * 10
    assert timings[0]["rollout"] == 0.25
    lines = capsys.readouterr().out.splitlines()
    assert [re.match(r"step +(\d+)/10  ", line)[1] for line in lines] == ["1", "5", "10"]


def test_equal_runs_write_equal_bytes(tmp_path):
    for name in "ab":
        with make(tmp_path / name) as log:
            log.log(1, {"loss": 0.1 + 0.2, "kl": torch.tensor(1 / 3)}, {"total": 1.0})
            log.samples(1, [{"row": 0, "prompt": "p", "response": "r", "score": 1.0}])
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_is_not_finite_is_valid_json_all_the_same(tmp_path):
    with make(tmp_path) as log:
        log.log(1, {"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf), "d": True})
        log.samples(1, [{"row": 0, "prompt": "p", "response": "r", "score": math.nan}])

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "a": None, "b": None, "c": None, "d": 1}
    assert json.loads((tmp_path / "samples.jsonl").read_text(), parse_constant=refuse)["score"] is None


def test_samples_come_back_exactly_and_no_control_byte_reaches_screen_or_file(tmp_path, capsys):
    nasty = "red \x1b[31m bell \x07 c1 \x9b2J cr \r nul \x00 bidi \u202e lone \ud800 line\u2028separator\nnew 你好 \t."
    with make(tmp_path) as log:
        log.samples(3, [{"prompt": [{"role": "user", "content": nasty}], "response": nasty, "row": 7, "score": 0.5}])
        log.say(nasty)
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw) and raw.count(b"\n") == 1
    text = raw.decode()  # valid UTF-8, so no surrogate
    assert len(text.splitlines()) == 1 and "你好" in text and "\x9b" not in text and "\u202e" not in text
    row = json.loads(text)
    assert list(row) == ["step", "row", "prompt", "response", "score"]
    assert row["response"] == nasty and row["prompt"][0]["content"] == nasty
    shown = capsys.readouterr().out
    assert "\\x1b[31m" in shown and "你好" in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800]", shown)


def test_columns_stay_where_the_first_line_put_them(tmp_path, capsys):
    values = [0.0, -3e-5, 123.456, 1e9, -99999.0, math.nan, 7e-7, -1e-12]
    with make(tmp_path, total_steps=100) as log:
        for step, value in enumerate(values, 1):
            log.log(step, {"objective/scores": value, "objective/kl": -value, "lr": abs(value) * 1e-3})
        log.log(99, {"objective/kl": 1.0, "something/new": 2.0})  # one missing, one that the first line did not have
    lines = capsys.readouterr().out.splitlines()
    for label in ("  score ", "  kl ", "  lr ", " s/step"):
        assert len({line.index(label) for line in lines}) == 1, label
    assert "something" not in lines[-1] and "score     nan" in lines[-1]


@pytest.mark.parametrize(
    "value", [0, 1, -1, 99.9994, 99.9996, -99.9996, 9999.94, -9999.96, 1e-3, -9.99e-4, -1e-100, 1e100]
)
def test_a_number_on_screen_has_at_most_seven_characters_and_is_close(value):
    shown = metrics.format_value(value)
    assert len(shown) <= 7
    assert float(shown) == pytest.approx(value, rel=0.05, abs=0)


def test_evaluation_figures_get_a_line_of_their_own(tmp_path, capsys):
    with make(tmp_path) as log:
        log.log(1, {"loss": 2.0})
        log.log(2, {"loss": 1.0, "eval_loss": 1.25, "eval_accuracy": 0.5})
    first, second, third = capsys.readouterr().out.splitlines()
    assert len(first) == len(second)
    assert third == "evaluation at step 2: loss 1.250  acc 0.500"
    assert read_jsonl(tmp_path / "metrics.jsonl")[1] == {
        "step": 2,
        "loss": 1.0,
        "eval_loss": 1.25,
        "eval_accuracy": 0.5,
    }


def test_columns_limits_the_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with make(tmp_path) as log:
        log.log(1, {name: 1.0 for name in metrics.LABELS})
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 60 and "loss   1.000" in line


def test_only_the_main_process_writes(tmp_path, capsys):
    log = make(tmp_path / "run", main_process=False, report_to="no such tracker")
    log.log(1, {"loss": 1.0})
    log.samples(1, [{"row": 0, "prompt": "", "response": ""}])
    log.say("nothing")
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_a_fresh_start_starts_afresh_and_a_resumed_run_keeps_what_it_had_done(tmp_path):
    def run(first, last, resume_step):
        with make(tmp_path, resume_step=resume_step) as log:
            for step in range(first, last + 1):
                log.log(step, {"loss": step / 7})
                log.samples(step, [{"row": 0, "prompt": "p", "response": str(step)}])

    run(1, 6, resume_step=0)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "lo')  # killed in the middle of a line by something other than us
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 6
    run(5, 6, resume_step=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")] == [1, 2, 3, 4, 5, 6]
    run(1, 2, resume_step=0)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_resumed_run_says_which_of_its_lines_are_lost(tmp_path):
    def resumed() -> list[str]:
        with make(tmp_path, resume_step=6, lines=lines) as log:
            return [problem.replace(f"{tmp_path}/", "") for problem in log.problems]

    with make(tmp_path) as log:
        for step in range(1, 7):
            log.log(step, {"loss": step / 7})
            log.samples(step, [{"row": 0, "prompt": "p", "response": str(step)}] * (step % 3 == 0))
        lines = log.lines()
    assert lines == {"metrics": 6, "timings": 6, "samples": 2} and resumed() == []
    torn = (tmp_path / "metrics.jsonl").read_text().replace('{"step": 2, "loss": ', '{"step": 2, "lo')
    (tmp_path / "metrics.jsonl").write_text(torn)
    whole = (tmp_path / "timings.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "timings.jsonl").write_text("".join(whole[:4]))
    (tmp_path / "samples.jsonl").unlink()
    assert resumed() == [
        "warning: metrics.jsonl has 5 of 6 lines of the steps up to 6: line 2 cannot be read",
        "warning: timings.jsonl has 4 of 6 lines of the steps up to 6: the others are gone",
        "warning: samples.jsonl has 0 of 2 lines of the steps up to 6: it is gone",
    ]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 3, 4, 5, 6]
    for bad in ("[]", '{"loss": 1}', '{"step": "1"}', "\x00", '{"step": NaN}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{bad}\n')
        assert "line 2 cannot be read" in resumed()[0]


def test_a_killed_run_leaves_whole_lines(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from common.metrics import MetricsLogger
log = MetricsLogger({str(tmp_path)!r}, total_steps=9, report_to="none")
for step in range(1, 6):
    log.log(step, {{"loss": step}})
    log.samples(step, [{{"row": 0, "prompt": "p", "response": "r"}}])
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    for name in FILES:
        assert (tmp_path / name).read_bytes().endswith(b"\n")
        assert [row["step"] for row in read_jsonl(tmp_path / name)] == [1, 2, 3, 4, 5]


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make(tmp_path, report_to=["tensorboard"]) as log:
        for step in (1, 2, 3):
            log.log(step, {"objective/kl": step / 4}, {"rollout": 2.0})
    with make(tmp_path, report_to=["tensorboard"], resume_step=1) as log:
        log.log(2, {"objective/kl": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("objective/kl")] == [(1, 0.25), (2, 9.0)]
    assert events.Scalars("time/rollout")[0].value == 2.0


def test_trackers_are_checked_before_anything_runs(monkeypatch):
    assert metrics.parse_report_to("none") == ()
    assert metrics.parse_report_to(["tensorboard", "none"]) == ("tensorboard",)
    with pytest.raises(UserError, match="mlflow: not known; use one of tensorboard, wandb, none"):
        metrics.parse_report_to("tensorboard,mlflow")
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        metrics.parse_report_to("wandb")


DEMO = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from common.metrics import MetricsLogger
log = MetricsLogger(sys.argv[1], total_steps=3, report_to="none", title="step 9 demo")
for step in (1, 2, 3):
    log.log(step, {{"loss": 1.0}})
    print("a library prints")
    log.say("[bold]not markup[/bold] :smile:")
log.close()
"""


def on_a_terminal(command, env) -> bytes:
    """What `command` writes when its output is a terminal."""
    reader, writer = pty.openpty()
    process = subprocess.Popen(command, stdout=writer, stderr=writer, stdin=subprocess.DEVNULL, env=os.environ | env)
    os.close(writer)
    output = b""
    while True:
        try:
            data = os.read(reader, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not data:
            break
        output += data
    assert process.wait() == 0, output
    return output


def test_a_bar_on_a_terminal_and_no_control_codes_elsewhere(tmp_path):
    command = [sys.executable, "-c", DEMO, str(tmp_path / "run")]
    bar = on_a_terminal(command, {"TERM": "xterm", "CI": "", "COLUMNS": "80"}).decode()
    assert "step 9 demo" in bar and "3/3" in bar and "eta" in bar and "\x1b[" in bar
    assert "[bold]not markup[/bold] :smile:" in bar and "a library prints" in bar
    assert bar.endswith("\x1b[?25h"), "the cursor is shown again"
    for env in ({"TERM": "dumb", "CI": ""}, {"TERM": "xterm", "CI": "true"}):
        plain = on_a_terminal(command, env)
        assert b"\x1b" not in plain and plain.count(b"step 1/3") == 1
    colourless = on_a_terminal(command, {"TERM": "xterm", "CI": "", "NO_COLOR": "1"})
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", colourless)
