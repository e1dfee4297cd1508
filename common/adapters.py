"""Low-rank adapters (LoRA, Hu et al. 2021) by peft: added, switched off for the reference, folded in for saving.

Only the adapters are trained, a scalar head where there is one, and the embedding rows of tokens that no model has
trained (a frozen row could never be told from its neighbours, so a new stop token would never be said). Gradients and
optimizer states are small, and a reference model is the same weights with the adapter off. What a stage writes is whole
all the same: the folder holds the folded weights, and `adapter/` beside them what peft loads onto the base model.
"""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from common.errors import UserError

ADAPTER_FOLDER = "adapter"
_NAME = "default"  # what peft calls an adapter that nobody named; a part of parameter names in memory, not on disk
_ROUTER = re.compile(r"(^|[._])(router|gate)(\.|$)")  # of a mixture of experts; `gate_proj` is none


@dataclasses.dataclass(frozen=True)
class Lora:
    """Rank (0: no adapter), scale (the update is multiplied by alpha / r), dropout, and which layers get one."""

    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: list[str]


class TokenRows(nn.Module):
    """An embedding or output layer of which a few tokens' rows are trained: W + delta in those rows.

    peft's own (`trainable_token_indices`, in whose format they are saved) copies the whole matrix at each forward, and
    leaves out an output layer's bias.
    """

    def __init__(self, base_layer: nn.Module, ids: Sequence[int], delta: nn.Parameter):
        super().__init__()
        self.base_layer, self.delta, self.is_off = base_layer, delta, False
        self.register_buffer("ids", torch.tensor(sorted(ids), device=delta.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        if self.is_off:
            return out
        if isinstance(self.base_layer, nn.Embedding):
            at = torch.searchsorted(self.ids, x).clamp(max=len(self.ids) - 1)
            scale = getattr(self.base_layer, "embed_scale", 1.0)  # Gemma's input embedding
            return out + nn.functional.embedding(at, self.delta) * ((self.ids[at] == x)[..., None] * scale).to(out)
        return out.index_add(-1, self.ids, nn.functional.linear(x, self.delta).to(out))

    @property
    def weight(self) -> torch.Tensor:
        """For what does not call the layer."""
        base = self.base_layer.weight
        return base if self.is_off else base.index_add(0, self.ids, self.delta.to(base))


def add(hf: nn.Module, lora: Lora, seed: int, untrained: Sequence[int] = ()) -> str | None:
    """Puts adapters into a HF model, in place, and freezes everything else but a scalar head. Rank 0 does nothing.

    An adapter begins as no change: B is zero. A is drawn from a generator of its own, the same on all ranks.

    Args:
        untrained: tokens whose embedding rows are trained too, see `untrained_rows`.

    Returns:
        What is trained, for people; None for rank 0.

    Raises:
        UserError: no layer of the model has one of the names, or peft cannot adapt it.
    """
    if not lora.lora_r:
        return None
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    names = lora.lora_target_modules
    is_scalar = hasattr(hf, "score")
    targets, left_out = _targets(hf, names)
    base = hf.config._name_or_path
    config = LoraConfig(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in hf.modules()),  # GPT-2's transposed linear layer
        task_type="SEQ_CLS" if is_scalar else "CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).exists() else base,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _inject(hf, config)
    if is_scalar:
        hf.score.requires_grad_(True)
    layers = _layers(hf)
    assert set(layers) == set(targets), f"adapted were {sorted(layers)}, asked for {targets}"
    _train_rows(hf, untrained)
    said = f"adapters of rank {lora.lora_r} in {_kinds(layers)}" + ("; the scalar head is trained too" * is_scalar)
    if untrained:
        many = f"the {len(untrained)} embedding rows" if len(untrained) > 1 else "the embedding row"
        said += f"; {many} that no model has trained yet, too"
    if left_out:
        said += f"; left as they are: {left_out}"
    return said


def add_like(hf: nn.Module, other: nn.Module) -> None:
    """Puts adapters of the same shape as another model's into a model; their values are left to be filled in."""
    if present(other):
        with torch.random.fork_rng():
            _inject(hf, other.peft_config[_NAME])
        _train_rows(hf, next((rows.ids.tolist() for rows in _rows(other).values()), []))


@torch.no_grad()
def untrained_rows(hf: nn.Module, ids: Sequence[int]) -> list[int]:
    """Those of some tokens whose input or output row nobody has trained: all zeros, the mean of the rows, or the same
    as another token's, as a base model's reserved tokens and freshly added ones are. A collective under ZeRO-3."""
    import deepspeed

    layers = filter(None, (hf.get_input_embeddings(), hf.get_output_embeddings()))
    weights = list({id(layer.weight): layer.weight for layer in layers}.values())
    is_sharded = any(hasattr(weight, "ds_id") for weight in weights)
    with deepspeed.zero.GatheredParameters(weights) if is_sharded else contextlib.nullcontext():
        found = {token for weight in weights for token in _untrained(weight, ids)} if ids else set()
    return sorted(found)


def _untrained(weight: torch.Tensor, ids: Sequence[int]) -> list[int]:
    at = torch.tensor(list(ids), device=weight.device)
    rows, mean = weight[at].float(), weight.mean(0, dtype=torch.float32)
    nearest = torch.minimum(rows.norm(dim=1), (rows - mean).norm(dim=1))
    squares = 0.0
    for start in range(0, len(weight), 8192):
        part = weight[start : start + 8192].float()
        squares += float((part - mean).square().sum())
        away = torch.cdist(rows, part)
        away[at[:, None] == torch.arange(start, start + len(part), device=weight.device)] = torch.inf
        nearest = torch.minimum(nearest, away.amin(1))
    return at[nearest < 0.01 * (squares / len(weight)) ** 0.5].tolist()


def is_tied(hf: nn.Module) -> bool:
    return bool(getattr(hf.config.get_text_config(), "tie_word_embeddings", False))


def present(hf: nn.Module) -> bool:
    return hasattr(hf, "peft_config")


@contextlib.contextmanager
def switched_off(hf: nn.Module) -> Iterator[None]:
    """Within it the model answers as it did before any adapter was trained."""

    def switch(is_off: bool) -> None:
        for layer in _layers(hf).values():
            layer._disable_adapters = is_off  # not enable_adapters(), which also touches requires_grad
        for layer in _rows(hf).values():
            layer.is_off = is_off

    switch(True)
    try:
        yield
    finally:
        switch(False)


def fold(hf: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state with adapters as the state of the plain model: W + B A alpha / r, summed in fp32, in W's precision.

    Args:
        hf: the model that `state` is of; only its structure is read, so it may be sharded.
    """
    layers, rows = _layers(hf), _rows(hf)
    folded, shared = {}, {}
    for name, value in state.items():
        owner, _, rest = name.rpartition(".base_layer.")
        if rest == "weight" and owner in layers:
            layer = layers[owner]
            down, up = (state[f"{owner}.{part}.{_NAME}.weight"].float() for part in ("lora_A", "lora_B"))
            update = layer.scaling[_NAME] * (up @ down)
            value = (value.float() + (update.T if layer.fan_in_fan_out else update)).to(value.dtype)
        elif rest == "weight" and owner in rows:
            layer = rows[owner]
            if id(layer.delta) not in shared:  # of tied layers one tensor, which is saved once
                shared[id(layer.delta)] = value.index_copy(0, layer.ids.cpu(), _trained_rows(layer, owner, state))
            value = shared[id(layer.delta)]
        if not _is_adapter(name, rows):
            folded[name.replace(".base_layer.", ".")] = value
    return folded


def save(hf: nn.Module, folder: Path, state: dict[str, torch.Tensor], tokenizer) -> None:
    """Writes the adapter, and a scalar head, as `peft.PeftModel.from_pretrained(base, folder)` reads them.

    With trained token rows the tokenizer goes with it: peft's AutoPeftModel gives the base rows for its new tokens.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    rows = _rows(hf)
    kept = {
        "base_model.model." + name.replace(f".{_NAME}.", "."): value.contiguous()
        for name, value in state.items()
        if ".lora_" in name or name.startswith("score.")
    }
    is_one = len({id(layer.delta) for layer in rows.values()}) == 1  # peft ties the output layer's by itself
    for owner in list(rows)[: 1 if is_one else None]:
        name = f"base_model.model.{owner}.token_adapter.trainable_tokens_delta"
        kept[name] = _trained_rows(rows[owner], owner, state)
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = hf.peft_config[_NAME].to_dict() | {"inference_mode": True}
    if hasattr(hf, "score"):
        config["modules_to_save"] = ["score"]
    if rows:
        config["trainable_token_indices"] = {owner: layer.ids.tolist() for owner, layer in rows.items()}
        tokenizer.save_pretrained(folder)
    config = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _targets(hf: nn.Module, names: list[str]) -> tuple[list[str], str]:
    """The layers that get an adapter, by their full names, and in words what all-linear leaves as it is.

    Raises:
        UserError: a name that is no layer's, or of layers that cannot be adapted.
    """
    from transformers.pytorch_utils import Conv1D

    modules = dict(hf.named_modules())
    heads = [module for module in (hf.get_output_embeddings(), getattr(hf, "score", None)) if module is not None]
    known = {leaf: _is_plain_to_peft(hf, leaf) for leaf in {name.rpartition(".")[2] for name in modules}}

    def obstacle(name: str) -> str | None:
        """Why a layer cannot be adapted."""
        module, (parent, _, leaf) = modules[name], name.rpartition(".")
        if type(module) not in (nn.Linear, Conv1D) or not known[leaf]:
            return "no plain linear layer"
        if hasattr(modules[parent], "A_log") and leaf in ("x_proj", "dt_proj", "out_proj"):
            return "used without being called"  # by the kernels of state-space layers
        return None

    if names == ["all-linear"]:
        linear = [name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))]
        wanted = [name for name in linear if not any(modules[name] is head for head in heads)]
        # A router only says which experts see a token, and is small.
        targets = [name for name in wanted if not obstacle(name) and not _ROUTER.search(name)]
        experts = {name.rpartition(".")[2] for name, module in modules.items() if _holds_stacked_weights(module)}
        rest = experts | {name.rpartition(".")[2] for name in set(wanted) - set(targets)}
        if not targets:
            raise UserError(f"--lora_r: {type(hf).__name__} has no plain linear layer that an adapter could go into")
        return targets, ", ".join(sorted(rest))
    targets = []
    for name in names:
        named = [it for it, module in modules.items() if it == name or it.endswith(f".{name}")]
        for it in named:
            if isinstance(modules[it], nn.Embedding):
                raise UserError(
                    "--lora_target_modules: embeddings cannot be adapted here; name linear layers, or all-linear"
                )
            if modules[it] is hf.get_output_embeddings() and is_tied(hf):
                raise UserError(
                    "--lora_target_modules: the output layer is tied to the embedding here and cannot be adapted"
                )
            if (why := obstacle(it)) or modules[it] is getattr(hf, "score", None):
                raise UserError(
                    f"--lora_target_modules {name}: {it} is a {type(modules[it]).__name__} and cannot be adapted "
                    f"({why or 'the scalar head, trained as it is'}); name others, or all-linear"
                )
        if not named:
            adaptable = [it for it in modules if not obstacle(it) and not any(modules[it] is head for head in heads)]
            raise UserError(f"--lora_target_modules {name}: no layer is called that; there are {_kinds(adaptable)}")
        targets += [it for it in named if it not in targets]
    return targets, ""


def _is_plain_to_peft(hf: nn.Module, leaf: str) -> bool:
    """Whether peft reads a name as it is; of some mixtures of experts it reads those of earlier versions otherwise."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, hf, None)
    except ValueError:
        return False
    return set(config.target_modules) == {leaf}


def _holds_stacked_weights(module: nn.Module) -> bool:
    """Experts, kept as one tensor each for all of them; `ds_shape` is a sharded one's whole shape."""
    return any(len(getattr(p, "ds_shape", p.shape)) == 3 for p in module.parameters(recurse=False)) and not isinstance(
        module, nn.Conv1d
    )


def _kinds(names) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _train_rows(hf: nn.Module, ids: Sequence[int]) -> None:
    """Puts `TokenRows` around the input and output embedding; tied ones share what is trained."""
    if not ids:
        return
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    names = {id(module): name for name, module in hf.named_modules()}
    delta = None
    for layer in filter(None, (embedding, head)):
        if hasattr(layer, "lora_A"):
            raise UserError(
                f"--lora_target_modules {names[id(layer)]}: rows of tokens that are new to the model are trained there "
                "already; leave it out"
            )
        weight = layer.weight
        if delta is None or weight is not embedding.weight:
            width = getattr(weight, "ds_shape", weight.shape)[1]
            delta = nn.Parameter(torch.zeros(len(ids), width, dtype=weight.dtype, device=weight.device))
        hf.set_submodule(names[id(layer)], TokenRows(layer, ids, delta))


def _trained_rows(layer: TokenRows, owner: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    weight, delta = state[f"{owner}.base_layer.weight"], state[f"{owner}.delta"]
    return (weight[layer.ids.cpu()].float() + delta.float()).to(weight.dtype)


def _inject(hf: nn.Module, config) -> None:
    from peft import inject_adapter_in_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that fan_in_fan_out is not for GPT-2's one plain linear layer
            inject_adapter_in_model(config, hf)
    except ValueError as error:
        raise UserError(f"--lora_target_modules: {str(error).splitlines()[0]}") from error


def _layers(hf: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLayer)}


def _rows(hf: nn.Module) -> dict[str, TokenRows]:
    """The input embedding's first."""
    found = [(name, module) for name, module in hf.named_modules() if isinstance(module, TokenRows)]
    return dict(sorted(found, key=lambda item: not isinstance(item[1].base_layer, nn.Embedding)))


def _is_adapter(name: str, rows: dict[str, TokenRows]) -> bool:
    owner, _, last = name.rpartition(".")
    return ".lora_A." in name or ".lora_B." in name or (last == "delta" and owner in rows)
