"""Threads that work on pieces: few of them under way at a time, and what comes of them is taken in one place."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class WorkingThreads:
    """Threads that work on blocks, of which at most two for each thread are under way; with one, the caller's does the work.

    What comes of a block is taken by the caller's thread alone.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads) if threads > 1 else None
        self._limit = 2 * threads
        self._pending: dict[Future[Any], Callable[[Any], None]] = {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, work: Callable[[T], R], task: T, take: Callable[[R], None], here: bool) -> None:
        """Does a task: at once if `here`, or as soon as a thread is free."""
        if self._pool is None or here:
            take(work(task))
        else:
            self._wait(self._limit - 1)
            self._pending[self._pool.submit(work, task)] = take

    def finish(self) -> None:
        """Waits for all blocks that are under way; raises what went wrong with one of them."""
        self._wait(0)

    def abandon(self) -> None:
        """Waits until no thread writes any more; what has not begun never does."""
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._pending.clear()

    def _wait(self, limit: int) -> None:
        while len(self._pending) > limit:
            for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
                self._pending.pop(future)(future.result())
