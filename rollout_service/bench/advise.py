"""advise: `rollout-service bench advise --env ...` measures env, policy, update and machine, and says what to set.

    env         one env alone: reset and step; then a real actor with 2, 8, 32 envs, a short lease each
    policy      forward and bookkeeping, from the same leases
    update      the real trainer over made-up rows of the env's own spaces, on one thread and on all cores
    machine     cores in the affinity mask, cgroup quota

Takes the settings of `train`, and `--num-envs` for the envs in total. What the measurements say for a run is worked out
in `prediction`. Everything runs in this process, and no run is started. Axis letters: E envs of an actor, T steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from rollout_service.bench.prediction import Costs, Plan, StepCost, reasons, recommend
from rollout_service.bench.report import digits, surroundings
from rollout_service.bench.rig import Array, rollout_memory
from rollout_service.bench.timing import Figures
from rollout_service.config import TrainConfig
from rollout_service.errors import ConfigError
from rollout_service.launch.cpu import one_thread
from rollout_service.memory.schema import OBSERVATIONS
from rollout_service.memory.slots import SlotWriter
from rollout_service.runspec import Leaf, RunSpec, SpaceKind, Vectorize

NUMBERS: Final = (16, 32, 64, 128)
"""Envs in total that are thought about, unless --num-envs says how many."""
PROBED: Final = (2, 8, 32)
"""E of the leases."""
LEASE_S: Final = 0.5
"""A lease is cut to as many steps as take about this long."""
FEWEST_STEPS: Final = 4
LEASES: Final = 3
ENOUGH_S: Final = 4.0
"""Larger E are not tried once a single one took this long; the cost is extrapolated."""
ALONE_S: Final = 0.3
UPDATES: Final = 3
END_PROBABILITY: Final = 0.01
"""Of made-up rows, where no episode was seen to end."""


@dataclass(frozen=True)
class Found:
    """What was measured, for people; `costs` for the prediction."""

    costs: Costs
    figures: Figures
    machine: str


def main(words: Sequence[str]) -> int:
    """Returns the exit code. Raises ConfigError, EnvFault or SpaceNotSupported for what cannot be run."""
    from rollout_service.launch.settings import parse_train

    parser = argparse.ArgumentParser(
        prog="rollout-service bench advise",
        allow_abbrev=False,
        description="Measures an env, the policy, the update and this machine, and recommends actors, envs per actor, "
        "learner threads and max_policy_lag. Understands every setting of `train`, e.g. --env, --preset, --hidden-dim.",
    )
    parser.add_argument("--num-envs", type=int, metavar="N", help=f"envs in total; default: the best of {NUMBERS}")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    chosen, settings = parser.parse_known_args(words)
    if chosen.num_envs is not None and chosen.num_envs < 1:
        raise ConfigError(f"num_envs is {chosen.num_envs}, the least is 1")
    numbers = NUMBERS if chosen.num_envs is None else (chosen.num_envs,)
    advice = advise(parse_train(settings), numbers, fixed_envs=chosen.num_envs is not None)
    if chosen.json:
        print(json.dumps({**surroundings(), **advice}, allow_nan=False), flush=True)
    else:
        print(shown(advice))
    return 0


def advise(config: TrainConfig, numbers: Sequence[int] = NUMBERS, *, fixed_envs: bool = False) -> dict[str, Any]:
    """JSON-able: measured figures, the machine, the plan, its reasons, the best plan for each number of envs."""
    found = measure(config)
    plan, each = recommend(found.costs, numbers)
    return {
        "env": config.env,
        "machine_cores": found.machine,
        "measured": found.figures,
        "plan": described(plan),
        "settings": setting_words(plan),
        "reasons": reasons(plan, found.costs, fixed_envs),
        "by_num_envs": [described(other) for other in each],
    }


def measure(config: TrainConfig) -> Found:
    """Some seconds; longer for slow envs."""
    from rollout_service.launch.cpu import cgroup_quota, usable_cores

    cores = usable_cores()
    quota, _ = cgroup_quota()
    figures = alone(config)
    steps: dict[int, StepCost] = {}
    ends: float | None = None
    spec = run_spec(config)
    for envs in PROBED:
        begun = time.perf_counter()
        say(f"an actor with {envs} envs")
        steps[envs], split, seen = lease_cost(spec, envs, config.num_steps)
        figures |= {f"{phase}_{envs}_envs_us": seconds * 1e6 for phase, seconds in split.items()}
        ends = seen if seen is not None else ends
        if time.perf_counter() - begun > ENOUGH_S:
            break
    sequence = {}
    for threads in sorted({1, cores.count}):
        say(f"an update on {threads} threads")
        sequence[threads] = sequence_cost(config, spec, threads, ends if ends is not None else END_PROBABILITY)
        figures[f"update_of_a_sequence_{threads}_threads_ms"] = sequence[threads] * 1e3
    least = float(cores.count) if quota is None else min(float(cores.count), quota)
    return Found(Costs(steps, sequence, least, config.num_steps), figures, cores.reason)


def run_spec(config: TrainConfig) -> RunSpec:
    """Of one actor, with this config's env and policy; the env is tried out for it."""
    from rollout_service.launch.probe import build_run_spec

    return build_run_spec(config.model_copy(update={"num_actors": 1, "envs_per_actor": 1, "envs_per_forward": None}))


def resized(spec: RunSpec, envs: int, steps: int) -> RunSpec:
    return spec.model_copy(update={"envs_per_actor": envs, "envs_per_forward": envs, "num_steps": steps})


def alone(config: TrainConfig) -> Figures:
    """One env without us: microseconds of a reset and of a step with random actions. Vector envs: nothing."""
    from rollout_service.envs.make import make_env

    if config.vectorize is not Vectorize.NONE:
        return {}
    say("the env alone")
    env = make_env(config.env, config.env_kwargs)
    resets: list[float] = []
    steps: list[float] = []
    with closing(env):
        env.action_space.seed(config.seed)
        begun = time.perf_counter()
        ended = True
        while time.perf_counter() - begun < ALONE_S or not steps:
            before = time.perf_counter()
            if ended:
                env.reset(seed=config.seed if not resets else None)
                resets.append(time.perf_counter() - before)
                ended = False
                continue
            action = env.action_space.sample()
            before = time.perf_counter()
            _, _, terminated, truncated, _ = env.step(action)
            steps.append(time.perf_counter() - before)
            ended = bool(terminated or truncated)
    return {"env_reset_us": statistics.median(resets) * 1e6, "env_step_us": statistics.median(steps) * 1e6}


def lease_cost(run: RunSpec, envs: int, most_steps: int) -> tuple[StepCost, dict[str, float], float | None]:
    """Of a real actor: cost of a step; its split into policy, env and rest; the share of steps that end an episode."""
    with one_thread():
        leases = fill_leases(resized(run, envs, FEWEST_STEPS))
        affordable = int(FEWEST_STEPS * LEASE_S / min(lease.wall for lease in leases))
        if (steps := min(most_steps, affordable)) > FEWEST_STEPS:
            leases = fill_leases(resized(run, envs, steps))
        steps = max(steps, FEWEST_STEPS)
    # Whatever else runs on this machine only adds: the quickest one says most.
    quickest = min(leases, key=lambda lease: lease.wall)
    inner = {phase: quickest.seconds[phase] / steps for phase in ("policy", "env")}
    episodes = sum(lease.episodes for lease in leases)
    split = {**inner, "rest": max(0.0, quickest.wall / steps - sum(inner.values()))}
    cost = StepCost(quickest.wall / steps, min(quickest.cpu, quickest.wall) / steps)
    return cost, split, episodes / (len(leases) * steps * envs) if episodes else None


@dataclass(frozen=True)
class Lease:
    """One filled slot. Seconds."""

    wall: float
    cpu: float
    seconds: dict[str, float]
    """Phase -> seconds, as the actor reports them."""
    episodes: int
    """That ended in it."""


def fill_leases(spec: RunSpec) -> list[Lease]:
    """By a real actor with real memory; the first one, which pays for what is new, is left out."""
    from rollout_service.control.messages import Grant, StartFrom
    from rollout_service.memory.weights import WeightsMemory
    from rollout_service.policy.actor_critic import ActorCritic
    from workers.actor import Actor

    policy = ActorCritic(spec.spaces, spec.policy, seed=spec.seed)
    leases = []
    with (
        one_thread(),
        rollout_memory(spec) as memory,
        closing(WeightsMemory.create(spec.parameters)) as weights,
        closing(Actor(spec, memory, weights, 0)) as actor,
    ):
        weights.publish(0, policy.to_arrays())
        for epoch in range(1, LEASES + 2):
            grant = Grant(slot=epoch % spec.num_slots, epoch=epoch, version=0, start=StartFrom.CARRY, update=epoch)
            wall, cpu = time.perf_counter(), time.process_time()
            commit = actor.fill(grant)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            leases.append(Lease(wall, cpu, commit.seconds, len(commit.episodes)))
    return leases[1:]


def sequence_cost(config: TrainConfig, spec: RunSpec, threads: int, ends: float) -> float:
    """Seconds of an update per sequence of T steps, from two minibatches' worth of made-up rows."""
    from learner.rollout_buffer import RecurrentRolloutBuffer
    from learner.staging import keep_freed_memory
    from learner.trainer import Trainer

    keep_freed_memory()  # as the learner does
    envs = 2 * config.envs_per_minibatch
    whole = resized(spec, envs, config.num_steps)
    seconds = []
    with one_thread(), rollout_memory(whole) as memory:
        settings = {"self_check": 0, "dump_batch": None, "learner_threads": threads}
        trainer = Trainer(config.model_copy(update=settings), whole, total_updates=10**6)
        generator = np.random.default_rng(config.seed)
        for update in range(1, UPDATES + 2):
            fill_made_up(memory.writer(0), whole, update, generator, ends)
            with RecurrentRolloutBuffer.over(memory, range(1)) as rollout:
                begun = time.perf_counter()
                trainer.update(rollout, valid_steps=np.full(1, config.num_steps), update=update)
                seconds.append(time.perf_counter() - begun)
    return min(seconds[1:]) / envs


def fill_made_up(slot: SlotWriter, spec: RunSpec, epoch: int, generator: np.random.Generator, ends: float) -> None:
    """One whole rollout of noise in the run's own spaces; a share of `ends` of its rows end an episode. Closed."""
    slot.open(epoch=epoch, actor=0, incarnation=0, version=epoch)
    arrays = slot.arrays
    for leaf in spec.spaces.observation:
        fill_leaf(arrays[OBSERVATIONS + leaf.path], leaf, generator)
    fill_leaf(arrays["actions"], spec.spaces.action, generator)
    for name in ("rewards", "values", *spec.state):
        arrays[name][...] = generator.standard_normal(arrays[name].shape, np.float32)
    arrays["log_probs"][...] = -np.log(spec.spaces.action.size or 1)
    arrays["terminated"][...] = generator.random(arrays["rewards"].shape) < ends
    arrays["truncated"][...] = 0
    arrays["valid"][...] = 1
    slot.close(
        slot.num_steps,
        last_values=np.zeros(slot.num_envs, np.float32),
        final_state={name: arrays[name][:, -1] for name in spec.state},
    )


def fill_leaf(array: Array, leaf: Leaf, generator: np.random.Generator) -> None:
    """Values that the leaf may have."""
    if leaf.kind is SpaceKind.DISCRETE:
        array[...] = generator.integers(leaf.start, leaf.start + (leaf.size or 1), array.shape)
    elif np.issubdtype(array.dtype, np.integer):
        array[...] = generator.integers(0, np.iinfo(array.dtype).max, array.shape, array.dtype, endpoint=True)
    else:
        array[...] = generator.standard_normal(array.shape, np.float32)


def described(plan: Plan) -> dict[str, float | int]:
    """JSON-able."""
    return {"num_envs": plan.num_envs, **asdict(plan)}


def setting_words(plan: Plan) -> str:
    """For the command line of `train`."""
    return (
        f"--num-actors {plan.num_actors} --envs-per-actor {plan.envs_per_actor} "
        f"--learner-threads {plan.learner_threads} --max-policy-lag {plan.max_policy_lag}"
    )


def shown(advice: dict[str, Any]) -> str:
    """For people: what was measured, the table of plans, the settings and why."""
    measured = (f"  {name.replace('_', ' '):<34}{digits(value):>10}" for name, value in advice["measured"].items())
    head = "    envs   actors x envs  threads  lag  collect ms  update ms   steps / s"
    rows = (
        f"  {plan['num_envs']:>6}{plan['num_actors']:>8} x {plan['envs_per_actor']:<5}{plan['learner_threads']:>9}"
        f"{plan['max_policy_lag']:>5}{plan['collect_s'] * 1e3:>12.1f}{plan['update_s'] * 1e3:>11.1f}"
        f"{plan['steps_per_s']:>12,.0f}"
        for plan in advice["by_num_envs"]
    )
    return "\n".join(
        [
            f"measured: {advice['env']}",
            *measured,
            f"  cores: {advice['machine_cores']}",
            "predicted, best settings for each number of envs",
            head,
            *rows,
            f"recommended, about {advice['plan']['steps_per_s']:,.0f} steps/s",
            f"  {advice['settings']}",
            *(f"  - {reason}" for reason in advice["reasons"]),
        ]
    )


def say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)
