"""peers: the same training, on the same env code, by us and by every installed peer, in turns on this machine.

    ours, peer, peer, ours, peer, peer, ours ...     each run in fresh processes, one at a time, the machine to itself

Ours streams (max_policy_lag 1), our best mode; lockstep takes a turn like a peer. A rate is the median over windows of
whole iterations behind the warm-up; a ratio is taken against the run of ours next to it. Then ours and Sample Factory
train CartPole with masked velocities to a mean return of 400 (`reach`). The peers live in environments of their own
(bench/peers/install.sh, $PEERS_HOME); one that is missing or breaks is said, not hidden. What must never happen: a
process that outlives its turn. Left to others: what each peer does (bench/peers/run_*.py), tables (report).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollout_service.bench import reach
from rollout_service.bench.report import Report, markdown, show, surroundings
from rollout_service.bench.runners import PEERS, RUNNERS, installed, run_peer
from rollout_service.bench.timing import Figures
from rollout_service.bench.train import Case, splits_of
from rollout_service.bench.whole_run import Usage, WholeRun
from rollout_service.bench.windows import Mark, measured_s, median_rate
from rollout_service.errors import ConfigError, RunFailed

ENVS: Final = ("cartpole", "null")
SIZES: Final = (16, 64)
SECONDS: Final = 4.0
"""Measured per run, behind the warm-up. All installed peers, all settings and both parts take under ten minutes."""
STREAMING: Final = "streaming"
LOCKSTEP: Final = "lockstep"
LOCKSTEP_ACTORS: Final = 2
TRIED_ACTORS: Final = (1, 2)
"""Numbers of actors that streaming is tried with, in each setting; the faster one is our best mode there."""
TRIAL_S: Final = 2.5
"""Measured in such a trial, which decides that and nothing else."""
RESULTS: Final = ("peers.json", "peers.md")


@dataclass(frozen=True)
class Setting:
    """One column of the table."""

    env: str
    envs: int

    @property
    def name(self) -> str:
        return f"{self.env}, {self.envs} envs"

    def case(self, mode: str, actors: int) -> Case:
        """Our run of it. It is stopped from outside."""
        return Case(
            name=f"{mode} {self.name}",
            env=f"peer_envs:make_{self.env}",
            num_envs=self.envs,
            updates=None,
            num_actors=actors,
            max_policy_lag=int(mode == STREAMING),
        )


@dataclass
class Measured:
    """What was found in one setting. Lists are in the order of the runs."""

    actors: int = 1
    """Of the streaming runs."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Side -> env steps per second of each run."""
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """Side -> rate of the streaming run beside it, over its own."""
    ours: list[Figures] = field(default_factory=list)
    """Where the time of the streaming runs goes."""
    broken: dict[str, str] = field(default_factory=dict)
    """Side -> why it has no rate."""
    versions: dict[str, str] = field(default_factory=dict)

    def figures(self) -> Figures:
        """One column: rates, then ratios, then where our time goes."""
        rates = {side: statistics.median(found) for side, found in self.rates.items()}
        ratios = {side: statistics.median(found) for side, found in self.ratios.items()}
        peers = [side for side in rates if side in PEERS]
        figures = {f"{label_of(side)}_steps_per_s": rate for side, rate in rates.items()}
        if STREAMING in rates:
            figures |= {f"{STREAMING}_over_{label_of(side)}_times": ratio for side, ratio in ratios.items()}
            if peers:
                figures[f"{STREAMING}_over_fastest_peer_times"] = min(ratios[side] for side in peers)
        if LOCKSTEP in ratios and peers:
            # Both were compared with streaming; their runs are not neighbours.
            figures[f"{LOCKSTEP}_over_fastest_peer_times"] = min(ratios[side] for side in peers) / ratios[LOCKSTEP]
        where = {key for found in self.ours for key in found}
        for key in sorted(where, key=list(self.ours[0]).index if self.ours else None):
            figures[f"{STREAMING}_{key}"] = statistics.median(found[key] for found in self.ours if key in found)
        return figures


def main(words: Sequence[str]) -> int:
    """`rollout-service bench peers`. Returns the exit code. Raises ConfigError for wrong words."""
    chosen = parser().parse_args(words)
    command = " ".join(["rollout-service bench peers", *words])
    reports: list[Report] = []
    for report in measure(
        chosen.only or list(PEERS),
        envs=chosen.env or ENVS,
        sizes=chosen.envs or SIZES,
        seconds=chosen.seconds,
        repetitions=chosen.repetitions,
        actors=chosen.actors or TRIED_ACTORS,
        parts=chosen.part or PARTS,
    ):
        reports = [*(old for old in reports if old.subject != report.subject), report]
        if chosen.results is not None:
            keep(reports, command, chosen.results)
    for report in reports:
        if not chosen.json:
            show(report, sys.stdout)
    if chosen.json:
        print(json.dumps(document(reports, command), allow_nan=False), flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    described = ", ".join(f"{key} ({title})" for key, title in PEERS.items())
    parser = argparse.ArgumentParser(
        prog="rollout-service bench peers",
        description=f"The same training by us and by the peers that are installed: {described}. "
        "bench/peers/install.sh installs them, each in an environment of its own.",
    )
    parser.add_argument("--only", nargs="+", choices=tuple(PEERS), help="only these peers")
    parser.add_argument("--env", nargs="+", choices=ENVS, help=f"only these envs (default: {' '.join(ENVS)})")
    parser.add_argument("--envs", nargs="+", type=int, metavar="N", help="numbers of envs (default: 16 64)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"measured per run (default: {SECONDS:g})")
    parser.add_argument("--repetitions", type=int, default=1, metavar="N", help="rounds (default: 1)")
    parser.add_argument(
        "--actors", nargs="+", type=int, metavar="N", help="actors to try our streaming with (default: 1 2)"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, help="speed, time to a return, or both (default: both)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep peers.json and peers.md there")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


PARTS: Final = ("speed", "return")


def measure(
    peers: Sequence[str],
    *,
    envs: Sequence[str] = ENVS,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    repetitions: int = 1,
    actors: Sequence[int] = TRIED_ACTORS,
    parts: Sequence[str] = PARTS,
) -> Iterator[Report]:
    """A report after each setting, with all settings so far; the last ones are whole.

    Raises ConfigError at once without the runners, or for numbers that cannot be run.
    """
    if not RUNNERS.is_dir():
        raise ConfigError(f"the peers' runners are part of the repository, not of the package; {RUNNERS} is missing")
    if repetitions < 1 or seconds <= 0:
        raise ConfigError(f"repetitions is {repetitions} and seconds {seconds:g}; both have to be above 0")
    if min(actors) < 1:
        raise ConfigError(f"actors is {min(actors)}, the least is 1")
    whole = math.lcm(4, LOCKSTEP_ACTORS, *actors)
    if unfit := [size for size in sizes if size < 1 or size % whole]:
        raise ConfigError(
            f"{unfit[0]} envs do not split into 4 minibatches and these actors; take a multiple of {whole}"
        )
    return _measure(peers, envs, sizes, seconds, repetitions, actors, parts)


def _measure(
    peers: Sequence[str],
    envs: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    repetitions: int,
    actors: Sequence[int],
    parts: Sequence[str],
) -> Iterator[Report]:
    there = [peer for peer in peers if installed(peer)]
    columns: dict[str, Measured] = {}
    if "speed" in parts:
        for setting in (Setting(env, size) for env in envs for size in sizes):
            found = columns[setting.name] = Measured(actors=fastest(setting, actors))
            for repetition in range(repetitions):
                one_round(setting, there if repetition % 2 == 0 else there[::-1], seconds, found)
            yield speed_report(columns, peers, seconds, repetitions)
    if "return" in parts:
        yield reach.measure(with_peer="sf" in there)


def fastest(setting: Setting, actors: Sequence[int]) -> int:
    """The number of actors with which streaming is fastest, from a short run with each."""
    if len(actors) == 1:
        return actors[0]
    rates = {}
    for number in actors:
        say(f"{setting.name}: ours, streaming, a trial with {number} actors")
        rates[number] = median_rate(watched(setting.case(STREAMING, number), TRIAL_S)[0]) or 0.0
    return max(rates, key=rates.__getitem__)


def one_round(setting: Setting, peers: Sequence[str], seconds: float, found: Measured) -> None:
    """Every side once, a streaming run before and after each pair of others."""
    others = [*peers[:1], LOCKSTEP, *peers[1:]]
    beside = ours(setting, STREAMING, seconds, found)
    for first in range(0, len(others), 2):
        pair = others[first : first + 2]
        rates = {side: one_side(setting, side, seconds, found) for side in pair}
        after = ours(setting, STREAMING, seconds, found)
        for side, ours_then in zip(pair, (beside, after), strict=False):
            if (rate := rates[side]) is not None and ours_then is not None:
                found.ratios.setdefault(side, []).append(ours_then / rate)
        beside = after


def one_side(setting: Setting, side: str, seconds: float, found: Measured) -> float | None:
    """A run of lockstep or of a peer; its rate is kept, or why there is none."""
    if side == LOCKSTEP:
        return ours(setting, side, seconds, found)
    say(f"{setting.name}: {PEERS[side]}")
    try:
        heard = run_peer(side, setting.env, setting.envs, seconds)
    except RunFailed as error:
        found.broken[side] = str(error)
        return None
    found.versions[side] = f"{heard.version}, {heard.settings}"
    return kept(found, side, heard.marks)


def ours(setting: Setting, mode: str, seconds: float, found: Measured) -> float | None:
    """A run of ours; of a streaming one also where its time goes. Raises RunFailed: without it there is no table."""
    case = setting.case(mode, found.actors if mode == STREAMING else LOCKSTEP_ACTORS)
    say(f"{setting.name}: ours, {mode}")
    marks, where = watched(case, seconds)
    if mode == STREAMING:
        found.ours.append(where)
    found.versions[mode] = f"{case.num_actors} actors x {case.num_envs // case.num_actors} envs"
    return kept(found, mode, marks)


def watched(case: Case, seconds: float) -> tuple[list[Mark], Figures]:
    """Runs it until so many seconds are measured."""
    before: Usage | None = None
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rs-bench-")))
        run = stack.enter_context(WholeRun(case.words(), directory / "run", {"PYTHONPATH": str(RUNNERS)}))
        while run.wait() and measured_s(run.marks()) < seconds:
            if before is None and measured_s(run.marks()) > 0:
                before = run.usage()
        shares = {} if before is None else run.usage().cpu_shares(before)
        where = {key: value for key, value in splits_of(run.log[-1]).items() if key in REPORTED} if run.log else {}
        return run.marks(), {**where, **shares}


REPORTED: Final = ("learner_update_share", "learner_wait_share", "actor_policy_share", "actor_env_share",
                   "actor_write_share", "actor_wait_share")  # fmt: skip
"""Of the time splits; `bench train` has all of them."""


def kept(found: Measured, side: str, marks: Sequence[Mark]) -> float | None:
    """The rate of one run, taken down."""
    rate = median_rate(marks)
    if rate is None:
        found.broken[side] = f"made {len(marks)} iterations, too few to measure"
    else:
        found.rates.setdefault(side, []).append(rate)
    return rate


def speed_report(columns: Mapping[str, Measured], peers: Sequence[str], seconds: float, repetitions: int) -> Report:
    """The table of all settings so far, with what is missing."""
    versions = {side: text for found in columns.values() for side, text in found.versions.items()}
    broken = {side: text for found in columns.values() for side, text in found.broken.items()}
    missing = [f"{PEERS[peer]} ({peer})" for peer in peers if not installed(peer)]
    each = {name: found.versions.get(STREAMING, "") for name, found in columns.items()}
    notes = (
        "recurrent PPO, MLP 64, LSTM 128, T = 128, 4 epochs x 4 minibatches of whole sequences, Adam 2.5e-4, CPU",
        f"rates: median over windows of whole iterations, {seconds:g} s a run, {repetitions} rounds; over: ratio to "
        "the streaming run beside it",
        "lockstep over fastest peer: by way of streaming, which both were compared with",
        f"streaming (max_policy_lag 1): {'; '.join(f'{name}: {text}' for name, text in each.items())}",
        f"lockstep: {versions.get(LOCKSTEP, '')}",
        *(f"{PEERS[peer]}: {versions[peer]}" for peer in peers if peer in versions),
        *([f"not installed: {', '.join(missing)}; bench/peers/install.sh NAME"] if missing else []),
        *(f"{PEERS.get(side, side)} broke: {text.splitlines()[-1]}" for side, text in broken.items()),
    )
    return Report("peers", "env steps per second, training included",
                  {name: found.figures() for name, found in columns.items()}, notes)  # fmt: skip


def label_of(side: str) -> str:
    """As in figure names: `pufferlib`, `sample_factory`."""
    return PEERS.get(side, side).lower().replace(" ", "_").replace("-", "_")


def document(reports: Sequence[Report], command: str) -> dict[str, Any]:
    """All figures with what they depend on, JSON-able."""
    return {**surroundings(), "command": command, "subjects": [report.to_json() for report in reports]}


def keep(reports: Sequence[Report], command: str, directory: Path) -> None:
    """Writes both files anew: figures of different runs are no comparison."""
    directory.mkdir(parents=True, exist_ok=True)
    figures, page = RESULTS
    (directory / figures).write_text(json.dumps(document(reports, command), indent=1, allow_nan=False) + "\n")
    facts = [f"- {key}: {value}" for key, value in {**surroundings(), "command": f"`{command}`"}.items()]
    text = "\n".join(["# Peers", "", *facts, "", *(markdown(report) for report in reports)])
    (directory / page).write_text(text)


def say(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)
