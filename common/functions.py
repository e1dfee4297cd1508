"""Python functions named on the command line as FILE.py:FUNCTION: reward functions and judges."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from common.errors import UserError

_ROOT = Path(__file__).resolve().parent.parent


def is_function(spec: str) -> bool:
    """Whether a command-line value has the form FILE.py:FUNCTION."""
    return ".py:" in spec


def find_file(spec: str) -> Path | None:
    """The file of a FILE.py:FUNCTION, from the current folder or else from the repository's root."""
    file = spec.rpartition(":")[0]
    return next((path for path in (Path(file), _ROOT / file) if file.endswith(".py") and path.is_file()), None)


def require_file(spec: str, flag: str) -> Path:
    """The same. Raises a UserError where there is none; `flag` is what named it."""
    path = find_file(spec)
    if path is None and spec.endswith(".py"):
        raise UserError(f"{flag} {spec}: which function of it? wanted FILE.py:FUNCTION")
    if path is None:
        file = spec.rpartition(":")[0] or spec
        raise UserError(f"{flag} {spec}: there is no file {file}; wanted FILE.py:FUNCTION or a model folder")
    return path


def load_function(spec: str, flag: str) -> tuple[Callable, ModuleType]:
    """The function with TRL's signature f(prompts, completions, **columns), and the module it lives in.

    The file is looked for from the current folder, then from the repository's root. Its code runs on loading.

    Raises:
        UserError: no such file or function, or a function of another signature.
    """
    file, _, name = spec.rpartition(":")
    path = require_file(spec, flag)
    # The prefix keeps a user's json.py from taking the place of Python's.
    module_spec = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        raise UserError(f"{flag} {spec}: {file} has no function {name}; it has {', '.join(found) or 'none'}")
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all and not {"prompts", "completions"} <= parameters.keys():
        seen = f"{name}({', '.join(parameters)})"
        raise UserError(f"{flag} {spec}: wanted {name}(prompts, completions, **columns), seen {seen}")
    return function, module
