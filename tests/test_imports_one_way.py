"""Imports run one way: step -> common. And the math knows nothing but torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = sorted(path.name for path in ROOT.glob("step[0-9]_*") if path.is_dir())
COMMON = sorted((ROOT / "common").rglob("*.py"))
PURE = [
    ROOT / "common/tensor_ops.py",
    *(ROOT / "step3_rlhf" / name for name in ("kl.py", "advantages.py", "losses.py")),
]
PURE += [ROOT / "step1_sft/loss.py", ROOT / "step2_reward/loss.py"]
PURE_MAY_IMPORT = {"torch", "typing", "dataclasses", "math", "common.tensor_ops"}


def imported_modules(source: str) -> list[str]:
    """Full names of every module that a file imports, at any depth: `import a.b`, `from a import b` (as a and a.b)."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            modules.append(node.module)
    return modules


def packages(source: str) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(source)}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_reader_sees_every_form_of_import():
    source = "import a.b\nfrom c.d import e\ndef f():\n    import g as h\n    from step1_sft import loss\n"
    assert imported_modules(source) == ["a.b", "c.d", "g", "step1_sft"]


@pytest.mark.parametrize("path", COMMON, ids=relative)
def test_common_imports_no_step(path):
    assert not {name for name in packages(path.read_text()) if name.startswith("step")}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_imports_no_other_step(step):
    for path in sorted((ROOT / step).rglob("*.py")):
        others = {name for name in packages(path.read_text()) if name.startswith("step")} - {step}
        assert not others, f"{relative(path)} imports {others}"


@pytest.mark.parametrize("path", PURE, ids=relative)
def test_math_imports_nothing_but_torch(path):
    modules = {"torch" if name.startswith("torch.") else name for name in imported_modules(path.read_text())}
    assert modules <= PURE_MAY_IMPORT


def test_tools_are_imported_by_no_stage():
    for path in [*COMMON, *(file for step in STEPS for file in (ROOT / step).rglob("*.py"))]:
        assert not packages(path.read_text()) & {"scripts", "tests"}, relative(path)
