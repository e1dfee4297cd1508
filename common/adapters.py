"""Low-rank adapters (LoRA, Hu et al. 2021) by peft: added, switched off for the reference, folded in for saving.

Only the adapters are trained, and a scalar head where there is one; so gradients and optimizer states are small, and a
reference model is the same weights with the adapter off. What a stage writes is whole all the same: the folder holds
the folded weights, and `adapter/` beside them what peft loads onto the base model.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from common.errors import UserError

ADAPTER_FOLDER = "adapter"
_NAME = "default"  # what peft calls an adapter that nobody named; a part of parameter names in memory, not on disk


@dataclasses.dataclass(frozen=True)
class Lora:
    """Rank (0: no adapter), scale (the update is multiplied by alpha / r), dropout, and which layers get one."""

    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: list[str]


def add(hf: nn.Module, lora: Lora, seed: int) -> str | None:
    """Puts adapters into a HF model, in place, and freezes everything else but a scalar head. Rank 0 does nothing.

    An adapter begins as no change: B is zero. A is drawn from a generator of its own, the same on all ranks.

    Returns:
        What is trained, for people; None for rank 0.

    Raises:
        UserError: no layer of the model has one of the names.
    """
    if not lora.lora_r:
        return None
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    names = lora.lora_target_modules
    is_scalar = hasattr(hf, "score")
    config = LoraConfig(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=names[0] if names == ["all-linear"] else names,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in hf.modules()),  # GPT-2's transposed linear layer
        exclude_modules=["score"] if is_scalar else None,
        task_type="SEQ_CLS" if is_scalar else "CAUSAL_LM",
        base_model_name_or_path=hf.config._name_or_path,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _inject(hf, config)
    if is_scalar:
        hf.score.requires_grad_(True)
    layers = _layers(hf)
    if any(len(layer.lora_embedding_A) for layer in layers.values()):
        raise UserError("--lora_target_modules: embeddings cannot be adapted here; name linear layers, or all-linear")
    if is_tied(hf) and any(layer is hf.get_output_embeddings() for layer in layers.values()):
        raise UserError("--lora_target_modules: the output layer is tied to the embedding here and cannot be adapted")
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    for name in names:
        if name != "all-linear" and not any(layer.endswith(name) for layer in layers):
            raise UserError(f"--lora_target_modules {name}: no layer is called that; adapted were {', '.join(kinds)}")
    return f"adapters of rank {lora.lora_r} in {', '.join(kinds)}" + ("; the scalar head is trained too" * is_scalar)


def add_like(hf: nn.Module, other: nn.Module) -> None:
    """Puts adapters of the same shape as another model's into a model; their values are left to be filled in."""
    if present(other):
        with torch.random.fork_rng():
            _inject(hf, other.peft_config[_NAME])


def is_tied(hf: nn.Module) -> bool:
    return bool(getattr(hf.config.get_text_config(), "tie_word_embeddings", False))


def present(hf: nn.Module) -> bool:
    return hasattr(hf, "peft_config")


@contextlib.contextmanager
def switched_off(hf: nn.Module) -> Iterator[None]:
    """Within it the model answers as it did before any adapter was trained."""
    layers = _layers(hf)
    for layer in layers.values():
        layer._disable_adapters = True  # not enable_adapters(), which also touches requires_grad
    try:
        yield
    finally:
        for layer in layers.values():
            layer._disable_adapters = False


def fold(hf: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state with adapters as the state of the plain model: W + B A alpha / r, summed in fp32, in W's precision.

    Args:
        hf: the model that `state` is of; only its structure is read, so it may be sharded.
    """
    layers = _layers(hf)
    folded = {}
    for name, value in state.items():
        owner, _, rest = name.rpartition(".base_layer.")
        if owner and rest == "weight":
            layer = layers[owner]
            down, up = (state[f"{owner}.{part}.{_NAME}.weight"].float() for part in ("lora_A", "lora_B"))
            update = layer.scaling[_NAME] * (up @ down)
            value = (value.float() + (update.T if layer.fan_in_fan_out else update)).to(value.dtype)
        if not _is_adapter(name):
            folded[name.replace(".base_layer.", ".")] = value
    return folded


def save(hf: nn.Module, folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Writes the adapter, and a scalar head, as `peft.PeftModel.from_pretrained(base, folder)` reads them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    kept = {
        "base_model.model." + name.replace(f".{_NAME}.", "."): value.contiguous()
        for name, value in state.items()
        if _is_adapter(name) or name.startswith("score.")
    }
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = hf.peft_config[_NAME].to_dict() | {"inference_mode": True}
    if hasattr(hf, "score"):
        config["modules_to_save"] = ["score"]
    config = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _inject(hf: nn.Module, config) -> None:
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(config, hf)
    except ValueError as error:
        raise UserError(f"--lora_target_modules: {str(error).splitlines()[0]}") from error


def _layers(hf: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLayer)}


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
