"""Checks of numbers that several commands take."""

from __future__ import annotations

import os

from flashtile.errors import value_error

_JOBS_PER_CORE = 8


def check_count(option: str, number: int | None, most: int) -> None:
    if number is not None and not 1 <= number <= most:
        raise value_error(option, str(number), f"1 to {most}")


def check_jobs(jobs: int | None) -> None:
    """Refuses more processes than a few for each core, which only take memory."""
    check_count("--jobs", jobs, _JOBS_PER_CORE * (os.cpu_count() or 1))
