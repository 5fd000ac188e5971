"""Defaults that the command line shows in its help, which it gives without importing torch."""

LADDER_HEAD_DIM = 64
RESULTS = "flashtile-results"  # folder of a user's own runs, below the current one
PROJECT_RESULTS = "results"  # those of the project, which the docs show; written where --out names them
PROFILE_PROVIDERS = "cuda,sdpa-flash,sdpa-cudnn"
