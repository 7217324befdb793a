"""The fuzzer in short: hostile messages against decoder and coordinator, and over the socket of a real service."""

from __future__ import annotations

from bench.fuzz import fuzz


def test_hostile_messages_are_counted_and_training_goes_on() -> None:
    found = fuzz(6000, seed=7)
    assert found["problems"] == []
    coordinator, server = found["coordinator"], found["server"]
    assert coordinator["decoded"] + coordinator["rejected"] == coordinator["messages"] == 5700
    assert coordinator["updates"] > 50
    assert coordinator["counters"]["rejected_messages"] >= coordinator["rejected"] > 2000
    assert coordinator["counters"]["refused_handshakes"] > 300
    assert coordinator["counters"]["names_made_up"] <= 256
    assert server["counters"]["rejected_messages"] > 100
