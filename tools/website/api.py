"""The pages of the public functions and classes, from the sources alone: nothing is imported.

A package's public names are those of its `__all__`. Docstrings keep their form: a block of lines `name  meaning`
becomes a table, an indented block is code.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "flashtile": "api-flashtile.md",
    "flashtile.distributed": "api-distributed.md",
    "flashtile.testing": "api-testing.md",
}
# Public names that a package's `__getattr__` finds
LAZY = {
    "install": "flashtile.integrations.torch_ops",
    "uninstall": "flashtile.integrations.torch_ops",
}
# Aliases in signatures, written out
ALIASES = "flashtile.arguments"

_ROW = re.compile(r"^(?P<names>[a-z_][\w, *]*?) {2,}(?P<text>\S.*)$")
_WIDTH = 88

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """A module's syntax tree, found by its dotted name below a folder of sources."""

    name: str
    tree: ast.Module
    sources: Path

    @classmethod
    def read(cls, name: str, sources: Path) -> Module:
        path = sources / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return cls(name, ast.parse(path.read_text(encoding="utf-8")), sources)

    def public(self) -> list[str]:
        """Returns the names of `__all__`, without those of the kind of `__version__`."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
        raise ValueError(f"{self.name} has no __all__")

    def find(self, name: str) -> ast.stmt:
        """Returns the definition of a name, in this module or in the one that it is imported from."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in self.tree.body:
                return node
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and node in self.tree.body:
                return node
            if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
                return Module.read(str(node.module), self.sources).find(name)
        if name in LAZY:
            return Module.read(LAZY[name], self.sources).find(name)
        raise ValueError(f"{self.name}: {name} is in __all__, and defined nowhere")


def page(package: str, sources: Path) -> str:
    """Returns the Markdown of a package's page: functions first, then classes, then constants."""
    module = Module.read(package, sources)
    aliases = _aliases(Module.read(ALIASES, sources))
    found = [(name, module.find(name)) for name in module.public()]
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Assign)
    ordered = [(name, node) for kind in kinds for name, node in found if isinstance(node, kind)]
    parts = [f"# {package}", prose(ast.get_docstring(module.tree, clean=False) or "")]
    parts += [_entry(name, node, aliases) for name, node in ordered]
    return "\n\n".join(parts) + "\n"


def _aliases(module: Module) -> dict[str, str]:
    return {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in module.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
    }


def _entry(name: str, node: ast.stmt, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"## {name}\n\n{_function(node, aliases)}"
    if not isinstance(node, ast.ClassDef):
        return f"## {name}\n\n{_code(ast.unparse(node))}"
    fields = [
        one for one in node.body if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    lines = [f"class {name}{bases}", *(f"    {_written_out(ast.unparse(one), aliases)}" for one in fields)]
    parts = [f"## {name}", _code("\n".join(lines)), prose(ast.get_docstring(node, clean=False) or "")]
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    parts += [f"### {name}.{one.name}\n\n{_function(one, aliases)}" for one in methods]
    return "\n\n".join(parts)


def _function(node: ast.FunctionDef, aliases: dict[str, str]) -> str:
    is_property = any(ast.unparse(one).endswith("property") for one in node.decorator_list)
    code = _code(signature(node, aliases, is_property))
    return f"{code}\n\n{prose(ast.get_docstring(node, clean=False) or '')}"


def signature(node: ast.FunctionDef, aliases: dict[str, str], is_property: bool = False) -> str:
    """Returns the signature as it is called: without self, and without `**unknown`, which is refused."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if is_property:
        return f"{node.name}{returns.replace(' ->', ':')}"
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    words = [
        _parameter(one, default)
        for one, default in zip(positional, defaults, strict=True)
        if one.arg not in ("self", "cls")
    ]
    if given.vararg:
        words.append(f"*{_parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        words.append("*")
    words += [_parameter(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg and given.kwarg.arg != "unknown":
        words.append(f"**{_parameter(given.kwarg, None)}")
    words = [_written_out(word, aliases) for word in words]
    line = f"{node.name}({', '.join(words)}){returns}"
    if len(line) <= _WIDTH:
        return line
    lines = "".join(f"    {word},\n" for word in words)
    return f"{node.name}(\n{lines}){returns}"


def _parameter(given: ast.arg, default: ast.expr | None) -> str:
    text = f"{given.arg}: {ast.unparse(given.annotation)}" if given.annotation else given.arg
    if default is None:
        return text
    return f"{text}{' = ' if given.annotation else '='}{ast.unparse(default)}"


def _written_out(text: str, aliases: dict[str, str]) -> str:
    return re.sub(r"(?<=: )\w+\b", lambda match: aliases.get(match[0], match[0]), text)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def prose(docstring: str) -> str:
    """Returns a docstring as Markdown."""
    blocks = re.split(r"\n{2,}", inspect.cleandoc(docstring))
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: str) -> str:
    lines = block.splitlines()
    if all(line.startswith("    ") for line in lines):
        return _code(inspect.cleandoc(block))
    if not _ROW.match(lines[0]):
        return _text(block)
    rows: list[tuple[str, str]] = []
    for line in lines:
        if match := _ROW.match(line):
            rows.append((match["names"], match["text"]))
        else:
            name, text = rows[-1]
            rows[-1] = (name, f"{text} {line.strip()}")
    cells = (
        f"| {', '.join(f'`{one}`' for one in name.split(', '))} | {_text(text, is_cell=True)} |" for name, text in rows
    )
    return "\n".join(("| argument | meaning |", "|---|---|", *cells))


def _text(text: str, is_cell: bool = False) -> str:
    """Returns prose with what Markdown would take for markup escaped, and links to the pages that it names."""
    parts = re.split(r"(`[^`]*`)", text)
    for index in range(0, len(parts), 2):
        escaped = re.sub(r"([*\\\[\]])", r"\\\1", parts[index]).replace("<", "&lt;")
        parts[index] = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](../docs/\1.md)", escaped)
    joined = "".join(parts)
    return joined.replace("|", "\\|") if is_cell else joined
