"""Step 0: prepare data. Turns a source into the files that steps 1 to 3 read, and shows what became of every row.

Reads   --dataset: `tiny`, `tiny_zh` or both (built in), or local json / jsonl / csv / parquet / arrow files or folders, or hub names.
Writes  OUTPUT_DIR/{sft,preference,prompts,pretrain}/{train,eval}.parquet (those that have rows), manifest.json,
        preview.md; for the tiny sets, or with --train_tokenizer, also base_model/, an untrained model with its tokenizer.
Run     python step0_data/prepare.py --dataset tiny --output_dir data
        python step0_data/prepare.py --dataset pairs.jsonl more.parquet --split 2,4,4 --output_dir data
        python step0_data/prepare.py --dataset Anthropic/hh-rlhf --data_dir harmless-base --output_dir data
Left out: tokens (each stage owns its tokenizer), near-duplicate search, filters by quality or language.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.errors import UserError  # noqa: E402
from step0_data import formats, output, sources, split, toy  # noqa: E402


def parse_args(argv=None):
    # fmt: off
    aliases = {"--dataset_name": "--dataset", "--data_path": "--dataset", "--data": "--dataset", "--data_split": "--split", "--max_samples": "--max_rows"}
    parser = cli.Parser(__doc__, aliases=aliases)
    group = parser.add_argument_group("source")
    group.add_argument("--dataset", nargs="+", default=["tiny"], metavar="SOURCE", help="tiny (English), tiny_zh (Chinese) or both; or files, folders or hub names (NAME[:CONFIG or FOLDER][@SPLIT])")
    group.add_argument("--data_dir", default=None, metavar="FOLDER", help="a folder inside the source, such as harmless-base of Anthropic/hh-rlhf; default: all of it")
    group.add_argument("--max_rows", type=cli.natural, default=0, help="use the first N rows of each source, of its train and its test part each (tiny: of each file written); 0: all")
    group.add_argument("--on_bad_row", default="stop", choices=["stop", "skip"], help="a row that cannot be used: stop naming it, or set it aside and count it")
    cli.add_switch(group, "--drop_duplicates", False, "set aside rows that repeat an earlier one; they are counted either way")
    group = parser.add_argument_group("who gets which row (files and hub; the tiny set has its own split)")
    group.add_argument("--split", type=cli.shares, default="2,4,4", metavar="S,P,R", help="shares of sft, preference and prompts in the rows that can serve several")
    group.add_argument("--stages", nargs="+", default=None, choices=formats.STAGES, help="feed only these stages; default: what each form of row feeds")
    group.add_argument("--eval_fraction", type=_fraction, default=0.05, help="share of prompts kept for evaluation, in every stage; not of sources with a test part of their own")
    group = parser.add_argument_group("run")
    group.add_argument("--output_dir", default="data", metavar="DIR", help="where the data go")
    cli.add_switch(group, "--overwrite", False, "replace prepared data that are in --output_dir")
    group.add_argument("--seed", type=int, default=1, help="of the tiny set, its base model, and --shuffle_preferences; splits do not depend on it")
    group.add_argument("--train_tokenizer", type=cli.natural, default=0, metavar="VOCAB", help="make OUTPUT_DIR/base_model for these data: a tokenizer of VOCAB pieces and an untrained model of about a million parameters; 0: none")
    cli.add_switch(group, "--shuffle_preferences", False, "negative control: a coin decides which answer of each pair is chosen")
    # fmt: on
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    tiny_sets = [name for name in args.dataset if name in toy.SETS]
    is_tiny = bool(tiny_sets) and tiny_sets == list(dict.fromkeys(args.dataset))
    if tiny_sets and (not is_tiny or args.data_dir):
        raise UserError(
            "--dataset tiny stands alone, or with tiny_zh: they bring their own split and base model; "
            "prepare other sources apart"
        )
    if is_tiny and args.train_tokenizer:
        raise UserError("--train_tokenizer is for data of your own: the tiny sets bring their tokenizer; leave it out")
    has_base_model = is_tiny or args.train_tokenizer > 0

    # 1. Look at what is there. The same request on the same files is done already; anything else is not overwritten.
    settings = {k: v for k, v in vars(args).items() if k not in ("output_dir", "overwrite", "config", "local_rank")}
    datasets = sources.inside(args.dataset, args.data_dir)
    inputs = {} if is_tiny else split.hash_inputs(datasets)
    with output.OutputFolder(args.output_dir, settings, inputs, args.overwrite) as folder:
        if folder.already_done:
            print(f"{args.output_dir}: already done, with the same settings on the same files")
            print(output.next_command(args.output_dir, folder.manifest["stages"], has_base_model))
            return
        print(f"writing to {args.output_dir}")

        # 2. Make or read the rows of every stage; each row read is in a stage or in the ledger.
        if is_tiny:
            stages, ledger = toy.make_tiny(args.seed, tiny_sets), []
            stages = {s: {part: rows[: args.max_rows or None] for part, rows in p.items()} for s, p in stages.items()}
        else:
            rule = split.Rule(args.split, tuple(args.stages or ()), args.eval_fraction)
            skip_bad = args.on_bad_row == "skip"
            stages, ledger = split.collect(datasets, rule, args.max_rows, skip_bad, args.drop_duplicates)

        # 3. The negative control: preferences that say nothing.
        if args.shuffle_preferences:
            for part, rows in stages["preference"].items():
                swapped = split.shuffle_preferences(rows, f"{args.seed}/{part}")
                print(
                    f"negative control: chosen and rejected swapped in {swapped} of {len(rows)} preference/{part} pairs"
                )

        # 4. Write all of it under a temporary name, then move it in; manifest.json comes last.
        with folder.staging() as staging:
            output.write_stages(staging, stages)
            if has_base_model:
                from step0_data import tiny_model

                if is_tiny:
                    texts = toy.tokenizer_texts(args.seed, tiny_sets)
                    tiny_model.write_base_model(staging / "base_model", texts, args.seed, toy.vocab_size(tiny_sets))
                else:
                    tiny_model.write_base_model_for(staging, args.seed, args.train_tokenizer)
            folder.write_manifest(staging, stages, ledger)

    # 5. What came out, and what to do next.
    print(output.summary(stages, ledger))
    if is_tiny:
        accuracy = toy.oracle_accuracy(stages["preference"]["eval"])
        print(f"the gold rubric agrees with {accuracy:.3f} of preference/eval: the most step 2 can reach")
    print(output.next_command(args.output_dir, output.counts(stages), has_base_model))


def _fraction(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return float(text)


if __name__ == "__main__":
    sys.exit(cli.run(main))
