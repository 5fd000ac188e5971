"""Facts that decide the kernels of a call: its features, the key of its plan, and how its tensors are laid out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.errors import dtype_name
from flashtile.plans.arch import Arch
from flashtile.plans.length_class import LengthClass
from flashtile.problem import Problem

DTYPES = ("float32", "float16", "bfloat16")  # that some family takes
CPP_TYPES = {"float32": "float", "float16": "half_t", "bfloat16": "bf16_t"}
GRADS = ("dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Features:
    """The options of a call as far as they change the code. A default costs nothing."""

    has_band: bool = False
    has_bool_mask: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    bias_dtype: str | None = None
    has_dropout: bool = False
    has_lengths: bool = False
    is_paged: bool = False
    is_aligned16: bool = True  # every row starts on a 16-byte boundary and is a multiple of 16 bytes long

    @property
    def num_score_options(self) -> int:
        """Returns how many options change scores or probabilities, each of which takes registers in the inner loop. A
        band does not count: the masked loop alone knows it."""
        has_bias = self.bias_dtype is not None
        return sum((self.has_bool_mask, self.has_softcap, self.has_alibi, has_bias, self.has_dropout, self.is_paged))

    @property
    def num_options(self) -> int:
        """Returns the number of score options, one more with sequence lengths."""
        return self.num_score_options + self.has_lengths

    def policies(self) -> list[str]:
        """The C++ policies, in the order of the kernels' template parameters."""
        bias = "NoBias" if self.bias_dtype is None else CPP_TYPES[self.bias_dtype]
        return [
            f"Mask<{cpp_bool(self.has_band)}, {cpp_bool(self.has_bool_mask)}>",
            f"ScoreMod<{cpp_bool(self.has_softcap)}, {cpp_bool(self.has_alibi)}, {bias}>",
            f"Dropout<{cpp_bool(self.has_dropout)}>",
            f"SeqInfo<{cpp_bool(self.has_lengths)}>",
            f"KvSource<{cpp_bool(self.is_paged)}>",
            f"Load<{cpp_bool(self.is_aligned16)}>",
        ]


@functools.lru_cache(maxsize=1024)
def features_of(problem: Problem) -> Features:
    return Features(
        has_band=problem.window != (-1, -1),
        has_bool_mask=problem.has_mask,
        has_softcap=problem.softcap > 0.0,
        has_alibi=problem.has_alibi,
        bias_dtype=None if problem.bias_dtype is None else dtype_name(problem.bias_dtype),
        has_dropout=problem.dropout_p > 0.0,
        has_lengths=problem.is_varlen or problem.has_key_lengths,
        is_paged=problem.page_size > 0,
        is_aligned16=problem.is_aligned16,
    )


def cpp_bool(flag: bool) -> str:
    return "true" if flag else "false"


@dataclass(frozen=True)
class PlanKey:
    """Key of a pass: all that decides its kernels. It holds no length, only the classes of lengths that families look
    at."""

    dtype: str  # q's
    out_dtype: str
    head_dim: int
    head_dim_v: int
    features: Features
    arch: Arch
    grads: tuple[str, ...] | None = None  # of a backward pass: those of GRADS that are wanted
    is_scale_positive: bool = True
    rows_disjoint: bool = True  # no two rows of q, k or v overlap in memory
    heads_disjoint: bool = True  # no two heads of q share memory
    classes: tuple[tuple[LengthClass, int], ...] = ()
    is_deterministic: bool = False  # results have the same bits in every run
    matmul_precision: str = "highest"  # of float32 products, as torch.set_float32_matmul_precision says
    k_dtype: str | None = None  # None: q's
    v_dtype: str | None = None
    is_v_in_k: bool = False  # each row of v is the beginning of the same row of k in memory
    copies_rows: bool = False  # rows that are not aligned are copied; `features` and head dims are those of the copies

    @property
    def mixed(self) -> tuple[str, ...]:
        """Returns those of k and v whose dtype is not q's."""
        dtypes = {"k": self.k_dtype, "v": self.v_dtype}
        return tuple(name for name, dtype in dtypes.items() if dtype not in (None, self.dtype))

    @property
    def op(self) -> str:
        return "forward" if self.grads is None else "backward"

    def length(self, which: LengthClass) -> int:
        """The value of a length class; that of a long call where the key does not say."""
        for known, value in self.classes:
            if known == which:
                return value
        return which.values[0]


class CallLayout(NamedTuple):
    """Layout of the tensors of a call, and which of them there are: all that decides the patch table."""

    layout: str
    tensors: tuple[str, ...]  # the optional ones
    has_max_seqlen_q: bool = False
    has_max_seqlen_k: bool = False
    is_top_left: bool = False

    @property
    def has_lengths(self) -> bool:
        return any(name in self.tensors for name in ("cu_seqlens_q", "seqused_k", "leftpad_k"))

    @property
    def has_packed_queries(self) -> bool:
        return "cu_seqlens_q" in self.tensors

    @property
    def has_packed_keys(self) -> bool:
        return "cu_seqlens_k" in self.tensors and "block_table" not in self.tensors

    @property
    def axes(self) -> tuple[int, int]:
        """(head, row), from the end."""
        return (-2, -3) if self.layout == "bshd" else (-3, -2)
