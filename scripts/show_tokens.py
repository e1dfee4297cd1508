"""Prints rows of prepared data as a model reads them, token by token, with « » around what is trained.

    python scripts/show_tokens.py --model models/sft --data data
    python scripts/show_tokens.py --model BASE_MODEL --chat_template chatml --data data --stage preference --rows 3

Reads   tokenizer and configuration of a model, no weights; a stage's prepared rows. Writes nothing

A model that never stops was never shown how: the last trained token of an answer has to be its stop token. A space is
printed as a dot, a newline as \\n, and the tokens of one character (an emoji may take four) as that character.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument_group("what to show").add_argument
    flag("--model", required=True, metavar="DIR", help="model folder or hub name, for its tokenizer")
    flag("--data", required=True, metavar="DIR", help="step-0 folder, or a parquet file of it")
    flag("--stage", default="sft", choices=["sft", "preference", "prompts"], help="whose rows; default sft")
    flag("--rows", type=cli.positive, default=2, help="how many, from the first; default 2")
    flag("--max_length", type=cli.positive, default=512, help="tokens a row is cut at; default 512")
    flag("--chat_template", default=None, help="as in training: for a tokenizer that has none")
    cli.add_switch(parser, "--trust_remote_code", False, "run Python code that comes with a model from the hub")
    return parser.parse_args(argv)


def readable(tokenizer, ids: list[int], mask: list[bool]) -> str:
    shown, character = [], []
    for i, token in enumerate(ids):
        character.append(token)
        text = tokenizer.decode(character, clean_up_tokenization_spaces=False)
        if tokenizer.convert_ids_to_tokens(token).startswith("\u2581") and not text.startswith(" "):
            text = " " + text  # decoders drop the space in front of what they are given
        if text.endswith("\ufffd") and i + 1 < len(ids) and mask[i] == mask[i + 1]:
            continue  # the first bytes of a character
        text = text.replace(" ", "\u00b7").replace("\n", "\\n")
        shown.append(f"\u00ab{text}\u00bb" if mask[i] else text)
        character = []
    return " ".join(shown)


def main() -> None:
    args = parse_args()
    from common import chat_format, data, tokenizer

    text = tokenizer.prepare(args.model, args.max_length, "--max_length", args.chat_template, args.trust_remote_code)
    file = data.locate(args.data, args.stage).train
    for line in text.check(file):
        print(line)
    batches = data.open_parquet(file).iter_batches(batch_size=args.rows)
    rows = itertools.islice((row for batch in batches for row in data.rows_of(batch)), args.rows)
    end = chat_format.turn_end_id(text.tokenizer)
    print(f"{text.note}; answers end in {text.tokenizer.decode([end])!r}, id {end}")
    for number, row in enumerate(rows):
        try:
            for name, ids, mask in sequences(chat_format, text.tokenizer, args.stage, row, args.max_length):
                kept, cut = ids[: args.max_length], mask[: args.max_length]
                ends = sum(token == end and trained for token, trained in zip(kept, cut, strict=True))
                counts = f"{len(ids)} tokens, {sum(cut)} trained, {ends} of them the stop token"
                limit = f", cut at --max_length {args.max_length}" if len(ids) > args.max_length else ""
                print(f"\n{name} {number}: {counts}{limit}\n{readable(text.tokenizer, kept, cut)}")
            tools = chat_format.tools_of(row)
            if tools and chat_format.leaves_out(text.tokenizer, row.get("messages") or row["prompt"], tools):
                print("(the chat template does not print this row's tools)")
        except chat_format.RowError as error:
            print(f"\nrow {number} is set aside: {error}")


def sequences(chat_format, tokenizer, stage: str, row: dict, max_length: int):
    """(name, ids, mask) of what a stage makes of a row. A reward model is trained on an answer as a whole."""
    tools = chat_format.tools_of(row)
    if stage == "sft":
        ids, mask, _ = chat_format.fit_conversation(tokenizer, row["messages"], max_length, tools)
        if True not in mask[:max_length]:
            raise chat_format.RowError(f"no answer begins within --max_length {max_length}")
        yield "conversation", ids, mask
        return
    fitted = chat_format.fit_prompt(tokenizer, row["prompt"], max_length - (stage == "preference"), tools)
    if fitted is None:
        raise chat_format.RowError(f"its prompt is over --max_length {max_length}, even without older turns")
    ids, messages = fitted
    if stage == "prompts":
        yield "prompt", ids, [False] * len(ids)
        return
    ids, *answers = chat_format.encode_pair(tokenizer, messages, row["chosen"], row["rejected"], tools)
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        yield name, ids + answer, [False] * len(ids) + [True] * len(answer)


if __name__ == "__main__":
    sys.exit(cli.run(main))
