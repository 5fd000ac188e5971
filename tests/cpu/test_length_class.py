"""Length classes: the numbers of Python and of C++, over shapes around every threshold."""

from __future__ import annotations

import itertools

import pytest

from flashtile import families
from flashtile.plans.length_class import (
    FewQueries,
    KeySteps,
    LongLengths,
    LongShares,
    ManyKeyTiles,
    ManyRows,
    ManyScores,
    PackedHeads,
    RaggedQueries,
    ShortLengths,
    SmallGrid,
)
from flashtile.problem import Shape
from flashtile.runtime import extension

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason=str(extension.missing()))

CLASSES = (
    *(SmallGrid(rows) for rows in (1, 64)),
    *(FewQueries(64, 2), FewQueries(128, 1), FewQueries(16, 1, is_one_head_tile=True)),
    *(PackedHeads(64, 128), PackedHeads(128, 64)),
    *(RaggedQueries(192, 128, 105), RaggedQueries(256, 64, 100)),
    *(ShortLengths(64, 64), ShortLengths(2**31 - 1, 1)),
    *(ManyRows(64), ManyRows(3)),
    *(KeySteps(208, 512, 1024), KeySteps(4, 4, 4)),
    *(ManyKeyTiles(64, 64, 7 << 28), ManyKeyTiles(64, 17, 1000), ManyKeyTiles(3, 1, 1)),
    *(LongLengths(16, 208), LongLengths(1024, 1), LongShares(16, 64, 208), LongShares(1, 17, 4096)),
)
LENGTHS = (
    1,
    2,
    3,
    15,
    16,
    17,
    63,
    64,
    65,
    127,
    128,
    129,
    191,
    192,
    193,
    256,
    257,
    383,
    384,
    385,
    1000,
    4096,
    2**31 - 1,
)
HEADS = ((1, 1), (4, 4), (4, 1), (12, 4), (64, 1), (65, 1), (128, 2), (256, 1))


def test_python_and_cpp_agree() -> None:
    of = extension.executor().length_classes
    sizes = itertools.product(HEADS, (1, 3, 4096), LENGTHS, (1, 16, 17, 208, 209, 512, 513, 1024, 5000), (1, 16, 132))
    for (heads, heads_kv), batch, rows, keys, num_multiprocessors in sizes:
        # Sequences of one length, and packed ones whose means alone are known
        for means in ((rows, keys), (1, 1), (min(rows, 17), min(keys, 100))):
            shape = Shape(batch, heads, heads_kv, rows, keys, 64, 64, *means, means[1])
            serialized = tuple(one.serialized() for one in CLASSES)
            expected = tuple(one.of(shape, num_multiprocessors) for one in CLASSES)
            sizes_of_call = (batch, heads, heads_kv, rows, keys, *means, min(means))
            assert of(serialized, sizes_of_call, num_multiprocessors) == expected, shape


def test_sums_beyond_64_bits() -> None:
    classes = *(ManyScores(log2) for log2 in (1, 10, 20, 31, 40, 62)), ManyKeyTiles(64, 64, 7 << 28)
    for batch, heads, rows, keys in itertools.product(
        (1, 2, 2**20), (1, 8), (1, 2**10, 2**31 - 1), (1, 2**10, 2**31 - 1)
    ):
        shape = Shape(batch, heads, 1, rows, keys, 64, 64)
        found = extension.executor().length_classes(
            tuple(one.serialized() for one in classes), (batch, heads, 1, rows, keys, rows, keys, 1), 132
        )
        assert found == tuple(one.of(shape, 132) for one in classes), shape


@pytest.mark.parametrize(
    "wrong",
    [
        (11, 1, 1, 1),
        (10, 1, 0, 1),
        (-1, 1, 1, 1),
        (0, 0, 0, 0),
        (1, 256, 64, 0),
        (1, 64, 0, 0),
        (2, 64, 0, 5),
        (3, 63, 0, 0),
    ],
)
def test_what_is_no_length_class_is_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no length class"):
        extension.executor().set_gpu(0, 132, (wrong,), ())


def test_those_in_use_fit_a_key() -> None:
    forward, backward = (
        tuple(one.serialized() for one in families.length_classes(op)) for op in ("forward", "backward")
    )
    extension.executor().set_gpu(63, 132, forward, backward)
    with pytest.raises(ValueError, match="at most 24"):
        extension.executor().set_gpu(63, 132, 3 * forward, backward)


def test_classes_of_different_kinds_differ():
    """A plan's key, and what a family asks for, may hold two kinds with the same numbers."""
    one, two = (SmallGrid(22), ManyScores(22)), (PackedHeads(64, 2), FewQueries(64, 2), ShortLengths(64, 2))
    three = (RaggedQueries(64, 32, 100), KeySteps(64, 32, 100))
    assert all(len(set(kinds)) == len(kinds) for kinds in (one, two, three))
