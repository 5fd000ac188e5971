"""The grids of options: their calls, the providers that take them, the accuracy check and the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bench_fakes import ENV, SETTINGS, provider
from typer.testing import CliRunner

from flashtile.cli.main import app
from flashtile.errors import Unsupported
from flashtile.lab.bench import compare, plots, points, providers, tables
from flashtile.lab.bench.options import MASKS_AND_BIASES
from flashtile.lab.bench.options import OPTIONS as ALL_OPTIONS
from flashtile.lab.bench.points import Plan, Point, cpu_grid, float32_grid, options_grid, paper_grid
from flashtile.lab.bench.providers import by_name, choose
from flashtile.lab.bench.rows import Row, Writer, read
from flashtile.lab.bench.sweep import Sweep

# Those of serving have tests of their own
OPTIONS = {name: option for name, option in ALL_OPTIONS.items() if option.entry not in ("serving", "packed")}
SMALL = Point(2, 4, 4, 40, 40, 16, 16)
LONG = Point(1, 1, 1, 1100, 1100, 8, 8, is_causal=True, option="window 1024 causal")
STEP = Point(1, 4, 4, 1, 33, 16, 16)
STEPS = ("kvcache step", "kvcache step Sk128", "kvcache step B4")
CALLS = {name: dataclasses.replace(SMALL, option=name, is_causal="causal" in name) for name in OPTIONS}
CALLS["window 1024 causal"] = LONG
CALLS.update({name: dataclasses.replace(STEP, option=name) for name in ("SDPA facade", *STEPS)})
SCORES = [name for name, option in OPTIONS.items() if option.changes_scores]


def measure(point: Point, *names: str) -> dict[str, Row]:
    found = next(Sweep(Plan("options", "x", (point,)), [by_name(name) for name in names], SETTINGS, ENV).rows())
    return {row.provider: row for row in found}


@pytest.fixture
def no_compilation(monkeypatch: pytest.MonkeyPatch):
    """FlexAttention runs uncompiled: a compilation takes half a minute."""
    monkeypatch.setattr(providers, "_compile", lambda function, point, is_dynamic: (function, f"dynamic {is_dynamic}"))


def test_the_options_grid_has_the_calls_in_both_passes():
    plan = options_grid("bf16")
    assert (plan.sweep, plan.stem) == ("options", "sdpa_options_bf16")
    backward = [point for point in plan.points if point.direction == "bwd"]
    assert len(plan.points) == 2 * len(backward) - 1  # the gradient of a bias has no forward pass of its own
    assert len({point.option for point in backward}) == len(backward) == 31
    named = {point.option: point for point in backward}
    assert named["GQA 32/8 causal"] == Point(
        4, 32, 8, 4096, 4096, 128, 128, "bf16", True, "bwd", option="GQA 32/8 causal"
    )
    assert named["fp32 d256"].dtype == "fp32"
    others = {point.option for grid in (cpu_grid(), float32_grid()) for point in grid.points}
    assert set(OPTIONS) - others - set(MASKS_AND_BIASES) <= set(named)
    assert options_grid("fp16", only="fwd+bwd").stem == "sdpa_options_fp16_fwdbwd"


def test_calls_are_selected_by_parts_of_their_names():
    plan = options_grid("bf16", only="fwd", names="plain, Swin,lengths")
    assert [point.option for point in plan.points] == [
        "plain",
        "padding to lengths S/2 to S",
        "Swin B4096 S49",
        "Swin B4096 S49 bias",
        "Swin B4096 S64",
        "Swin B4096 S64 bias",
    ]
    for names in ("plain,nothing like it", ","):
        with pytest.raises(ValueError, match="--calls"):
            options_grid("bf16", names=names)


def test_padding_to_lengths_leaves_half_of_the_first_sequence_and_all_of_the_last():
    point = Point(4, 1, 1, 8, 96, 8, 8, option="padding to lengths S/2 to S")
    mask = point.make_extras("cpu").mask
    assert mask is not None
    assert mask.shape == (4, 1, 1, 96)
    assert mask.sum(-1).flatten().tolist() == [48, 64, 80, 96]
    assert all(row == sorted(row, reverse=True) for row in mask.flatten(0, 2).tolist())


def test_the_calls_are_smaller_on_a_cpu():
    for small, large in zip(options_grid("fp32", is_small=True).points, options_grid("fp32").points, strict=True):
        assert small.option == large.option
        assert small.heads // small.heads_kv == large.heads // large.heads_kv
        assert small.flops() < large.flops() / 20
        assert small.batch * small.heads * small.seqlen_q * small.seqlen_k <= 2**24


def test_flops_of_a_window_count_the_scores_in_it():
    is_seen = torch.ones(1100, 1100).tril().triu(-1024)
    assert LONG.flops() == 4 * 8 * is_seen.sum().item()
    assert dataclasses.replace(LONG, seqlen_q=64, seqlen_k=64).flops() == 4 * 8 * 64 * 64 / 2


def test_bytes_count_the_tensors_of_the_option():
    plain, bias = sum(SMALL.sizes()), 4 * 40 * 40 * 4
    assert CALLS["bias (1,H,S,S)"].least_bytes() == plain + bias
    assert CALLS["padding mask (B,1,1,S)"].least_bytes() == plain + 2 * 40
    assert dataclasses.replace(CALLS["bias with gradient"], direction="bwd").least_bytes() == 2 * plain + 2 * bias


@pytest.mark.parametrize("name", OPTIONS)
def test_ours_takes_every_option_and_is_checked(name: str):
    row = measure(CALLS[name], "flashtile")["flashtile"]
    assert (row.status, row.option) == ("ok", name), row.reason
    assert row.detail.startswith("backend ")
    if OPTIONS[name].dropout_p:
        assert (row.is_accurate, row.max_error) == (None, None)
        assert row.checked == "nothing: every provider drops other weights"
    else:
        assert row.is_accurate is True


@pytest.mark.parametrize("name", ["bias with gradient", "padding mask (B,1,1,S)", "softcap 30 causal", "ALiBi causal"])
def test_gradients_are_taken_and_checked(name: str):
    found = measure(dataclasses.replace(CALLS[name], direction="bwd"), "flashtile", "sdpa-math")
    grads = "out dq dk dv dbias" if name == "bias with gradient" else "out dq dk dv"
    assert found["flashtile"].status == "ok", found["flashtile"].reason
    assert found["flashtile"].checked.startswith(f"{grads}: all rows")
    assert found["sdpa-math"].status == ("refused" if "causal" in name else "ok"), found["sdpa-math"].reason


def test_a_gradient_of_the_bias_that_lacks_a_sequence_is_marked():
    def build(point, inputs):
        bias = inputs.extras.bias.detach().requires_grad_()

        def call(q, k, v):
            return torch.cat(
                [
                    F.scaled_dot_product_attention(q[:1], k[:1], v[:1], attn_mask=bias),
                    F.scaled_dot_product_attention(q[1:], k[1:], v[1:], attn_mask=bias.detach()),
                ]
            )

        return providers.Attend(call, leaves=(bias,))

    point = dataclasses.replace(CALLS["bias with gradient"], direction="bwd")
    plan, wrong = Plan("options", "x", (point,)), providers.Provider("wrong", True, build)
    (row,) = next(Sweep(plan, [wrong], SETTINGS, ENV).rows())
    assert row.status == "inaccurate"
    assert row.reason.startswith("dbias: off by")


@pytest.mark.parametrize("name", SCORES)
def test_a_provider_that_ignores_the_option_is_marked(name: str):
    def ignoring(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal="causal" in name)

    point = dataclasses.replace(CALLS[name], dtype="fp64")  # softcap 30 changes little
    (row,) = next(Sweep(Plan("options", "x", (point,)), [provider("one", ignoring)], SETTINGS, ENV).rows())
    assert row.status == "inaccurate"


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_has_the_same_meaning(name: str, no_compilation):
    row = measure(CALLS[name], "flex")["flex"]
    assert row.status == "ok", row.reason
    assert row.detail == "dynamic False"  # torch cannot compile captured values for the CPU otherwise


@pytest.mark.parametrize("name", ["eager", "flex", "sdpa", "flashtile"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_causal_calls_with_more_keys_than_queries_are_of_one_meaning(name: str, no_compilation):
    """As in random calls of decoding and in `profile Sq=8 Sk=40 causal`: the last query sees the last key."""
    options = ("", "ALiBi causal") if name in ("flex", "flashtile") else ("",)
    for option in options:
        point = dataclasses.replace(SMALL, seqlen_q=8, is_causal=True, option=option)
        row = measure(point, name)[name]
        assert row.status == "ok", (option, row.reason)
    if name == "flex":
        row = measure(dataclasses.replace(LONG, seqlen_q=40), name)[name]
        assert row.status == "ok", row.reason
        assert row.detail == "dynamic False"


def test_flex_changes_scores_in_one_way_only():
    """Of several changes it would drop all but one, and be another problem than that of its peers."""
    slopes = torch.ones(4)
    assert providers._score_mod(0.0, None, None, 0) is None
    with pytest.raises(Unsupported, match="one change of the scores at a time"):
        providers._score_mod(30.0, None, slopes, 0)


def test_a_sample_of_rows_has_its_rows_of_the_option(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashtile.lab.bench.accuracy.FULL_SCORES", {"cpu": 0})
    monkeypatch.setattr("flashtile.lab.bench.accuracy.MAX_ROWS", 7)
    for name in SCORES:
        direction = "bwd" if name == "bias with gradient" else "fwd"
        row = measure(dataclasses.replace(CALLS[name], direction=direction), "flashtile")["flashtile"]
        assert row.status == "ok", (name, row.reason)
        assert f": 7 of {row.seqlen_q} rows" in row.checked


@pytest.mark.parametrize(
    ("name", "option", "reason"),
    [
        ("sdpa-flash", "softcap 30 causal", "scaled_dot_product_attention has no softcap"),
        ("sdpa-math", "ALiBi causal", "scaled_dot_product_attention has no ALiBi slopes"),
        ("sdpa", "window 1024 causal", "scaled_dot_product_attention has no window"),
        ("flex", "dropout 0.1", "FlexAttention has no dropout"),
        ("flex", "plain", "left out: FlexAttention is measured where"),
        ("eager", "bias (1,H,S,S)", "measured without options; the call has: bias (1,H,S,S)"),
    ],
)
def test_what_a_provider_lacks_is_a_row_with_the_reason(name: str, option: str, reason: str):
    row = measure(CALLS.get(option, dataclasses.replace(SMALL, option=option)), name)[name]
    assert (row.status, row.median_ms) == ("refused", None)
    assert row.reason.startswith(reason)


def test_the_automatic_choice_is_taken_by_name_only():
    assert [one.name for one in choose("sdpa,flashtile", is_grid=True)] == ["flashtile", "sdpa"]
    assert "flashtile" not in {one.name for one in choose("ours,baselines", is_grid=True)}


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    calls = (dataclasses.replace(SMALL, option="plain"), CALLS["softcap 30 causal"])
    plan = Plan("options", "x", calls)
    chosen = [by_name(name) for name in ("flashtile", "sdpa-math", "sdpa")]
    return [row for found in Sweep(plan, chosen, SETTINGS, ENV).rows() for row in found]


def test_the_table_has_microseconds_and_the_best_peer(measured: list[Row]):
    times = {"flashtile": 0.5, "sdpa-math": 2.0, "sdpa": 0.25}
    timed = [dataclasses.replace(row, median_ms=row.median_ms and times[row.provider]) for row in measured]
    table = tables.of(timed, "options")
    assert table.header == ("", "flashtile", "sdpa-math", "sdpa", "best peer / ours")
    assert table.lines == (
        ("plain", "500", "2000", "250", "0.50"),
        ("softcap 30 causal", "500", "refused", "refused", ""),
    )
    both = [*timed, *(dataclasses.replace(row, direction="bwd") for row in timed)]
    assert [line[0] for line in tables.of(both, "options").lines][::2] == ["plain fwd", "plain bwd"]


def test_two_calls_of_one_shape_are_two_points(measured: list[Row]):
    again = [dataclasses.replace(row, option="again", is_causal=False) for row in measured if row.option == "plain"]
    assert {one.option for one in compare.changes([*measured, *again], [*again, *measured])} == {
        "plain",
        "again",
        "softcap 30 causal",
    }


def test_a_csv_from_before_the_column_is_read(measured: list[Row], tmp_path: Path):
    path = tmp_path / "rows.csv"
    plain = [dataclasses.replace(row, option="", detail="", reason="") for row in measured]
    with Writer(path, Row) as writer:
        writer.add(plain)
    header, *lines = path.read_text().splitlines()
    at = header.split(",").index("option")
    old = [",".join(cell for index, cell in enumerate(line.split(",")) if index != at) for line in (header, *lines)]
    path.write_text("\n".join(old) + "\n")
    assert [(row.provider, row.option, row.status) for row in read(path, Row)] == [
        (row.provider, "", row.status) for row in plain
    ]
    path.write_text("\n".join([header.replace("option", "colour"), *lines]) + "\n")
    with pytest.raises(ValueError, match="with other columns"):
        read(path, Row)


@pytest.mark.parametrize(("only", "stem"), [("bwd", "paper_bf16_bwd"), ("fwd+bwd", "paper_bf16_fwdbwd")])
def test_the_paper_grid_draws_figures_of_any_pass(
    only: str, stem: str, measured: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plots, "save", lambda figure, path, name: path.with_name(name))
    plan, (ours, peer) = paper_grid("bf16", only=only), measured[:2]
    found = [
        dataclasses.replace(
            row, sweep="paper", **{name: getattr(point, name) for name in vars(point) if name in vars(row)}
        )
        for point in plan.points
        for row in (ours, peer)
    ]
    drawn = plots.draw(tmp_path / f"{plan.stem}.csv", found)
    assert [path.stem for path in drawn] == [f"{stem}_{what}" for what in ("d64", "d128", "d256", "ratios")]


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_options_grid_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(points, "_OPTION_CALLS", {"plain": SMALL, "dropout 0.1": SMALL})
    monkeypatch.setattr(points, "_FP32_CALLS", {"fp32 d16": SMALL})
    chosen = ("--backends", "flashtile,sdpa-math,flex", "--seconds", "0.002", "--device", "cpu")
    result = invoke("bench", "--grid", "options", *chosen, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "best peer / ours" in result.output
    assert "dropout 0.1 bwd" in result.output
    assert "FlexAttention has no dropout" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["sdpa_options_fp32.csv"]
    result = invoke(
        "bench", "--grid", "options", *chosen, "--out", tmp_path, "--pass", "bwd", "--dtype", "bf16", "--json"
    )
    found = json.loads(result.stdout)["rows"]
    assert {(row["direction"], row["option"], row["dtype"]) for row in found} == {
        ("bwd", "plain", "bf16"),
        ("bwd", "dropout 0.1", "bf16"),
        ("bwd", "fp32 d16", "fp32"),
    }
    assert (tmp_path / "sdpa_options_bf16_bwd.csv").exists()


def test_the_cpu_grid_runs(tmp_path: Path):
    result = invoke("bench", "--grid", "cpu", "--seconds", "0.002", "--call-limit", "1000", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = read(tmp_path / "sdpa_cpu.csv", Row)
    assert [(row.option, row.provider, row.status) for row in found] == [
        (point.option, name, "ok") for point in cpu_grid().points for name in ("flashtile", "sdpa")
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--grid", "cpu", "--device", "cuda"], "--device: got 'cuda' with --grid cpu; accepted: cpu"),
        (["--grid", "cpu", "--pass", "bwd"], "--pass: got 'bwd' with --grid cpu; accepted: fwd"),
        (["--grid", "cpu", "--dtype", "bf16"], "--dtype: got it with --grid cpu"),
        (["--grid", "options", "--heads", "3"], "--heads: got it with --grid options"),
        (["--grid", "option"], "--grid: got 'option'; accepted: paper, decode, options, float32, cpu"),
    ],
)
def test_what_does_not_fit_a_grid_is_refused(arguments: list[str], complaint: str, tmp_path: Path):
    result = invoke("bench", "--out", tmp_path / "new", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert not (tmp_path / "new").exists()
