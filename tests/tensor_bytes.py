"""Counts the bytes of tensors that are alive, now and at most: a memory meter that works on a CPU."""

import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages() -> dict[int, torch.UntypedStorage]:
    """The distinct storages behind all tensors that Python can reach."""
    gc.collect()
    # By type: isinstance would look into every object and wake deprecated attributes of modules.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    own = [tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta"]
    return {storage._cdata: storage for storage in own}


def alive() -> int:
    return sum(storage.nbytes() for storage in storages().values())


class Meter(TorchDispatchMode):
    """`peak`: the most that storages born inside it held at once. What an operation needs while at work is not seen."""

    def __enter__(self):
        self.now = self.peak = 0
        self.known = {}
        for storage in storages().values():  # what was there before costs nothing, until another takes its place
            self.watch(storage, 0)
        super().__enter__()
        return self

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.known:
            self.watch(storage, storage.nbytes())
            self.peak = max(self.peak, self.now)

    def watch(self, storage: torch.UntypedStorage, size: int) -> None:
        self.known[storage._cdata] = size
        self.now += size
        weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)
