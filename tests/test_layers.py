"""Who may import whom, as docs/house.md states it: every import of the package is walked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rose_compiler"

#: layer -> modules it may import, itself apart. A name stands for everything below it.
ALLOWED: dict[str, tuple[str, ...]] = {
    "base": (),
    "ir": ("base",),
    "frontend": ("base", "ir"),
    "passes": ("base", "ir", "tune.predict"),
    "tune": ("base", "ir"),
    "codegen": ("base", "ir"),
    "kernels": ("base",),
    "runtime": ("base", "kernels"),
    "sim": ("base", "runtime.hosts"),
}
#: These may import every layer. The empty name is the package's own __init__.
EVERYTHING = ("", "__main__", "api", "cli", "testing")

#: layer -> packages outside the standard library it may import. Layers not named may import any.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "base": (),
    "kernels": ("numpy", "torch", "triton"),
    "runtime": ("cloudpickle", "cuda", "numpy", "pynvml", "ray", "torch"),
    "sim": ("cloudpickle", "envpool", "gymnasium", "mujoco", "numpy", "torch"),
}
#: Importable only through the links at the root, by mistake.
BARE = ("ir", "passes", "runtime")


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    in_function: str | None  # name of the innermost function around it


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a module's syntax tree, ``import_module("literal")`` calls included."""

    def visit(node: ast.AST, function: str | None) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        elif isinstance(node, ast.Lambda):
            function = "<lambda>"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, function)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # one dot is the package around the module; an __init__ is that package itself
                parts = module.split(".")
                up = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, f"{base}.{alias.name}", function)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            name = node.args[0]
            if (
                called in ("import_module", "__import__")
                and isinstance(name, ast.Constant)
                and isinstance(name.value, str)
            ):
                yield Import(node.lineno, name.value, function)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(tree, None)


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module of the package imports against the rules, one line each."""
    layer = module.split(".")[1] if "." in module else ""
    if layer not in ALLOWED and layer not in EVERYTHING:
        return [f"{module}: layer {layer!r} is not in the table"]
    found = []
    for imp in imports(ast.parse(source), module, is_package):
        top = imp.target.split(".")[0]
        place = f"{module}:{imp.line}"
        if top in BARE:
            found.append(f"{place}: imports {imp.target}, write {PACKAGE}.{imp.target}")
        elif top == PACKAGE:
            inner = imp.target[len(PACKAGE) + 1 :]
            # PEP 562: a host process imports the package, and must not load the compiler by it
            lazy = layer == "" and imp.in_function == "__getattr__"
            if imp.in_function is not None and not lazy:
                found.append(f"{place}: imports {imp.target} inside {imp.in_function}")
            if layer in ALLOWED and not within(inner, layer, *ALLOWED[layer]):
                found.append(f"{place}: {layer} may not import {imp.target}")
        elif layer in THIRD_PARTY and top not in (*sys.stdlib_module_names, *THIRD_PARTY[layer]):
            found.append(f"{place}: {layer} may not import {imp.target}")
    return found


def package_modules() -> list[tuple[Path, str, bool]]:
    modules = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        modules.append((path, ".".join(parts[:-1] if is_package else parts), is_package))
    return modules


def test_package_keeps_to_its_layers() -> None:
    modules = package_modules()
    assert any(name.startswith(f"{PACKAGE}.base.") for _, name, _ in modules)
    found = [
        line
        for path, module, is_package in modules
        for line in violations(path.read_text(encoding="utf-8"), module, is_package)
    ]
    assert not found, "\n".join(found)


def test_nothing_imports_the_root_links() -> None:
    found = []
    for folder in ("tests", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [
                f"{path.relative_to(ROOT)}:{imp.line}: imports {imp.target}"
                for imp in imports(tree, path.stem, is_package=False)
                if imp.target.split(".")[0] in BARE
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", BARE)
def test_root_links_lead_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path(PACKAGE) / name


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ir.deps", "from rose_compiler.passes.hoist import HoistInvariant"),
        ("ir.deps", "import rose_compiler.frontend.capture as capture"),
        ("ir.deps", "from rose_compiler import tune"),
        ("ir.deps", "from rose_compiler import compile"),
        ("ir.deps", "from ..codegen import emit"),
        ("ir.deps", "def f():\n    from rose_compiler.ir import effects"),
        ("ir.deps", "f = lambda: __import__('rose_compiler.ir.effects')"),
        ("ir.deps", "import importlib\nimportlib.import_module('rose_compiler.api')"),
        ("ir.deps", "if TYPE_CHECKING:\n    from rose_compiler.tune import search"),
        ("base.errors", "import torch"),
        ("base.errors", "from numpy import ndarray"),
        ("base.errors", "from rose_compiler.ir import ops"),
        ("passes.overlap", "from rose_compiler.tune.search import candidates"),
        ("passes.overlap", "from rose_compiler.tune import search"),
        ("tune.search", "from rose_compiler.passes import pipeline"),
        ("codegen.emit", "from rose_compiler.runtime import support"),
        ("runtime.support", "from rose_compiler.ir import program"),
        ("runtime.support", "import sympy"),
        ("runtime.support", "from rose_compiler.sim import ShardedEnv"),
        ("kernels.scan", "import networkx"),
        ("api", "import ir"),
        ("api", "from runtime.support import run"),
        ("api", "def compile():\n    from rose_compiler.frontend import capture"),
        ("novelty.thing", "import os"),
    ],
)
def test_planted_violation_is_caught(module: str, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ir.deps", "import sympy\nfrom rose_compiler.base import errors\nfrom . import effects"),
        ("passes.overlap", "from rose_compiler.tune.predict import makespan"),
        ("passes.overlap", "from rose_compiler.tune import predict"),
        ("base.errors", "import os.path\nfrom collections import abc"),
        ("runtime.lanes", "import torch\nfrom rose_compiler.base.errors import fail"),
        ("sim.gym", "def f():\n    import gymnasium"),
        (
            "testing.fuzz",
            "from rose_compiler.api import compile\nfrom rose_compiler.runtime import x",
        ),
    ],
)
def test_legal_import_passes(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


def test_relative_imports_of_a_package_are_resolved_from_itself() -> None:
    source = "from .lanes import Lane\nfrom ..base import errors"
    assert violations(source, f"{PACKAGE}.runtime", is_package=True) == []
    upward = "from ..frontend import capture"
    assert violations(upward, f"{PACKAGE}.runtime", is_package=True) != []


def test_a_phase_loads_no_torch() -> None:
    """Simulators name theirs in worker processes, which would take seconds to start."""
    code = "import sys, rose_compiler; rose_compiler.phase('x'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
