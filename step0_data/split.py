"""From sources to stages: reads rows, converts them, and decides by a stable hash which stage each one serves.

The rule: a conversation's *opening* (system text and first user turn) is hashed; one hash chooses the stage among those
the row can feed, another one chooses train or eval. So a prompt never serves two stages, nor train and eval, however
often it occurs and in however many sources, and adding rows moves no other row.

Where a source has a train and a test part of its own, these take the place of the second hash. Held-out rows are
read first: a train row that shares its opening with one of them is set aside.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from common import checkpoint
from common.errors import UserError
from step0_data import formats, sources

SPLIT_STAGES = ("sft", "preference", "prompts")  # the stages that --split speaks of


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
    files: list[dict] = field(default_factory=list)
    rows: int = 0
    own_split: bool = False  # its own train and test parts are train and eval
    left_out: list[str] = field(default_factory=list)  # files or splits of it that were not read
    forms: Counter = field(default_factory=Counter)
    used: Counter = field(default_factory=Counter)
    set_aside: Counter = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason: where it was met first
    duplicates: int = 0

    def put_aside(self, reason: str, where: str) -> None:
        self.set_aside[reason] += 1
        self.first.setdefault(reason, where)

    def entry(self) -> dict:
        aside = {reason: {"rows": n, "first": self.first[reason]} for reason, n in sorted(self.set_aside.items())}
        return {
            "source": self.source,
            "files": self.files,
            "rows": self.rows,
            "forms": dict(sorted(self.forms.items())),
            "used": dict(sorted(self.used.items())),
            "set_aside": aside,
            "duplicates": self.duplicates,
            "own_split": self.own_split,
            "left_out": self.left_out,
        }


def hash_inputs(datasets: Sequence[str]) -> dict[str, dict[str, str] | None]:
    """{source: {file: sha256}}; None for a hub name."""
    return {plan.source: _hash_files(plan.files) for plan in sources.plan(datasets)}


def collect(
    datasets: Sequence[str],
    rule: Rule,
    max_rows: int,
    skip_bad: bool,
    drop_duplicates: bool,
    form_name: str | None = None,
    names: dict[str, str] | None = None,
) -> tuple[dict[str, dict[str, list[dict]]], list[dict]]:
    """({stage: {"train": rows, "eval": rows}}, ledger).

    `form_name` and `names` as in `formats.convert`.

    Raises:
        UserError: a source cannot be read, a bad row without `skip_bad`, or nothing is left.
    """
    stages = {stage: {"train": [], "eval": []} for stage in formats.STAGES}
    serves: dict[str, tuple[str, str]] = {}  # opening: stage and part
    seen: set[bytes] = set()
    accounts, work = [], []
    for plan in sources.plan(datasets):
        pieces, left_out = sources.pieces(plan)
        account = Account(plan.source, own_split=any(piece.part for piece in pieces), left_out=left_out)
        account.files = [{"file": f, "sha256": h, "rows": 0} for f, h in (_hash_files(plan.files) or {}).items()]
        accounts.append(account)
        files = account.files or [{} for _ in pieces]
        work += [(account, file, piece) for file, piece in zip(files, pieces, strict=True)]
    taken = Counter()  # rows by source and part
    for account, file, piece in sorted(work, key=lambda it: it[2].part != "eval"):
        for row in piece.rows:
            if max_rows and taken[id(account), piece.part] == max_rows:
                break
            taken[id(account), piece.part] += 1
            account.rows += 1
            file["rows"] = file.get("rows", 0) + 1
            try:
                if isinstance(row.value, formats.BadRow):
                    raise row.value
                form, record = formats.convert(row.value, form_name, names)
            except formats.BadRow as bad:
                if not skip_bad:
                    raise UserError(f"{row.where}: {bad}; or set such rows aside with --on_bad_row skip") from bad
                account.put_aside(bad.reason, row.where)
                continue
            account.forms[form.name] += 1
            key = opening(record)
            stage, part = rule.stage(form, key), piece.part or rule.part(key)
            fingerprint = hashlib.sha256(
                _canonical([record.prompt, record.answer, record.rejected, record.text]).encode()
            ).digest()
            is_duplicate = fingerprint in seen
            seen.add(fingerprint)
            account.duplicates += is_duplicate
            if record.set_aside:
                account.put_aside(record.set_aside, row.where)
            elif record.rejected is not None and record.answer == record.rejected:
                account.put_aside("chosen and rejected are the same", row.where)
            elif is_duplicate and drop_duplicates:
                account.put_aside("repeats an earlier row", row.where)
            elif stage is None:
                reason = f"no stage wants the form {form.name!r} under these --stages and --split"
                account.put_aside(reason, row.where)
            elif (place := serves.setdefault(key, (stage, part))) != (stage, part):
                serving = place[0] if place[0] != stage else place[1]
                account.put_aside(f"its prompt serves {serving} already, through another row", row.where)
            else:
                stages[stage][part].append(output_row(record, stage))
                account.used[f"{stage}/{part}"] += 1
    ledger = [account.entry() for account in accounts]
    if not any(rows for parts in stages.values() for rows in parts.values()):
        reasons = Counter()
        for account in accounts:
            reasons.update(account.set_aside)
        why = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3)) or "the sources hold no rows"
        raise UserError(f"no row is left from {', '.join(datasets)}: {why}")
    return stages, ledger


def opening(record: formats.Record) -> str:
    """What the split hashes: everything up to the first user turn, so that all continuations of it stay together."""
    if record.prompt is None:
        return _squeeze(record.text)
    first_user = next(i for i, m in enumerate(record.prompt) if m["role"] == "user")
    return _canonical([[m["role"], _squeeze(m["content"])] for m in record.prompt[: first_user + 1]])


def output_row(record: formats.Record, stage: str) -> dict:
    """A record as a row of that stage's file."""
    if stage == "sft":
        return {"messages": record.prompt + record.answer}
    if stage == "preference":
        row = {"prompt": record.prompt, "chosen": record.answer, "rejected": record.rejected}
        return row if record.margin is None else row | {"margin": record.margin}
    if stage == "prompts":
        return {"prompt": record.prompt, **record.extra}
    return {"text": record.text}


def shuffle_preferences(rows: list[dict], seed: str) -> int:
    """Swaps chosen and rejected in place by a fair coin for each pair; returns how many were swapped."""
    rng, swapped = random.Random(seed), 0
    for row in rows:
        if rng.random() < 0.5:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
            swapped += 1
    return swapped


def _unit(what: str, key: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(f"{what}|{key}".encode()).digest()[:6], "big") / 2**48


def _squeeze(text: str) -> str:
    return " ".join(text.split()).casefold()


def _canonical(value) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _hash_files(files) -> dict[str, str] | None:
    return None if files is None else {file.as_posix(): checkpoint.hash_file(file) for file in files}
