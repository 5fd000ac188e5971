"""Writes csrc/exec/arguments.inc: the arguments of the ops as C++ reads them, from problem.py. `--check` fails if the
file is another."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import generated

from flashtile.problem import (
    CACHE_ARGUMENTS,
    DENSE_FIELDS,
    DENSE_SHIFTS,
    LIMITS,
    NUM_TENSORS,
    SCHEMA_TYPES,
    AttentionArgs,
    dense_schema,
    limits,
    schema,
)

FILE = generated.SOURCES / "csrc/exec/arguments.inc"
HEAD = """\
// Written by tools/make_arguments.py from problem.py: AttentionArgs, DENSE_FIELDS, CACHE_ARGUMENTS and LIMITS. The
// includer defines what it needs of
//   FT_TENSOR(enumerator, "name")                 the tensors, which come first
//   FT_ARGUMENT(enumerator, type, "schema")       every argument, in the order of the schema
//   FT_DENSE(enumerator, "words", shift, mask, texts...)
//                                                 the bit fields of `mode`, an argument of the `dense` overloads; the
//                                                 texts that its values stand for: null for None and for flags, ""
//                                                 where there is no such value
//   FT_CACHE(enumerator, "words")                 the arguments of forward.cache, in the order of its schema
//   FT_LIMIT(name, "words", value)                the largest sizes
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


def dense_fields() -> Iterator[str]:
    for (name, values), words in zip(DENSE_FIELDS.items(), dense_schema(), strict=True):
        mask = (1 << (len(values) - 1).bit_length()) - 1
        texts = ["nullptr" if value in (None, False, True) else f'"{value}"' for value in values]
        texts += ['""'] * (mask + 1 - len(values))
        fields = [enumerator(name), f'"{words}"', str(DENSE_SHIFTS[name]), str(mask), *texts]
        yield f"FT_DENSE({', '.join(fields)})"


def text() -> str:
    names = AttentionArgs._fields
    sections = {
        "FT_TENSOR": [f'FT_TENSOR({enumerator(name)}, "{name}")' for name in names[:NUM_TENSORS]],
        "FT_ARGUMENT": [f'FT_ARGUMENT({enumerator(name)}, {cpp_type(name)}, "{schema([name])}")' for name in names],
        "FT_DENSE": list(dense_fields()),
        "FT_CACHE": [f'FT_CACHE({enumerator(name)}, "cache: {name}")' for name in CACHE_ARGUMENTS],
        "FT_LIMIT": [
            f'FT_LIMIT({enumerator(name)}, "{words}", {value})'
            for (name, value), words in zip(LIMITS.items(), limits(), strict=True)
        ],
    }
    return HEAD + "".join(SECTION.format(macro=macro, lines="\n".join(lines)) for macro, lines in sections.items())


if __name__ == "__main__":
    sys.exit(generated.main(FILE, text()))
