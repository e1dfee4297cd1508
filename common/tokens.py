"""A stage's prepared rows as tokens: made by all cores, kept in a file, read from there as they are needed.

    FOLDER/<kind>-<key>.arrow    the examples, in batches, memory-mapped by every rank: rows are read when a step asks
    FOLDER/<kind>-<key>.json     what the key is made of, the report on the rows, size and sha256 of the arrow file

The key is a hash of all that decides the tokens: content of the data file, tokenizer with template and special tokens,
the length limit, this code and the libraries under it. The arrow file is written under another name, fsynced and
renamed, and the json comes last, so what is found is whole; before it is used it is compared with its sha256.
"""

# Processes that tokenise import this file: nothing here may pull in torch, which takes seconds.
import bisect
import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pyarrow as pa

from common import chat_format
from common.checkpoint import atomic_write_text, fsync, hash_file, hash_tree
from common.cli import is_main_process
from common.data import DataFiles, decoded, open_parquet, read_rows, rows_of
from common.errors import RunFailed, UserError
from common.examples import (
    PairExample,
    PromptExample,
    Report,
    SFTExample,
    tokenise_pairs,
    tokenise_prompts,
    tokenise_sft,
)
from common.json_files import each, parse_json, text, whole
from common.printing import say

# Below this many rows one process is done before others have started, and there is nothing worth keeping.
MANY_ROWS = 20_000
_CHUNK = 1_000  # rows a process is given at once
_MOST_PROCESSES = 32  # each holds about 0.2 GB
_REPORT = {"what": text, "read": whole, "kept": whole, "set_aside": each(whole), "first": each(text)}
_SEAL = {"what": each(text), "report": _REPORT, "size": whole, "sha256": text}
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "jinja2", "pyarrow")

_TOKENISE = {"sft": tokenise_sft, "preference": tokenise_pairs, "prompts": tokenise_prompts}
_EXAMPLE = {"sft": SFTExample, "preference": PairExample, "prompts": PromptExample}


@dataclasses.dataclass(frozen=True)
class Cache:
    """Where tokens are kept; the flags of the same names explain them."""

    tokens_cache: str
    output_dir: str


class Examples(Sequence):
    """Examples in arrow batches, in memory or in a mapped file; each is made when it is asked for."""

    def __init__(self, make: type, batches: list[pa.RecordBatch]):
        self.make, self.batches, self.starts, self.size = make, batches, [], 0
        for batch in batches:
            self.starts.append(self.size)
            self.size += len(batch)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int):
        if not 0 <= row < self.size:
            raise IndexError(row)
        number = bisect.bisect_right(self.starts, row) - 1
        batch = self.batches[number]
        example = batch.slice(row - self.starts[number], 1).to_pylist(maps_as_pydicts="strict")[0]
        if "row" in example:
            decoded([example["row"]], batch.schema.field("row").type)
        return self.make(**example)


def load(kind: str, tokenizer, files: DataFiles, file: Path, limit: int, cache: Cache) -> tuple[Sequence, Report]:
    """The examples of one prepared file and the report on its rows, the same on every rank. A collective.

    Args:
        kind: "sft", "preference" or "prompts".
        file: the training or the evaluation file of `files`.
        limit: tokens of an example, of a prompt for prompts.

    Raises:
        UserError: no row is left, or the cache cannot be written.
        RunFailed: a process that tokenised died.
    """
    from common import distributed

    many = _rows(file) >= MANY_ROWS
    if cache.tokens_cache == "off" or (cache.tokens_cache == "auto" and not many):
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        examples, report = in_memory(kind, tokenizer, file, limit, _processes(many, ranks_here))
    else:
        what = _key(kind, tokenizer, files.sha256[file], limit)

        def ensure() -> str:
            return str(_ensure(_folder(cache, files, file), kind, tokenizer, file, limit, what, _processes(many)))

        path = Path(distributed.from_main(ensure))
        if not path.with_suffix(".json").exists():  # this host does not see the first one's disk
            path = Path(ensure())
        distributed.barrier()
        examples, report = _open(kind, path)
    report.require_rows(file)
    return examples, report


def in_memory(kind: str, tokenizer, file: Path, limit: int, processes: int) -> tuple[Sequence, Report]:
    """Tokens of a file that nothing is kept of."""
    if processes == 1 and _rows(file) < MANY_ROWS:
        return _TOKENISE[kind](tokenizer, read_rows(file), limit)
    report = Report("")
    batches = list(_tokenised(kind, tokenizer, file, limit, processes, report))
    return Examples(_EXAMPLE[kind], batches), report


# ---- the cache


def _key(kind: str, tokenizer, data: str, limit: int) -> dict[str, str]:
    """All that decides the tokens, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)  # vocabulary, merges, added and special tokens, template
        saved = {str(p.relative_to(folder)): hash_file(p) for p in Path(folder).rglob("*") if p.is_file()}
    code = {path.name: hash_file(path) for path in Path(__file__).parent.glob("*.py")}
    # A template may print today's date.
    question = [{"role": "user", "content": "Hi"}]
    return {
        "kind": kind,
        "data": data,
        "limit": str(limit),
        # Of a class that came with a model, the module's name holds the commit or the hash of its files.
        "tokenizer": hash_tree(saved | {"class": f"{type(tokenizer).__module__}.{type(tokenizer).__name__}"}),
        "a prompt": json.dumps(chat_format.encode_prompt(tokenizer, question)),
        "code": hash_tree(code),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def _folder(cache: Cache, files: DataFiles, file: Path) -> Path:
    """Where to keep tokens; by default beside the data, or where that is not allowed in the run's folder."""
    if cache.tokens_cache != "auto":
        choices = [Path(cache.tokens_cache)]
    else:
        choices = [(files.root or file.parent) / ".tokens", Path(cache.output_dir) / ".tokens"]
    for folder in choices:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
            return folder
        except OSError as error:
            reason = error.strerror
    raise UserError(
        f"tokens cannot be kept in {choices[-1]}: {reason}; give a folder with --tokens_cache DIR, or keep none with "
        "--tokens_cache off"
    )


def _ensure(folder: Path, kind: str, tokenizer, file: Path, limit: int, what: dict, processes: int) -> Path:
    """The arrow file of these tokens, found whole or made. One process writes to a folder, others wait for it."""
    import filelock

    path = folder / f"{kind}-{hash_tree(what)[:24]}.arrow"
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say(f"tokens: another process is writing to {folder}; waiting for it")
        lock.acquire()
    try:
        for leftover in folder.glob(f".{kind}-*.tmp"):
            leftover.unlink()  # of a process that was killed: only the one with the lock writes here
        damage = _damage(path, what)
        if damage is None:
            _say(f"tokens: {path}, made before from the same data, tokenizer and settings")
            return path
        if damage:
            _say(f"tokens: {path} {damage}; made again")
        _write(path, kind, tokenizer, file, limit, what, processes)
    except OSError as error:
        raise UserError(
            f"tokens cannot be kept in {folder}: {error.strerror or error}; make room, give another folder with "
            "--tokens_cache DIR, or keep none with --tokens_cache off"
        ) from error
    finally:
        lock.release()
    return path


def _damage(path: Path, what: dict) -> str | None:
    """None if the file is there and as it was written; "" if it was never finished; else what is wrong with it."""
    sealed = path.with_suffix(".json")
    if not sealed.exists():
        return ""
    try:
        record = parse_json(sealed.read_bytes(), _SEAL)
        if record["what"] != what:
            return "is of other tokens"
        Report(**record["report"])
        if path.stat().st_size != record["size"]:
            return f"has {path.stat().st_size} bytes, written were {record['size']}"
        return None if hash_file(path) == record["sha256"] else "was changed since it was written (sha256)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be used ({error})"


def _write(path: Path, kind: str, tokenizer, file: Path, limit: int, what: dict, processes: int) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    report = Report("")
    try:
        # A stream, not arrow's file format: that allows columns of categories one dictionary only.
        with pa.OSFile(str(temporary), "wb") as sink, contextlib.ExitStack() as stack:
            writer = None
            for batch in _tokenised(kind, tokenizer, file, limit, processes, report):
                writer = writer or stack.enter_context(pa.ipc.new_stream(sink, batch.schema))
                writer.write_batch(batch)
        fsync(temporary)
        record = {"what": what, "report": dataclasses.asdict(report)}
        record |= {"size": temporary.stat().st_size, "sha256": hash_file(temporary)}
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)
    atomic_write_text(path.with_suffix(".json"), json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _open(kind: str, path: Path) -> tuple[Examples, Report]:
    report = Report(**parse_json(path.with_suffix(".json").read_bytes(), _SEAL)["report"])
    batches = list(pa.ipc.open_stream(pa.memory_map(str(path)))) if report.kept else []
    return Examples(_EXAMPLE[kind], batches), report


# ---- tokenising, in this process or in several


def _rows(file: Path) -> int:
    with open_parquet(file) as found:
        return found.metadata.num_rows


def _processes(many: bool, ranks_here: int = 1) -> int:
    return max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // ranks_here)) if many else 1


def _tokenised(
    kind: str, tokenizer, file: Path, limit: int, processes: int, report: Report
) -> Iterator[pa.RecordBatch]:
    """The examples of a file in its order, in batches; `report` grows with them."""
    report.what = _TOKENISE[kind](tokenizer, [], limit)[1].what
    jobs = _jobs(kind, file, limit)
    if type(tokenizer).__module__.startswith("transformers_modules"):
        processes = 1  # its class came with the model, and other processes would not find it
    if processes == 1:
        done = (_chunk(tokenizer, *job) for job in jobs)
    else:
        _say(f"tokens: {_rows(file):,} rows of {file}, by {processes} processes")
        done = _in_processes(tokenizer, jobs, processes)
    for batch, part in done:
        report.add(part)
        if len(batch):
            yield batch


def _jobs(kind: str, file: Path, limit: int) -> Iterator[tuple[str, pa.RecordBatch, int, int]]:
    first_row = 0
    # Buffered: otherwise a whole row group, which is up to a million rows, is read into memory first.
    for rows in open_parquet(file, buffer_size=2**20, pre_buffer=False).iter_batches(batch_size=_CHUNK):
        yield kind, rows, limit, first_row
        first_row += len(rows)


def _chunk(tokenizer, kind: str, rows: pa.RecordBatch, limit: int, first_row: int) -> tuple[pa.RecordBatch, Report]:
    if kind == "prompts":
        return _prompts_chunk(tokenizer, rows, limit, first_row)
    examples, report = _TOKENISE[kind](tokenizer, rows_of(rows), limit, first_row)
    ids = pa.list_(pa.int32())
    columns = {
        "sft": {"ids": ids, "mask": pa.list_(pa.bool_())},
        "preference": {"prompt": ids, "chosen": ids, "rejected": ids, "margin": pa.float64()},
    }[kind]
    arrays = [pa.array([getattr(e, name) for e in examples], type_) for name, type_ in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, list(columns)), report


def _prompts_chunk(tokenizer, rows: pa.RecordBatch, limit: int, first_row: int) -> tuple[pa.RecordBatch, Report]:
    """The columns for reward functions go into the cache as arrow has them: not every type comes back from Python."""
    examples, kept, report = [], [], tokenise_prompts(tokenizer, [], limit)[1]
    for number, row in enumerate(rows_of(rows)):
        found, of_row = tokenise_prompts(tokenizer, [row], limit, first_row + number)
        report.add(of_row)
        examples += found
        kept += [number] * len(found)
    columns = dict(zip(rows.schema.names, rows.take(pa.array(kept, pa.int64())).columns, strict=True))
    columns["prompt"] = pa.array([e.row["prompt"] for e in examples], columns["prompt"].type)  # without dropped turns
    row = pa.StructArray.from_arrays(list(columns.values()), fields=list(rows.schema))
    ids = pa.array([e.ids for e in examples], pa.list_(pa.int32()))
    return pa.RecordBatch.from_arrays([ids, row], ["ids", "row"]), report


def _in_processes(tokenizer, jobs: Iterator[tuple], processes: int) -> Iterator[tuple[pa.RecordBatch, Report]]:
    # Spawned, not forked: by now this process has threads, and perhaps a GPU, that a fork would inherit half.
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(tokenizer,)
    )
    waiting = collections.deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_chunk_there, job))
            if len(waiting) > 3 * processes:  # so that rows are read no faster than they are tokenised
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RunFailed("a process that made tokens was ended from outside, perhaps for want of memory") from error
    finally:
        pool.shutdown(cancel_futures=True)


_there: dict = {}  # in a process that tokenises: the tokenizer


def _begin(tokenizer) -> None:
    _there["tokenizer"] = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the first one ends the others

    def follow():
        multiprocessing.parent_process().join()
        os._exit(1)  # it was killed, and nobody else would tell us

    threading.Thread(target=follow, daemon=True).start()


def _chunk_there(job: tuple) -> tuple[pa.RecordBatch, Report]:
    return _chunk(_there["tokenizer"], *job)


def _say(line: str) -> None:
    if is_main_process():
        say(line)
