"""Jobs for the compiler: the kernels that families launch, without options, with few, and with options in pairs.

It comes from the families, so a new row, kernel or step is covered as soon as a family launches it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashtile import families
from flashtile.families import Family
from flashtile.families.steps import append_kv
from flashtile.plans.arch import Arch
from flashtile.plans.length_class import LengthClass
from flashtile.plans.plan import Step
from flashtile.plans.spec import DTYPES, CallLayout, Features, PlanKey

_LAYOUT = CallLayout("bhsd", ())  # kernels do not depend on it


@dataclass(frozen=True)
class Job:
    """One kernel to compile: a step of a family's launch, and the key that led to it."""

    step: Step
    key: PlanKey
    family: Family | None = None  # None: no family's

    @property
    def is_chosen(self) -> bool:
        """True if some call with the features of this key takes the family."""
        return self.family is None or self.family in _chosen_families(dataclasses.replace(self.key, classes=()))

    @property
    def kernel(self) -> str:
        return self.step.name.removesuffix("_kernel")

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.step.unit, self.step.entry, self.key.arch.name

    @property
    def has_tile(self) -> bool:
        return self.step.shared_bytes > 0

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.step.owned, self.step.streamed, self.step.num_threads

    @property
    def features(self) -> str:
        """The features that are not as in the plain variant, in words."""
        pairs = ((field, getattr(self.key.features, field.name)) for field in dataclasses.fields(Features))
        words = [
            field.name if value is True else f"{field.name}={value}" for field, value in pairs if value != field.default
        ]
        return ", ".join([*words, *([f"out={self.key.out_dtype}"] if self.key.out_dtype != self.key.dtype else [])])

    def __str__(self) -> str:
        tile = f" {self.step.owned}x{self.step.streamed}" if self.has_tile else ""
        what = f"{self.kernel} {self.key.dtype} head dim {self.key.head_dim}{tile} for {self.key.arch.name}"
        return f"{what} ({self.features})" if self.features else what


def head_dims() -> tuple[int, ...]:
    """Every padded head dim of every family."""
    return tuple(sorted({dim for family in families.all_families() for pair in family.head_dims for dim in pair}))


def plain_jobs(
    archs: Iterable[Arch],
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[int] | None = None,
    has_band: bool = False,
) -> list[Job]:
    """Every kernel without any option, or causal, for every class of lengths. One that exists only with an option comes
    with that option alone."""
    return _once(_plain_jobs(archs, dtypes, dims, has_band))


def _plain_jobs(
    archs: Iterable[Arch], dtypes: Sequence[str], dims: Sequence[int] | None, has_band: bool, has_padded: bool = False
) -> Iterator[Job]:
    """Yields plain_jobs, with a kernel that several families or keys share once for each. has_padded: also as calls
    take them whose head dims are padded the most."""
    for arch in archs:
        for family, dtype, pair in _tables(arch, dtypes, dims):
            for grads in _grad_sets(family):
                bias = dtype if grads == ("dbias",) else None
                for head_dim, head_dim_v in {pair, _least_head_dims(family, pair) if has_padded else pair}:
                    features = Features(has_band=has_band, bias_dtype=bias)
                    key = PlanKey(dtype, dtype, head_dim, head_dim_v, features, arch, grads)
                    yield from _jobs(family, keys_of_all_lengths(family, key))
        for dtype in dtypes:
            key = PlanKey(dtype, dtype, 0, 0, Features(), arch)
            for angle_dtype in dict.fromkeys((dtype, "float32")):
                for is_aligned16 in (False, True):
                    yield Job(append_kv.kernel(dtype, angle_dtype, is_aligned16), key)


def embedded_jobs(
    archs: Sequence[Arch], dtypes: Sequence[str] = DTYPES, dims: Sequence[int] | None = None
) -> list[Job]:
    """The kernels that come with a package: those without an option, and causal ones, of the families that calls
    take."""
    jobs = (job for has_band in (False, True) for job in _plain_jobs(archs, dtypes, dims, has_band, has_padded=True))
    return _once(job for job in jobs if job.is_chosen)


def _chosen_families(key: PlanKey) -> frozenset[Family]:
    """Returns the families that calls of any length take, deterministic or not."""
    return _chosen_of(key, tuple(families.all_families(key.op)), families.forced_names())


@functools.lru_cache(maxsize=256)
def _chosen_of(key: PlanKey, known: tuple[Family, ...], forced: tuple[str, ...]) -> frozenset[Family]:
    """Returns what _chosen_families does; the choice depends on the families that there are and on those that are
    forced."""
    keys = (dataclasses.replace(key, is_deterministic=is_deterministic) for is_deterministic in (False, True))
    return frozenset(families.select(one) for key in keys for one in _asked_lengths(key, families.select))


@dataclass(frozen=True)
class _PartialKey(PlanKey):
    """A key that does not guess a length class it was not given."""

    def length(self, which: LengthClass) -> int:
        if which not in dict(self.classes):
            raise _UnknownLengthError(which)
        return super().length(which)


class _UnknownLengthError(Exception):
    def __init__(self, which: LengthClass) -> None:
        super().__init__(which)
        self.which = which


def _asked_lengths(key: PlanKey, function: Callable[[PlanKey], object]) -> Iterator[PlanKey]:
    """Keys with every value of every length class that the function asks them for. Of two classes of which the second
    is asked for under some values of the first alone, not all pairs come."""
    fields = {field.name: getattr(key, field.name) for field in dataclasses.fields(key)}
    left: list[tuple[tuple[LengthClass, int], ...]] = [()]
    while left:
        fields["classes"] = left.pop()
        try:
            function(_PartialKey(**fields))
        except _UnknownLengthError as missing:
            left += [(*fields["classes"], (missing.which, value)) for value in missing.which.values]
        else:
            yield PlanKey(**fields)


def covering_jobs(
    archs: Sequence[Arch],
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[int] | None = None,
    crosses_head_dims: bool = True,
) -> list[Job]:
    """Variants of each kernel in which every two values of its options, dtype and length classes meet; its head dims
    too, or else they take turns."""
    jobs: list[Job] = []
    for arch, family in itertools.product(archs, families.all_families()):
        own_dtypes = [dtype for dtype in dtypes if dtype in family.dtypes]
        pairs = [pair for pair in family.head_dims if dims is None or max(pair) in dims]
        if not family.runs_on(arch) or not own_dtypes or not pairs:
            continue
        for grads in _grad_sets(family):
            factors: dict[Any, Sequence[Any]] = {"head_dim": pairs} if crosses_head_dims else {}
            factors |= {"dtype": own_dtypes, "out_dtype": ("own", "float32")} | _feature_values(family, grads)
            factors |= {which: which.values for which in family.length_classes}
            for choice, turn in zip(pairwise(factors), itertools.cycle(pairs), strict=False):
                jobs += _jobs(family, [_chosen_key(family, choice, turn, arch, grads)])
        # Kernels that take no option
        if set(family.kernels) - {job.kernel for job in jobs}:
            dtype, (head_dim, head_dim_v) = own_dtypes[0], pairs[0]
            key = PlanKey(dtype, dtype, head_dim, head_dim_v, Features(), arch, _grad_sets(family)[0])
            jobs += _jobs(family, keys_of_all_lengths(family, key))
    return _once(jobs)


def edge_jobs(archs: Iterable[Arch], dtypes: Sequence[str] = DTYPES, dims: Sequence[int] | None = None) -> list[Job]:
    """Variants with few options, of the tiles that take only so many: these are closest to a spill. With many, the tile
    is another."""
    found = []
    for arch in archs:
        for family, dtype, pair in _tables(arch, dtypes, dims):
            for grads in _grad_sets(family):
                base = PlanKey(dtype, dtype, *pair, Features(), arch, grads)
                # A band, lengths and narrow loads cost no registers of the table's kind: every tile takes them
                wanted = {"has_band": True, "has_lengths": True, "is_aligned16": False}
                plain = Features(
                    bias_dtype=dtype if grads == ("dbias",) else None,
                    **{name: value for name, value in wanted.items() if name in family.features},
                )
                wide = dataclasses.replace(plain, is_aligned16=True)
                switches = [
                    field.name
                    for field in dataclasses.fields(Features)
                    if field.default is False and field.name in family.features and not getattr(plain, field.name)
                ]
                features = [plain, wide]
                features += [dataclasses.replace(wide, has_lengths=False), dataclasses.replace(wide, has_band=False)]
                features += [Features(**(dataclasses.asdict(plain) | {name: True})) for name in switches]
                features += [dataclasses.replace(plain, bias_dtype=dtype)]
                all_on = dict.fromkeys(switches, True) | {"bias_dtype": dtype}
                most = Features(**(dataclasses.asdict(plain) | all_on))
                tiles = {job.kernel: job.tile for job in _jobs(family, [dataclasses.replace(base, features=most)])}
                jobs = _jobs(family, [dataclasses.replace(base, features=some) for some in features])
                found += [job for job in jobs if job.has_tile and job.tile != tiles.get(job.kernel)]
    return _once(found)


def _tables(
    arch: Arch, dtypes: Sequence[str], dims: Sequence[int] | None
) -> Iterator[tuple[Family, str, tuple[int, int]]]:
    """Every family that runs on the architecture, with each of its dtypes and pairs of head dims."""
    for family in families.all_families():
        if family.runs_on(arch):
            for dtype, pair in itertools.product(family.dtypes, family.head_dims):
                if dtype in dtypes and (dims is None or max(pair) in dims):
                    yield family, dtype, pair


def _least_head_dims(family: Family, pair: tuple[int, int]) -> tuple[int, int]:
    """The smallest head dims that are padded to these."""
    least = tuple(1 + max((dims[i] for dims in family.head_dims if dims[i] < pair[i]), default=0) for i in (0, 1))
    return (least[0], least[1]) if family.padded(*least) == pair else pair


def _grad_sets(family: Family) -> tuple[tuple[str, ...] | None, ...]:
    return family.grad_sets or (None,)


def keys_of_all_lengths(family: Family, key: PlanKey) -> list[PlanKey]:
    """The keys of calls that differ in the classes of their lengths alone, as far as the family looks at them."""
    return list(_asked_lengths(key, lambda some: family.refuse(some) or family.launch(some, _LAYOUT)))


def _feature_values(family: Family, grads: tuple[str, ...] | None) -> dict[str, Sequence[Any]]:
    """The values that each feature of the family may have."""
    values: dict[str, Sequence[Any]] = {}
    for field in dataclasses.fields(Features):
        if field.name not in family.features:
            values[field.name] = (field.default,)
        elif field.name == "bias_dtype":
            values[field.name] = ("own", "float32") if grads == ("dbias",) else (None, "own", "float32")
        else:
            values[field.name] = (False, True)
    return values


def _chosen_key(
    family: Family, choice: dict[Any, Any], pair: tuple[int, int], arch: Arch, grads: tuple[str, ...] | None
) -> PlanKey:
    dtype, out_dtype, pair = choice.pop("dtype"), choice.pop("out_dtype"), choice.pop("head_dim", pair)
    classes = tuple((which, choice.pop(which)) for which in family.length_classes)
    choice["bias_dtype"] = dtype if choice["bias_dtype"] == "own" else choice["bias_dtype"]
    out_dtype = dtype if out_dtype == "own" else out_dtype
    return PlanKey(dtype, out_dtype, pair[0], pair[1], Features(**choice), arch, grads, classes=classes)


def pairwise(factors: Mapping[Any, Sequence[Any]]) -> list[dict[Any, Any]]:
    """A short list of choices in which every two values of two factors meet. The same factors always give the same
    list."""
    names = list(factors)
    missing = {
        pair: None
        for one, other in itertools.combinations(names, 2)
        for pair in itertools.product(
            ((one, value) for value in factors[one]), ((other, value) for value in factors[other])
        )
    }
    chosen: list[dict[Any, Any]] = []
    while missing:
        choice = dict(next(iter(missing)))
        for name in names:
            if name not in choice:
                # The value that brings most new pairs; of equals, the one taken least so far
                ranks = [
                    (
                        len(missing.keys() & _pairs(names, {**choice, name: value}).keys()),
                        -sum(old[name] == value for old in chosen),
                    )
                    for value in factors[name]
                ]
                choice[name] = factors[name][ranks.index(max(ranks))]
        for pair in _pairs(names, choice):
            missing.pop(pair, None)
        chosen.append({name: choice[name] for name in names})
    return chosen


def _pairs(names: Sequence[Any], choice: Mapping[Any, Any]) -> dict[Any, None]:
    return dict.fromkeys(itertools.combinations([(name, choice[name]) for name in names if name in choice], 2))


def _jobs(family: Family, keys: Iterable[PlanKey]) -> list[Job]:
    """The kernels that the family launches for the keys it takes, once for each key."""
    taken = (key for key in keys if family.refuse(key) is None)
    return [Job(step, key, family) for key in taken for step in family.launch(key, _LAYOUT).steps]


def _once(jobs: Iterable[Job]) -> list[Job]:
    found: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        found.setdefault(job.identity, job)
    return list(found.values())
