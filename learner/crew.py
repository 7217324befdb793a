"""Threads that share the blocks of one job: whoever is free takes the next one, results are taken in order.

    job of 5 blocks    thread 0   [0] [2] [3]        a thread that the system holds up takes fewer
                       thread 1   [1]    [4]
    results            0 1 2 3 4                     always in this order, whoever computed them

So a result that is summed up block by block is the same, bit for bit, for any number of threads. Nothing waits inside
a job but its end. The calling thread takes part; torch works on one thread inside each block, and gives up the
interpreter while it computes.

Who calls: the epochs loop. What must never happen: a block that is taken twice, a result out of order, a thread that
outlives its crew, an error of a block that is not raised by the caller. Left to others: what a block is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

R = TypeVar("R")


class _Job(Generic[R]):
    """Blocks 0 .. blocks - 1, each computed once by some thread; `take` is called with each result, in order."""

    def __init__(self, blocks: int, compute: Callable[[int], R], take: Callable[[int, R], None]) -> None:
        self._blocks = blocks
        self._compute = compute
        self._take = take
        self._next = count()
        self._lock = threading.Lock()
        self._waiting: dict[int, R] = {}
        self._taken = 0
        self.error: BaseException | None = None
        self.over = threading.Event()

    def help(self) -> None:
        """Computes blocks until none is left to begin."""
        try:
            while self.error is None and (block := next(self._next)) < self._blocks:
                self._finish(block, self._compute(block))
        except BaseException as error:  # of whatever kind: the caller raises it
            self.error = self.error or error
            self.over.set()

    def _finish(self, block: int, result: R) -> None:
        with self._lock:
            self._waiting[block] = result
            while self._taken in self._waiting:
                self._take(self._taken, self._waiting.pop(self._taken))
                self._taken += 1
            if self._taken == self._blocks:
                self.over.set()


class Crew:
    """A number of threads, the caller's own included, for the time of a `with` block."""

    def __init__(self, threads: int) -> None:
        self._jobs: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._helpers = [
            threading.Thread(target=self._help, name=f"learner-block-{index}", daemon=True)
            for index in range(1, threads)
        ]

    def run(self, blocks: int, compute: Callable[[int], R], take: Callable[[int, R], None]) -> None:
        """Calls compute(block) once for each block, on any thread, and take(block, result) in the order of blocks.

        Returns when all are taken. Raises what a block raised.
        """
        if blocks <= 1 or not self._helpers:
            for block in range(blocks):
                take(block, compute(block))
            return
        job = _Job(blocks, compute, take)
        for _ in self._helpers[: blocks - 1]:
            self._jobs.put(job)  # type: ignore[arg-type]
        job.help()
        job.over.wait()  # no deadline: what is under way elsewhere is as long as what was computed here
        if job.error is not None:
            raise job.error

    def _help(self) -> None:
        torch.set_num_threads(1)  # a setting of each thread
        while (job := self._jobs.get()) is not None:
            job.help()

    def __enter__(self) -> Self:
        for helper in self._helpers:
            helper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._helpers:
            self._jobs.put(None)
        for helper in self._helpers:
            helper.join()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread in this thread, whatever was set before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
