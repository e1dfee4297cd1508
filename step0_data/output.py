"""The prepared folder: what may be overwritten, parquet files, manifest.json, preview.md and the closing lines."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common import checkpoint
from common.errors import UserError
from common.json_files import read_json
from common.printing import printable
from step0_data.spool import Spool

FORMAT_VERSION = 1
_OURS = {"sft", "preference", "prompts", "pretrain", "base_model", "manifest.json", "preview.md", "rejected.jsonl"}


class OutputFolder:
    """The folder prepared data go to; as a context it holds the folder's lock.

    Args:
        settings: the flags that shape the data. inputs: {source: {file: sha256}}.

    Raises:
        UserError: the folder holds something else, or data of other settings and no `overwrite`, or is locked.
    """

    def __init__(self, path: str | Path, settings: dict, inputs: dict, overwrite: bool):
        self.path, self.settings, self.inputs = Path(path), settings, inputs
        self.code = _hash_code()
        self._run = checkpoint.RunFolder(path, finished=())
        self.already_done = False
        try:
            self.manifest = _read_manifest(self.path)
            self._decide(overwrite)
        except UserError:
            self._run.release()
            raise

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(self, *error) -> None:
        self._run.release()

    def _decide(self, overwrite: bool) -> None:
        there = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
        foreign = [name for name in there if name not in _OURS]
        # A run that was killed while it moved its files in has left them, and the manifest, which comes last.
        was_moving = not foreign and any(self.path.glob(".staging-*/manifest.json"))
        if self.manifest is None and there and not was_moving:
            raise UserError(
                f"{self.path} holds {', '.join(there[:4])} but no manifest.json of ours; choose another --output_dir"
            )
        if self.manifest is None:
            return
        changed = self._differences()
        if not changed and not overwrite:
            _verify(self.path, self.manifest)
            self.already_done = True
        elif not overwrite:
            raise UserError(
                f"{self.path} holds data prepared otherwise ({'; '.join(changed[:3])}); "
                "choose another --output_dir or add --overwrite"
            )
        elif foreign:
            raise UserError(
                f"{self.path} also holds {', '.join(foreign[:4])}, which --overwrite will not delete; move it away"
            )

    def _differences(self) -> list[str]:
        """How this request differs from the one that made the folder."""
        old, new = self.manifest["args"], json.loads(json.dumps(self.settings))
        changed = [
            f"--{name} was {_show(old.get(name))}, now {_show(new.get(name))}"
            for name in new
            if old.get(name) != new.get(name)
        ]
        before = {s["source"]: s["files"] for s in self.manifest["sources"]}
        for source, files in self.inputs.items():
            if source in before and files is not None and {f["file"]: f["sha256"] for f in before[source]} != files:
                changed.append(f"{source} has changed since")
        if not changed and self.manifest.get("code") != self.code:
            changed.append("the code of step0_data has changed since")
        return changed

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A temporary folder to fill; on a clean exit its content moves in, manifest.json last."""
        for stale in self.path.glob(".staging-*"):
            shutil.rmtree(stale)  # we hold the lock: nobody is writing there
        staging = self.path / f".staging-{os.getpid()}"
        staging.mkdir()
        try:
            yield staging
            (self.path / "manifest.json").unlink(missing_ok=True)
            for name in sorted(_OURS):
                old = self.path / name
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            for name in sorted({p.name for p in staging.iterdir()} - {"manifest.json"}):
                os.replace(staging / name, self.path / name)
            os.replace(staging / "manifest.json", self.path / "manifest.json")
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def write_manifest(self, staging: Path, spool: Spool, ledger: list[dict], page: str, warnings: list[str]) -> None:
        """preview.md and manifest.json; the manifest's `hash` is what models record as their data."""
        checkpoint.atomic_write_text(staging / "preview.md", page)
        files = {
            p.relative_to(staging).as_posix(): checkpoint.hash_file(p) for p in sorted(staging.glob("*/*.parquet"))
        }
        manifest = {
            "format_version": FORMAT_VERSION,
            "hash": checkpoint.hash_tree(files),
            "stages": spool.counts(),
            "files": files,
            "sources": ledger,
            "warnings": warnings,
            "seed": self.settings["seed"],
            "args": self.settings,
            "code": self.code,
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        checkpoint.atomic_write_text(staging / "manifest.json", text)


# What people read ----------------------------------------------------------------------------------------------------


def summary(counts: dict[str, dict[str, int]], ledger: list[dict]) -> str:
    """The table of counts and the ledger."""
    lines = [f"{'stage':12}{'train':>8}{'eval':>8}"]
    for stage, parts in counts.items():
        lines.append(f"{stage:12}{parts['train']:>8}{parts['eval']:>8}")
    for entry in ledger:
        forms = ", ".join(f"{form} {n}" for form, n in entry["forms"].items()) or "no form recognised"
        only = f" for {entry['stage']} only" if entry["stage"] else ""
        lines.append(
            f"{entry['source']}{only}: {entry['rows']} rows read ({forms}), {sum(entry['used'].values())} used"
        )
        for reason, aside in entry["set_aside"].items():
            lines.append(f"  {aside['rows']:>6} set aside: {reason} (first: {aside['first']})")
        if entry["rejected"]:
            lines.append(f"  {entry['rejected']:>6} of these are bad rows: see rejected.jsonl")
        if extra := sum(entry["written"].values()) - sum(entry["used"].values()):
            lines.append(f"  {extra:>6} written again by the weight @{entry['weight']:g}")
        if entry["duplicates"]:
            lines.append(f"  {entry['duplicates']:>6} repeat an earlier row")
        if entry["with_tools"]:
            lines.append(f"  {entry['with_tools']:>6} have definitions of tools, for the chat template")
        if entry["with_weights"]:
            lines.append(f"  {entry['with_weights']:>6} have answers of weight 0: context, not trained")
        not_kept, unread = entry["not_kept"], entry["unread"]
        if not any(it.startswith("prompts/") for it in entry["used"]):
            not_kept, unread = [], [*not_kept, *unread]
        if not_kept:
            lines.append(f"  only prompts keep the columns {_few(not_kept)}")
        if entry["kept"] and list(entry["forms"]) == ["prompt"]:
            lines.append(
                f"  prompts alone, with the columns {_few(entry['kept'])} for reward functions; "
                "if these are answers, say which by --columns"
            )
        if unread:
            lines.append(f"  no step reads the columns {_few(unread)}")
        if entry["own_split"]:
            lines.append("  its own split is kept: train is train, and what it holds out is eval")
        if entry["left_out"]:
            lines.append(f"  left out, being neither train nor test: {_few(entry['left_out'])}")
        if entry["not_data"]:
            lines.append(f"  not read, being no data or describing them: {_few(entry['not_data'])}")
    return "\n".join(map(printable, lines))  # names of columns and files may hold what a terminal obeys


def _few(names: list[str]) -> str:
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more, see manifest.json" if more > 0 else "")


def next_command(folder: str, stages: dict, has_base_model: bool) -> str:
    """What to run next with these data."""
    # A model that starts from noise learns next to nothing at the default rates, which are those of pretrained ones.
    model = f"{folder}/base_model --learning_rate 3e-3" if has_base_model else "MODEL"
    if stages.get("sft", {}).get("train"):
        return f"next: python step1_sft/train.py --model {model} --data {folder} --output_dir models/sft"
    if stages.get("preference", {}).get("train"):
        return f"next: python step2_reward/train.py --model {model} --data {folder} --output_dir models/reward"
    if stages.get("prompts", {}).get("train"):
        return f"next: python step3_rlhf/train.py --actor models/sft --critic models/reward --data {folder}"
    return (
        f"next: these rows are for a stage beside others (pretraining text, or evaluation); look at {folder}/preview.md"
    )


def _read_manifest(folder: Path) -> dict | None:
    from common.data import MANIFEST  # brings pyarrow, which --help does without

    path = folder / "manifest.json"
    if not path.is_file():
        return None
    advice = "remove the folder and prepare again, or choose a new --output_dir"
    manifest = read_json(path, {}, advice)
    if not {"format_version", "hash", "args", "sources", "files"} <= manifest.keys():
        raise UserError(f"{path} is not from this program; choose a new --output_dir")
    if manifest["format_version"] != FORMAT_VERSION:
        raise UserError(f"{path} has format version {manifest['format_version']}, this program writes {FORMAT_VERSION}")
    return read_json(path, MANIFEST, advice)


def _verify(folder: Path, manifest: dict) -> None:
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file() or checkpoint.hash_file(folder / name) != digest:
            raise UserError(
                f"{folder / name} is missing or was changed since it was prepared; add --overwrite to make it again"
            )
    if (folder / "base_model").is_dir():
        checkpoint.verify(folder / "base_model")


def _hash_code() -> str:
    here = Path(__file__).resolve().parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()


def _show(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
