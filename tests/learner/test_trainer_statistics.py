"""Observation statistics in the trainer: which rows they take in, and when."""

from __future__ import annotations

import numpy as np

from tests.fixtures.training import after_steps, serial_run, small_config


def test_rows_past_valid_steps_are_no_part_of_the_statistics() -> None:
    """Their cells are filled with zeros for the network; taken in, they would pull the mean of 1 towards 0."""
    with serial_run(small_config(normalize_observations=True, self_check=1)) as run:
        slots = run.spec.bank(run.bank)
        lengths = (2, 16)
        seen = []
        for actor, slot, length in zip(run.actors, slots, lengths, strict=True):
            assert run.collect(actor, slot, after_steps(length)) == length
            seen.append(run.memory.array("observations")[slot, :, :length].reshape(-1, 3).astype(np.float64))
        run.learn(list(lengths))
        weights = run.trainer.weights()
    rows = np.concatenate(seen)
    assert weights["normalizers.0.count"].tolist() == [2.0 * sum(lengths)]
    np.testing.assert_allclose(weights["normalizers.0.mean"], rows.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(weights["normalizers.0.variance"], rows.var(axis=0), atol=1e-9)


def test_every_minibatch_of_an_update_sees_the_statistics_that_the_actors_acted_on() -> None:
    config = small_config(normalize_observations=True, learning_rate=1e-12, epochs=3)
    with serial_run(config) as run:
        for _ in range(3):
            figures = run.one_update().report.metrics
            # Nothing is learned, so any ratio other than 1 would come from statistics that moved meanwhile.
            assert figures["ratio_deviation"] <= 1e-4
            assert figures["approx_kl"] < 1e-9
