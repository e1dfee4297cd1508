"""What every test gets: the repository root on the path, one thread, fixed seeds, no network."""

import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# setdefault: a run may still choose otherwise. Subprocesses inherit these, so set them before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
# The same examples every time: a suite that is red by luck teaches nobody. HYPOTHESIS_PROFILE=default draws others.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    torch.manual_seed(0)
