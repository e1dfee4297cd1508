"""chat.py: says what the model says, with training's sampler and template, to a person, a pipe and a file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_models
import small_tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common.chat_format import encode_prompt
from common.errors import UserError
from common.generation import generate
from common.printing import printable
from scripts import answers, chat
from step0_data import formats

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def talkers(tmp_path_factory):
    return small_models.save_talkers(tmp_path_factory.mktemp("talkers"))


@pytest.fixture
def talk(talkers, monkeypatch, capsys):
    """talk(flags, lines) -> what is on the screen."""

    def run(flags: list, lines: list[str]) -> str:
        said = iter(lines)
        monkeypatch.setattr("builtins.input", lambda prompt: next(said))
        chat.main([*map(str, flags), "--max_completion_length", "20"])
        return capsys.readouterr().out

    return run


@pytest.fixture
def speaker(talkers):
    model = answers.Answerer(talkers / "b", "fp32", "cpu")
    return chat.Speaker("model", model, [])


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def greedy(folder, messages, new=20):
    """The greedy answer by transformers' own loop: its text, and its ids."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([encode_prompt(tokenizer, messages)])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    answer = whole[0, ids.shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True).removeprefix(" ")
    return text, answer.tolist()


def test_chat_says_what_the_model_says_and_remembers(talkers, talk):
    lines = ["Hi", "", "And?", "/reset", "Hi", "y" * 200, "/quit", "never asked"]
    shown = talk(["--model", talkers / "b", "--temperature", 0], lines)
    replies = [part.split("\n")[0] for part in shown.split("model: ")[1:]]
    first, ids = greedy(talkers / "b", [user("Hi")])
    second, _ = greedy(talkers / "b", [user("Hi"), assistant(first), user("And?")])
    assert len(replies) == 3 and replies[0] == replies[2]
    assert first != second and all(map(str.startswith, replies, [printable(t).split("\n")[0] for t in (first, second)]))
    assert ("(cut after 20 tokens)" in replies[0]) == (ids[-1] != small_tokenizers.characters().eos_token_id)
    assert "(forgotten)" in shown and "(too long: " in shown and "never asked" not in shown
    assert not any(ord(c) < 32 and c != "\n" for c in shown)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}])
def test_tokens_are_those_of_trainings_sampler(speaker, sampling):
    params = speaker.model.params(
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "max_new_tokens": 30} | sampling
    )
    prompt = encode_prompt(speaker.model.tokenizer, [user("Is a bee unhappy?")])
    for number in range(4):
        rollout = generate(speaker.model.hf, [prompt], params, step=number)
        wanted = rollout.response[0][rollout.mask[0]].tolist()
        assert list(chat.sampled_tokens(speaker.model, prompt, params, number)) == wanted


def test_compared_models_have_the_same_noise_and_memories_of_their_own(talkers, talk):
    shown = talk(["--compare", talkers / "b", talkers / "b", "--seed", 3], ["Hi", "And?", "/quit"])
    replies = shown.split(f"{talkers / 'b'}: ")[3:]  # after two lines that name template and model
    assert len(replies) == 4 and replies[1].removesuffix("And?\n") == replies[0] != replies[2]
    assert replies[3].removesuffix("/quit\n") == replies[2]
    lines = ["Hi", "And?", f"/save {talkers / 'both.jsonl'}", "/quit"]
    talk(["--compare", talkers / "a", talkers / "b", "--temperature", 0], lines)
    for line, name in zip((talkers / "both.jsonl").read_text().splitlines(), "ab", strict=True):
        record = json.loads(line)
        first, _ = greedy(talkers / name, [user("Hi")])
        second, _ = greedy(talkers / name, [user("Hi"), assistant(first), user("And?")])
        assert record["messages"] == [user("Hi"), assistant(first), user("And?"), assistant(second)]
        assert record["model"] == str(talkers / name)


def test_the_reward_is_that_of_plain_transformers(talkers, talk):
    shown = talk(["--model", talkers / "b", "--reward", talkers / "rm", "--temperature", 0], ["Hi", "/quit"])
    ids = encode_prompt(AutoTokenizer.from_pretrained(talkers / "b"), [user("Hi")])
    ids += greedy(talkers / "b", [user("Hi")])[1]
    score = AutoModelForSequenceClassification.from_pretrained(talkers / "rm")(torch.tensor([ids])).logits.item()
    assert f"reward {score:+.2f})" in shown


def test_the_system_message_is_read_and_saved(talkers, talk, tmp_path):
    file = tmp_path / "talk.jsonl"
    talk(["--model", talkers / "b", "--system", "Be brief.", "--temperature", 0], ["Hi", f"/save {file}", "/quit"])
    system = {"role": "system", "content": "Be brief."}
    text, _ = greedy(talkers / "b", [system, user("Hi")])
    assert json.loads(file.read_text())["messages"] == [system, user("Hi"), assistant(text)]


def test_what_is_saved_is_data_for_step_0(talkers, talk, tmp_path):
    file = tmp_path / "talk.jsonl"
    talk(["--model", talkers / "b"], ["Hi", f"/save {file}", "/reset", "Why?", f"/save {file}", "/quit"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["messages"][0] for row in rows] == [user("Hi"), user("Why?")]
    for row in rows:
        form, record = formats.convert(row)
        assert "sft" in form.feeds and record.prompt + record.answer == row["messages"]


def test_the_oldest_whole_turns_are_dropped(speaker, capsys):
    # 160 positions, 20 of them for the answer; a character is a token. "\n\nHuman: " is 9 and "\n\nAssistant: " 13, so
    # 20 characters answered by 10 are 9 + 20 + 13 + 10 and the end, 53; a new question 9 + 20 + 12 = 41. With <s> and
    # the system's S, two exchanges and a question are 149 tokens, more than 140.
    params = speaker.model.params(temperature=0, top_p=1.0, top_k=0, seed=0, max_new_tokens=20)
    system = {"role": "system", "content": "S"}
    turns = [user("1" * 20), assistant("1" * 10), user("2" * 20), assistant("2" * 10)]
    speaker.turns = list(turns)
    chat.ask(speaker, [system], "3" * 20, params, 0, None)
    assert "(the oldest 1 turn no longer fit and are forgotten)" in capsys.readouterr().out
    answer, _ = greedy(speaker.model.path, [system, *turns[2:], user("3" * 20)])
    assert speaker.turns == [*turns[2:], user("3" * 20), assistant(answer)]
    speaker.turns = [user("1" * 20), assistant("1" * 10), user("2" * 12), assistant("2" * 10)]  # 8 less, no S: 140
    chat.ask(speaker, [], "3" * 20, params, 0, None)
    assert "forgotten" not in capsys.readouterr().out and len(speaker.turns) == 6


def test_a_question_that_cannot_be_asked_is_no_part_of_the_conversation(speaker, capsys):
    params = speaker.model.params(temperature=0, top_p=1.0, top_k=0, seed=0, max_new_tokens=20)
    speaker.turns = [user("Hi"), assistant("Ho")]
    chat.ask(speaker, [], "y" * 200, params, 0, None)
    assert "(too long: beside --max_completion_length 20 a question has room for 140 tokens)" in capsys.readouterr().out
    chat.ask(speaker, [{"role": "elf", "content": "x"}], "Hi", params, 0, None)
    assert "(not asked: the chat template refuses the conversation" in capsys.readouterr().out
    assert speaker.turns == [user("Hi"), assistant("Ho")]


def test_a_character_of_several_tokens_is_printed_once_it_is_whole(speaker, monkeypatch, capsys):
    ids = speaker.model.tokenizer(" 好的é")["input_ids"]
    assert len(ids) == 9, "one token a byte"
    written = []
    monkeypatch.setattr(chat, "sampled_tokens", lambda *_: iter([*ids, speaker.model.stop_ids[0]]))
    monkeypatch.setattr("builtins.print", lambda *words, **_: written.append("".join(words)))
    params = speaker.model.params(temperature=0, top_p=1.0, top_k=0, seed=0, max_new_tokens=20)
    text, _ = chat.stream(speaker.model, [1], params, 0)
    assert text == "好的é" and [part for part in written if part] == ["好", "的", "é"]


def test_ctrl_c_cuts_an_answer_short_and_it_is_remembered(speaker, monkeypatch, capsys):
    def tokens(*_):
        yield from speaker.model.tokenizer(" Well")["input_ids"]
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "sampled_tokens", tokens)
    params = speaker.model.params(temperature=0, top_p=1.0, top_k=0, seed=0, max_new_tokens=20)
    chat.ask(speaker, [], "Hi", params, 0, None)
    assert capsys.readouterr().out == "model: Well (cut after 5 tokens)\n"
    assert speaker.turns == [user("Hi"), assistant("Well")]


def test_commands(talkers, talk, tmp_path):
    lines = ["/help", "/save", f"/save {tmp_path / 'x'}", "/dance", "Hi", f"/save {tmp_path}", "/quit"]
    shown = talk(["--model", talkers / "b"], lines)
    assert "/reset        forget" in shown and "/save FILE" in shown and "/quit         end" in shown
    assert "(wanted /save FILE)" in shown and "(nothing to save yet)" in shown and not (tmp_path / "x").exists()
    assert "(no command /dance; /help lists them)" in shown and "not saved: " in shown


def test_questions_may_come_from_a_pipe(talkers):
    """As a program of its own; half a character in the input ends nothing."""
    command = [sys.executable, ROOT / "scripts" / "chat.py", "--model", talkers / "b", "--max_completion_length", "9"]
    half = "Ä".encode()[:1]
    done = subprocess.run(command, input=b"Hi\n" + half + b"\n", capture_output=True, timeout=120)
    shown = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "you: Hi\nmodel: " in shown and "you: \ufffd\nmodel: " in shown and "seed " in shown
    assert not any(ord(c) < 32 and c != "\n" for c in shown)


@pytest.mark.parametrize("flags", [[], ["--model", "m", "--compare", "a", "b"]])
def test_one_model_or_two(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        chat.parse_args(flags)
    assert stop.value.code == 2 and "either --model DIR or --compare DIR DIR" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_4_bits_need_a_gpu_and_a_package(talkers):
    with pytest.raises(UserError, match="needs a CUDA GPU .none was found. and the package bitsandbytes"):
        chat.main(["--model", str(talkers / "b"), "--load_in_4bit"])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_model_larger_than_the_memory_says_the_same(family, tmp_path):
    """--offload: some layers in memory and some on disk; tied embeddings (qwen2, gpt2) are the awkward case."""
    kind = small_models.FAMILIES[family]
    folder = small_models.save_family(tmp_path / family, kind)
    args = chat.parse_args(["--model", str(folder), "--offload"])
    placement = chat.place(args, torch.device("cpu"), torch.float32, str(tmp_path / "scratch"))
    most = sum(file.stat().st_size for file in folder.glob("*.safetensors")) * 9 // 10
    whole = answers.Answerer(folder, "fp32", "cpu", kind.template)
    split = answers.Answerer(folder, "fp32", "cpu", kind.template, placement=placement | {"max_memory": {"cpu": most}})
    assert {"cpu", "disk"} <= set(map(str, split.hf.hf_device_map.values())), split.hf.hf_device_map
    assert chat.where(whole.hf) == "" and " on cpu, " in chat.where(split.hf) and " on disk" in chat.where(split.hf)
    prompt = encode_prompt(whole.tokenizer, [user("Hi")])
    params = whole.params(max_new_tokens=12, temperature=1.0, top_p=1.0, top_k=0, seed=3)
    assert list(chat.sampled_tokens(split, prompt, params, 0)) == list(chat.sampled_tokens(whole, prompt, params, 0))


def test_offload_where_all_fits(talk, talkers):
    shown = talk(["--model", talkers / "b", "--offload", "--seed", "1"], ["Hi", "/quit"])
    plain = talk(["--model", talkers / "b", "--seed", "1"], ["Hi", "/quit"])
    assert shown.split("/quit ends.")[1] == plain.split("/quit ends.")[1]


def test_a_reward_model_is_no_talker(talkers):
    with pytest.raises(UserError, match="--reward /nowhere/rm: no such folder"):
        chat.main(["--model", str(talkers / "b"), "--reward", "/nowhere/rm"])
    with pytest.raises(UserError, match="--compare /nowhere/m: no such folder"):
        chat.main(["--compare", str(talkers / "b"), "/nowhere/m"])
