"""`explain` in a notebook and `flashtile info --html`: the same facts as the text, escaped, in one look."""

from __future__ import annotations

import html
import json
import re

import torch
from test_report import Outline
from typer.testing import CliRunner

import flashtile
from flashtile import markup
from flashtile.cli.main import app


def words_of(page):
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))


def test_explain_as_html_says_what_its_text_says():
    q = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    answer = flashtile.explain(q, q, q, causal=True, softcap=2.0, arch="sm_90")
    page = answer._repr_html_()
    Outline(page)
    words = " ".join(words_of(page).split())
    for line in str(answer).splitlines():
        label, text = line[:10].strip(), line[10:]
        if line.startswith(" "):
            label, _, text = line.strip().partition(": ")
        elif label == "not":
            label, _, text = text.partition(": ")
            label = f"not {label}"
        assert f"{label} {text}" in words


def test_details_are_text_and_not_html():
    q = torch.zeros(1, 1, 4, 8)
    answer = flashtile.explain(q, q, q)
    answer.details["<script>"] = "a < b & c"
    page = answer._repr_html_()
    assert "<script>" not in page
    assert "a &lt; b &amp; c" in page


def test_info_as_a_page(tmp_path):
    out = tmp_path / "info.html"
    result = CliRunner().invoke(app, ["info", "--html", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    Outline(text)
    facts = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    words = words_of(text)
    assert facts["torch"] in words
    for name, summary in facts["summaries"].items():
        assert name in words
        assert summary in words


def test_info_into_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["info", "--html", str(tmp_path / "file" / "info.html")])
    assert result.exit_code == 2
    assert "--html: got" in result.output


def test_light_and_dark_have_the_same_variables():
    names = [re.findall(r"--ft-\w+", text) for text in (markup.VARIABLES, markup.DARK_VARIABLES)]
    assert names[0] == names[1]
    used = set(re.findall(r"var\((--ft-\w+)\)", markup.style("x")))
    assert used <= set(names[0])
