"""The probe: what a run will be, found out by a child that lives only for this.

    python -m rollout_service.launch.probe  < TrainConfig as JSON  > RunSpec as JSON, one line

It makes the env as an actor will, tries it out, reads its spaces and autoreset mode, and works out what the policy will
be made of. The parent imports no env, and no segment exists before the probe is through; torch is needed here only to
look for a GPU that was asked for. An error of ours is one line `{"error": kind, "message": text}` on
standard output and exit code 2. What can be run but looks wrong is a line `{"warning": text}` before the answer, and
stands on standard error too. What an env prints goes to standard error, so that it cannot get between. `num_actors`
must be a number here: "auto" is resolved by the caller.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings

from pydantic import ValidationError

from rollout_service.config import Device, TrainConfig
from rollout_service.errors import ConfigError, RolloutServiceError
from rollout_service.lifeline import follow_parent, leave
from rollout_service.policy.shapes import array_specs, state_shapes
from rollout_service.runspec import RunSpec

EXIT_REFUSED = 2


class EnvWarning(UserWarning):
    """An env that can be run but looks wrong."""


def build_run_spec(config: TrainConfig) -> RunSpec:
    """The RunSpec of a run with these settings.

    Raises ConfigError for settings that cannot be run here (device, env), SpaceNotSupported, EnvFault. Warns
    (EnvWarning) of an env that looks wrong.
    """
    if not isinstance(config.num_actors, int):
        raise ConfigError(f"num_actors is {config.num_actors!r}; the probe needs a number, resolve it first")
    from rollout_service.envs.bad_data import BadData
    from rollout_service.envs.check import check_env

    if config.device is Device.CUDA:
        from learner.staging import select_device

        select_device(config.device)
    bad_data = BadData(config.on_bad_data, config.obs_limit)
    found = check_env(config.env, config.env_kwargs, config.vectorize, config.envs_per_actor, bad_data)
    for warning in found.warnings:
        warnings.warn(warning, EnvWarning, stacklevel=2)
    policy = config.policy_spec()
    return RunSpec(
        env=config.env,
        env_kwargs=config.env_kwargs,
        vectorize=config.vectorize,
        spaces=found.spaces,
        autoreset=found.autoreset,
        policy=policy,
        state=state_shapes(policy),
        parameters=array_specs(found.spaces, policy),
        state_strategy=config.state_strategy,
        num_steps=config.num_steps,
        max_policy_lag=config.max_policy_lag,
        num_actors=config.num_actors,
        max_actors=config.max_actors,
        envs_per_actor=config.envs_per_actor,
        envs_per_forward=config.rows_per_forward,
        seed=config.seed,
        obs_limit=config.obs_limit,
        on_bad_data=config.on_bad_data,
        barrier_interval=config.checkpoint_interval if config.deterministic else 0,
        checksum_slots=config.checksum_slots,
    )


def main() -> int:
    answer = sys.stdout
    said: list[str] = []
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EnvWarning)
        try:
            line = build_run_spec(TrainConfig.model_validate_json(sys.stdin.read())).to_json()
            code = 0
        except (RolloutServiceError, ValidationError) as error:
            line = json.dumps({"error": type(error).__name__, "message": str(error)})
            code = EXIT_REFUSED
    for warning in caught:
        text = str(warning.message)
        print(f"{warning.category.__name__}: {text}", file=sys.stderr)
        if issubclass(warning.category, EnvWarning):
            said.append(json.dumps({"warning": text}))
    answer.write("\n".join([*said, line]) + "\n")
    answer.flush()
    return code


if __name__ == "__main__":
    follow_parent()
    leave(main())
