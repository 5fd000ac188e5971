"""flash_attn.ops is not served: importing it says so. Packages that can do without it catch the ImportError."""

raise ImportError(
    "flash_attn.ops: flashtile has the attention of flash_attn, not its fused losses, norms and layers. "
    "verl, which asks for flash_attn.ops.triton.cross_entropy, computes the loss by itself."
)
