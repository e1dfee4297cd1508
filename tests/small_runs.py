"""The entry scripts inside the test process, and prepared data of a few rows: for tests that run whole stages."""

import atexit
import contextlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import one_rank
import pytest

from common import checkpoint, cli, distributed
from step0_data import spool


def answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def write_data(folder: Path, **stages) -> None:
    """Prepared data of these stages, as step 0 writes them."""
    folder.mkdir()
    spool.write_stages(folder, {stage: {"train": rows, "eval": []} for stage, rows in stages.items()})
    files = {p.relative_to(folder).as_posix(): checkpoint.hash_file(p) for p in folder.glob("*/*.parquet")}
    manifest = {"format_version": 1, "hash": checkpoint.hash_tree(files), "files": files, "stages": {}, "args": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sources": [], "seed": 1}))


def call(module: ModuleType, words: str, folder: Path) -> int:
    """What `python MODULE WORDS` does in a folder, its exit code included, in a process group that goes on.

    The group is kept, since DeepSpeed does not survive a second one; what our files do at exit is done at the end.
    """
    one_rank.start()
    environment, at_exit, register = dict(os.environ), [], atexit.register

    def collect(function, *args):
        is_ours = type(getattr(function, "__self__", None)).__module__.startswith("common.")
        return at_exit.append(function) if is_ours else register(function, *args)

    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *words.split()])
        patch.setattr(atexit, "register", collect)
        patch.setattr(distributed, "stop", lambda: None)
        try:
            return cli.run(module.main)
        except SystemExit as end:
            return end.code
        finally:
            for function in reversed(at_exit):
                function()
            os.environ.clear()
            os.environ.update(environment)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every path in a folder with what its file holds."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def mistake(folder: Path, module: ModuleType, words: str, capfd) -> str:
    """Runs an entry script in a folder; returns the one line it leaves on stderr, having changed nothing there."""
    one_rank.start()  # what it says on the way is not the script's
    before = snapshot(folder)
    capfd.readouterr()
    code = call(module, words, folder)
    error = capfd.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert snapshot(folder) == before, "something was left behind"
    return error
