"""The READMEs say what the code does: links, files, commands, flags, metric names, file tree, worked example."""

import ast
import contextlib
import fnmatch
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import one_rank
import pytest
import stage_processes
import torch

from common import cli, names

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "step1_sft/README.md": "step1_sft.train",
    "step2_reward/README.md": "step2_reward.train",
    "step3_rlhf/README.md": "step3_rlhf.train",
}
PAGES = ["README.md", "step0_data/README.md", *STEPS]
TOOLS = [
    f"scripts.{name}"
    for name in ("evaluate", "chat", "report", "benchmark", "tiny_summary", "plan", "show_tokens", "merge_adapter")
]
ENTRY_SCRIPTS = ["step0_data.prepare", *STEPS.values(), *TOOLS]
LAUNCHERS = ("python", "deepspeed", "torchrun")
# Flags of programs that are not ours.
FOREIGN = {"--hostfile", "--num_accelerators", "--nnodes", "--nproc_per_node", "--rdzv_backend", "--rdzv_endpoint"} | {
    "--master_port",
    "--standalone",
}
TOP_FOLDERS = ("common/", "step0_data/", "step1_sft/", "step2_reward/", "step3_rlhf/", "scripts/", "tests/")


# ---- reading Markdown


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fenced(page: str, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", read(page), re.M | re.S)
    return [block for name, block in blocks if name == language]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", read(page), re.M | re.S)
    assert found, f"{page} has no section {heading}"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, its heading first and without the dashes."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    rows = [[[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in t.splitlines()] for t in found]
    return [[row for row in table if not set("".join(row)) <= set("-:")] for table in rows]


def slugs(page: str) -> set[str]:
    """The anchors GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: str) -> list[list[str]]:
    """The words of each command in a page's bash blocks, without comments and leading assignments."""
    found = []
    for block in fenced(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words = words[1:]
            found += [words] if words else []
    return found


def ours(words: list[str]) -> tuple[str, list[str]] | None:
    """(module, arguments) of a command that starts one of our Python scripts, whoever launches it."""
    if words[0] not in LAUNCHERS:
        return None
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    assert at is not None and (ROOT / words[at]).is_file(), f"no such script: {shlex.join(words)}"
    return words[at].removesuffix(".py").replace("/", "."), words[at + 1 :]


# ---- the parsers


class Seen(Exception):
    pass


def flags_of(module: str) -> set[str]:
    """Every option string of an entry script's parser."""
    found = set()

    def stop(parser, *_):
        found.update(option for action in parser._actions for option in action.option_strings)
        raise Seen

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Seen):
        patch.setattr(cli.Parser, "parse_args", stop)
        importlib.import_module(module).parse_args([])
    assert "--config" in found, module
    return found


def parse(module: str, words: list[str], capsys) -> dict:
    try:
        return vars(importlib.import_module(module).parse_args(words))
    except SystemExit:
        pytest.fail(f"{module} {shlex.join(words)}\n{capsys.readouterr().err}")


@pytest.fixture
def recorded_runs(tmp_path, capsys) -> dict[str, Path]:
    """module -> a stage.json as the command under "The command" of its chapter would leave it."""
    found = {}
    for page, module in STEPS.items():
        base = [ours(words) for words in commands(page) if ours(words) and "out/tiny" in shlex.join(words)]
        args = parse(module, next(words for name, words in base if name == module and "--config" not in words), capsys)
        found[module] = tmp_path / f"{module}.json"
        stages = {"step1": "sft", "step2": "reward", "step3": "rlhf-actor"}
        found[module].write_text(json.dumps({"stage": stages[module[:5]], "format_version": 1, "args": args}))
    return found


# ---- links, files, functions, tests


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in slugs(file.relative_to(ROOT).as_posix()), f"{page}: no heading for {target}"


def definitions(file: Path) -> set[str]:
    """Functions and classes of a file, and methods as Class.method."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    methods = {f"{node.name}.{part.name}" for node in top for part in node.body if isinstance(part, ast.FunctionDef)}
    return {node.name for node in top} | methods


@pytest.mark.parametrize("page", PAGES)
def test_files_functions_and_tests_that_are_named_exist(page):
    spans = [span for span in code_spans(prose(page)) if span.startswith(TOP_FOLDERS) and " " not in span]
    for span in spans:
        path, _, name = span.partition(":")
        assert (ROOT / path).exists(), f"{page}: {span}"
        if name:
            assert name.strip(":") in definitions(ROOT / path), f"{page}: {span}"


# ---- commands and flags


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page, recorded_runs, capsys):
    """Every command is parsed by its script; `--config stage.json` reads what the chapter's own run would have left."""
    for words in commands(page):
        if words[0] == "bash":
            assert (ROOT / words[1]).is_file(), f"{page}: {shlex.join(words)}"
        elif ours(words):
            module, arguments = ours(words)
            if "--config" in arguments:
                arguments[arguments.index("--config") + 1] = str(recorded_runs[module])
            parse(module, arguments, capsys)
        else:
            assert words[0] in ("source", "tensorboard"), f"{page}: nobody checks `{shlex.join(words)}`"


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_text_exist(page):
    known = FOREIGN | {"--help"} | names.ALIASES.keys() | set().union(*map(flags_of, ENTRY_SCRIPTS))
    for span in code_spans(prose(page)):
        for word in span.split():
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"{page}: {span}"


@pytest.mark.parametrize("page", STEPS)
def test_experiments_are_understood_by_their_step(page, recorded_runs, capsys):
    """The flags in the first column of "What to try", laid over the chapter's own run."""
    rows = tables(section(page, "What to try"))[0][1:]
    changes = [span for row in rows for span in code_spans(row[0]) if span.startswith("--")]
    assert len(rows) >= 4 and changes and all(row[-1] for row in rows), "each says how to know that it was seen"
    for change in changes:
        parse(STEPS[page], ["--config", str(recorded_runs[STEPS[page]]), *shlex.split(change)], capsys)


def test_what_the_readme_says_is_not_there_is_not_there():
    """When one of these arrives, its line under "Not yet" goes."""
    said = section("README.md", "Not yet, and not offered")
    for words in ("QLoRA", "DPO", "GRPO", "vLLM", "pretraining-text"):
        assert words in said
    flags = set().union(*map(flags_of, ENTRY_SCRIPTS))
    assert not flags & {
        "--ptx_coef",
        "--algorithm",
        "--preset",
    }
    assert not list((ROOT / "step3_rlhf").glob("*dpo*"))


@pytest.mark.parametrize("page", STEPS)
def test_the_chapters_command_is_the_recipes(page):
    """ "What run_all_tiny.sh runs" is what it runs, word for word."""
    script = page.replace("README.md", "train.py")
    recipe = (ROOT / "scripts/run_all_tiny.sh").read_text().replace("\\\n", " ")
    line = next(line for line in recipe.splitlines() if line.startswith("stage ") and script in line)
    wanted = shlex.split(line.replace("$out", "out/tiny").replace("$seed", "1").partition(script)[2])
    shown = [words for words in commands(page) if script in words and "--config" not in words]
    assert wanted in [words[words.index(script) + 1 :] for words in shown]


# ---- metric names


def names_in(page: str, second_heading: str) -> set[str]:
    """The names in the first column of the Metrics tables whose second column has this heading."""
    rows = [row for table in tables(section(page, "Metrics")) if table[0][1] == second_heading for row in table[1:]]
    assert rows and all(row[1] for row in rows), f"{page}: a name without an explanation"
    return {span for row in rows for span in code_spans(row[0])}


def figure_names(page: str) -> list[str]:
    """Keys of the dictionary that an entry script's `figures` returns."""
    tree = ast.parse((ROOT / page).with_name("train.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "figures" and isinstance(node.value, ast.Lambda):
            return [key.value for key in node.value.body.keys]
        if isinstance(node, ast.FunctionDef) and node.name == "figures":
            return [key.value for key in node.body[-1].value.keys]
    raise AssertionError(f"{page}: no figures in train.py")


class StillModel:
    """A model that learns nothing: what is of interest is which names the loop logs."""

    device = torch.device("cpu")

    def train_step(self, micro_batches, loss_fn, step, rows):
        from common.engine import StepResult

        return StepResult({"loss": 1.0}, 1.0, 1.0)

    def evaluating(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize("page", ["step1_sft/README.md", "step2_reward/README.md"])
def test_every_metric_of_a_supervised_step_is_explained(page):
    from common import supervised

    figures = figure_names(page)
    task = supervised.Task(
        length=lambda example: 1,
        collate=lambda examples, filler: {},
        loss=lambda batch: (torch.tensor(1.0), {}),
        count=len,
        figures=lambda sums, count: dict.fromkeys(figures, 0.0),
    )
    log = one_rank.Recorded()
    supervised.train(StillModel(), [0, 1], [0], task, supervised.Batches(2, 1, 1.0, 0, 0, 1), log)
    assert names_in(page, "formula") == set().union(*log.rows.values())
    timings = set().union(*log.timings.values())
    assert "step" not in timings, "timings.jsonl already has a `step`, its number: call the seconds otherwise"
    assert names_in(page, "what it is") == timings | {"time"}


def assigned_keys(tree: ast.AST, name: str) -> set[str]:
    """Keys of `name["key"] = ...` and of `name | {"key": ...}`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and getattr(target.value, "id", "") == name:
                    found.add(target.slice.value)
        if isinstance(node, ast.BinOp) and getattr(node.left, "id", "") == name and isinstance(node.right, ast.Dict):
            found |= {key.value for key in node.right.keys}
    return found


def test_every_metric_of_ppo_is_explained():
    from common.engine import StepResult
    from step3_rlhf import ppo_metrics
    from step3_rlhf.experience import Experience

    rows, row = torch.zeros(2, 3), torch.zeros(2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    experience = Experience(rows, mask, rows, mask, rows, row.bool(), row, rows, rows, rows, rows)
    names = ("loss", "error", "clipfrac", "ratio", "ratio_sq", "approxkl", "policy_loss", "kl_loss")
    result = StepResult(dict.fromkeys(names, 1.0), 1.0, 1.0)
    logged = set(ppo_metrics.objective_metrics(experience, rows, row, 0.1))
    logged |= set(ppo_metrics.update_metrics([result], [result], [1.0]))
    logged |= set(ppo_metrics.source_metrics("<source>", row))
    trainer = ast.parse((ROOT / "step3_rlhf/ppo_trainer.py").read_text())
    logged |= assigned_keys(trainer, "metrics")
    page = "step3_rlhf/README.md"
    assert names_in(page, "formula") == logged
    assert names_in(page, "what it is") == assigned_keys(trainer, "seconds") | {"time"}


def test_every_figure_of_the_summary_is_explained():
    from scripts import tiny_summary

    table = next(t for t in tables(read("README.md")) if t[0][0] == "name in summary.json")
    explained = {span for row in table[1:] for span in code_spans(row[0])}
    assert explained == {"seed", "seconds", "qualities", *tiny_summary.FIGURES}


# ---- the file tree


def tree_lines() -> list[tuple[str, str, str]]:
    """(folder, pattern, gloss) for every file line of the tree."""
    block = next(b for b in fenced("README.md", "") if b.startswith("README.md "))
    found, folders = [], {0: ""}
    for line in block.splitlines():
        left, _, gloss = re.sub(r" {3,}(?=\S)", "\t", line.lstrip(), count=1).partition("\t")
        depth = (len(line) - len(line.lstrip())) // 2
        if left.endswith("/"):
            folders[depth + 1] = folders[depth] + left
        else:
            found += [(folders[depth], pattern.strip(), gloss) for pattern in left.split(",")]
    return found


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if done.returncode or not done.stdout:
        pytest.skip("not a git checkout: nobody says which files are tracked")
    return done.stdout.splitlines()


def test_every_tracked_file_has_its_line_in_the_tree():
    lines = tree_lines()

    def has_a_line(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return any(folder == f.rstrip("/") and fnmatch.fnmatchcase(name, pattern) for f, pattern, _ in lines)

    assert [path for path in tracked_files() if not has_a_line(path)] == []


def test_every_line_of_the_tree_names_a_file_and_says_what_it_is():
    for folder, pattern, gloss in tree_lines():
        assert list((ROOT / folder).glob(pattern)), f"the tree names {folder}{pattern}, which is not there"
        assert gloss.strip(), f"{folder}{pattern} has no gloss"


# ---- numbers and code that can be checked


def test_the_worked_example_is_what_the_code_computes():
    from common.tensor_ops import masked_moments, whiten
    from step3_rlhf.advantages import gae, token_rewards
    from step3_rlhf.kl import kl_estimate
    from step3_rlhf.losses import policy_loss

    first, second = tables(section("step3_rlhf/README.md", "A worked example"))
    numbers = {row[0].split(" ")[0].strip("`"): [float(x) for x in row[1:]] for row in first[1:]}
    given = {name: torch.tensor([values], dtype=torch.float64) for name, values in numbers.items()}
    mask = torch.ones(1, 3, dtype=torch.bool)
    kl = kl_estimate(given["logprobs"], given["ref_logprobs"], "k1")
    rewards = token_rewards(torch.tensor([2.0], dtype=torch.float64), kl, mask, 0.1)
    values = given["values"]
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    whitened = whiten(advantages, mask, masked_moments(advantages, mask))
    delta = rewards + torch.cat([values[:, 1:], torch.zeros(1, 1)], 1) - values
    computed = {"kl": kl, "rewards": rewards, "delta": delta, "advantages": advantages, "returns": returns}
    for name, tensor in (computed | {"whitened": whitened}).items():
        assert numbers[name] == pytest.approx(tensor[0].tolist(), abs=6e-5), name

    rows = [row[1:] for row in second[1:]]
    ratio, unclipped, clipped, loss = ([float(x) for x in row] for row in rows[:4])
    ratios = torch.tensor([ratio], dtype=torch.float64)
    assert unclipped == pytest.approx((-whitened * ratios)[0].tolist(), abs=6e-5)
    assert clipped == pytest.approx((-whitened * ratios.clamp(0.8, 1.2))[0].tolist(), abs=6e-5)
    for t, is_clipped in enumerate(rows[4]):
        new_logprobs = (given["logprobs"] + ratios.log())[:, t : t + 1]
        old, advantage, on = given["logprobs"][:, t : t + 1], whitened[:, t : t + 1], mask[:, t : t + 1]
        kwargs = {"cliprange_low": 0.2, "cliprange_high": 0.2, "dual_clip": None}
        value, stats = policy_loss(new_logprobs, old, advantage, on, **kwargs)
        assert loss[t] == pytest.approx(value.item(), abs=6e-5)
        assert is_clipped == ("yes" if stats["clipfrac"].item() else "no")


def test_python_in_the_pages_is_python():
    for page in PAGES:
        for block in fenced(page, "python"):
            compile(block, page, "exec")
    space: dict = {}
    exec(next(block for block in fenced("README.md", "python") if "my_reward.py" in block), space)
    answers = [[{"role": "assistant", "content": "Seven minutes."}]]
    assert space["brief"](prompts=[[{"role": "user", "content": "How long?"}]], completions=answers) == [-0.2]


def test_no_number_is_left_to_be_filled_in():
    left = [f"{page}: {line.strip()}" for page in PAGES for line in read(page).splitlines() if "TODO(lead)" in line]
    assert not left, "measured numbers of the tiny run belong here before a release:\n" + "\n".join(left)


@pytest.mark.slow
def test_the_lines_by_hand_run_on_the_tiny_set(tmp_path):
    """As they stand in the README, one step each; only DeepSpeed's launcher is left to test_pipeline.py."""
    lines = [words for words in commands("README.md") if "--dataset tiny" in " ".join(words)]
    at = commands("README.md").index(lines[0])
    for words in commands("README.md")[at : at + 4]:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        limit = "" if "prepare" in words[script] else " --max_steps 1"
        done = stage_processes.run(words[script], " ".join(words[script + 1 :]) + limit, tmp_path)
        assert done.codes == [0], done.output
    assert (tmp_path / "models/rlhf/actor/stage.json").exists()
