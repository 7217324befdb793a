"""Sample Factory: APPO with one rollout worker of two splits, asynchronous, its best setting here.

`--returns` trains as for a time to a return instead: learning rate 1e-3, observations and returns normalised.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

from marks import Marks, introduce, runner_parser


def words(chosen, directory: str) -> list[str]:
    """Its command line. It starts processes that import this file anew, hence only here."""
    rate, normalized = ("0.001", "True") if chosen.returns else ("0.00025", "False")
    # A factor on rewards that its own defaults expect for CartPole-sized returns; it changes no speed.
    scale = "1.0" if chosen.returns else "0.05"
    settings = {
        "algo": "APPO", "env": chosen.env, "experiment": f"peer-{os.getpid()}", "train_dir": directory,
        "seed": str(chosen.seed), "device": "cpu", "use_rnn": "True", "rnn_type": "lstm", "rnn_size": "128",
        "rollout": "128", "recurrence": "128", "num_workers": "1", "num_envs_per_worker": str(chosen.envs),
        "worker_num_splits": "2", "batch_size": str(chosen.envs * 128 // 4), "num_batches_per_epoch": "4",
        "num_epochs": "4", "gamma": "0.99", "gae_lambda": "0.95", "learning_rate": rate, "reward_scale": scale,
        "normalize_input": normalized, "normalize_returns": normalized, "env_frameskip": "1",
        "save_every_sec": "100000", "save_best_every_sec": "100000", "serial_mode": "False", "async_rl": "True",
        "decorrelate_experience_max_seconds": "0", "decorrelate_envs_on_one_worker": "False",
    }  # fmt: skip
    return [*(f"--{name}={value}" for name, value in settings.items()), "--encoder_mlp_layers", "64"]


def make_env(full_env_name, cfg=None, env_config=None, render_mode=None):  # noqa: ARG001
    import peer_envs

    return peer_envs.MAKERS[full_env_name]()


def main() -> int:
    parser = runner_parser("Sample Factory")
    parser.add_argument("--returns", action="store_true", help="the settings of the time to a return")
    chosen = parser.parse_args()
    from importlib.metadata import version

    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.algo.utils.misc import ExperimentStatus
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    directory = tempfile.mkdtemp(prefix="rs-peer-")
    marks = Marks(chosen.seconds)

    class Watch(AlgoObserver):
        """A mark per iteration; ends the run when enough is measured."""

        def on_training_step(self, runner, training_iteration_since_resume) -> None:  # noqa: ARG002
            if marks(runner.total_env_steps_since_resume or 0):
                runner._should_end_training = lambda: True

    register_env(chosen.env, make_env)
    arguments = words(chosen, directory)
    runner_words, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(runner_words, arguments))
    runner.register_observer(Watch())
    introduce(f"sample-factory {version('sample-factory')}", "1 worker of 2 splits, asynchronous")
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    shutil.rmtree(directory, ignore_errors=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
