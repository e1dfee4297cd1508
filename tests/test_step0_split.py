"""Who gets which row: no prompt serves two stages or both train and eval, adding rows moves none, none is lost."""

import json
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from step0_data import split

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


def collect(tmp_path, *files, rule=RULE, skip=True, **options):
    names = []
    for number, rows in enumerate(files):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(path))
    options = {"max_rows": 0, "drop_duplicates": False} | options
    return split.collect(names, rule, skip_bad=skip, **options)


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
        stages, ledger = split.collect(names, RULE, 0, skip_bad=True, drop_duplicates=False)
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


def test_shuffled_preferences_are_a_fair_coin_that_the_seed_repeats():
    def pairs():
        return [{"chosen": f"a{i}", "rejected": f"b{i}"} for i in range(1000)]

    rows, again, other = pairs(), pairs(), pairs()
    assert split.shuffle_preferences(rows, "1/train") == sum(row["chosen"][0] == "b" for row in rows)
    assert 430 < sum(row["chosen"][0] == "b" for row in rows) < 570
    assert all({row["chosen"][1:]} == {row["rejected"][1:]} for row in rows)
    split.shuffle_preferences(again, "1/train")
    split.shuffle_preferences(other, "2/train")
    assert again == rows != other
