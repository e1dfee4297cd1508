"""Run folders and finished models: locking, publishing with hashes, and reading back what a stage wrote.

A folder is *finished* when `stage.json` is there and the sha256 of every file it lists matches. Files are staged
under a temporary name, fsynced and moved in; `stage.json` comes last, so no crash leaves a folder that looks finished.
"""

import atexit
import difflib
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from common.json_files import anything, each, fault_of, figure, number, read_json, text, whole

FORMAT_VERSION = 1
STAGE_FILE = "stage.json"
ADAPTER_CONFIG = "adapter_config.json"  # what peft writes
LOCK_FILE = ".lock"
_FINISHED = (STAGE_FILE, f"actor/{STAGE_FILE}")
_MOVING = ".publishing"  # the names that `publish` is moving in, while it does
STAGES = ("base", "sft", "dpo", "reward", "rlhf-actor", "rlhf-critic")
# What readers of a stage.json count on; what else it holds is for people.
STAGE = {
    "stage": text,
    "format_version": whole,
    "files": each(text),
    "args?": each(anything),
    "seed?": number,
    "packages?": each(text),
    "parents?": each({"path": text, "stage?": text, "sha256?": text}),
    "data?": {"path?": text, "train?": text, "hash": text},
    "metrics?": each(figure),
}
_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "sentencepiece")
_HOW_TO_MAKE = {
    "base": "python step0_data/prepare.py --dataset tiny --output_dir data",
    "sft": "python step1_sft/train.py --model BASE --data data --output_dir models/sft",
    "reward": "python step2_reward/train.py --model models/sft --data data --output_dir models/reward",
    "rlhf-actor": "python step3_rlhf/train.py --actor models/sft --critic models/reward",
    "rlhf-critic": "python step3_rlhf/train.py --actor models/sft --critic models/reward",
}


# What a run leaves in its folder beside its models, and our tools in it. A shell, nohup or Slurm has a log open before
# we start.
_RUN_FILES = ("metrics.jsonl", "timings.jsonl", "samples.jsonl", "report.html", "*.jsonl.tmp")
_RUN_FILES += ("*.log", "*.out", "*.err", "evaluation.json", "evaluation.*.jsonl")
_RUN_FOLDERS = ("tensorboard", "wandb")
# What transformers and peft read in a model's folder, wherever it came from.
_LOADED = ("adapter_config.json", "adapter_model.*", "config.json", "generation_config.json", "model*.safetensors*")
_LOADED += ("pytorch_model*", "chat_template*", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
_LOADED += ("vocab.*", "merges.txt", "*.py")


def check_output(folder: str | Path, models: tuple[str, ...] = ("",)) -> None:
    """Refuses a folder that a run cannot write to as its own. Needs no lock and loads nothing.

    Args:
        models: the folders in it that models go to; "" is itself.

    Raises:
        UserError: it is a file, holds a finished run, or things that no run leaves: they would lie among a model's
            files, and a loader may read them.
    """
    folder = Path(folder)
    _require_unfinished(folder, _FINISHED)
    if others := foreign(folder, models):
        raise UserError(
            f"--output_dir {folder} holds other things ({', '.join(others[:3])}), which would lie among the files of "
            f"the model; move them away or choose a new folder"
        )


def _require_unfinished(folder: Path, finished: tuple[str, ...]) -> None:
    try:
        file = next((it for it in (folder, *folder.parents) if it.exists() and not it.is_dir()), None)
    except OSError as error:  # too long a name
        raise UserError(f"--output_dir {folder} cannot be written: {error.strerror}; choose another") from error
    if file:
        raise UserError(f"--output_dir {folder}: {file} is a file; choose a folder")
    if any((folder / name).exists() for name in finished):
        raise UserError(f"{folder} holds a finished run; choose another --output_dir or remove the folder")


def foreign(folder: Path, models: tuple[str, ...]) -> list[str]:
    """What lies in a run's folder, or in those of its models, and is not of a run; names with a dot do not count."""
    found = []
    for place in dict.fromkeys(["", *models]):
        here = sorted((folder / place).iterdir()) if (folder / place).is_dir() else []
        ours = _published(folder / place) if place in models else set()
        for path in here:
            is_run = not place and (
                _matches(path.name, _RUN_FOLDERS if path.is_dir() else _RUN_FILES)
                or (path.is_dir() and path.name in models)
                or (path.is_dir() and "checkpoint-" in path.name and (path / "manifest.json").exists())
            )
            if not (is_run or path.name in ours or path.name.startswith(".")):
                found.append(str(path.relative_to(folder)))
    return found


def _published(folder: Path) -> set[str]:
    """Names in a model's folder that `publish` has written there, or had begun to when it was killed."""
    names = set()
    if (folder / STAGE_FILE).exists():
        names |= {STAGE_FILE, *read_stage(folder)["files"]}
    if (folder / _MOVING).exists():
        names |= read_json(folder / _MOVING, each(text), "remove the folder").keys()
    return {Path(name).parts[0] for name in names}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class RunFolder:
    """An output folder held by one running job.

    A job that ends before its first step, with a mistake in its command line say, leaves no folder that it made.

    Args:
        path: the folder; made if missing.
        finished: the files, relative to it, that mark a finished run.
        main_process: only the main process locks; the others just know the path.

    Raises:
        UserError: the folder holds a finished run, is a file, or another job is writing to it.
    """

    def __init__(
        self,
        path: str | Path,
        finished: tuple[str, ...] = _FINISHED,
        main_process: bool = True,
    ):
        self.path = Path(path)
        _require_unfinished(self.path, finished)
        self._lock = None
        self._had_curves = (self.path / "tensorboard").exists()
        self._made = [part for part in (self.path, *self.path.parents) if not part.exists()]
        if main_process:
            import filelock

            try:
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / LOCK_FILE).touch()
            except OSError as error:
                raise UserError(f"--output_dir {path} cannot be written: {error.strerror}; choose another") from error
            self._lock = filelock.FileLock(self.path / LOCK_FILE)
            owner = self.path / ".lock-owner"
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                who = owner.read_text() if owner.exists() else "another process"
                raise UserError(
                    f"{path} is being written by {who}; wait for it or choose another --output_dir"
                ) from None
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            atexit.register(self._leave)

    def release(self) -> None:
        """Gives the lock back (the operating system does so too when the process dies)."""
        if self._lock is not None:
            atexit.unregister(self._leave)
            (self.path / ".lock-owner").unlink(missing_ok=True)
            self._lock.release()
            (self.path / LOCK_FILE).unlink(missing_ok=True)
            self._remove_empty()

    def _leave(self) -> None:
        """At exit of a run that did not come to its end."""
        metrics = self.path / "metrics.jsonl"
        has_begun = metrics.exists() and metrics.stat().st_size > 0
        if not (has_begun or self._had_curves):
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        if self.path in self._made and not has_begun:
            self._lock.release()
            shutil.rmtree(self.path, ignore_errors=True)
            self._remove_empty()
        else:
            self.release()

    def _remove_empty(self) -> None:
        """Takes away what this run made and nothing lives in: the folder, and those around it."""
        for folder in filter(Path.exists, self._made):
            try:
                folder.rmdir()
            except OSError:  # not empty
                return


def publish(
    folder: str | Path,
    stage: str,
    write: Callable[[Path], None],
    *,
    args: dict,
    seed: int,
    parents: dict[str, str | Path],
    data: dict | None,
    metrics: dict,
) -> None:
    """Makes `folder` a finished stage: `write(staging)` fills it, then files move in, then `stage.json`.

    Args:
        stage: one of `STAGES`.
        args: every argument of the run, by name.
        parents: the model folders this one was made from, by role.
        data: `{"path", "hash"}` of the prepared data, or None.
        metrics: the final figures, by name.
    """
    assert stage in STAGES, stage
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".staging-*"):
        shutil.rmtree(stale)  # of a run that was killed: only one job at a time writes here
    staging = folder / f".staging-{os.getpid()}"
    staging.mkdir()
    try:
        write(staging)
        names = sorted(str(p.relative_to(staging)) for p in staging.rglob("*") if p.is_file())
        hashes = {}
        umask = os.umask(0)
        os.umask(umask)
        for name in names:
            os.chmod(staging / name, 0o666 & ~umask)  # safetensors writes for the owner alone; a folder is for sharing
            hashes[name] = hash_file(staging / name)
            fsync(staging / name)
        (folder / STAGE_FILE).unlink(missing_ok=True)
        atomic_write_text(folder / _MOVING, json.dumps(hashes))
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    fsync(folder)
    record = {
        "stage": stage,
        "format_version": FORMAT_VERSION,
        "args": args,
        "seed": seed,
        "git_commit": _git_commit(),
        "packages": _package_versions(),
        "parents": {role: parent_record(Path(path)) for role, path in parents.items()},
        "data": data,
        "metrics": metrics,
        "files": hashes,
    }
    atomic_write_text(folder / STAGE_FILE, json.dumps(record, indent=1, sort_keys=True, default=str) + "\n")
    (folder / _MOVING).unlink()


def read_stage(folder: str | Path) -> dict | None:
    """The `stage.json` of a folder we wrote; None for a foreign one (any hub model).

    Raises:
        UserError: the file is there but is not ours to read.
    """
    path = Path(folder) / STAGE_FILE
    if not path.exists():
        return None
    advice = "the folder is damaged, or of another program: make it again"
    record = read_json(path, {"format_version": whole}, advice)
    if record["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {record['format_version']}, this program reads {FORMAT_VERSION}; make it again"
        )
    if fault := fault_of(record, STAGE):
        raise UserError(f"{path} {fault}; {advice}")
    return record


def verify(folder: str | Path) -> None:
    """Compares every file listed in `stage.json` with its hash; a foreign folder has nothing to compare.

    Raises:
        UserError: a file is missing or differs, or another lies there that loaders would read too.
    """
    record = read_stage(folder)
    if record is None:
        return
    for path in sorted(Path(folder).iterdir()):
        if path.is_file() and path.name not in record["files"] and _matches(path.name, _LOADED):
            raise UserError(
                f"{path} is not of the stage that wrote this folder ({STAGE_FILE} does not list it), and would be "
                f"loaded with the model; move it away"
            )
    for name, expected in record["files"].items():
        path = Path(folder) / name
        if not path.exists():
            raise UserError(f"{path} is missing, though {STAGE_FILE} lists it; copy the folder whole or make it again")
        if hash_file(path) != expected:
            raise UserError(f"{path} differs from what its stage wrote (sha256); restore it or make the folder again")


def require_stage(folder: str | Path, flag: str, wanted: tuple[str, ...]) -> dict | None:
    """Checks that a model folder is whole and of one of the `wanted` stages; a foreign model or hub name passes.

    Returns the stage record, or None for a foreign model.

    Raises:
        UserError: missing, unfinished, of another stage, or damaged; with the command that makes the right one.
    """
    path = Path(folder)
    make = f"make it with `{_HOW_TO_MAKE[wanted[0]]}`"
    if not path.exists():
        # `name` or `owner/name` may be a hub id; anything deeper, or starting with a folder that exists, is a path.
        is_hub_name = (
            len(path.parts) <= 2 and not str(folder).startswith((".", "/")) and not Path(path.parts[0]).exists()
        )
        if is_hub_name and path.parts[0] not in ("models", "out", "data"):
            return None
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], 1)
        looked = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        hint = f"did you mean {path.with_name(near[0])}?" if near else make
        raise UserError(f"{flag} {folder}: no such folder{looked}; {hint}")
    if not path.is_dir():
        raise UserError(f"{flag} {folder} is a file; wanted a model folder; {make}")
    refuse_adapter(path, flag)
    record = read_stage(path)
    if record is None:
        if any(path.glob("checkpoint-*")) and (path / "metrics.jsonl").exists():
            raise UserError(
                f"{flag} {folder} is of a run that did not finish; go on with it by --resume_from_checkpoint first"
            )
        if (path / "config.json").exists():
            return None
        inner = [name for name in ("actor", "critic") if (path / name / STAGE_FILE).exists()]
        hint = f"did you mean {path / ('critic' if 'critic' in flag else 'actor')}?" if inner else make
        raise UserError(f"{flag} {folder}: no finished model there (neither {STAGE_FILE} nor config.json); {hint}")
    if record["stage"] not in wanted:
        raise UserError(
            f"{flag} {folder} is of stage {record['stage']!r}, wanted {' or '.join(map(repr, wanted))}; {make}"
        )
    verify(path)
    return record


def refuse_adapter(model: str | Path, flag: str = "", config: str | Path | None = None) -> None:
    """A folder with an adapter, alone or beside a model, is no model: which of the two is meant has to be said.

    Args:
        model: a folder, or the hub name that `config` is of.
        flag: what it was given as, for the error.
        config: its `adapter_config.json`; by default the folder's.

    Raises:
        UserError: with the command that makes one model of base and adapter.
    """
    path = Path(model)
    file = Path(config or path / ADAPTER_CONFIG)
    if not file.is_file():
        return
    try:
        record = json.loads(file.read_text())
        base = str(record.get("base_model_name_or_path") or "")
        kind = str(record.get("peft_type") or "peft")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} is no json of an adapter ({error}); the folder is damaged, copy it again") from error
    what = f"{flag} {model}".strip()
    if path.name == "adapter" and (path.parent / STAGE_FILE).exists():
        raise UserError(f"{what} is only the adapter of {path.parent}, which holds base and adapter as one; give that")
    merge = f"python scripts/merge_adapter.py --adapter {model} --output_dir {path.name or 'adapter'}-merged"
    if not (path / "config.json").exists():
        beside = path.parent / Path(base).name
        if base and not Path(base).exists() and (beside / "config.json").exists():
            merge += f" --base {beside}"
        elif not base:
            merge += " --base BASE"
    beside = " beside a model" if (path / "config.json").exists() else ""
    raise UserError(
        f"{what} holds an adapter{beside} ({kind}{f' of {base}' * bool(base)}), and a whole model is wanted; merge it "
        f"first: `{merge}`"
    )


def hash_file(path: str | Path) -> str:
    """sha256 of a file, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tree(hashes: dict[str, str]) -> str:
    """One sha256 over many named ones, whatever their order."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def atomic_write_text(path: str | Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees the old content or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def fsync(path: str | Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parent_record(path: Path) -> dict:
    """Where a model came from: path, stage, and the sha256 of its `stage.json`, which stands for all its files."""
    record = read_stage(path) if path.exists() else None
    sha256 = hash_file(path / STAGE_FILE) if record else None
    return {
        "path": str(path.resolve()) if path.exists() else str(path),
        "stage": record and record["stage"],
        "sha256": sha256,
    }


def _git_commit() -> str | None:
    done = subprocess.run(["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
