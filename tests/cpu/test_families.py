"""Families: what they refuse, how one is chosen, the switches, and one from outside the package that everything takes
up."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fake_gpu
import pytest
import torch

import flashtile
from flashtile import families
from flashtile.backends import cuda, native
from flashtile.cli import compile as compile_command
from flashtile.cli import kernel_jobs
from flashtile.errors import Unsupported
from flashtile.families import assemble, speeds, tiles
from flashtile.families.bwd_sm90.family import BwdSm90
from flashtile.lab.check import mutants
from flashtile.plans import mutation
from flashtile.plans.arch import ARCHS, arch_here, arch_named, arch_of
from flashtile.plans.length_class import ManyScores
from flashtile.plans.spec import DTYPES, CallLayout, Features, PlanKey
from flashtile.problem import Problem, Shape
from flashtile.testing import Case

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toy_family"))
from toy import FwdToy

HOPPER = ARCHS[90]
LAYOUT = CallLayout("bhsd", ())
PLAIN = PlanKey("bfloat16", "bfloat16", 128, 128, Features(), HOPPER)


def test_a_family_that_borrows_times_is_registered_before_their_owner() -> None:
    """Of equal times the first registered is taken: behind the owner a borrower would never be."""
    places = {family.name: place for place, family in enumerate(families.all_families())}
    borrowers = set()
    for family in families.all_families():
        for dtype, dims in itertools.product(family.dtypes, family.head_dims):
            key = PlanKey(dtype, dtype, *dims, Features(), HOPPER)
            for some in kernel_jobs._asked_lengths(key, family.timed_as):
                owner = family.timed_as(some)
                if owner != family.name:
                    borrowers.add(family.name)
                    assert places[family.name] < places[owner]
    assert borrowers == {"decode_sm90", "fwd_sm90_short", "fwd_sm90_f32_direct"}


def change(key: PlanKey = PLAIN, **changes: object) -> PlanKey:
    """The key with fields of its own or of its features changed."""
    of_features = {name: value for name, value in changes.items() if name in Features.__dataclass_fields__}
    own = {name: value for name, value in changes.items() if name not in of_features}
    return dataclasses.replace(key, features=dataclasses.replace(key.features, **of_features), **own)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"has_band": True, "has_dropout": True, "has_lengths": True, "bias_dtype": "float32"}, None),
        ({"dtype": "float32"}, "float32 is not among its dtypes (float16, bfloat16)"),
        ({"arch": ARCHS[80]}, "sm_80 has no wgmma"),
        ({"head_dim": 264}, "head_dim 264, 128 is over its 256, 256"),
        ({"is_paged": True}, None),
        ({"is_aligned16": False}, "rows that are not multiples of 16 bytes on 16-byte boundaries"),
        ({"is_scale_positive": False}, "a scale that is not positive"),
        ({"rows_disjoint": False}, "rows that overlap in memory"),
    ],
)
def test_what_the_hopper_forward_refuses(changes: dict[str, object], reason: str | None) -> None:
    assert families.find("fwd_sm90").refuse(change(**changes)) == reason


FEW, *_, MANY = families.find("decode_sm90").length_classes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"has_band": True, "has_softcap": True, "has_alibi": True, "has_lengths": True, "is_paged": True}, None),
        ({"classes": ((FEW, 0),)}, "more queries than fit a tile of 64 rows with the heads that share a KV head"),
        ({"classes": ((FEW, 4), (MANY, 1))}, "more key tiles than it numbers in 32 bits"),
        ({"classes": ((FEW, 4), (MANY, 1)), "has_lengths": True}, None),
        ({"heads_disjoint": False}, "heads of q that share memory: a TMA box has no stride of 0"),
        ({"heads_disjoint": False, "classes": ((FEW, 1),)}, None),
        ({"bias_dtype": "float32"}, "a bias"),
        ({"has_bool_mask": True}, "boolean masks"),
        ({"has_dropout": True}, "dropout"),
        ({"arch": ARCHS[80]}, "sm_80 has no wgmma"),
        ({"is_scale_positive": False}, "a scale that is not positive"),
    ],
)
def test_what_the_hopper_decode_refuses(changes: dict[str, object], reason: str | None) -> None:
    few = change(classes=((FEW, 4),))
    assert families.find("decode_sm90").refuse(change(few, **changes)) == reason


@pytest.mark.parametrize("is_large", [0, 1])
def test_one_query_and_16_rows_take_the_decode_family(is_large: int) -> None:
    """More rows do not: there the forward is as fast. Nor do fewer keys, until they are measured. Both in pages and out
    of them."""
    _, one, fastest, short, _ = families.find("decode_sm90").length_classes
    for pages in ({}, {"is_paged": True}, {"is_paged": True, "has_lengths": True}, {"has_lengths": True}):
        taken = (((0, 0, 0), False), ((1, 0, 1), True), ((0, 4, 0), True), ((0, 4, 1), False))
        for values, is_taken in taken:
            name = "decode_sm90" if is_taken else "fwd_sm90"
            classes = (*zip((one, fastest, short), values, strict=True), (FEW, 4), (speeds.SIZE, is_large))
            assert families.select(change(classes=classes, **pages)).name == name, pages


@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q", "rows"),
    [(32, 8, 4, True), (32, 8, 5, False), (4, 4, 16, True), (4, 4, 17, False), (64, 1, 1, False), (15, 3, 3, True)],
)
def test_which_calls_have_16_rows(heads: int, heads_kv: int, seqlen_q: int, rows: bool) -> None:
    fastest = families.find("decode_sm90").length_classes[2]
    shape = Shape(batch=2, heads=heads, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_k=100, head_dim=64, head_dim_v=64)
    assert bool(fastest.of(shape, 132)) == rows


@pytest.mark.parametrize(("batch", "is_many"), [(7 * 2**16, False), (7 * 2**16 + 1, True), (2**40, True)])
def test_which_calls_have_too_many_key_tiles_for_decode(batch: int, is_many: bool) -> None:
    """Keys that are expanded take no memory. The limit is that of the kernel."""
    header = (Path(families.__file__).parent / "decode_sm90" / "schedule.cuh").read_text()
    assert f"kMaxUnits = {MANY.most >> 28} << 28;" in header
    shape = Shape(batch, heads=128, heads_kv=1, seqlen_q=1, seqlen_k=2**17 - 63, head_dim=64, head_dim_v=64)
    assert bool(MANY.of(shape, 132)) == is_many
    assert {MANY.tile_keys} == {row.streamed for row in families.find("decode_sm90").rows("decode_sm90", change())}


def test_simt_takes_every_dtype_on_every_arch() -> None:
    for arch in ARCHS.values():
        for dtype in DTYPES:
            for op, grads in (("fwd_simt", None), ("bwd_simt", ("dq", "dk", "dv"))):
                key = change(dtype=dtype, arch=arch, grads=grads)
                assert families.find(op).refuse(key) is None
                assert families.find(op).launch(key, CallLayout("bhsd", ())).steps


@pytest.mark.parametrize("family", families.all_families(), ids=lambda family: family.name)
def test_rows_fit_some_architecture_and_labels_tell_them_apart(family: families.Family) -> None:
    rows = list(family.every_row(family.dtypes[0]))
    assert len({(row.kernel, row.head_dim, row.head_dim_v, row.label) for row in rows}) == len(rows) == len(set(rows))
    assert all(any(row.unfit(arch) is None for arch in ARCHS.values() if family.runs_on(arch)) for row in rows)
    assert set(family.kernels) == {row.kernel for row in rows}


# The table of tiles

LINES = FwdToy.table.read_text().splitlines()


def toy_of(lines: list[str], tmp_path: Path) -> FwdToy:
    """The toy family with another table."""
    family = FwdToy()
    family.table = tmp_path / "tiles.csv"
    family.table.write_text("\n".join(lines) + "\n")
    return family


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("fwd_toy,float32,32,32,64,16,64,,,", "tiles.csv, line 2: got 10 cells; accepted: 11"),
        ("fwd_toy,float32,32,32,64,,64,,,,", "tiles.csv, line 2, streamed: got ''; accepted: a positive number"),
        ("fwd_toy,float32,0,32,64,16,64,,,,", "tiles.csv, line 2, d: got '0'; accepted: a positive number"),
        ("fwd_toy,float64,32,32,64,16,64,,,,", "tiles.csv, line 2, dtypes: got 'float64'; accepted: some of float32"),
        ("fwd_toy,float32,32,32,64,16,64,stages,,,", "line 2, knobs: got 'stages'; accepted: name=number"),
        ("fwd_toy,float32,32,32,64,16,64,stages=2,,,", "line 2, knobs: got stages; accepted: none"),
        ("fwd_toy,float32,32,32,64,16,64,,band wide,,", "line 2: got 'wide'; accepted: options>1 or so, or one of "),
        ("fwd_toy,float32,32,32,64,16,64,,,!sm_91,", "line 2: got 'sm_91'; accepted: options>1 or so, or one of "),
        (LINES[2] + "twice", "tiles.csv, line 3: got the tile of tiles.csv, line 2 again; accepted: a tile that"),
    ],
)
def test_a_wrong_line_of_the_table_is_named(line: str, error: str, tmp_path: Path) -> None:
    family = toy_of([LINES[0], line, LINES[2]], tmp_path)
    with pytest.raises(ValueError, match=re.escape(error)):
        families.register(family)
    assert family not in families.all_families()


def test_a_wrong_header_of_the_table_is_an_error(tmp_path: Path) -> None:
    family = toy_of([LINES[0].replace("owned", "block_m"), *LINES[1:]], tmp_path)
    with pytest.raises(ValueError, match=r"tiles.csv: got columns kernel, dtypes, d, d_v, block_m, "):
        families.register(family)


def test_a_new_head_dim_is_one_line_and_a_forgotten_kernel_is_an_error(tmp_path: Path) -> None:
    family = families.find("bwd_sm90")
    text = tiles.TABLE.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("bwd_sm90,") and ",64,64,128,64," in line)
    new = family.head_dims[-1][0] + 16
    table = tmp_path / "tiles.csv"
    table.write_text(f"{text}{line.replace(',64,64,128,64,', f',{new},{new},128,64,')}\n")
    found = tiles.tiles_of(table, family.kernel_types, frozenset())
    # The tiles of the bias gradient are for every pair
    assert {tile.dims for tile in found["bwd_sm90_dbias"]} == {*family.head_dims, (new, new)}
    other = tmp_path / "others.csv"
    dbias = "bwd_sm90_dbias,float16 bfloat16,"
    assert f"{dbias}*,*," in text
    other.write_text(text.replace(f"{dbias}*,*,", f"{dbias}64,64,"))
    error = r"got head dims \d+, \d+ in float16 for bwd_sm90 alone; accepted: a tile of bwd_sm90_dbias for them, too"
    with pytest.raises(ValueError, match=error):
        tiles.tiles_of(other, family.kernel_types, frozenset())


def test_a_call_that_no_tile_takes_is_an_error_that_names_the_lines(tmp_path: Path) -> None:
    # Three stages and a bias do not fit at head dims over 64
    family, kernel = BwdSm90(), "bwd_sm90"
    lines = tiles.TABLE.read_text().splitlines()
    kept = [
        line for line in lines if not (line.startswith(f"{kernel},") and ",96,96," in line and ",stages=2 " in line)
    ]
    family.table = tmp_path / "tiles.csv"
    family.table.write_text("\n".join(kept) + "\n")
    call = change(head_dim=96, head_dim_v=96, grads=("dq", "dk", "dv"))
    assert family.select(kernel, call)["stages"] == 3
    error = r"tiles.csv, bwd_sm90: got no tile for head dims 96, 96 in bfloat16 .*\(tiles.csv, line \d+: \d+ KiB of"
    with pytest.raises(ValueError, match=error):
        family.select(kernel, change(call, bias_dtype="bfloat16"))


def test_a_line_of_an_unknown_kernel_is_an_error() -> None:
    known = [kernel for family in families.all_families() for kernel in family.kernels]
    tiles.check_kernels(tiles.TABLE, known)
    with pytest.raises(ValueError, match=r"tiles.csv, line \d+: got 'fwd_simt'; accepted: one of "):
        tiles.check_kernels(tiles.TABLE, [name for name in known if name != "fwd_simt"])


def test_words_of_a_tile_hold_together_or_in_turn() -> None:
    plain = tiles.words_of(PLAIN, (128, 128), 0)
    assert plain == {"bfloat16", "sm_90", "highest"}
    call = change(head_dim=120, bias_dtype="float32", has_lengths=True, is_aligned16=False)
    words = tiles.words_of(call, (128, 128), 2)
    assert words - plain == {"bias", "float_bias", "lengths", "unaligned", "padded", "options>0", "options>1"}
    one = tiles.Condition(frozenset({"bias", "lengths"}), frozenset({"paged"}))
    assert one.holds(words)
    assert not one.holds(words | {"paged"})
    assert not one.holds(plain)
    # A GPU that is not in ARCHS takes the tiles of the one whose limits it takes
    arch = arch_of(10, 3)
    assert arch is not None
    assert "sm_100" in tiles.words_of(change(arch=arch), (128, 128), 0)


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype", "expected"),
    [
        ("bwd_sm90_f32", 128, "float32", "64 keys x 64 queries"),
        ("bwd_sm90_f32", 256, "float32", "64 keys x 32 queries"),
        ("bwd_sm80", 64, "bfloat16", "128 keys x 32 queries"),
        ("bwd_sm90", 128, "bfloat16", "128 keys x 64 queries"),
        ("fwd_sm90", 128, "bfloat16", "192 queries x 128 keys"),
    ],
)
def test_a_step_says_what_its_block_owns(name: str, head_dim: int, dtype: str, expected: str) -> None:
    family = families.find(name)
    grads = ("dq", "dk", "dv") if family.op == "backward" else None
    key = change(dtype=dtype, out_dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, grads=grads)
    steps = family.launch(key, CallLayout("bhsd", ())).steps
    assert next(step for step in steps if step.shared_bytes).tile == expected


# Choice


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Times of large bfloat16 forward calls, instead of those of the table."""
    us: dict[str, float] = {}
    row = speeds._Row("sm_90", "forward", "bfloat16", speeds.PLAIN, "large", 128, us)
    for cached in (speeds._row, speeds.is_measured):
        cached.cache_clear()
    monkeypatch.setattr(speeds, "_table", lambda: (row,))
    families.clear_choices()
    yield us
    for cached in (speeds._row, speeds.is_measured):
        cached.cache_clear()
    families.clear_choices()


def test_the_fastest_is_taken_and_the_unknown_comes_last(times: dict[str, float]) -> None:
    assert families.select(PLAIN).name == "fwd_sm90"  # nothing is known: the first
    times["fwd_simt"] = 10.0
    families.clear_choices()
    assert families.select(PLAIN).name == "fwd_simt"
    times["fwd_sm90"] = 5.0
    families.clear_choices()
    assert families.select(PLAIN).name == "fwd_sm90"
    assert families.select(change(is_aligned16=False)).name == "fwd_simt"


def test_no_family_at_all_says_why_for_each() -> None:
    with pytest.raises(Unsupported, match=r"'fwd_sm90' refuses: float64 is not.*'fwd_simt' refuses: float64 is not"):
        families.select(change(dtype="float64"))


def test_a_switch_names_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_FAMILY", "fwd_simt")
    assert families.select(PLAIN).name == "fwd_simt"
    assert families.refusals(PLAIN)["fwd_sm90"] == "FLASHTILE_FAMILY names fwd_simt"
    assert families.select(change(grads=("dq",))).name == "bwd_sm90"  # of another op: not concerned
    monkeypatch.setenv("FLASHTILE_FAMILY", "fwd_sm90")
    with pytest.raises(Unsupported, match="'fwd_simt' refuses: FLASHTILE_FAMILY names fwd_sm90"):
        families.select(change(is_aligned16=False))
    monkeypatch.setenv("FLASHTILE_FAMILY", "fwd_sm91")
    names = ", ".join(family.name for family in families.all_families())
    with pytest.raises(ValueError, match=f"FLASHTILE_FAMILY: got 'fwd_sm91'; accepted: {names}"):
        families.select(PLAIN)


def test_a_switch_names_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arch_here(9, 0) == HOPPER
    monkeypatch.setenv("FLASHTILE_ARCH", "sm_86")
    arch = arch_here(9, 0)
    assert arch is not None
    assert (arch.shared_bytes, arch.has_wgmma, arch.name) == (99 * 1024, False, "sm_90a")
    step = families.select(change(arch=arch)).launch(change(arch=arch), CallLayout("bhsd", ())).steps[0]
    assert step.shared_bytes <= 99 * 1024
    for name in ("sm_1", "volta"):
        monkeypatch.setenv("FLASHTILE_ARCH", name)
        with pytest.raises(ValueError, match=f"FLASHTILE_ARCH: got '{name}'; accepted: sm_61, "):
            arch_here(9, 0)
    monkeypatch.setenv("FLASHTILE_ARCH", "sm_90")
    with pytest.raises(
        ValueError, match="FLASHTILE_ARCH: got sm_90a; accepted: one that fits"
    ):  # more shared memory than an sm_86 has
        arch_here(8, 6)
    assert arch_named("sm_90a") == HOPPER


def test_few_scores_are_of_another_size() -> None:
    assert families.kind_of(PLAIN).is_large
    assert not families.kind_of(change(classes=((speeds.SIZE, 0),))).is_large
    assert ManyScores(22) == speeds.SIZE


def test_a_first_call_asks_no_slower_family_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, PlanKey]] = []

    def counting(family: families.Family) -> object:
        refuse = family.refuse

        def count(key: PlanKey) -> str | None:
            asked.append((family.name, key))
            return refuse(key)

        return count

    time_us = cuda.CudaBackend.time_us
    fake_gpu.plug_in(fake_gpu.build(tmp_path), monkeypatch.setattr)
    monkeypatch.setattr(cuda.CudaBackend, "time_us", time_us)  # the real one, which asks for the family
    try:
        for family in families.all_families():
            monkeypatch.setattr(family, "refuse", counting(family))
        args = Case(dtype=torch.bfloat16).make(0).args
        problem = Problem.of(args)
        for op in ("forward", "backward"):
            assert cuda.CudaBackend().refuse(problem, op) is None
            assert cuda.CudaBackend().time_us(problem, op) is not None
        for _ in range(2):  # by Python, both times
            with native.python_only():
                flashtile.attention(args.q, args.k, args.v, backend="cuda")
        assert sorted(name for name, _ in asked) == ["bwd_sm90", "fwd_sm90"]
    finally:
        fake_gpu.unplug()


# From outside


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FwdToy]:
    family = FwdToy()
    families.register(family)
    assemble.clear_plans()
    yield family
    families.unregister(family)
    assemble.clear_plans()


def test_a_name_is_given_once(toy: FwdToy) -> None:
    with pytest.raises(ValueError, match="family: got 'fwd_toy'; accepted: a name that no family has"):
        families.register(FwdToy())


def test_a_toy_family_is_taken_up_by_everything(toy: FwdToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.tile_sizes() <= families.tile_sizes()
    jobs = kernel_jobs.plain_jobs([HOPPER], ["float32"], [32])
    assert "fwd_toy" in {job.kernel for job in jobs}
    assert "fwd_toy" in {
        job.kernel for job in kernel_jobs.covering_jobs([HOPPER], ["float32"], crosses_head_dims=False)
    }
    recorder = fake_gpu.plug_in(fake_gpu.build(tmp_path), monkeypatch.setattr)
    try:
        args = Case(seqlen_q=100, seqlen_k=70, head_dim=24, head_dim_v=32, causal="bottom_right").make(0).args
        with families.forced("fwd_toy"):
            assemble.clear_plans()
            explained = flashtile.explain(args.q, args.k, args.v, causal=True, backend="cuda")
            assert explained.details["fwd_toy_kernel"].startswith(
                "tile 64 queries x 16 keys, 2 warps, 4 KiB of shared memory"
            )
            flashtile.attention(args.q, args.k, args.v, causal=True, backend="cuda")
        (numbers, _), *more = recorder.launches()
        assert not more
        blocks = -(-100 // 64) * args.q.shape[0] * args.q.shape[1]
        assert blocks in numbers
        # By itself it is not taken: its speed is not known, and that of another family is
        assert "fwd_toy" not in [step.name for step in assemble.kernels(cuda.problem_key(explained.problem, "forward"))]
    finally:
        fake_gpu.unplug()


def test_a_toy_family_compiles_and_python_and_c_plus_plus_agree(toy: FwdToy) -> None:
    key = PlanKey("float32", "float32", 32, 32, Features(has_band=True, has_lengths=True, is_aligned16=False), HOPPER)
    (step,) = toy.launch(key, CallLayout("bhsd", ())).steps
    job = kernel_jobs.Job(step, key, toy)
    result = compile_command.compile_job(job)
    assert result.problems == ()
    wrong = dataclasses.replace(step, unit=step.unit.replace("== 4096", "== 4097"))
    assert wrong != step
    assert any(
        "shared bytes" in problem
        for problem in compile_command.compile_job(dataclasses.replace(job, step=wrong)).problems
    )


def test_a_toy_family_meets_the_faults_and_the_sanitizers(toy: FwdToy) -> None:
    """No tool has a list of families."""
    fault = mutation.Mutation("fwd_toy_rescale", "O keeps its old scale", None)
    shared = mutation.Mutation("skip_rescale", "the same, in a shared header", None)
    assert (families.fault_family(fault), families.fault_kind(fault)) == (toy, "rescale")
    assert families.families_with(fault) == (toy,)
    assert families.is_reachable(fault, ARCHS[61])
    assert mutants.needs_of(fault) == {**mutants.NEEDS["rescale"], **toy.fault_needs["rescale"]}
    assert mutants.needs_of(fault)["head_dim"] == 32
    assert (families.fault_family(shared), families.fault_kind(shared)) == (None, "skip_rescale")
    assert [family.name for family in families.families_with(shared)] == ["fwd_simt", "bwd_simt"]
    (step,) = toy.launch(change(dtype="float32", out_dtype="float32", head_dim=32, head_dim_v=32), LAYOUT).steps
    sanitize = load_tool("sanitize")
    assert sanitize.defines_for("racecheck", step.entry) == ["FT_LANE_ARRIVALS"]
    assert sanitize.defines_for("memcheck", step.entry) == []
    jobs = sanitize.all_jobs(HOPPER, ["float32"], [32], ["fwd_toy"])
    assert {job.family for job in jobs} == {"fwd_toy"}
    assert {job.row for job in jobs} == {0, 1, None}


def load_tool(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_longest_name_is_the_family_of_a_fault() -> None:
    names = {fault.name: families.fault_family(fault) for fault in mutation.mutations()}
    assert names["bwd_sm90_f32_wide_rows"] is families.find("bwd_sm90_f32")
    assert names["bwd_sm90_wide_tail"] is families.find("bwd_sm90_wide")
    assert names["fwd_sm90_short_tail"] is families.find("fwd_sm90_short")
    assert names["decode_sm90_weight"] is families.find("decode_sm90")


def numbers_compared(path: Path) -> list[str]:
    """Lines that compare the number of an architecture with a literal or a constant."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        has_number = any(isinstance(side, ast.Attribute) and side.attr == "number" for side in sides)
        is_literal = any(isinstance(side, (ast.Constant, ast.Tuple)) for side in sides)
        is_constant = any(isinstance(side, ast.Name) and side.id.isupper() and side.id != "ARCHS" for side in sides)
        if has_number and (is_literal or is_constant):
            found.append(f"{path.name}:{node.lineno}")
    return found


def test_arch_py_alone_compares_sm_numbers(tmp_path: Path) -> None:
    source = Path(flashtile.__file__).parent
    assert [line for path in source.rglob("*.py") if path.name != "arch.py" for line in numbers_compared(path)] == []
    wrong = tmp_path / "wrong.py"
    for condition in ("arch.number >= 80", "arch.number in (80, 90)", "key.arch.number < _AMPERE"):
        wrong.write_text(f"x = {condition}\n")
        assert numbers_compared(wrong) == ["wrong.py:1"]


FULL, CHUNK, DECODE = (2, 16, 16, 4096, 4096), (4, 32, 8, 2048, 10240), (8, 32, 8, 1, 4096)
PAGED = Features(is_paged=True, has_lengths=True)
VIT, SWIN, GROUPED = (256, 12, 12, 197, 197), (4096, 6, 6, 49, 49), (256, 32, 8, 4, 197)
CROSS, BERT = (8, 10, 10, 4096, 77), (64, 12, 12, 512, 512)
S512, S1024 = (32, 32, 32, 512, 512), (16, 32, 32, 1024, 1024)
TAKEN = [
    ("forward", 64, VIT, Features(), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 64, VIT, Features(has_band=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 64, VIT, Features(bias_dtype="float32"), "fwd_sm90", "fwd_sm80"),
    ("forward", 64, (1, 32, 32, 500, 300), Features(), "fwd_sm90", "fwd_sm80"),  # few items
    ("forward", 64, GROUPED, Features(), "fwd_sm90", "fwd_sm80"),  # heads share a tile
    ("forward", 64, VIT, Features(bias_dtype="bfloat16"), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 32, SWIN, Features(), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 32, SWIN, Features(bias_dtype="bfloat16"), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 64, CROSS, Features(), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 64, CROSS, Features(has_band=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 64, BERT, Features(), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 64, BERT, Features(has_bool_mask=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 64, S1024, Features(), "fwd_sm90", "fwd_sm80"),
    ("forward", 64, S1024, Features(has_band=True), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 64, FULL, Features(has_band=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 32, S512, Features(), "fwd_sm90", "fwd_sm80"),
    ("forward", 96, S512, Features(has_band=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, S512, Features(has_band=True), "fwd_sm90_short", "fwd_sm80"),
    ("forward", 128, S512, Features(), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, S1024, Features(has_band=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, FULL, Features(), "fwd_sm90", "fwd_sm80"),
    ("forward", 256, FULL, Features(), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, FULL, Features(has_bool_mask=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 64, FULL, Features(has_dropout=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, FULL, Features(has_dropout=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, FULL, Features(has_softcap=True), "fwd_sm90", "fwd_sm80"),
    ("forward", 128, FULL, Features(is_aligned16=False), "fwd_sm80", "fwd_sm80"),
    ("forward", 512, FULL, Features(), "fwd_sm90_wide", "fwd_sm80_wide"),
    ("forward", 128, CHUNK, PAGED, "fwd_sm90", "fwd_sm80"),
    ("forward", 128, DECODE, PAGED, "decode_sm90", "fwd_sm80"),
    ("backward", 128, FULL, Features(), "bwd_sm90", "bwd_sm80"),
    ("backward", 128, FULL, Features(has_alibi=True), "bwd_sm90", "bwd_sm80"),
    ("backward", 128, FULL, Features(has_softcap=True), "bwd_sm90", "bwd_sm80"),
    ("backward", 128, FULL, Features(has_dropout=True), "bwd_sm90", "bwd_sm80"),
    ("backward", 128, FULL, Features(bias_dtype="bfloat16"), "bwd_sm90", "bwd_sm80_wide"),
    ("backward", 256, FULL, Features(), "bwd_sm90_wide", "bwd_sm80"),
    ("backward", 512, FULL, Features(), "bwd_sm80_wide", "bwd_sm80_wide"),
    ("backward", 48, (1, 6, 6, 577, 577), Features(), "bwd_sm90", "bwd_sm80"),
    ("backward", 128, (4, 10, 10, 256, 256), Features(), "bwd_sm90", "bwd_sm80"),
    ("backward", 64, (1, 16, 16, 384, 384), Features(has_bool_mask=True), "bwd_sm90", "bwd_sm80"),
    ("backward", 64, (2, 12, 12, 197, 197), Features(), "bwd_sm90", "bwd_sm80"),
    ("backward", 32, (64, 6, 6, 49, 49), Features(bias_dtype="bfloat16"), "bwd_sm90", "bwd_sm80_wide"),
    ("backward", 256, (1, 1, 1, 16, 16), Features(has_band=True), "bwd_sm90_wide", "bwd_sm80"),
    ("backward", 64, (1, 2, 2, 64, 64), Features(is_aligned16=False), "bwd_sm80_wide", "bwd_sm80_wide"),
    ("forward", 48, (1, 6, 6, 577, 577), Features(), "fwd_sm90", "fwd_sm80"),
]


@pytest.mark.parametrize(("op", "dim", "sizes", "features", "on_hopper", "on_ampere"), TAKEN)
def test_what_calls_take(op, dim, sizes, features, on_hopper, on_ampere):
    """By the times of large calls in speeds.csv, an option that was not measured included."""
    shape, grads = Shape(*sizes, dim, dim), ("dq", "dk", "dv") if op == "backward" else None
    classes = tuple((one, one.of(shape, 132)) for one in families.length_classes(op))
    for number, expected in ((90, on_hopper), (80, on_ampere)):
        key = PlanKey("bfloat16", "bfloat16", dim, dim, features, ARCHS[number], grads, classes=classes)
        assert families.select(key).name == expected


MMA_SYNC = {"forward": ("fwd_sm80", "fwd_sm80_wide"), "backward": ("bwd_sm80", "bwd_sm80_wide")}


@pytest.mark.parametrize("op", speeds.OPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_times_of_wgmma_say_nothing_of_a_gpu_without_it(op, head_dim):
    """A plain call of Triton is taken to last at least as long there as one by mma.sync; an option costs what it
    costs."""
    hopper = speeds.Kind("sm_90", op, "bfloat16", head_dim, (), is_large=True)
    for arch in ("sm_80", "sm_120"):
        plain = hopper._replace(arch=arch)
        ours = min(us for name in MMA_SYNC[op] if (us := families.provider_us(name, plain)) is not None)
        assert families.provider_us("triton", plain) == pytest.approx(max(ours, families.provider_us("triton", hopper)))
        assert families.provider_us("triton", plain) >= ours
        cost, cost_on_hopper = (
            families.provider_us("triton", kind._replace(options=("mask",), head_dim=128))
            / families.provider_us("triton", kind._replace(head_dim=128))
            for kind in (plain, hopper)
        )
        assert cost == pytest.approx(cost_on_hopper)
        assert speeds.best_known(plain)[0] not in speeds.BY_WGMMA
    for arch, dtype in (("sm_100", "bfloat16"), ("sm_80", "float32")):  # tcgen05; no tensor cores
        kind = hopper._replace(arch=arch, dtype=dtype)
        assert families.provider_us("triton", kind) == families.provider_us("triton", kind._replace(arch="sm_90"))


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        (S512, 192),  # the last of three tiles has 128 queries
        (S1024, 192),
        ((1, 16, 16, 512, 512), 128),  # fewer tiles than multiprocessors
        ((32, 16, 16, 256, 256), 128),  # a third of the rows would have no query
        (FULL, 192),
    ],
)
@pytest.mark.parametrize("dim", [96, 128])
def test_the_tile_of_a_full_forward(dim, sizes, rows):
    shape = Shape(*sizes, dim, dim)
    classes = tuple((one, one.of(shape, 132)) for one in families.length_classes("forward"))
    key = PlanKey("bfloat16", "bfloat16", dim, dim, Features(), HOPPER, classes=classes)
    family = families.select(key)
    assert (family.name, family.select("fwd_sm90", key).owned) == ("fwd_sm90", rows)


@pytest.mark.parametrize("has_band", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_a_deterministic_call_takes_the_same_tile_in_every_batch(dim, has_band):
    """In another tile the sums of a row would have other bits."""
    for seqlen in (1, 49, 197, 512, 1024, 4096):
        taken = set()
        for batch in (1, 2, 8, 64, 512):
            shape = Shape(batch, 12, 12, seqlen, max(seqlen, 49), dim, dim)
            classes = tuple((one, one.of(shape, 132)) for one in families.length_classes("forward"))
            key = PlanKey("bfloat16", "bfloat16", dim, dim, Features(has_band), HOPPER, classes=classes)
            key = dataclasses.replace(key, is_deterministic=True)
            family = families.select(key)
            taken.add((family.name, family.select(family.kernels[0], key).label))
        assert len(taken) == 1


@pytest.mark.parametrize("number", [80, 86, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [8, 32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("op", speeds.OPS)
def test_small_calls_take_tensor_cores_too(op, dim, dtype, number):
    """FFMA serves no 16-bit call that a kernel by tensor cores takes, whatever its options and however few its
    scores."""
    options = [item.name for item in dataclasses.fields(Features) if item.name not in ("is_aligned16", "bias_dtype")]
    some = [Features(**{name: True}) for name in options]
    some += [Features(), Features(is_aligned16=False), Features(bias_dtype=dtype), Features(bias_dtype="float32")]
    grads = (("dq", "dk", "dv"), ("dq", "dk", "dv", "dbias")) if op == "backward" else (None,)
    for features, wanted, is_deterministic in itertools.product(some, grads, (False, True)):
        key = PlanKey(dtype, dtype, dim, dim, features, ARCHS[number], wanted, is_deterministic=is_deterministic)
        small = dataclasses.replace(key, classes=((speeds.SIZE, 0),))
        refusals, family = families.refusals(small), families.fastest(small)
        by_tensor_cores = [name for name, reason in refusals.items() if reason is None and "simt" not in name]
        assert family is None or not by_tensor_cores or family.name in by_tensor_cores


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_fastest_without_a_drawback_is_taken(op: str) -> None:
    """As if every family were asked."""
    grads = ("dq", "dk", "dv") if op == "backward" else None
    some = (Features(), Features(has_band=True), Features(bias_dtype="float32"), Features(is_aligned16=False))
    sizes = [((speeds.SIZE, value),) for value in speeds.SIZE.values]
    chosen = set()
    for dtype, dim, features, number, classes in itertools.product(
        ("float32", "float16", "bfloat16"), (32, 64, 128, 200, 512), some, sorted(ARCHS), sizes
    ):
        key = PlanKey(dtype, dtype, dim, dim, features, ARCHS[number], grads, classes=classes)
        taking = [families.find(name) for name, reason in families.refusals(key).items() if reason is None]
        kind = families.kind_of(key)._replace(is_large=True)
        times = [families.provider_us(family.timed_as(key), kind) for family in taking]
        costs = [
            (family.drawback(key) is not None, math.inf if us is None else us)
            for family, us in zip(taking, times, strict=True)
        ]
        expected = taking[costs.index(min(costs))] if taking else None
        assert families.fastest(key) is expected
        chosen.add(None if expected is None else expected.name)
    assert len(chosen) > 4


@pytest.mark.parametrize("family", families.all_families(), ids=lambda family: family.name)
@pytest.mark.parametrize(("changes", "words"), [({"k_dtype": "float8_e4m3fn"}, "k"), ({"v_dtype": "float32"}, "v")])
def test_every_family_refuses_dtypes_that_differ(family: families.Family, changes: dict[str, str], words: str) -> None:
    dtype, dims = "float16" if "float16" in family.dtypes else family.dtypes[0], family.head_dims[0]
    changes = {name: "float16" if value == dtype else value for name, value in changes.items()}
    arch = next(arch for arch in ARCHS.values() if family.runs_on(arch))
    grads = ("dq", "dk", "dv") if family.op == "backward" else None
    key = PlanKey(dtype, dtype, *dims, Features(), arch, grads, **changes)
    assert family.refuse(key) == f"{words} in another dtype than q"
    with pytest.raises(Unsupported, match=f"'{family.name}' refuses: {words} in another dtype than q"):
        families.select(key)


def test_small_float32_calls_take_few_launches():
    for grads, expected in ((None, "fwd_simt"), (("dq", "dk", "dv"), "bwd_simt")):
        key = PlanKey("float32", "float32", 128, 128, Features(), HOPPER, grads, classes=((speeds.SIZE, 0),))
        assert families.select(key).name == expected


def test_an_option_that_was_not_measured_costs_what_it_costs_the_others():
    plain = speeds.Kind("sm_90", "forward", "bfloat16", 128, (), is_large=True)
    dropout = plain._replace(options=("dropout",))
    measured = {
        name: families.provider_us(name, dropout) / families.provider_us(name, plain) for name in ("fwd_sm90", "triton")
    }
    estimated = families.provider_us("fwd_sm80", dropout) / families.provider_us("fwd_sm80", plain)
    assert estimated >= max(measured.values()) > 1.0
