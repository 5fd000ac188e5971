"""Defaults that the command line shows in its help, which it gives without importing torch."""

LADDER_HEAD_DIM = 64
PROFILE_PROVIDERS = "cuda,sdpa-flash,sdpa-cudnn"
