"""`flashtile check --float32`: what it draws, and that it finds what loses small numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from typer.testing import CliRunner

from flashtile import families
from flashtile.backends import reference, registry
from flashtile.cli.main import app
from flashtile.lab.check.float32 import Float32Drawer, split_families
from flashtile.lab.check.judge import forced, judge
from flashtile.lab.check.report import Settings
from flashtile.lab.check.runner import check
from flashtile.lab.check.trial import Trial
from flashtile.plans.arch import arch_named
from flashtile.testing import Case, Result, disagreements, expect

EDGES = (32, 64, 128)


class HopperDrawer(Float32Drawer):
    arch = arch_named("sm_90")  # type: ignore[assignment]


def draw(count: int, reuse: int = 1, seed: int = 3, direction: str = "both") -> list[Trial]:
    return list(itertools.islice(HopperDrawer(seed, "cuda", direction, EDGES, reuse), count))


def test_every_family_and_option_is_drawn() -> None:
    trials = draw(900)
    chosen = {trial.families for trial in trials}
    forwards = [family.name for family in split_families("forward", HopperDrawer.arch)]
    backwards = [family.name for family in split_families("backward", HopperDrawer.arch)]
    assert {"fwd_sm90_f32", "fwd_sm90_f32_direct"} <= set(forwards)
    assert "bwd_sm90_f32" in backwards
    assert chosen == {(name,) for name in forwards} | set(itertools.product(forwards, backwards))
    for names in chosen:
        cases = [trial.case for trial in trials if trial.families == names]
        for name in ("mask", "alibi", "has_sinks", "softcap", "dropout_p", "causal", "window", "kind", "layout"):
            assert len({getattr(case, name) for case in cases}) > 1, (names, name)
    wide = [trial for trial in trials if trial.case.values == "wide"]
    assert 0.7 < len(wide) / len(trials) < 0.9
    assert all(trial.has_backward == (len(trial.families) == 2) for trial in trials)
    assert {trial.case.head_dim for trial in trials} >= {32, 64, 128, 256}
    assert not any(trial.has_backward for trial in draw(20, direction="forward"))
    assert all(trial.has_backward for trial in draw(20, direction="backward"))


def test_problems_are_the_same_again_and_have_a_text() -> None:
    trials = draw(60, reuse=20)
    assert trials == draw(60, reuse=20)
    assert [Trial.parse(str(trial)) for trial in trials] == trials
    assert len({(trial.families, trial.case.head_dim, trial.case.kind) for trial in trials}) <= 3


def test_a_family_of_no_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'families=fwd_sm00'; accepted: .*fwd_sm90_f32:"):
        Trial.parse("families=fwd_sm00")


def test_a_device_without_such_families_has_the_same_kind_of_problems() -> None:
    trials = list(itertools.islice(Float32Drawer(3, "cpu", "both", EDGES), 50))
    assert {trial.families for trial in trials} == {()}
    assert split_families("forward", arch_named("sm_61")) == []
    assert split_families("forward", None) == []


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_wide_values(layout: str, seed: int) -> None:
    """Sizes that float16 does not have and logits that softmax can tell apart, in q, k, v and dout."""
    spans = dict.fromkeys(("q", "k", "v", "dout"), 0.0)
    for number in range(60):
        args, dout, dlse = Case(values="wide", layout=layout, kind=("dense", "varlen")[number % 2]).make(
            seed % 1000 + number
        )
        assert all(tensor.isfinite().all() for tensor in (args.q, args.k, args.v, dout, dlse))
        for name, tensor in (("q", args.q), ("k", args.k), ("v", args.v), ("dout", dout)):
            sizes = tensor[tensor != 0].abs().double()
            if sizes.numel():
                spans[name] = max(spans[name], math.log2(sizes.max() / sizes.min()), abs(math.log2(sizes.median())))
        if args.cu_seqlens_q is None and layout == "bhsd":
            assert (args.q.double() @ args.k.double().mT).abs().max() / args.q.shape[-1] ** 0.5 <= 64 * 2**0.5
    assert min(spans.values()) > 15, spans


def test_tiny_results_are_judged_by_their_own_size() -> None:
    """The rule's slack is absolute, so that it would accept anything for a result of 1e-9."""
    inputs = Case(seqlen_q=70, seqlen_k=40).make(0)
    inputs = inputs._replace(args=inputs.args._replace(v=inputs.args.v * 2.0**-30))
    expected = expect(inputs, has_backward=False)
    low = expected.low
    wrong = Result(low.out * 1.001, low.lse)
    assert disagreements(wrong, inputs, expected) == []
    assert disagreements(low, inputs, expected, is_relative=True) == []
    assert [text[:4] for text in disagreements(wrong, inputs, expected, is_relative=True)] == ["out:"]


def test_a_forced_family_is_the_trial_s_alone() -> None:
    before = families.forced_names()
    with forced(("fwd_sm90_f32",)):
        assert families.forced_names() == ("fwd_sm90_f32",)
    assert families.forced_names() == before
    trial = Trial(Case(seqlen_q=70, values="wide"), 1, True, ("fwd_sm90_f32", "bwd_sm90_f32"))
    assert judge(trial, [registry.find("tiled")], "cpu").complaints == {"tiled": []}
    assert families.forced_names() == before


class HalfV(type(registry.find("reference"))):  # type: ignore[misc]
    """Keeps v in one float16 scaled by its largest number."""

    name = "half"

    def forward(self, args, out, lse) -> None:
        largest = args.v.nan_to_num().abs().max().clamp(min=1e-30)
        v = (args.v / largest * 1024).half().float() / 1024 * largest
        reference.attend(args._replace(v=v), out, lse, torch.float64)


def test_lost_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HalfV()
    monkeypatch.setattr(registry, "BACKENDS", [backend, *registry.BACKENDS])
    settings = Settings([registry.find("tiled")], "cpu", seed=3, problems=30, kind="float32")
    report = check(settings)
    assert report.ran["tiled"] == 30
    assert not report.failures, report.failures
    wrong = Settings([backend], "cpu", seed=3, problems=30, kind="float32", direction="forward", stops_at_failure=True)
    assert check(wrong).failures


def test_one_kind_of_problems_at_a_time() -> None:
    for option in (["--decode"], ["--mutate", "all"]):
        result = CliRunner().invoke(app, ["check", "--float32", "--device", "cpu", *option])
        assert result.exit_code == 2
        assert "--float32" in result.output


def test_the_record_has_a_name_of_its_own(tmp_path) -> None:
    arguments = ["check", "--float32", "--device", "cpu", "--backends", "tiled", "--problems", "3", "--seed", "1"]
    assert CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["check_float32.json"]
