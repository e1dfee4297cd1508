"""Five optimizer steps in 16 bits at every ZeRO stage, beside a plain PyTorch loop that knows nothing of DeepSpeed.

Used by test_engine.py, in its own process for one rank, and launched as
torchrun --nproc_per_node 2 tests/precision_worker.py OUT for two.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import adapters, distributed, engine, models  # noqa: E402, I001
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

VOCAB, STEPS = 29, 5
OPTIM = engine.Optim(
    learning_rate=3e-3, lr_scheduler_type="constant", min_lr_ratio=0.0, warmup_steps=0, weight_decay=0.1,
    adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=2.5,
)  # fmt: skip
# (dtype, rank of the adapters or 0, ZeRO stage, offload of the optimizer, gradient checkpointing)
SETTINGS = [
    *(("bf16", 0, stage, False, False) for stage in (0, 1, 2, 3)),
    *(("bf16", 0, stage, True, False) for stage in (1, 2, 3)),
    *(("bf16", 0, stage, False, True) for stage in (0, 3)),
    *(("bf16", 2, stage, False, False) for stage in (0, 1, 2, 3)),
    *(("fp16", 0, stage, False, False) for stage in (0, 1, 2, 3)),
    *(("fp16", 0, stage, True, False) for stage in (1, 3)),
]


def fresh(dtype: str, lora_r: int) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    hf = LlamaForCausalLM(config).eval()
    adapters.add(hf, adapters.Lora(lora_r, 8, 0.0, ["all-linear"]), 3)
    return hf.to(models.DTYPES[dtype])


def micro_batches(step: int) -> list[torch.Tensor]:
    """Four, two for each of two ranks, of different lengths."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCAB, (2, length), generator=generator) for length in (9, 3, 6, 4)]


def share(logits: torch.Tensor, ids: torch.Tensor, step: int) -> torch.Tensor:
    count = sum(ids[:, 1:].numel() for ids in micro_batches(step))
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / count


def plain(dtype: str, lora_r: int) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of each step: forward and backward in 16 bits, everything that is kept in fp32."""
    model = fresh(dtype, lora_r)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(STEPS):
        total, sums = 0.0, [torch.zeros_like(master) for master in masters]
        for ids in micro_batches(step):
            model.zero_grad()
            loss = share(model(ids).logits, ids, step)
            loss.backward()
            total += loss.item()
            for weight, gradient in zip(weights, sums, strict=True):
                gradient += weight.grad.float()
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in sums))
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient * min(1.0, 2.5 / norm)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        yield total, norm


def through_deepspeed(setting: tuple, scale: Path, device) -> tuple[str, list[tuple[float, float]]]:
    """How the engine describes itself, and loss and gradient norm of each step."""
    dtype, lora_r, stage, offload, checkpointing = setting
    options = engine.Engine(dtype, stage, offload, False, checkpointing, str(scale) if dtype == "fp16" else None)
    model = engine.TrainedModel(lambda zero3: models.LanguageModel(fresh(dtype, lora_r)), OPTIM, options, STEPS, device)
    found = []
    for step in range(STEPS):
        mine = micro_batches(step)[distributed.rank() :: distributed.world_size()]
        result = model.train_step(
            mine, lambda ids, step=step: (share(model(ids, torch.ones_like(ids).bool()), ids, step), {}), step + 1
        )
        found.append((result.sums["loss"], result.grad_norm))
    return model.describe(), found


def all_settings(folder: Path, device) -> list[tuple[str, list[tuple[float, float]]]]:
    scale = folder / "scale.json"  # so small that no step is lost in looking for it
    scale.write_text(json.dumps({"fp16": {"initial_scale_power": 8}}))
    refuses = type(get_accelerator()).is_fp16_supported
    type(get_accelerator()).is_fp16_supported = lambda self: True  # on a CPU DeepSpeed says no, and then works
    try:
        return [through_deepspeed(setting, scale, device) for setting in SETTINGS]
    finally:
        type(get_accelerator()).is_fp16_supported = refuses


if __name__ == "__main__":
    found = all_settings(Path(sys.argv[1]).parent, distributed.start(5, 0))
    if distributed.is_main():
        Path(sys.argv[1]).write_text(json.dumps(found))
    distributed.stop()
