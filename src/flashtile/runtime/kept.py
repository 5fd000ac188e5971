"""Zeros in device memory that launches leave as they find them: flags by which the blocks of one launch meet. They are
zeroed once, so no launch needs a memset before it.

Two launches that run side by side must not share them. Launches of one stream run one after another: each stream has
zeros of its own. What a stream captures may run later beside the stream: each capture has its own, too, and replays of
one graph run one after another, on whatever streams. The memory is never given to anybody else: it lives as long as the
process, one small region for each stream and each capture.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from flashtile.runtime import driver

_LEAST_BYTES = 4096


class Owner(NamedTuple):
    """Owner of kept memory: launches of one owner run one after another."""

    device_index: int
    stream: int
    capture: int  # runtime/driver.py: stream_and_capture


class KeptZeros(NamedTuple):
    owner: Owner
    address: int
    num_bytes: int


_regions: dict[Owner, KeptZeros] = {}
_lock = threading.Lock()


def zeros(device_index: int, stream: int, num_bytes: int) -> KeptZeros:
    """Returns the zeros of a stream of the current device, at least as many. May be called while the stream is
    captured."""
    owner = Owner(device_index, *driver.stream_and_capture(stream))
    with _lock:
        found = _regions.get(owner)
        if found is None or found.num_bytes < num_bytes:
            # Launches that are queued may still use a smaller region: it stays
            num_bytes = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            address = driver.allocate_zeros(num_bytes, is_captured=owner.capture != 0)
            found = _regions[owner] = KeptZeros(owner, address, num_bytes)
    return found


def clear() -> None:
    """Forgets all regions, for tests."""
    _regions.clear()
