"""Step 1: supervised fine-tuning. Teaches a base model to answer, by showing it answers.

Reads   data/sft (step 0) and a causal language model: a folder or a hub name.
Writes  a HF causal-LM folder with tokenizer, chat template and stage.json; beside them metrics.jsonl, timings.jsonl.
Run     python step1_sft/train.py --model data/base_model --data data --output_dir models/sft
        deepspeed step1_sft/train.py ...      torchrun --nproc_per_node 8 step1_sft/train.py ...
Left out: packing several conversations into one row.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402


def parse_args(argv=None):
    # fmt: off
    parser = cli.Parser(__doc__, stages=("sft",))
    group = parser.add_argument_group("model and data")
    group.add_argument("--model_name_or_path", "--model", required=True, metavar="DIR", help="base model: a folder or hub name")
    group.add_argument("--max_length", type=cli.positive, default=1024, help="tokens of a conversation; what is longer is cut and counted")
    cli.add_run_flags(parser, output_dir="models/sft")
    cli.add_model_flags(parser)
    cli.add_batch_flags(parser, rows="conversations")
    cli.add_saving_flags(parser, steps="optimizer steps")
    cli.add_optim_flags(parser, learning_rate=1e-5)
    cli.add_lora_flags(parser, dropout=True)
    cli.add_engine_flags(parser)
    # fmt: on
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()

    # 1. Look at what is given, before anything heavy is loaded or written.
    from common import checkpoint, data, hub

    checkpoint.check_output(args.output_dir)
    cli.check_files(args)
    parent = checkpoint.require_stage(args.model_name_or_path, "--model", wanted=("base", "sft", "dpo", "rlhf-actor"))
    files = data.locate_or_inherit(args.data, parent, "sft", args.data_split)
    upload = cli.pick(hub.Hub, args)
    hub.check(upload)

    from common import adapters, distributed, engine, models, resume, runs, supervised, tokenizer, tokens
    from common.batches import collate_sft
    from step1_sft.loss import sft_loss

    device = distributed.start(args.timeout_minutes, args.seed)
    dtype, why_dtype = models.choose_dtype(args.dtype, device)
    engine_options = cli.pick(engine.Engine, args, dtype=dtype)
    batches = cli.pick(supervised.Batches, args)
    engine.check(engine_options, cli.pick(engine.Optim, args), batches.sizes())

    # 2. Text to tokens: the loss is on the assistant's turns only, each turn's end included.
    text = tokenizer.prepare(
        args.model_name_or_path, args.max_length, "--max_length", args.chat_template, args.trust_remote_code
    )
    remarks = text.check(files.train)
    cache = cli.pick(tokens.Cache, args)
    train, report = tokens.load("sft", text.tokenizer, files, files.train, args.max_length, cache)
    held_out = []
    if files.eval:
        held_out, _ = tokens.load("sft", text.tokenizer, files, files.eval, args.max_length, cache)

    total_steps = batches.steps(len(train))
    notes = [*files.notes, str(report), text.note, *remarks, f"precision {why_dtype}"]
    parents = {"model": args.model_name_or_path}
    identity = resume.identity("sft", vars(args), files.hash, parents)
    run = runs.Run(
        cli.pick(runs.Reporting, args), cli.pick(resume.Saving, args), "step 1 SFT", total_steps, identity, notes
    )
    log = run.log

    # 3. The model in its engine.
    def load(zero3):
        hf = models.load_causal_lm(
            args.model_name_or_path,
            dtype,
            device=device,
            zero3=zero3,
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
        )
        for line in text.fit(hf, zero3, cli.pick(adapters.Lora, args), args.seed):
            log.say(line)
        return models.LanguageModel(hf)

    model = engine.TrainedModel(load, cli.pick(engine.Optim, args), engine_options, total_steps, device)
    log.say(f"{model.describe()}; {len(train)} conversations, {batches.words(len(train))}")

    # 4. Train: a step's loss is its mean over all answer tokens, however they are cut into micro-batches and ranks.
    task = supervised.Task(
        length=lambda example: len(example.ids),
        collate=lambda examples, filler: collate_sft(examples, text.pad_id, filler),
        loss=lambda batch: sft_loss(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]),
        count=lambda examples: sum(sum(example.mask[1:]) for example in examples),
        figures=lambda sums, count: {
            "mean_token_accuracy": sums["correct"] / count,
            "entropy": sums["entropy"] / count,
        },
    )
    record, _ = supervised.train(model, train, held_out, task, batches, run)

    # 5. A whole HF folder, and last of all stage.json.
    write = model.writer(text, log.say)
    if distributed.is_main():
        checkpoint.publish(
            run.path,
            "sft",
            write,
            args=vars(args),
            seed=args.seed,
            parents=parents,
            data=files.record(),
            metrics=record,
        )
        hub.push(upload, run.path, log.say)
    # Step 2 would look for pairs in the same folder: without them it is the wrong thing to name.
    if files.feeds("preference"):
        run.finish(f"python step2_reward/train.py --model {run.path} --output_dir {run.path.parent / 'reward'}")
    else:
        run.finish(f"python scripts/chat.py --model {run.path} (these data have no pairs for step 2)")


if __name__ == "__main__":
    cli.launch(main)
