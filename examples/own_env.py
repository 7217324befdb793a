"""An env of your own that needs memory: a lock whose code is shown once, and then has to be dialled.

    rollout-service train --env examples.own_env:make --env-kwargs digits=3 --total-steps 100000
    python -m examples.own_env                         looks at the env without training

Any function or class that returns a `gymnasium.Env` will do, in any module that can be imported from the current
directory. A step says `terminated` where an episode really ends and `truncated` where it is only cut off: the learner
treats the two differently. `info["success"]` at the end of an episode becomes the success rate.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
from gymnasium import spaces


class CombinationLock(gymnasium.Env[Any, Any]):
    """Shows `digits` digits, one per step, then nothing; each digit that is dialled right in that silence earns its
    share of 1.

    Observation Discrete(base + 1): the digit shown, or `base` for nothing. Action Discrete(base), ignored during the
    show. An episode has 2 * digits steps; it succeeds if every digit was right.
    """

    def __init__(self, digits: int = 2, base: int = 3) -> None:
        self.digits, self.base = digits, base
        self.observation_space = spaces.Discrete(base + 1)
        self.action_space = spaces.Discrete(base)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.code = self.np_random.integers(self.base, size=self.digits).tolist()
        self.step_number = self.right = 0
        return self.code[0], {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        dialled = self.step_number - self.digits
        right = dialled >= 0 and int(action) == self.code[dialled]
        self.right += right
        self.step_number += 1
        terminated = self.step_number == 2 * self.digits
        shown = self.code[self.step_number] if self.step_number < self.digits else self.base
        info = {"success": self.right == self.digits} if terminated else {}
        return shown, right / self.digits, terminated, False, info


def make(digits: int = 2, base: int = 3) -> CombinationLock:
    """What `--env examples.own_env:make --env-kwargs digits=2 base=3` calls; the class itself would do as well."""
    return CombinationLock(digits, base)


def main(episodes: int = 1000, digits: int = 2, base: int = 3) -> float:
    """Checks the env as a run would, and plays it blindly: no policy without memory scores more than that."""
    from rollout_service.envs.make import check_contract, make_env

    arguments = {"digits": digits, "base": base}
    check_contract(make_env("examples.own_env:make", arguments), "examples.own_env:make")
    env = make(**arguments)
    env.action_space.seed(1)
    total = 0.0
    for episode in range(episodes):
        env.reset(seed=episode)
        terminated = False
        while not terminated:
            _, reward, terminated, _, _ = env.step(env.action_space.sample())
            total += reward
    print(f"{episodes} episodes of blind dialling: mean return {total / episodes:.3f}, expected {1 / base:.3f}")
    return total / episodes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Checks the combination lock and plays it blindly.")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--base", type=int, default=3)
    main(**vars(parser.parse_args()))
