"""Writes flashtile as a kernel repository for Hugging Face's `kernels`.

python tools/make_hub_kernel.py [--repo-id ORG/flashtile] [--version 1] [--out build/hub]

`kernels` loads such a repository from outside of Python's path, and several versions of it in one process. So in the
copy every import is relative, and the operators are in a namespace of their own, which `_ops.py` names. The folder
holds

    build.toml, flake.nix, CARD.md, LICENSE, torch-ext/flashtile/     what kernel-builder builds from
    build/torch-cuda/, build/torch-cpu/                               what it would build: what is uploaded and loaded

The C++ extension is not in it: kernels are launched from Python.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "flashtile"
NAME = "flashtile"
BACKENDS = ("cuda", "cpu")
SUFFIXES = (".py", ".cuh", ".csv")
# Below the package: the laboratory, the command line, and what imports flashtile by its name or for other packages
LEFT_OUT = (
    "__init__.py",
    "__main__.py",
    "cli",
    "embedded",
    "former",
    "lab",
    "integrations/launch",
    "integrations/thunder.py",
    "integrations/vllm.py",
)
NAMESPACE = "_OPS_NAME"
# What names the operators' namespace, in these files alone: elsewhere "flashtile::" is C++
FILES_WITH_OPERATORS = (
    "distributed/transport.py",
    "flops.py",
    "integrations/torch_flash.py",
    "ops.py",
    "transforms.py",
)
OPERATORS = (
    (re.compile(r"\btorch\.ops\.flashtile\b"), f"getattr(torch.ops, {NAMESPACE})"),
    (re.compile(r'\bLibrary\("flashtile"'), f"Library({NAMESPACE}"),
    (re.compile(r'\bf"flashtile::'), f'f"{{{NAMESPACE}}}::'),
    (re.compile(r'(?<!f)"flashtile::'), f'f"{{{NAMESPACE}}}::'),
)

INIT = '''"""flashtile {version}: attention for PyTorch, as a kernel of Hugging Face's hub."""

import importlib
from typing import Any

from . import flops as _flops  # registers the formulas
from .api import attention, attention_kvcache, attention_varlen, explain, prewarm
from .backends.environment import check as _check_environment
from .errors import SlowPathWarning, Unsupported
from .facades import scaled_dot_product_attention
from .integrations.flash_attn import fa3 as flash_attn_interface
from .version import __version__

_check_environment()

# transformers hands the masks of "sdpa" to a kernel with this name and flash_attn_forward
supports_flash_attn = True

__all__ = [
    "SlowPathWarning",
    "Unsupported",
    "__version__",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "explain",
    "flash_attn_forward",
    "flash_attn_interface",
    "prewarm",
    "scaled_dot_product_attention",
    "supports_flash_attn",
]


def __getattr__(name: str) -> Any:
    """`flash_attn_forward`, the attention function of transformers, which is imported when it is asked for."""
    if name == "flash_attn_forward":
        return importlib.import_module(f"{{__name__}}.integrations.transformers").attention_forward
    raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
'''
OPS = '''"""The namespace of the operators of this build."""

import torch

_OPS_NAME = "{identifier}"
ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{{_OPS_NAME}}::{{op_name}}"
'''
# Older versions of `kernels` import a folder with the name of the kernel
COMPATIBILITY = '''"""The kernel, for versions of `kernels` that look for it here."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

if "{identifier}" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("{identifier}", Path(__file__).parent.parent / "__init__.py")
    _module = sys.modules["{identifier}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)


def __getattr__(name: str) -> Any:
    return getattr(sys.modules["{identifier}"], name)
'''
BUILD = """[general]
name = "{name}"
version = {version}
license = "MIT"
backends = [{backends}]
edition = 5

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
pyext = [{extensions}]
"""
FLAKE = """{
  description = "flashtile";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
CARD = """---
library_name: kernels
license: mit
---

# flashtile

IO-aware attention for PyTorch: exact on every mask, bias, dtype and length. NVRTC compiles each kernel for the GPU that
is there, on first use.

```python
from kernels import get_kernel

flashtile = get_kernel("{repo_id}", version={version})
out = flashtile.attention(q, k, v, causal=True)  # (batch, heads, rows, dim)
```

With transformers: `attn_implementation="{repo_id}"`. `flash_attn_interface` has the functions of FlashAttention-3.

This build launches its kernels from Python. The package, `pip install flashtile`, has a C++ extension that makes calls
cheaper on the host, and without it calls on the CPU take slow backends.
"""


def sources() -> dict[str, bytes]:
    """The files of the package as the kernel has them, by their paths in it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        if path.suffix not in SUFFIXES or "__pycache__" in path.parts:
            continue
        if any(name == left or name.startswith(f"{left}/") for left in LEFT_OUT):
            continue
        text = path.read_text()
        found[name] = (rewritten(text, name) if path.suffix == ".py" else text).encode()
    (version,) = re.findall(r'__version__ = "(.*)"', (PACKAGE / "version.py").read_text())
    return found | {"__init__.py": INIT.format(version=version).encode()}


def rewritten(text: str, name: str) -> str:
    """A module with relative imports and its operators in the kernel's namespace. `name` is its path."""
    dots = "." * (name.count("/") + 1)
    lines = text.splitlines(keepends=True)
    first = None  # import of ours at the top level
    tree = ast.parse(text, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == NAME for alias in node.names):
            raise SystemExit(
                f"{name}:{node.lineno}: write `from {NAME} import ...`; `import {NAME}` cannot be relative"
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == NAME and not node.level:
            if node in tree.body:
                first = min(first or node.lineno, node.lineno)
            inner = (node.module or "").removeprefix(NAME).removeprefix(".")
            old, new = f"from {node.module} import", f"from {dots}{inner} import"
            if old not in lines[node.lineno - 1]:
                raise SystemExit(f"{name}:{node.lineno}: expected `{old}`")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new, 1)
    if name in FILES_WITH_OPERATORS:
        assert first is not None
        code = "".join(lines[first - 1 :])
        for pattern, replacement in OPERATORS:
            code = pattern.sub(replacement, code)
        return "".join([*lines[: first - 1], f"from {dots}_ops import {NAMESPACE}\n", code])
    if re.search(r'torch\.ops\.flashtile\b|\bLibrary\("flashtile"', text):
        raise SystemExit(f"{name} has operators; add it to FILES_WITH_OPERATORS in tools/make_hub_kernel.py")
    return "".join(lines)


def digest(files: dict[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(files.items()):
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def metadata(identifier: str, version: int, backend: str, files: dict[str, bytes]) -> bytes:
    hashes = {name: base64.b64encode(hashlib.sha256(files[name]).digest()).decode() for name in sorted(files)}
    content = {
        "name": NAME,
        "id": identifier,
        "version": version,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def make(folder: Path, repo_id: str, version: int) -> list[str]:
    """Writes the repository; returns the names of its builds."""
    shutil.rmtree(folder, ignore_errors=True)
    shared = sources()
    own = digest(shared | {"version": str(version).encode()})[:7]
    backends, extensions = (", ".join(f'"{x}"' for x in names) for names in (BACKENDS, (s[1:] for s in SUFFIXES)))
    build = BUILD.format(name=NAME, version=version, backends=backends, repo_id=repo_id, extensions=extensions)
    card = CARD.format(repo_id=repo_id, version=version)
    write(folder, {f"torch-ext/{NAME}/{name}": content for name, content in shared.items()})
    write(folder, {"build.toml": build.encode(), "flake.nix": FLAKE.encode(), "CARD.md": card.encode()})
    shutil.copy(ROOT / "LICENSE", folder)
    identifiers = []
    for backend in BACKENDS:
        identifier = f"_{NAME}_{backend}_{own}"
        generated = {"_ops.py": OPS, f"{NAME}/__init__.py": COMPATIBILITY}
        files = shared | {name: text.format(identifier=identifier).encode() for name, text in generated.items()}
        files["metadata.json"] = metadata(identifier, version, backend, files)
        write(folder / "build" / f"torch-{backend}", files)
        identifiers.append(identifier)
    return identifiers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo-id", default=f"{NAME}/{NAME}", help="the repository on the hub")
    parser.add_argument("--version", type=int, default=1, help="of the kernel, which names a branch of the repository")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", help="replaced if it exists")
    given = parser.parse_args()
    for identifier in make(given.out, given.repo_id, given.version):
        print(identifier)
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
