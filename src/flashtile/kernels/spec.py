"""What a kernel is: a row of the table (family, pass, dtype, head dim, tile) and the features it is compiled with."""

from __future__ import annotations

from dataclasses import dataclass

CPP_TYPES = {"float32": "float", "float16": "half_t", "bfloat16": "bf16_t"}
_FLOAT = 4


@dataclass(frozen=True)
class Features:
    """The options of a call as far as they change the code. A False costs nothing."""

    has_band: bool = False
    has_bool_mask: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    bias_dtype: str | None = None
    has_dropout: bool = False
    has_lengths: bool = False
    is_paged: bool = False
    is_wide: bool = True

    @property
    def num_options(self) -> int:
        """How many options there are that take registers in the inner loop. A band, which the masked loop alone knows, is none."""
        return sum(
            (
                self.has_bool_mask,
                self.has_softcap,
                self.has_alibi,
                self.bias_dtype is not None,
                self.has_dropout,
                self.has_lengths,
                self.is_paged,
            )
        )

    def policies(self) -> list[str]:
        """The C++ policies, in the order of the kernels' template parameters."""
        bias = "NoBias" if self.bias_dtype is None else CPP_TYPES[self.bias_dtype]
        return [
            f"Mask<{_cpp(self.has_band)}, {_cpp(self.has_bool_mask)}>",
            f"ScoreMod<{_cpp(self.has_softcap)}, {_cpp(self.has_alibi)}, {bias}>",
            f"Dropout<{_cpp(self.has_dropout)}>",
            f"SeqInfo<{_cpp(self.has_lengths)}>",
            f"KvSource<{_cpp(self.is_paged)}>",
            f"Load<{_cpp(self.is_wide)}>",
        ]


@dataclass(frozen=True)
class Row:
    """One kernel of the simt family for one dtype, padded head dim and tile."""

    kernel: str  # with _kernel, the function
    dtype: str  # of q, k and v
    out_dtype: str
    head_dim: int
    block_m: int  # rows that a block owns: queries, or keys in bwd_dkdv_simt
    block_n: int  # rows that stream by
    num_warps: int

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def thread_scores(self) -> int:
        """Scores that one thread holds."""
        return self.block_m * self.block_n // self.num_threads

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.block_m}, {self.block_n}, {self.num_warps}"
        return f"SimtConfig<{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}, {sizes}>"

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's storage struct; the generated unit asserts it."""
        own, streaming = _TILES[self.kernel]
        rows = own * self.block_m + streaming * self.block_n
        return _FLOAT * (rows * (self.head_dim + 4) + self.block_m * (self.block_n + 8))

    @property
    def header(self) -> str:
        return "fwd_simt" if self.kernel == "fwd_simt" else "bwd_simt"


@dataclass(frozen=True)
class Sm90Row:
    """The Hopper forward for one dtype, two padded head dims and one tile."""

    dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int  # queries, 64 for each consumer warpgroup
    block_n: int  # keys
    num_stages: int  # of K and of V
    takes_turns: bool
    scales_lazily: bool
    stores_p: bool = False  # in shared memory, not in registers
    packs_heads: bool = False

    kernel = header = "fwd_sm90"

    @property
    def num_threads(self) -> int:
        return 2 * self.block_m + 128

    def queries(self, packed_heads: int) -> int:
        """Queries of a tile that holds so many heads."""
        return self.block_m // 64 * (64 // packed_heads)

    def stores_by_tma(self, features: Features) -> bool:
        """O leaves by the copy engine, and the parameters hold a map of it; the generated unit asserts it."""
        return self.stores_p and not features.has_lengths and self.out_dtype == self.dtype

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.head_dim_v}, {self.block_m}, {self.block_n}, {self.num_stages}"
        flags = f"{_cpp(self.takes_turns)}, {_cpp(self.scales_lazily)}, {_cpp(self.stores_p)}, {_cpp(self.packs_heads)}"
        return f"Sm90Config<{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}, {sizes}, {flags}>"

    @property
    def shared_bytes(self) -> int:
        """The size of the kernel's storage struct; the generated unit asserts it."""
        slabs, slabs_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        tiles = 128 * (slabs * self.block_m + self.num_stages * self.block_n * (slabs + slabs_v))
        consumers = self.block_m // 64
        tiles += 128 * self.block_m * -(-self.block_n // 64) if self.stores_p else 16 * self.block_m // 64
        barriers, scheduler = 16 * consumers + 32 * self.num_stages, 16
        work_items = _SM90_WORK_ITEMS * (_SM90_QUERY_TILE_BYTES + -(-(12 * consumers + 8) // 8) * 8)
        return -(-(tiles + barriers + scheduler + work_items) // 1024) * 1024


_SM90_WORK_ITEMS, _SM90_QUERY_TILE_BYTES = 3, 72  # WorkItemRing, QueryTile (attn/work_item.cuh)


# Tiles of the head dimension in shared memory: of the block's own rows, and of the streaming rows. Scores come on top.
_TILES = {"fwd_simt": (1, 2), "bwd_dq_simt": (2, 2), "bwd_dkdv_simt": (2, 2), "bwd_dbias_simt": (2, 2)}


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"
