"""Finding prepared data, what becomes of its rows, the order of steps, dealing to ranks, padding."""

import collections
import functools
import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_tokenizers as small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import batches, chat_format, data, examples
from common.errors import UserError
from step3_rlhf import train as rlhf


@functools.cache
def tokenizer():
    tok = small.characters()
    chat_format.ensure_template(tok, "plain")  # one token a byte, a BOS before and an EOS after an answer
    return tok


def user(text):
    return [{"role": "user", "content": text}]


def answer(text):
    return [{"role": "assistant", "content": text}]


def spell(text, bos=False, end=False):
    vocabulary = tokenizer().get_vocab()
    return [0] * bos + [vocabulary[c] for c in text] + [1] * end


# ---- locate

ROWS = {
    "sft": [{"messages": user("Hi") + answer("Yo")}],
    "preference": [{"prompt": user("Hi"), "chosen": answer("Yo"), "rejected": answer("No"), "margin": 1.5}],
    "prompts": [{"prompt": user("1+2="), "answer": "3", "level": 2}],
    "pretrain": [{"text": "Once"}],
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def root(tmp_path):
    """A step-0 folder, written without our code."""
    root = tmp_path / "data"
    for stage in ("sft", "preference", "prompts"):
        write(root / stage / "train.parquet", ROWS[stage])
    write(root / "sft" / "eval.parquet", ROWS["sft"])
    files = {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*.parquet")
    }
    (root / "manifest.json").write_text(json.dumps({"format_version": 1, "hash": "whole", "files": files}))
    return root


def test_locate_takes_the_root_a_stage_folder_or_a_file(root):
    train, eval_ = root / "sft" / "train.parquet", root / "sft" / "eval.parquet"
    expected = data.DataFiles(train, eval_, root, "whole", ())
    for path in (root, str(root), root / "sft", train):
        assert data.locate(path, "sft") == expected
    assert data.locate(root, "prompts") == data.DataFiles(root / "prompts" / "train.parquet", None, root, "whole", ())
    # A file that is not the training split has no evaluation split beside it.
    assert data.locate(eval_, "sft").eval is None


def test_shares_other_than_step_0_dealt_out_are_refused(root):
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(manifest | {"args": {"split": [2.0, 4.0, 4.0]}}))
    for shares in (None, "2,4,4", "20,40,40", "0.2,0.4,0.4"):
        assert data.locate(root, "sft", shares) == data.locate_or_inherit(str(root), None, "sft", shares)
    for shares in ("6,2,2", "2,4,5", "0,4,4"):
        with pytest.raises(UserError, match=f"--data_split {shares}, but step 0 dealt .* out by 2,4,4; prepare it aga"):
            data.locate(root, "sft", shares)
        parent = {"data": {"path": str(root), "hash": "whole"}}
        with pytest.raises(UserError, match=f"--data_split {shares}, but step 0 dealt"):
            data.locate_or_inherit(None, parent, "sft", shares)
    for foreign in (manifest | {"args": {}}, {"name": "of another program"}):
        (root / "manifest.json").write_text(json.dumps(foreign))
        with pytest.raises(UserError, match="has no record of a split by step 0; leave --data_split out"):
            data.locate(root, "sft", "2,4,4")


@pytest.mark.parametrize("name", ["Dahoas/rm-static", "Anthropic/hh-rlhf:harmless-base", "openai/gsm8k:main@train"])
def test_a_name_of_the_hub_is_told_to_go_through_step_0(name):
    with pytest.raises(UserError) as caught:
        data.locate(name, "sft")
    command = f"`python step0_data/prepare.py --dataset {name} --output_dir data`"
    assert str(caught.value).endswith(f"if that is a data set of the hub, prepare it first: {command}")
    for path in ("./a/b", "a/b/c", "/a/b", "data", "a/b/"):
        with pytest.raises(UserError, match="--dataset tiny --output_dir data"):
            data.locate(path, "sft")


def test_locate_outside_a_prepared_folder_hashes_the_files(tmp_path):
    path = write(tmp_path / "mine" / "rows.parquet", ROWS["sft"])
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = hashlib.sha256(sha256.encode()).hexdigest()
    assert data.locate(path, "sft") == data.DataFiles(path, None, None, expected, ())
    (tmp_path / "manifest.json").write_text('{"name": "somebody else\'s"}')
    assert data.locate(path, "sft").root is None


def test_a_changed_file_is_told_and_changes_the_hash(root):
    write(root / "sft" / "train.parquet", ROWS["sft"] * 2)
    files = data.locate(root, "sft")
    assert files.hash != "whole"
    assert files.notes == (
        f"{root}/sft/train.parquet was changed since step 0 wrote it (its sha256 is not the manifest's)",
    )
    assert data.locate(root, "preference").notes == ()  # another stage's files are as they were
    write(root / "prompts" / "eval.parquet", ROWS["prompts"])
    assert data.locate(root, "prompts").notes == (
        f"{root}/prompts/eval.parquet is not in {root}/manifest.json: step 0 did not write it",
    )


def refused(path, stage):
    with pytest.raises(UserError) as caught:
        data.locate(path, stage)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_locate_errors(root, tmp_path):
    make = "python step0_data/prepare.py --dataset tiny --output_dir data"
    assert refused(tmp_path / "none", "sft") == f"--data {tmp_path}/none: no such folder or file; make it with `{make}`"

    near = root.with_name(root.name + "s")
    assert refused(near, "sft") == f"--data {near}: no such folder or file; did you mean {root}?"

    assert refused(root, "pretrain").startswith(f"--data {root} has no pretrain data, only sft, preference, prompts;")
    shutil.rmtree(root / "preference")
    assert "has no preference data, only sft, prompts;" in refused(root, "preference")

    assert refused(root / "sft", "prompts") == (
        f"--data {root}/sft holds sft data and this stage reads prompts data; give its parent"
    )

    write(tmp_path / "x.parquet", [{"question": "1", "answer": "2"}])
    assert refused(tmp_path / "x.parquet", "sft").startswith(
        f"{tmp_path}/x.parquet has the columns question, answer but sft data needs messages; prepare it with"
    )
    (tmp_path / "x.jsonl").write_text('{"messages": []}\n')
    message = refused(tmp_path / "x.jsonl", "sft")
    assert message.startswith(f"{tmp_path}/x.jsonl is not a readable parquet file (")
    assert message.endswith(
        f"prepare it with `python step0_data/prepare.py --dataset {tmp_path}/x.jsonl --output_dir data`"
    )

    train = root / "sft" / "train.parquet"
    train.write_bytes(train.read_bytes()[:-20])  # a copy that was cut short
    assert "is not a readable parquet file" in refused(root, "sft")

    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(empty, "sft").startswith(f"--data {empty} is no prepared data (it holds nothing);")
    (empty / "notes.txt").touch()
    assert "(it holds notes.txt)" in refused(empty, "sft")
    (empty / "manifest.json").write_text("{}")
    assert "has a manifest but no parquet files" in refused(empty, "sft")

    (root / "manifest.json").write_text("{")
    assert "the file is damaged, prepare the data again" in refused(root, "prompts")


def test_data_is_inherited_from_the_parent_model(root):
    record = {"data": data.locate(root, "sft").record()}
    assert record["data"] == {"path": str(root), "train": str(root / "sft" / "train.parquet"), "hash": "whole"}
    files = data.locate_or_inherit(None, record, "prompts")
    assert files.train == root / "prompts" / "train.parquet" and str(root) in files.notes[-1]
    assert data.locate_or_inherit(str(root / "sft"), record, "sft").notes == ()
    bare = write(root.parent / "mine" / "rows.parquet", ROWS["sft"])
    of_a_bare_file = {"data": data.locate(bare, "sft").record()}
    assert of_a_bare_file["data"]["train"] == str(bare)
    for parent in (None, {"data": None}, of_a_bare_file):
        with pytest.raises(UserError, match="--data is missing and the parent model records none"):
            data.locate_or_inherit(None, parent, "prompts")
    write(root / "prompts" / "train.parquet", ROWS["prompts"] * 2)
    with pytest.raises(UserError, match="has changed since the parent model was trained"):
        data.locate_or_inherit(None, record, "prompts")


def test_rows_come_back_as_they_were_written(root):
    assert data.read_rows(root / "prompts" / "train.parquet") == ROWS["prompts"]
    assert data.read_rows(root / "preference" / "train.parquet") == ROWS["preference"]


# ---- rows to examples. With "plain", user "ab" and answer "cd" are <s> a b | c d </s>: three and three tokens.


def test_sft_rows_are_cut_counted_or_set_aside():
    rows = [
        {"messages": user("ab") + answer("cd")},  # fits exactly
        {"messages": user("ab") + answer("cde")},  # loses its turn end
        {"messages": user("ab")},  # nothing to train
        {"messages": user("abcdef") + answer("g")},  # the answer starts beyond the limit
        {"messages": user("a") + answer("b") + user("cdefg") + answer("h")},  # cut in the second prompt
        {"messages": user("abcd") + answer("x</s>")},
    ]
    kept, report = examples.tokenise_sft(tokenizer(), rows, max_length=6)
    assert kept == [
        examples.SFTExample(spell("abcd", bos=True, end=True), [False] * 3 + [True] * 3),
        examples.SFTExample(spell("abcde", bos=True), [False] * 3 + [True] * 3),
        # What is left of the second prompt trains nothing, so it is not computed either.
        examples.SFTExample(spell("ab", bos=True, end=True), [False] * 2 + [True] * 2),
    ]
    assert (report.read, report.kept, report.truncated) == (6, 3, 2)
    assert report.set_aside == {
        "no assistant turn": 1,
        "no answer begins within --max_length 6": 1,
        "an answer holds the text of the stop token </s>": 1,
    }
    assert str(report) == (
        "sft data: 6 rows read, 3 kept; 2 of them with an answer cut at the limit; "
        "1 set aside: no assistant turn (first row 2); "
        "1 set aside: no answer begins within --max_length 6 (first row 3, 9 tokens); "
        "1 set aside: an answer holds the text of the stop token </s> (first row 5, 'x</s>')"
    )


def test_sft_rows_lose_their_oldest_turns_where_no_answer_would_be_left():
    long = user("abcdef") + answer("g")
    rows = [
        {"messages": [{"role": "system", "content": "S"}, *long, *user("a"), *answer("b")]},  # plain prints "S\n\n"
        {"messages": long + user("abcde") + answer("cd") + user("e")},  # then the answer is cut; "e" is never read
        {"messages": long + user("abcdefg") + answer("h")},
    ]
    found, report = examples.tokenise_sft(tokenizer(), rows, max_length=7)
    assert found == [
        examples.SFTExample(spell("S\u010a\u010aab", bos=True, end=True), [False] * 5 + [True] * 2),
        examples.SFTExample(spell("abcdec", bos=True), [False] * 6 + [True]),
    ]
    assert str(report) == (
        "sft data: 3 rows read, 2 kept; 1 of them with an answer cut at the limit; 2 of them without their oldest "
        "turns; 1 set aside: no answer begins within --max_length 7 (first row 2, 18 tokens)"
    )


def test_conversations_with_earlier_answers_not_trained_are_counted():
    tok = small.characters()
    tok.chat_template = (  # prints the EOS after the last turn only
        "{% for m in messages %}{{ m['content'] }}{% if loop.last and m['role'] == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    )
    rows = [{"messages": user("a") + answer("b") + user("c") + answer("d")}, {"messages": user("a") + answer("b")}]
    kept, report = examples.tokenise_sft(tok, rows, 100)
    assert kept[0].mask == [False] * 3 + [True] * 2
    assert report.partly_trained == 1 and "1 of them with earlier answers not trained" in str(report)
    assert examples.tokenise_sft(tokenizer(), rows, 100)[1].partly_trained == 0


def test_sft_answers_of_weight_0_are_counted_as_that_and_as_nothing_else():
    one, other = answer("b")[0], answer("d")[0] | {"weight": None}
    rows = [{"messages": user("a") + [one | {"weight": w}] + user("c") + [other]} for w in (0, 1, None)]
    kept, report = examples.tokenise_sft(tokenizer(), rows, 100)
    assert str(report) == ("sft data: 3 rows read, 3 kept; 1 of them with answers of weight 0, which are context only")
    assert [example.mask for example in kept] == [
        [False] * 5 + [True] * 2,
        *[[False, False, True, True] + [False] + [True] * 2] * 2,
    ]
    assert kept[0].ids == spell("ab", bos=True, end=True) + spell("cd", end=True) == kept[1].ids
    none_left = [{"messages": user("a") + [answer("b")[0] | {"weight": 0}]}]
    assert examples.tokenise_sft(tokenizer(), none_left, 100)[1].set_aside == {
        "no assistant turn is trained: all have weight 0": 1
    }
    # Only an answer that is trained counts as one that begins within the limit.
    assert examples.tokenise_sft(tokenizer(), rows[:1], 4)[0][0].ids == spell("cd", bos=True, end=True)[:4]


def test_a_greeting_that_is_not_trained_is_counted():
    rows = [{"messages": answer("a") + user("b") + answer("c")}]
    kept, report = examples.tokenise_sft(tokenizer(), rows, 100)
    assert kept[0].mask == [False] * 4 + [True, True] and report.partly_trained == 1
    assert "1 of them with earlier answers not trained (" in str(report)
    assert "or nothing was asked before them)" in str(report)


def test_tools_that_the_template_does_not_print_are_counted_in_every_stage():
    tools = json.dumps([{"type": "function", "function": {"name": "frost"}}])
    prints = small.characters()
    prints.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer().chat_template
    for tokenise, row in (
        (examples.tokenise_sft, ROWS["sft"][0]),
        (examples.tokenise_pairs, ROWS["preference"][0]),
        (examples.tokenise_prompts, ROWS["prompts"][0]),
    ):
        rows = [row | {"tools": tools}, row | {"tools": None}, row | {"tools": "{"}]
        kept, report = tokenise(tokenizer(), rows, 200)
        assert len(kept) == 2 and "1 of them with tools that the chat template does not print" in str(report)
        assert report.set_aside == {"the column tools is no JSON text": 1}
        kept, report = tokenise(prints, rows, 200)
        assert report.tools_unseen == 0
        first, second = (example.ids if hasattr(example, "ids") else example.prompt for example in kept)
        assert len(first) - len(second) == len(json.dumps(json.loads(tools)))


def test_pairs_are_cut_counted_or_set_aside():
    def pair(prompt, chosen, rejected, **columns):
        return {"prompt": prompt, "chosen": answer(chosen), "rejected": answer(rejected), **columns}

    rows = [
        pair(user("ab"), "c", "d", margin=2),
        pair(user("ab"), "cdef", "d", margin=None),
        pair(user("ab"), "cd", "cd"),
        pair(user("ab"), "cdex", "cdey"),
        pair(user("abcdef"), "x", "y"),
        pair(user("abc") + answer("d") + user("e"), "x", "y"),
        {"prompt": "ab", "chosen": answer("x"), "rejected": answer("y")},
        {"prompt": user("ab"), "chosen": [], "rejected": answer("y")},
    ]
    kept, report = examples.tokenise_pairs(tokenizer(), rows, max_length=6)
    assert kept == [
        examples.PairExample(spell("ab", bos=True), spell("c", end=True), spell("d", end=True), 2.0),
        examples.PairExample(spell("ab", bos=True), spell("cde"), spell("d", end=True), None),
        examples.PairExample(spell("e", bos=True), spell("x", end=True), spell("y", end=True), None),
    ]
    assert (report.read, report.kept, report.truncated, report.shortened) == (8, 3, 1, 1)
    assert report.set_aside == {
        "chosen and rejected are equal": 1,
        "chosen and rejected are equal once cut at 6 tokens": 1,
        "prompt over 5 tokens even without its older turns": 1,
        "not a list of messages": 2,
    }
    assert "1 of them without their oldest turns" in str(report)
    assert "2 set aside: not a list of messages (first row 6, got 'ab')" in str(report)


def test_prompts_are_shortened_or_set_aside_and_keep_their_columns():
    long = user("abc") + answer("d") + user("e")
    rows = [{"prompt": user("abc"), "answer": 7, "x": None}, {"prompt": long, "answer": 8}, {"prompt": user("abcd")}]
    kept, report = examples.tokenise_prompts(tokenizer(), rows, max_prompt_length=4)
    assert kept == [
        examples.PromptExample(spell("abc", bos=True), {"prompt": user("abc"), "answer": 7, "x": None}),
        examples.PromptExample(spell("e", bos=True), {"prompt": user("e"), "answer": 8}),
    ]
    assert rows[1]["prompt"] == long
    assert str(report) == (
        "prompts: 3 rows read, 2 kept; 1 of them without their oldest turns; "
        "1 set aside: over --max_prompt_length 4 even without its older turns (first row 2)"
    )
    answered, report = examples.tokenise_prompts(tokenizer(), [{"prompt": user("a") + answer("b")}, *rows], 100)
    assert len(answered) == 3 and report.set_aside == {"the prompt ends with an answer": 1}


@pytest.mark.parametrize("tokenise, rows, message", [
    (examples.tokenise_sft, [], "sft data: none of 0 rows can be used; the file is empty"),
    (examples.tokenise_sft, [{"messages": user("ab") + answer("c")}] * 2,
     "sft data: none of 2 rows can be used; "
     "2 set aside: no answer begins within --max_length 3 (first row 0, 5 tokens)"),
    (examples.tokenise_pairs, [{"prompt": user("a"), "chosen": answer("b"), "rejected": answer("b")}],
     "preference data: none of 1 rows can be used; 1 set aside: chosen and rejected are equal (first row 0)"),
    (examples.tokenise_prompts, [{"prompt": user("abc")}],
     "prompts: none of 1 rows can be used; "
     "1 set aside: over --max_prompt_length 3 even without its older turns (first row 0)"),
])  # fmt: skip
def test_nothing_left_is_an_error_with_the_reasons(tokenise, rows, message):
    with pytest.raises(UserError) as caught:
        tokenise(tokenizer(), rows, 3)[1].require_rows(Path("sft/eval.parquet"))
    assert str(caught.value) == message + "; these are the rows of sft/eval.parquet"


# ---- the order of rows


@pytest.mark.parametrize(
    "n, batch_size, epochs", [(10, 4, 2), (10, 5, 3), (3, 7, 4), (1, 1, 2), (7, 3, 1), (5, 2, 0.5)]
)
def test_steps_go_through_every_epoch_once(n, batch_size, epochs):
    steps = batches.num_steps(n, batch_size, epochs)
    found = [batches.step_rows(s, batch_size, n, seed=3, epochs=epochs) for s in range(steps)]
    assert all(len(b) == batch_size for b in found[:-1]) and 0 < len(found[-1]) <= batch_size
    assert batches.step_rows(steps, batch_size, n, seed=3, epochs=epochs) == []
    stream = list(itertools.chain(*found))
    assert len(stream) == round(n * epochs)
    for start in range(0, len(stream), n):
        epoch = stream[start : start + n]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(n))


@pytest.mark.parametrize(
    ("prompts", "flags", "ranks", "wanted"),
    [
        (128, "", 1, (2, 8, "128 prompts; 2 RL steps of 64 responses, 8 optimizer steps")),
        (127, "", 1, (2, 8, "127 prompts; 2 RL steps of 64 responses, the last one of 63, 8 optimizer steps")),
        (65, "", 1, (2, 6, "65 prompts; 2 RL steps of 64 responses, the last one of 1, 6 optimizer steps")),
        (65, "", 2, (1, 4, "65 prompts; 1 RL steps of 64 responses; 1 prompt(s) left over at the end, too few for 2 ")),
        (20, "", 1, (1, 2, "20 prompts; 1 RL steps of 20 responses, 2 optimizer steps")),
        (65, "--num_generations 4", 2, (5, 18, "65 prompts; 5 RL steps of 64 responses, the last one of 4, 18 opt")),
        (40, "--num_train_epochs 2", 1, (2, 6, "40 prompts; 2 RL steps of 64 responses, the last one of 16, 6 opt")),
        (
            20,
            "--max_steps 3",
            1,
            (3, 12, "steps of 64 responses; a step takes 64 prompts, so each of the 20 comes sev"),
        ),
        (108, "--max_steps 25", 1, (25, 100, "108 prompts; 25 RL steps of 64 responses, 100 optimizer steps")),
    ],
)
def test_every_prompt_of_a_pass_is_answered(prompts, flags, ranks, wanted):
    """64 responses a step, 32 a minibatch, 2 passes over them: counted by hand."""
    args = rlhf.parse_args(["--actor", "A", "--critic", "C", *flags.split()])
    steps, optimizer_steps, words = rlhf.count_steps(args, prompts, ranks)
    assert (steps, optimizer_steps) == wanted[:2] and wanted[2] in words
    epochs = None if args.max_steps else args.num_train_epochs
    answered = [batches.step_rows(at, 64 // args.num_generations, prompts, 1, epochs) for at in range(steps)]
    if ranks == 1 and not args.max_steps:
        assert sorted(sum(answered, [])) == sorted(list(range(prompts)) * int(epochs))


def test_a_step_of_fewer_responses_than_ranks_is_refused():
    with pytest.raises(UserError, match="a step of 3 responses is less than the 4 ranks"):
        rlhf.count_steps(rlhf.parse_args(["--actor", "A", "--critic", "C"]), 3, 4)


def test_num_steps_by_hand():
    cases = [(10, 4, 2), (10, 5, 2), (3, 64, 1), (10, 4, 0.01)]
    assert [batches.num_steps(*case) for case in cases] == [5, 4, 1, 1]


def test_order_depends_on_seed_and_epoch_alone():
    first, second = (batches.step_rows(s, 50, 50, seed=0) for s in range(2))
    assert first != sorted(first) and first != second
    assert batches.step_rows(0, 50, 50, seed=1) != first
    # Batches of any size are slices of one sequence, in whatever order they are asked for.
    sequence = first + second
    for size in (1, 3, 7, 64):
        for step in reversed(range(100 // size)):
            assert batches.step_rows(step, size, 50, seed=0) == sequence[step * size : (step + 1) * size]


def test_order_is_the_same_in_every_version():
    # Written down once: a change would silently break exact resumption.
    assert batches.step_rows(0, 10, 10, seed=0) == [4, 3, 8, 0, 5, 9, 6, 7, 1, 2]
    assert batches.step_rows(3, 5, 10, seed=42) == [9, 5, 0, 4, 8]


def test_every_row_is_equally_likely_to_come_first():
    counts = collections.Counter(batches.step_rows(0, 1, 5, seed)[0] for seed in range(1000))
    assert set(counts) == set(range(5)) and all(150 < c < 250 for c in counts.values())  # 200, sigma 12.6


# ---- dealing to ranks


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 31])
def test_ranks_get_all_rows_in_equally_many_micro_batches(world, micro_size, count):
    rows = [100 + i for i in range(count)]
    shares = [batches.rank_micro_batches(rows, rank, world, micro_size) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    # No more forwards than are needed, none larger than asked for.
    slots = 0
    while slots * world * micro_size < count:
        slots += 1
    assert len(shares[0]) == slots
    assert all(len(batch) <= micro_size for share in shares for batch in share)
    assert sorted(row for share in shares for batch in share for row in batch) == rows
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_dealing_by_hand():
    assert [batches.rank_micro_batches(list("abcdefg"), rank, 3, 2) for rank in range(3)] == [
        [["a", "d"], ["g"]],
        [["b", "e"], []],
        [["c", "f"], []],
    ]


# ---- micro-batches by tokens


def padded(lengths):
    return lambda rows: len(rows) * max(lengths[row] for row in rows)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    world=st.integers(1, 4),
    most=st.integers(1, 100),
    per_row=st.integers(1, 2),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_micro_batches_by_tokens_hold_every_row_once_within_the_budget(lengths, world, most, per_row):
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    shares = [
        batches.pack_micro_batches(rows, rank, world, lambda group: per_row * padded(lengths)(group), most)
        for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for batch in share for row in batch) == list(range(len(lengths)))
    for batch in itertools.chain(*shares):
        assert len(batch) <= 1 or len(batch) * max(lengths[row] for row in batch) * per_row <= most
    # A forward of weight zero only where there are not rows enough, and never in all ranks at once.
    for slot in zip(*shares, strict=True):
        assert any(slot)
    if any([] in share for share in shares):
        assert all(len(batch) <= 1 for share in shares for batch in share)


def test_micro_batches_by_tokens_by_hand():
    lengths = {"a": 2, "b": 2, "c": 3, "d": 4, "e": 9, "f": 10, "g": 25}
    pack = lambda rank, world, most: batches.pack_micro_batches(list("abcdefg"), rank, world, padded(lengths), most)  # noqa: E731
    # g is over the budget alone; e and f make 20; a to d make 4 x 4.
    assert pack(0, 1, 20) == [list("abcd"), list("ef"), ["g"]]
    assert pack(0, 1, 1000) == [list("abcdefg")] and pack(0, 1, 1) == [[row] for row in "abcdefg"]
    # On two ranks there is room for a fourth, so e and f part; like sizes run at the same time.
    assert [pack(rank, 2, 20) for rank in (0, 1)] == [[["e"], list("abcd")], [["f"], ["g"]]]
    # One forward on each of two ranks: 4 x 4 tokens beside 2 x 10, though all in one would be allowed.
    six = [batches.pack_micro_batches(list("abcdef"), rank, 2, padded(lengths), 1000) for rank in (0, 1)]
    assert six == [[list("abcd")], [list("ef")]]
    # Five rows of one length, four ranks: pairs are enough, but one of them parts so that nobody waits.
    five = [batches.pack_micro_batches(list("vwxyz"), rank, 4, len, 100) for rank in range(4)]
    assert five == [[["v"]], [["y"]], [["z"]], [["w", "x"]]]
    # More ranks than rows: rows of weight zero.
    assert [batches.pack_micro_batches(["a", "g"], rank, 3, padded(lengths), 9) for rank in range(3)] == [
        [["a"]],
        [["g"]],
        [[]],
    ]


# ---- padding


def test_padding_by_hand():
    ids, mask = batches.pad_left([[5, 6], [7], []], 9)
    assert ids.tolist() == [[5, 6], [9, 7], [9, 9]] and ids.dtype == torch.long
    assert mask.tolist() == [[True, True], [False, True], [False, False]] and mask.dtype == torch.bool
    ids, mask = batches.pad_right([[5, 6], [7], []], 9)
    assert ids.tolist() == [[5, 6], [7, 9], [9, 9]]
    assert mask.tolist() == [[True, True], [True, False], [False, False]]
    assert batches.pad_left([[]], 9)[0].shape == (1, 0)


@given(rows=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5), pad_id=st.integers(0, 3))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_masks_come_from_lengths_whatever_the_pad_id(rows, pad_id):
    for pad in (batches.pad_left, batches.pad_right):
        ids, mask = pad(rows, pad_id)
        assert ids.shape[1] == max(map(len, rows))
        assert [i[m].tolist() for i, m in zip(ids, mask, strict=True)] == rows
        assert (ids[~mask] == pad_id).all()


def test_collate_sft_by_hand():
    batch = batches.collate_sft(
        [
            examples.SFTExample([0, 5, 6, 1], [False, False, True, True]),
            examples.SFTExample([0, 7, 1], [False, True, True]),
        ],
        pad_id=1,  # the same as the turn end: labels and mask must not care
    )
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[0, 5, 6, 1], [0, 7, 1, 1]],
        "attention_mask": [[True] * 4, [True, True, True, False]],
        "labels": [[-100, -100, 6, 1], [-100, 7, 1, -100]],
    }


def test_a_filler_row_has_real_tokens_and_no_labels():
    filler = examples.SFTExample([0, 5, 1], [False, True, True])
    batch = batches.collate_sft([], 9, filler)
    assert batch["input_ids"].tolist() == [[0, 5, 1]] and batch["attention_mask"].all()
    assert batch["labels"].tolist() == [[-100] * 3]
    # With real rows the filler is not used.
    assert batches.collate_sft([filler], 9, filler)["labels"].tolist() == [[-100, 5, 1]]
    with pytest.raises(AssertionError):
        batches.collate_sft([], 9)


def test_collate_pairs_by_hand():
    pairs = [examples.PairExample([0, 5], [6, 7, 1], [8, 1], 0.5), examples.PairExample([0], [1], [9, 9, 9])]
    batch = batches.collate_pairs(pairs, pad_id=1)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[0, 5, 6, 7, 1], [0, 1, 1, 1, 1], [0, 5, 8, 1, 1], [0, 9, 9, 9, 1]],
        "attention_mask": [[True] * 5, [True] * 2 + [False] * 3, [True] * 4 + [False], [True] * 4 + [False]],
        "last": [4, 1, 3, 3],
        "margin": [0.5, 0.0],
        "weight": [1.0, 1.0],
    }
    filler = batches.collate_pairs([], 1, pairs[0])
    assert filler["weight"].tolist() == [0.0] and filler["input_ids"].tolist() == [[0, 5, 6, 7, 1], [0, 5, 8, 1, 1]]
    assert filler["last"].tolist() == [4, 3]
    with pytest.raises(AssertionError):
        batches.collate_pairs([], 1)


# ---- public data, where there is any


@pytest.mark.skipif(not os.environ.get("RLHF_TEST_DATA"), reason="RLHF_TEST_DATA names no folder of public data")
@pytest.mark.parametrize("max_length", [64, 512])
def test_alpaca_rows_are_all_accounted_for(max_length):
    tok = small.gpt2_like()
    chat_format.ensure_template(tok, "human-assistant")
    folder = Path(os.environ["RLHF_TEST_DATA"])
    source = json.loads((folder / "alpaca_en_demo.json").read_text(encoding="utf-8"))[:300]
    rows = [{"messages": user(r["instruction"] + r["input"]) + answer(r["output"])} for r in source]
    kept, report = examples.tokenise_sft(tok, rows, max_length)
    assert report.kept + sum(report.set_aside.values()) == report.read == 300 and report.kept == len(kept)
    end = chat_format.turn_end_id(tok)
    whole = [e for e in kept if e.ids[-1] == end]
    assert len(kept) - len(whole) == report.truncated
    assert all(len(e.ids) == max_length for e in kept if e.ids[-1] != end)
    assert all(len(e.ids) <= max_length and any(e.mask) for e in kept)
