"""Run folders and finished models: nothing looks finished that is not, damage is found, no two jobs share a folder."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import checkpoint
from common.checkpoint import RunFolder, check_output, publish, read_stage, require_stage, verify
from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FILES = {"model.safetensors": b"\x00weights", "config.json": b"{}", "sub/more.txt": b"more"}


def write_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def make(folder: Path, stage: str = "sft", write=write_files, **changes) -> Path:
    options = {"args": {"learning_rate": 1e-5}, "seed": 7, "parents": {}, "data": None, "metrics": {"loss": 0.5}}
    publish(folder, stage, write, **(options | changes))
    return folder


# ---- publishing


def test_a_published_folder_holds_its_files_and_a_record_with_their_hashes(tmp_path):
    folder = make(tmp_path / "sft", data={"path": "/data", "hash": "abc"})
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    record = json.loads((folder / "stage.json").read_text())
    assert record["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    assert (record["stage"], record["format_version"], record["seed"]) == ("sft", 1, 7)
    assert record["args"] == {"learning_rate": 1e-5} and record["metrics"] == {"loss": 0.5}
    assert record["data"] == {"path": "/data", "hash": "abc"}
    assert record["packages"]["torch"].split("+")[0].count(".") == 2
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "stage.json", "sub"]
    verify(folder)
    assert read_stage(folder) == record


def test_parents_are_recorded_with_the_hash_of_their_own_record(tmp_path):
    base = make(tmp_path / "base", "base")
    (tmp_path / "foreign").mkdir()
    folder = make(tmp_path / "sft", parents={"model": base, "ref": tmp_path / "foreign", "reward": "owner/name"})
    parents = read_stage(folder)["parents"]
    digest = hashlib.sha256((base / "stage.json").read_bytes()).hexdigest()
    assert parents["model"] == {"path": str(base.resolve()), "stage": "base", "sha256": digest}
    assert parents["ref"] == {"path": str((tmp_path / "foreign").resolve()), "stage": None, "sha256": None}
    assert parents["reward"] == {"path": "owner/name", "stage": None, "sha256": None}


def test_the_record_comes_last_and_is_on_disk_whole(tmp_path, monkeypatch):
    moves, synced = [], set()
    replace, fsync = os.replace, checkpoint.fsync
    monkeypatch.setattr(
        os, "replace", lambda source, target: (moves.append(Path(target).name), replace(source, target))
    )
    monkeypatch.setattr(checkpoint, "fsync", lambda path: (synced.add(Path(path).name), fsync(path)))
    make(tmp_path / "sft")
    first, *others, last = moves
    assert (first, sorted(others), last) == (
        ".publishing",
        ["config.json", "model.safetensors", "more.txt"],
        "stage.json",
    )
    assert {"config.json", "model.safetensors", "more.txt", "sft"} <= synced


def test_a_crash_while_writing_leaves_nothing_that_looks_finished(tmp_path):
    def breaks(staging):
        write_files(staging)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make(tmp_path / "sft", write=breaks)
    assert list((tmp_path / "sft").iterdir()) == []
    assert read_stage(tmp_path / "sft") is None


def test_a_crash_while_moving_leaves_no_record_of_an_older_run(tmp_path, monkeypatch):
    folder = make(tmp_path / "sft")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        make(folder)
    assert read_stage(folder) is None and not list(folder.glob(".staging-*"))


def test_what_a_killed_run_staged_is_removed_by_the_next(tmp_path):
    stale = tmp_path / "sft" / ".staging-1"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    folder = make(tmp_path / "sft")
    assert not stale.exists()
    verify(folder)


def test_a_text_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "stage.json"
    checkpoint.atomic_write_text(path, "old")
    assert path.read_text() == "old"

    def power_cut(source, target):
        assert Path(source).read_text() == "new" and Path(source).parent == tmp_path
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError):
        checkpoint.atomic_write_text(path, "new")
    assert path.read_text() == "old"


def test_hash_tree_depends_on_names_and_hashes_but_not_on_their_order():
    one = checkpoint.hash_tree({"a": "1", "b": "2"})
    assert one == checkpoint.hash_tree({"b": "2", "a": "1"})
    assert len({one, checkpoint.hash_tree({"a": "2", "b": "1"}), checkpoint.hash_tree({"a": "1"})}) == 3


# ---- reading back


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found(tmp_path, name):
    folder = make(tmp_path / "sft")
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} differs from what its stage wrote"):
        verify(folder)


def test_a_missing_file_is_found_and_an_extra_one_is_nobodys_business(tmp_path):
    folder = make(tmp_path / "sft")
    (folder / "metrics.jsonl").write_text("{}\n")
    verify(folder)
    (folder / "sub" / "more.txt").unlink()
    with pytest.raises(UserError, match=r"more\.txt is missing, though stage\.json lists it"):
        verify(folder)


def test_a_damaged_record_or_one_of_another_version_is_refused(tmp_path):
    folder = make(tmp_path / "sft")
    record = (folder / "stage.json").read_text()
    (folder / "stage.json").write_text(record[:-20])
    with pytest.raises(UserError, match="is not json"):
        read_stage(folder)
    (folder / "stage.json").write_text(record.replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(UserError, match="format version 99, this program reads 1"):
        read_stage(folder)
    (folder / "stage.json").write_text("[]")
    with pytest.raises(UserError, match=r"stage\.json"):
        read_stage(folder)


def test_require_stage_accepts_what_fits(tmp_path):
    folder = make(tmp_path / "sft")
    assert require_stage(folder, "--actor", ("sft", "base")) == read_stage(folder)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{}")
    assert require_stage(foreign, "--actor", ("sft",)) is None
    assert require_stage("Qwen/Qwen2.5-0.5B", "--actor", ("sft",)) is None
    assert require_stage("gpt2", "--actor", ("sft",)) is None


MAKE_SFT = "step1_sft/train.py --model BASE"
MAKE_REWARD = "step2_reward/train.py --model models/sft"


@pytest.mark.parametrize(
    ("given", "flag", "wanted", "words"),
    [
        ("sft", "--critic", "reward", ["--critic", "is of stage 'sft', wanted 'reward'", MAKE_REWARD]),
        ("reward", "--actor", "sft", ["--actor", "is of stage 'reward', wanted 'sft'", MAKE_SFT]),
        ("nowhere/deep/down", "--actor", "sft", ["no such folder", MAKE_SFT]),
        ("models/sft", "--actor", "sft", ["models/sft: no such folder", MAKE_SFT]),
        ("./sft2", "--actor", "sft", ["no such folder (looked in", "did you mean sft?"]),
        ("sft/config.json", "--actor", "sft", ["is a file; wanted a model folder"]),
        ("unfinished", "--actor", "sft", ["no finished model there", MAKE_SFT]),
        ("rlhf", "--actor", "rlhf-actor", ["did you mean rlhf/actor?"]),
        ("rlhf", "--critic", "rlhf-critic", ["did you mean rlhf/critic?"]),
        ("damaged", "--actor", "sft", ["damaged/config.json differs"]),
    ],
)
def test_require_stage_says_what_is_wrong_and_what_to_do(tmp_path, monkeypatch, given, flag, wanted, words):
    monkeypatch.chdir(tmp_path)
    make(Path("sft"))
    make(Path("reward"), "reward")
    make(Path("rlhf/actor"), "rlhf-actor")
    Path("unfinished").mkdir()
    (make(Path("damaged")) / "config.json").write_text("[]")
    with pytest.raises(UserError) as caught:
        require_stage(given, flag, (wanted,))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the lock

HOLD = """
import sys, time
from common.checkpoint import RunFolder
run = RunFolder(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_job_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"is being written by process {process.pid} on "):
            RunFolder(folder)
        RunFolder(folder, main_process=False)  # the other ranks of the same job share the folder
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert (folder / ".lock").exists()
    run = RunFolder(folder)
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on "):
        RunFolder(folder)
    run.release()
    assert list(folder.iterdir()) == []
    RunFolder(folder).release()


LEAVE = """
import sys
from pathlib import Path
from common.checkpoint import RunFolder
run = RunFolder(sys.argv[1])
(run.path / "metrics.jsonl").write_text(sys.argv[2])
(run.path / "tensorboard").mkdir()
sys.exit(2)
"""


def test_a_run_that_ends_before_its_first_step_leaves_no_folder_that_it_made(tmp_path):
    (tmp_path / "there").mkdir()
    for name, metrics in (("new", ""), ("deep/new", ""), ("stepped", "{}"), ("there", "")):
        done = subprocess.run([sys.executable, "-c", LEAVE, tmp_path / name, metrics], cwd=ROOT)
        assert done.returncode == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stepped", "there"]
    assert sorted(p.name for p in (tmp_path / "stepped").iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["metrics.jsonl"]


OURS = [
    "metrics.jsonl",
    "timings.jsonl",
    "samples.jsonl",
    "tensorboard/events",
    "wandb/x",
    "checkpoint-6/manifest.json",
]
OURS += ["abandoned-checkpoint-8-ab12/manifest.json", ".lock", ".tokens/sft.arrow", ".DS_Store", "training.log"]
OURS += ["nohup.out", "slurm-12.out", "slurm-12.err", "evaluation.samples.jsonl", "evaluation.unjudged.jsonl"]
OURS += [".staging-1/config.json", ".tmp-checkpoint-3/x", "report.html", "evaluation.json"]


def lay(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("models", "more", "told"),
    [
        (("",), [], None),
        (("",), ["adapter_config.json", "actor_notes/x"], "actor_notes, adapter_config.json"),
        (("",), ["config.json"], "config.json"),
        (("",), ["actor/config.json"], "actor"),
        (("",), ["tensorboard-old/x"], "tensorboard-old"),
        (("",), ["checkpoint-best/weights.pt"], "checkpoint-best"),
        (("",), ["checkpoint-", "metrics.jsonl.bak"], "checkpoint-, metrics.jsonl.bak"),
        (("",), ["stage.json.old"], "stage.json.old"),
        (("actor", "critic"), ["actor/.lock", "critic/.x"], None),
        (("actor", "critic"), ["actor/adapter_config.json"], "actor/adapter_config.json"),
        (("actor", "critic"), ["critic/metrics.jsonl"], "critic/metrics.jsonl"),
        (("actor", "critic"), ["model.safetensors"], "model.safetensors"),
        (("actor", "critic"), ["actor_notes/x"], "actor_notes"),
    ],
)
def test_only_what_a_run_leaves_may_lie_in_its_folder(tmp_path, models, more, told):
    folder = lay(tmp_path / "out", [*OURS, *more])
    if told is None:
        check_output(folder, models)
    else:
        with pytest.raises(UserError, match=rf"{folder} holds other things \({re.escape(told)}\), which"):
            check_output(folder, models)
    assert all((folder / name).exists() for name in more), "nothing is removed"


def test_what_a_killed_run_had_moved_in_is_its_own(tmp_path, monkeypatch):
    """The next run of the same command may go on, and a foreign file among them is still found."""
    replace = os.replace

    def dies(source, target):
        if Path(target).name == "model.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "sft")
    monkeypatch.undo()
    assert (tmp_path / "sft/config.json").exists() and not (tmp_path / "sft/stage.json").exists()
    check_output(tmp_path / "sft")
    lay(tmp_path / "sft", ["adapter_config.json"])
    with pytest.raises(UserError, match=r"holds other things \(adapter_config\.json\)"):
        check_output(tmp_path / "sft")
    make(tmp_path / "rlhf/critic")
    check_output(tmp_path / "rlhf", ("actor", "critic"))
    assert not (tmp_path / "rlhf/critic/.publishing").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"])
def test_a_foreign_file_that_loaders_would_read_is_found_in_a_finished_model(tmp_path, name):
    folder = lay(make(tmp_path / "sft"), ["README.md", "metrics.jsonl", "notes.txt", "evaluation.json"])
    verify(folder)
    lay(folder, [name])
    whose = (
        "holds an adapter beside a model" if name == "adapter_config.json" else f"{name} is not of the stage that wrote"
    )
    with pytest.raises(UserError, match=whose):
        require_stage(folder, "--actor", ("sft",))


@pytest.mark.parametrize("record", ["stage.json", "actor/stage.json"])
def test_a_finished_run_is_never_overwritten(tmp_path, record):
    (tmp_path / record).parent.mkdir(exist_ok=True)
    (tmp_path / record).write_text("{}")
    with pytest.raises(UserError, match="holds a finished run; choose another --output_dir"):
        RunFolder(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    for path in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(UserError, match="is a file"):
            RunFolder(path)
    assert (tmp_path / "out").read_text() == "mine"
