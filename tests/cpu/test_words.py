"""tools/check_words.py: which docstrings it refuses, and that ours pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import check_words

FRAGMENTS = (
    "Of one key.",
    "What came of it.",
    "The same on a GPU.",
    "Those of a pass.",
    "Its time.",
    "As `keep_mask`.",
    "Faster than a pre-pass.",
    "Returns the bytes",
    "`name` is a GPU that need not be here",
)
SENTENCES = (
    "Returns the bytes.",
    "True if it is known.",
    "The rows of a pass.",
    "Offsets of pages.",
    "Whatever is given.",
    "Returns the pairs:\n\n    (0, 1), (2, 3)",
    "Says `it (or not)`.",
    "Says (or not.)",
    "aten::mm",
    "(rows, columns)",
)


def test_our_docstrings_are_sentences(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_words.py"])
    assert check_words.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("text", FRAGMENTS)
@pytest.mark.parametrize("place", ["module", "class", "function", "method"])
def test_fragments_are_found(text: str, place: str, tmp_path: Path) -> None:
    code = {
        "module": f'"""{text}"""\n',
        "class": f'class A:\n    """{text}"""\n',
        "function": f'def f():\n    """{text}"""\n',
        "method": f'class A:\n    async def f(self):\n        """{text}"""\n',
    }
    file = tmp_path / "one.py"
    file.write_text(code[place], encoding="utf-8")
    line = code[place].count("\n", 0, code[place].index('"""')) + 1
    assert check_words.fragments(file) == [(line, " ".join(text.split()[:6]))]


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_pass(text: str, tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(f'"""{text}"""\n\ndef f():\n    {text!r}\n    return "Of one key."\n', encoding="utf-8")
    assert check_words.fragments(file) == []


def test_a_finding_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.py").write_text('"""Of one key."""\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["check_words.py", str(tmp_path)])
    assert check_words.main() == 1
    assert "one.py:1: Of one key." in capsys.readouterr().out
