"""tools/inline_values.py: numbers in the text of the docs come from results/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import inline_values

CSV = "name,kind,ms\na,x,2\na,y,8\nb,x,1234.56\n"


def filled(what, tmp_path):
    (tmp_path / "box").mkdir(exist_ok=True)
    (tmp_path / "box" / "run.csv").write_text(CSV)
    return inline_values.fill(f"takes <!-- value:{what} -->old<!-- /value --> ms", tmp_path)


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("box/run?name=a&kind=y#ms", "8"),
        ("box/run?name=b#ms", "1235"),
        ("box/run?name=a&kind=y#ms over box/run?name=a&kind=x#ms", "4"),
        ("box/run?name=a&kind=x#ms times 1e-3", "0.002"),
        ("box/run?name=a&kind=y#ms over box/run?name=a&kind=x#ms times 100", "400"),
        ("box/run?#max:ms", "1235"),
        ("box/run?name=a#min:ms", "2"),
        ("box/run?kind=x#count:ms", "2"),
    ],
)
def test_values(tmp_path, what, shown):
    assert filled(what, tmp_path) == f"takes <!-- value:{what} -->{shown}<!-- /value --> ms"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("box/run?name=a#ms", "which 2 rows fit, 2 with a number; accepted: conditions that leave one"),
        ("box/run?name=c#ms", "which 0 rows fit"),
        ("box/run?name=a#seconds", "which 2 rows fit, 0 with a number"),
        ("box/none?#max:ms", "no none.csv"),
        ("box/run", "accepted: <folder>/<csv stem>"),
    ],
)
def test_references_that_do_not_hold(tmp_path, what, words):
    with pytest.raises(ValueError, match=words):
        filled(what, tmp_path)


def test_a_marker_without_its_partner(tmp_path):
    with pytest.raises(ValueError, match="a marker without its partner"):
        inline_values.fill("<!-- value:box/run?#max:ms -->1", tmp_path)
