"""Measures what engines of every ZeRO stage hold, by counting tensors, and writes it down.

Launched by test_memory.py: torchrun --nproc_per_node 2 tests/memory_worker.py FOLDER. One launch measures all settings,
since starting the processes takes far longer. FOLDER holds a model; found.json comes to lie beside it.
"""

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import distributed, engine, models  # noqa: E402, I001
import torch  # noqa: E402
from tensor_bytes import Meter, alive  # noqa: E402

# (dtype, ZeRO stage, offload of the optimizer, only one layer is trained)
SETTINGS = [
    *(("bf16", stage, False, False) for stage in (0, 1, 2, 3)),
    *(("fp32", stage, False, False) for stage in (0, 2, 3)),
    *(("bf16", stage, True, False) for stage in (1, 2, 3)),
    *(("bf16", stage, False, True) for stage in (0, 3)),
]


def measure(folder: Path, dtype: str, zero_stage: int, offload: bool, part: bool, device) -> dict[str, float]:
    """Bytes between steps, and the most in the backward pass and in the update, of the third optimizer step."""

    def load(zero3):
        hf = models.load_causal_lm(folder / "model", dtype, zero3=zero3)
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(not part or "layers.0." in name)
        return models.LanguageModel(hf)

    before = alive()
    optim = engine.Optim(1e-4, "constant", 0.0, 0, 0.0, 0.9, 0.95, 1e-8, 1.0)
    options = engine.Engine(dtype, zero_stage, offload, False, False, str(folder / "small_buckets.json"))
    model = engine.TrainedModel(load, optim, options, 10, device)
    ids = torch.zeros(1, 4, dtype=torch.long)

    def loss(micro_batch):
        return model(ids, torch.ones_like(ids)).float().square().mean() / 2, {}

    found = {}
    step = model.engine.step

    def watched_step():
        if not model.engine.is_gradient_accumulation_boundary():
            return step()
        backward.__exit__(None, None, None)
        found["backward"] = held + backward.peak
        start, update = alive() - before, Meter()
        with update:
            step()
        found["update"] = start + update.peak
        backward.__enter__()

    model.train_step([0, 0], loss, 1)
    model.train_step([0, 0], loss, 2)
    found["between"] = held = alive() - before
    model.engine.step = watched_step
    with Meter() as backward:
        model.train_step([0, 0], loss, 3)
    found["trained"] = sum(getattr(p, "ds_numel", p.numel()) for p in model.module.parameters() if p.requires_grad)
    inner = model.engine.optimizer
    model.engine.destroy()
    vars(inner).clear()  # hooks of stage 1 in bf16 hold it until the next backward pass
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    device = distributed.start(5, 0)
    gc.freeze()  # what the imports left need not be looked through again and again
    found = [measure(folder, *setting, device) for setting in SETTINGS]
    if distributed.is_main():
        (folder / "found.json").write_text(json.dumps(found))
    distributed.stop()


if __name__ == "__main__":
    main()
