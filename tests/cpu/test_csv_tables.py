"""tools/csv_tables.py: tables of the docs come from chosen rows and columns of the CSVs under results/."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench_fakes import ENV, provider, rows

from flashtile.lab.bench.rows import Row, Writer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import make_docs

CSV = """name,kind,ms,size,device,commit,is_dirty,date,command
a,x one,2.5,4096,box,c1,no,2026-01-02T03:04:05Z,run --a
a,y,1234.567,4096,box,c1,no,2026-01-02T03:04:05Z,run --a
b,x one,0.0123456,4096,box,c1,yes,2026-01-02T03:04:05Z,run --a
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "run.csv").write_text(CSV, encoding="utf-8")
    return tmp_path


def part(name: str, results: Path) -> list[str]:
    return make_docs.part(name, results / "page.md", results).splitlines()


def test_columns_of_chosen_rows(results: Path) -> None:
    assert part("box/run:columns?name=a&kind=x*#kind,ms,size", results)[:3] == [
        "| kind | ms | size |",
        "| --- | ---: | ---: |",
        "| x one | 2.5 | 4096 |",
    ]
    assert [line for line in part("box/run:columns#name,ms", results) if line[:3] in ("| a", "| b")] == [
        "| a | 2.5 |",
        "| a | 1235 |",
        "| b | 0.0123 |",
    ]


def test_combined_columns(results: Path) -> None:
    lines = part("box/run:columns#name,count:ms,min:ms,max:ms", results)
    assert lines[0] == "| name | rows | min ms | max ms |"
    assert lines[2:4] == ["| a | 2 | 2.5 | 1235 |", "| b | 1 | 0.0123 | 0.0123 |"]


def test_each_commit_is_named(results: Path) -> None:
    assert [line for line in part("box/run:columns#ms", results) if "commit" in line] == [
        "box; torch ; flashtile , commit c1, 2026-01-02; `run --a`",
        "box; torch ; flashtile , commit c1 with changes, 2026-01-02; `run --a`",
    ]


def test_several_files_are_one_table(results: Path) -> None:
    measured = rows([provider("ours"), provider("peer")], 32, 48)
    for size in (128, 64):
        env = replace(ENV, command=f"bench --head-dim {size}")
        with Writer(results / "box" / f"sdpa_d{size}_fp32.csv", Row) as writer:
            writer.add(replace(row, head_dim=size, env=env) for row in measured)
    lines = part("box/sdpa_d*_fp32:latency?seqlen_k=48", results)
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| d=")] == ["d=64 S=48", "d=128 S=48"]
    assert lines[-1].endswith("`bench --head-dim 64` and 1 more with other options, in the CSVs")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("box/run:columns?name=c#ms", "0 rows of run.csv with {'name': 'c'}"),
        ("box/run:columns#seconds", r"columns \['seconds'\]"),
        ("box/run:columns", r"columns \[\]"),
        ("box/none:columns#ms", "no none.csv"),
        ("box/none*:latency", r"none\*.csv"),
        ("box/run", "accepted: <folder>/<csv stem>:<table>"),
    ],
)
def test_choices_that_do_not_hold(results: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        part(name, results)
