"""Plants the bugs of mutants.yaml one at a time in a copy of the tree; each has to be caught by its named test.

Reads    tests/mutants/mutants.yaml and the tree, which it never changes
Prints   a table: caught or not, name, file:line, what a person would see, the test; exit 1 unless all were caught
Run      bash tests/mutants/run.sh [NAME ...]

A mutant is caught when its test fails. Otherwise it SURVIVED (the test passed), is STALE (its text stands in the source
not at all or more than once) or BROKEN (the test could not run: a mutant that does not parse proves nothing).
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOBS = int(os.environ.get("JOBS", "2"))
TIMEOUT = 300  # seconds for one test

# Before torch is imported, and inherited by every test. No bytecode: a mutant of the same length, written within the
# same second, would be taken for the file before it. No pytest plugins: hypothesis' alone costs a second a test.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false")
os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
sys.dont_write_bytecode = True

# Imported here once, so that each test, a fork of this process, starts in a tenth of a second and not in four.
# Nothing of this project is: every fork imports its own copy.
import deepspeed  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402, F401
import transformers.loss.loss_utils  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401
import yaml  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    why: str  # what a person would see
    test: str  # a pytest node id


@dataclass
class Result:
    mutant: Mutant
    verdict: str
    line: int | None
    output: str


def copy_tree(destination: Path) -> Path:
    """The source folders as they are now, committed or not."""
    ignore = shutil.ignore_patterns("__pycache__", "mutants")
    for folder in ("common", "scripts", "tests", *(path.name for path in ROOT.glob("step[0-9]_*"))):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, destination / folder, ignore=ignore)
    return destination


def start_tests(tree: Path, node_ids: list[str]) -> int:
    """Run pytest in a fork of this process, inside tree, its output in tree/output.txt. Returns the process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3  # pytest's number for an internal error
    try:
        signal.alarm(TIMEOUT)
        output = os.open(tree / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        options = ["-c", "tests/pytest.ini", "--rootdir", ".", "-x", "-q", "-p", "no:cacheprovider"]
        code = int(pytest.main([*options, *node_ids]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def plant(mutant: Mutant, tree: Path) -> int | None:
    """Write the mutant into tree. Returns its line number, or None when its text does not stand there exactly once."""
    path = tree / mutant.file
    source = path.read_text() if path.is_file() else ""
    if source.count(mutant.old) != 1:
        return None
    path.write_text(source.replace(mutant.old, mutant.new))
    return source[: source.index(mutant.old)].count("\n") + 1


def try_all(mutants: list[Mutant], trees: list[Path]) -> list[Result]:
    """One test process per tree at a time; a mutant is undone from a copy that none is ever planted in."""
    results, waiting, free, running = [], list(mutants), list(trees), {}
    pristine = copy_tree(trees[0].parent / "pristine")
    while waiting or running:
        if waiting and free:
            mutant = waiting.pop(0)
            line = plant(mutant, free[-1])
            result = Result(mutant, "STALE", line, f"its text does not stand exactly once in {mutant.file}")
            results.append(result)
            if line is not None:
                tree = free.pop()
                running[start_tests(tree, [mutant.test])] = (result, tree)
            continue
        pid, status = os.wait()
        result, tree = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)  # pytest: 0 all passed, 1 some failed; below 0: a signal
        result.verdict = {0: "SURVIVED", 1: "caught"}.get(code, "BROKEN")
        result.output = (
            (tree / "output.txt").read_text() if code >= 0 else f"ended by signal {-code} ({TIMEOUT} s limit)"
        )
        shutil.copyfile(pristine / result.mutant.file, tree / result.mutant.file)
        free.append(tree)
    return results


def print_table(results: list[Result]) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 180
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("caught")
    table.add_column("mutant", no_wrap=True)
    table.add_column("where", overflow="fold")
    table.add_column("what a person would see", ratio=2)
    table.add_column("the test that catches it", overflow="fold", ratio=3)
    for result in results:
        mutant, where = result.mutant, f"{result.mutant.file}:{result.line or '?'}"
        verdict = "yes" if result.verdict == "caught" else f"[red]{result.verdict}[/red]"
        test = mutant.test.removeprefix("tests/").replace("::", " ")
        table.add_row(verdict, mutant.name, where, *map(escape, (mutant.why, test)))
    Console(width=width, highlight=False).print(table)


def main(names: list[str]) -> int:
    mutants = [Mutant(**entry) for entry in yaml.safe_load((Path(__file__).parent / "mutants.yaml").read_text())]
    known = [mutant.name for mutant in mutants]
    assert len(set(known)) == len(known), "two mutants share a name"
    if unknown := set(names) - set(known):
        print(f"error: no mutant is called {', '.join(sorted(unknown))}; names: {', '.join(known)}", file=sys.stderr)
        return 2
    mutants = [mutant for mutant in mutants if not names or mutant.name in names]
    start = time.monotonic()
    gc.freeze()  # the forks' garbage collections need not walk what was imported above
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [copy_tree(Path(scratch) / str(job)) for job in range(JOBS)]
        tests = list(dict.fromkeys(mutant.test for mutant in mutants))
        _, status = os.waitpid(start_tests(trees[0], tests), 0)
        if status != 0:
            print((trees[0] / "output.txt").read_text())
            print("error: these tests have to pass before any mutant is planted", file=sys.stderr)
            return 1
        results = try_all(mutants, trees)
    print_table(results)
    missed = [result for result in results if result.verdict != "caught"]
    for result in missed:
        print(f"\n{result.mutant.name}: {result.verdict}\n{result.output[-2000:]}")
    seconds = time.monotonic() - start
    print(f"\n{len(results) - len(missed)} of {len(results)} mutants caught by {len(tests)} tests in {seconds:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
