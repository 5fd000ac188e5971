"""The tile study: the forward kernels in tiles around those of the table, what each takes and what it reaches
(docs/tiles.md)."""
