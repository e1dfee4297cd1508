"""A model's tokenizer made ready for a stage: template, stop tokens and pad token, checked against the model's limits
and against the stage's own rows.

The three training stages start with this, so that a prompt is the same tokens in all of them.
"""

import collections
import contextlib
import dataclasses
import itertools
import tempfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from common import adapters, chat_format, distributed, models
from common.errors import RunFailed, UserError


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A tokenizer with all that training and sampling ask of it.

    config: the model's HF configuration. stop_ids: tokens that end a response, the trained turn end first. note: which
    template and pad token were taken, for people.
    """

    tokenizer: object
    config: object
    stop_ids: tuple[int, ...]
    note: str
    texts: list[tuple[int, str]] = dataclasses.field(default_factory=list, compare=False)  # of rows, see `check`

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def fit(self, hf: nn.Module, zero3: dict | None, lora: adapters.Lora | None = None, seed: int = 0) -> list[str]:
        """Gives a model a row for every token, the same special tokens, and adapters. What was done, for people.

        A critic or a reference of another size gets as many rows as the actor: Qwen2.5 7B has 128 more than 0.5B, and
        what lies beyond the tokenizer can be sampled all the same.
        """
        done = []
        old = hf.get_input_embeddings().num_embeddings
        rows = max(len(self.tokenizer), self.config.get_text_config().vocab_size)
        if models.grow_embeddings(hf, rows, zero3):
            done.append(f"embeddings: grown to {rows} rows, one for each token")
        models.set_special_tokens(hf, self.tokenizer, self.stop_ids)
        if lora and lora.lora_r:
            new = adapters.untrained_rows(hf, self._written(old))
            done.append(adapters.add(hf, lora, seed, new))
            if new:
                done.append(f"tokens whose rows are trained: {self._named(new)}")
        return done

    def check(self, file: Path) -> list[str]:
        """Looks at rows of a prepared file: that the tokenizer gives their text back, and that once saved beside this
        model it is opened again as the same. Lines for people. A collective.

        Raises:
            UserError: text is lost, or another tokenizer is opened.
        """

        def look() -> list[str]:
            self.texts.extend(sample(file))
            said = check_round_trip(self.tokenizer, self.texts, f"{file}")
            with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
                self.config.save_pretrained(folder)
                self.tokenizer.save_pretrained(folder)
                if differs := self._differs(folder):
                    raise UserError(
                        f"the {type(self.tokenizer).__name__} of this model, once saved, is opened as another tokenizer"
                        f": {differs}; give the model another tokenizer, or transformers another version"
                    )
            return [said] if said else []

        return distributed.from_main(look)

    def check_other(self, other, whose: str) -> list[str]:
        """`check` for another model's tokenizer that reads the same rows' text. A collective."""
        said = distributed.from_main(lambda: check_round_trip(other, self.texts, whose))
        return [said] if said else []

    def check_saved(self, folder: Path) -> None:
        """Raises RunFailed where a saved folder's tokenizer gives the rows that `check` saw other tokens."""
        if differs := self._differs(folder):
            raise RunFailed(f"{folder}: the tokenizer that was saved is opened as another one: {differs}")

    def _differs(self, folder: str | Path) -> str | None:
        is_remote = type(self.tokenizer).__module__.startswith("transformers_modules")
        again = models.load_tokenizer(folder, is_remote)
        for name in ("eos_token_id", "pad_token_id", "chat_template"):
            ours, theirs = getattr(self.tokenizer, name), getattr(again, name)
            if ours != theirs:
                return f"{name} is {theirs!r:.60}, was {ours!r:.60}"
        for row, text in self.texts:
            ours, theirs = (tok(text, add_special_tokens=False)["input_ids"] for tok in (self.tokenizer, again))
            if ours != theirs:
                at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
                return f"row {row} is ids {theirs[at : at + 4]}, was {ours[at : at + 4]}, from its token {at} on"
        return None

    def _written(self, known: int) -> list[int]:
        """Tokens that a conversation has and ordinary words do not: the template's, those that end an answer, and those
        from `known` on."""
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
        ids = {*self.stop_ids, *range(known, len(self.tokenizer))}
        for messages in (turns, [{"role": "system", "content": "Be brief."}, *turns]):
            with contextlib.suppress(chat_format.RowError):  # a template without a system turn
                ids |= set(chat_format.encode_conversation(self.tokenizer, messages)[0])
        special = set(chat_format.marker_ids(self.tokenizer).values())
        return sorted(i for i in ids if (i in special or i >= known) and i != self.pad_id)

    def _named(self, ids: list[int]) -> str:
        words = self.tokenizer.convert_ids_to_tokens(ids[:6])
        return ", ".join(words) + (f" and {len(ids) - 6} more" if len(ids) > 6 else "")


def prepare(
    path: str | Path, max_length: int, length_flags: str, chat_template: str | None, trust_remote_code: bool
) -> Prepared:
    """Reads tokenizer and configuration of a model folder or hub name, no weights.

    Args:
        max_length: tokens of the longest sequence the stage will make.
        length_flags: the flags that decide it, for the error.
        chat_template: a built-in name or a jinja file, used where the tokenizer has no template of its own.

    Raises:
        UserError: no tokenizer, no template, or more positions asked for than the model has.
    """
    config = models.read_config(path, trust_remote_code)
    tokenizer = models.load_tokenizer(path, trust_remote_code)
    models.check_length(config, max_length, length_flags)
    template = chat_format.ensure_template(tokenizer, chat_template)
    stop_ids = chat_format.stop_ids(tokenizer, models.stop_ids_of(path, config))
    _, _, pad_note = choose_pad(tokenizer, config.get_text_config().vocab_size, stop_ids)
    return Prepared(tokenizer, config, stop_ids, f"template: {template}; {pad_note}")


# ---- does a tokenizer give text back?

_ROWS = 256  # that are looked at, from a file of any size
_GROUPS, _GROUP_ROWS = 8, 20_000  # parts of a large file that they are taken from, and rows read there
_LENGTH = 2000  # characters of one text
# Shares of what may be lost. Legitimate tokenizers change letter case, accents, spacing and rare characters.
_LOST_CHARACTERS, _LOST_SPACES = 0.1, 0.2


def sample(file: Path) -> list[tuple[int, str]]:
    """(row, text) of the texts of about 256 rows, from all over a prepared file."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    columns = [name for name in ("messages", "prompt", "chosen", "rejected") if name in parquet.schema_arrow.names]
    sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
    groups = range(0, len(sizes), -(-len(sizes) // _GROUPS) or 1)
    every = max(1, sum(min(sizes[group], _GROUP_ROWS) for group in groups) // _ROWS)
    found = []
    for group in groups:
        batches = parquet.iter_batches(1000, row_groups=[group], columns=columns)
        read = (row for batch in itertools.islice(batches, _GROUP_ROWS // 1000) for row in batch.to_pylist())
        for number, row in itertools.islice(enumerate(read, sum(sizes[:group])), 0, None, every):
            found += [(number, text) for text in texts_of(row)]
    return found


def texts_of(row: dict) -> list[str]:
    """What a row's messages say."""
    lists = [value for name in ("messages", "prompt", "chosen", "rejected") if (value := row.get(name))]
    contents = [message.get("content") for messages in lists for message in messages]
    return [content[:_LENGTH] for content in contents if isinstance(content, str)]


def check_round_trip(tokenizer, texts: Iterable[tuple[int, str]], whose: str) -> str | None:
    """Encodes and decodes texts and compares. A line on what comes back changed, for people; None if nothing does.

    A tokenizer may lower-case, drop accents or signs it does not know, and squeeze spaces: that is said. One that loses
    words' spaces or many characters is of another kind than its files, or of another language than the data, and what
    is trained on its tokens is not the text.

    Args:
        texts: (row, text).
        whose: the file that the rows are of, or the flag of the tokenizer, for people.

    Raises:
        UserError: names the first such row, and what becomes of it.
    """
    letters = lost = spaced = 0
    changed, joined, bad, rows = {}, {}, {}, set()
    for row, text in texts:
        rows.add(row)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        words, words_back = len(text.split()), len(back.split())
        known = back.replace(tokenizer.unk_token, " ") if tokenizer.unk_token else back
        wanted, seen = _letters(text), _letters(known)
        away = min(wanted.total(), max((wanted - seen).total(), (seen - wanted).total()))
        letters, lost, spaced = letters + wanted.total(), lost + away, spaced + (words > 2)
        if back.lstrip(" ") != text.lstrip(" "):
            changed.setdefault(row, (text, back))
        if words > 2 and words_back < words / 2:
            joined[row] = joined.get(row, 0) + 1
            bad.setdefault("spaces", (row, text, back))
        if away > _LOST_CHARACTERS * wanted.total():
            bad.setdefault("characters", (row, text, back))
    what = None
    if lost > _LOST_CHARACTERS * letters:
        what = "characters"
        said = f"{lost / letters:.0%} of the characters are lost or others"
    elif sum(joined.values()) > _LOST_SPACES * spaced:
        what = "spaces"
        said = f"words lose the spaces between them in {len(joined)} of {len(rows)} rows looked at"
    if what:
        row, text, back = bad[what]
        name = type(tokenizer).__name__
        why = "take a model whose tokenizer knows this language and script"
        if _reads_alone(tokenizer, text):
            why = (
                f"transformers opens it as {name} for this type of model, and its tokenizer.json, which gives the text "
                "back, is of another kind: take a tokenizer that was made for this type of model"
            )
        raise UserError(
            f"{whose}: the tokenizer ({name}) does not give the text back: {said}; row {row}, {text[:60]!r}, becomes "
            f"{back[:60]!r}; {why}"
        )
    if not changed:
        return None
    row, (text, back) = next(iter(changed.items()))
    at = next((i for i, pair in enumerate(zip(text, back, strict=False)) if pair[0] != pair[1]), len(back))
    was, becomes = (x[max(0, at - 10) : at + 20] for x in (text, back))
    return (
        f"tokenizer: {len(changed)} of {len(rows)} rows looked at come back changed ({whose}), first row {row}: "
        f"{was!r} as {becomes!r}; {lost / max(1, letters):.1%} of the characters are lost or others"
    )


def _letters(text: str) -> collections.Counter:
    """The characters of a text, whatever their case, accents and form; no spaces, no control characters."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return collections.Counter(
        c for c in plain if not c.isspace() and unicodedata.category(c) not in ("Mn", "Cc", "Cf")
    )


def _reads_alone(tokenizer, text: str) -> bool:
    """Whether the tokenizer's `tokenizer.json` gives a text back that its class does not."""
    from transformers import PreTrainedTokenizerFast

    file = Path(tokenizer.name_or_path or "") / "tokenizer.json"
    if not file.is_file():
        return False
    try:
        alone = PreTrainedTokenizerFast(tokenizer_file=str(file))
        back = alone.decode(alone(text, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
    except Exception:  # a damaged file: not what is wrong here
        return False
    return back.strip() == text.strip()


# ---- the pad token

_PAD_NAMES = ("<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|fim_pad|>", "<|vision_pad|>")
_RESERVED_PREFIXES = ("<|reserved_special_token_", "<|reserved_", "<reserved_", "<unused", "[unused")


def choose_pad(tokenizer, num_embeddings: int, extra_stop_ids: tuple[int, ...] = ()) -> tuple[int, bool, str]:
    """Give the tokenizer a pad token that is not a stop token; return (id, whether a token was added, words to print).

    With pad == EOS, other people's code drops the EOS from labels, masks and end-of-sequence look-ups. Taken, in
    this order: the present pad token; a reserved token; <unk> where the tokenizer can spell any text without it;
    a new token, which costs nothing where the embedding has a spare row. `num_embeddings` is the model's rows;
    with a new id beyond it the caller has to grow the embedding to id + 1.
    """
    stops = {chat_format.turn_end_id(tokenizer), tokenizer.eos_token_id, *extra_stop_ids}
    taken = stops | {tokenizer.bos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in stops:
        return tokenizer.pad_token_id, False, f"pad token {tokenizer.pad_token!r}, the tokenizer's own"

    markers = {t: i for t, i in chat_format.marker_ids(tokenizer).items() if i not in taken and i < num_embeddings}
    reserved = sorted((t for t in markers if t.startswith(_RESERVED_PREFIXES)), key=markers.get)
    for text in [t for t in _PAD_NAMES if t in markers] + reserved:
        tokenizer.pad_token = text
        return markers[text], False, f"pad token {text!r}, a reserved token of the tokenizer"

    unk = tokenizer.unk_token_id
    if unk is not None and unk not in taken and unk < num_embeddings:
        # A byte-level vocabulary never yields <unk>; elsewhere it is a real token of real texts.
        rare = tokenizer("\u4e2d\U0001f9ff\u0378\ue000\U0010fffd\x07", add_special_tokens=False)["input_ids"]
        if unk not in rare:
            tokenizer.pad_token = tokenizer.unk_token
            return unk, False, f"pad token {tokenizer.unk_token!r}, which this tokenizer needs for no text"

    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    pad_id = tokenizer.pad_token_id
    if pad_id < num_embeddings:
        return pad_id, True, f"pad token '<|pad|>' added as id {pad_id}, a spare row of the embedding"
    grow = f"the embedding grows from {num_embeddings} to {pad_id + 1} rows"
    return pad_id, True, f"pad token '<|pad|>' added as id {pad_id}: {grow}"
