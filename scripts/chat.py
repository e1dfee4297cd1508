"""Talk to a model in the terminal: the template and stop rules of training, words as they come.

    python scripts/chat.py --model models/rlhf/actor

Reads   an HF causal-LM folder. Writes nothing.

/reset forgets the conversation, /quit (or Ctrl-D) ends, Ctrl-C cuts an answer short. What is shown is what the model
said: an answer stopped by the length limit is marked as such, and turns that no longer fit are dropped with a notice.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument_group("chat").add_argument
    flag("--model", required=True, metavar="DIR", help="causal-LM folder")
    flag("--system", default=None, help="a system message, put first")
    flag("--max_completion_length", type=cli.positive, default=256, help="tokens an answer may have")
    flag("--temperature", type=float, default=1.0, help="1: as trained; 0: always the likeliest token")
    flag("--top_p", type=float, default=1.0, help="smallest set of tokens with this probability; 1: off")
    flag("--top_k", type=cli.natural, default=0, help="the likeliest K tokens; 0: off")
    flag("--seed", type=int, default=None, help="default: another one each time")
    flag("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="auto: bf16 where the GPU has it")
    cli.add_model_flags(parser)
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = parse_args(argv)
    from common import checkpoint

    checkpoint.require_stage(args.model, "--model", ("rlhf-actor", "sft", "dpo", "base"))
    import torch

    from common import chat_format, models

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, _ = models.choose_dtype(args.dtype, device)
    tokenizer = models.load_tokenizer(args.model, args.trust_remote_code)
    template = chat_format.ensure_template(tokenizer, args.chat_template)
    load = {"attn_implementation": args.attn_implementation, "trust_remote_code": args.trust_remote_code}
    model = models.load_causal_lm(args.model, dtype, device=device, **load)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history in input()

    print(f"{args.model}, {template}. /reset forgets the conversation, /quit ends.")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    turns: list[dict] = []
    while True:
        try:
            said = input("\nyou: ").strip()
        except EOFError:
            print()
            return
        if said == "/quit":
            return
        if said == "/reset":
            turns = []
            print("(forgotten)")
        elif said:
            turns.append({"role": "user", "content": said})
            answer = reply(model, tokenizer, opening, turns, args)
            if answer is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": answer})


class Printer:
    """What `generate` calls a streamer: prints text as it becomes certain, control bytes made visible, and keeps it.

    transformers' own loses characters where the bytes of one are spread over several tokens.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.text, self.seen_prompt = tokenizer, [], "", False

    def put(self, ids) -> None:
        if not self.seen_prompt:
            self.seen_prompt = True
            return
        self.ids += ids.flatten().tolist()
        text = self._decoded()
        if not text.endswith("\ufffd"):  # that may be the beginning of a character
            self._print(text)

    def end(self) -> None:
        self._print(self._decoded())

    def _decoded(self) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        return text.removeprefix(" ")  # the space after "Assistant:" is the template's

    def _print(self, text: str) -> None:
        from common.metrics import printable

        print(printable(text[len(self.text) :]), end="", flush=True)
        self.text = text


def reply(model, tokenizer, opening: list[dict], turns: list[dict], args) -> str | None:
    """Prints an answer as it is sampled and returns it; None if the question alone is too long. Shortens `turns`."""
    import torch
    from transformers import GenerationConfig

    from common import chat_format

    room = getattr(model.config, "max_position_embeddings", 1 << 30) - args.max_completion_length
    prompt = chat_format.encode_prompt(tokenizer, opening + turns)
    dropped = 0
    while len(prompt) > room and len(turns) > 2:
        del turns[:2]  # the oldest question and its answer
        dropped += 1
        prompt = chat_format.encode_prompt(tokenizer, opening + turns)
    if len(prompt) > room:
        limit = f"{len(prompt)} tokens, and {room} are left beside --max_completion_length {args.max_completion_length}"
        print(f"(too long: {limit})")
        return None
    if dropped:
        print(f"(the oldest {dropped} turn{'s' * (dropped > 1)} no longer fit and are forgotten)")

    stop_ids = chat_format.stop_ids(tokenizer, model.generation_config.eos_token_id)
    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    config = GenerationConfig(
        max_new_tokens=args.max_completion_length,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        **sampling,
    )
    ids = torch.tensor([prompt], device=model.device)
    printer = Printer(tokenizer)
    print("model: ", end="", flush=True)
    try:
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=printer)
    except KeyboardInterrupt:
        printer.end()
        print(" (stopped)")
        return printer.text
    print("" if int(whole[0, -1]) in stop_ids else f" (cut after {args.max_completion_length} tokens)")
    return printer.text


if __name__ == "__main__":
    sys.exit(cli.run(main))
