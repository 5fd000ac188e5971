"""Enforces the layers: a module imports only from its own layer's left. Exits 1 and names every import that does not.

python tools/check_layers.py [source folder of the package]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

# From left to right; names in one row may not import each other, unless they are one package. The laboratory, whose
# packages are named with its own name, stands right of all that is the library.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "markup", "former"),
    ("problem",),
    ("tensors",),
    ("runtime",),
    ("plans",),
    ("families",),
    ("backends",),
    ("ops",),
    ("arguments", "cache_step", "flops", "transforms"),
    ("api",),
    ("facades",),
    ("__init__",),
    ("testing",),
    ("distributed",),
    ("integrations",),
    ("lab.__init__", "lab.defaults", "lab.dtypes"),
    ("lab.options",),
    ("lab.bench", "lab.check"),
    ("lab.profile",),
    ("lab.ladder",),
    ("lab.tiles",),
    ("lab.report",),
    ("cli",),
    ("__main__",),
)
# Each of these may be imported by the named layers only, whatever their order.
ONLY_FOR = {"runtime": {"backends", "lab.profile", "lab.ladder", "lab.tiles", "cli"}}
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}


def layer_of(parts: Sequence[str]) -> str:
    """The name in LAYERS of a module, by its path or its name below the package: two parts in the laboratory."""
    head = parts[0] if parts else "__init__"
    return f"lab.{parts[1] if len(parts) > 1 else '__init__'}" if head == "lab" else head


def imports(path: Path, package: str) -> list[tuple[int, str]]:
    """Returns the line and the layer for every import of the package in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append((node.lineno, "(relative import)"))
                continue
            module = node.module or ""
            is_outer = module in (package, f"{package}.lab")
            targets = [f"{module}.{alias.name}" for alias in node.names] if is_outer else [module]
        else:
            continue
        for target in targets:
            head, *rest = target.split(".")
            if head == package:
                found.append((node.lineno, layer_of(rest)))
    return found


def check(source: Path) -> list[str]:
    """Every violation below the package folder, as text."""
    package, problems = source.name, []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        layer = layer_of(relative.with_suffix("").parts)
        if layer not in RANK:
            problems.append(f"{relative}: {layer} is in no layer; add it to LAYERS in tools/check_layers.py")
            continue
        for line, target in imports(path, package):
            # `from flashtile import attention` names no module: that is an import of __init__
            target = target if target in RANK or target.startswith("(") else "__init__"
            if target == layer:
                continue
            if target not in RANK:
                problems.append(f"{relative}:{line}: {target}; write imports out in full")
            elif RANK[target] >= RANK[layer]:
                problems.append(f"{relative}:{line}: {layer} imports {target}, which is not to its left")
            elif layer not in ONLY_FOR.get(target, {layer}):
                problems.append(f"{relative}:{line}: only {', '.join(sorted(ONLY_FOR[target]))} may import {target}")
    return problems


def main() -> int:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "src" / "flashtile"
    problems = check(source)
    print("\n".join(problems) if problems else "layers: clean")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
