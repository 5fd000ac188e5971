"""`flashtile report`: the page of the repository's own results, of broken and of foreign files, and in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_fakes import ENV, provider, rows
from test_timeline import made
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.lab.bench import compare, join, tables
from flashtile.lab.bench.rows import Row, Writer
from flashtile.lab.ladder import tables as ladder_tables
from flashtile.lab.profile import timeline
from flashtile.lab.report import charts, collect, page
from flashtile.lab.report.command import MAX_BYTES

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Outline(HTMLParser):
    """The tags of a page that matter here; complains about tags that do not match."""

    EMPTY = ("meta", "br", "img", "input")

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.sources, self.open, self.data = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in self.EMPTY:
            self.open.append((tag, found.get("type")))
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found["src"]] if "src" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == ("script", "application/json"):
            self.data.append(json.loads(text))


@pytest.fixture(scope="module")
def text():
    return page.build(collect.collect(ROOT / "results"))


def test_the_page_needs_nothing_else(text):
    outline = Outline(text)
    assert outline.sources == []
    assert all(link.startswith("#") for link in outline.links)
    assert sorted(outline.ids) == sorted(set(outline.ids))
    assert {link[1:] for link in outline.links} <= set(outline.ids)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(text.encode()) < MAX_BYTES


def test_every_result_is_on_the_page(text):
    devices = collect.collect(ROOT / "results")
    assert devices[0].name == "nvidia-h200"
    for device in devices:
        assert device.title in text
        for one in device.all_files:
            assert one.stem in text
            assert one.env.commit in text
        # Only the files of tools are left out
        assert all("tools" in reason or "written by a tool" in reason for _, reason in device.skipped), device.skipped
    assert "NVIDIA H200, mma-sync" in {device.title for device in devices}
    assert "flashtile check --float32" in text
    kinds = {chart["kind"] for chart in Outline(text).data}
    assert kinds == {"lines", "roofline", "scatter"}
    for words in ("07 production tile", "Speed ratios", "Decoding", "Tiles against occupancy", "compute-sanitizer"):
        assert words in text
    assert "waits most for data from global memory (long scoreboard)" in text
    assert "waits most for <" not in text  # of a rung without counters
    assert "waits most for None" not in text


def test_the_summary_has_the_best_and_the_worst_point(text):
    """Against the fastest of the peers, from the times of the file."""
    device = collect.collect(ROOT / "results")[0]
    assert text.index("<h2>Summary</h2>") < text.index("<h2>Time, throughput and memory</h2>")
    (file,) = [one for one in device.of("sdpa_") if one.stem == "sdpa_paper_bf16_fwd"]
    found = {}
    for point, here in join.groups([row for row in file.rows if row.is_ok], lambda row: row.point).items():
        times = {row.provider: row.median_ms for row in here}
        found[point] = min(ms for name, ms in times.items() if name.startswith("sdpa")) / times["cuda"]
    worst, best = min(found, key=found.get), max(found, key=found.get)
    shown = page._summary(device)
    (line,) = re.findall(r"<tr><th[^>]*>forward \(sdpa_paper_bf16_fwd\)</th>.*?</tr>", shown)
    cells = re.findall(r"<td[^>]*>(.*?)</td>", line)
    assert cells[0] == str(len(found)) == "36"
    assert re.sub("<.*?>", "", cells[2]).startswith(f"▼ {found[worst]:.2f} d={worst.head_dim} ")
    assert cells[3].startswith(f"{found[best]:.2f} d={best.head_dim} ")
    assert cells[4] == str(sum(ratio < 1 for ratio in found.values()))
    # Files of one point share a line
    assert len(re.findall("forward .sdpa_Lsweep_B4_H16", shown)) == 1
    assert ">forward (sdpa_Lsweep_B4_H16_d128_fp32 and 3 others)<" in shown


def test_ratios_below_one_are_marked_and_remarks_are_shown(text):
    device = collect.collect(ROOT / "results")[0]
    shown = page._options(device)
    cells = re.findall(r'<td class="number">(?:<span class="bad">▼ )?(\d\.\d\d)(?:</span>)?</td></tr>', shown)
    marked = re.findall(r'<span class="bad">▼ (\d\.\d\d)</span></td></tr>', shown)
    assert marked == [cell for cell in cells if float(cell) < 1]
    assert len(cells) == 43
    assert marked
    remark = json.loads((ROOT / "results/nvidia-h200/notes.json").read_text())["sdpa_options_bf16"]
    assert remark in shown
    assert remark in page._summary(device)
    assert device.skipped
    assert all(name != collect.NOTES for name, _ in device.skipped)


def test_ratios_have_two_decimals_and_the_usual_head_dim_is_shown_first(text):
    assert {len(found) for found in re.findall(r'class="heat"><span[^>]*>\d+\.(\d*)<', text)} == {2}
    first = next(one for one in Outline(text).data if one["kind"] == "lines")
    assert "d=128" in first["choices"][first["start"]]["label"]


def test_what_is_measured_most_comes_first(text):
    first = next(one for one in Outline(text).data if one["kind"] == "lines")
    assert first["choices"][0]["label"].startswith("forward, full, 16384 tokens")
    assert text.index("fwd_sm90_kernel, fwd") < text.index("bwd_sm90_kernel, bwd") < text.index("fwd_sm80_kernel, fwd")


def test_charts_hold_the_values_of_the_files(text):
    stem = "sdpa_paper_bf16_fwd"
    (file,) = [one for one in collect.collect(ROOT / "results")[0].of("sdpa_") if one.stem == stem]
    chart = next(one for one in Outline(text).data if any(stem in choice["label"] for choice in one.get("choices", ())))
    choice = next(
        one for one in chart["choices"] if one["label"].startswith("forward, causal") and "d=128" in one["label"]
    )
    series = next(one for one in choice["series"] if one["label"] == "flashtile")
    expected = {
        row.seqlen_k: row for row in file.rows if row.provider == "cuda" and row.head_dim == 128 and row.is_causal
    }
    assert series["x"] == sorted(expected)
    for length, tflops, ms in zip(series["x"], series["throughput"], series["latency"], strict=True):
        assert tflops == pytest.approx(expected[length].tflops, rel=1e-3)
        assert ms == pytest.approx(expected[length].median_ms, rel=1e-3)


def test_the_script_reads_the_keys_that_charts_have(text):
    """Keys of a chart and of what it consists of, as charts.py lists them; page.py shows the title."""
    script = (Path(page.__file__).parent / "page.js").read_text(encoding="utf-8")
    drawn = Outline(text).data
    assert set(re.findall(r"\bchart\.(\w+)", script)) == {key for chart in drawn for key in chart} - {"title"}
    (lines,) = re.findall(r"^function lineChart.*?^}", script, re.DOTALL | re.MULTILINE)
    for kind in ("lines", "roofline", "scatter"):
        charts_of_kind = [chart for chart in drawn if chart["kind"] == kind]
        assert charts_of_kind
        assert all(chart.get("choices", True) and chart.get("levels", True) for chart in charts_of_kind)
    of_lines = [chart for chart in drawn if chart["kind"] == "lines"]
    metrics = {metric["key"] for chart in of_lines for metric in chart["metrics"]}
    series = {key for chart in of_lines for choice in chart["choices"] for one in choice["series"] for key in one}
    assert set(re.findall(r"\bone\.(\w+)", lines)) == series - metrics
    assert set(re.findall(r"\bmetric\.(\w+)", lines)) == {
        key for chart in of_lines for metric in chart["metrics"] for key in metric
    }
    (shared,) = re.findall(r"^function pointChart.*?^}", script, re.DOTALL | re.MULTILINE)
    points = [
        one
        for chart in drawn
        if chart["kind"] != "lines"
        for part in chart.get("choices", [chart])
        for one in part["points"]
    ]
    assert set(re.findall(r"\bpoint\.(\w+)", shared)) == {key for one in points for key in one}


def test_tiles_without_a_time_are_left_out_of_the_chart():
    """A head dim of which no tile was timed without a mask has no choice; no chart without any."""
    (file, *_) = collect.collect(ROOT / "results")[0].of("tiles_")
    timed, head_dims = charts.tiles_chart(file.rows), sorted({row.head_dim for row in file.rows})
    assert len(timed["choices"]) == len(head_dims)
    refused = [replace(row, tflops=None) if row.head_dim == head_dims[0] else row for row in file.rows]
    assert charts.tiles_chart(refused)["choices"] == timed["choices"][1:]
    assert charts.tiles_chart([replace(row, tflops=None) for row in file.rows]) is None


def test_each_table_of_the_ladder_is_of_one_problem(text):
    """Rungs at head dim 128 stand beside the peers at head dim 128, and each panel shows the rung that was counted."""
    device = collect.collect(ROOT / "results")[0]
    kernels = [row for one in device.of("ladder_kernels_") for row in one.rows if not row.is_causal]
    math_ms = {
        (row.dtype, row.head_dim): row.median_ms
        for one in device.of("ladder_")
        for row in one.rows
        if row.provider == "sdpa-math" and not row.is_causal and row.batch * row.heads > 1
    }
    shown = page._ladder(device)
    parts = [part for part in re.findall(r"<table.*?</table>", shown, re.DOTALL) if "x sdpa-math" in part]
    assert len(parts) == len(math_ms) == 3
    for part in parts:
        (head_dim,), (dtype,) = re.findall(r" d=(\d+) ", part), re.findall(r"(fp32|bf16), full", part)
        own = [kernel for kernel in kernels if (kernel.dtype, kernel.head_dim) == (dtype, int(head_dim))]
        found = re.findall(r"<tr>.*?</tr>", part, re.DOTALL)
        header, *lines = (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", one) for one in found)
        column, rungs = header.index("x sdpa-math"), [line for line in lines if line[0][:2].isdigit()]
        assert [line[0] for line in rungs] == [kernel.rung for kernel in own]
        for line, kernel in zip(rungs, own, strict=True):
            assert line[1] == tables.number(kernel.median_ms)
            assert line[column] == tables.number(math_ms[dtype, int(head_dim)] / kernel.median_ms)
    counted = {kernel.rung for kernel in kernels if kernel.top_stall}
    assert len(re.findall(r"d=64: [\d.]+ ms; waits most for", shown)) == len(counted) == 20


def test_a_join_that_does_not_tell_rows_apart_is_an_error(tmp_path):
    found = rows([provider("one"), provider("sdpa")], 32, 64)
    doubled = [*found, *(replace(row, dtype="bf16", median_ms=1.0) for row in found)]
    assert join.groups([1, 2, 3], lambda number: number % 2) == {1: [1, 3], 0: [2]}
    words = "rows: got two of .*; accepted: rows that the columns of a table or figure tell apart. They differ in dtype"
    for use in (
        lambda: tables.of(doubled, "latency"),
        lambda: charts.by_length(row for row in doubled if row.provider == "one"),
        lambda: charts.heat_maps([*found, *found]),
        lambda: compare.changes(found, [*found, *found]),
    ):
        with pytest.raises(ValueError, match="rows: got two of"):
            use()
    with pytest.raises(ValueError, match=words):
        tables.of(doubled, "latency")
    kernels = [row for one in collect.collect(ROOT / "results")[0].of("ladder_kernels_") for row in one.rows]
    with pytest.raises(ValueError, match=r"got rows of the problems .*'bf16', 4, 16, 4096, 128"):
        ladder_tables.of([], [row for row in kernels if row.rung in ("08_tensor_cores", "07_production_tile")
                              and (row.head_dim == 128) == (row.rung == "08_tensor_cores")], "ladder")  # fmt: skip


def write(folder, found, name="sdpa_Lsweep_x.csv"):
    folder.mkdir(parents=True, exist_ok=True)
    with Writer(folder / name, Row) as writer:
        writer.add(found)


def test_names_and_commands_are_text_and_not_html(tmp_path):
    bad = "</script><script>alert(1)</script><b>"
    found = rows([provider("one")], 32, 64)
    write(tmp_path / "cpu-x", [replace(row, provider=bad, env=replace(ENV, device=bad, command=bad)) for row in found])
    text = page.build(collect.collect(tmp_path))
    Outline(text)
    assert "<script>alert" not in text
    assert "</script><script>" not in text


def test_broken_files_are_listed_with_their_reason(tmp_path):
    write(tmp_path / "cpu-x", rows([provider("one")], 32, 64))
    (tmp_path / "cpu-x" / "sdpa_other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "cpu-x" / "mystery.csv").write_text("a\n")
    (tmp_path / "cpu-x" / "check.json").write_text("{")
    (tmp_path / "cpu-x" / "riddle.json").write_text("{}")
    (tmp_path / "cpu-x" / "notes.json").write_text("[]")
    text = page.build(collect.collect(tmp_path))
    expected = (
        "sdpa_other.csv with other columns",
        "mystery.csv",
        "check.json",
        "riddle.json",
        "notes.json",
        "why it is not shown",
    )
    for words in expected:
        assert words in text


def test_a_folder_inside_a_device_is_a_variant_of_it(tmp_path):
    write(tmp_path / "cpu-x", rows([provider("one")], 32, 64))
    write(tmp_path / "cpu-x" / "other-kernels", rows([provider("two")], 32, 64))
    plain, variant = collect.collect(tmp_path)
    assert variant.title == f"{plain.title}, other-kernels"
    assert [row.provider for row in variant.of("sdpa_")[0].rows] == ["two", "two"]


def test_a_timeline_is_drawn(tmp_path):
    write(tmp_path / "cpu-x", rows([provider("one")], 32, 64))
    timeline.write(made(), tmp_path / "cpu-x" / "timeline_x.json")
    (tmp_path / "cpu-x" / "timeline_broken.json").write_text("{}")
    text = page.build(collect.collect(tmp_path))
    Outline(text)
    assert "Timelines of a block" in text
    assert text.count("<rect x=") == len(timeline.drawn(made().spans))
    assert "waits: until it is this warpgroup" in text
    assert ">warpgroup 0<" in text
    assert ">producer<" in text
    assert "timeline_broken.json" in text


def test_ratios_are_coloured_by_size():
    slower, equal, faster = (charts._heat_cell(ratio) for ratio in (0.5, 1.0, 2.0))
    assert "rgb(84,39,136)" in slower
    assert "rgb(247,247,247)" in equal
    assert "rgb(179,88,6)" in faster
    assert "color:#ffffff" in slower
    assert "color:#000000" in equal


def test_the_command(tmp_path):
    write(tmp_path / "results" / "cpu-x", rows([provider("one")], 32, 64))
    out = tmp_path / "new" / "page.html"
    result = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "results"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "needs no network" in result.output
    Outline(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--results", "no/such"], "--results: got no/such, which is no folder"),
        (["--results", "{tmp}"], "without results; accepted: results/<device>/*.csv. Run `flashtile bench`"),
        (["--results", "{root}", "--out", "{tmp}"], "--out: got {tmp}; accepted: the name of a file"),
    ],
)
def test_wrong_folders_are_explained(tmp_path, arguments, words):
    filled = [word.format(tmp=tmp_path, root=ROOT / "results") for word in arguments]
    result = CliRunner().invoke(app, ["report", *filled])
    assert result.exit_code == 2
    assert words.format(tmp=tmp_path) in result.output


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js")
def test_the_script_parses():
    done = subprocess.run(["node", "--check", str(Path(page.__file__).with_name("page.js"))], capture_output=True)
    assert done.returncode == 0, done.stderr


# In a browser


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, where Playwright and a Chromium are installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, text, tmp_path):
    """Opens the page in a context with these options. No errors, no requests."""
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    said, contexts = [], []

    def start(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        shown.goto((tmp_path / "page.html").as_uri())
        return shown

    yield start
    for context in contexts:
        context.close()
    assert said == []


def test_providers_can_be_switched_off_and_on(opened):
    chart = opened().locator("figure.chart").first
    lines = chart.locator("svg.plot > path[stroke-width]")
    button = chart.locator(".legend button", has_text="sdpa-flash")
    before = lines.count()
    button.click()
    assert lines.count() == before - 1
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert lines.count() == before


def test_the_mouse_and_the_keyboard_show_values(opened):
    shown = opened()
    chart = shown.locator("figure.chart").first
    plot, tip = chart.locator("svg.plot"), chart.locator(".tip")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert tip.is_visible()
    assert "flashtile" in tip.inner_text()
    shown.mouse.move(0, 0)
    assert not tip.is_visible()
    plot.focus()
    plot.press("ArrowRight")
    first = tip.inner_text()
    assert "sequence length 512" in first
    plot.press("ArrowRight")
    assert tip.inner_text() != first
    plot.press("Escape")
    assert not tip.is_visible()


def test_metrics_problems_devices_and_steps_can_be_chosen(opened):
    shown = opened()
    chart = shown.locator("figure.chart").first
    chart.get_by_role("button", name="ms per call").click()
    assert "ms per call" in chart.locator("svg.plot").get_attribute("aria-label")
    chart.locator("select").select_option(index=1)
    assert "causal" in chart.locator("svg.plot").get_attribute("aria-label")
    ladder = shown.locator("section[id^=ladder] .panels")
    assert ladder.locator("[data-panel]:visible").get_attribute("data-panel").startswith("00")
    ladder.get_by_role("button", name="next").click()
    assert ladder.locator("[data-panel]:visible").get_attribute("data-panel").startswith("01")
    assert ladder.locator("[data-panel]:visible mark").count() > 10
    shown.locator("button[data-device='1']").click()
    assert shown.locator("article:visible").get_attribute("data-device") == "1"


def test_light_and_dark(opened):
    shown = opened(color_scheme="dark")
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    dark = shown.evaluate(colour)
    shown.locator("#theme").click()
    assert shown.evaluate(colour) != dark
    assert opened(color_scheme="light").evaluate(colour) == shown.evaluate(colour)


def test_nothing_is_wider_than_a_phone(opened):
    shown = opened(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    assert shown.evaluate("document.documentElement.scrollWidth") == 390
    for index in range(shown.locator("button[data-device]").count()):
        shown.locator("button[data-device]").nth(index).tap()
        assert shown.evaluate("document.documentElement.scrollWidth") == 390


def test_points_are_named_on_a_phone(opened):
    shown = opened(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    charts = shown.locator("#profile-0 figure.chart")
    for index in range(charts.count()):
        names = charts.nth(index).locator(".points li").all_inner_texts()
        assert len(names) == 9
        assert any("flashtile d=128" in name for name in names)
        drawn = charts.nth(index).locator("svg.plot > text").all_text_contents()
        assert {str(number) for number in range(1, 10)} < set(drawn)
    devices = shown.locator(".devices")
    assert devices.evaluate("one => one.clientHeight") < 60  # one row, which scrolls
    wide = opened(viewport={"width": 1280, "height": 900}).locator("#profile-0 figure.chart").first
    assert wide.locator(".points li").count() == 0


def test_all_sections_can_be_seen_on_a_wide_screen(opened):
    nav = opened(viewport={"width": 1280, "height": 900}).locator("article:visible nav")
    assert nav.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert all(link.bounding_box()["x"] + link.bounding_box()["width"] <= 1280 for link in nav.locator("a").all())


def test_the_page_of_info_fits_a_phone(browser, tmp_path):
    out = tmp_path / "info.html"
    assert CliRunner().invoke(app, ["info", "--html", str(out)]).exit_code == 0
    shown = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True).new_page()
    shown.goto(out.as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth") == 390
    shown.context.close()


def test_labels_of_a_roofline_overlap_neither_points_nor_each_other(opened):
    shown = opened(viewport={"width": 1280, "height": 900})
    charts = shown.locator("#profile-0 figure.chart")
    assert charts.count() == 2  # 18 calls: a chart for each pass
    for index in range(charts.count()):
        marks = charts.nth(index).locator("svg.plot > :is(circle, rect)")
        points = [box for mark in marks.all() if (box := mark.bounding_box()) is not None]
        assert len(points) == 9
        texts = [text.bounding_box() for text in charts.nth(index).locator("svg.plot > text", has_text=" d=").all()]
        assert len(texts) == 9
        for number, text in enumerate(texts):
            for other in (*points, *texts[:number]):
                assert not overlap(text, other, slack=3)


def overlap(one, other, slack):
    """More than the slack, since the box of a text is higher than its letters."""
    return all(
        one[at] + slack < other[at] + other[size] and other[at] + slack < one[at] + one[size]
        for at, size in (("x", "width"), ("y", "height"))
    )
