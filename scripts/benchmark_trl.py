"""The other side of scripts/benchmark.py --peer: one PPO step of TRL 1.12 at a time, in an environment that has it.

Run by benchmark.py with the peer's Python, never imported. `--check` prints the versions found. Otherwise: the file
named by the one argument says what to build; then each line on stdin starts a step, and its seconds by phase are
printed as one line of JSON. TRL's PPO lives in `trl.experimental.ppo` up to 1.12 and is gone from 1.13 on.

What is timed is TRL's own training loop, whole, from the end of one step to the end of the next: nothing of it is
replaced. Switched off by its own options is what the step of this project does not do either: evaluation, sample
printing, saving, 16-bit precision and recomputed activations (both on by default there). `gc.collect`, which TRL calls
twice a step, is a phase of its own. With several minibatches TRL still takes one optimizer step an epoch, since it
accumulates over all micro-batches of a batch; ours takes one a minibatch.
"""

import gc
import importlib.metadata
import json
import os
import sys
import tempfile
import time


def check() -> None:
    """Prints the versions, or says in one line what is missing."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers", "accelerate")}
        assert importlib.util.find_spec("trl.experimental.ppo") is not None
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError, AssertionError):
        sys.exit("no trl.experimental.ppo here; wanted: pip install trl==1.12.0")
    print(json.dumps(versions))


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(f"{__doc__}\nerror: this is run by scripts/benchmark.py --peer PYTHON, not by hand")
    # The library prints to stdout; only answers may go to the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open(sys.argv[1]) as file:
        work = json.load(file)

    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    torch.set_num_threads(work["threads"])
    clock = Clock(answers)
    ppo_trainer.batch_generation = clock.ends("generate", full_length(ppo_trainer.batch_generation, work["new"]))
    ppo_trainer.masked_whiten = clock.ends("score", ppo_trainer.masked_whiten)  # of the advantages: the update follows
    gc.collect = clock.aside("gc.collect", gc.collect)

    def scalar_model():
        return AutoModelForSequenceClassification.from_pretrained(work["reward"], num_labels=1, dtype=torch.float32)

    def language_model():
        return AutoModelForCausalLM.from_pretrained(work["actor"], dtype=torch.float32)

    rows = len(work["prompts"])
    config = PPOConfig(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=work["micro"],
        gradient_accumulation_steps=rows // work["micro"],
        num_mini_batches=work["minibatches"],
        num_ppo_epochs=work["epochs"],
        local_rollout_forward_batch_size=rows,
        response_length=work["new"],
        total_episodes=rows * work["steps"],
        temperature=1.0,
        seed=work["seed"],
        stop_token_id=None,
        num_sample_generations=0,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
    )

    class Step(TrainerCallback):
        def on_train_begin(self, *_, **__):
            clock.wait()

        def on_step_end(self, *_, **__):
            clock.stop()
            clock.wait()

    trainer = PPOTrainer(
        args=config,
        processing_class=Tokens(work["pad_id"]),
        model=language_model(),
        ref_model=language_model(),
        reward_model=scalar_model(),
        value_model=scalar_model(),
        # More than are used: in the last batch of a data set every micro-batch would end in an optimizer step.
        train_dataset=[{"input_ids": ids} for ids in work["prompts"] * (work["steps"] + 1)],
        eval_dataset=[{"input_ids": ids} for ids in work["prompts"]],
        data_collator=lambda batch: {"input_ids": torch.tensor(left_padded(batch, work["pad_id"]))},
        callbacks=[Step()],
    )
    trainer.train()


class Tokens:
    """All that the trainer asks of a tokenizer. The pad id lies outside the vocabulary: TRL takes every pad id in a
    response for padding, so one that could be sampled would cut responses."""

    def __init__(self, pad_id: int):
        self.pad_token_id, self.eos_token_id = pad_id, pad_id + 1


class Clock:
    """Seconds of one step by phase, printed when it stops; waits for a line before the next."""

    def __init__(self, answers):
        self.answers = answers

    def wait(self) -> None:
        print("ready", file=self.answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # the benchmark has ended, and the trainer has no other way to be told
        self.seconds: dict[str, float] = {}
        self.start = self.mark = time.perf_counter()

    def stop(self) -> None:
        self._end("update")
        self.seconds["total"] = time.perf_counter() - self.start
        print(json.dumps(self.seconds), file=self.answers, flush=True)

    def ends(self, phase: str, function):
        """The function, after which `phase` is over."""

        def timed(*args, **kwargs):
            result = function(*args, **kwargs)
            self._end(phase)
            return result

        return timed

    def aside(self, phase: str, function):
        """The function, whose time is its own phase and not part of the one around it."""

        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            taken = time.perf_counter() - start
            if hasattr(self, "seconds"):
                self.seconds[phase] = self.seconds.get(phase, 0.0) + taken
                self.mark += taken
            return result

        return timed

    def _end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self.mark = now - self.mark, now


def full_length(generation, new: int):
    """TRL's generation, which must not end early: the sides' work would differ."""

    def checked(model, queries, *args):
        sequences, logits = generation(model, queries, *args)
        assert sequences.shape[1] == queries.shape[1] + new, f"{sequences.shape} from {queries.shape}"
        return sequences, logits

    return checked


def left_padded(batch: list[dict], pad_id: int) -> list[list[int]]:
    width = max(len(row["input_ids"]) for row in batch)
    return [[pad_id] * (width - len(row["input_ids"])) + row["input_ids"] for row in batch]


if __name__ == "__main__":
    check() if sys.argv[1:] == ["--check"] else main()
