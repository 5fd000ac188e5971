"""Writes csrc/exec/arguments.inc: the arguments of the ops as C++ reads them, from problem.py. `--check` fails if the
file is another."""

from __future__ import annotations

import sys
from pathlib import Path

from flashtile.problem import DENSE_OPTIONS, NUM_TENSORS, SCHEMA_TYPES, AttentionArgs, schema

FILE = Path(__file__).resolve().parent.parent / "src/flashtile/csrc/exec/arguments.inc"
HEAD = """\
// Written by tools/make_arguments.py from problem.py: AttentionArgs and DENSE_OPTIONS. The includer defines what it
// needs of
//   FT_TENSOR(enumerator, "name")                 the tensors, which come first
//   FT_ARGUMENT(enumerator, type, "schema")       every argument, in the order of the schema
//   FT_DENSE(enumerator)                          the arguments of the `dense` overloads, in the order of their schemas
"""
TYPES = {
    "Tensor": "AtenTensorHandle",
    "SymInt": "i64",
    "float": "double",
    "bool": "bool",
    "str": "const char*",
    "ScalarType": "i32",
}
SECTION = """
#ifdef {macro}
{lines}
#undef {macro}
#endif
"""


def enumerator(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def cpp_type(name: str) -> str:
    found = SCHEMA_TYPES[name]
    plain = TYPES[found.removesuffix("?")]
    return f"std::optional<{plain}>" if found.endswith("?") else plain


def text() -> str:
    names = AttentionArgs._fields
    sections = {
        "FT_TENSOR": [f'FT_TENSOR({enumerator(name)}, "{name}")' for name in names[:NUM_TENSORS]],
        "FT_ARGUMENT": [f'FT_ARGUMENT({enumerator(name)}, {cpp_type(name)}, "{schema([name])}")' for name in names],
        "FT_DENSE": [f"FT_DENSE({enumerator(name)})" for name in (*names[:3], *DENSE_OPTIONS)],
    }
    return HEAD + "".join(SECTION.format(macro=macro, lines="\n".join(lines)) for macro, lines in sections.items())


def main() -> int:
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text())
        return 0
    if FILE.read_text() == text():
        return 0
    print(f"{FILE.name} is not what tools/make_arguments.py writes: run it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
