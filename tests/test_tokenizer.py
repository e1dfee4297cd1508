"""Does a tokenizer give text back? Legitimate ones may change it, and those that lose it are refused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_tokenizers
import tokenizers
from small_models import save_llama
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from common import tokenizer
from common.errors import RunFailed, UserError

ENGLISH = [(0, "Is chess  hard to learn?\nYes, it is! \u00dcber 12"), (1, "Hello there, how are you doing today?")]
CHINESE = [(0, "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4eca\u5929\u5929\u6c14\u5f88\u597d\u5417\uff1f")]


def like_bert() -> PreTrainedTokenizerFast:
    """Lower case, no accents, spaces around signs."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    backend.train_from_iterator([text for _, text in ENGLISH] * 20, trainers.WordPieceTrainer(special_tokens=["[UNK]"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def like_t5() -> PreTrainedTokenizerFast:
    """NFKC, runs of white space as one space."""
    backend = tokenizers.Tokenizer(models.Unigram())
    space = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), space])
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator([text for _, text in ENGLISH] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_tokenizers_that_spell_any_text_are_passed_without_a_word(tmp_path):
    for number, make in enumerate((small_tokenizers.llama_2, small_tokenizers.qwen_2_instruct, small_tokenizers.opt)):
        assert tokenizer.check_round_trip(make(tmp_path / str(number)), ENGLISH + CHINESE, "data") is None


@pytest.mark.parametrize(("make", "rows"), [(like_bert, 2), (like_t5, 1)])
def test_letter_case_accents_and_spacing_may_change_and_it_is_said(make, rows):
    said = tokenizer.check_round_trip(make(), ENGLISH, "data")
    assert said.startswith(f"tokenizer: {rows} of 2 rows looked at come back changed (data), first row 0: 'Is chess")
    assert said.endswith("; 0.0% of the characters are lost or others")


@pytest.mark.parametrize("make", [like_bert, like_t5, small_tokenizers.words])
def test_a_script_that_the_tokenizer_does_not_know_is_refused(make):
    with pytest.raises(UserError, match=r"data: .* does not give the text back: .*; row 0, .*knows this language"):
        tokenizer.check_round_trip(make(), CHINESE, "data")


def test_marks_of_a_missing_decoder_are_no_text():
    backend = small_tokenizers._byte_level(300, ["<s>"])
    backend.decoder = decoders.Fuse()
    with pytest.raises(UserError, match=r"does not give the text back: \d+% of the characters are lost or others"):
        tokenizer.check_round_trip(PreTrainedTokenizerFast(tokenizer_object=backend), ENGLISH, "data")


def test_rows_are_looked_at_from_all_over_a_large_file(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"text {i}"}]} for i in range(10_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=500)
    seen = tokenizer.sample(tmp_path / "x.parquet")
    assert 200 < len(seen) < 400 and seen[0][0] == 0 and seen[-1][0] > 9_000
    assert all(text == f"text {row}" for row, text in seen)


def test_a_tokenizer_that_is_opened_as_another_one_is_noticed(tmp_path):
    """Beside a Qwen2 model transformers takes Qwen2's class, whatever was saved."""
    text = tokenizer.prepare(save_llama(tmp_path / "llama"), 64, "--max_length", None, False)
    rows = [{"messages": [{"role": "user", "content": words} for _, words in ENGLISH]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert text.check(tmp_path / "x.parquet") == [] and len(text.texts) == 2
    text.check_saved(tmp_path / "llama")
    small_tokenizers.llama_2(tmp_path / "pieces").save_pretrained(tmp_path / "qwen2")
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path / "qwen2")
    assert type(AutoTokenizer.from_pretrained(tmp_path / "qwen2")).__name__ == "Qwen2Tokenizer"
    with pytest.raises(RunFailed, match="qwen2: the tokenizer that was saved is opened as another one"):
        text.check_saved(tmp_path / "qwen2")
    config = json.loads((tmp_path / "llama/tokenizer_config.json").read_text())
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|im_start|>"}))
    with pytest.raises(RunFailed, match="pad_token_id is 1, was 3"):
        text.check_saved(tmp_path / "llama")
