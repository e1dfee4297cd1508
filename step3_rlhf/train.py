"""Step 3: reinforcement learning from human feedback (PPO). The actor answers, the reward model scores, both learn.

Reads   data/prompts (step 0); --actor: the step-1 folder; --critic: the step-2 folder, which also scores the responses
        unless --reward names other sources (folders or FILE.py:FUNCTION); --ref: default, the actor's starting weights.
Writes  actor/ and critic/ (HF folders with stage.json); beside them metrics.jsonl, timings.jsonl, samples.jsonl.
Run     deepspeed step3_rlhf/train.py --actor models/sft --critic models/reward
        python step3_rlhf/train.py ...      torchrun --nproc_per_node 8 step3_rlhf/train.py ...
Left out: pipeline and expert parallelism.
"""

import argparse
import dataclasses
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli  # noqa: E402
from common.errors import UserError  # noqa: E402


def parse_args(argv=None):
    # fmt: off
    parser = cli.Parser(__doc__, stages=("rlhf-actor", "rlhf-critic"))
    group = parser.add_argument_group("roles")
    group.add_argument("--actor", required=True, metavar="DIR", help="the model to train: a step-1 folder or any HF causal LM")
    group.add_argument("--critic", required=True, metavar="DIR", help="where the critic starts: a reward folder, an rlhf critic, or a causal LM (fresh head)")
    group.add_argument("--ref", default=None, metavar="DIR", help="the model the KL is measured against; default: the actor's starting weights")
    group.add_argument("--reward", action="append", default=None, metavar="SOURCE", help="reward folder or FILE.py:FUNCTION; may be repeated; default: --critic's folder")
    group.add_argument("--reward_weights", nargs="+", type=cli.number(-1e6, 1e6), default=None, help="one weight for each --reward; default: 1 each")
    cli.add_run_flags(parser, output_dir="models/rlhf")
    group.add_argument("--sample_steps", type=cli.natural, default=10, help="steps between printed samples; 0: none")
    cli.add_model_flags(parser)

    group = parser.add_argument_group("batches, counted in responses over all ranks")
    group.add_argument("--rollout_batch_size", type=cli.positive, default=64, help="responses sampled per RL step")
    group.add_argument("--num_generations", type=cli.positive, default=1, help="responses to each prompt; divides --rollout_batch_size")
    group.add_argument("--minibatch_size", type=cli.positive, default=32, help="responses in one optimizer step; divides --rollout_batch_size")
    group.add_argument("--per_device_train_batch_size", type=cli.positive, default=8, help="responses in one training forward of one rank")
    group.add_argument("--max_tokens_per_micro_batch", type=cli.natural, default=0, metavar="N", help="cut a minibatch by length into forwards of at most N tokens, padding included; 0: into equal numbers")
    group.add_argument("--rollout_forward_batch_size", type=cli.natural, default=0, help="responses decoded or scored at once on one rank; 0: all")
    group.add_argument("--num_ppo_epochs", type=cli.positive, default=2, help="passes over each rollout batch")
    group.add_argument("--num_train_epochs", type=cli.number(1e-6, 1e6), default=1.0, help="passes over the prompts")
    group.add_argument("--max_steps", type=cli.natural, default=0, help="RL steps; 0: as --num_train_epochs says")

    cli.add_saving_flags(parser, steps="RL steps")

    group = parser.add_argument_group("sampling")
    group.add_argument("--max_prompt_length", type=cli.positive, default=512, help="tokens; longer prompts lose their oldest turns, counted")
    group.add_argument("--max_completion_length", type=cli.positive, default=256, help="tokens sampled at most, the stop token included")
    group.add_argument("--temperature", type=cli.number(1e-6, 100), default=1.0, help="logits are divided by it, in sampling and in training alike")
    group.add_argument("--top_p", type=cli.top_p, default=1.0, help="sample from the smallest set holding this probability; below 1 biases PPO's ratio")
    group.add_argument("--top_k", type=cli.natural, default=0, help="sample from the k most likely tokens; 0: all")
    group.add_argument("--rollout_backend", default="native", choices=["native", "hybrid"], help="hybrid: DeepSpeed's engine, if it passes its checks here")

    group = parser.add_argument_group("reward")
    cli.add_timeout_flag(group)
    group.add_argument("--score_norm", default="center", choices=["none", "center", "standardize"], help="of reward models, by their reward_stats.json")
    group.add_argument("--score_clip", type=cli.number(0, above=True, optional=True), default=5.0, help="scores are limited to +- this; none: off")
    group.add_argument("--missing_eos_penalty", type=cli.number(0, optional=True), default=1.0, help="subtracted from the score of a response cut by length; none: off")
    group.add_argument("--length_penalty", type=cli.number(-1e6, 1e6, optional=True), default=None, help="subtracted per token, so below 0 long answers gain; none: off")
    group.add_argument("--kl_coef", type=cli.number(0), default=0.05, help="weight of the KL toll on every token's reward")
    group.add_argument("--kl_estimator", default="k1", choices=["k1", "k2", "k3"], help="of that toll; k1 is the unbiased classic")
    group.add_argument("--kl_target", type=cli.number(0, above=True, optional=True), default=None, help="steer --kl_coef to this KL per response (nats); none: fixed")
    group.add_argument("--kl_horizon", type=cli.number(1e-6), default=10000, help="responses over which the steering acts")
    cli.add_switch(group, "--whiten_rewards", False, "scale token rewards to unit variance")

    group = parser.add_argument_group("PPO")
    group.add_argument("--gamma", type=cli.number(0, 1), default=1.0, help="discount per token")
    group.add_argument("--lam", type=cli.number(0, 1), default=0.95, help="GAE's lambda: 1 Monte Carlo, 0 one-step")
    cli.add_switch(group, "--whiten_advantages", True, "mean 0 and variance 1 over the rollout batch")
    group.add_argument("--cliprange", type=cli.number(0), default=0.2, help="the ratio's clip range, below and above 1")
    group.add_argument("--cliprange_high", type=cli.number(0, optional=True), default=None, help="another range above 1 (clip-higher); none: the same")
    group.add_argument("--dual_clip", type=cli.number(1, above=True, optional=True), default=None, help="bound of ratio x |A| where A < 0, above 1; none: off")
    group.add_argument("--cliprange_value", type=cli.number(0, above=True, optional=True), default=0.2, help="how far a value may move from the old one; none: off")
    group.add_argument("--entropy_coef", type=cli.number(0), default=0.0, help="weight of the entropy bonus")
    group.add_argument("--kl_loss_coef", type=cli.number(0), default=0.0, help="weight of KL(policy || ref) in the loss itself")
    group.add_argument("--kl_loss_estimator", default="k2", choices=["k1", "k2", "k3"], help="of that term; k2 has the right gradient")
    group.add_argument("--critic_warmup_steps", type=cli.natural, default=0, help="first RL steps in which only the critic learns")

    cli.add_optim_flags(parser, learning_rate=1e-6, lr_scheduler_type="linear")
    group.add_argument("--critic_learning_rate", type=cli.number(0), default=5e-6, help="peak learning rate of the critic")
    group.add_argument("--critic_weight_decay", type=cli.number(0), default=None, help="default: --weight_decay")
    group = cli.add_lora_flags(parser, dropout=False)
    group.add_argument("--critic_lora_r", type=cli.whole(0, 65536), default=None, help="rank of the critic's; default: --lora_r")
    cli.add_engine_flags(parser)
    group = parser.add_argument_group("engines of the other roles")
    group.add_argument("--critic_zero_stage", type=int, default=None, choices=[0, 1, 2, 3], help="default: --zero_stage")
    group.add_argument("--frozen_zero_stage", type=int, default=0, choices=[0, 1, 2, 3], help="of reference and reward models; only 3 shards anything")
    group.add_argument("--offload_frozen", action="store_true", help="reference and reward weights in host memory (needs --frozen_zero_stage 3)")
    # fmt: on
    args = parser.parse_args(over_all_ranks(parser, sys.argv[1:] if argv is None else argv))
    check(args)
    return args


def over_all_ranks(parser: cli.Parser, words: list[str]) -> list[str]:
    """A command line whose batch sizes, if they are DeepSpeed-Chat's, count over all ranks and not per device."""
    given = {name: values for name, values, _ in cli.split_words(words)}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ours, done = [], set()
    for size, times, total in (
        ("--per_device_generation_batch_size", "--generation_batches", "--rollout_batch_size"),
        ("--per_device_training_batch_size", "--gradient_accumulation_steps", "--minibatch_size"),
    ):
        if size not in given:
            continue  # the parser says what to do instead
        if total in given:
            parser.error(f"{size} and {total} say the same; keep one of them")
        try:
            per_device, rounds = (cli.positive(" ".join(given.get(name, ["1"]))) for name in (size, times))
        except (ValueError, argparse.ArgumentTypeError):
            parser.error(f"{size} and {times} are whole numbers of at least 1")
        meaning = [total, str(per_device * rounds * ranks)]
        parser.note(f"{size} {per_device} x {times} {rounds} x {ranks} rank(s) is {' '.join(meaning)} here")
        micro = [] if total == "--rollout_batch_size" else ["--per_device_train_batch_size", str(per_device)]
        ours += meaning + micro
        done |= {size, times}
    return ours + [word for name, _, typed in cli.split_words(words) if name not in done for word in typed]


def check(args) -> None:
    """Flags against each other, before any model is loaded."""
    if args.rollout_batch_size % args.num_generations:
        raise UserError(
            f"--rollout_batch_size {args.rollout_batch_size} is not a multiple of --num_generations {args.num_generations}"
        )
    if args.rollout_batch_size % args.minibatch_size:
        raise UserError(
            f"--rollout_batch_size {args.rollout_batch_size} is not a multiple of --minibatch_size {args.minibatch_size}; "
            f"change one of them, for example --minibatch_size {math.gcd(args.rollout_batch_size, args.minibatch_size)}"
        )
    if args.kl_target is not None and args.kl_coef == 0:
        raise UserError("--kl_target steers --kl_coef by factors, so --kl_coef 0 would stay 0; start it above 0")
    rewards = args.reward or [args.critic]
    if args.reward_weights is not None and len(args.reward_weights) != len(rewards):
        raise UserError(f"--reward_weights has {len(args.reward_weights)} numbers for {len(rewards)} reward sources")


def count_steps(args, num_prompts: int, ranks: int) -> tuple[int, int, str]:
    """(RL steps, optimizer steps, both in words). The last step takes what is left of the prompts.

    Raises:
        UserError: a step has fewer responses than there are ranks.
    """
    from common.batches import num_steps, step_rows

    n, prompts_per_step = args.num_generations, args.rollout_batch_size // args.num_generations
    epochs = None if args.max_steps else args.num_train_epochs
    total = args.max_steps or num_steps(num_prompts, prompts_per_step, epochs)
    first, last = (n * len(step_rows(at, prompts_per_step, num_prompts, args.seed, epochs)) for at in (0, total - 1))
    if first < ranks:
        raise UserError(
            f"a step of {first} responses is less than the {ranks} ranks, and every rank needs one; raise "
            f"--rollout_batch_size, or with few prompts set --max_steps or --num_generations"
        )
    words = ""
    if last < ranks:
        total, left, last = total - 1, last, first
        words = f"; {left // n} prompt(s) left over at the end, too few for {ranks} ranks"
    elif last < first:
        words = f", the last one of {last}"
    elif prompts_per_step > num_prompts and args.max_steps:
        words = f"; a step takes {prompts_per_step} prompts, so each of the {num_prompts} comes several times in it"
    minibatches = [math.ceil(responses / args.minibatch_size) for responses in (first, last)]
    optimizer_steps = args.num_ppo_epochs * ((total - 1) * minibatches[0] + minibatches[1])
    steps = f"{num_prompts} prompts; {total} RL steps of {first} responses{words}"
    return total, optimizer_steps, f"{steps}, {optimizer_steps} optimizer steps"


def main() -> None:
    args = parse_args()

    # 1. Look at what is given, before anything heavy is loaded or written.
    from common import checkpoint, data, functions, hub

    checkpoint.check_output(args.output_dir, models=("actor", "critic"))
    cli.check_files(args)
    actor_stage = checkpoint.require_stage(args.actor, "--actor", wanted=("sft", "dpo", "rlhf-actor", "base"))
    critic_stage = checkpoint.require_stage(args.critic, "--critic", wanted=("reward", "rlhf-critic", "sft", "base"))
    if not args.reward and critic_stage and critic_stage["stage"] != "reward":
        raise UserError(
            f"without --reward the critic's folder also scores the answers, and {args.critic} is of stage "
            f"{critic_stage['stage']!r}; name what scores: --reward models/reward, or --reward FILE.py:FUNCTION"
        )
    if args.ref:
        checkpoint.require_stage(args.ref, "--ref", wanted=("sft", "dpo", "rlhf-actor", "base"))
    reward_specs = args.reward or [args.critic]
    for spec in reward_specs:
        if functions.is_function(spec):
            functions.require_file(spec, "--reward")
        else:
            checkpoint.require_stage(spec, "--reward", wanted=("reward",))
    files = data.locate_or_inherit(args.data, actor_stage, "prompts", args.data_split)
    upload = cli.pick(hub.Hub, args)
    hub.check(upload)

    from common import (
        adapters,
        chat_format,
        distributed,
        engine,
        generation,
        hybrid_engine,
        metrics,
        models,
        resume,
        runs,
        tokenizer,
        tokens,
    )
    from common.batches import step_rows
    from step3_rlhf import rewards
    from step3_rlhf.ppo_trainer import PPO, PPOTrainer

    device = distributed.start(args.timeout_minutes, args.seed)
    dtype, why_dtype = models.choose_dtype(args.dtype, device)
    actor_engine = cli.pick(engine.Engine, args, dtype=dtype)
    critic_zero_stage = args.zero_stage if args.critic_zero_stage is None else args.critic_zero_stage
    critic_engine = cli.pick(engine.Engine, args, dtype=dtype, zero_stage=critic_zero_stage)
    actor_optim = cli.pick(engine.Optim, args)
    critic_decay = args.weight_decay if args.critic_weight_decay is None else args.critic_weight_decay
    critic_optim = cli.pick(engine.Optim, args, learning_rate=args.critic_learning_rate, weight_decay=critic_decay)
    flags = "--minibatch_size and --per_device_train_batch_size"
    sizes = engine.batch_sizes(args.per_device_train_batch_size, args.minibatch_size, flags)
    engine.check(actor_engine, actor_optim, sizes)
    engine.check(critic_engine, critic_optim, sizes, "critic")

    # 2. Prompts to tokens: exactly what the actor is shown.
    longest = args.max_prompt_length + args.max_completion_length
    length_flags = "--max_prompt_length and --max_completion_length"
    text = tokenizer.prepare(args.actor, longest, length_flags, args.chat_template, args.trust_remote_code)
    remarks = text.check(files.train)
    cache = cli.pick(tokens.Cache, args)
    prompts, report = tokens.load("prompts", text.tokenizer, files, files.train, args.max_prompt_length, cache)
    readers = {"--critic": args.critic} | ({"--ref": args.ref} if args.ref else {})  # of the actor's tokens
    for flag, path in readers.items():
        vocabulary = models.load_tokenizer(path, args.trust_remote_code).get_vocab()
        if not vocabulary.items() <= text.tokenizer.get_vocab().items():
            raise UserError(
                f"{flag} {path} has another tokenizer than the actor, whose tokens it has to read; take one trained from the same base model, or the actor itself"
                + " with --reward" * (flag == "--critic")
            )
    rules = {}
    for spec, name in dict(zip(reward_specs, rewards.short_names(reward_specs), strict=True)).items():
        if functions.is_function(spec):
            rules[spec], _ = functions.load(spec, "--reward", f"reward {name}", args.reward_timeout)
            rules[spec].require(set(prompts[0].row))
    stats = {spec: rewards.read_stats(spec, args.score_norm) for spec in reward_specs if spec not in rules}
    for path in [*readers.values(), *stats]:
        config = models.read_config(path, args.trust_remote_code)
        models.check_length(config, longest, length_flags, whose=path)
    reward_tokenizers = {spec: models.load_tokenizer(spec, args.trust_remote_code) for spec in stats}
    for spec, reward_tokenizer in reward_tokenizers.items():
        chat_format.ensure_template(reward_tokenizer, args.chat_template)
        remarks += text.check_other(reward_tokenizer, f"--reward {spec}")

    prompts_per_step = args.rollout_batch_size // args.num_generations
    epochs = None if args.max_steps else args.num_train_epochs
    total_steps, optimizer_steps, plan = count_steps(args, len(prompts), distributed.world_size())
    notes = [*files.notes, str(report), text.note, *remarks, f"precision {why_dtype}"]
    parents = {"actor": args.actor, "critic": args.critic} | ({"ref": args.ref} if args.ref else {})
    parents |= {f"reward{i}": spec for i, spec in enumerate(reward_specs)}
    identity = resume.identity("rlhf-actor", vars(args), files.hash, parents)
    run = runs.Run(
        cli.pick(runs.Reporting, args),
        cli.pick(resume.Saving, args),
        "step 3 RLHF",
        total_steps,
        identity,
        notes,
        models=("actor", "critic"),
    )
    log = run.log
    if args.top_p < 1 or args.top_k:
        log.say(
            "warning: with --top_p below 1 or --top_k the sampler is not the policy that is trained; the ratio is biased"
        )

    # 3. The four roles, each in its engine.
    loading = {
        "device": device,
        "attn_implementation": args.attn_implementation,
        "trust_remote_code": args.trust_remote_code,
    }

    def language_model(path, lora=None):
        def load(zero3):
            hf = models.load_causal_lm(path, dtype, zero3=zero3, **loading)
            for line in text.fit(hf, zero3, lora, args.seed):
                log.say(f"{path}: {line}")
            return models.LanguageModel(hf)

        return load

    def scalar_model(path, fresh_head_std=None):
        def load(zero3):
            model, fresh = models.load_scalar_model(
                path, dtype, zero3=zero3, fresh_head_std=fresh_head_std, seed=args.seed, **loading
            )
            if fresh:
                log.say(f"critic: {path} is a language model; its value head starts at zero")
            return model

        return load

    model_class = (text.config.architectures or [""])[0]
    backend, why_backend = hybrid_engine.choose_backend(args.rollout_backend, model_class, args.lora_r > 0, device)
    log.say(f"rollouts: {why_backend}")
    actor_lora = cli.pick(adapters.Lora, args, lora_dropout=0.0)  # dropout would make noise of the ratio
    critic_lora_r = args.lora_r if args.critic_lora_r is None else args.critic_lora_r
    critic_lora = dataclasses.replace(actor_lora, lora_r=critic_lora_r)

    def critic_model(zero3):
        model = scalar_model(args.critic, fresh_head_std=lambda width: 0.0)(zero3)
        for line in text.fit(model.hf, zero3, critic_lora, args.seed):
            log.say(f"critic: {line}")
        return model

    actor = engine.TrainedModel(
        language_model(args.actor, actor_lora),
        actor_optim,
        actor_engine,
        optimizer_steps,
        device,
        hybrid_engine_tokens=longest if backend == "hybrid" else 0,
    )
    critic = engine.TrainedModel(critic_model, critic_optim, critic_engine, optimizer_steps, device)

    def frozen(load):
        return engine.FrozenModel(load, dtype, args.frozen_zero_stage, args.offload_frozen, device)

    needs_ref = args.kl_coef != 0 or args.kl_loss_coef != 0
    ref = None
    if needs_ref and args.lora_r and not args.ref:
        ref = engine.AdapterOff(actor)
        log.say("reference: the actor with its adapter off")
    elif needs_ref:
        ref = frozen(language_model(args.ref or args.actor))
    sources = []
    for spec, name in zip(reward_specs, rewards.short_names(reward_specs), strict=True):
        if spec in rules:
            sources.append(rewards.RewardFunction(name, rules[spec], total_steps))
            continue
        model = frozen(scalar_model(spec))
        source = rewards.RewardModel(
            name, model, reward_tokenizers[spec], text.tokenizer, args.score_norm, *stats[spec]
        )
        sources.append(source)
        log.say(
            f"reward {spec}: {args.score_norm}, mean of its own pairs {stats[spec][0]:.3f}"
            + ("" if source.reader.same_tokens else "; text is re-tokenised")
        )
    log.say(f"actor   {actor.describe()}")
    log.say(f"critic  {critic.describe()}")
    log.say(plan)

    # 4. Train.
    sampling = cli.pick(
        generation.SamplingParams,
        args,
        max_new_tokens=args.max_completion_length,
        stop_ids=text.stop_ids,
        pad_id=text.pad_id,
    )
    sampler = hybrid_engine.RolloutEngine(actor, backend, args.rollout_forward_batch_size, device)
    sampler.check_parity((prompt.ids for prompt in prompts), sampling, log.say)
    trainer = PPOTrainer(
        actor=actor,
        critic=critic,
        ref=ref,
        sampler=sampler,
        sources=sources,
        weights=args.reward_weights or [1.0] * len(sources),
        decode=lambda ids: chat_format.decode_answer(text.tokenizer, ids, text.stop_ids),
        ppo=cli.pick(PPO, args),
        sampling=sampling,
        say=log.say,
        exact=dtype == "fp32",
    )
    trained = {"actor": actor, "critic": critic}
    done, counters = run.restore(trained)
    trainer.restore(counters)
    record = counters.get("record", {})
    for step in range(done + 1, total_steps + 1):
        rows = step_rows(step - 1, prompts_per_step, len(prompts), args.seed, epochs)
        shows_samples = args.sample_steps and (step % args.sample_steps == 0 or step == total_steps)
        num_samples = 3 if shows_samples else 0
        seen, seconds, samples = trainer.step(step, [prompts[row] for row in rows], num_samples)
        record = {name: metrics.number(value) for name, value in seen.items()}
        log.log(step, record, seconds)
        if samples:
            log.samples(step, samples)
        run.after_step(step, trained, trainer.counters() | {"record": record})

    # 5. Whole HF folders; the actor's stage.json comes last and marks the run as finished.
    for role, model, stage in (("critic", critic, "rlhf-critic"), ("actor", actor, "rlhf-actor")):
        write = model.writer(text, log.say)
        if distributed.is_main():
            checkpoint.publish(
                run.path / role,
                stage,
                write,
                args=vars(args),
                seed=args.seed,
                parents=parents,
                data=files.record(),
                metrics=record,
            )
    if distributed.is_main():
        hub.push(upload, run.path / "actor", log.say)
    run.finish(f"python scripts/chat.py --model {run.path / 'actor'}")


if __name__ == "__main__":
    cli.launch(main)
