"""Checkpoints inside a run: written whole or not at all, verified before they are loaded, kept few.

    OUTPUT_DIR/checkpoint-<step>/
        <model>/            a DeepSpeed engine's state: weights, optimizer, schedule, loss scale
        rng-<rank>.json     every random generator of that rank
        manifest.json       step, counters, what run this is, size and sha256 of every file; its own sha256 too

A checkpoint is written under a temporary name, fsynced, hashed and only then renamed, so a crash at any moment leaves
the one before. Nothing points at the newest: the newest that verifies is taken. Rank 0 looks and decides for all.

Verified means unchanged since it was written, not harmless: DeepSpeed's files are pickles, and loading them runs what
they say. Resume only what your own runs wrote.
"""

import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from common import checkpoint, distributed
from common.engine import TrainedModel
from common.errors import RunFailed, Stopped, UserError
from common.functions import find_file, is_function
from common.json_files import anything, each, parse_json, text, whole

MANIFEST = "manifest.json"
_SCHEMA = {
    "step": whole,
    "counters": each(anything),
    "identity": each(anything),
    "files": each({"size": whole, "sha256": text}),
    "sha256": text,
}
_PREFIX, _STAGING = "checkpoint-", ".tmp-checkpoint-"
_ECHO_SECONDS = 2.0  # a signal that follows another so soon is the same one, passed on by a launcher
_LARGE = 2**30  # bytes of a file of somebody else's model that is known by its size alone

# Flags that two parts of one run may differ in: none of them changes what is computed. Models and data are compared by
# content instead of by name.
FREE_FLAGS = frozenset(
    ["output_dir", "data", "data_split", "tokens_cache", "model_name_or_path", "actor", "critic", "ref", "reward"]
    + ["logging_steps", "sample_steps", "report_to", "run_name", "reward_timeout", "push_to_hub", "hub_model_id"]
    + ["save_steps", "save_total_limit", "resume_from_checkpoint", "timeout_minutes", "config", "local_rank"]
)


@dataclasses.dataclass(frozen=True)
class Saving:
    """When to save and what to go on from; the flags of the same names explain them."""

    save_steps: float
    save_total_limit: int
    resume_from_checkpoint: str | None

    def every(self, total_steps: int) -> int:
        """Steps from one checkpoint to the next; 0 for never."""
        share = self.save_steps * total_steps if self.save_steps < 1 else self.save_steps
        return max(1, round(share)) if share else 0


def identity(stage: str, args: dict, data_hash: str, parents: dict[str, str | Path]) -> dict:
    """What has to be the same for two parts to be one run, by name."""
    known = {name: value for name, value in args.items() if name not in FREE_FLAGS}
    files = {f"content of --{name}": checkpoint.hash_file(value) for name, value in known.items() if _is_file(value)}
    return json.loads(
        json.dumps(
            {"stage": stage, "ranks": distributed.world_size(), "data": data_hash}
            | {f"--{name}": value for name, value in known.items()}
            | {f"the content of {role}": _content(path) for role, path in parents.items()}
            | files,
            default=str,
        )
    )


def _content(source: str | Path) -> str:
    """What a model folder or a reward function holds, as one hash; of a hub name, the name."""
    if is_function(str(source)):
        return checkpoint.hash_file(find_file(str(source)))
    folder = Path(source)
    if not folder.is_dir():
        return str(source)
    if (folder / checkpoint.STAGE_FILE).exists():  # which lists the hash of every file
        return checkpoint.hash_file(folder / checkpoint.STAGE_FILE)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Hashing tens of gigabytes of foreign weights at every start is too much; of large files the size has to do.
    whole = {
        str(p.relative_to(folder)): checkpoint.hash_file(p) if p.stat().st_size < _LARGE else str(p.stat().st_size)
        for p in files
    }
    return checkpoint.hash_tree(whole)


class Checkpoints:
    """The checkpoints of one run: which one it goes on from, saving new ones, and stopping when asked to.

    Args:
        folder: the run's; this process holds its lock.
        total_steps: of the whole run.
        identity: see the function of that name.

    Raises:
        UserError: none can be used though some are there, another run wrote them, or they are there and nobody asked to
            go on.
    """

    def __init__(self, folder: Path, saving: Saving, total_steps: int, identity: dict):
        self.folder, self.identity, self.total_steps = Path(folder), identity, total_steps
        self.every, self.limit = saving.every(total_steps), saving.save_total_limit
        self.signal, self.signal_at = 0, 0.0
        found, self.notes = distributed.from_main(lambda: _choose(self.folder, saving, identity))
        self.source = Path(found[0]) if found else None
        self.counters = found[1]["counters"] if found else {}
        self.step = found[1]["step"] if found else 0

    def restore(self, models: dict[str, TrainedModel]) -> dict:
        """Loads the chosen checkpoint into the engines and the random generators, and returns the counters saved in it.

        Nothing chosen: nothing is loaded, and the counters are empty. From here on SIGTERM and SIGINT are heeded at the
        end of a step.
        """
        if self.source is not None:
            for name, model in models.items():
                model.load(self.source, name)
            _set_generators(json.loads((self.source / f"rng-{distributed.rank()}.json").read_text()))
        distributed.from_main(lambda: self._check_room(models))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heed)
        return self.counters

    def after_step(
        self,
        step: int,
        models: dict[str, TrainedModel],
        counters: dict,
        before_saving: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves when it is time or when a signal came, which also ends the run.

        Args:
            counters: what json can hold.

        Raises:
            Stopped: a signal came, on any rank; all ranks raise it after the same step.
            RunFailed: the checkpoint could not be written; the one before is untouched.
        """
        came = distributed.max_over_ranks(self.signal)
        if came or (self.every and step % self.every == 0):
            before_saving()
            self._save(step, models, counters)
        if came:
            raise Stopped(
                came,
                f"stopped by {signal.Signals(came).name} after step {step} of {self.total_steps}; saved "
                f"{self._path(step)}; go on with: {_same_command()} --resume_from_checkpoint",
            )

    def remove_all(self) -> None:
        """When the run is finished: its checkpoints have served."""
        self._default_signals()
        if distributed.is_main():
            for path in (*_listed(self.folder).values(), *self.folder.glob(_STAGING + "*")):
                shutil.rmtree(path)

    def _save(self, step: int, models: dict[str, TrainedModel], counters: dict) -> None:
        staging = self.folder / distributed.from_main(lambda: f"{_STAGING}{step}-{uuid.uuid4().hex[:8]}")
        try:
            staging.mkdir(exist_ok=True)
            for name, model in models.items():
                model.save(staging, name)
            generators = json.dumps(_generators())
            (staging / f"rng-{distributed.rank()}.json").write_text(generators)
            distributed.barrier()
            if distributed.is_main():
                self._publish(staging, step, counters)
        except (OSError, RuntimeError) as error:
            # Of a disk that fills up torch's file writer makes a RuntimeError; any other is no matter of disks.
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise
            kept = max(_listed(self.folder), default=None)
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise RunFailed(
                f"the checkpoint of step {step} could not be written in {self.folder}: {reason}; "
                + (f"{_PREFIX}{kept} is whole: " if kept else "")
                + "make room or mend the disk, then run the same command with --resume_from_checkpoint"
            ) from error
        distributed.barrier()

    def _publish(self, staging: Path, step: int, counters: dict) -> None:
        names = sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())
        manifest = {
            "step": step,
            "counters": counters,
            "identity": self.identity,
            "files": dict(zip(names, _in_threads(lambda name: _sealed(staging / name), names), strict=True)),
        }
        checkpoint.atomic_write_text(staging / MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
        for folder in (*(path for path in staging.rglob("*") if path.is_dir()), staging):
            checkpoint.fsync(folder)
        target = self._path(step)
        if target.exists():  # one that did not verify, at a step that is now reached again
            target.rename(staging.with_name(staging.name + "-replaced"))
        staging.rename(target)
        checkpoint.fsync(self.folder)
        # One further on is damaged, or is asked for by name later: it does not count, and stays.
        listed = {at: path for at, path in _listed(self.folder).items() if at <= step}
        for old in sorted(listed)[: -self.limit]:
            # Renamed first: a removal cut short leaves nothing that looks like a checkpoint.
            listed[old].rename(self.folder / f"{_STAGING}{old}-pruned")
        for leftover in self.folder.glob(_STAGING + "*"):
            shutil.rmtree(leftover)

    def _check_room(self, models: dict[str, TrainedModel]) -> None:
        """Refuses before the first step what would fill the disk at the first checkpoint."""
        if not self.every:
            return
        # The new one comes before the oldest goes.
        missing = self.limit + 1 - min(self.limit, len(_listed(self.folder)))
        need = missing * sum(model.checkpoint_bytes() for model in models.values())
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise UserError(
                f"checkpoints need about {need / 1e9:.1f} GB in {self.folder}, and {free / 1e9:.1f} GB are free; make "
                f"room, lower --save_total_limit (now {self.limit}), or set --save_steps 0 to save only when stopped"
            )

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step}"

    def _heed(self, number: int, _frame) -> None:
        """First signal: finish the step and save. Second: end at once, as without us.

        What comes right after the first is an echo: at Ctrl-C a terminal signals every process, and launchers then
        signal theirs once more.
        """
        now = time.monotonic()
        if not self.signal:
            self.signal, self.signal_at = number, now
        elif now - self.signal_at > _ECHO_SECONDS:
            self._default_signals()
            os.kill(os.getpid(), number)

    def _default_signals(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _same_command() -> str:
    """The command line of this run, without what it went on from; of several ranks the launcher is not known."""
    if distributed.world_size() > 1:
        return "the same command, and"
    words = iter(sys.argv)
    kept = []
    for word in words:
        if word.startswith("--resume_from_checkpoint="):
            continue
        if word == "--resume_from_checkpoint":
            word = next(words, "--")
            if not word.startswith("--"):
                continue
        if word != "--":
            kept.append(word)
    return "python " + shlex.join(kept)


def _choose(folder: Path, saving: Saving, wanted: dict) -> tuple[tuple[str, dict] | None, list[str]]:
    """The checkpoint to go on from with its manifest, or None; and what to tell people. Runs on rank 0."""
    for leftover in folder.glob(_STAGING + "*"):
        shutil.rmtree(leftover)  # of a run that was killed while saving
    listed, notes = _listed(folder), []
    others = [path for path in sorted(folder.glob(f"[!.]*{_PREFIX}*")) + sorted(folder.glob(_PREFIX + "*"))]
    others = [path for path in others if (path / MANIFEST).exists() and path not in listed.values()]
    if saving.resume_from_checkpoint is None:
        if listed or others:
            newest = f"{_PREFIX}{max(listed)}" if listed else others[0].name
            raise UserError(
                f"{folder} holds {newest} of a run that did not finish; go on with "
                f"--resume_from_checkpoint, choose another --output_dir, or remove the folder"
            )
        return None, notes
    if saving.resume_from_checkpoint == "latest":
        candidates = [listed[step] for step in sorted(listed, reverse=True)]
    else:
        asked = Path(saving.resume_from_checkpoint)
        if asked.resolve().parent != folder.resolve():
            raise UserError(
                f"--resume_from_checkpoint {asked} is not in --output_dir {folder}, where its metrics are; name the "
                f"checkpoint's own folder as --output_dir, or a copy of it"
            )
        candidates = [asked]
    for path in candidates:
        try:
            manifest = verify(path)
        except UserError as error:
            notes.append(f"warning: {error}")
            continue
        _require_same_run(path, manifest["identity"], wanted)
        notes.append(f"resuming after step {manifest['step']} from {path}")
        newer = [] if saving.resume_from_checkpoint == "latest" else [at for at in listed if at > manifest["step"]]
        for step in newer:
            # The run takes another way from here. What it had reached is kept, under a name that nobody resumes from.
            aside = listed[step].with_name(f"abandoned-{listed[step].name}-{uuid.uuid4().hex[:4]}")
            listed[step].rename(aside)
            notes.append(f"{listed[step].name} is further on: set aside as {aside.name}")
        return (str(path), manifest), notes
    if candidates:
        reasons = "; ".join(note.removeprefix("warning: ") for note in notes)
        raise UserError(f"no checkpoint can be used: {reasons}; to start from the beginning, move them away")
    if others:
        # Nothing is begun anew beside what somebody, or an earlier run, has put aside.
        raise UserError(
            f"{folder} has no {_PREFIX}STEP to go on from, but {others[0].name}; rename it so, with the step that its "
            f"{MANIFEST} says, or move it away to start at step 1"
        )
    again = "; metrics.jsonl begins anew" if (folder / "metrics.jsonl").exists() else ""
    return None, [f"no checkpoint in {folder}: starting at step 1{again}"]


def verify(path: Path) -> dict:
    """The manifest of a checkpoint in which every byte is as it was written.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    try:
        manifest = parse_json((path / MANIFEST).read_bytes(), _SCHEMA)
        stated = manifest.pop("sha256")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no readable {MANIFEST} ({error})") from error
    if stated != _digest(manifest):
        raise UserError(f"{path}: {MANIFEST} was changed since it was written")
    name = f"{_PREFIX}{manifest['step']}"
    if path.name != name:
        raise UserError(f"{path} is of step {manifest['step']}; rename it to {name} to go on from it")
    here = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {MANIFEST}
    for name in sorted(manifest["files"].keys() | here):
        entry, file = manifest["files"].get(name), path / name
        if entry is None:
            raise UserError(f"{path}: {name} is not in its {MANIFEST}")
        if not file.is_file():
            raise UserError(f"{path}: {name} is missing")
        if file.stat().st_size != entry["size"]:
            raise UserError(f"{path}: {name} has {file.stat().st_size} bytes, written were {entry['size']}")
    names = list(manifest["files"])
    for name, found in zip(names, _in_threads(lambda name: checkpoint.hash_file(path / name), names), strict=True):
        if found != manifest["files"][name]["sha256"]:
            raise UserError(f"{path}: {name} was changed since it was written (sha256)")
    return manifest


def _require_same_run(path: Path, theirs: dict, ours: dict) -> None:
    for name in (*ours, *(name for name in theirs if name not in ours)):
        was, now = theirs.get(name), ours.get(name)
        if was != now:
            advice = "launch as many" if name == "ranks" else "give the same, or start another --output_dir"
            raise UserError(f"{path} is of another run: {name} was {was!r} and is {now!r} now; {advice}")


def _listed(folder: Path) -> dict[int, Path]:
    """Checkpoints by step; other things of similar names are nobody's business."""
    found = {path: path.name.removeprefix(_PREFIX) for path in folder.glob(_PREFIX + "*") if path.is_dir()}
    return {int(rest): path for path, rest in found.items() if rest.isdecimal() and rest == str(int(rest))}


def _sealed(path: Path) -> dict:
    checkpoint.fsync(path)
    return {"size": path.stat().st_size, "sha256": checkpoint.hash_file(path)}


def _digest(manifest: dict) -> str:
    return checkpoint.hash_tree(manifest)


def _in_threads(function: Callable, items: Iterable) -> list:
    """Hashing leaves the interpreter's lock, so files are read side by side."""
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _is_file(value) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return isinstance(value, str) and Path(value).is_file()
    return False


def _generators() -> dict:
    """The state of every global random generator of this process."""
    numpy_state = np.random.get_state()
    states = {"python": random.getstate(), "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]]}
    states["torch"] = _text(torch.get_rng_state())
    if torch.cuda.is_available():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def _set_generators(states: dict) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
