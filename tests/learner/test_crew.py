"""Threads that share blocks: each block once, results in order, errors raised, nobody left behind."""

from __future__ import annotations

import threading

import pytest
import torch

from learner.crew import Crew, one_thread


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7])
def test_every_block_is_computed_once_and_taken_in_order(threads: int, blocks: int) -> None:
    computed: list[int] = []
    taken: list[tuple[int, int]] = []

    def compute(block: int) -> int:
        computed.append(block)
        return block * block

    with Crew(threads) as crew:
        for _ in range(20):
            computed.clear()
            taken.clear()
            crew.run(blocks, compute, lambda block, result: taken.append((block, result)))
            assert sorted(computed) == list(range(blocks))
            assert taken == [(block, block * block) for block in range(blocks)]


def test_a_result_that_is_early_waits_for_those_before_it() -> None:
    second, order = threading.Event(), []

    def compute(block: int) -> int:
        if block == 0:
            assert second.wait(10.0), "block 1 was not begun while block 0 was under way"
        else:
            second.set()
        return block

    with Crew(2) as crew:
        crew.run(2, compute, lambda block, _: order.append(block))
    assert order == [0, 1]


def test_two_threads_really_take_part() -> None:
    both = threading.Barrier(2, timeout=10.0)
    with Crew(2) as crew:
        names: list[str] = []
        crew.run(2, lambda _: (both.wait(), threading.current_thread().name)[1], lambda _, name: names.append(name))
    assert len(set(names)) == 2


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("broken", [0, 3])
def test_what_a_block_raises_is_raised_and_the_next_job_works(threads: int, broken: int) -> None:
    def compute(block: int) -> int:
        if block == broken:
            raise ValueError(f"block {block} broke")
        return block

    with Crew(threads) as crew:
        with pytest.raises(ValueError, match=f"block {broken} broke"):
            crew.run(4, compute, lambda *_: None)
        taken: list[int] = []
        crew.run(3, lambda block: block, lambda _, result: taken.append(result))
    assert taken == [0, 1, 2]


def test_no_thread_outlives_its_crew() -> None:
    before = set(threading.enumerate())
    with Crew(3) as crew:
        crew.run(4, lambda block: block, lambda *_: None)
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) == before


def test_torch_works_on_one_thread_inside_and_as_before_outside() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        both = threading.Barrier(2, timeout=10.0)
        seen: list[int] = []
        with one_thread(), Crew(2) as crew:
            crew.run(2, lambda _: (both.wait(), torch.get_num_threads())[1], lambda _, number: seen.append(number))
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
