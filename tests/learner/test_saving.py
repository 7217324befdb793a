"""A learner, or a serial run, whose disk is full: it goes on, tries again, and does not end as if all were well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service import checkpoint as checkpoints
from rollout_service.control.messages import Publish
from rollout_service.errors import CheckpointError
from rollout_service.launch.serial import SerialUpdate, run_serial
from rollout_service.launch.train import train_serially
from rollout_service.tally import TallyRecord
from tests.fixtures.limits import TOO_SMALL, largest_file
from tests.fixtures.training import small_config
from tests.learner.test_session import Service, saved


@pytest.fixture(params=[0, 2], ids=["lockstep", "streaming"])
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(tmp_path, max_policy_lag=request.param)
    made.session.prepare(resume=False)
    yield made
    made.close()


def learn(service: Service, update: int, *, last: bool = False, **changes: object) -> Publish:
    batch = service.fill(update, last) if service.spec.max_policy_lag == 0 else service.stream(update, update % 2)
    service.session.learn(batch.model_copy(update={"last": last, **changes}))
    published = service.client.sent[-1]
    assert isinstance(published, Publish)
    return published


def test_a_checkpoint_that_fails_is_tried_again_after_every_update_until_it_is_written(service: Service) -> None:
    assert learn(service, 1).checkpoint_failure is None
    with largest_file(TOO_SMALL):
        failed = [learn(service, update) for update in (2, 3)]
    for published in failed:
        assert published.checkpoint is None
        assert "File too large" in (published.checkpoint_failure or "")
    assert saved(service) == [0]
    assert (learn(service, 4).checkpoint or "").endswith("checkpoint-00000004")
    assert learn(service, 5).checkpoint is None
    assert saved(service) == [0, 4]


def test_a_last_checkpoint_that_fails_is_told_and_tried_once_more_at_the_end(service: Service) -> None:
    with largest_file(TOO_SMALL):
        assert learn(service, 1, last=True).checkpoint_failure is not None
        with pytest.raises(CheckpointError, match=r"checkpoint-00000001 could not be written.*File too large"):
            service.session.run()
    service.session.run()
    assert saved(service) == [0, 1]


def test_the_score_of_a_batch_stands_in_its_checkpoint(service: Service) -> None:
    learn(service, 1)
    learn(service, 2, tally=TallyRecord(episodes=1, returns=(12.5,)))
    assert checkpoints.require(service.run_dir).checkpoint.manifest.return_mean == 12.5


def test_a_serial_run_goes_on_without_a_checkpoint_says_so_and_keeps_the_best(tmp_path: Path) -> None:
    seen: list[SerialUpdate] = []
    full = largest_file(TOO_SMALL)

    def fill_the_disk(update: SerialUpdate) -> None:
        seen.append(update)
        if update.report.update == 1:
            full.__enter__()
        elif update.report.update == 3:
            full.__exit__(None, None, None)

    config = small_config(run_dir=tmp_path, total_steps=64 * 6, checkpoint_interval=2, checkpoints_kept=1)
    run_serial(config, fill_the_disk)
    said = [line for update in seen for line in update.remarks]
    assert "since update 2" in said[0]
    assert [update.summary.checkpoint_missing_since for update in seen] == [None, 2, 2, None, None, None]
    assert [update.summary.counters.get("checkpoint_failures", 0) for update in seen] == [0, 1, 2, 2, 2, 2]
    scores = {update.report.update: update.summary.return_mean for update in seen}
    best = checkpoints.best(tmp_path).checkpoint
    assert best is not None
    assert best.manifest.return_mean == max(scores[4] or 0.0, scores[6] or 0.0)
    assert checkpoints.require(tmp_path).checkpoint.manifest.update == 6


def test_a_serial_run_whose_last_checkpoint_fails_ends_with_an_error(tmp_path: Path) -> None:
    config = small_config(
        env="tests.fixtures.limits:FillsTheDisk",
        env_kwargs={"after": str(checkpoints.checkpoint_root(tmp_path / "run") / "checkpoint-00000000")},
        run_dir=tmp_path / "run",
        total_steps=64 * 2,
        checkpoint_interval=100,
        tensorboard=False,
    )
    with largest_file(1 << 30):
        outcome = train_serially(config)
    result = outcome.result()
    assert outcome.ending.exit_code == 1
    assert "all 2 updates were made, but the last is not saved: checkpoint" in outcome.ending.reason
    assert (result["updates"], result["checkpoint_missing_since"]) == (2, 2)
    assert result["counters"]["log_write_failures"] > 0  # type: ignore[index]
    assert checkpoints.require(tmp_path / "run").checkpoint.manifest.update == 0
