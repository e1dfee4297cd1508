"""Folds an adapter into the model it was trained on, which gives a model that every stage takes.

    python scripts/merge_adapter.py --adapter my-lora --output_dir models/merged

Reads   an adapter that peft wrote (LoRA, DoRA, IA3, with or without modules_to_save), alone or beside its model: a
        folder or a hub name; its base model, and the tokenizer of the adapter or else of the base
Writes  a HF folder, opened once more to see that it answers as base and adapter do
"""

import contextlib
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import cli
from common.errors import UserError


def parse_args(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument_group("merging").add_argument
    flag("--adapter", required=True, metavar="DIR", help="adapter: a folder or hub name")
    flag("--base", default=None, metavar="DIR", help="the model it is of; default: what the adapter names")
    flag("--output_dir", required=True, type=Path, metavar="DIR", help="where the model goes: a new folder")
    cli.add_switch(parser, "--trust_remote_code", False, "run Python code that comes with a model from the hub")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = parse_args(argv)
    if args.output_dir.is_file() or (args.output_dir.exists() and any(args.output_dir.iterdir())):
        raise UserError(f"--output_dir {args.output_dir} is there already; choose a new folder")
    import torch

    from common import models

    # 1. The adapter, and what it is of.
    config = read_adapter(args.adapter)
    folder, kind = Path(args.adapter), getattr(config.peft_type, "value", config.peft_type)
    base = args.base or (args.adapter if (folder / "config.json").exists() else config.base_model_name_or_path)
    if not base:
        raise UserError(f"--adapter {args.adapter} does not say what it is of; give its base model with --base DIR")
    is_scalar = config.task_type == "SEQ_CLS"

    # 2. The model, with a row for every token, and the adapter in it.
    with without_adapter(base) as bare:
        try:
            stored = models.read_config(bare, args.trust_remote_code).dtype
            dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(stored, "fp32")
            if is_scalar:  # the head comes with the adapter
                load = {"trust_remote_code": args.trust_remote_code, "fresh_head_std": lambda width: 0.0}
                hf = models.load_scalar_model(bare, dtype, **load)[0].hf
            else:
                hf = models.load_causal_lm(bare, dtype, trust_remote_code=args.trust_remote_code)
        except UserError as error:
            raise UserError(f"{error}; give the adapter's base model with --base DIR") from error
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    tokenizer = models.load_tokenizer(args.adapter if has_tokenizer else base, args.trust_remote_code)
    models.grow_embeddings(hf, len(tokenizer), None)
    adapted = with_adapter(hf, args.adapter).eval()
    models.disable_noise(adapted)
    wrapper = models.ScalarModel if is_scalar else models.LanguageModel
    before = models.on_a_few_tokens(wrapper(adapted.get_base_model()), hf, "cpu")

    # 3. One model of the two.
    try:
        merged = adapted.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise UserError(f"a {kind} adapter cannot be folded into weights ({error})") from error
    models.save_pretrained(merged, args.output_dir, merged.state_dict(), tokenizer)
    if unseen := models.check_saved(args.output_dir, merged, before):
        print(unseen)
    print(f"written: {args.output_dir}: {base} with the {kind} adapter of {args.adapter} folded in")


def read_adapter(adapter: str):
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(adapter)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"--adapter {adapter}: no adapter of peft could be read there ({why})") from error


@contextlib.contextmanager
def without_adapter(base: str):
    """The base as a folder in which transformers finds no adapter to put in by itself."""
    if not (Path(base) / "adapter_config.json").exists():
        yield base
        return
    with tempfile.TemporaryDirectory(prefix="base-") as bare:
        for file in Path(base).resolve().iterdir():
            if not file.name.startswith("adapter_"):
                (Path(bare) / file.name).symlink_to(file)
        yield bare


def with_adapter(hf, adapter: str):
    """The model with the adapter in it, as peft reads it, every weight found."""
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            adapted = PeftModel.from_pretrained(hf, adapter)
        except (OSError, ValueError, KeyError, IndexError, RuntimeError, TypeError) as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(f"--adapter {adapter} does not fit {type(hf).__name__} of --base ({why})") from error
    missing = next((str(w.message) for w in said if "missing adapter keys" in str(w.message)), None)
    if missing:
        raise UserError(f"--adapter {adapter} does not fit its base: {' '.join(missing.split())[:200]}")
    return adapted


if __name__ == "__main__":
    sys.exit(cli.run(main))
