"""Step 0: prepare data. Turns a source into the files that steps 1 to 3 read, and shows what became of every row.

Reads   --dataset: `tiny`, `tiny_zh` or both (built in), or local json / jsonl / csv / parquet / arrow files or folders, or hub names.
Writes  OUTPUT_DIR/{sft,preference,prompts,pretrain}/{train,eval}.parquet (those that have rows), manifest.json,
        preview.md, rejected.jsonl (bad rows that were skipped); for the tiny sets, or with --train_tokenizer,
        also base_model/, an untrained model with its tokenizer.
Run     python step0_data/prepare.py --dataset tiny --output_dir data
        python step0_data/prepare.py --dataset pairs.jsonl more.parquet --split 2,4,4 --output_dir data
        python step0_data/prepare.py --dataset Anthropic/hh-rlhf --data_dir harmless-base --output_dir data
Left out: tokens (each stage owns its tokenizer), near-duplicate search, filters by quality or language.
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.printing import say  # noqa: E402
from step0_data import columns, dataset_info, formats, output, sources, split, toy  # noqa: E402
from step0_data.spool import Spool, rejected  # noqa: E402


def parse_args(argv=None):
    # fmt: off
    aliases = {"--dataset_name": "--dataset", "--data_path": "--dataset", "--data": "--dataset", "--data_split": "--split", "--max_samples": "--max_rows"}
    parser = cli.Parser(__doc__, aliases=aliases)
    group = parser.add_argument_group("source")
    group.add_argument("--dataset", nargs="+", default=None, metavar="SOURCE", help="tiny (English), tiny_zh (Chinese) or both; or files, folders or hub names (NAME[:CONFIG or FOLDER][@SPLIT]); each may have columns of its own, such as FILE:prompt=question,chosen=good, and end in a weight: @0.3 keeps that share of its prompts, @2 writes its training rows twice; default: tiny")
    group.add_argument("--sft_dataset", nargs="+", default=[], metavar="SOURCE", help="sources for step 1 only, beside --dataset or in its place")
    group.add_argument("--preference_dataset", nargs="+", default=[], metavar="SOURCE", help="the same for step 2")
    group.add_argument("--prompts_dataset", nargs="+", default=[], metavar="SOURCE", help="the same for step 3")
    group.add_argument("--pretrain_dataset", nargs="+", default=[], metavar="SOURCE", help="the same for pretraining text")
    group.add_argument("--dataset_info", default=None, metavar="FILE", help="LLaMA-Factory's dataset_info.json: sources may be names of its entries too, with their columns")
    group.add_argument("--data_dir", default=None, metavar="FOLDER", help="a folder inside the source, such as harmless-base of Anthropic/hh-rlhf; default: all of it")
    group.add_argument("--max_rows", type=cli.natural, default=0, help="use the first N rows of each source, of its train and its test part each (tiny: of each file written); 0: all")
    group.add_argument("--format", default=None, choices=[form.name for form in formats.FORMS], help="the form of all rows; default: recognised row by row from the columns")
    group.add_argument("--columns", nargs="+", type=_columns, default=None, metavar="OURS=THEIRS", help="names of columns, before the form is looked for, such as prompt=question chosen=good rejected=bad; a column of our name is replaced; not of sources that have columns of their own")
    group.add_argument("--on_bad_row", default="stop", choices=["stop", "skip"], help="a row that cannot be used: stop naming it, or count it and set it aside in rejected.jsonl")
    cli.add_switch(group, "--drop_duplicates", False, "set aside rows that repeat an earlier one; they are counted either way")
    group = parser.add_argument_group("who gets which row (files and hub; the tiny set has its own split)")
    group.add_argument("--split", type=cli.shares, default="2,4,4", metavar="S,P,R", help="shares of sft, preference and prompts in the rows that can serve several")
    group.add_argument("--stages", nargs="+", default=None, choices=formats.STAGES, help="feed only these stages; default: what each form of row feeds")
    group.add_argument("--eval_fraction", type=_fraction, default=0.05, help="share of prompts kept for evaluation, in every stage; not of sources with a test part of their own")
    group = parser.add_argument_group("preview.md")
    group.add_argument("--tokenizer", default=None, metavar="MODEL", help="folder or hub name: show lengths in tokens, and rows as this model will read them; default: text only (tiny: its base model)")
    group.add_argument("--chat_template", default=None, metavar="NAME", help="built-in name or jinja file, for a --tokenizer without a template of its own")
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", default="data", metavar="DIR", help="where the data go")
    cli.add_switch(group, "--overwrite", False, "replace prepared data that are in --output_dir")
    group.add_argument("--seed", type=cli.seed, default=1, help="of the tiny set, its base model, and --shuffle_preferences; splits do not depend on it")
    group.add_argument("--train_tokenizer", type=cli.natural, default=0, metavar="VOCAB", help="make OUTPUT_DIR/base_model for these data: a tokenizer of VOCAB pieces and an untrained model of about a million parameters; 0: none")
    cli.add_switch(group, "--shuffle_preferences", False, "negative control: a coin decides which answer of each pair is chosen")
    # fmt: on
    args = parser.parse_args(argv)
    if args.dataset is None:
        args.dataset = [] if any(_own(args).values()) else ["tiny"]
    if args.dataset_info:
        lists = [args.dataset, *_own(args).values()]
        found = dataset_info.look_up(args.dataset_info, [name for it in lists for name in it], args.columns)
        for names in lists:
            names[:], found = found[: len(names)], found[len(names) :]
    return args


def _own(args) -> dict[str, list[str]]:
    """{stage: sources that feed it only}"""
    own = args.sft_dataset, args.preference_dataset, args.prompts_dataset, args.pretrain_dataset
    return dict(zip(formats.STAGES, own, strict=True))


def main() -> None:
    args = parse_args()
    tiny_sets = [name for name in args.dataset if name in toy.SETS]
    is_tiny = bool(tiny_sets) and tiny_sets == list(dict.fromkeys(args.dataset))
    own = _own(args)
    if tiny_sets and (not is_tiny or args.data_dir or args.format or args.columns or any(own.values())):
        raise UserError(
            "--dataset tiny stands alone, or with tiny_zh: they bring their own split and base model; "
            "prepare other sources apart"
        )
    if is_tiny and args.train_tokenizer:
        raise UserError("--train_tokenizer is for data of your own: the tiny sets bring their tokenizer; leave it out")
    has_base_model = is_tiny or args.train_tokenizer > 0
    if args.chat_template and not args.tokenizer:
        raise UserError("--chat_template goes with --tokenizer MODEL: name the model whose tokens are to be shown")

    from step0_data import preview

    tokenizer = preview.load_tokenizer(args.tokenizer, args.chat_template) if args.tokenizer else None

    # 1. Look at what is there. The same request on the same files is done already; anything else is not overwritten.
    settings = {k: v for k, v in vars(args).items() if k not in ("output_dir", "overwrite", "config", "local_rank")}
    plans = [] if is_tiny else sources.plan(sources.inside(args.dataset, args.data_dir))
    plans += [plan for stage, names in own.items() for plan in sources.plan(names, stage)]
    sources.check_outside(plans, args.output_dir)
    inputs = split.hash_inputs(plans)
    with output.OutputFolder(args.output_dir, settings, inputs, args.overwrite) as folder:
        if folder.already_done:
            say(f"{args.output_dir}: already done, with the same settings on the same files")
            _print_warnings(folder.manifest["warnings"])
            say(output.next_command(args.output_dir, folder.manifest["stages"], has_base_model))
            return
        say(f"writing to {args.output_dir}")

        # 2. Everything goes under a temporary name and is moved in at the end, manifest.json last.
        with folder.staging() as staging:
            spool, ledger = Spool(staging), []
            coins = {part: split.Coin(f"{args.seed}/{part}") for part in ("train", "eval")}

            def write(stage: str, part: str, row: dict, chars: int = 0) -> None:
                if args.shuffle_preferences and stage == "preference":
                    coins[part](row)  # the negative control: preferences that say nothing
                spool.add(stage, part, row, chars)

            # 3. Make or read the rows of every stage; each row read is in a stage or in the ledger.
            if is_tiny:
                stages = toy.make_tiny(args.seed, tiny_sets)
                for stage, parts in stages.items():
                    for part, rows in parts.items():
                        for row in rows[: args.max_rows or None]:
                            write(stage, part, row)
            else:
                rule = split.Rule(args.split, tuple(args.stages or ()), args.eval_fraction)
                with rejected(staging) as reject:
                    ledger = split.collect(
                        plans,
                        inputs,
                        rule,
                        args.max_rows,
                        args.on_bad_row == "skip",
                        args.drop_duplicates,
                        write,
                        reject,
                        functools.partial(formats.convert, form_name=args.format, names=columns.mapping(args.columns)),
                    )
                split.check_unchanged(plans, inputs)
            if args.shuffle_preferences:
                for part, coin in coins.items():
                    pairs = f"{coin.swapped} of {coin.pairs} preference/{part} pairs"
                    say(f"negative control: chosen and rejected swapped in {pairs}")

            # 4. Write all of it.
            spool.close()
            if has_base_model:
                from step0_data import tiny_model

                if is_tiny:
                    texts = toy.tokenizer_texts(args.seed, tiny_sets)
                    tiny_model.write_base_model(staging / "base_model", texts, args.seed, toy.vocab_size(tiny_sets))
                else:
                    tiny_model.write_base_model_for(staging, args.seed, args.train_tokenizer)
                if tokenizer is None:
                    tokenizer = preview.load_tokenizer(staging / "base_model", None)
            page, warnings = preview.page(staging, ledger, tokenizer)
            folder.write_manifest(staging, spool, ledger, page, warnings)

    # 5. What came out, and what to do next.
    say(output.summary(spool.counts(), ledger))
    if is_tiny:
        accuracy = toy.oracle_accuracy(stages["preference"]["eval"][: args.max_rows or None])
        say(f"the gold rubric agrees with {accuracy:.3f} of preference/eval: the most step 2 can reach")
    _print_warnings(warnings)
    say(output.next_command(args.output_dir, spool.counts(), has_base_model))


def _print_warnings(warnings: list[str]) -> None:
    for line in warnings:
        say(f"warning: {line}")


def _columns(text: str) -> str:
    try:
        return columns.pair_of_names(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


if __name__ == "__main__":
    sys.exit(cli.run(main))
