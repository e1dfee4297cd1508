"""Language models and scalar-head models: loading, the two forwards that train, saving as plain HF folders.

Both wrappers compute position ids from the attention mask, always, so a row's numbers depend on neither its padding
nor its neighbours. Legend: B batch, T padded length, V vocabulary, K positions kept.
"""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from common import adapters, checkpoint
from common.errors import RunFailed, UserError, is_lost_contact
from common.memory import free_host_memory
from common.tensor_ops import position_ids_of

_WRONG_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LanguageModel(nn.Module):
    """A HF causal language model behind the forward that scoring and training share."""

    def __init__(self, hf: nn.Module):
        super().__init__()
        self.hf = hf

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Logits (B, K, V) of the last `keep` positions, or of all T when `keep` is 0.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), True or 1 on real tokens; padding may be on either side.
        """
        return self.hf(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=position_ids_of(attention_mask),
            logits_to_keep=keep,
            use_cache=False,
        ).logits

    def generate(self, *args, **kwargs):
        """The HF model's own: DeepSpeed's hybrid engine looks for it here and puts its own in its place."""
        return self.hf.generate(*args, **kwargs)


class ScalarModel(nn.Module):
    """A HF sequence-classification model with one label, read at every token: reward model and critic.

    The head multiplies in fp32 whatever the model's precision: rounded to bf16, scores have steps of 0.4 %, and near
    ones tie.
    """

    def __init__(self, hf: nn.Module):
        super().__init__()
        self.hf = hf
        if isinstance(hf.score, nn.Linear):  # its own forward, so that ZeRO-3's hooks still gather the weight
            hf.score.forward = functools.partial(_linear_in_fp32, hf.score)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """One value per token, (B, T) in fp32; the value at t has seen the tokens up to and including t."""
        hidden = self.hf.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=position_ids_of(attention_mask),
            use_cache=False,
        ).last_hidden_state
        return self.hf.score(hidden).squeeze(-1).float()

    @torch.no_grad()
    def score(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The value at the last real token of each row, (B,): what plain transformers calls the logits."""
        return at_last_token(self(input_ids, attention_mask), attention_mask)


def at_last_token(values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Picks (B,) out of (B, T) at the last True of the mask: by length, never by comparing ids with the pad token."""
    positions = torch.arange(values.shape[1], device=values.device)
    last = torch.where(attention_mask.bool(), positions, 0).amax(1)
    return values.gather(1, last[:, None]).squeeze(1)


@torch.no_grad()
def check_reading(model: Callable, hf: nn.Module, device: torch.device | str, exact: bool) -> None:
    """Refuses a model whose output at a token is changed by padding, later tokens or training mode, by trying it.

    All would go unnoticed: batches are padded, so such a model learns from wrong numbers; an encoder sees the answer
    that it should predict; noise in training is none of the policy that answers. A collective under ZeRO-3.

    Args:
        model: (ids, mask) -> (B, T, ...): a wrapper, or the engine it is in.
        exact: the model computes in fp32; otherwise rounding is given some room.

    Raises:
        UserError: names the model's class and how far its output moved, that it is not finite, or why there is none.
    """
    a, b, c, d, e = _few_tokens(hf)
    ids = torch.tensor([[a, b, c, d, e, e], [e, e, a, b, c, d], [a, b, c, e, e, e]], device=device)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], device=device).bool()
    try:
        plain, shifted, other = model(ids, mask).float()
        without_noise = plain
        if hf.training:
            hf.eval()
            without_noise = model(ids, mask)[0].float()
            hf.train()
    except Exception as error:  # whatever a family raises that is made in another way
        if is_lost_contact(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        if adapters.present(hf):
            raise UserError(
                f"{type(hf).__name__} does not run with adapters in these layers ({_first_line(error)}); name others "
                "with --lora_target_modules"
            ) from error
        raise UserError(
            f"{type(hf).__name__} does not run on a few tokens ({type(error).__name__}: {_first_line(error)}); wanted "
            "a causal language model that takes position ids and an attention mask"
        ) from error
    spread = plain[:4].std(correction=0)
    if not all(part.isfinite().all() for part in (plain[:4], shifted[2:], other[:4])):
        raise UserError(
            f"{type(hf).__name__}: its output holds numbers that are not finite; wanted whole weights, and a --dtype "
            "that they fit in"
        )
    for moved, what in (
        ((plain[:4] - without_noise[:4]).abs().mean(), "training mode"),
        ((plain[:4] - shifted[2:]).abs().mean(), "padding in front of a text"),
        ((plain[:3] - other[:3]).abs().mean(), "a token that comes later"),
    ):
        if not moved <= spread * (1e-3 if exact else 0.1):
            raise UserError(
                f"{type(hf).__name__}: {what} changes its output by {float(moved / spread):.1%} of its spread; wanted "
                "a causal language model that takes position ids and an attention mask, and trains without noise"
            )


def _few_tokens(hf: nn.Module) -> list[int]:
    vocabulary = hf.config.get_text_config().vocab_size
    return [vocabulary * part // 7 for part in range(1, 6)]


@torch.no_grad()
def on_a_few_tokens(model: Callable, hf: nn.Module, device: torch.device | str) -> torch.Tensor:
    """The output of a wrapper, or of the engine it is in, on five tokens, in fp32. A collective under ZeRO-3."""
    ids = torch.tensor([_few_tokens(hf)], device=device)
    return model(ids, torch.ones_like(ids, dtype=torch.bool)).float().cpu()


def _linear_in_fp32(layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(hidden.float(), layer.weight.float(), bias)


def choose_dtype(name: str, device: torch.device) -> tuple[str, str]:
    """Resolves `--dtype auto` and says why: ("fp32" | "bf16" | "fp16", reason).

    Raises:
        UserError: a precision this device cannot train in.
    """
    if name == "auto":
        if device.type == "cpu":
            return "fp32", "fp32: on a CPU it is both exact and the fastest"
        if torch.cuda.is_bf16_supported():
            return "bf16", "bf16: this GPU has it, and unlike fp16 it needs no loss scaling"
        return "fp16", "fp16: this GPU has no bf16; losses are scaled dynamically"
    if name == "fp16" and device.type == "cpu":
        raise UserError("--dtype fp16 does not train on a CPU (DeepSpeed refuses it); use --dtype fp32 or bf16")
    return name, f"{name}: as asked"


def load_tokenizer(path: str | Path, trust_remote_code: bool = False):
    """The tokenizer of a model folder or hub name.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    _quiet_transformers()
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(_not_loaded("tokenizer", path, " ".join(str(error).split())[:300])) from error


def load_causal_lm(
    path: str | Path,
    dtype: str = "fp32",
    *,
    device: torch.device | str = "cpu",
    zero3: dict | None = None,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    placement: dict | None = None,
):
    """A plain HF causal language model with dropout and routers' noise off, in eval mode.

    Args:
        dtype: "fp32", "bf16" or "fp16".
        zero3: a DeepSpeed configuration of stage 3: each weight is then sharded as it is read (`zero.Init`), and the
            model must go into an engine of that configuration.
        attn_implementation: the attention kernel; "auto": sdpa where the model has it, else its own eager one.
        placement: for a model that only answers, how transformers is to place its weights as it reads them, in place of
            `device`: `device_map` and what goes with it (`quantization_config`, `max_memory`, `offload_folder`).

    Raises:
        UserError: not a causal language model, or weights are missing from the folder.
    """
    from transformers import AutoModelForCausalLM

    model, info = _from_pretrained(
        AutoModelForCausalLM, path, dtype, zero3, attn_implementation, trust_remote_code, **(placement or {})
    )
    if info["missing_keys"]:
        raise UserError(
            f"{path} lacks weights of a causal language model: {_few(info['missing_keys'])}; is it a reward model?"
        )
    return _ready(model, None if placement else device, zero3)


def load_scalar_model(
    path: str | Path,
    dtype: str = "fp32",
    *,
    device: torch.device | str = "cpu",
    zero3: dict | None = None,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    fresh_head_std: Callable[[int], float] | None = None,
    seed: int = 0,
) -> tuple[ScalarModel, bool]:
    """A sequence classifier with one label, and whether its head is fresh.

    Args:
        fresh_head_std: the spread of the head's weights by its input width, where the folder holds a causal language
            model (0.0: all zeros); None: such a folder is refused, since a random head scores at random.

    Raises:
        UserError: no such model, missing weights, or more than one label.
    """
    from transformers import AutoModelForSequenceClassification

    model, info = _from_pretrained(
        AutoModelForSequenceClassification, path, dtype, zero3, attn_implementation, trust_remote_code, num_labels=1
    )
    if not hasattr(model, "score"):  # encoders pool a whole text; a critic needs a value at each token
        raise UserError(
            f"{path} is a {type(model).__name__}, which has no linear head `score` over the tokens' hidden states; "
            "wanted a decoder such as Llama, Qwen, GPT-2 or OPT"
        )
    missing = set(info["missing_keys"])
    fresh = "score.weight" in missing
    if missing - {"score.weight"}:
        raise UserError(f"{path} lacks weights: {_few(missing - {'score.weight'})}; the folder is not whole")
    if fresh and fresh_head_std is None:
        raise UserError(
            f"{path} has no trained scalar head; make one with `python step2_reward/train.py --model {path}`"
        )
    if fresh:
        _draw_head(model.score.weight, fresh_head_std(model.score.in_features), seed)
    return ScalarModel(_ready(model, device, zero3)), fresh


def fresh_reward_head_std(width: int) -> float:
    """1 / sqrt(W + 1), so that fresh scores have a spread of about 1 (Stiennon et al. 2020, lm-human-preferences)."""
    return 1 / math.sqrt(width + 1)


def read_config(path: str | Path, trust_remote_code: bool = False):
    """The HF configuration of a model folder or hub name.

    Raises:
        UserError: there is none, it cannot be read, or there is an adapter.
    """
    from transformers import AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    _quiet_transformers()
    adapter = None
    with contextlib.suppress(Exception):  # whatever is wrong with the name or the network is said below
        adapter = find_adapter_config_file(str(path))
    checkpoint.refuse_adapter(path, config=adapter)
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(_not_loaded("model configuration", path, _first_line(error))) from error


def disable_noise(model: nn.Module) -> None:
    """Makes training mode compute what eval mode does.

    Every dropout rate of a module tree is set to zero, of Dropout modules and of numbers that a module keeps by
    whatever name (`attention_dropout`, `residual_dropout`, `resid_pdrop`, `layerdrop`). Routers that jitter, or draw
    their experts, stay in eval mode: the policy that is trained has to be the one that answers.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if any("jitter" in name for name in vars(module)):
            module.train = functools.partial(_train_parts_only, module)


def _train_parts_only(module: nn.Module, mode: bool = True) -> nn.Module:
    """`module.train` of a module that itself stays in eval mode; adapters within have a dropout of their own."""
    nn.Module.train(module, mode)
    module.training = False
    return module


def check_length(config, length: int, what: str, whose: str = "the model") -> None:
    """Refuses sequences longer than a model has positions for.

    Raises:
        UserError: names both numbers and the flags (`what`) that decide the length.
    """
    limit = positions_of(config)
    if length > limit:
        raise UserError(
            f"{what}: {length} tokens a sequence asked for, {whose} has positions for {limit}; lower to that or less"
        )


def positions_of(config) -> float:
    """The longest sequence a model has positions for; infinity where there is no such limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if limit and limit > 0 else math.inf


def stop_ids_of(path: str | Path, config) -> list[int]:
    """The stop tokens that a model names, in transformers' order: in generation_config.json, else in its `config`.

    Raises:
        UserError: a generation_config.json that cannot be read, or something else than ids.
    """
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(str(path)).eos_token_id
    except (OSError, ValueError) as error:
        if (Path(path) / "generation_config.json").exists():
            raise UserError(f"{path}/generation_config.json cannot be read: {_first_line(error)}") from error
        eos = None
    if eos is None:
        eos = GenerationConfig.from_model_config(config).eos_token_id
    ids = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
    if any(type(i) is not int for i in ids):
        raise UserError(f"{path}/generation_config.json: eos_token_id is {eos!r}, wanted ids of tokens; mend it")
    return ids


def set_special_tokens(hf: nn.Module, tokenizer, stop_ids: tuple[int, ...]) -> None:
    """Makes tokenizer, configuration and generation configuration agree on pad and on what ends a response."""
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop_ids[0])
    for config in filter(None, (hf.config, getattr(hf, "generation_config", None))):
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]


@torch.no_grad()
def grow_embeddings(model: nn.Module, num_tokens: int, zero3: dict | None) -> bool:
    """Adds embedding rows when the tokenizer has more tokens than the model; spare rows are left as they are.

    New rows are the mean of the old ones: a token that says little, and the same under every ZeRO stage.

    Args:
        zero3: what the model was loaded with.
    """
    rows = model.get_input_embeddings().num_embeddings
    if num_tokens <= rows:
        return False
    with _sharded_init(zero3):
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    for layer in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
        for parameter in layer.parameters():  # whole on every rank until an engine shards them
            parameter[rows:] = parameter[:rows].mean(0)
    return True


def save_pretrained(hf: nn.Module, folder: Path, state: dict[str, torch.Tensor], tokenizer) -> None:
    """Writes a HF folder from a gathered state, then opens it and compares names and shapes.

    Of a model with adapters the whole folded weights are written, and the adapter alone in a folder beside them.

    Args:
        hf: the model whose class, configuration and generation configuration are written; its own weights are not read.
        state: full CPU tensors by name.
    """
    from safetensors import safe_open

    if adapters.present(hf):
        adapters.save(hf, folder / adapters.ADAPTER_FOLDER, state, tokenizer)
        state = adapters.fold(hf, state)
    hf.save_pretrained(folder, state_dict=dict(state))  # a copy: transformers empties what it is given
    tokenizer.save_pretrained(folder)
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        wanted = tuple(state[name].shape) if name in state else shape
        assert shape == wanted and math.prod(shape) > 0, f"{folder}: {name} was saved as {shape}, wanted {wanted}"
    kept = shapes.keys() & state.keys()
    renamed = shapes.keys() - kept  # of some families (mixtures of experts) transformers stores other names and shapes
    for name in state.keys() - kept:
        twin = any(state[name].shape == state[other].shape and torch.equal(state[name], state[other]) for other in kept)
        assert twin or renamed, f"{folder}: {name} was not saved and no saved tensor equals it"


def check_saved(folder: Path, hf: nn.Module, trained: torch.Tensor) -> str | None:
    """Opens a saved folder as plain transformers does: every weight has to be found, and the output on a few tokens has
    to be the trained model's. Where memory does not hold the model once more, names and shapes alone are looked at.

    Args:
        hf: the trained model, for its class; it may be sharded.
        trained: what `on_a_few_tokens` gave for it before it was saved.

    Returns:
        What was not looked at, for people; None if all was.

    Raises:
        RunFailed: names what differs.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.integrations import is_deepspeed_zero3_enabled

    assert not is_deepspeed_zero3_enabled(), "the saved model would be opened in shards"
    is_scalar = hasattr(hf, "score")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = free_host_memory()
    fits = 1.2 * size < free
    auto = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):  # whatever is missing would be drawn
        opened, info = auto.from_pretrained(
            str(folder),
            dtype="auto",
            output_loading_info=True,
            trust_remote_code=type(hf).__module__.startswith("transformers_modules"),
            device_map=None if fits else "meta",
        )
    wrong = [f"{kind.removesuffix('_keys')} {_few(map(str, info[kind]))}" for kind in _WRONG_KEYS if info[kind]]
    if type(opened).__name__ != type(hf).__name__:
        wrong.append(f"it is a {type(opened).__name__} there, a {type(hf).__name__} was trained")
    if wrong:
        raise RunFailed(f"{folder}: plain transformers does not find the weights that were saved: {'; '.join(wrong)}")
    if not fits:
        gib = f"{size / 2**30:.0f} GiB, {free / 2**30:.0f} GiB of memory are free"
        return f"the saved model ({gib}) was not run once more: its names and shapes alone were checked"
    _ready(opened, "cpu", None)
    seen = on_a_few_tokens((ScalarModel if is_scalar else LanguageModel)(opened), opened, "cpu")
    exact = opened.dtype == torch.float32
    scale = max(float(trained.std(correction=0)), float(trained.abs().mean()), 1e-6)
    moved = float((seen - trained).abs().amax() if exact else (seen - trained).abs().mean()) / scale
    if not moved <= (1e-4 if exact else 0.1):
        raise RunFailed(
            f"{folder}: plain transformers opens what was saved as another model: on five tokens its output is "
            f"{moved:.1%} of its spread away from the trained model's"
        )
    return None


def _from_pretrained(cls, path, dtype, zero3, attn_implementation, trust_remote_code, **kwargs):
    _quiet_transformers()
    config = read_config(path, trust_remote_code)
    labels = (config.architectures or [""])[0].endswith("ForSequenceClassification") and config.num_labels
    if "num_labels" in kwargs and labels and labels != 1:
        raise UserError(f"{path} classifies into {labels} labels, wanted a reward model with 1 (num_labels)")
    kind = cls.__name__.removeprefix("AutoModelFor")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{path} is an encoder-decoder ({config.model_type}); wanted a decoder-only language model")
    try:
        with _sharded_init(zero3):
            return cls.from_pretrained(
                str(path),
                dtype=DTYPES[dtype],
                attn_implementation=None if attn_implementation == "auto" else attn_implementation,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **kwargs,
            )
    except Exception as error:
        why = _first_line(error)
        if why.startswith("Unrecognized configuration class"):
            why = f"transformers has no such class for {config.model_type} models; take a model of another family"
        elif "ignore_mismatched_sizes" in why:
            why = "its weights have other shapes than its config.json says"
        elif attn_implementation != "auto" and re.search("attention|attn|kernels", why, re.IGNORECASE):
            why = f"{why.split('. ')[0]}; --attn_implementation auto takes what the model has"
        raise UserError(f"{path} could not be loaded as {kind}: {why}") from error


@contextlib.contextmanager
def _sharded_init(zero3: dict | None):
    """Within it, transformers builds, and gathers, under `zero.Init`; afterwards other models load whole again."""
    if zero3 is None:
        yield
        return
    from transformers.integrations import deepspeed as hf_deepspeed

    keep_alive = hf_deepspeed.HfDeepSpeedConfig(zero3)
    try:
        yield
    finally:
        del keep_alive
        hf_deepspeed.unset_hf_deepspeed_config()


def _ready(model: nn.Module, device, zero3: dict | None) -> nn.Module:
    disable_noise(model)
    model.eval()
    return model if zero3 or device is None else model.to(device)


@torch.no_grad()
def _draw_head(weight: nn.Parameter, std: float, seed: int) -> None:
    import deepspeed

    sharded = hasattr(weight, "ds_id")
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0) if sharded else contextlib.nullcontext():
        if weight.numel():
            generator = torch.Generator().manual_seed(seed)
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)


def _quiet_transformers() -> None:
    """Loading reports (fresh heads, unused heads) are checked and said by us, in one line, where they matter."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)


def _few(names) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _not_loaded(what: str, path: str | Path, why: str) -> str:
    """A name that is no folder was asked of the hub: whoever mistyped a folder reads of a network otherwise."""
    said = f"no {what} could be loaded from {path}: "
    if Path(path).exists():
        return said + why
    return (
        f"{said}no such folder here, and of the hub: {why.rstrip('. ')}; check the name, set HF_ENDPOINT to a mirror "
        "of the hub, or download the model elsewhere and give its folder"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
