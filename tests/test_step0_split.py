"""Who gets which row: no prompt serves two stages or both train and eval, adding rows moves none, none is lost."""

import hashlib
import json
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from step0_data import output, sources, split

TEXT = st.text(alphabet="abcXYZ \n你🎉", min_size=1, max_size=6).filter(lambda t: t.strip())
PAIR = st.builds(lambda p, a, b: {"prompt": p, "chosen": a, "rejected": b}, TEXT, TEXT, TEXT)
ALPACA = st.builds(lambda p, a: {"instruction": p, "output": a}, TEXT, TEXT)
QUESTION = st.builds(lambda p, a: {"question": p, "answer": a}, TEXT, TEXT)
PROMPT = st.builds(lambda p: {"prompt": p}, TEXT)
PRETRAIN = st.builds(lambda p: {"text": p}, TEXT)
BAD = st.builds(lambda p: {"prompt": p, "chosen": p, "rejected": ""}, TEXT)
ROWS = st.lists(st.one_of(PAIR, ALPACA, QUESTION, PROMPT, PRETRAIN, BAD), min_size=1, max_size=30)
RULE = split.Rule((2, 4, 4), (), 0.3)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def collect_from(plans, rule=RULE, max_rows=0, skip=True, drop_duplicates=False):
    """({stage: {part: rows}}, ledger, rejected rows)"""
    stages = {stage: {"train": [], "eval": []} for stage in split.formats.STAGES}
    rejected = []

    def write(stage, part, row, _):
        stages[stage][part].append(row)

    inputs = split.hash_inputs(plans)
    ledger = split.collect(plans, inputs, rule, max_rows, skip, drop_duplicates, write, rejected.append)
    return stages, ledger, rejected


def collect(tmp_path, *files, weights=(), own=(), **options):
    """The same of files of these rows, with their weights; the last ones are given to the stages `own`."""
    names = []
    for number, rows in enumerate(files):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(f"{path}@{weights[number]}" if number < len(weights) else str(path))
    several = len(names) - len(own)
    plans = sources.plan(names[:several])
    plans += [plan for name, stage in zip(names[several:], own, strict=True) for plan in sources.plan([name], stage)]
    return collect_from(plans, **options)[:2]


def prompts_of(stages):
    """{first user turn, as the split sees it: {(stage, part), ...}}"""
    places = defaultdict(set)
    for stage, parts in stages.items():
        for part, rows in parts.items():
            for row in rows:
                text = row["text"] if stage == "pretrain" else (row.get("prompt") or row["messages"])[0]["content"]
                places[stage == "pretrain", " ".join(text.split()).casefold()].add((stage, part))
    return places


@QUICK
@given(first=ROWS, second=ROWS)
def test_no_prompt_serves_two_stages_or_both_train_and_eval(tmp_path, first, second):
    try:
        stages, _ = collect(tmp_path, first, second)
    except UserError as error:
        assert "no row is left" in str(error)
        return
    assert all(len(places) == 1 for places in prompts_of(stages).values())


@QUICK
@given(first=ROWS, second=ROWS, other=ROWS)
def test_nor_when_a_source_has_its_own_split(tmp_path, first, second, other):
    (tmp_path / "own").mkdir(exist_ok=True)
    for name, rows in {"own/train.jsonl": first, "own/test.jsonl": second, "other.jsonl": other}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [str(tmp_path / "other.jsonl"), str(tmp_path / "own")]
    try:
        stages, ledger = collect_from(sources.plan(names))[:2]
    except UserError as error:
        assert "no row is left" in str(error)
        return
    assert all(len(places) == 1 for places in prompts_of(stages).values())
    for entry, size in zip(ledger, (len(other), len(first) + len(second)), strict=True):
        aside = sum(reason["rows"] for reason in entry["set_aside"].values())
        assert sum(entry["used"].values()) + aside == entry["rows"] == size
    # Whoever is held out by name is held out: nothing that is read later takes its place.
    for rows in [[row] for row in second]:
        try:
            alone, _ = collect(tmp_path, rows, rule=split.Rule((2, 4, 4), (), 0))
        except UserError:
            continue
        ((key, _),) = prompts_of(alone).items()
        assert all(part == "eval" for _, part in prompts_of(stages)[key])


@QUICK
@given(rows=ROWS, more=ROWS)
def test_adding_rows_moves_no_other_row(tmp_path, rows, more):
    try:
        before, _ = collect(tmp_path, rows)
    except UserError:
        return
    after, _ = collect(tmp_path, [*rows, *more])
    for stage, parts in before.items():
        for part, kept in parts.items():
            assert after[stage][part][: len(kept)] == kept


@QUICK
@given(rows=st.lists(PAIR, min_size=1, max_size=30), more=st.lists(PAIR, max_size=30))
def test_nor_does_adding_them_in_front(tmp_path, rows, more):
    def where(stages):
        return {prompt: place for prompt, place in prompts_of(stages).items()}

    try:
        before = where(collect(tmp_path, rows)[0])
    except UserError:
        return
    after = where(collect(tmp_path, [*more, *rows])[0])
    assert before.items() <= after.items()


@QUICK
@given(first=ROWS, second=ROWS, drop=st.booleans())
def test_every_row_is_in_the_output_or_in_the_ledger(tmp_path, first, second, drop):
    try:
        stages, ledger = collect(tmp_path, first, second, drop_duplicates=drop)
    except UserError as error:
        assert "no row is left" in str(error)
        return
    for entry, rows in zip(ledger, (first, second), strict=True):
        assert entry["rows"] == len(rows) == sum(file["rows"] for file in entry["files"])
        aside = sum(reason["rows"] for reason in entry["set_aside"].values())
        assert sum(entry["used"].values()) + aside == entry["rows"]
    used = Counter()
    for entry in ledger:
        used.update(entry["used"])
    written = {f"{stage}/{part}": len(rows) for stage, parts in stages.items() for part, rows in parts.items() if rows}
    assert dict(used) == written


def test_shares_are_kept_and_eval_comes_from_every_stage(tmp_path):
    rows = [{"prompt": f"question {i}", "chosen": "a", "rejected": "b"} for i in range(4000)]
    stages, _ = collect(tmp_path, rows, rule=split.Rule((2, 4, 4), (), 0.05))
    for stage, share in {"sft": 0.2, "preference": 0.4, "prompts": 0.4}.items():
        train, held_out = len(stages[stage]["train"]), len(stages[stage]["eval"])
        assert (train + held_out) / 4000 == pytest.approx(share, abs=0.03)
        assert held_out / (train + held_out) == pytest.approx(0.05, abs=0.03)


def test_the_split_is_the_same_on_every_machine():
    """By sha256sum, `printf '%s|[["user", "hello world"]]' stage`: another hash would move rows of existing data."""
    key = split.opening(split.formats.convert({"prompt": "Hello  World", "chosen": "a", "rejected": "b"})[1])
    assert key == '[["user", "hello world"]]'
    assert int(split._unit("stage", key) * 2**48) == 0x956A7AE70013
    assert int(split._unit("eval", key) * 2**48) == 0x7F838258377F


def test_all_continuations_of_one_opening_stay_together(tmp_path):
    turns = [{"role": "user", "content": "hi"}]
    rows = []
    for i in range(20):
        rows.append({"prompt": list(turns), "chosen": f"good {i}", "rejected": f"bad {i}"})
        turns += [{"role": "assistant", "content": f"good {i}"}, {"role": "user", "content": f"and {i}?"}]
    stages, _ = collect(tmp_path, rows)
    assert [len(rows) for parts in stages.values() for rows in parts.values() if rows] == [20]


def test_a_prompt_in_two_sources_serves_the_first(tmp_path):
    pair = next(
        {"prompt": f"p{i}", "chosen": "a", "rejected": "b"}
        for i in range(99)
        if RULE.stage(split.formats.FORMS[0], f'[["user", "p{i}"]]') == "preference"
    )
    alpaca = {"instruction": pair["prompt"], "output": "a"}
    stages, ledger = collect(tmp_path, [pair], [alpaca])
    assert not any(stages["sft"].values())
    assert list(ledger[1]["set_aside"]) == ["its prompt serves preference already, through another row"]


def test_what_each_form_feeds_and_what_stages_asks_for(tmp_path):
    rows = [{"instruction": f"q{i}", "output": "a"} for i in range(200)]
    stages, _ = collect(tmp_path, rows)
    assert sum(map(len, stages["sft"].values())) == 200
    stages, _ = collect(tmp_path, rows, rule=split.Rule((1, 1, 1), ("sft", "prompts"), 0))
    assert 70 < len(stages["sft"]["train"]) < 130
    assert len(stages["sft"]["train"]) + len(stages["prompts"]["train"]) == 200
    questions = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(50)]
    stages, _ = collect(tmp_path, questions, rule=split.Rule((0, 0, 1), (), 0))
    assert stages["prompts"]["train"][7] == {"prompt": [{"role": "user", "content": "q7"}], "answer": "#### 7"}
    with pytest.raises(UserError, match="200 x no stage wants the form 'alpaca'"):
        collect(tmp_path, rows, rule=split.Rule((0, 1, 1), (), 0))


def test_a_row_with_another_column_is_another_row(tmp_path):
    """Of rows that become prompts every column counts; whatever the order, and an absent one is a null."""
    first = {"prompt": "pick", "answer": "3", "check": {"a": 1, "b": 2}}
    others = [first | {"answer": "8"}, first | {"answer": 3}, first | {"check": {"a": 1}}, first | {"level": 1}]
    same = {"check": {"b": 2, "a": 1}, "level": None, "answer": "3", "prompt": "pick"}
    for drop in (False, True):
        stages, (entry,) = collect(tmp_path, [first, *others, first, same], drop_duplicates=drop)
        rows = [row for part in stages["prompts"].values() for row in part]
        assert entry["duplicates"] == 2 and len(rows) == (5 if drop else 7)
    # Columns that are not written make no other row, and a margin does.
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for more, repeats in (({"margin": 2.0}, 0), ({"id": 7}, 1)):
        rule = split.Rule((0, 1, 0), ("preference",), 0)
        _, (entry,) = collect(tmp_path, [pair, pair | more], rule=rule)
        assert entry["duplicates"] == repeats


def test_a_good_answer_is_no_repetition_of_a_bad_one(tmp_path):
    rows = [{"prompt": "q", "completion": "a", "kto_tag": tag} for tag in (False, True, True)]
    stages, (entry,) = collect(tmp_path, rows, drop_duplicates=True)
    assert sum(entry["used"].values()) == 1 and entry["duplicates"] == 1


def test_identical_pairs_and_duplicates_are_counted(tmp_path):
    same = {"prompt": "p", "chosen": "a", "rejected": "a"}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    stages, (entry,) = collect(tmp_path, [same, pair, pair, pair])
    assert entry["set_aside"] == {
        "chosen and rejected are the same": {"rows": 1, "first": f"{tmp_path / '0.jsonl'} line 1"}
    }
    assert entry["duplicates"] == 2 and sum(entry["used"].values()) == 3
    stages, (entry,) = collect(tmp_path, [same, pair, pair, pair], drop_duplicates=True)
    assert entry["set_aside"]["repeats an earlier row"] == {"rows": 2, "first": f"{tmp_path / '0.jsonl'} line 3"}


def test_columns_that_nobody_reads_are_named(tmp_path):
    """They reach the prompts of RL, and nothing else: a user who thinks that they are trained on has to read so."""
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "passage": "long", "id": 3, "note": None}
    stages, (entry,) = collect(tmp_path, [pair], rule=split.Rule((0, 1, 0), (), 0))
    assert entry["not_kept"] == ["passage", "id"] and "  no step reads the columns passage, id" in summary([entry])
    stages, (entry,) = collect(
        tmp_path, [{**pair, "prompt": f"q{i}"} for i in range(9)], rule=split.Rule((0, 1, 1), (), 0)
    )
    assert "  only prompts keep the columns passage, id" in summary([entry])
    assert stages["prompts"]["train"][0]["passage"] == "long"
    named_otherwise = {"question": "q", "good_answer": "a", "bad_answer": "b"}
    stages, (entry,) = collect(tmp_path, [named_otherwise])
    assert entry["forms"] == {"prompt": 1} and entry["kept"] == ["good_answer", "bad_answer"]
    assert any("prompts alone, with the columns good_answer, bad_answer" in line for line in summary([entry]))
    text = {"text": "t", "title": "x"}
    stages, ledger = collect(tmp_path, [text], [{"question": "q", "answer": "a"}])
    assert [entry["not_kept"] for entry in ledger] == [["title"], []]


def summary(ledger):
    return output.summary({}, ledger).splitlines()


def test_a_bad_row_stops_by_default_naming_file_line_reason_and_fix(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "", "rejected": "b"}]
    message = r"0.jsonl line 2: chosen is an empty answer; give it an answer.*; or set .* aside with --on_bad_row skip"
    with pytest.raises(UserError, match=message):
        collect(tmp_path, rows, skip=False)
    _, (entry,) = collect(tmp_path, rows, skip=True)
    assert entry["set_aside"]["chosen is an empty answer"]["rows"] == 1


def test_nothing_left_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(UserError, match="no row is left from .*: 2 x unknown form with the columns foo"):
        collect(tmp_path, [{"foo": 1}, {"foo": 2}])
    with pytest.raises(UserError, match="the sources hold no rows"):
        collect(tmp_path, [])


def test_max_rows_takes_the_first_of_each_source(tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(10)]
    stages, ledger = collect(tmp_path, rows, rows[5:], max_rows=3)
    texts = {row["prompt"][0]["content"] for parts in stages.values() for rows in parts.values() for row in rows}
    assert texts == {"q0", "q1", "q2", "q5", "q6", "q7"}
    assert [entry["rows"] for entry in ledger] == [3, 3]


def test_a_coin_for_each_pair_is_fair_and_the_seed_repeats_it():
    def pairs(seed):
        rows, coin = [{"chosen": f"a{i}", "rejected": f"b{i}"} for i in range(1000)], split.Coin(seed)
        for row in rows:
            coin(row)
        return rows, coin

    (rows, coin), (again, _), (other, _) = pairs("1/train"), pairs("1/train"), pairs("2/train")
    assert coin.pairs == 1000 and coin.swapped == sum(row["chosen"][0] == "b" for row in rows)
    assert 430 < coin.swapped < 570
    assert all({row["chosen"][1:]} == {row["rejected"][1:]} for row in rows)
    assert again == rows != other


# Weights, and sources of one stage ------------------------------------------------------------------------------------


def share_of(word, text):
    """The definition, by other means than the program's: the first 48 bits of sha256, as a share."""
    key = json.dumps([["user", text]], ensure_ascii=False)
    return int(hashlib.sha256(f"{word}|{key}".encode()).hexdigest()[:12], 16) / 16**12


def prompts_in(stages, part="train"):
    return Counter(
        (row.get("prompt") or row["messages"])[0]["content"] for parts in stages.values() for row in parts[part]
    )


def test_a_weight_below_one_keeps_a_share_of_the_prompts(tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(1000)]
    stages, (entry,) = collect(tmp_path, rows, weights=["0.3"], rule=split.Rule((2, 4, 4), (), 0.2))
    kept = {f"q{i}" for i in range(1000) if share_of("weight", f"q{i}") < 0.3}
    assert prompts_in(stages) + prompts_in(stages, "eval") == Counter(kept)
    assert 250 < len(kept) < 350 and len(prompts_in(stages, "eval")) > 30
    first = next(i for i in range(1000) if f"q{i}" not in kept) + 1
    aside = {"rows": 1000 - len(kept), "first": f"{tmp_path / '0.jsonl'} line {first}"}
    assert entry["set_aside"] == {"left out by the weight @0.3": aside} and entry["weight"] == 0.3


def test_a_weight_above_one_writes_training_rows_again(tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(400)]
    rule = split.Rule((2, 4, 4), (), 0.2)
    for weight, copies in (("2", lambda text: 2), ("2.5", lambda text: 2 + (share_of("weight", text) < 0.5))):
        stages, (entry,) = collect(tmp_path, rows, weights=[weight], rule=rule)
        held_out = {f"q{i}" for i in range(400) if share_of("eval", f"q{i}") < 0.2}
        assert prompts_in(stages, "eval") == Counter(held_out) and 50 < len(held_out) < 110
        assert prompts_in(stages) == {f"q{i}": copies(f"q{i}") for i in range(400) if f"q{i}" not in held_out}
        assert sum(entry["used"].values()) == 400 and not entry["set_aside"] and not entry["duplicates"]
        assert entry["written"]["prompts/train"] == sum(prompts_in(stages).values())


def test_what_a_weight_leaves_out_may_come_from_another_source(tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(100)]
    stages, ledger = collect(tmp_path, rows, rows, weights=["0.5"], drop_duplicates=True)
    assert prompts_in(stages) + prompts_in(stages, "eval") == Counter(f"q{i}" for i in range(100))
    assert sum(sum(entry["used"].values()) for entry in ledger) == 100


def test_a_source_of_one_stage_feeds_that_stage_only(tmp_path):
    pairs = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(60)]
    more = [{"prompt": f"r{i}", "chosen": "a", "rejected": "b"} for i in range(60)]
    stages, ledger = collect(tmp_path, pairs, more, own=["preference"], rule=split.Rule((1, 0, 1), (), 0))
    assert len(stages["preference"]["train"]) == 60, "the share of --split is for the other sources"
    assert {row["prompt"][0]["content"][0] for row in stages["preference"]["train"]} == {"r"}
    assert [entry["stage"] for entry in ledger] == [None, "preference"]
    stages, ledger = collect(tmp_path, pairs, pairs[:30], own=["preference"], rule=split.Rule((1, 0, 0), (), 0))
    assert not stages["preference"]["train"], "a prompt never serves two stages"
    assert ledger[1]["set_aside"]["its prompt serves sft already, through another row"]["rows"] == 30
    texts = [{"text": "abc"}]
    _, ledger = collect(tmp_path, pairs, texts, own=["prompts"])
    assert list(ledger[1]["set_aside"]) == ["a row of the form 'text' cannot serve prompts"]


WEIGHT = st.sampled_from(["0.3", "1", "2.5"])


@QUICK
@given(first=ROWS, second=ROWS, more=ROWS, w=WEIGHT, v=WEIGHT)
def test_weights_lose_no_row_and_add_no_prompt_to_a_second_place(tmp_path, first, second, more, w, v):
    try:
        stages, ledger = collect(tmp_path, first, second, weights=[w, v])
    except UserError as error:
        assert "no row is left" in str(error)
        return
    assert all(len(places) == 1 for places in prompts_of(stages).values())
    written = Counter()
    for entry, rows, weight in zip(ledger, (first, second), (w, v), strict=True):
        aside = sum(reason["rows"] for reason in entry["set_aside"].values())
        assert sum(entry["used"].values()) + aside == entry["rows"] == len(rows)
        for place, n in entry["written"].items():
            low, high = (1, 1) if place.endswith("eval") else (int(float(weight)) or 1, -int(-float(weight) // 1))
            assert low * entry["used"][place] <= n <= high * entry["used"][place]
        written.update(entry["written"])
    found = {f"{stage}/{part}": len(rows) for stage, parts in stages.items() for part, rows in parts.items() if rows}
    assert dict(written) == found
    after, _ = collect(tmp_path, first, [*second, *more], weights=[w, v])
    for stage, parts in stages.items():
        for part, kept in parts.items():
            assert after[stage][part][: len(kept)] == kept


@QUICK
@given(first=ROWS, second=ROWS, w=WEIGHT, stage=st.sampled_from(split.formats.STAGES))
def test_nor_do_sources_of_one_stage(tmp_path, first, second, w, stage):
    try:
        stages, ledger = collect(tmp_path, first, second, weights=["1", w], own=[stage])
    except UserError as error:
        assert "no row is left" in str(error)
        return
    assert all(len(places) == 1 for places in prompts_of(stages).values())
    assert {place.split("/")[0] for place in ledger[1]["used"]} <= {stage}
    for entry, rows in zip(ledger, (first, second), strict=True):
        aside = sum(reason["rows"] for reason in entry["set_aside"].values())
        assert sum(entry["used"].values()) + aside == entry["rows"] == len(rows)
