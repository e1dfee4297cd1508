"""Real dialogues through all stages at full length, a few steps each: needs the folder named by RLHF_TEST_DATA.

Models are small and random, one shaped like Qwen2 and one like GPT-2, with tokenizers of their kinds;
what is tried is that rows of every length, multi-turn and with odd characters, pass through under ZeRO 0 and 3.
"""

import json
import math
import os
from pathlib import Path

import pytest
import stage_processes
from small_models import FAMILIES, save_family

from common.metrics import read_jsonl

DATA = Path(os.environ.get("RLHF_TEST_DATA", ""))
FILE = DATA / "hh_harmless_800.jsonl.gz"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason="RLHF_TEST_DATA names no folder with hh_harmless_800.jsonl.gz"),
]
POSITIONS = {"qwen2": {"max_position_embeddings": 1024}, "gpt2": {"n_positions": 1024}}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Prepared data, and a base model of each shape."""
    folder = tmp_path_factory.mktemp("real")
    done = stage_processes.run("step0_data/prepare.py", f"--dataset {FILE} --on_bad_row skip", folder)
    assert done.codes == [0], done.output
    print(done.output[0])
    for name, positions in POSITIONS.items():
        save_family(folder / name, FAMILIES[name], **positions)
    return folder


def test_every_row_is_in_a_stage_or_in_the_ledger(root):
    manifest = json.loads((root / "data/manifest.json").read_text())
    (source,) = manifest["sources"]
    used, aside = sum(source["used"].values()), sum(entry["rows"] for entry in source["set_aside"].values())
    assert source["rows"] == 800 == used + aside and aside < 20
    assert sum(sum(parts.values()) for parts in manifest["stages"].values()) >= used


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("shape", POSITIONS)
def test_all_stages_at_full_length(root, shape, zero):
    out, template = f"{shape}-{zero}", f"--chat_template {FAMILIES[shape].template}" if FAMILIES[shape].template else ""
    common = f"--data data --zero_stage {zero} --max_steps 2 --report_to none --per_device_train_batch_size 2"
    lines = {
        "step1_sft/train.py": f"--model {shape} --output_dir {out}/sft --max_length 512 {template} {common}",
        "step2_reward/train.py": f"--model {out}/sft --output_dir {out}/reward --max_length 512 {common}",
        "step3_rlhf/train.py": f"--actor {out}/sft --critic {out}/reward --output_dir {out}/rlhf "
        "--rollout_batch_size 4 --minibatch_size 2 --max_prompt_length 448 --max_completion_length 64 "
        f"--frozen_zero_stage {zero} {common}",
    }
    for script, flags in lines.items():
        done = stage_processes.run(script, flags, root, timeout=300)
        assert done.codes == [0], done.output
        print(f"{shape}, ZeRO-{zero}: " + next(line for line in done.output[0].splitlines() if " rows read" in line))
    for stage in ("sft", "reward", "rlhf"):
        rows = read_jsonl(root / out / stage / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        assert all(value is not None and math.isfinite(value) for row in rows for value in row.values())
    samples = read_jsonl(root / out / "rlhf/samples.jsonl")
    assert len(samples) == 3 and all(sample["length"] <= 64 for sample in samples)
    print(f"{shape}, ZeRO-{zero}: {rows[-1]}")
