"""The loop of steps 1 and 2: a step's mean over its tokens, evaluation, the rows of every step, what is recorded."""

import dataclasses

import one_rank
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from common import engine, supervised
from common.batches import collate_sft, step_rows
from common.examples import SFTExample
from common.models import LanguageModel
from step1_sft.loss import sft_loss

# DeepSpeed calls what torch is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

VOCAB, PAD = 29, 0
OPTIM = engine.Optim(
    learning_rate=1e-2, lr_scheduler_type="constant", min_lr_ratio=0.0, warmup_steps=0, weight_decay=0.0,
    adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-5, max_grad_norm=0.0,
)  # fmt: skip
BATCHES = supervised.Batches(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_train_epochs=1.6,
    max_steps=0,
    eval_steps=2,
    seed=3,
)


def examples_of(count: int, seed: int) -> list[SFTExample]:
    """Rows of 3 to 9 tokens of which the last 1 to 5 are trained."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in range(count):
        length, trained = 3 + row % 7, 1 + row % 5
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        found.append(SFTExample(ids, [position >= length - min(trained, length - 1) for position in range(length)]))
    return found


TRAIN, HELD_OUT = examples_of(11, 1), examples_of(7, 2)


def plain_model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def run(batches=BATCHES, held_out=HELD_OUT):
    device = one_rank.start()
    options = engine.Engine("fp32", 0, False, False, False, None)
    load = lambda zero3: LanguageModel(plain_model())  # noqa: E731
    model = engine.TrainedModel(load, OPTIM, options, batches.steps(len(TRAIN)), device)
    task = supervised.Task(
        length=lambda example: len(example.ids),
        collate=lambda examples, filler: collate_sft(examples, PAD, filler),
        loss=lambda batch: sft_loss(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]),
        count=lambda examples: sum(sum(example.mask[1:]) for example in examples),
        figures=lambda sums, count: {"accuracy": sums["correct"] / count},
    )
    log = one_rank.Recorded()
    record, sums = supervised.train(model, TRAIN, held_out, task, batches, log)
    return log.rows, record, sums, model


def loss_of(model, examples) -> tuple[torch.Tensor, float]:
    """Mean cross-entropy and accuracy over the trained tokens, one row at a time."""
    losses, right = [], []
    for example in examples:
        logits, ids = model(torch.tensor([example.ids])).logits[0], torch.tensor(example.ids)
        for position in range(1, len(ids)):
            if example.mask[position]:
                losses.append(cross_entropy(logits[position - 1], ids[position]))
                right.append(float(logits[position - 1].argmax() == ids[position]))
    return torch.stack(losses).mean(), sum(right) / len(right)


def test_the_loop_equals_a_plain_float64_one():
    rows, record, sums, model = run()
    plain = plain_model().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    assert sorted(rows) == [1, 2, 3, 4, 5]  # 1.6 x 11 rows are 18, 4 to a step
    seen = 0
    for step in range(5):
        chosen = [TRAIN[row] for row in step_rows(step, 4, 11, 3, 1.6)]
        loss, accuracy = loss_of(plain, chosen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += sum(len(example.ids) for example in chosen)
        row = rows[step + 1]
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5) and row["accuracy"] == pytest.approx(accuracy)
        assert row["num_tokens"] == seen and row["learning_rate"] == 1e-2
        assert row["epoch"] == pytest.approx((step + 1) * 4 / 11)
        assert ("eval_loss" in row) == (step + 1 in (2, 4, 5))
        if "eval_loss" in row:
            with torch.no_grad():
                loss, accuracy = loss_of(plain, HELD_OUT)
            assert row["eval_loss"] == pytest.approx(loss.item(), abs=1e-5)
            assert row["eval_accuracy"] == pytest.approx(accuracy)
    assert record == rows[5]
    assert sums["tokens"] == sum(sum(example.mask[1:]) for example in HELD_OUT)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state()[name].double(), value, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("size", "accumulation"), [(4, 1), (1, 4), (3, 1)])
def test_how_a_step_is_cut_changes_nothing(size, accumulation):
    cut = dataclasses.replace(BATCHES, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    if size == 3:  # other steps, so other rows: but the first evaluation is of the same held-out rows
        rows = run(dataclasses.replace(cut, max_steps=1))[0]
        other = run(
            dataclasses.replace(cut, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=3)
        )[0]
    else:
        rows, other = run(cut)[0], run()[0]
    assert rows.keys() == other.keys()
    for step, row in rows.items():
        for name, value in row.items():
            assert other[step][name] == pytest.approx(value, abs=2e-6, rel=2e-6), (step, name)


@pytest.mark.parametrize("most", [5, 14, 1000])
def test_micro_batches_by_tokens_change_no_result(most, monkeypatch):
    seen = []
    pack = supervised.pack_micro_batches
    monkeypatch.setattr(supervised, "pack_micro_batches", lambda *args: seen.append(pack(*args)) or seen[-1])
    plain = run()
    assert not seen
    by_tokens = run(dataclasses.replace(BATCHES, max_tokens_per_micro_batch=most))
    for step, row in plain[0].items():
        for name, value in row.items():
            assert by_tokens[0][step][name] == pytest.approx(value, abs=2e-6, rel=2e-6), (step, name)
    for name, value in plain[3].state().items():
        torch.testing.assert_close(by_tokens[3].state()[name], value, atol=1e-5, rtol=0, msg=name)
    # Of a step of four rows: 5 tokens are a row each, 1000 all at once.
    forwards = {len(dealt) for dealt in seen if sum(map(len, dealt)) == 4}
    assert forwards == {5: {4}, 1000: {1}}.get(most, forwards) and forwards


@pytest.mark.parametrize(("rows", "expected"), [(1, [[3], [0, 1, 2]]), (2, [[0], [1, 2], [3]])])
def test_the_budget_counts_padding_and_every_row_of_an_example(rows, expected):
    lengths = {
        0: 3,
        1: 4,
        2: 4,
        3: 9,
    }  # 16 tokens: 3 rows padded to 4; 0 to 2 and 3 would be 4 x 9; of pairs twice that
    task = supervised.Task(lambda length: length, lambda *_: {}, lambda _: None, len, dict, rows)
    batches = dataclasses.replace(BATCHES, max_tokens_per_micro_batch=16)
    assert supervised._micro_batches([3, 1, 0, 2], lengths, task, batches, torch.device("cpu"))[1] == expected


def test_max_steps_decides_and_rows_go_round():
    batches = dataclasses.replace(BATCHES, max_steps=7, eval_steps=0)
    assert batches.steps(3) == 7 and BATCHES.steps(11) == 5 and batches.size == 4
    rows, *_ = run(batches)
    assert sorted(rows) == list(range(1, 8))
    assert [step for step, row in rows.items() if "eval_loss" in row] == [7]
    assert all(len(batches.rows(step, 3)) == 4 for step in range(7))
    assert len(BATCHES.rows(4, 11)) == 2 and not BATCHES.rows(5, 11)


def test_without_held_out_rows_nothing_is_evaluated():
    rows, _, sums, _ = run(held_out=[])
    assert sums == {} and not any(name.startswith("eval_") for row in rows.values() for name in row)


def test_maxima_are_taken_over_micro_batches():
    from common import distributed

    totals = {}
    for value, highest in ((1.0, 2.0), (3.0, -5.0), (0.5, 2.5)):
        distributed.accumulate(totals, {"sum": torch.tensor(value), "max_score": torch.tensor(highest)})
    assert distributed.sum_over_ranks(totals, torch.device("cpu")) == {"sum": 4.5, "max_score": 2.5}
