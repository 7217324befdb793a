"""How fast a run will be, from what its parts cost, and which settings to choose. Pure.

    collecting   T steps of an actor; as many actors at once as cores allow, and more where envs sleep
    learning     every sequence once per epoch, on `threads` cores
    lockstep     one after the other; streaming: at once, as long as the cores carry both

Times are seconds. Left to others: measuring the costs (advise). Axis letters: A actors, E envs of one, N = A E, T
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HAND_OVER_S: Final = 0.001
"""Per update: commits, batch, weights out and in."""
GOOD_ENOUGH: Final = 0.9
"""Of the best rate: fewer envs make more updates out of the same steps, so the fewest that reach this are chosen."""
WORTH_IT: Final = 1.05
"""A plan with more actors, threads or lag has to be this much faster than a simpler one."""
ASLEEP: Final = 0.5
"""Share of an actor's time without CPU from which on its envs are said to wait."""


@dataclass(frozen=True)
class StepCost:
    """One step of all E envs of one actor that has a core to itself."""

    wall: float
    cpu: float
    """Of it on the CPU; the rest is sleep, e.g. a wait for a simulator."""


@dataclass(frozen=True)
class Costs:
    """What was measured."""

    steps: Mapping[int, StepCost]
    """E -> cost; at least one entry."""
    sequence: Mapping[int, float]
    """Learner threads -> seconds of an update per sequence of T steps, all epochs."""
    cores: float
    """That this process may use."""
    num_steps: int

    def step(self, envs: int) -> StepCost:
        """Between the measured numbers of envs in proportion, beyond them along the last piece."""
        known = sorted(self.steps)
        if len(known) == 1:
            only = self.steps[known[0]]
            return StepCost(only.wall * envs / known[0], only.cpu * envs / known[0])
        right = next((index for index, number in enumerate(known) if number >= envs), len(known) - 1)
        low, high = known[max(right - 1, 0)], known[max(right, 1)]
        share = (envs - low) / (high - low)
        ends = self.steps[low], self.steps[high]
        # Timings are noisy: what is extrapolated is never cheaper than nothing.
        wall, cpu = (max(a + share * (b - a), 1e-7) for a, b in zip(*(((c.wall, c.cpu)) for c in ends), strict=True))
        return StepCost(wall, min(cpu, wall))


@dataclass(frozen=True)
class Plan:
    """Settings, and what they should give."""

    num_actors: int
    envs_per_actor: int
    learner_threads: int
    max_policy_lag: int
    collect_s: float
    """Of one rollout of all actors, on their own."""
    update_s: float
    """Of one update, on its own."""
    iteration_s: float
    steps_per_s: float

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    @property
    def effort(self) -> tuple[int, int, int]:
        """What a simpler plan has less of."""
        return self.max_policy_lag, self.num_actors, self.learner_threads


def predict(costs: Costs, actors: int, envs: int, threads: int, lag: int) -> Plan:
    """envs: E."""
    step = costs.step(envs)
    alone, cpu = step.wall * costs.num_steps, step.cpu * costs.num_steps
    sequences = actors * envs
    update = costs.sequence[threads] * sequences
    together = actors * cpu / costs.cores
    collect = max(alone, together)
    # One core's work cannot take less than its own time, and all cores' work not less than its share of each.
    overlapped = max(alone, update, together + update * threads / costs.cores)
    iteration = (overlapped if lag else collect + update) + HAND_OVER_S
    return Plan(actors, envs, threads, lag, collect, update, iteration, sequences * costs.num_steps / iteration)


def plans(costs: Costs, num_envs: int) -> list[Plan]:
    """Every split of so many envs that is worth a thought, with and without lag, for all measured thread numbers."""
    most = max(16, round(2 * costs.cores))
    return [
        predict(costs, actors, num_envs // actors, threads, lag)
        for actors in range(1, min(num_envs, most) + 1)
        if num_envs % actors == 0
        for threads in costs.sequence
        for lag in (0, 1)
    ]


def best(candidates: Iterable[Plan]) -> Plan:
    """The fastest; a simpler one where that costs little."""
    ranked = sorted(candidates, key=lambda plan: plan.effort)
    chosen = ranked[0]
    for plan in ranked[1:]:
        if plan.steps_per_s > chosen.steps_per_s * WORTH_IT:
            chosen = plan
    return chosen


def recommend(costs: Costs, numbers: Sequence[int]) -> tuple[Plan, list[Plan]]:
    """The plan to take, and the best one for each number of envs."""
    each = [best(plans(costs, number)) for number in sorted(numbers)]
    fastest = max(plan.steps_per_s for plan in each)
    return next(plan for plan in each if plan.steps_per_s >= GOOD_ENOUGH * fastest), each


def reasons(plan: Plan, costs: Costs, fixed_envs: bool) -> list[str]:
    """Why, in words, a line each."""
    lockstep = best(p for p in plans(costs, plan.num_envs) if p.max_policy_lag == 0)
    return [
        _actors_reason(plan, costs),
        _threads_reason(plan, costs),
        _lag_reason(plan, lockstep),
        *([] if fixed_envs else [
            f"{plan.num_envs} envs: more would bring less than {1 - GOOD_ENOUGH:.0%}, and fewer updates per env step"
        ]),
    ]  # fmt: skip


def _actors_reason(plan: Plan, costs: Costs) -> str:
    step = costs.step(plan.envs_per_actor)
    asleep = 1 - step.cpu / step.wall
    what = f"{plan.num_actors} x {plan.envs_per_actor}: a step of {plan.envs_per_actor} envs takes {_time(step.wall)}"
    if asleep >= ASLEEP:
        return f"{what}, {asleep:.0%} of it asleep, so actors may outnumber the {costs.cores:g} cores"
    if plan.num_actors == 1:
        return f"{what}; more actors would leave each with fewer rows per forward and the learner with less of a core"
    return f"{what}; this many actors share {costs.cores:g} cores best"


def _threads_reason(plan: Plan, costs: Costs) -> str:
    each = ", ".join(f"{_time(seconds)} on {threads}" for threads, seconds in sorted(costs.sequence.items()))
    what = f"learner threads {plan.learner_threads}: a sequence costs {each}"
    if plan.learner_threads == 1 and len(costs.sequence) > 1:
        why = "the other cores collect" if plan.max_policy_lag else "more threads bring too little"
        return f"{what}; {why}"
    return what


def _lag_reason(plan: Plan, lockstep: Plan) -> str:
    parts = f"collecting takes {_time(plan.collect_s)} and learning {_time(plan.update_s)} an update"
    if plan.max_policy_lag:
        gain = plan.steps_per_s / lockstep.steps_per_s
        return f"lag 1: {parts}; overlapped they make {gain:.2f}x of lockstep, at the price of rollouts one version old"
    return f"lag 0: {parts}; overlapping them would bring too little for rollouts that are one version old"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
