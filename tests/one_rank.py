"""A process group of one inside the test process, for real engines without a launch.

Started once and kept: DeepSpeed does not survive a second one in the same process. The environment is put back, so that
subprocesses do not take themselves for ranks of it, but for LOCAL_RANK: DeepSpeed asks for it at every engine.
"""

import functools
import os

import torch


@functools.cache
def start() -> torch.device:
    from common import distributed

    before = dict(os.environ)
    device = distributed.start(5, 0)
    os.environ.clear()
    os.environ.update(before | {"LOCAL_RANK": "0"})
    return device
