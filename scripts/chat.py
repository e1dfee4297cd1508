"""Talk to a model in the terminal, or to two at once: training's template, stop rules and sampler, words as they come.

    python scripts/chat.py --model models/rlhf/actor
    python scripts/chat.py --compare models/sft models/rlhf/actor --reward models/reward
    echo "Is chess hard to learn?" | python scripts/chat.py --model models/sft --temperature 0

Reads   HF causal-LM folders; with --reward a reward-model folder. Writes nothing, but for /save

Compared models answer every question with the same sampling noise, each with its own answers in its memory. What is
shown is what the model said: an answer cut by the length limit is marked, and whole turns that no longer fit, the
oldest first, are forgotten with a notice. Ctrl-C cuts an answer short, Ctrl-D ends. The commands are:

    /help         this list
    /reset        forget the conversation
    /save FILE    add the conversation to FILE as a line of json for each model; step 0 reads it as SFT data
    /quit         end
"""

import collections
import contextlib
import dataclasses
import importlib.util
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli
from common.errors import UserError
from common.printing import printable, say

COMMANDS = __doc__[__doc__.index("    /help") :].rstrip()


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument_group("chat").add_argument
    flag("--model", default=None, metavar="DIR", help="causal-LM folder")
    flag("--compare", nargs=2, default=None, metavar="DIR", help="two of them, in place of --model")
    flag("--reward", default=None, metavar="DIR", help="reward-model folder: shows its score of each answer")
    flag("--system", default=None, metavar="TEXT", help="a system message, put first")
    flag = parser.add_argument_group("sampling").add_argument
    flag("--max_completion_length", type=cli.positive, default=256, help="tokens of an answer, the stop token included")
    flag("--temperature", type=cli.temperature, default=1.0, help="divides the logits; 0: greedy")
    flag("--top_p", type=cli.top_p, default=1.0, help="smallest set of tokens with this probability; 1: off")
    flag("--top_k", type=cli.natural, default=0, help="the likeliest K tokens; 0: off")
    flag("--seed", type=cli.seed, default=None, help="of the sampling noise; default: another one each time, shown")
    flag = parser.add_argument_group("loading").add_argument
    flag("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="auto: bf16 where the GPU has it")
    exclusive = parser.add_argument_group("models larger than the GPU").add_mutually_exclusive_group().add_argument
    exclusive("--load_in_4bit", action="store_true", help="weights in 4 bits (CUDA and the package bitsandbytes)")
    exclusive(
        "--offload",
        action="store_true",
        help="weights beyond the GPU's free memory stay in host memory, beyond that on disk; slow",
    )
    cli.add_model_flags(parser)
    args = parser.parse_args(argv)
    if (args.model is None) == (args.compare is None):
        parser.error("wanted either --model DIR or --compare DIR DIR")
    return args


@dataclasses.dataclass
class Speaker:
    """A model, what it is called on the screen, and the conversation as it remembers it."""

    name: str
    model: object  # scripts.answers.Answerer
    turns: list[dict]


def main(argv=None) -> None:
    args = parse_args(argv)
    from common import checkpoint

    # 1. What can be wrong is found out before anything large is loaded.
    paths, flag = (args.compare, "--compare") if args.compare else ([args.model], "--model")
    for path in paths:
        checkpoint.require_stage(path, flag, ("rlhf-actor", "sft", "dpo", "base"))
    if args.reward:
        checkpoint.require_stage(args.reward, "--reward", ("reward",))
    import torch

    from common import models
    from scripts.answers import Answerer, RewardModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, _ = models.choose_dtype(args.dtype, device)

    # 2. Models.
    load = {name: getattr(args, name) for name in ("chat_template", "attn_implementation", "trust_remote_code")}
    load |= {"dtype": dtype, "device": device}
    scratch = tempfile.TemporaryDirectory(prefix="chat-offload-")
    placement = place(args, device, models.DTYPES[dtype], scratch.name)
    speakers = [
        Speaker(path if args.compare else "model", Answerer(path, **load, placement=placement), []) for path in paths
    ]
    reward = RewardModel(args.reward, **load) if args.reward else None

    # 3. Talk.
    seed = random.randrange(2**31) if args.seed is None else args.seed
    for path, speaker in zip(paths, speakers, strict=True):
        say(f"{path}: {speaker.model.template}{where(speaker.model.hf)}")
    print(f"{dtype} on {device.type}, seed {seed}. /help lists the commands, /quit ends.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    sampling |= {"max_new_tokens": args.max_completion_length, "seed": seed}
    for number, question in enumerate(questions(speakers, opening)):
        for speaker in speakers:
            ask(speaker, opening, question, speaker.model.params(**sampling), number, reward)


def place(args, device, dtype, scratch: str) -> dict | None:
    """How transformers is to place the weights, see `models.load_causal_lm`; None: all of them on `device`."""
    if args.load_in_4bit:
        return {"device_map": {"": device}, "quantization_config": four_bit(device, dtype)}
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # what lies where is said in one line, by `where`
    # "auto" fills the GPUs with what their free memory holds, then the host, then the disk
    return {"device_map": "auto", "offload_folder": scratch} if args.offload else None


def where(hf) -> str:
    """In words, where `--offload` has put the parts of a model that do not all fit the first device."""
    places = collections.Counter(map(str, getattr(hf, "hf_device_map", {}).values()))
    return "; parts of the model: " + ", ".join(f"{n} on {place}" for place, n in places.items()) if places else ""


def four_bit(device, compute_dtype):
    """How transformers is to quantise."""
    found = importlib.util.find_spec("bitsandbytes") is not None
    if device.type != "cuda" or not found:
        gpu = "one is here" if device.type == "cuda" else "none was found"
        package = "it is installed" if found else "pip install bitsandbytes"
        raise UserError(
            f"--load_in_4bit needs a CUDA GPU ({gpu}) and the package bitsandbytes ({package}); or leave it out"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)


# ---- the person's side


def questions(speakers: list[Speaker], opening: list[dict]) -> Iterator[str]:
    """What is typed, line by line; commands are carried out here."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history in input()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # a tokenizer takes no half characters
    while True:
        try:
            said = input("\nyou: ").strip()
        except EOFError:
            print()
            return
        if not sys.stdin.isatty():
            print(said)  # from a pipe: nobody has seen it yet
        command, _, rest = said.partition(" ")
        if command == "/quit":
            return
        if command == "/help":
            print(COMMANDS)
        elif command == "/reset":
            for speaker in speakers:
                speaker.turns = []
            note("forgotten")
        elif command == "/save":
            save(rest.strip(), speakers, opening)
        elif said.startswith("/"):
            note(f"no command {command}; /help lists them")
        elif said:
            yield said


def save(file: str, speakers: list[Speaker], opening: list[dict]) -> None:
    from common.metrics import json_line

    talked = [speaker for speaker in speakers if speaker.turns]
    if not file or not talked:
        note("wanted /save FILE" if not file else "nothing to save yet")
        return
    lines = [json_line({"messages": opening + s.turns, "model": str(s.model.path)}) for s in talked]
    try:
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(lines)
        note(f"added to {file}")
    except OSError as error:
        note(f"not saved: {file}: {error.strerror}")


# ---- the model's side


def ask(speaker: Speaker, opening: list[dict], question: str, params, number: int, reward) -> None:
    """Prints the answer as it is sampled, and remembers question and answer."""
    from common import chat_format
    from common.tokenizer import check_round_trip

    asked = opening + speaker.turns + [{"role": "user", "content": question}]
    tokenizer, config = speaker.model.tokenizer, speaker.model.hf.config.get_text_config()
    room = getattr(config, "max_position_embeddings", 1 << 30) - params.max_new_tokens
    try:
        if said := check_round_trip(tokenizer, [(0, question)], "the question"):
            note(said)
        fitted = chat_format.fit_prompt(tokenizer, asked, room)
    except UserError as error:  # a RowError among them
        note(f"not asked: {error}")
        return
    if fitted is None:
        note(f"too long: beside --max_completion_length {params.max_new_tokens} a question has room for {room} tokens")
        return
    prompt_ids, prompt = fitted
    if dropped := (len(asked) - len(prompt)) // 2:
        note(f"the oldest {dropped} turn{'s' * (dropped > 1)} no longer fit and are forgotten")
    print(styled(f"{printable(speaker.name)}: ", "1"), end="", flush=True)
    text, ids = stream(speaker.model, prompt_ids, params, number)
    truncated = not ids or ids[-1] not in params.stop_ids
    remarks = [f"cut after {len(ids)} tokens"] * truncated
    if reward:
        answer = {"prompt": prompt, "prompt_ids": prompt_ids, "response": text, "ids": ids, "truncated": truncated}
        try:
            remarks.append(f"reward {reward([answer], tokenizer)[0]:+.2f}")
        except UserError as error:  # such as a text too long for the reward model; the talk goes on
            remarks.append(f"no reward: {error}")
    print(styled(" (" + ", ".join(remarks) + ")", "2") if remarks else "")
    speaker.turns = [*prompt[len(opening) :], {"role": "assistant", "content": text}]


def stream(model, prompt_ids: list[int], params, number: int) -> tuple[str, list[int]]:
    """Samples an answer and prints it as far as its text is certain; its text and ids. Ctrl-C cuts it short."""
    from common.printing import printable

    ids, shown = [], ""
    with contextlib.suppress(KeyboardInterrupt):
        for token in sampled_tokens(model, prompt_ids, params, number):
            ids.append(token)
            text = model.text(ids)
            if not text.endswith("\ufffd"):  # that may be the beginning of a character
                print(printable(text[len(shown) :]), end="", flush=True)
                shown = text
    text = model.text(ids)
    print(printable(text[len(shown) :]), end="")
    return text, ids


def sampled_tokens(model, prompt_ids: list[int], params, number: int) -> Iterator[int]:
    """The tokens that `common.generation.generate` samples at step `number` for row 0, one by one as they are drawn."""
    import torch

    from common.generation import Reader, choose, uniform_noise

    noise = uniform_noise(params.seed, number, [0], params.max_new_tokens).to(model.device)
    reader = Reader(model.hf, len(prompt_ids) + params.max_new_tokens)
    ids = torch.tensor([prompt_ids], device=model.device)
    seen = torch.ones(1, len(prompt_ids) + params.max_new_tokens, dtype=torch.long, device=model.device)
    positions = torch.arange(seen.shape[1], device=model.device)[None]
    for t in range(params.max_new_tokens):
        end = len(prompt_ids) + t
        with torch.no_grad():
            logits = reader(ids, seen[:, :end], positions[:, end - ids.shape[1] : end])
        token, _ = choose(logits.to(model.device), noise[:, t], params)
        yield int(token)
        if int(token) in params.stop_ids:
            return
        ids = token[:, None]


def note(text: str) -> None:
    print(styled(f"({printable(text)})", "2"))


def styled(text: str, code: str) -> str:
    """Bold (1) or dim (2) on a terminal, plain elsewhere."""
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


if __name__ == "__main__":
    sys.exit(cli.run(main))
