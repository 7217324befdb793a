"""`rollout-service bench [SUBJECT ...]`: measures subjects, shows tables or prints one JSON document.

`bench peers` and `bench advise` take words of their own; they are not among the subjects that are measured by default.
Results go to stdout, what is being measured to stderr. Subjects are imported when their turn comes: some need torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rollout_service.bench.report import Report, show, surroundings
from rollout_service.errors import ConfigError

SUBJECTS: Final = {
    "write": "an actor's step into its slot, against plain arrays",
    "handover": "a rollout from process to process, against a pickle through a pipe",
    "gae": "advantages, against a step loop",
    "sequence": "the recurrent core with episode starts inside, against none and against a loop over cells",
    "materialize": "a training batch out of a rollout, against stacking",
    "weights": "publishing and loading weights, against copies",
    "collect": "one actor: env steps per second, and where its time goes",
    "actors": "collection alone by several actors: how to split envs, and what one more actor brings; about a minute",
    "train": "whole runs in lockstep and streaming: env steps per second, and where the time goes; about four minutes",
    "startup": "from the command to the first env step, by number of actors; memory of a process",
    "waiting": "the CPU that processes use while they wait, and how fast they wake up",
}
"""Name, which is also the module's, and what it measures."""
COMMANDS: Final = {
    "peers": "the same training by us and by every installed peer, in turns; up to ten minutes",
    "advise": "measures an env, the policy and this machine, and recommends actors, envs, threads and lag",
}
"""Name, which is also the module's, and what it does with words of its own."""


def main(words: Sequence[str]) -> int:
    """Returns the exit code. Raises ConfigError for an unknown subject."""
    if words and words[0] in COMMANDS:
        code: int = importlib.import_module(f"rollout_service.bench.{words[0]}").main(words[1:])
        return code
    subjects = "\n".join(f"  {name:<12}{text}" for name, text in SUBJECTS.items())
    commands = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="rollout-service bench",
        description=f"Time the parts and whole runs.\n\nsubjects (default: all)\n{subjects}\n\nwith words of their own "
        f"(--help says which)\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="what to measure")
    parser.add_argument("--repetitions", type=int, metavar="N", help="measurements per case; medians are reported")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    chosen = parser.parse_args(words)
    reports = []
    for report in measure(chosen.subjects or list(SUBJECTS), chosen.repetitions):
        reports.append(report)
        if not chosen.json:
            show(report, sys.stdout)
    if chosen.json:
        command = " ".join(["rollout-service bench", *words])
        print(json.dumps(document(reports, command), allow_nan=False), flush=True)
    return 0


def measure(subjects: Sequence[str], repetitions: int | None = None) -> Iterator[Report]:
    """Report by report. repetitions: None for each subject's own number. Raises ConfigError at once."""
    if unknown := [name for name in subjects if name not in SUBJECTS]:
        raise ConfigError(
            f"{unknown[0]!r} is no subject; there are {', '.join(SUBJECTS)}; and alone: {', '.join(COMMANDS)}"
        )
    if repetitions is not None and repetitions < 1:
        raise ConfigError(f"repetitions is {repetitions}, the least is 1")
    return (_measure(name, repetitions) for name in subjects)


def _measure(subject: str, repetitions: int | None) -> Report:
    print(f"measuring {subject}: {SUBJECTS[subject]}", file=sys.stderr, flush=True)
    module = importlib.import_module(f"rollout_service.bench.{subject}")
    report: Report = module.measure() if repetitions is None else module.measure(repetitions)
    return report


def document(reports: Sequence[Report], command: str) -> dict[str, Any]:
    """All figures with what they depend on, JSON-able."""
    return {**surroundings(), "command": command, "subjects": [report.to_json() for report in reports]}
