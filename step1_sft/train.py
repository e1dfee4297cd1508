"""Step 1: supervised fine-tuning. Teaches a base model to answer, by showing it answers.

Reads   data/sft (step 0) and a causal language model: a folder or a hub name.
Writes  a HF causal-LM folder with tokenizer, chat template and stage.json; beside them metrics.jsonl, timings.jsonl.
Run     python step1_sft/train.py --model data/base_model --data data --output_dir models/sft
        deepspeed step1_sft/train.py ...      torchrun --nproc_per_node 8 step1_sft/train.py ...
Left out: packing several conversations into one row, resuming inside a run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402


def parse_args(argv=None):
    # fmt: off
    parser = cli.Parser(__doc__)
    group = parser.add_argument_group("model and data")
    group.add_argument("--model_name_or_path", "--model", required=True, metavar="DIR", help="base model: a folder or hub name")
    group.add_argument("--max_length", type=cli.positive, default=1024, help="tokens of a conversation; what is longer is cut and counted")
    cli.add_run_flags(parser, output_dir="models/sft")
    cli.add_model_flags(parser)
    cli.add_batch_flags(parser, rows="conversations")
    cli.add_optim_flags(parser, learning_rate=1e-5)
    cli.add_engine_flags(parser)
    # fmt: on
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()

    # 1. Look at what is given, before anything heavy is loaded or written.
    from common import checkpoint, data

    parent = checkpoint.require_stage(args.model_name_or_path, "--model", wanted=("base", "sft", "dpo", "rlhf-actor"))
    files = data.locate_or_inherit(args.data, parent, "sft", args.data_split)

    from common import chat_format, distributed, engine, models, runs, supervised
    from step1_sft.loss import sft_loss

    device = distributed.start(args.timeout_minutes, args.seed)
    dtype, why_dtype = models.choose_dtype(args.dtype, device)
    engine_options = cli.pick(engine.Engine, args, dtype=dtype)
    batches = cli.pick(supervised.Batches, args)
    engine.check(engine_options, cli.pick(engine.Optim, args), batches.sizes())

    # 2. Text to tokens: the loss is on the assistant's turns only, each turn's end included.
    config = models.read_config(args.model_name_or_path, args.trust_remote_code)
    tokenizer = models.load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    models.check_length(config, args.max_length, "--max_length")
    template = chat_format.ensure_template(tokenizer, args.chat_template)
    stop_ids = chat_format.stop_ids(tokenizer, models.stop_ids_of(args.model_name_or_path))
    _, _, pad_note = chat_format.choose_pad(tokenizer, config.get_text_config().vocab_size, stop_ids)
    train, report = data.tokenise_sft(tokenizer, data.read_rows(files.train), args.max_length)
    held_out, _ = (
        data.tokenise_sft(tokenizer, data.read_rows(files.eval), args.max_length) if files.eval else ([], None)
    )

    total_steps = batches.steps(len(train))
    notes = [*files.notes, str(report), f"template: {template}; {pad_note}", f"precision {why_dtype}"]
    folder, log = runs.start(cli.pick(runs.Reporting, args), "step 1 SFT", total_steps, notes)

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
        if models.grow_embeddings(hf, len(tokenizer), zero3):
            log.say(f"embeddings: grown to {len(tokenizer)} rows, one for each token")
        models.set_special_tokens(hf, tokenizer, stop_ids)
        return models.LanguageModel(hf)

    model = engine.TrainedModel(load, cli.pick(engine.Optim, args), engine_options, total_steps, device)
    log.say(f"{model.describe()}; {len(train)} conversations, {batches.size} a step, {total_steps} steps")

    # 4. Train: a step's loss is its mean over all answer tokens, however they are cut into micro-batches and ranks.
    task = supervised.Task(
        length=lambda example: len(example.ids),
        collate=lambda examples, filler: data.collate_sft(examples, tokenizer.pad_token_id, filler),
        loss=lambda batch: sft_loss(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]),
        count=lambda examples: sum(sum(example.mask[1:]) for example in examples),
        figures=lambda sums, count: {
            "mean_token_accuracy": sums["correct"] / count,
            "entropy": sums["entropy"] / count,
        },
    )
    record, _ = supervised.train(model, train, held_out, task, batches, log)

    # 5. A whole HF folder, and last of all stage.json.
    state = model.state()
    if distributed.is_main():
        checkpoint.publish(
            folder.path,
            "sft",
            lambda staging: models.save_pretrained(model.module.hf, staging, state, tokenizer),
            args=vars(args),
            seed=args.seed,
            parents={"model": args.model_name_or_path},
            data=files.record(),
            metrics=record,
        )
    runs.finish(folder, log, f"python step2_reward/train.py --model {folder.path} --output_dir models/reward")


if __name__ == "__main__":
    cli.launch(main)
