"""--margin_coef: the margins of the data reach the loss in the size asked for."""

import json
import math

import pytest
import small_models
from small_runs import answer, call, write_data

from step2_reward import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = small_models.save_talkers(tmp_path_factory.mktemp("margins"))
    prompt = [{"role": "user", "content": "Hi"}]
    rows = [
        {"prompt": prompt, "chosen": answer(f"yes {i}"), "rejected": answer(f"no {i}"), "margin": 3.0} for i in range(8)
    ]
    write_data(root / "with", preference=rows)
    write_data(root / "without", preference=[{k: v for k, v in row.items() if k != "margin"} for row in rows])
    return root


def first_loss(folder, data: str, flags: str) -> float:
    out = f"out-{data}{flags.replace(' ', '')}"
    words = f"--model a --data {data} --output_dir {out} --max_length 60 --max_steps 1 --report_to none {flags}"
    assert call(train, words, folder) == 0
    return json.loads((folder / out / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def test_margins_count_as_much_as_is_asked(folder):
    plain = first_loss(folder, "without", "")
    assert first_loss(folder, "with", "--margin_coef 0") == plain
    # A fresh head is almost flat: all pairs have about the lead d with -log sigmoid(d) = plain.
    lead = -math.log(math.expm1(plain))
    for flags, coef in (("--margin_coef 0.5", 0.5), ("", 1.0)):
        wanted = math.log1p(math.exp(3 * coef - lead))
        assert abs(first_loss(folder, "with", flags) - wanted) < 0.02, coef
