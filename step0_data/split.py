"""From sources to stages: reads rows, converts them, and decides by a stable hash which stage each one serves.

The rule: a conversation's *opening* (system text and first user turn) is hashed; one hash chooses the stage among those
the row can feed, another one chooses train or eval. So a prompt never serves two stages, nor train and eval, however
often it occurs and in however many sources, and adding rows moves no other row.

Where a source has a train and a test part of its own, these take the place of the second hash. Held-out rows are
read first: a train row that shares its opening with one of them is set aside.
"""

import functools
import hashlib
import json
import marshal
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from common import checkpoint
from common.errors import UserError
from step0_data import formats, sources
from step0_data.columns import says

SPLIT_STAGES = ("sft", "preference", "prompts")  # the stages that --split speaks of
_REASON_CHARS, _REASONS = 200, 20  # of a reason, and of different reasons a source
_COLUMNS = 100  # names of columns that are remembered
_DEPTH = 100  # of what a further column holds: pickle goes no deeper than 300


@dataclass(frozen=True)
class Rule:
    shares: tuple[float, float, float]  # of sft, preference, prompts
    stages: tuple[str, ...]  # feed only these; empty: what each form feeds by itself
    eval_fraction: float

    def stage(self, form: formats.Form, key: str) -> str | None:
        """The stage a row serves, or None where --stages or --split leaves none."""
        allowed = [
            s for s in formats.STAGES if (s in self.stages and s in form.can_feed if self.stages else s in form.feeds)
        ]
        weights = [1.0 if s == "pretrain" else self.shares[SPLIT_STAGES.index(s)] for s in allowed]
        point, total = _unit("stage", key) * sum(weights), 0.0
        for stage, weight in zip(allowed, weights, strict=True):
            total += weight
            if point < total:
                return stage
        return None

    def part(self, key: str) -> str:
        return "eval" if _unit("eval", key) < self.eval_fraction else "train"


@dataclass
class Account:
    """What became of the rows of one source: rows == sum(used) + sum(set_aside)."""

    source: str
    weight: float = 1.0
    stage: str | None = None  # the only one it feeds
    files: list[dict] = field(default_factory=list)
    rows: int = 0
    own_split: bool = False  # its own train and test parts are train and eval
    left_out: list[str] = field(default_factory=list)  # files or splits of it that are neither train nor test
    not_data: list[str] = field(default_factory=list)  # files in its folder that were not read
    forms: Counter = field(default_factory=Counter)
    used: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)  # the same, but each copy that the weight asks for
    rejected: int = 0  # of those set aside: bad rows, which are in rejected.jsonl
    set_aside: Counter = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason: where it was met first
    duplicates: int = 0
    not_kept: dict[str, None] = field(default_factory=dict)  # further columns of rows of a stage that has none
    kept: dict[str, None] = field(default_factory=dict)  # further columns of prompts
    unread: dict[str, None] = field(default_factory=dict)  # what no stage keeps
    with_tools: int = 0  # rows used that have definitions of tools
    with_weights: int = 0  # and SFT rows with answers that are not trained

    def use(self, stage: str, part: str, record: formats.Record) -> None:
        self.used[f"{stage}/{part}"] += 1
        self.with_tools += record.tools is not None
        if stage == "sft":
            self.with_weights += any("weight" in turn for turn in record.prompt + record.answer)
        further = self.kept if stage == "prompts" else self.not_kept
        if record.extra and len(further) < _COLUMNS:
            said = [name for name, value in record.extra.items() if says(value) and name not in record.read]
            further.update(dict.fromkeys(said))
        if record.unread and len(self.unread) < _COLUMNS:
            self.unread.update(dict.fromkeys(record.unread))

    def put_aside(self, reason: str, where: str) -> None:
        if reason not in self.set_aside and len(self.set_aside) >= _REASONS:
            reason = "other reasons"  # they quote the rows, and each row says something else
        self.set_aside[reason] += 1
        self.first.setdefault(reason, where)

    def entry(self) -> dict:
        aside = {reason: {"rows": n, "first": self.first[reason]} for reason, n in sorted(self.set_aside.items())}
        return {
            "source": self.source,
            "weight": self.weight,
            "stage": self.stage,
            "files": self.files,
            "rows": self.rows,
            "forms": dict(sorted(self.forms.items())),
            "used": dict(sorted(self.used.items())),
            "written": dict(sorted(self.written.items())),
            "set_aside": aside,
            "rejected": self.rejected,
            "duplicates": self.duplicates,
            "not_kept": list(self.not_kept),
            "kept": list(self.kept),
            "unread": list(self.unread),
            "with_tools": self.with_tools,
            "with_weights": self.with_weights,
            "own_split": self.own_split,
            "left_out": self.left_out,
            "not_data": self.not_data,
        }


def hash_inputs(plans: Sequence[sources.Plan]) -> dict[str, dict[str, str] | None]:
    """{source: {file: sha256}}; None for a hub name.

    Raises:
        UserError: a file cannot be read.
    """
    files = {plan.source: plan.files for plan in plans}
    try:
        return {
            source: None if paths is None else {file.as_posix(): checkpoint.hash_file(file) for file in paths}
            for source, paths in files.items()
        }
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); look at the file") from error


def check_unchanged(plans: Sequence[sources.Plan], inputs: dict[str, dict[str, str] | None]) -> None:
    """What was read is what was hashed.

    Raises:
        UserError: a file has changed since.
    """
    for source, files in hash_inputs(plans).items():
        changed = [file for file, digest in (files or {}).items() if digest != inputs[source][file]]
        if changed:
            raise UserError(f"{changed[0]} changed while it was read; run again when nobody writes to it any more")


def collect(
    plans: Sequence[sources.Plan],
    inputs: dict[str, dict[str, str] | None],
    rule: Rule,
    max_rows: int,
    skip_bad: bool,
    drop_duplicates: bool,
    write: Callable[[str, str, dict, int], None],
    reject: Callable[[dict], None],
    convert: Callable[[object], tuple[formats.Form, formats.Record]] = formats.convert,
) -> list[dict]:
    """Reads all sources and hands each row on, as it comes; returns the ledger.

    Args:
        inputs: of `hash_inputs`. write: takes stage, part, row and about how long it is.
        reject: takes a bad row that `skip_bad` sets aside: source, where, reason, fix, and the row.

    Raises:
        UserError: a source cannot be read, a bad row without `skip_bad`, or nothing is left.
    """
    serves: dict[bytes, tuple[str, str]] = {}  # opening: stage and part
    places: dict[tuple[str, str], tuple[str, str]] = {}  # each of these once
    seen: set[bytes] = set()
    accounts, work = [], []
    for plan in plans:
        pieces, left_out = sources.pieces(plan)
        account = Account(plan.source, plan.weight, plan.stage, own_split=any(p.part for p in pieces))
        account.left_out, account.not_data = left_out, list(plan.not_data)
        account.files = [{"file": f, "sha256": h, "rows": 0} for f, h in (inputs[plan.source] or {}).items()]
        accounts.append(account)
        files = account.files or [{} for _ in pieces]
        own = convert if plan.columns is None else functools.partial(convert, names=plan.columns)
        work += [(account, own, file, piece) for file, piece in zip(files, pieces, strict=True)]
    taken = Counter()  # rows by source and part
    for account, own, file, piece in sorted(work, key=lambda it: it[3].part != "eval"):
        here = rule if account.stage is None else replace(rule, shares=(1.0, 1.0, 1.0), stages=(account.stage,))
        for row in piece.rows:
            if max_rows and taken[id(account), piece.part] == max_rows:
                break
            taken[id(account), piece.part] += 1
            account.rows += 1
            file["rows"] = file.get("rows", 0) + 1
            try:
                form, record, key, stage, extra = _understood(row, own, here)
            except formats.BadRow as bad:
                reason, fix = _one_line(bad.reason), _one_line(bad.fix, 2000)
                if not skip_bad:
                    aside = "or set such rows aside with --on_bad_row skip"
                    raise UserError(f"{row.where}: {reason}; {fix}; {aside}") from bad
                account.put_aside(reason, row.where)
                account.rejected += 1
                seen_there = row.value if row.raw is None and row.value is not bad else row.raw
                what = {"source": account.source, "where": row.where, "reason": reason, "fix": fix, "row": seen_there}
                reject(what)
                continue
            account.forms[form.name] += 1
            copies = _copies(account.weight, key)
            if not copies:
                account.put_aside(f"left out by the weight @{account.weight:g}", row.where)
                continue
            part = piece.part or rule.part(key)
            # Version 0: equal values are equal bytes, however their strings are shared in memory.
            said = [record.prompt, record.answer, record.rejected, record.margin, record.text, record.tools]
            content = marshal.dumps([*said, extra], 0)
            aside = record.set_aside
            if record.rejected is not None and record.answer == record.rejected:
                aside = aside or "chosen and rejected are the same"
            fingerprint = _digest(content)
            is_duplicate = aside is None and fingerprint in seen
            if aside is None:  # of a bad answer and a good one of the same words the good one is kept
                seen.add(fingerprint)
            account.duplicates += is_duplicate
            if aside:
                account.put_aside(aside, row.where)
            elif is_duplicate and drop_duplicates:
                account.put_aside("repeats an earlier row", row.where)
            elif stage is None:
                account.put_aside(_unwanted(form, account.stage), row.where)
            else:
                mine = places.setdefault((stage, part), (stage, part))
                place = serves.setdefault(_digest(key.encode()), mine)
                if place != mine:
                    serving = place[0] if place[0] != stage else place[1]
                    account.put_aside(f"its prompt serves {serving} already, through another row", row.where)
                    continue
                account.use(stage, part, record)
                for _ in range(copies if part == "train" else 1):
                    write(stage, part, output_row(record, stage), len(content))
                    account.written[f"{stage}/{part}"] += 1
    if not any(account.used for account in accounts):
        reasons = Counter()
        for account in accounts:
            reasons.update(account.set_aside)
        why = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3)) or "the sources hold no rows"
        raise UserError(f"no row is left from {', '.join(plan.source for plan in plans)}: {why}")
    return [account.entry() for account in accounts]


def _understood(row: sources.Row, convert: Callable, rule: Rule) -> tuple[formats.Form, formats.Record, str, str, str]:
    """(form, record, opening, stage, the further columns as text) of a row.

    Raises:
        BadRow: it is one, or cannot be converted.
    """
    if isinstance(row.value, formats.BadRow):
        raise row.value
    try:
        form, record = convert(row.value)
        key = opening(record)
        stage = rule.stage(form, key)
        return form, record, key, stage, _extra_text(record) if stage == "prompts" else ""
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> formats.BadRow:
    return formats.BadRow("nested too deeply", "make it flatter")


def _copies(weight: float, key: str) -> int:
    """How often the rows of an opening are written: @2.5 is twice, and a third time for half of the openings."""
    if weight == 1:
        return 1
    return int(weight) + (_unit("weight", key) < weight % 1)


def _unwanted(form: formats.Form, stage: str | None) -> str:
    if stage:
        return f"a row of the form {form.name!r} cannot serve {stage}"
    return f"no stage wants the form {form.name!r} under these --stages and --split"


def _extra_text(record: formats.Record) -> str:
    """The further columns of a prompt as text: the same for the same columns, in whatever order they stand.

    Raises:
        BadRow: they hold what is no text.
    """
    level, said = [record.extra], {name: value for name, value in record.extra.items() if value is not None}
    for _ in range(_DEPTH):
        if any(isinstance(it, dict) and not all(isinstance(name, str) for name in it) for it in level):
            way_out = "write the names as text, or take the column out"
            raise formats.BadRow("a further column holds an object whose names are no text", way_out)
        level = [it for outer in level for it in _inside(outer) if isinstance(it, (dict, list))]
    if level:
        raise _too_deep()
    text = json.dumps(said, ensure_ascii=False, default=str, sort_keys=True)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise formats.BadRow(
                "a further column holds half a surrogate pair, which is no character", "write the character whole"
            ) from None
    return text


def _inside(value: dict | list) -> Iterable:
    return value.values() if isinstance(value, dict) else value


def _one_line(text: str, limit: int = _REASON_CHARS) -> str:
    """A reason that may quote the row, fit for a line: no line breaks, nothing that is no character, not too long."""
    text = " ".join(text[: 2 * limit].encode("utf-8", "backslashreplace").decode().split())
    return text if len(text) <= limit else text[:limit] + "..."


def opening(record: formats.Record) -> str:
    """What the split hashes: everything up to the first user turn, so that all continuations of it stay together."""
    return _squeeze(record.text) if record.prompt is None else opening_of(record.prompt)


def opening_of(prompt: list[dict]) -> str:
    first_user = next(i for i, m in enumerate(prompt) if m["role"] == "user")
    turns = [f"[{_quote(m['role'])}, {_quote(_squeeze(m['content']))}]" for m in prompt[: first_user + 1]]
    return f"[{', '.join(turns)}]"


_quote = json.encoder.encode_basestring  # as json.dumps writes a string


def output_row(record: formats.Record, stage: str) -> dict:
    """A record as a row of that stage's file. Only SFT trains turns of the prompt, so only there they have weights."""
    if stage == "pretrain":
        return {"text": record.text}
    tools = {} if record.tools is None else {"tools": record.tools}
    if stage == "sft":
        return {"messages": record.prompt + record.answer, **tools}
    prompt = [{"role": turn["role"], "content": turn["content"]} for turn in record.prompt]
    if stage == "preference":
        row = {"prompt": prompt, "chosen": record.answer, "rejected": record.rejected, **tools}
        return row if record.margin is None else row | {"margin": record.margin}
    return {"prompt": prompt, **tools, **record.extra}


class Coin:
    """The negative control: swaps chosen and rejected by a fair coin for each pair of a part."""

    def __init__(self, seed: str):
        self._rng, self.pairs, self.swapped = random.Random(seed), 0, 0

    def __call__(self, row: dict) -> None:
        self.pairs += 1
        if self._rng.random() < 0.5:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
            self.swapped += 1


def _unit(what: str, key: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(f"{what}|{key}".encode()).digest()[:6], "big") / 2**48


def _squeeze(text: str) -> str:
    return " ".join(text.split()).casefold()


def _digest(content: bytes) -> bytes:
    """What is remembered of a text: 15 bytes take 48 in memory, 16 would take 64, and no two texts meet in them."""
    return hashlib.blake2b(content, digest_size=15).digest()
