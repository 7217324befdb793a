"""The chart of the comparison with the peers is drawn from its results, whatever is missing in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import chart

CASE = {
    "case": "null, 16 envs",
    "streaming_steps_per_s": 40_000.0,
    "lockstep_steps_per_s": 30_000.0,
    "sample_factory_steps_per_s": 8_000.0,
    "pufferlib_steps_per_s": 20_000.0,
    "streaming_over_pufferlib_times": 2.0,
}
DOCUMENT = {"date": "2030-01-01", "machine": "a machine", "subjects": [{"subject": "peers", "cases": [CASE]}]}


def test_ours_come_first_then_the_peers_by_speed() -> None:
    assert [name for _, name, _ in chart.bars(CASE)] == [
        "ours, streaming",
        "ours, lockstep",
        "PufferLib",
        "Sample Factory",
    ]


def test_results_without_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="no rates"):
        chart.draw({"subjects": []}, Path("nowhere.svg"))


def test_the_figure_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `charts`")
    figures = [tmp_path / name for name in ("a.svg", "b.svg")]
    for figure in figures:
        chart.draw(json.loads(json.dumps(DOCUMENT)), figure)
    assert figures[0].read_text() == figures[1].read_text()
    assert "PufferLib" in figures[0].read_text()
    assert "20.0 k  (2.0x)" in figures[0].read_text()
