"""Step 2: the reward model. Learns from pairs which of two answers people prefer, as one score for an answer.

Reads   data/preference (step 0) and the step-1 folder, or any causal LM or one-label classifier.
Writes  a HF sequence-classification folder (num_labels=1) with reward_stats.json and stage.json; metrics.jsonl beside.
Run     python step2_reward/train.py --model models/sft --output_dir models/reward
        deepspeed step2_reward/train.py ...      torchrun --nproc_per_node 8 step2_reward/train.py ...
Left out: several labels or rubrics at once, unpaired preferences.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402


def parse_args(argv=None):
    # fmt: off
    parser = cli.Parser(__doc__, stages=("reward",))
    group = parser.add_argument_group("model and data")
    group.add_argument("--model_name_or_path", "--model", required=True, metavar="DIR", help="step-1 folder, or any HF model: folder or hub name")
    group.add_argument("--max_length", type=cli.positive, default=1024, help="tokens of prompt + answer; a longer answer is cut and counted")
    cli.add_run_flags(parser, output_dir="models/reward")
    cli.add_model_flags(parser)
    cli.add_batch_flags(parser, rows="pairs")
    cli.add_saving_flags(parser, steps="optimizer steps")
    group = parser.add_argument_group("loss")
    group.add_argument("--margin_coef", type=cli.number(0), default=1.0, help="times the margins of the data, which are then asked of chosen - rejected; 0: margins are ignored")
    group.add_argument("--center_rewards_coefficient", type=cli.number(0), default=0.0, help="weight of (chosen + rejected)^2, which holds scores near 0")
    cli.add_optim_flags(parser, learning_rate=1e-5, lr_scheduler_type="linear")
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
    parent = checkpoint.require_stage(
        args.model_name_or_path, "--model", wanted=("sft", "base", "dpo", "rlhf-actor", "reward")
    )
    files = data.locate_or_inherit(args.data, parent, "preference", args.data_split)
    upload = cli.pick(hub.Hub, args)
    hub.check(upload)

    from common import adapters, distributed, engine, models, resume, runs, supervised, tokenizer, tokens
    from common.batches import collate_pairs
    from step2_reward.loss import pairwise_loss

    device = distributed.start(args.timeout_minutes, args.seed)
    dtype, why_dtype = models.choose_dtype(args.dtype, device)
    engine_options = cli.pick(engine.Engine, args, dtype=dtype)
    batches = cli.pick(supervised.Batches, args)
    engine.check(engine_options, cli.pick(engine.Optim, args), batches.sizes())

    # 2. Text to tokens: prompt + answer + turn end, exactly what the actor will produce in step 3.
    text = tokenizer.prepare(
        args.model_name_or_path, args.max_length, "--max_length", args.chat_template, args.trust_remote_code
    )
    remarks = text.check(files.train)
    cache = cli.pick(tokens.Cache, args)
    train, report = tokens.load("preference", text.tokenizer, files, files.train, args.max_length, cache)
    held_out = train
    if files.eval:
        held_out, _ = tokens.load("preference", text.tokenizer, files, files.eval, args.max_length, cache)

    total_steps = batches.steps(len(train))
    notes = [*files.notes, str(report), text.note, *remarks, f"precision {why_dtype}"]
    parents = {"model": args.model_name_or_path}
    identity = resume.identity("reward", vars(args), files.hash, parents)
    run = runs.Run(
        cli.pick(runs.Reporting, args),
        cli.pick(resume.Saving, args),
        "step 2 reward model",
        total_steps,
        identity,
        notes,
    )
    log = run.log
    if not files.eval:
        log.say("no preference/eval data: accuracy and reward statistics are of the training pairs")

    # 3. The model in its engine: the language model with a scalar head in place of the vocabulary.
    def load(zero3):
        model, fresh = models.load_scalar_model(
            args.model_name_or_path,
            dtype,
            device=device,
            zero3=zero3,
            attn_implementation=args.attn_implementation,
            trust_remote_code=args.trust_remote_code,
            fresh_head_std=models.fresh_reward_head_std,
            seed=args.seed,
        )
        for line in text.fit(model.hf, zero3, cli.pick(adapters.Lora, args), args.seed):
            log.say(line)
        log.say("scalar head: fresh" if fresh else "scalar head: as trained before")
        return model

    model = engine.TrainedModel(load, cli.pick(engine.Optim, args), engine_options, total_steps, device)
    log.say(f"{model.describe()}; {len(train)} pairs, {batches.words(len(train))}")

    # 4. Train: a step's loss is its mean over all pairs, however they are cut into micro-batches and ranks.
    def loss(batch):
        values = model(batch["input_ids"], batch["attention_mask"])
        chosen, rejected = values.gather(1, batch["last"][:, None]).squeeze(1).chunk(2)
        margin = args.margin_coef * batch["margin"]
        return pairwise_loss(chosen, rejected, margin, batch["weight"], center_coef=args.center_rewards_coefficient)

    def figures(sums, count):
        return {
            "accuracy": sums["accuracy"] / count,
            "margin": sums["margin"] / count,
            "min_reward": -sums["max_minus_score"],
            "mean_reward": (sums["chosen"] + sums["rejected"]) / (2 * count),
            "max_reward": sums["max_score"],
        }

    task = supervised.Task(
        length=lambda pair: len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)),
        collate=lambda pairs, filler: collate_pairs(pairs, text.pad_id, filler),
        loss=loss,
        count=len,
        figures=figures,
        rows=2,
    )
    record, sums = supervised.train(model, train, held_out, task, batches, run)

    # 5. A whole HF folder with its statistics, and last of all stage.json.
    write_model = model.writer(text, log.say)
    mean = record["eval_mean_reward"]
    variance = sums["squares"] / (2 * len(held_out)) - mean**2
    stats = {"mean": mean, "std": max(0.0, variance) ** 0.5, "n": 2 * len(held_out), "data_hash": files.hash}

    def write(staging: Path) -> None:
        write_model(staging)
        checkpoint.atomic_write_text(staging / "reward_stats.json", json.dumps(stats, indent=1) + "\n")

    if distributed.is_main():
        checkpoint.publish(
            run.path,
            "reward",
            write,
            args=vars(args),
            seed=args.seed,
            parents=parents,
            data=files.record(),
            metrics=record,
        )
        hub.push(upload, run.path, log.say)
    log.say(f"{'held-out' if files.eval else 'training'} accuracy {record['eval_accuracy']:.3f}")
    # What answered like this model's rows is the actor; of a reward model that was trained on, it is not known.
    actor = "ACTOR" if parent and parent["stage"] == "reward" else args.model_name_or_path
    hint = f"python step3_rlhf/train.py --actor {actor} --critic {run.path}"
    if (rlhf := run.path.parent / "rlhf") != Path("models/rlhf"):
        hint += f" --output_dir {rlhf}"
    run.finish(hint if files.feeds("prompts") else f"{hint} --data PROMPTS (these data have no prompts for step 3)")


if __name__ == "__main__":
    cli.launch(main)
