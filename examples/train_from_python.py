"""Train from a program instead of the command line, on the env of `own_env.py`.

    python -m examples.train_from_python --total-steps 100000

`train` starts actors and learner as processes, draws progress on standard error, and returns when the run has ended:
finished, interrupted by Ctrl-C (the checkpoint is written first), or failed. A mistake in the settings is raised.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rollout_service.config import TrainConfig
from rollout_service.launch.train import Outcome, train


def main(total_steps: int = 100_000, num_actors: int = 2, run_dir: Path | None = None) -> Outcome:
    """Trains and prints the result."""
    config = TrainConfig(
        env="examples.own_env:make",
        env_kwargs={"digits": 2, "base": 3},
        num_actors=num_actors,
        num_steps=32,
        total_steps=total_steps,
        run_dir=run_dir,
    )
    outcome = train(config)
    result = outcome.result()
    print(f"{outcome.ending.how.value}: mean return {result['return_mean']}, success {result['success_rate']}")
    print(f"python -m examples.evaluate_policy {outcome.run_dir}")
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains on the combination lock.")
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--num-actors", type=int, default=2)
    parser.add_argument("--run-dir", type=Path)
    sys.exit(main(**vars(parser.parse_args())).ending.exit_code)
