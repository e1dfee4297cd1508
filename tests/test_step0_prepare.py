"""The entry script: what it writes, that it writes the same bytes twice, what it refuses, the tiny base model."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import checkpoint, cli, data
from step0_data import prepare, preview, split, toy

ROOT = Path(__file__).resolve().parents[1]


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, argv)])
    return cli.run(prepare.main)


def hashes(folder):
    return {p.relative_to(folder).as_posix(): checkpoint.hash_file(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def rows_of(folder, stage, part):
    path = folder / stage / f"{part}.parquet"
    return data.read_rows(path) if path.exists() else []


def write_pairs(path, n, start=0):
    rows = [{"prompt": f"q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(start, start + n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return prepared(tmp_path_factory, "tiny")


@pytest.fixture(scope="module")
def tiny_zh(tmp_path_factory):
    return prepared(tmp_path_factory, "tiny_zh")


def prepared(tmp_path_factory, *sets):
    folder = tmp_path_factory.mktemp("tiny") / "data"
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, "--dataset", *sets, "--output_dir", folder) == 0
    return folder


# The tiny set ---------------------------------------------------------------------------------------------------------


def test_tiny_writes_every_stage_and_a_manifest_that_matches(tiny):
    manifest = json.loads((tiny / "manifest.json").read_text())
    sizes = {
        "sft": {"train": 5700, "eval": 300},
        "preference": {"train": 4000, "eval": 400},
        "prompts": {"train": 108, "eval": 28},
    }
    assert manifest["stages"] == sizes
    for name, digest in manifest["files"].items():
        assert checkpoint.hash_file(tiny / name) == digest
        stage, part = name.removesuffix(".parquet").split("/")
        assert len(rows_of(tiny, stage, part)) == sizes[stage][part]
    assert sorted(manifest["files"]) == sorted(f"{s}/{p}.parquet" for s in sizes for p in ("train", "eval"))
    assert (manifest["format_version"], manifest["seed"], manifest["args"]["dataset"]) == (1, 1, ["tiny"])
    made = toy.make_tiny(1)
    assert rows_of(tiny, "sft", "train") == made["sft"]["train"]
    assert rows_of(tiny, "preference", "eval") == made["preference"]["eval"]
    assert rows_of(tiny, "prompts", "eval") == made["prompts"]["eval"]
    page = (tiny / "preview.md").read_text()
    assert "## preference/eval: 400 rows" in page and "\n[chosen] ⟦ " in page and "\nNo warnings." in page
    assert manifest["warnings"] == []
    assert not [p for p in tiny.iterdir() if p.name.startswith(".")]


def test_the_same_seed_writes_the_same_bytes(tiny, tmp_path, monkeypatch):
    assert run(monkeypatch, "--output_dir", tmp_path / "again") == 0  # tiny is the default
    assert hashes(tmp_path / "again") == hashes(tiny)


ANY_TEXT = [
    "Hello  double   spaces",
    " leading and trailing  ",
    "     many      spaces     ",
    "lines\n\nand\ttabs\t\t\r\n",
    "\n",
    "你好，世界。",
    "ＡＢＣ　１２３！？，。「」",  # full width, with a full-width space
    "𠀀𪚥龘",  # beyond the first plane, and rare
    "שלום עולם \u200f مرحبا بالعالم",
    "🎉👩‍🚀 emoji",
    "é é ﬁ ½ Ω \ufeff",
    "1234567890 + [brackets] <tags> </ta> <0x41> #%&",
    "Human: a\n\nAssistant: b",
    "nul \0 and other control \x07\x1b\x7f",
    "\u2585 no-break\u00a0 \u2028 line",
]


def check_round_trip(folder, texts):
    """Every text comes back, no piece of it unknown, and the ids are those of sentencepiece itself."""
    import sentencepiece
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    peer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids and ids == peer.encode(text)
    return tokenizer


def test_the_tokenizer_gives_every_text_back(tiny, tiny_zh):
    for folder in (tiny, tiny_zh):
        texts = [m["content"] for row in rows_of(folder, "sft", "eval") for m in row["messages"]]
        check_round_trip(folder / "base_model", ANY_TEXT + texts)


def test_a_chinese_topic_is_the_same_piece_wherever_it_stands(tiny_zh):
    from transformers import AutoTokenizer

    from step0_data import toy_zh

    tokenizer = AutoTokenizer.from_pretrained(tiny_zh / "base_model")
    assert len(tokenizer) == 730
    for kind, topics in toy_zh.TOPICS.items():
        for topic in topics:
            for sentence in (*toy_zh.QUESTIONS[kind], *toy_zh.USEFUL[kind], "{topic}。"):
                for before in ("", " ", "谢谢你的提问。", "这你都不知道？"):
                    assert tokenizer.tokenize(before + sentence.format(topic=topic)).count(topic) == 1
    rows = rows_of(tiny_zh, "sft", "train")
    lengths = [len(tokenizer(" " + row["messages"][1]["content"])["input_ids"]) + 1 for row in rows[:1000]]
    assert max(lengths) <= 40  # answers fit the 40 new tokens of the tiny recipe


def test_both_tiny_sets_make_one_model(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    folder = tmp_path / "both"
    assert run(monkeypatch, "--dataset", "tiny", "tiny_zh", "--output_dir", folder, "--max_rows", 4) == 0
    questions = [row["messages"][0]["content"] for row in rows_of(folder, "sft", "train")]
    assert [question.isascii() for question in questions] == [True, False, True, False]
    tokenizer = AutoTokenizer.from_pretrained(folder / "base_model")
    assert len(tokenizer) == 260 + 2 * 470
    assert "\u2581chess" in tokenizer.tokenize("Is chess hard?") and "围棋" in tokenizer.tokenize("学围棋要准备什么？")


# A tokenizer for data of one's own ------------------------------------------------------------------------------------


def write_mixed(path, n=150):
    """Alpaca rows in English and Chinese, many rare characters, and all a tokenizer could stumble over."""
    rows = [
        {"instruction": f"Tell me about the number {i}.", "output": f"It is {i}; the next is {i + 1}.", "tag": i}
        for i in range(n)
    ]
    rows += [{"instruction": f"请介绍一下第{i}号桥。", "output": f"这座桥建于{1900 + i}年，很漂亮！"} for i in range(n)]
    rows += [{"instruction": f"{chr(0x5E00 + i)}怎么念？", "output": f"查一下{chr(0x6E00 + i)}。"} for i in range(n)]
    rows += [{"instruction": f"Say back, {i}: {text}", "output": f"{text}."} for i, text in enumerate(ANY_TEXT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_tokenizer_is_trained_for_data_of_ones_own(tmp_path, monkeypatch, capsys):
    source, out = write_mixed(tmp_path / "mixed.jsonl"), tmp_path / "data"
    flags = ["--dataset", source, "--train_tokenizer", 500, "--stages", "sft", "prompts", "--output_dir"]
    assert run(monkeypatch, *flags, out) == 0
    assert f"--model {out}/base_model --learning_rate 3e-3 --data {out}" in capsys.readouterr().out
    checkpoint.verify(out / "base_model")
    texts = [m["content"] for row in rows_of(out, "sft", "train") for m in row["messages"]]
    assert len(texts) > 100
    tokenizer = check_round_trip(out / "base_model", ANY_TEXT + texts)
    assert len(tokenizer) == 500
    vocabulary = tokenizer.get_vocab()
    for word in ("Assistant", "\u2581number", "桥"):
        assert word in vocabulary, word
    assert [piece for piece in vocabulary if re.fullmatch("[\u4e00-\u9fff]{2,}", piece)]
    # (500 - 260) / 2 of more than 200 single characters have a piece of their own, the others are spelled in bytes
    assert len(set("".join(texts))) > 200 and sum(len(piece) == 1 for piece in vocabulary) == 120

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out / "base_model")
    assert (model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers) == (500, 128, 4)
    assert run(monkeypatch, *flags, tmp_path / "again") == 0
    assert hashes(tmp_path / "again") == hashes(out)


def test_the_tokenizer_sees_train_rows_of_every_stage_and_no_others(tmp_path, monkeypatch):
    from step0_data import tiny_model

    rows = [{"prompt": f"ask{i}", "chosen": f"good{i}", "rejected": f"bad{i}", "tag": f"t{i}"} for i in range(40)]
    rows += [{"text": f"plain{i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "data"
    assert run(monkeypatch, "--dataset", tmp_path / "a.jsonl", "--eval_fraction", 0.3, "--output_dir", out) == 0
    wanted = []
    for row in rows_of(out, "sft", "train"):
        wanted += [f"Human: {row['messages'][0]['content']}", f"Assistant: {row['messages'][1]['content']}"]
    for row in rows_of(out, "preference", "train"):
        wanted += [f"Human: {row['prompt'][0]['content']}"]
        wanted += [f"Assistant: {row[side][0]['content']}" for side in ("chosen", "rejected")]
    wanted += [f"Human: {row['prompt'][0]['content']}" for row in rows_of(out, "prompts", "train")]
    wanted += [row["text"] for row in rows_of(out, "pretrain", "train")]
    assert sorted(tiny_model.staged_texts(out)) == sorted(wanted) and len(wanted) > 50


def test_of_much_text_the_tokenizer_sees_a_sample(tmp_path, monkeypatch):
    from step0_data import tiny_model

    source, out = write_mixed(tmp_path / "mixed.jsonl", 300), tmp_path / "data"
    assert run(monkeypatch, "--dataset", source, "--output_dir", out) == 0
    seen = []
    monkeypatch.setattr(tiny_model, "write_base_model", lambda folder, texts, *_: seen.append(list(texts)))
    texts = list(tiny_model.staged_texts(out))
    for limit, seed in ((10**9, 1), (5000, 1), (5000, 1), (5000, 2)):
        monkeypatch.setattr(tiny_model, "MAX_CHARACTERS", limit)
        tiny_model.write_base_model_for(out, seed, 2000)
    assert "".join(seen[0]) == "".join(re.sub("[\n\r\0\u2585]", "", text) for text in texts)
    assert seen[1] == seen[2] != seen[3]
    assert 4000 < sum(map(len, seen[1])) < 6000 < 20000 < sum(map(len, seen[0]))


def test_long_lines_are_cut_rather_than_left_out():
    """sentencepiece leaves out what is longer than 4,192 bytes: three of a character, or 1,000 of four bytes each."""
    from step0_data import tiny_model

    text = "a" * 2500 + "\n" + "🎉" * 1001
    lines = list(tiny_model.lines_of(text))
    assert [len(line) for line in lines] == [1000, 1000, 500, 1000, 1]
    assert "".join(lines) == text.replace("\n", "") and max(len(line.encode()) for line in lines) <= 4000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_tokenizer", 299], "--train_tokenizer 299: wanted 300 or more; 260 are always there"),
        (["--dataset", "tiny", "--train_tokenizer", 500], "--train_tokenizer is for data of your own"),
        (["--dataset", "tiny_zh", "pairs.jsonl"], "tiny stands alone, or with tiny_zh"),
        (["--dataset", "tiny", "tiny", "tiny_zh"], "tiny stands alone, or with tiny_zh"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, flags, message):
    source, out = write_mixed(tmp_path / "mixed.jsonl", 20), tmp_path / "data"
    assert run(monkeypatch, "--dataset", source, "--output_dir", out, *flags) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.startswith("error: ") and error.count("\n") == 1
    assert not out.exists()


def test_a_tokenizer_without_train_rows_is_one_line(tmp_path, monkeypatch, capsys):
    source = write_pairs(tmp_path / "pairs.jsonl", 20)
    words = ["--dataset", source, "--output_dir", tmp_path / "data", "--eval_fraction", 0.999999]
    assert run(monkeypatch, *words, "--train_tokenizer", 300) == 2
    message = "error: --train_tokenizer: no stage has train rows; bring more rows, or a smaller --eval_fraction\n"
    assert capsys.readouterr().err == message


def test_a_tokenizer_has_as_many_pieces_as_the_text_is_enough_for(tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, sizes = write_mixed(tmp_path / "mixed.jsonl", 20), {}
    for asked in (5000, 300):
        flags = ["--output_dir", tmp_path / str(asked), "--train_tokenizer", asked]
        assert run(monkeypatch, "--dataset", source, *flags) == 0
        base, shown = tmp_path / str(asked) / "base_model", capsys.readouterr().out
        sizes[asked] = len(AutoTokenizer.from_pretrained(base))
        assert AutoModelForCausalLM.from_pretrained(base).config.vocab_size == sizes[asked]
        assert (f"enough for a tokenizer of {sizes[asked]} pieces, not of {asked}" in shown) == (asked == 5000)
    assert sizes[300] == 300 < sizes[5000] < 5000


def test_no_text_for_a_tokenizer_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    flags = ["--dataset", tmp_path / "a.jsonl", "--eval_fraction", 0, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, *flags, "--train_tokenizer", 400) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: too little text for a tokenizer of ") and error.count("\n") == 1


def test_the_character_that_sentencepiece_uses_for_spaces_is_said(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": f"bars {i}", "completion": f"\u2581\u2581 {'good ' * (i % 7)} {i}"} for i in range(80)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset", tmp_path / "a.jsonl", "--eval_fraction", 0, "--output_dir", tmp_path / "data"]
    assert run(monkeypatch, *flags, "--train_tokenizer", 300) == 0
    assert "the train rows have the character \u2581 (U+2581) 160 times" in capsys.readouterr().out


def test_the_tokenizer_has_four_special_tokens_and_our_template(tiny):
    from transformers import AutoTokenizer

    from common import chat_format

    tokenizer = AutoTokenizer.from_pretrained(tiny / "base_model")
    special = [tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert special == [0, 1, 2, 3]
    assert len(tokenizer) == 730 and tokenizer.model_max_length == 1024
    assert tokenizer.chat_template == chat_format.BUILTIN_TEMPLATES["human-assistant"]
    rows = rows_of(tiny, "sft", "train")
    lengths = []
    for row in rows[:500]:
        ids, mask = chat_format.encode_conversation(tokenizer, row["messages"])
        prompt = chat_format.encode_prompt(tokenizer, row["messages"][:1])
        assert ids[: len(prompt)] == prompt and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[len(prompt) : -1]) == " " + row["messages"][1]["content"]
        lengths.append(sum(mask))
    assert sum(n > 40 for n in lengths) < 0.03 * len(lengths)  # answers fit the 40 new tokens of the tiny recipe


def test_the_base_model_is_an_untrained_llama_that_agrees_with_the_tokenizer(tiny):
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny / "base_model"
    checkpoint.verify(folder)
    record = checkpoint.read_stage(folder)
    assert (record["stage"], record["seed"], record["parents"]) == ("base", 1, {})
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert config.model_type == "llama" and config.tie_word_embeddings
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 4, 4)
    assert config.vocab_size == 730
    assert 0.85e6 < sum(p.numel() for p in model.parameters()) < 0.95e6
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert config.attention_dropout == 0
    for holder in (config, model.generation_config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 3)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_another_seed_gives_other_weights_and_leaves_the_generator_alone(tmp_path):
    import torch
    from safetensors.torch import load_file

    from step0_data import tiny_model

    weights = []
    for seed in (1, 2, 1):
        before = torch.get_rng_state()
        tiny_model.write_model(tmp_path, seed, 730)
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone())
    assert torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[1])


def test_too_little_text_for_the_tokenizer_is_said(tmp_path):
    from common.errors import UserError
    from step0_data import tiny_model

    with pytest.raises(UserError, match="too little text for a tokenizer of 730 pieces: it is enough for 272 or fewer"):
        tiny_model.write_tokenizer(tmp_path, ["hello"], 730)


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_preference_file_feeds_three_stages(tmp_path, monkeypatch, capsys):
    source, out = write_pairs(tmp_path / "pairs.jsonl", 300), tmp_path / "data"
    assert run(monkeypatch, "--dataset", source, "--output_dir", out, "--eval_fraction", 0.2) == 0
    rows = {
        stage: rows_of(out, stage, "train") + rows_of(out, stage, "eval") for stage in ("sft", "preference", "prompts")
    }
    assert sum(map(len, rows.values())) == 300
    assert all(len(some) > 30 for some in rows.values())
    i = int(rows["sft"][0]["messages"][0]["content"][1:])
    messages = [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"good {i}"}]
    assert rows["sft"][0] == {"messages": messages}
    i = int(rows["preference"][0]["prompt"][0]["content"][1:])
    assert rows["preference"][0]["rejected"] == [{"role": "assistant", "content": f"bad {i}"}]
    assert set(rows["prompts"][0]) == {"prompt"}
    printed = capsys.readouterr().out
    assert "300 rows read (preference 300), 300 used" in printed
    assert (
        printed.splitlines()[-1]
        == f"next: python step1_sft/train.py --model MODEL --data {out} --output_dir models/sft"
    )
    manifest = json.loads((out / "manifest.json").read_text())
    (entry,) = manifest["sources"]
    assert entry["files"] == [{"file": source.as_posix(), "sha256": checkpoint.hash_file(source), "rows": 300}]


@pytest.mark.parametrize("out", ["out:1", "lr=1/x", "o#a?b%20 c@2"])
def test_output_folders_of_odd_names(tmp_path, monkeypatch, out):
    """pyarrow takes a relative out:1 for an address, and might take lr=1 for a column."""
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("pairs.jsonl"), 20)
    words = ("--dataset", "pairs.jsonl", "--output_dir", out, "--stages", "preference", "--eval_fraction", 0)
    assert run(monkeypatch, *words) == 0
    (row, *_) = data.read_rows(data.locate(out, "preference").train)
    assert [*row] == ["prompt", "chosen", "rejected"]


def test_extra_columns_reach_the_prompts_and_mixed_ones_become_json(tmp_path, monkeypatch, capsys):
    source, out = tmp_path / "q.json", tmp_path / "data"
    rows = [
        {"prompt": f"q{i}", "answer": i, "odd": i if i % 2 else f"s{i}", "list": [i], "none": None} for i in range(40)
    ]
    source.write_text(json.dumps(rows))
    assert run(monkeypatch, "--dataset", source, "--output_dir", out, "--eval_fraction", 0) == 0
    got = rows_of(out, "prompts", "train")
    assert got[3] == {"prompt": [{"role": "user", "content": "q3"}], "answer": 3, "odd": 3, "list": [3], "none": None}
    assert got[4]["odd"] == "s4"
    assert "the column 'odd' mixes kinds of values; it is kept as JSON text" in capsys.readouterr().out


def test_bad_rows_stop_or_are_set_aside_in_the_ledger(tmp_path, monkeypatch, capsys):
    source, out = write_pairs(tmp_path / "pairs.jsonl", 50), tmp_path / "data"
    with open(source, "a") as file:
        file.write('{"prompt": "x", "chosen": "", "rejected": "b"}\nnonsense\n')
    assert run(monkeypatch, "--dataset", source, "--output_dir", out) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"{source} line 51: chosen is an empty answer" in error and "--on_bad_row skip" in error
    assert not out.exists()  # nothing half written
    assert run(monkeypatch, "--dataset", source, "--output_dir", out, "--on_bad_row", "skip") == 0
    printed = capsys.readouterr().out
    assert f"1 set aside: chosen is an empty answer (first: {source} line 51)" in printed
    assert f"1 set aside: broken JSON (Expecting value) (first: {source} line 52)" in printed
    assert printed.split("rows read")[0].endswith("52 ")
    (entry,) = json.loads((out / "manifest.json").read_text())["sources"]
    assert [reason["rows"] for reason in entry["set_aside"].values()] == [1, 1] and entry["rejected"] == 2
    assert len((out / "rejected.jsonl").read_text().splitlines()) == 2
    assert run(monkeypatch, "--dataset", source, "--output_dir", out, "--max_rows", 50, "--overwrite") == 0
    assert not (out / "rejected.jsonl").exists(), "of the run before"
    assert run(monkeypatch, "--dataset", source, "--output_dir", out, "--on_bad_row", "skip", "--overwrite") == 0
    assert "set aside: chosen is an empty answer" in (out / "preview.md").read_text()


def test_warnings_are_printed_and_kept_and_a_model_shows_its_tokens(tiny, tmp_path, monkeypatch, capsys):
    source, out = tmp_path / "x.jsonl", tmp_path / "data"
    source.write_text("".join(json.dumps({"prompt": f"q{i}", "completion": "I cannot."}) + "\n" for i in range(100)))
    flags = ["--dataset", source, "--output_dir", out]
    assert run(monkeypatch, *flags) == 0
    printed = capsys.readouterr().out
    warnings = json.loads((out / "manifest.json").read_text())["warnings"]
    assert any("answers (100.0%) are one and the same" in line for line in warnings)
    told = [f"warning: {line}" for line in warnings]
    assert [line for line in printed.splitlines() if line.startswith("warning: ")] == told
    assert "[messages] assistant: ⟦I cannot.⟧" in (out / "preview.md").read_text()
    assert run(monkeypatch, *flags) == 0  # done already
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")] == told

    assert run(monkeypatch, *flags, "--chat_template", "plain") == 2
    assert "--chat_template goes with --tokenizer MODEL" in capsys.readouterr().err
    assert run(monkeypatch, *flags, "--tokenizer", tmp_path / "none") == 2
    assert "no tokenizer could be loaded from" in capsys.readouterr().err
    before = hashes(out)
    assert run(monkeypatch, *flags, "--tokenizer", tiny / "base_model", "--overwrite") == 0
    assert "\n\nAssistant:⟦ I cannot.</s>⟧\n" in (out / "preview.md").read_text()
    after = hashes(out)
    assert {name for name in before if before[name] != after[name]} == {"preview.md", "manifest.json"}


def test_shuffled_preferences_keep_all_but_the_order(tmp_path, monkeypatch, capsys):
    source, plain, shuffled = write_pairs(tmp_path / "pairs.jsonl", 400), tmp_path / "a", tmp_path / "b"
    flags = ["--dataset", source, "--split", "0,1,0", "--eval_fraction", 0.3]
    assert run(monkeypatch, *flags, "--output_dir", plain) == 0
    assert run(monkeypatch, *flags, "--output_dir", shuffled, "--shuffle_preferences") == 0
    assert "negative control: chosen and rejected swapped in " in capsys.readouterr().out
    for part in ("train", "eval"):
        before, after = rows_of(plain, "preference", part), rows_of(shuffled, "preference", part)
        swapped = sum(
            a["chosen"] == b["rejected"] and a["rejected"] == b["chosen"] for a, b in zip(before, after, strict=True)
        )
        kept = sum(a == b for a, b in zip(before, after, strict=True))
        assert swapped + kept == len(before) and 0.35 < swapped / len(before) < 0.65


def test_sources_with_weights_and_sources_of_one_stage(tmp_path, monkeypatch, capsys):
    pairs, out = write_pairs(tmp_path / "pairs.jsonl", 200), tmp_path / "data"
    more, texts = tmp_path / "more.csv", tmp_path / "texts.tsv"
    more.write_text("prompt,completion\n" + "".join(f"r{i},a\n" for i in range(100)))
    texts.write_text("text\none\ntwo\nthree\n")
    flags = [
        "--dataset",
        f"{pairs}@0.5",
        "--sft_dataset",
        f"{more}@2",
        "--pretrain_dataset",
        texts,
        "--output_dir",
        out,
    ]
    assert run(monkeypatch, *flags) == 0
    printed = capsys.readouterr().out
    first, second, third = json.loads((out / "manifest.json").read_text())["sources"]
    assert (first["weight"], first["stage"], second["stage"], third["stage"]) == (0.5, None, "sft", "pretrain")
    left_out = first["set_aside"]["left out by the weight @0.5"]["rows"]
    assert 70 < left_out < 130 and sum(first["used"].values()) == 200 - left_out
    assert f"{more}@2 for sft only: 100 rows read (completion 100), 100 used" in printed
    asked = [row["messages"][0]["content"] for row in rows_of(out, "sft", "train")]
    extra = [text for text in asked if text[0] == "r"]
    assert len(extra) == 2 * len(set(extra)) == second["written"]["sft/train"]
    assert f"{len(extra) // 2} written again by the weight @2" in printed
    once = [row["messages"][0]["content"] for row in rows_of(out, "sft", "eval")]
    assert len(once) == len(set(once)) and len(set(extra)) + sum(text[0] == "r" for text in once) == 100
    assert len(rows_of(out, "pretrain", "train") + rows_of(out, "pretrain", "eval")) == 3
    assert run(monkeypatch, *flags) == 0 and "already done" in capsys.readouterr().out
    flags[1] = f"{pairs}@0.6"
    assert run(monkeypatch, *flags) == 2
    assert f"--dataset was {pairs}@0.5, now {pairs}@0.6" in capsys.readouterr().err


def test_a_source_of_one_stage_needs_no_other(tmp_path, monkeypatch, capsys):
    pairs, out = write_pairs(tmp_path / "pairs.jsonl", 50), tmp_path / "data"
    assert run(monkeypatch, "--preference_dataset", pairs, "--output_dir", out) == 0
    assert list(json.loads((out / "manifest.json").read_text())["stages"]) == ["preference"]
    assert json.loads((out / "manifest.json").read_text())["args"]["dataset"] == []
    assert run(monkeypatch, "--dataset", "tiny", "--sft_dataset", pairs, "--output_dir", tmp_path / "b") == 2
    assert "tiny stands alone" in capsys.readouterr().err


# Done already, or refused ---------------------------------------------------------------------------------------------


def test_the_same_request_is_done_already_and_others_are_refused(tmp_path, monkeypatch, capsys):
    source, out = write_pairs(tmp_path / "pairs.jsonl", 60), tmp_path / "data"
    flags = ["--dataset", source, "--output_dir", out]
    assert run(monkeypatch, *flags) == 0
    before = hashes(out)
    capsys.readouterr()
    assert run(monkeypatch, *flags) == 0
    printed = capsys.readouterr().out
    assert "already done" in printed and "next: python step1_sft/train.py" in printed
    assert hashes(out) == before

    assert run(monkeypatch, *flags, "--seed", 5) == 2
    assert (
        "holds data prepared otherwise (--seed was 1, now 5); choose another --output_dir or" in capsys.readouterr().err
    )
    write_pairs(source, 70)
    assert run(monkeypatch, *flags) == 2
    assert f"{source} has changed since" in capsys.readouterr().err
    assert hashes(out) == before
    assert run(monkeypatch, *flags, "--overwrite") == 0
    assert json.loads((out / "manifest.json").read_text())["sources"][0]["rows"] == 70

    (out / "sft" / "train.parquet").write_bytes(b"damaged")
    assert run(monkeypatch, *flags) == 2
    assert (
        "sft/train.parquet is missing or was changed since it was prepared; add --overwrite" in capsys.readouterr().err
    )


def test_overwrite_deletes_only_prepared_data(tmp_path, monkeypatch, capsys):
    source, out = write_pairs(tmp_path / "pairs.jsonl", 60), tmp_path / "data"
    flags = ["--dataset", source, "--output_dir", out, "--overwrite"]
    (out / "sft").mkdir(parents=True)
    (out / "sft" / "model.safetensors").write_text("precious")
    assert run(monkeypatch, *flags) == 2
    assert f"{out} holds sft but no manifest.json of ours" in capsys.readouterr().err
    assert (out / "sft" / "model.safetensors").read_text() == "precious"
    shutil.rmtree(out)
    assert run(monkeypatch, *flags) == 0
    (out / "notes.txt").write_text("precious")
    assert run(monkeypatch, *flags) == 2
    assert "also holds notes.txt, which --overwrite will not delete" in capsys.readouterr().err
    (out / "manifest.json").write_text("{}")
    assert run(monkeypatch, *flags) == 2
    assert "is not from this program" in capsys.readouterr().err
    (out / "manifest.json").write_text("{")
    assert run(monkeypatch, *flags) == 2
    assert "remove the folder and prepare again" in capsys.readouterr().err


def test_an_interrupted_run_leaves_the_old_data(tmp_path, monkeypatch):
    source, out = write_pairs(tmp_path / "pairs.jsonl", 60), tmp_path / "data"
    assert run(monkeypatch, "--dataset", source, "--output_dir", out) == 0
    before = hashes(out)
    with monkeypatch.context() as patch:
        patch.setattr(preview, "page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(patch, "--dataset", source, "--output_dir", out, "--overwrite", "--seed", 9)
    assert hashes(out) == before


@pytest.mark.parametrize("moves", [0, 1, 4])
@pytest.mark.parametrize("there", [False, True])
def test_a_run_killed_while_it_moves_its_files_in_can_be_repeated(tmp_path, monkeypatch, moves, there):
    source, out = write_pairs(tmp_path / "pairs.jsonl", 60), tmp_path / "data"
    words = ["--dataset", source, "--output_dir", out]
    assert run(monkeypatch, "--dataset", source, "--output_dir", tmp_path / "whole") == 0
    if there:
        assert run(monkeypatch, *words, "--seed", 5) == 0
    script = (
        "import os, sys\nfrom step0_data import output, prepare\nleft, move = int(sys.argv.pop(1)), os.replace\n"
        "def replace(*where):\n    global left\n    if 'parquet' in str(where) or '.tmp' in str(where):\n"
        "        return move(*where)\n    left -= 1\n    os._exit(9) if left < 0 else move(*where)\n"
        "output.os.replace = replace\nprepare.main()"
    )
    command = [sys.executable, "-c", script, str(moves), *map(str, words), "--overwrite"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 9
    assert (out / "preference").exists() == (moves > 0) and not (out / "manifest.json").exists()
    assert run(monkeypatch, *words) == 0
    assert hashes(out / "sft") == hashes(tmp_path / "whole" / "sft")
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir())


def test_a_source_that_changes_while_it_is_read_stops_the_run(tmp_path, monkeypatch, capsys):
    source = write_pairs(tmp_path / "pairs.jsonl", 60)
    collect = split.collect

    def slow(*arguments):
        with open(source, "a") as file:
            file.write('{"prompt": "late", "chosen": "a", "rejected": "b"}\n')
        return collect(*arguments)

    monkeypatch.setattr(split, "collect", slow)
    assert run(monkeypatch, "--dataset", source, "--output_dir", tmp_path / "data") == 2
    message = f"error: {source} changed while it was read; run again when nobody writes to it any more\n"
    assert capsys.readouterr().err == message and not (tmp_path / "data").exists()


def test_data_are_not_written_into_their_own_source(tmp_path, monkeypatch, capsys):
    write_pairs(tmp_path / "pairs.jsonl", 60)
    for out in (tmp_path, tmp_path / "deep" / "data"):
        assert run(monkeypatch, "--dataset", f"{tmp_path}@0.5", "--output_dir", out) == 2
        assert f"--output_dir {out} is inside the source {tmp_path}; choose a folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_of_many_files_left_out_some_are_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train", "test", *"abcdefg"):
        write_pairs(folder / f"{name}.jsonl", 40)
    assert run(monkeypatch, "--dataset", folder, "--output_dir", tmp_path / "data") == 0
    named = ", ".join(f"{folder}/{name}.jsonl" for name in "abcde")
    told = f"left out, being neither train nor test: {named} and 2 more, see manifest.json\n"
    assert told in capsys.readouterr().out
    assert len(json.loads((tmp_path / "data" / "manifest.json").read_text())["sources"][0]["left_out"]) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output_dir", "x" * 300], "x cannot be written: File name too long; choose another"),
        (["--eval_fraction", "some"], "some is not in [0, 1)"),
        (["--dataset", "~nobody_of_that_name/x.jsonl"], "no such file or folder (Could not determine home directory)"),
        (["--dataset", "x" * 300], "x: no such file or folder (File name too long); give a path or a hub name"),
        (["--split", "1,2"], "1,2 is not three shares"),
        (["--split", "0,0,0"], "0,0,0 is not three shares"),
        (["--split", "a,b,c"], "invalid shares value"),
        (["--eval_fraction", "1"], "1 is not in [0, 1)"),
        (["--dataset", "tiny", "x.jsonl"], "tiny stands alone"),
        (["--dataset", "missing.jsonl"], "missing.jsonl: no such file or folder"),
        (["--datset", "tiny"], "unknown flag --datset; the nearest is --dataset"),
        (["--max_rows", "-1"], "-1 is out of range, wanted a whole number from 0;"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, monkeypatch, capsys, flags, message):
    try:
        code = run(monkeypatch, "--output_dir", tmp_path / "data", *flags)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_terminal_without_the_letters_of_a_name_stops_nothing(tmp_path):
    write_pairs(tmp_path / "对.jsonl", 20)
    command = [sys.executable, str(ROOT / "step0_data/prepare.py"), "--dataset", "对.jsonl"]
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\\u5bf9.jsonl: 20 rows read" in done.stdout


def test_the_script_runs_from_any_folder_and_knows_other_names_of_its_flags(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", 20)
    command = [
        sys.executable,
        str(ROOT / "step0_data/prepare.py"),
        "--dataset_name",
        "pairs.jsonl",
        "--data_split",
        "1,1,1",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert "writing to data" in done.stdout and (tmp_path / "data" / "manifest.json").is_file()


# Real files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside():
    folder = os.environ.get("RLHF_TEST_DATA")
    if not folder:
        pytest.skip("RLHF_TEST_DATA is unset: no folder of outside data to read")
    return Path(folder)


# file, flags, form, rows read, stages that get rows
REAL = [
    ("hh_harmless_800.jsonl.gz", ["--on_bad_row", "skip"], "preference", 800, {"sft", "preference", "prompts"}),
    ("alpaca_en_demo.json", [], "alpaca", 999, {"sft"}),
    ("alpaca_zh_demo.json", [], "alpaca", 1000, {"sft"}),
    ("dpo_en_demo.json", [], "preference", 300, {"sft", "preference", "prompts"}),
    ("gsm8k_train_2000.jsonl", [], "question", 2000, {"sft", "prompts"}),
]


@pytest.mark.parametrize(("name", "flags", "form", "rows", "stages"), REAL, ids=[real[0] for real in REAL])
def test_real_files(outside, tmp_path, monkeypatch, name, flags, form, rows, stages):
    if not (outside / name).exists():
        pytest.skip(f"{name} is not in RLHF_TEST_DATA")
    out = tmp_path / "data"
    assert run(monkeypatch, "--dataset", outside / name, "--output_dir", out, *flags) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    (entry,) = manifest["sources"]
    aside = sum(reason["rows"] for reason in entry["set_aside"].values())
    assert entry["rows"] == rows and set(entry["forms"]) == {form} and aside <= 5
    assert sum(entry["used"].values()) + aside == rows
    assert set(manifest["stages"]) == stages
    assert sum(sum(parts.values()) for parts in manifest["stages"].values()) == rows - aside


def test_hh_text_survives_word_for_word(outside, tmp_path, monkeypatch):
    path, out = outside / "hh_harmless_800.jsonl.gz", tmp_path / "data"
    if not path.exists():
        pytest.skip("hh_harmless_800.jsonl.gz is not in RLHF_TEST_DATA")
    flags = ["--dataset", path, "--output_dir", out, "--on_bad_row", "skip", "--split", "0,1,0", "--eval_fraction", 0]
    assert run(monkeypatch, *flags) == 0

    def joined(messages):
        names = {"user": "Human", "assistant": "Assistant"}
        return "".join(f"\n\n{names[m['role']]}: {m['content']}" for m in messages)

    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = {" ".join(json.loads(line)["chosen"].split()) for line in file}
    got = {" ".join(joined(row["prompt"] + row["chosen"]).split()) for row in rows_of(out, "preference", "train")}
    assert len(got) > 780 and len(got - texts) == 0
