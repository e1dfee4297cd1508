"""A process group of one inside the test process, for real engines without a launch; and a run without a folder.

The group is started once and kept: DeepSpeed does not survive a second one in the same process. The environment is put
back, so that subprocesses do not take themselves for ranks of it, but for LOCAL_RANK: DeepSpeed asks for it at every
engine.
"""

import functools
import os
from types import SimpleNamespace

import torch


@functools.cache
def start() -> torch.device:
    from common import distributed

    before = dict(os.environ)
    device = distributed.start(5, 0)
    os.environ.clear()
    os.environ.update(before | {"LOCAL_RANK": "0"})
    return device


class Recorded:
    """Stands where a training loop wants its run: keeps what is logged, saves nothing."""

    def __init__(self):
        self.rows, self.timings = {}, {}
        self.log = SimpleNamespace(log=self.keep)

    def keep(self, step, record, timings):
        assert step not in self.rows
        self.rows[step], self.timings[step] = record, timings

    def restore(self, models):
        return 0, {}

    def after_step(self, step, models, counters):
        pass
