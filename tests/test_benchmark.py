"""The benchmark runs, takes turns and says what it compared. No test looks at how fast anything was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import benchmark

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--model", "2m", "--rows", "4", "--prompt", "6", "--new", "3", "--repeat", "1", "--threads", "1"]


def run(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *map(str, words)]
    return subprocess.run(command, cwd="/", env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True)


def test_sides_take_turns_and_the_first_turn_is_not_counted():
    seen = []

    def side(name, totals):
        def run(number):
            seen.append((name, number))
            return {"total": totals[number - 1]}

        return run

    args = SimpleNamespace(repeat=3, rows=5, new=4)
    record = benchmark.compare("a rollout", args, side("A", [99, 1, 2, 4]), "B", side("B", [1, 3, 5, 2]))
    assert seen == [(name, number) for number in (1, 2, 3, 4) for name in "AB"]
    assert record["seconds"] == {"ours": 2, "B": 3}
    assert (record["ratio"], record["lowest"], record["highest"]) == (1.5, 0.5, 3)
    assert record["tokens"] == 20 and len(record["runs"]["B"]) == 3


@pytest.mark.slow
def test_every_comparison_runs(tmp_path):
    done = run(*TINY, "--minibatches", 2, "--epochs", 2, "--output", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [record["what"] for record in records] == ["native rollout", "ZeRO-3 rollout", "PPO step"]
    assert [record["tokens"] for record in records] == [12, 12, None]
    assert set(records[2]["runs"]["ours"][0]) == {"generate", "score", "forward", "update", "rest", "total"}
    for word in ("1 threads", "torch 2", "commit", "4 rows", "2 epoch(s) of 2 minibatch(es), 2 rows", "generate"):
        assert word in done.stdout


@pytest.mark.skipif("RLHF_TEST_PEER" not in os.environ, reason="RLHF_TEST_PEER names no Python that has TRL 1.12")
def test_the_peer_takes_the_same_step(tmp_path):
    words = ["--only", "ppo", "--minibatches", 2, "--peer", os.environ["RLHF_TEST_PEER"]]
    done = run(*TINY, *words, "--output", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads((tmp_path / "out.json").read_text())["records"]
    assert set(record["runs"]["TRL"][0]) == {"generate", "score", "update", "gc.collect", "total"}
    assert record["ratio"] > 0 and "trl 1.12" in done.stdout


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_a_peer_without_trl_is_refused_in_one_line(python):
    done = run("--peer", python)
    assert done.returncode == 2 and done.stderr.startswith(f"error: --peer {python}: ")
    assert done.stderr.count("\n") == 1 and ("trl==1.12.0" in done.stderr or "a Python interpreter" in done.stderr)


@pytest.mark.parametrize("words", [["--minibatches", "3"], ["--micro", "5"]])
def test_batches_that_do_not_divide_are_refused_with_the_numbers(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_args(["--rows", "32", *words])
    assert stopped.value.code == 2
    assert "32" in capsys.readouterr().err
