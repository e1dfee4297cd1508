"""A run that is killed goes on and ends in the same bytes; damaged checkpoints are found; nothing is mixed up."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import stage_processes
from small_models import save_llama, save_reward
from stage_processes import Moment

from common import resume
from common.errors import RunFailed, UserError
from common.metrics import read_jsonl

SFT = (
    "--model base --data data --max_steps 6 --per_device_train_batch_size {rows} --learning_rate 1e-2 --eval_steps 4 "
    "--max_length 90 --save_steps 2 --lora_r 4 --lora_dropout 0.2 --report_to none"
)
RM = (
    "--model base --data data --max_steps 6 --per_device_train_batch_size {rows} --learning_rate 1e-2 --eval_steps 4 "
    "--max_length 90 --save_steps 2 --report_to none"
)
RL = (
    "--actor base --critic reward --data data --max_steps 4 --rollout_batch_size 6 --minibatch_size 3 "
    "--num_ppo_epochs 1 --per_device_train_batch_size 2 --max_prompt_length 60 --max_completion_length 6 "
    "--learning_rate 1e-2 --critic_learning_rate 1e-2 --kl_target 0.5 --kl_horizon 20 --save_steps 1 "
    "--sample_steps 2 --score_norm none --report_to none"
)
SCRIPTS = {
    "sft": ("step1_sft/train.py", SFT),
    "reward": ("step2_reward/train.py", RM),
    "rlhf": ("step3_rlhf/train.py", RL),
}
MODELS = {"sft": ["."], "reward": ["."], "rlhf": ["actor", "critic"]}
# Killed in the middle of a step, inside a save, and before the last word: one after another in one run.
KILLS = {
    "sft": [Moment("train_step", 4), Moment("fsync", 3), Moment("publish", 1)],
    "reward": [Moment("train_step", 4), Moment("rename", 1), Moment("publish", 1)],
    "rlhf": [Moment("train_step", 6), Moment("fsync", 2), Moment("publish", 2)],
}
# (stage, ZeRO stage, ranks). The first ones always; the rest with RLHF_ALL=1.
CASES = [("sft", 0, 1), ("reward", 3, 1), ("rlhf", 0, 1), ("rlhf", 3, 2)]
EVERY = [(stage, zero, ranks) for stage in SCRIPTS for zero in (0, 3) for ranks in (1, 2)]
MORE = [case for case in EVERY if case not in CASES]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A base model, a reward model and prepared data."""
    folder = tmp_path_factory.mktemp("resume")
    save_llama(folder / "base")
    save_reward(folder / "reward")
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No." * (1 + i % 3)} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = stage_processes.run("step0_data/prepare.py", "--dataset pairs.jsonl --eval_fraction 0.4", folder)
    assert done.codes == [0], done.output
    return folder


def start(stage: str, out: str, root: Path, zero: int = 0, ranks: int = 1, moment=None, more: str = ""):
    script, flags = SCRIPTS[stage]
    flags = flags.format(rows=4 // ranks) + f" --output_dir {out} --zero_stage {zero} {more}"
    return stage_processes.run(script, flags, root, ranks, moment)


def hashes(folder: Path, stage: str) -> dict[str, str]:
    """Of what two runs have to share: the models, the metrics and the samples."""
    files = [folder / "metrics.jsonl"] + [folder / "samples.jsonl"] * (stage == "rlhf")
    files += [folder / model / "model.safetensors" for model in MODELS[stage]]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "zero", "ranks"), CASES + MORE)
def test_killed_three_times_and_the_same_bytes(root, stage, zero, ranks):
    if (stage, zero, ranks) in MORE and not os.environ.get("RLHF_ALL"):
        pytest.skip("set RLHF_ALL=1 for every stage x ZeRO stage x ranks")
    name = f"{stage}-{zero}-{ranks}"
    whole = start(stage, f"{name}-whole", root, zero, ranks)
    assert whole.codes == [0] * ranks, whole.output
    for number, kill in enumerate(KILLS[stage]):
        if kill.where == "train_step" and ranks > 1:
            kill = Moment(kill.where, kill.n, rank=1)
        ended = start(stage, name, root, zero, ranks, kill, "--resume_from_checkpoint")
        assert ended.codes[kill.rank] == -signal.SIGKILL, ended.output
        assert all(code != 0 for code in ended.codes), ended.output
        assert number == 0 or "resuming after step" in ended.output[0]
        assert not (root / name / MODELS[stage][0] / "stage.json").exists()
    done = start(stage, name, root, zero, ranks, None, "--resume_from_checkpoint")
    assert done.codes == [0] * ranks, done.output
    seen, wanted = hashes(root / name, stage), hashes(root / f"{name}-whole", stage)
    assert seen == wanted
    print(f"{name}: killed at {[f'{k.where} {k.n}' for k in KILLS[stage]]}; {len(seen)} files, the same sha256: "
          f"{seen['metrics.jsonl'][:12]} ...")  # fmt: skip
    assert not list((root / name).glob("*checkpoint-*")) and not list((root / name).glob(".tmp*"))
    steps = [row["step"] for row in read_jsonl(root / name / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "times"), [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 2)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(root, number, code, times):
    out = f"signal-{code}"
    moment = Moment("train_step", 3, signal=number, times=times)
    ended = start("sft", out, root, moment=moment, more="--save_steps 0 --resume_from_checkpoint")
    assert ended.codes == [code], ended.output
    assert "after step 3 of 6; saved " in ended.output[0] and "Traceback" not in ended.output[0]
    line = ended.output[0].strip().splitlines()[-1]
    assert line.startswith(f"stopped by {signal.Signals(number).name}") and line.endswith("--resume_from_checkpoint")
    # The line that was printed is a line that works.
    script, _, flags = line.partition("go on with: python ")[2].partition(" ")
    done = stage_processes.run(script, flags, root)
    assert done.codes == [0] and "resuming after step 3" in done.output[0], done.output
    if not (root / "unsignalled").exists():
        assert start("sft", "unsignalled", root).codes == [0]
    assert hashes(root / out, "sft") == hashes(root / "unsignalled", "sft")


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(root):
    ended = start("sft", "one-rank", root, ranks=2, moment=Moment("train_step", 2, rank=1, signal=signal.SIGTERM))
    assert ended.codes == [143, 143], ended.output
    assert (root / "one-rank/checkpoint-2/manifest.json").exists()
    assert "stopped by SIGTERM" in ended.output[0] and "stopped by" not in ended.output[1]


# ---- ranks that end or stop answering


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_within_seconds(root):
    start_time = time.monotonic()
    ended = start("sft", "dies", root, ranks=2, moment=Moment("train_step", 3, rank=1))
    assert ended.codes == [1, -signal.SIGKILL] and time.monotonic() - start_time < 40, ended.output
    line = ended.output[0].strip().splitlines()[-1]
    assert line.startswith("error: lost contact with another rank") and "Traceback" not in ended.output[0], ended.output


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_when_the_time_is_up(root):
    hang = Moment("train_step", 3, rank=1, signal=signal.SIGSTOP)
    begin = time.monotonic()
    ended = start("sft", "hangs", root, ranks=2, moment=hang, more="--timeout_minutes 0.15")  # 9 s
    assert ended.codes[0] == 1 and 9 < time.monotonic() - begin < 60, ended.output
    assert "error: lost contact with another rank" in ended.output[0] and "Timed out" in ended.output[0]


@pytest.mark.slow
def test_weights_that_are_damaged_stop_all_ranks_with_one_line(root):
    ended = start("sft", "damaged", root, ranks=2, moment=Moment("train_step", 3, rank=1, signal=-1))
    assert ended.codes == [1, 1], ended.output
    lines = [line for line in ended.output[0].splitlines() if "error: " in line]
    assert len(lines) == 1 and "Traceback" not in ended.output[0], ended.output
    assert lines[0].startswith("error: step 3: the loss is nan (") and "rank 1, rows" in lines[0]
    assert lines[0].endswith("stopped before the update, weights are unchanged")
    assert not (root / "damaged/stage.json").exists() and (root / "damaged/checkpoint-2").exists()


@pytest.fixture(scope="module")
def interrupted(root) -> Path:
    """A run with checkpoints 2 and 4 of 6 steps."""
    ended = start("sft", "interrupted", root, moment=Moment("train_step", 6))
    assert ended.codes == [-signal.SIGKILL] and "step 5/6" in ended.output[0], ended.output
    return root / "interrupted"


@pytest.fixture
def copy(interrupted, root):
    folder = root / "copy"
    shutil.copytree(interrupted, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_flipped_bit_in_the_newest_is_found_and_the_one_before_is_used(copy, root):
    file = next((copy / "checkpoint-4").glob("model/*.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = start("sft", "copy", root, more="--resume_from_checkpoint")
    assert done.codes == [0], done.output
    assert f"{file.name} was changed since it was written" in done.output[0]
    assert "resuming after step 2 from" in done.output[0]
    if not (root / "unsignalled").exists():
        assert start("sft", "unsignalled", root).codes == [0]
    assert hashes(copy, "sft") == hashes(root / "unsignalled", "sft")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "holds checkpoint-4 of a run that did not finish; go on with --resume_from_checkpoint"),
        ("--resume_from_checkpoint --learning_rate 1e-3", "--learning_rate was 0.01 and is 0.001 now"),
        ("--resume_from_checkpoint --zero_stage 2", "--zero_stage was 0 and is 2 now"),
        ("--resume_from_checkpoint --model reward", "the content of model was"),
        ("--resume_from_checkpoint copy/nowhere", "nowhere: no such folder"),
        ("--resume_from_checkpoint interrupted/checkpoint-4", "is not in --output_dir copy"),
    ],
)
def test_what_is_not_the_same_run_is_refused_and_left_alone(copy, root, more, message):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    ended = start("sft", "copy", root, more=more)
    assert ended.codes == [2] and message in ended.output[0], ended.output
    assert ended.output[0].strip().splitlines()[-1].startswith("error: ") and "Traceback" not in ended.output[0]
    after = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    assert {path.name for path in before.keys() ^ after.keys()} <= {".lock", ".lock-owner"}
    assert all(after[path] == time for path, time in before.items() if path in after and ".lock" not in path.name)


@pytest.mark.slow
def test_a_way_back_to_an_older_checkpoint_keeps_the_newer_one_aside(copy, root):
    stop = Moment("train_step", 1, signal=signal.SIGTERM)
    more = "--save_total_limit 1 --save_steps 0 --resume_from_checkpoint copy/checkpoint-2"
    ended = start("sft", "copy", root, moment=stop, more=more)
    assert ended.codes == [143] and "checkpoint-4 is further on: set aside as abandoned-" in ended.output[0]
    assert (copy / "checkpoint-3").exists() and len(list(copy.glob("abandoned-checkpoint-4-*"))) == 1
    assert (
        ended.output[0].strip().endswith("--resume_from_checkpoint")
        and "copy/checkpoint-2 " not in ended.output[0].splitlines()[-1]
    )
    done = start("sft", "copy", root, more="--resume_from_checkpoint")
    assert done.codes == [0], done.output
    assert [row["step"] for row in read_jsonl(copy / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_an_unfinished_run_is_no_model(copy, root):
    (copy / "config.json").write_text("{}")  # as if it had been killed while its files were moved in
    done = stage_processes.run("step2_reward/train.py", "--model copy --data data --output_dir x", root)
    assert done.codes == [2] and "copy is of a run that did not finish; go on with it by" in done.output[0]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["function", "model"])
def test_a_reward_function_or_a_foreign_model_that_changed_makes_it_another_run(root, what):
    (root / "score.py").write_text("def f(prompts, completions, **columns): return [1.0 for _ in prompts]\n")
    save_llama(root / "own")
    flags = f"{RL} --actor own --critic own --reward score.py:f --output_dir changed-{what}"
    ended = stage_processes.run("step3_rlhf/train.py", flags, root, moment=Moment("train_step", 5))
    assert ended.codes == [-signal.SIGKILL], ended.output
    if what == "function":
        (root / "score.py").write_text("def f(prompts, completions, **columns): return [-1.0 for _ in prompts]\n")
    else:
        save_llama(root / "own", seed=5)
    again = stage_processes.run("step3_rlhf/train.py", f"{flags} --resume_from_checkpoint", root)
    role = {"function": "reward0", "model": "actor"}[what]
    assert again.codes == [2] and f"the content of {role} was" in again.output[0], again.output


def test_the_line_that_continues_is_typed_as_it_was(monkeypatch):
    words = ["a.py", "--run_name", "my run", "--resume_from_checkpoint", "old/checkpoint-2", "--seed", "3"]
    monkeypatch.setattr("sys.argv", words)
    assert resume._same_command() == "python a.py --run_name 'my run' --seed 3"
    monkeypatch.setattr("sys.argv", ["a.py", "--resume_from_checkpoint", "--seed", "3", "--resume_from_checkpoint=x"])
    assert resume._same_command() == "python a.py --seed 3"


@pytest.mark.slow
def test_other_flags_of_reporting_do_not_make_it_another_run(copy, root):
    done = start("sft", "copy", root, more="--resume_from_checkpoint --logging_steps 3 --save_steps 0 --run_name again")
    assert done.codes == [0] and "resuming after step 4" in done.output[0], done.output


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_costs_nothing_that_was_saved(root):
    full = Moment("fsync", 4, signal=0)
    ended = start("sft", "full", root, moment=full)
    assert ended.codes == [1] and "Traceback" not in ended.output[0], ended.output
    line = ended.output[0].strip().splitlines()[-1]
    assert line.startswith("error: the checkpoint of step 4 could not be written in full: No space left on device")
    assert "checkpoint-2 is whole" in line and "--resume_from_checkpoint" in line
    done = start("sft", "full", root, more="--resume_from_checkpoint")
    assert done.codes == [0] and "resuming after step 2" in done.output[0], done.output


# ---- what stands in the folder when a run goes on


def put(folder: Path, name: str, step: int, content: str = "weights") -> Path:
    """A checkpoint as `resume` describes it, of no engine."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "state").write_text(content)
    files = {"state": {"size": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}}
    manifest = {"step": step, "counters": {}, "identity": {}, "files": files}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))
    return path


def go_on(folder: Path, asked: str | None = "latest") -> resume.Checkpoints:
    return resume.Checkpoints(folder, resume.Saving(0, 2, asked), 10, {})


def test_a_renamed_checkpoint_is_named_and_nothing_is_set_aside(tmp_path):
    put(tmp_path, "checkpoint-77", 6)
    for _ in range(2):  # the same command once more says the same
        with pytest.raises(UserError, match=r"checkpoint-77 is of step 6; rename it to checkpoint-6 to go on from it"):
            go_on(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-77"]
    put(tmp_path, "checkpoint-3", 3)
    found = go_on(tmp_path)
    assert found.step == 3 and "checkpoint-77 is of step 6" in found.notes[0]
    assert (tmp_path / "checkpoint-77").is_dir()
    with pytest.raises(UserError, match="rename it to checkpoint-6"):
        go_on(tmp_path, str(tmp_path / "checkpoint-77"))


@pytest.mark.parametrize("name", ["checkpoint-best", "abandoned-checkpoint-6-ab12", "a-checkpoint-6", "checkpoint-06"])
def test_nothing_begins_at_step_1_beside_a_checkpoint_of_another_name(tmp_path, name):
    put(tmp_path, name, 6)
    with pytest.raises(UserError, match=f"has no checkpoint-STEP to go on from, but {name}; rename it so"):
        go_on(tmp_path)
    with pytest.raises(UserError, match=f"holds {name} of a run that did not finish"):
        go_on(tmp_path, None)


def test_a_damaged_checkpoint_further_on_does_not_push_out_a_new_one(tmp_path):
    put(tmp_path, "checkpoint-9", 9)
    (tmp_path / "checkpoint-9/state").write_text("changed")
    put(tmp_path, "checkpoint-3", 3)
    run = resume.Checkpoints(tmp_path, resume.Saving(0, 1, "latest"), 10, {})
    staging = tmp_path / ".tmp-checkpoint-4-x"
    staging.mkdir()
    run._publish(staging, 4, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-9"]
    assert go_on(tmp_path).step == 4


def test_checkpoints_that_cannot_fit_are_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_900))
    checkpoints = resume.Checkpoints(tmp_path, resume.Saving(0.5, 2, None), 10, {})
    model = SimpleNamespace(checkpoint_bytes=lambda: 1_000)
    with pytest.raises(UserError, match=r"need about 0\.0 GB .*lower --save_total_limit \(now 2\)"):
        checkpoints.restore({"model": model})


@pytest.mark.parametrize(
    ("error", "told_as"),
    [
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), RunFailed),
        (OSError(28, "No space left on device"), RunFailed),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ],
)
def test_only_trouble_with_the_disk_is_told_as_that(tmp_path, error, told_as):
    def save(*_):
        raise error

    checkpoints = resume.Checkpoints(tmp_path, resume.Saving(1, 2, None), 4, {})
    with pytest.raises(told_as) as caught:
        checkpoints.after_step(1, {"model": SimpleNamespace(save=save)}, {})
    assert ("make room or mend the disk" in str(caught.value)) == (told_as is RunFailed)
    assert type(caught.value) is told_as


# ---- the protocol, killed at every call that changes the disk


def save_until_killed(folder: str, n: int, said: str) -> None:
    """In a process of its own: saves steps 1 to 4 and dies before its n-th change of the disk."""
    calls = []

    def armed(function):
        def counting(*args, **kwargs):
            calls.append(1)
            if len(calls) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counting

    class Weights:
        def save(self, path, name):
            (path / name).mkdir()
            (path / name / "weights.pt").write_bytes(os.urandom(100))

    checkpoints = resume.Checkpoints(Path(folder), resume.Saving(1, 2, "latest"), 4, {"run": "one"})
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, armed(getattr(os, name)))
    for step in range(1, 5):
        checkpoints.after_step(step, {"model": Weights()}, {"step": step})
        with open(said, "a") as file:
            file.write("x")


def test_killed_at_every_change_of_the_disk_a_whole_checkpoint_is_left(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(stage_processes.PRELOAD)
    n = 0
    while True:
        n += 1
        folder, said = tmp_path / str(n), tmp_path / f"{n}.txt"
        folder.mkdir()
        said.touch()
        child = context.Process(target=save_until_killed, args=(str(folder), n, str(said)))
        child.start()
        child.join()
        saved = len(said.read_text())
        checkpoints = resume.Checkpoints(folder, resume.Saving(1, 2, "latest"), 4, {"run": "one"})
        assert checkpoints.step in (saved, saved + 1), f"killed at change {n}"
        assert checkpoints.counters == ({"step": checkpoints.step} if checkpoints.step else {})
        assert not list(folder.glob(".tmp*")), "leftovers"
        assert 1 <= len(list(folder.glob("checkpoint-*"))) <= 3 or not saved
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    print(f"killed at {n - 1} changes of the disk: a whole checkpoint of the last or the next step each time")
    assert n > 50 and saved == 4


# ---- verification, file by file


def test_every_kind_of_damage_is_found_before_anything_is_loaded(interrupted, tmp_path):
    whole = interrupted / "checkpoint-4"
    assert resume.verify(whole)["step"] == 4
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) >= 3
    found = 0
    for name in files:
        size = (whole / name).stat().st_size
        damages = {f"flip {at}": at for at in {0, size // 3, size // 2, size - 1}}
        for damage in [*damages, "truncate", "delete", "hole", "other"]:
            shutil.rmtree(tmp_path / "checkpoint-4", ignore_errors=True)
            shutil.copytree(whole, tmp_path / "checkpoint-4")
            file = tmp_path / "checkpoint-4" / name
            content = bytearray(file.read_bytes())
            if damage in damages:
                content[damages[damage]] ^= 1
                file.write_bytes(content)
            elif damage == "truncate":
                file.write_bytes(content[:-1])
            elif damage == "delete":
                file.unlink()
            elif damage == "hole":
                file.write_bytes(content[: size // 2] + bytes(min(64, size - size // 2)) + content[size // 2 + 64 :])
            else:  # the same file of another step
                file.write_bytes((interrupted / "checkpoint-2" / name).read_bytes())
            try:
                resume.verify(tmp_path / "checkpoint-4")
            except UserError as error:
                assert str(tmp_path / "checkpoint-4") in str(error)
                found += 1
            else:
                same = file.exists() and file.read_bytes() == (whole / name).read_bytes()
                # A whole manifest of the other step speaks of other files: it must not verify either.
                assert same, f"{damage} in {name} was not found"
    print(f"{found} damages in {len(files)} files, all found")
    assert found > 6 * len(files)


def test_a_file_nobody_wrote_is_found(interrupted, tmp_path):
    shutil.copytree(interrupted / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "model" / "more.pt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"more\.pt is not in its manifest\.json"):
        resume.verify(tmp_path / "checkpoint-4")
