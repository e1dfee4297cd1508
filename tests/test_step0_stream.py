"""Step 0's memory and speed: memory may grow with the number of rows, a little, and not with their text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEASURE = """
import json, re, runpy, sys, time
before = time.time()
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
# Not ru_maxrss: that of a new process begins with its parent's.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(json.dumps([time.time() - before, time.process_time(), int(peak) / 1024]))
"""


def write_pairs(path: Path, rows: int, answer: str) -> Path:
    with open(path, "w", encoding="utf-8") as file:
        for i in range(rows):
            pair = {"prompt": f"What is {i} and why? {answer[:90]}", "chosen": f"{answer} {i}", "rejected": answer}
            file.write(json.dumps(pair) + "\n")
    return path


def prepare(source: Path, out: Path) -> tuple[str, float, float, float]:
    """What step 0 prints, seconds, seconds of the processor and the most memory in MB, of a process of its own."""
    script = str(ROOT / "step0_data/prepare.py")
    code = f"import sys; sys.argv = {[script, '--dataset', str(source), '--output_dir', str(out)]!r}\n{MEASURE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return "\n".join(lines), *json.loads(last)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_memory_does_not_grow_with_the_text(tmp_path, kind):
    """12,000 rows of 8 kB: beyond what 2,000 rows take, less than half of the file is ever in memory."""
    answer, peaks = "word and word again " * 200, {}
    for rows in (2_000, 12_000):
        source = write_pairs(tmp_path / f"{rows}.jsonl", rows, answer)
        if kind == "json":
            lines = source.read_text().splitlines()
            source = tmp_path / f"{rows}.json"
            source.write_text("[" + ",\n".join(lines) + "]")
        printed, seconds, cpu, peaks[rows] = prepare(source, tmp_path / f"{kind}-{rows}")
        assert f"{rows} rows read (preference {rows}), {rows} used" in printed
        print(f"{kind}: {rows} rows, {seconds:.1f} s ({rows / seconds:.0f} a second), {peaks[rows]:.0f} MB")
    size = source.stat().st_size / 2**20
    assert size > 90 and peaks[12_000] - peaks[2_000] < size / 2


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RLHF_ALL"), reason="set RLHF_ALL=1 for a million rows")
def test_a_million_rows(tmp_path):
    answer, seen = "word and word again " * 8, {}
    for rows in (100_000, 1_000_000):
        source, out = write_pairs(tmp_path / f"{rows}.jsonl", rows, answer), tmp_path / str(rows)
        _, seconds, cpu, peak = seen[rows] = prepare(source, out)
        print(f"{rows} rows: {seconds:.1f} s, {cpu:.1f} s of the processor, {rows / cpu:.0f} a second, {peak:.0f} MB")
        printed, seconds, cpu, peak = prepare(source, out)
        print(f"again: {seconds:.1f} s, {cpu:.1f} s of the processor")
        assert "already done" in printed and cpu < 10
    (_, _, few, small), (_, _, many, large) = seen[100_000], seen[1_000_000]
    assert large < 1500 and large - small < 900_000 * 400 / 2**20, "400 bytes a row"
    assert many < 15 * few, "ten times the rows in about ten times the time"
