"""scripts/show_tokens.py: what it prints of rows whose tokens are known, one a byte."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_tokenizers as small
from transformers import LlamaConfig

from common.errors import UserError
from scripts import show_tokens


@pytest.fixture
def model(tmp_path):
    small.characters().save_pretrained(tmp_path / "model")
    LlamaConfig(vocab_size=260, hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def said(role, text):
    return [{"role": role, "content": text}]


def shown(monkeypatch, capsys, tmp_path, model, stage, rows, *flags):
    (tmp_path / stage).mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / stage / "train.parquet")
    words = ["--model", str(model), "--data", str(tmp_path), "--stage", stage, "--chat_template", "plain", *flags]
    monkeypatch.setattr(sys, "argv", ["show_tokens.py", *words])
    show_tokens.main()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "template: the built-in chat template plain; pad token '<|pad|>' added as id 258, a spare row of the "
        "embedding; answers end in '</s>', id 1"
    )
    return rest


def test_conversations(monkeypatch, capsys, tmp_path, model):
    rows = [
        {"messages": said("user", "a b") + said("assistant", "c\n\u4f60") + said("user", "d") + said("assistant", "e")},
        {"messages": said("user", "abcdefghijkl") + said("assistant", "m")},
        {"messages": said("user", "a") + said("assistant", "b</s>")},
        {"messages": said("user", "not asked for") + said("assistant", "b")},
    ]
    assert shown(monkeypatch, capsys, tmp_path, model, "sft", rows, "--rows", "3", "--max_length", "12") == [
        "",
        "conversation 0: 13 tokens, 7 trained, 1 of them the stop token, cut at --max_length 12",
        "<s> a \u00b7 b \u00abc\u00bb \u00ab\\n\u00bb \u00ab\u4f60\u00bb \u00ab</s>\u00bb d \u00abe\u00bb",
        "",
        "row 1 is set aside: no answer begins within --max_length 12",
        "",
        "row 2 is set aside: an answer holds the text of the stop token </s>: 'b</s>'",
    ]


def test_pairs(monkeypatch, capsys, tmp_path, model):
    row = {"prompt": said("user", "a"), "chosen": said("assistant", "bc"), "rejected": said("assistant", "")}
    too_long = row | {"prompt": said("user", "abcd")}
    assert shown(monkeypatch, capsys, tmp_path, model, "preference", [row, too_long], "--max_length", "5") == [
        "",
        "chosen 0: 5 tokens, 3 trained, 1 of them the stop token",
        "<s> a \u00abb\u00bb \u00abc\u00bb \u00ab</s>\u00bb",
        "",
        "rejected 0: 3 tokens, 1 trained, 1 of them the stop token",
        "<s> a \u00ab</s>\u00bb",
        "",
        "row 1 is set aside: its prompt is over --max_length 5, even without older turns",
    ]


def test_prompts_lose_their_oldest_turns(monkeypatch, capsys, tmp_path, model):
    rows = [{"prompt": said("user", "a") + said("assistant", "b") + said("user", "c")}]
    assert shown(monkeypatch, capsys, tmp_path, model, "prompts", rows, "--max_length", "4") == [
        "",
        "prompt 0: 2 tokens, 0 trained, 0 of them the stop token",
        "<s> c",
    ]


def test_the_space_before_a_word_is_shown(tmp_path):
    tokenizer = small.sentencepiece_llama(tmp_path, prefix_space=True)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("\u2581", "is")]
    assert show_tokens.readable(tokenizer, ids, [False, True]) == "\u00b7 \u00abis\u00bb"


def test_a_tokenizer_without_a_template_needs_one(monkeypatch, tmp_path, model):
    monkeypatch.setattr(sys, "argv", ["show_tokens.py", "--model", str(model), "--data", str(tmp_path)])
    with pytest.raises(UserError, match="no chat template; name one with --chat_template: human-assistant, chatml"):
        show_tokens.main()
