"""The scores of every kernel and their derivatives (attn/score.cuh), compiled for the host: one element, and the forms
for fragments of the Hopper kernels, against formulas in float64."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from ptx import ptx_of
from test_tile_order import BUILTINS, COMPILER

from flashtile import families
from flashtile.plans.arch import ARCHS
from flashtile.plans.spec import CallLayout, Features, PlanKey
from flashtile.runtime.nvrtc import INCLUDE

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
HEADS, SEQLEN_Q, SEQLEN_K, OFFSET = 3, 40, 50, 7
FUNCTIONS = ("NoFunction", "Probe<false>", "Probe<true>")
# Instructions of core/math.cuh as functions of the host
ON_HOST = {
    "ex2.approx.ftz.f32": "exp2f(x)",
    "lg2.approx.ftz.f32": "log2f(x)",
    "rcp.approx.ftz.f32": "1.0f / x",
    "tanh.approx.f32": "tanhf(x)",
}
# score = w x + x^3 / 64, with w = 1 + head / 4 + (i + offset) / 32 + j / 64
PROBE = """
namespace flashtile {
template <bool kIsNatural>
struct Probe : ScoreFunction<kIsNatural, true> {
  struct Row {
    float weight;
  };
  FT_DEVICE static Row row(const Params&, const Sequence& s, i32 head, i32 i) {
    return {1.0f + head / 4.0f + (i + s.offset) / 32.0f};
  }
  FT_DEVICE static float score(const Params&, const Row& row, float x, i32, i32 j) {
    return (row.weight + j / 64.0f) * x + x * x * x / 64.0f;
  }
  FT_DEVICE static float derivative(const Params&, const Row& row, float x, i32, i32 j) {
    return row.weight + j / 64.0f + 3.0f * x * x / 64.0f;
  }
};
}
"""
SOURCE = """
#include "device/attn/score.cuh"
using namespace flashtile;
template <class ScoreMod>
void find(const Params& p, int head, int i, int j, float dot, float lse, float* out) {
  using Scores = Score<ScoreMod>;
  Sequence s{0, SEQLEN_Q, SEQLEN_K, OFFSET, 0, 0, 0};
  // One element
  Scores scores(p, s, head);
  typename Scores::Kept kept{};
  *out++ = scores.score(dot, i, j, kept);
  *out++ = scores.gradient(kept);
  *out++ = scores.bias_gradient(kept);
  *out++ = scores.dot_gradient(kept) * scores.bias_gradient(kept);
  // A forward tile that begins 8 rows and 9 columns before the element
  float bias = 0.0f;
  if constexpr (ScoreMod::kHasBias) bias = scores.bias_of(i, j);
  typename Scores::Rows rows;
  for (int r = 0; r < 2; ++r) rows.template find<true>(r, p, s, head, i - 8 + 8 * r);
  auto forward = [&](auto tile, int side) {
    for (int r = 0; r < 2; ++r) {
      tile.place(r, rows, i - 8 + 8 * r + OFFSET - j + 9, side);
      if constexpr (ScoreMod::kHasFunction) tile.place_at(r, s, rows, i - 8 + 8 * r, j - 9);
    }
    float x = dot;
    tile.score(p, x, 1, 9, bias);
    *out++ = x;
  };
  using Tanh = typename Scores::Tanh;
  int side = i + OFFSET >= j ? 1 : -1;
  forward(typename Scores::template ForwardTile<Tanh::kRough, false>(p), 0);
  forward(typename Scores::template ForwardTile<Tanh::kFast, false>(p), 0);
  forward(typename Scores::template ForwardTile<Tanh::kExact, false>(p), 0);
  forward(typename Scores::template ForwardTile<Tanh::kExact, true>(p), side);
  // A backward tile that begins 8 rows and 9 columns before the element
  auto backward = [&](auto tile, auto exact, auto of_dot, int first_i, int first_j) {
    tile.open(p, s, head);
    tile.place(first_i + OFFSET - first_j);
    tile.place_at(first_i, first_j);
    *out++ = tile.template exponent<decltype(exact)::kValue, decltype(of_dot)::kValue>(
        p, dot, 1, 9, lse, bias, tile.shift(1, 9), out[1]);
    ++out;
  };
  Constant<true> yes;
  Constant<false> no;
  backward(typename Scores::template BackwardTile<false>(), yes, yes, i - 8, j - 9);
  backward(typename Scores::template BackwardTile<false>(), no, yes, i - 8, j - 9);
  backward(typename Scores::template BackwardTile<true>(), yes, yes, i - 9, j - 8);
  backward(typename Scores::template BackwardTile<true>(), yes, no, i - 9, j - 8);
  *out++ = Scores::kProbFactor;
}
"""
NAMES = ("score", "gradient", "bias_gradient", "product", "rough", "fast", "exact", "one_sided")
NAMES += tuple(
    f"{what}_{how}" for how in ("rows", "rows_fast", "keys", "keys_bias") for what in ("power", "derivative")
)
VARIANTS = list(itertools.product((False, True), (False, True), (False, True), FUNCTIONS))


@dataclass(frozen=True)
class Element:
    """An element of the score matrix, and the numbers of its call."""

    head: int
    i: int
    j: int
    dot: float
    lse: float
    scale: float
    softcap: float
    slopes: list[float]
    bias: list[float]  # (SEQLEN_Q, SEQLEN_K)

    @classmethod
    def drawn(cls, seed: int) -> Element:
        draw = random.Random(seed)
        return cls(
            head=draw.randrange(HEADS),
            i=draw.randrange(9, SEQLEN_Q),
            j=draw.randrange(9, SEQLEN_K),
            dot=draw.uniform(-8, 8),
            lse=draw.uniform(-2, 2),
            scale=draw.uniform(0.2, 0.5),
            softcap=draw.uniform(2, 4),
            slopes=[draw.uniform(0.01, 0.1) for _ in range(HEADS)],
            bias=[draw.uniform(-1, 1) for _ in range(SEQLEN_Q * SEQLEN_K)],
        )

    def score(self, softcap: bool, alibi: bool, bias: bool, function: str, dot: float, extra: float = 0.0) -> float:
        """The natural score by its definition. `extra` is added to the bias."""
        x = dot * self.scale
        if softcap:
            x = self.softcap * math.tanh(x / self.softcap)
        if alibi:
            x -= self.slopes[self.head] * abs(self.i + OFFSET - self.j)
        x += extra + (self.bias[self.i * SEQLEN_K + self.j] if bias else 0.0)
        if function == "NoFunction":
            return x
        unit = 1.0 if function == "Probe<true>" else math.log2(math.e)
        x *= unit
        weight = 1.0 + self.head / 4 + (self.i + OFFSET) / 32 + self.j / 64
        return (weight * x + x**3 / 64) / unit


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("score")
    host = folder / "host" / "device" / "core"
    host.mkdir(parents=True)
    math_header = (INCLUDE / "device" / "core" / "math.cuh").read_text()
    for name, call in ON_HOST.items():
        math_header = re.sub(rf'asm\("{re.escape(name)} [^;]*;" : "=f"\(y\) : "f"\(x\)\);', f"y = {call};", math_header)
    (host / "math.cuh").write_text(math_header)
    calls = []
    for number, (softcap, alibi, bias, function) in enumerate(VARIANTS):
        element = "float" if bias else "NoBias"
        policy = f"ScoreMod<{str(softcap).lower()}, {str(alibi).lower()}, {element}, {function}>"
        calls.append(f"if (variant == {number}) find<{policy}>(p, head, i, j, dot, lse, out);")
    (folder / "unit.cpp").write_text(
        BUILTINS
        + "inline float __fadd_rn(float a, float b) { return a + b; }\n"
        + f"enum {{ SEQLEN_Q = {SEQLEN_Q}, SEQLEN_K = {SEQLEN_K}, OFFSET = {OFFSET} }};\n"
        + SOURCE.replace("using namespace", PROBE + "using namespace", 1)
        + 'extern "C" void find_one(int variant, int head, int i, int j, float dot, float lse, float scale,'
        + " float softcap, const float* slopes, const float* bias, float* out) {\n"
        + "  Params p{};\n  p.scale = scale, p.scale_log2 = scale * kLog2e, p.softcap = softcap;\n"
        + "  p.softcap_factor = scale / softcap, p.alibi_slopes = slopes, p.bias = bias;\n"
        + "  p.bias_strides[2] = SEQLEN_K, p.bias_strides[3] = 1;\n  "
        + "\n  ".join(calls)
        + "\n}\n"
    )
    names = ("-D__device__=", "-D__forceinline__=inline", "-Ihost", f"-I{INCLUDE}")
    command = [str(COMPILER), "-std=c++17", "-shared", "-fPIC", "-w", *names, "-o", "unit.so", "unit.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "unit.so"))


@needs_compiler
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_all_forms_agree_with_the_definition(library: ctypes.CDLL, variant: int, seed: int) -> None:
    options = VARIANTS[variant]
    softcap, _, bias, function = options
    for turn in range(20):
        element = Element.drawn(seed + turn)
        out = (ctypes.c_float * (len(NAMES) + 1))()
        slopes, biases = (ctypes.c_float * HEADS)(*element.slopes), (ctypes.c_float * len(element.bias))(*element.bias)
        numbers = map(ctypes.c_float, (element.dot, element.lse, element.scale, element.softcap))
        library.find_one(variant, element.head, element.i, element.j, *numbers, slopes, biases, out)
        found = dict(zip(NAMES, out, strict=False))
        unit = 1.0 if bias or function == "Probe<true>" else math.log2(math.e)
        score, step = element.score(*options, element.dot), 1e-5
        for name in ("score", "rough", "fast", "exact", "one_sided"):
            assert found[name] == pytest.approx(score * unit, rel=1e-4, abs=1e-4), name
        # Derivatives with respect to scale * dot, and to the bias
        of_dot = (element.score(*options, element.dot + step) - element.score(*options, element.dot - step)) / (
            2 * step * element.scale
        )
        of_bias = (element.score(*options, element.dot, step) - element.score(*options, element.dot, -step)) / (
            2 * step
        )
        assert found["gradient"] == pytest.approx(of_dot, rel=1e-3, abs=1e-4)
        assert found["product"] == pytest.approx(of_dot, rel=1e-3, abs=1e-4)
        assert found["bias_gradient"] == pytest.approx(of_bias, rel=1e-3, abs=1e-4)
        factor = 4.0 if softcap else 1.0
        assert out[len(NAMES)] == factor
        power = (score - element.lse / unit) * math.log2(math.e) + math.log2(factor)
        for how, derivative in (("rows", of_dot), ("rows_fast", of_dot), ("keys", of_dot), ("keys_bias", of_bias)):
            assert found[f"power_{how}"] == pytest.approx(power, rel=1e-4, abs=1e-3), how
            assert found[f"derivative_{how}"] * factor == pytest.approx(derivative, rel=1e-3, abs=1e-3), how


# In every kernel: x + 4242.5, with a derivative of 77.25
MARKED = """
namespace flashtile {
struct Marked : ScoreFunction<false, true> {
  struct Row {};
  FT_DEVICE static Row row(const Params&, const Sequence&, i32, i32) { return {}; }
  FT_DEVICE static float score(const Params&, const Row&, float x, i32, i32) { return x + 4242.5f; }
  FT_DEVICE static float derivative(const Params&, const Row&, float, i32, i32) { return 77.25f; }
};
}
"""
SCORE_MARK, DERIVATIVE_MARK = (f"0f{struct.pack('>f', mark).hex().upper()}".encode() for mark in (4242.5, 77.25))
POLICY = re.compile(r"flashtile::ScoreMod<[^<>]*")


def marked_units() -> dict[str, tuple[str, str]]:
    """(unit, entry) of each kernel that takes score options, with a function of the score."""
    found = {}
    for family in families.all_families():
        if "has_alibi" not in family.features:
            continue
        dtype = family.dtypes[-1]
        for grads in family.grad_sets or (None,):
            features = Features(bias_dtype=dtype if grads == ("dbias",) else None)
            key = PlanKey(dtype, dtype, *family.head_dims[0], features, ARCHS[90], grads)
            for step in family.launch(key, CallLayout("bhsd", ())).steps:
                if POLICY.search(step.entry):
                    unit, entry = (POLICY.sub(r"\g<0>, flashtile::Marked", text) for text in (step.unit, step.entry))
                    include, _, rest = unit.partition("\n")
                    found[step.name] = (f"{include}\n{MARKED}{rest}", entry)
    return found


def test_a_function_of_the_score_is_in_every_kernel(seed: int) -> None:
    """Of a third of the kernels, drawn anew in each run."""
    units = marked_units()
    assert {name.split("_")[0] for name in units} == {"fwd", "bwd", "decode"}
    for name in random.Random(seed).sample(sorted(units), -(-len(units) // 3)):
        ptx = ptx_of(*units[name], "compute_90a")[0]
        assert SCORE_MARK in ptx, name
        # dV needs P alone
        assert (DERIVATIVE_MARK in ptx) == (name.startswith("bwd") and name != "bwd_sm80_dv_kernel"), name
