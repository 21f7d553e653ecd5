"""Imports go one way, and what is called pure is pure."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hybridrl"

TIERS = [
    {
        "train",
        "plan",
        "planning",
        "launch",
        "session",
        "inputs",
        "registered",
        "run_models",
        "shared",
        "saved",
        "supervised",
        "sampling_loop",
    },
    {"rollout", "training", "rewards", "environments", "data", "checkpoint"},
    {"memory"},
    {"reshard"},
    {"models"},
    {"parallel"},
    {"config"},
]
"""A module imports from its own tier and from those after it."""
LEAVES = {"hybridrl.files", "hybridrl.parallel.sizes"}
"""Modules that import nothing of ours, which any module may import."""
PURE = ["config/**/*.py", "parallel/sizes.py", "models/spec.py", "models/weights.py", "reshard/layout*.py", "files.py"]
PURE += [
    "planning/*.py",
    "reshard/layouts/*.py",
    "reshard/planner*.py",
    "reshard/plan.py",
    "reshard/boxes.py",
    "reshard/rounds.py",
]
FRAMEWORKS = {"torch", "megatron", "sglang", "transformers", "ray", "transformer_engine"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(path: Path, typing: bool = True) -> Iterator[str]:
    """Full names of all imported modules, those in functions too; `typing=False` leaves out TYPE_CHECKING blocks."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif typing or not is_typing_only(node):
            for child in ast.iter_child_nodes(node):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text()))


def tier(module: str) -> int | None:
    parts = module.split(".")
    return next((i for i, names in enumerate(TIERS) if len(parts) > 1 and parts[1] in names), None)


def is_leaf(module: str) -> bool:
    return any(module == leaf or module.startswith(leaf + ".") for leaf in LEAVES)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    own = name_of(path)
    ours = {m for m in imports(path) if m.startswith("hybridrl.")}
    if is_leaf(own):
        assert not ours, f"{own} is a leaf, but imports {ours}"
    mine = tier(own)
    if mine is not None:
        wrong = {m for m in ours if not is_leaf(m) and (theirs := tier(m)) is not None and theirs < mine}
        assert not wrong, f"{own} imports upwards: {wrong}"
        above = mine > 0 and {m for m in imports(path, typing=False) if m.startswith("hybridrl.telemetry")}
        assert not above, f"{own} calls telemetry: {above}; hand it a Timer or a ledger instead"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("algorithms/**/*.py")), ids=name_of)
def test_algorithms_import_torch_alone(path: Path) -> None:
    roots = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names)
    assert roots <= {"torch", "hybridrl"}
    assert all(m.startswith("hybridrl.algorithms") for m in imports(path) if m.startswith("hybridrl"))


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("reshard/**/*.py")), ids=name_of)
def test_resharding_knows_no_framework_but_torch(path: Path) -> None:
    assert not {m.split(".")[0] for m in imports(path)} & (FRAMEWORKS - {"torch"})


@pytest.mark.parametrize("path", sorted({p for g in PURE for p in PACKAGE.glob(g)}), ids=name_of)
def test_pure_modules_import_no_framework(path: Path) -> None:
    assert not {m.split(".")[0] for m in imports(path, typing=False)} & FRAMEWORKS


def test_loading_a_configuration_loads_no_framework() -> None:
    code = "import sys, hybridrl.config.load as c; c.compose(['recipe=grpo_tiny_moe']); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    assert not set(run.stdout.split()) & FRAMEWORKS


def packages_of_one_tier() -> list[set[str]]:
    return [names for names in TIERS if len(names) > 1]


def test_packages_of_one_tier_make_no_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for path in modules():
        own = name_of(path).split(".")
        if len(own) > 1:
            targets = {
                m.split(".")[1] for m in imports(path, typing=False) if m.startswith("hybridrl.") and not is_leaf(m)
            }
            edges.setdefault(own[1], set()).update(targets - {own[1]})
    for names in packages_of_one_tier():
        left = {n: edges.get(n, set()) & names for n in names}
        while free := {n for n, targets in left.items() if not targets}:
            left = {n: targets - free for n, targets in left.items() if n not in free}
        assert not left, f"cycle among {left}"
