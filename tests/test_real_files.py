"""Every public file of RLHF_TEST_DATA, alone and blended: step 0, then a few steps of each stage that it feeds.

The base model is the one that step 0 makes of the file's own text (`--train_tokenizer`), so nothing else is needed.
"""

import json
import math
import os
import textwrap
from pathlib import Path

import pytest
import stage_processes
from transformers import AutoTokenizer

from common.data import read_rows
from common.metrics import read_jsonl

DATA = Path(os.environ.get("RLHF_TEST_DATA", ""))
ROWS = {
    "hh_harmless_800.jsonl.gz": 800,
    "alpaca_en_demo.json": 999,
    "alpaca_zh_demo.json": 1000,
    "dpo_en_demo.json": 300,
    "gsm8k_train_2000.jsonl": 2000,
}
MIX = [
    "hh_harmless_800.jsonl.gz",
    "alpaca_en_demo.json@0.5",
    "alpaca_zh_demo.json@2",
    "dpo_en_demo.json",
    "gsm8k_train_2000.jsonl@0.3",
]
FEEDS = {
    "hh_harmless_800.jsonl.gz": {"sft", "preference", "prompts"},
    "alpaca_en_demo.json": {"sft"},
    "alpaca_zh_demo.json": {"sft"},
    "dpo_en_demo.json": {"sft", "preference", "prompts"},
    "gsm8k_train_2000.jsonl": {"sft", "prompts"},
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((DATA / name).is_file() for name in ROWS),
        reason=f"RLHF_TEST_DATA names no folder with {', '.join(ROWS)}",
    ),
]
RULE = '''
def right(prompts, completions, answer, **columns):
    """1 where the number after #### is said."""
    wanted = [None if text is None else text.split("####")[-1].strip() for text in answer]
    return [None if w is None else float(w in c[0]["content"]) for w, c in zip(wanted, completions)]
'''


def prepare(folder: Path, sources: list[str]) -> dict:
    (folder / "rule.py").write_text(textwrap.dedent(RULE))
    flags = f"--dataset {' '.join(str(DATA / it) for it in sources)} --on_bad_row skip --train_tokenizer 2000"
    done = stage_processes.run("step0_data/prepare.py", flags, folder)
    assert done.codes == [0], done.output
    print(done.output[0])
    return json.loads((folder / "data/manifest.json").read_text())


def train(folder: Path, stages: set[str]) -> None:
    """Two steps of each stage that has data."""
    common = "--data data --max_steps 2 --report_to none --per_device_train_batch_size 2"
    lines = [("step1_sft/train.py", f"--model data/base_model --output_dir sft --max_length 512 {common}")]
    has_pairs = "preference" in stages
    if has_pairs:
        lines.append(("step2_reward/train.py", f"--model sft --output_dir reward --max_length 512 {common}"))
    if "prompts" in stages:
        judge = "--critic reward" if has_pairs else "--critic sft --reward rule.py:right --score_norm none"
        sizes = "--rollout_batch_size 4 --minibatch_size 2 --max_prompt_length 448 --max_completion_length 32"
        lines.append(("step3_rlhf/train.py", f"--actor sft {judge} --output_dir rlhf {sizes} {common}"))
    for script, flags in lines:
        done = stage_processes.run(script, flags, folder, timeout=300)
        assert done.codes == [0], done.output
        print(next(line for line in done.output[0].splitlines() if " rows read" in line))
        rows = read_jsonl(folder / flags.split("--output_dir ")[1].split()[0] / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        assert all(value is not None and math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize("name", ROWS)
def test_each_file_alone(name, tmp_path):
    manifest = prepare(tmp_path, [name])
    (source,) = manifest["sources"]
    used, aside = sum(source["used"].values()), sum(entry["rows"] for entry in source["set_aside"].values())
    assert source["rows"] == ROWS[name] == used + aside and aside <= 5
    assert set(manifest["stages"]) == FEEDS[name]
    train(tmp_path, FEEDS[name])


def test_all_files_blended(tmp_path):
    manifest = prepare(tmp_path, MIX)
    for source, typed in zip(manifest["sources"], MIX, strict=True):
        used, aside = sum(source["used"].values()), sum(entry["rows"] for entry in source["set_aside"].values())
        name, _, weight = typed.partition("@")
        assert source["rows"] == ROWS[name] == used + aside
        if weight == "2":  # each training row twice, the others once
            again = sum(source["written"].values()) - used
            assert again == source["used"]["sft/train"] > 900
        elif weight:
            assert abs(used / source["rows"] - float(weight)) < 0.06
    train(tmp_path, {"sft", "preference", "prompts"})


def test_chinese_text_arrives_whole(tmp_path):
    """From the file to the parquet rows, and through the tokenizer and back."""
    prepare(tmp_path, ["alpaca_zh_demo.json"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data/base_model")
    told = set()
    for part in ("train", "eval"):
        for row in read_rows(tmp_path / f"data/sft/{part}.parquet"):
            question, answer = (message["content"] for message in row["messages"])
            told.add((question, answer))
            for text in (question, answer):
                assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    wanted = set()
    for row in json.loads((DATA / "alpaca_zh_demo.json").read_text(encoding="utf-8")):
        wanted.add(("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]))
    assert told == wanted
