"""What bounds an update: the KL limit ends it, the gradient norm is clipped."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from learner.epochs import Outcome
from tests.fixtures.training import serial_run, small_config


def test_after_too_much_kl_no_further_minibatch_is_looked_at() -> None:
    """The first minibatch has a ratio of 1 and is trained on; the second one is over the limit, and the last."""
    with serial_run(small_config(target_kl=1e-7, learning_rate=1e-2)) as run:
        lengths = [run.collect(actor, slot) for actor, slot in zip(run.actors, run.spec.bank(0), strict=True)]
        asked = itertools.count()

        def never() -> bool:
            next(asked)
            return False

        report = run.trainer.update(
            run.rollouts[0], valid_steps=lengths, seed_into=run.rollouts[1], update=1, should_stop=never
        )
    assert report.outcome is Outcome.STOPPED_BY_KL
    assert report.metrics["optimizer_steps"] == 1
    assert next(asked) == 2, "asked once before each minibatch"


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e-1])
def test_a_gradient_moves_the_weights_as_far_as_its_clipped_norm(max_grad_norm: float) -> None:
    """With a large epsilon and no past Adam's step is learning_rate * gradient / epsilon."""
    config = small_config(
        max_grad_norm=max_grad_norm,
        adam_epsilon=1e4,
        learning_rate=10.0,
        learning_rate_schedule="constant",
        epochs=1,
        envs_per_minibatch=4,
        value_coefficient=100.0,
    )
    with serial_run(config) as run:
        before = run.trainer.weights()
        report = run.one_update().report
        after = run.trainer.weights()
    assert report.metrics["optimizer_steps"] == 1
    assert report.metrics["grad_norm"] > max_grad_norm
    moved = np.sqrt(sum(np.square(after[name].astype(np.float64) - before[name]).sum() for name in before))
    assert moved == pytest.approx(10.0 * max_grad_norm / 1e4, rel=0.02)
