"""report.py: one page from whatever a run has left; its figures, its words, and that no text gets out of its place."""

import base64
import hashlib
import importlib
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from common import cli
from common.errors import UserError
from scripts import report, report_charts, report_files, report_glossary, report_words, tiny_summary

ROOT = Path(__file__).resolve().parent.parent
EVIL = (
    "<script>alert(1)</script> \x1b[31m\x07\x00 \u202e\u2028 \ud800 \"'><img src=x onerror=alert(2)></figure> {{ 7*7 }}"
)
SFT = [
    {"step": 1, "loss": 4.0, "mean_token_accuracy": 0.25, "learning_rate": 0.001, "num_tokens": 10, "epoch": 0.5},
    {"step": 2, "loss": 2.0, "mean_token_accuracy": 0.5, "learning_rate": 0.001, "num_tokens": 20, "epoch": 1.0}
    | {"eval_loss": math.log(8), "eval_mean_token_accuracy": 0.5},
]
REWARD = [
    {"step": step, "loss": 0.7, "accuracy": accuracy, "margin": 0.1, "mean_reward": 0.0}
    for step, accuracy in ((1, 0.5), (2, 0.75))
]
REWARD[-1]["eval_accuracy"] = 0.8
PPO = [
    {"step": step, "objective/scores": score, "objective/kl": kl, "kl_coef": 0.1, "policy/clipfrac_avg": clip}
    | {"completions/mean_length": 20.0 + step, "completions/min_length": 3.0, "completions/max_length": 40.0}
    | {"rewards/rm/mean": score, "loss/value_avg": 1.0 / step}
    for step, score, kl, clip in ((1, 0.25, 0.0, 0.015), (2, 1.5, 1.0, 0.01), (3, 3.0, 2.5, 0.005))
]
SECONDS = [{"step": s, "time": 1e9 + s, "generate": 1.0, "score": 2.0, "update": 5.0, "total": 8.0} for s in (1, 2, 3)]


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def stage(name, args):
    return json.dumps({"stage": name, "format_version": 1, "args": args, "files": {}, "seed": 1, "packages": {}})


def answer(model, text, score, prompt="How?", **more):
    row = {"model": model, "row": 0, "prompt": [{"role": "user", "content": prompt}], "response": text}
    return row | {"length": len(text), "truncated": False, "score": score, "reward": score} | more


def evaluation(low, high, **after):
    shared = {"score_interval": [0.4, 0.6], "distinct_responses": 0.9, "eos_rate": 1.0}
    before = shared | {"model": "o/sft", "score": 0.5, "reward": 0.0}
    after = shared | {"model": "o/rlhf/actor", "score": 1.25, "reward": 1.0} | after
    gap = {"model": "o/rlhf/actor", "minus": "o/sft", "score": 0.75, "score_interval": [low, high]}
    return {"judge": "j.py:f", "num_samples": 2, "models": [before, after], "differences": [gap]}


@pytest.fixture
def out(tmp_path):
    """A small finished recipe, written by hand."""
    root = tmp_path / "out"
    for name, rows in (("sft", SFT), ("reward", REWARD), ("rlhf", PPO)):
        (root / name).mkdir(parents=True)
        (root / name / "metrics.jsonl").write_text(lines(rows))
        (root / name / "timings.jsonl").write_text(lines({"step": r["step"], "time": 1e9, "total": 0.5} for r in rows))
    (root / "rlhf" / "timings.jsonl").write_text(lines(SECONDS))
    sample = {"row": 0, "prompt": "Why so?", "score": 1.0, "kl": 0.5, "length": 3, "truncated": True}
    (root / "rlhf" / "samples.jsonl").write_text(
        lines(sample | {"step": s, "response": f"Because {s}."} for s in (1, 3))
    )
    (root / "rlhf" / "actor").mkdir()
    (root / "sft" / "stage.json").write_text(stage("sft", {"learning_rate": 0.003, "seed": 1, "max_length": 1024}))
    (root / "reward" / "stage.json").write_text(stage("reward", {"seed": 1}))
    (root / "rlhf" / "actor" / "stage.json").write_text(
        stage("rlhf-actor", {"kl_coef": 0.1, "actor": "o/sft", "sample_steps": 2})
    )
    (root / "evaluation.json").write_text(json.dumps(evaluation(0.5, 1.0)))
    rows = [answer("o/sft", "Meh.", -1.0), answer("o/sft", "Well.", 0.0, "Who?")]
    rows += [answer("o/rlhf/actor", "Gladly!", 2.0), answer("o/rlhf/actor", "Nobody.", -0.5, "Who?")]
    (root / "evaluation.samples.jsonl").write_text(lines(rows))
    (root / "logs").mkdir()
    (root / "logs" / "rlhf.seconds").write_text("30.0\n")
    (root / "logs" / "data.seconds").write_text("6.0\n")
    return root


class Page(HTMLParser):
    """The page as a browser takes it: text by section, tags in order, elements closed in the order they were opened."""

    VOID = {"meta", "br", "img", "input", "link", "hr"}

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html.replace("<wbr>", ""))
        assert self.open == [], "elements that are never closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        while self.open and self.open[-1] in ("p", "li", "dd", "dt") and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += " " + " ".join(data.split())

    def has(self, *words):
        text = " ".join(self.text.split())
        assert [w for w in words if w not in text] == []


def page_of(folder, capsys=None) -> Page:
    report.main([str(folder)])
    return Page(folder / "report.html")


# ---- the whole page


def test_a_finished_recipe_has_everything(out, capsys):
    page = page_of(out)
    assert capsys.readouterr().out.startswith(f"report: {out / 'report.html'} (")
    page.has(
        "Yes. On unseen prompts its answers got better.", "Step 1: supervised fine-tuning", "Step 2: the reward model"
    )
    page.has("KL against reward", "loss 4.000 → 2.000, held out 2.079", "objective/scores 0.250 → 3.000")
    page.has("How?", "Meh.", "Gladly!", "score -1.00 · reward -1.00 · 4 tokens", "Those that lost most")
    page.has("step 1 Why so? score 1.00 · KL 0.50 · 3 tokens, cut by length Because 1.", "Because 3.")
    page.has("learning_rate 0.003 1e-05 peak learning rate", "2 flags at their default")
    page.has("Constant: kl_coef 0.100", "num_tokens 20 · epoch 1.000")
    page.has("generate 3.0 s, 10%", "update 15.0 s, 50%", "rest 6.0 s, 20%", "0:30", "0:06")
    assert "Not here, or not readable" not in page.text and "Not finished" not in page.text
    healthy = (ROOT / "step3_rlhf/README.md").read_text().split("| `objective/scores` |")[1].split("|")[1].strip()
    assert page.text.count(healthy) == 2, "once under the curve, once in the glossary"


def test_the_page_needs_nothing_else_and_runs_only_its_own_script(out):
    page = page_of(out)
    assert page.tags.count("script") == 1 and not {"img", "link", "iframe", "image"} & set(page.tags)
    for attributes in page.attributes:
        assert "src" not in attributes and not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert re.findall(r"url\((?!#)", page.html) == [] and "@import" not in page.html
    script = page.html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for a in page.attributes if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_links_within_the_page_lead_somewhere(out):
    page = page_of(out)
    ids = [attributes["id"] for attributes in page.attributes if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id is there twice"
    targets = {a["href"] for a in page.attributes if a.get("href")}
    targets |= {"#" + name for a in page.attributes for name in re.findall(r"url\(#(\w+)\)", a.get("clip-path", ""))}
    assert len(targets) > 20 and {target[1:] for target in targets} <= set(ids)


def test_text_from_files_stays_text(out):
    rows = [json.loads(line) for line in (out / "evaluation.samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"response": EVIL, "prompt": [{"role": "user", "content": EVIL}]}
    (out / "evaluation.samples.jsonl").write_text(lines(rows))
    (out / "rlhf" / "samples.jsonl").write_text(lines([{"step": 1, "prompt": EVIL, "response": EVIL, "score": EVIL}]))
    (out / "rlhf" / "metrics.jsonl").write_text(lines(row | {EVIL: row["step"]} for row in PPO))
    (out / "sft" / "stage.json").write_text(stage("sft", {"learning_rate": EVIL, EVIL: EVIL}))
    (out / "evaluation.json").write_text(json.dumps(evaluation(1, 2) | {"judge": EVIL}))
    page = page_of(out)
    assert page.tags.count("script") == 1 and "img" not in page.tags and page.tags.count("html") == 1
    assert not any(ord(c) < 32 and c != "\n" for c in page.html), "control bytes"
    assert not set("\u202e\u2028\x7f") & set(page.html)
    harmless = r"<script>alert(1)</script> \x1b[31m\x07\x00 \u202e\u2028 \ud800"
    assert page.text.count(harmless) > 10 and "{{ 7*7 }}" in page.text
    names = [json.loads(a["data-points"])["series"] for a in page.attributes if "data-points" in a]
    assert {"", "KL", "reward"} <= set().union(*names)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("evaluation.json", None, ["Not judged yet.", "No answers before and after"]),
        ("evaluation.json", b"{", ["evaluation.json: is not json", "Not judged yet."]),
        ("evaluation.json", b"[1]", ["evaluation.json: holds a list, wanted names and values"]),
        ("evaluation.json", b'{"models": 3}', ["evaluation.json: has no judge, wanted text"]),
        ("evaluation.samples.jsonl", None, ["evaluation.samples.jsonl: No such file", "Yes. On"]),
        ("rlhf/timings.jsonl", None, ["rlhf/timings.jsonl: No such file", "0:30"]),
        ("rlhf/samples.jsonl", None, ["rlhf/samples.jsonl: No such file"]),
        ("rlhf/actor/stage.json", None, ["no readable stage.json", "Not finished: step 3 is the last one written, "]),
        ("rlhf/actor/stage.json", b"{}", ["no readable stage.json"]),
        ("sft/stage.json", b"\xff\x00", ["sft/stage.json: is not UTF-8 text (byte 0)", "Not finished"]),
        ("sft/stage.json", b'{"stage": "sft"}', ["sft/stage.json: has no format_version, wanted a whole number"]),
        ("summary.json", b'{"gold_sft": 1' + b"0" * 400 + b"}", ["Step 1"]),
        ("summary.json", b"[" * 99999, ["summary.json: is nested too deeply"]),
        ("logs/rlhf.seconds", b"soon", ["0:24"]),
        ("summary.json", b'{"gold_sft": 1}', ["The figures of summary.json", "gold score, SFT 1"]),
        ("rlhf/metrics.jsonl", b"", ["finished · 0 steps"]),
        ("reward/metrics.jsonl", None, ["Step 2: the reward model: no folder of it"]),
    ],
)
def test_what_is_missing_or_damaged_is_said(out, file, content, words):
    if content is None:
        (out / file).unlink()
    else:
        (out / file).write_bytes(content)
    page_of(out).has(*words)


def test_a_stage_that_has_just_begun(out):
    (out / "rlhf" / "metrics.jsonl").write_text("")
    (out / "rlhf" / "actor" / "stage.json").unlink()
    page_of(out).has("rlhf. Not finished: no step has been written yet.")


def test_torn_lines_are_left_out_and_counted(out):
    good = lines(PPO)
    noise = '{"step": 4, "objective/sco\nnot json\n[1]\n{"no step": 1}\n'
    (out / "rlhf" / "metrics.jsonl").write_text(
        good[: good.index("\n") + 1] + noise + good[good.index("\n") + 1 :] + '{"st'
    )
    page = page_of(out)
    page.has("rlhf/metrics.jsonl: 4 of 7 lines cannot be read and are left out", "the last line is torn")
    page.has("objective/scores 0.250 → 3.000")


def test_a_single_stage_has_a_page_of_its_own(out):
    page = page_of(out / "rlhf")
    page.has("Step 3", "KL against reward", "Where the time went")
    assert "Step 1" not in page.text and "Not here" not in page.text


def test_a_run_of_one_step_and_metrics_that_no_readme_knows(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 1, "logps/chosen": -3.5, "rewards/margins": 0.5}\n')
    page_of(tmp_path).has("new", "logps/chosen -3.500", "rewards/margins 0.500")


def test_nothing_to_show_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl in it or in its folders"):
        report.main([str(tmp_path)])
    with pytest.raises(UserError, match="no such folder"):
        report.main([str(tmp_path / "nowhere")])
    done = subprocess.run([sys.executable, ROOT / "scripts/report.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ---- did it learn?


def judged(record) -> tuple[str, list[str]]:
    models = {entry["model"]: entry for entry in record["models"]}
    gaps = {entry["model"]: entry for entry in record["differences"]}
    found = report_files.Evaluation(record["judge"], models, {}, gaps)
    level, headline, said = report_words.verdict([], found, False, [])
    return f"{level}: {headline.split()[0]}", [text for _, _, text in said]


@pytest.mark.parametrize(
    "interval, verdict",
    [
        ((0.5, 1.0), "good: Yes."),
        ((-0.1, 1.6), "unclear: Cannot"),
        ((-2.0, -0.5), "bad: No."),
        ((0.0, 1), "unclear: Cannot"),
    ],
)
def test_the_judges_interval_decides(interval, verdict):
    found, said = judged(evaluation(*interval))
    assert found == verdict
    assert said[0].startswith("j.py:f gave 0.50 before and 1.25 after: +0.75, with a 95% interval of ")
    assert said[0].endswith(f"{interval[0]:+.2f} to {interval[1]:+.2f}.")


def test_the_judge_may_have_no_opinion():
    record = evaluation(0, 0)
    record["differences"][0] |= {"score": None, "score_interval": None}
    assert judged(record) == ("unclear: Cannot", [])


def test_what_looks_bad_after_training_is_said():
    assert not any("over-optimisation" in text for text in judged(evaluation(0.5, 1.0))[1])
    assert any("0.00 before and 1.00 after: over-optimisation" in text for text in judged(evaluation(-1, -0.5))[1])
    assert not any("over-" in text for text in judged(evaluation(-1, -0.5, reward=-1.0))[1])
    assert any("Only 20% of the answers differ" in text for text in judged(evaluation(1, 2, distinct_responses=0.2))[1])
    assert any("Only 50% of the answers ended" in text for text in judged(evaluation(1, 2, eos_rate=0.5))[1])


def test_each_stage_in_words(out):
    words = page_of(out)
    words.has(
        "In 2 steps the loss went from 4.00 to 2.00, 2.08 on unseen data: as unsure of each token as between 8 equally"
    )
    words.has("It puts the better answer first in 80% of unseen pairs; a coin would in 50%.")
    words.has(
        "In 3 steps the reward of sampled answers went from 0.25 to 3.00, 2.5 nats (KL) away from where it started"
    )
    words.has("21 tokens an answer became 23.")


def test_numbers_that_are_not_finite_are_named(out):
    rows = [dict(row) for row in PPO]
    rows[1]["loss/value_avg"], rows[2]["loss/value_avg"] = None, None
    (out / "rlhf" / "metrics.jsonl").write_text(lines(rows))
    page = page_of(out)
    page.has("loss/value_avg was no finite number at 2 of its steps, first at step 2.")
    del rows[1]["loss/value_avg"], rows[2]["loss/value_avg"]  # a figure that is not of every step is no fault
    (out / "rlhf" / "metrics.jsonl").write_text(lines(rows))
    assert "no finite number" not in page_of(out).text


def test_the_negative_control_is_called_so(out):
    (out / "settings").write_text("SEED=1 SHUFFLE_PREFERENCES=1\n")
    page_of(out).has("Negative control. A coin decided")


def test_figures_lie_beside_their_bands(out, monkeypatch):
    figures = dict.fromkeys(tiny_summary.FIGURES, 1.0) | {"kl": 9.0}
    monkeypatch.setattr(tiny_summary, "bands", lambda _: {"kl": (2.0, 4.0), "gold_sft": (0.0, 2.0)})
    monkeypatch.setattr(tiny_summary, "REFERENCES", out)
    ranges = {"sft: loss": [[3.5, 4.5], [1.5, 2.5]], "sft: eval_loss": [[2.0, 2.25]] * 2}
    record = {"runs": [figures] * 4, "ranges": ranges, "curves": {"rlhf: objective/scores": [[0, 1, 2], [1, 2, 4]]}}
    (out / "tiny.json").write_text(json.dumps(record))
    (out / "summary.json").write_text(json.dumps(figures | {"seed": 1, "seconds": 3}))
    (out / "settings").write_text("SEED=1 SHUFFLE_PREFERENCES=0 DATASET=none")
    assert "reference runs" not in page_of(out).text
    (out / "settings").write_text("SEED=1 SHUFFLE_PREFERENCES=0")
    page = page_of(out)
    page.has("KL from SFT, nats an answer 9.000 2.00 to 4.00 OUTSIDE", "gold score, SFT 1.000 0.00 to 2.00 inside")
    page.has("4 reference runs: 3.500 to 4.500 at first, 1.500 to 2.500 at the end; held out 2.000 to 2.250")
    page.has("4 reference runs, lowest to highest")
    # From 2 to 9 with a tenth of 7 on either side: 2 lies at 0.7 of 8.4, 4 at 2.7, 9 at 7.7.
    (row,) = [row for row in report.figures(figures, {"kl": (2.0, 4.0)}) if row["band"]]
    assert [row["low"], row["high"], row["at"]] == pytest.approx([100 * x / 8.4 for x in (0.7, 2.7, 7.7)])
    (out / "settings").write_text("SHUFFLE_PREFERENCES=1")
    assert "OUTSIDE" not in page_of(out).text and "reference runs" not in page_of(out).text


@pytest.mark.parametrize("dataset", ["tiny", "tiny_zh"])
def test_the_reference_runs_that_are_kept_can_be_drawn(out, dataset):
    figures = dict.fromkeys(tiny_summary.FIGURES, 1.0)
    (out / "summary.json").write_text(json.dumps(figures | {"seed": 1, "seconds": 3}))
    (out / "settings").write_text(f"SEED=1 SHUFFLE_PREFERENCES=0 DATASET={dataset}".removesuffix(" DATASET=tiny"))
    page_of(out).has("reference runs, lowest to highest", "at first,", "OUTSIDE")
    for low, high in tiny_summary.bands(tiny_summary.REFERENCES / f"{dataset}.json").values():
        assert low < high


def test_what_was_not_learned_is_in_the_verdict(out):
    shares = {"polite": [0.25, 0.75, "better"], "topic": [0.5, 0.5, "same"]}
    (out / "summary.json").write_text(json.dumps({"gold_sft": 1, "qualities": shares}))
    page = page_of(out)
    page.has("Learned. polite openings (25% before, 75% after).")
    page.has("Not learned. the right topic, among answers that are not lazy (50% before, 50% after).")
    for damaged in ({"manners": [0, 1, "better"]}, {"polite": ["a", 1, "same"]}, 3, {"polite": [1]}):
        (out / "summary.json").write_text(json.dumps({"qualities": damaged}))
        assert "earned." not in page_of(out).text.replace("Did it learn?", "")


# ---- answers


def test_pairs_are_the_first_the_best_and_the_worst(out):
    before, after = [0, 0, 0, 0, 0, 0, 0, 0, 5, 5], [0, 0, 0, 0, 0, 0, 1, 3, 1, 5]
    rows = [answer("o/sft", f"b{i}", s, f"p{i}") for i, s in enumerate(before)]
    rows += [answer("o/rlhf/actor", f"a{i}", s, f"p{i}") for i, s in enumerate(after)]
    (out / "evaluation.samples.jsonl").write_text(lines(rows))
    shown = report.compared(report_files.read_evaluation(out, []))["pairs"]
    assert [[pair[0]["response"] + pair[1]["response"] for pair in pairs] for pairs in shown.values()] == [
        ["b0a0", "b1a1", "b2a2", "b3a3", "b4a4", "b5a5"],
        ["b7a7", "b6a6"],
        ["b8a8"],
    ]
    rows[10]["prompt"] = "another"  # not the same question: not side by side
    (out / "evaluation.samples.jsonl").write_text(lines(rows))
    first, *_ = report.compared(report_files.read_evaluation(out, []))["pairs"].values()
    assert first[0][0]["response"] == "b1"


@pytest.mark.parametrize(
    "paths, labels",
    [
        (["out/tiny/sft", "out/tiny/rlhf/actor"], ["sft", "rlhf/actor"]),
        (["models/sft"], ["models/sft"]),
        (["/a/sft", "b/sft"], ["/a/sft", "b/sft"]),
    ],
)
def test_models_are_called_by_what_tells_them_apart(paths, labels):
    found = report_files.Evaluation("j", {path: {} for path in paths}, {}, {})
    assert [found.label(path) for path in paths] == labels


def test_prompts_are_shown_with_roles_where_there_are_several_messages():
    assert report.text_of([{"role": "user", "content": "Hi"}]) == "Hi"
    both = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert report.text_of(both) == "user: Hi\nassistant: Ho" and report.text_of("Hi") == "Hi"
    assert report.text_of("x" * 1502) == "x" * 1500 + " ... (2 more characters)"


def test_steps_are_spread_evenly():
    assert report.spread([1, 2, 3], 8) == [1, 2, 3]
    assert report.spread(list(range(0, 101)), 5) == [0, 25, 50, 75, 100]


# ---- charts


def drawn(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """The points of each path that is stroked in a colour."""
    found = re.findall(rf'<path d="([^"]*)"[^>]*style="[^"]*stroke: var\(--{colour}\)', svg)
    return [[tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", path)] for path in found]


def test_a_curve_is_where_its_numbers_are():
    chart = report_charts.curve("x", [1, 2, 3], [0.0, 1.0, 4.0], held_out={3: 2.0})
    (line,) = [path for path in drawn(chart.svg, "c1") if len(path) == 3]
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02) and (y0 - y1) * 4 == pytest.approx(y0 - y2, abs=0.05)
    assert [x / 280.8 for x in (x0, x1, x2)] == pytest.approx(chart.at, abs=1e-3)  # 3.9 inches of 72 points
    (dot,) = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', chart.svg)
    assert float(dot[0]) == x2 and (y0 - float(dot[1])) * 2 == pytest.approx(y0 - y2, abs=0.05)
    assert chart.series == {"": [0.0, 1.0, 4.0], "held out": [None, None, 2.0]} and not chart.is_log


@pytest.mark.parametrize(
    "values, labels",
    [
        ([0.001, 0.016], {"0.004", "0.008", "0.016"}),
        ([0.999, 1.001], {"0.9995", "1", "1.0005"}),
        ([0.0, 0.001], {"2.5e-4", "5e-4", "7.5e-4", "0.001"}),
        ([0.0, 1.3e-5], {"0", "4e-6", "1.2e-5"}),
        ([0.0, 1.3e-10], {"4e-11", "1.2e-10"}),
    ],
)
def test_labels_keep_their_digits(values, labels):
    chart = report_charts.curve("x", [1, 2], values, held_out={})
    assert labels <= set(re.findall(r">(?:<!--.*?-->)?([^<>]+)</text>", chart.svg.replace("\u2212", "-")))


@pytest.mark.parametrize(
    "values, is_log",
    [([8.0, 1.0, 0.5], True), ([0.1, 0.5, 3.0], False), ([8.0, 1.0, -0.5], False), ([8.0, 1.5, 1.0], False)]
    + [([1.0, 0.5, 0.01], False)],  # a schedule that ends near 0 should look like the line it is
)
def test_what_falls_far_has_a_logarithmic_scale(values, is_log):
    chart = report_charts.curve("x", [1, 2, 3], values, held_out={})
    assert chart.is_log == is_log
    (line,) = [path for path in drawn(chart.svg, "c1") if len(path) == 3]
    scale = math.log if is_log else float
    shares = [(line[0][1] - y) / (line[0][1] - line[2][1]) for _, y in line]
    assert shares[1] == pytest.approx(
        (scale(values[0]) - scale(values[1])) / (scale(values[0]) - scale(values[2])), abs=0.01
    )


def test_pictures_take_their_colours_from_the_page_and_share_no_names():
    pictures = [report_charts.curve(key, [1, 2], [1.0, 2.0], held_out={}).svg for key in "ab"]
    for svg in pictures:
        assert not re.search(r"#[0-9a-fA-F]{6}\b", svg) and "font-family" not in svg and "<style" not in svg
    first, second = (set(re.findall(r'id="(\w+)"', svg)) for svg in pictures)
    assert first and not first & second
    assert pictures[0] == report_charts.curve("a", [1, 2], [1.0, 2.0], held_out={}).svg


def test_long_curves_are_thinned_to_means():
    assert report_charts.thin([1, 2, 3, 4, 5], [1.0, 2.0, 6.0, 10.0, 20.0], 2) == ([3, 5], [3.0, 15.0])
    assert report_charts.thin([1, 2, 3, 4], [1.0, 3.0, 5.0, 7.0], 2) == ([2, 4], [2.0, 6.0])
    assert report_charts.thin([7, 9], [1.0, 2.0], 2) == ([7, 9], [1.0, 2.0])
    chart = report_charts.curve("x", range(1, 100_001), [float(i % 7) for i in range(100_000)], held_out={5: 1.0})
    assert len(chart.at) <= 400 and chart.step[-1] == 100_000 and len(chart.svg) < 60_000


def test_the_running_mean_is_centred_and_begins_and_ends_on_the_curve():
    assert report_charts.running_mean([1.0, 2.0, 6.0, 1.0], 1) == [1.0, 3.0, 3.0, 1.0]
    assert report_charts.running_mean([0.0, 0.0, 10.0, 0.0, 5.0], 2) == pytest.approx([0, 10 / 3, 3, 5, 5])


def test_distributions_are_shares_of_each_group():
    chart = report_charts.histogram("x", [[0, 0, 0, 1], [1, 1]])
    heights = []
    for colour in ("c1", "c2"):
        path = max(drawn(chart.svg, colour), key=len)
        floor = max(y for _, y in path)
        heights.append(sorted({round(floor - y, 1) for _, y in path}))
    assert heights[0][1] * 3 == pytest.approx(heights[0][2], abs=0.3), "a quarter and three quarters"
    assert heights[0][1] * 4 == pytest.approx(heights[1][-1], abs=0.3), "all of the second group"


def test_the_path_through_kl_and_reward(out):
    page = page_of(out)
    points = [json.loads(a["data-points"]) for a in page.attributes if "data-points" in a]
    (path,) = [p for p in points if "KL" in p["series"]]
    assert path["series"] == {"KL": [0.0, 1.0, 2.5], "reward": [0.25, 1.5, 3.0]} and path["step"] == [1, 2, 3]
    assert path["at"][1] - path["at"][0] == pytest.approx((path["at"][2] - path["at"][0]) / 2.5, abs=1e-3)


# ---- settings and glossary


def options(module: str) -> dict:
    """Name -> default as text of every flag, from the parser itself."""
    found = {}

    class Seen(Exception):
        pass

    def stop(parser, *_):
        for action in parser._actions:
            if action.help != "==SUPPRESS==" and action.dest != "help":
                unsaid = action.required or action.default is None or action.default is False
                found[action.option_strings[0].lstrip("-")] = "" if unsaid else str(action.default)
        raise Seen

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Seen):
        patch.setattr(cli.Parser, "parse_args", stop)
        importlib.import_module(module).parse_args([])
    return found


@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step3_rlhf"])
def test_defaults_read_from_the_help_are_the_parsers(step):
    found = report_files.flags_of(ROOT / step / "train.py")
    assert {name: default for name, (_, default) in found.items()} == options(f"{step}.train")
    assert found["learning_rate"][0] == "peak learning rate"
    assert report_files.flags_of(ROOT / step / "nowhere.py") == {}


def test_settings_that_are_not_the_default_come_first(out):
    run, *_ = report_files.find_runs(out, report_glossary.read_chapters(), [])
    found = report.settings(run)
    assert [row[:3] for row in found["changed"]] == [("learning_rate", "0.003", "1e-05")]
    assert [row[0] for row in found["default"]] == ["max_length", "seed"], "in the order of --help"


def test_every_metric_of_the_readmes_is_found():
    chapters = {chapter.path: chapter for chapter in report_glossary.read_chapters()}
    assert list(chapters) == ["step1_sft/README.md", "step2_reward/README.md", "step3_rlhf/README.md"]
    for path, chapter in chapters.items():
        text = (ROOT / path).read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
        rows = [line for line in text.splitlines() if line.startswith("| `")]
        assert len(rows) == len(chapter.entries) + len(chapter.timings) > 8
        for name in re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in rows)):
            assert any(name in entry.names for entry in chapter.entries + chapter.timings)
    ppo = chapters["step3_rlhf/README.md"]
    assert ppo.find("rewards/my judge/mean").names == ("rewards/<source>/mean", "rewards/<source>/std")
    assert ppo.find("rewards//mean") is None and ppo.find("objective/klx") is None
    assert ppo.find("objective/kl").outside.startswith("above 10 for short answers")


def test_cells_become_html():
    assert report_glossary.inline("a < b & `x_1|<y>`") == "a &lt; b &amp; <code>x_1|&lt;y&gt;</code>"
    assert report_glossary.inline("[step 2](../x.md) says") == "step 2 says"
    formula = report_glossary.inline(r"mean of $\rho_t^2$")
    assert formula.startswith("mean of <math ") and "<mi>&#x003C1;</mi>" in formula and "$" not in formula


def test_stages_are_told_apart_by_what_they_log(out):
    (out / "zzz").mkdir()
    (out / "zzz" / "metrics.jsonl").write_text(lines(REWARD))
    runs = report_files.find_runs(out, report_glossary.read_chapters(), [])
    assert [(run.name, run.chapter.path[:5]) for run in runs] == [
        ("sft", "step1"),
        ("reward", "step2"),
        ("zzz", "step2"),
        ("rlhf", "step3"),
    ]
