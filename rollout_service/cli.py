"""`rollout-service COMMAND ...`: words in, exit code out. `COMMANDS` below lists them.

    exit code   0 as asked   1 the run failed   2 the words or the settings are wrong   130, 143 Ctrl-C, SIGTERM

stdout carries results, stderr everything else. Each command imports what it needs when it runs: nothing here imports
torch, and `--help` and `status` never do. What must never happen: a traceback for a mistake of the user, or no
traceback for ours. Left to others: settings (launch/settings), runs (launch/train), roles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse

    from rollout_service.config import TrainConfig
    from rollout_service.launch.train import Outcome

PROGRAM: Final = "rollout-service"
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Without arguments it is this process's command, and its last act."""
    if arguments is not None:
        return _main(list(arguments))
    from rollout_service.streams import Dropped, lenient

    sys.stderr = lenient(sys.stderr, Dropped().note)  # words on a full disk are lost; the exit code is not
    try:
        from rollout_service.launch.signals import Signalled, ends_with_a_code
        from rollout_service.lifeline import follow_owner

        try:
            with ends_with_a_code():
                follow_owner()
                return _main(sys.argv[1:])
        except Signalled as stop:
            return stop.exit_code
    except KeyboardInterrupt:
        return 130


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        from importlib.metadata import version

        print(version(PROGRAM))
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        _complain(f"{words[0]!r} is no command; there are {', '.join(COMMANDS)}")
        return EXIT_USAGE
    from rollout_service.errors import RolloutServiceError

    try:
        return command(words[1:])
    except RolloutServiceError as error:
        _complain(str(error))
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output is gone, e.g. `| head`; nothing more to say, not even at exit.
        sys.stdout = None
        return EXIT_FAILED


def overview() -> str:
    """The commands, one line each."""
    lines = [f"{name:<11}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    listed = "\n  ".join(lines)
    return f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n  {listed}\n\n{PROGRAM} COMMAND --help says more."


def train(words: Sequence[str]) -> int:
    """Train a policy: actors collect in their own processes, a learner updates."""
    from rollout_service.launch.settings import parse_train

    config = parse_train(words)
    return _train_serially(config) if config.serial else _train(config)


def serve(words: Sequence[str]) -> int:
    """Run the service alone, for a learner and actors that are started by hand."""
    from rollout_service.launch.settings import parse_serve
    from rollout_service.launch.train import serve as run

    config, door = parse_serve(words)
    return _show(run(config, door), config)


def evaluate(words: Sequence[str]) -> int:
    """Play episodes with the newest checkpoint of a run, with its best one, or with a given one."""
    parser = _parser("eval", evaluate)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, or one checkpoint in it")
    parser.add_argument("--episodes", type=int, default=100, metavar="N", help="episodes to play (default: 100)")
    parser.add_argument("--best", action="store_true", help="the one with the highest return_mean instead")
    parser.add_argument("--argmax", action="store_true", help="the most probable action instead of a sampled one")
    parser.add_argument("--num-envs", type=int, default=8, metavar="N", help="envs played at once (default: 8)")
    parser.add_argument("--seed", type=int, default=1, help="root of the random streams (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    chosen = parser.parse_args(words)
    from pathlib import Path

    from learner.evaluate import evaluate as play

    result = play(
        Path(chosen.run_dir),
        episodes=chosen.episodes,
        best=chosen.best,
        argmax=chosen.argmax,
        num_envs=chosen.num_envs,
        seed=chosen.seed,
    )
    for warning in result.warnings:
        _complain(warning)
    names = ("episodes", "return_mean", "return_std", "success_rate", "length_mean")
    figures = {name: getattr(result, name) for name in names}
    if chosen.json:
        _print_json(figures)
        return 0
    from rollout_service.observe.progress import result_table

    shown = {name.replace("_", " "): _figure(value) for name, value in figures.items() if value is not None}
    _print(result_table({"checkpoint": str(result.checkpoint), **shown}))
    return 0


def status(words: Sequence[str]) -> int:
    """Show the runs that live on this machine: slots, actors, lag, rates."""
    parser = _parser("status", status)
    parser.add_argument("--json", action="store_true", help='print one line of JSON: {"runs": [...]}')
    parser.add_argument("--key-file", metavar="PATH", help="a client's key file, for services on tcp that have keys")
    chosen = parser.parse_args(words)
    from pathlib import Path

    from rollout_service.control.keys import Keys
    from rollout_service.launch.status import render, running

    runs = running(None if chosen.key_file is None else Keys.read(Path(chosen.key_file)))
    if chosen.json:
        _print_json({"runs": [run.to_json() for run in runs]})
    elif runs:
        _print("\n\n".join(render(run) for run in runs))
    else:
        _print("no run of this user is alive on this machine")
    return 0


def clean(words: Sequence[str]) -> int:
    """Remove what dead runs left: shared memory, processes, sockets. Runs that live are not touched."""
    parser = _parser("clean", clean)
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    chosen = parser.parse_args(words)
    from rollout_service.launch.cleanup import clean_up

    leftovers = clean_up(dry_run=chosen.dry_run)
    for line in leftovers.lines():
        print(f"{'would remove' if chosen.dry_run else 'removed'} {line}")
    if not leftovers:
        print("nothing to clean")
    return 0


def envs(words: Sequence[str]) -> int:
    """List the memory tasks and the presets."""
    parser = _parser("envs", envs)
    parser.parse_args(words)
    from rollout_service.envs.memory_tasks import TASKS
    from rollout_service.envs.presets import load_preset, preset_names

    rows = [(name, (task.__doc__ or "").strip().splitlines()[0]) for name, task in TASKS.items()]
    width = max(len(name) for name, _ in rows)
    print("tasks")
    print("\n".join(f"  {name:<{width}}  {text}" for name, text in rows))
    print("\npresets (train --preset NAME)")
    for name in preset_names():
        preset = load_preset(name)
        kwargs = " ".join(f"{key}={value}" for key, value in preset.get("env_kwargs", {}).items())
        print(f"  {name:<{width}}  {preset['env']} {kwargs}".rstrip() + f", {preset['total_steps']:,} steps")
    return 0


def check_env(words: Sequence[str]) -> int:
    """Try an env out: its spaces, how it resets, and what looks wrong with it."""
    parser = _parser("check-env", check_env)
    parser.add_argument("env", help="gymnasium id or module:factory, as for train --env")
    parser.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="arguments of the env")
    parser.add_argument("--vectorize", default="none", help="as for train (default: none)")
    parser.add_argument("--num-envs", type=int, default=1, help="envs that are stepped together (default: 1)")
    parser.add_argument("--obs-limit", type=float, metavar="X", help="as for train: largest magnitude of a number")
    chosen = parser.parse_args(words)
    from rollout_service.envs.bad_data import BadData
    from rollout_service.envs.check import check_env as check
    from rollout_service.errors import ConfigError
    from rollout_service.launch.settings import key_values
    from rollout_service.runspec import Vectorize

    try:
        kwargs, vectorize = key_values(chosen.env_kwargs), Vectorize(chosen.vectorize)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found = check(chosen.env, kwargs, vectorize, chosen.num_envs, BadData(obs_limit=chosen.obs_limit))
    for leaf in found.spaces.observation:
        print(f"observation{leaf.path}  {leaf.kind.value} {leaf.dtype} {list(leaf.shape)}")
    action = found.spaces.action
    print(f"action       {action.kind.value} {action.dtype}, {action.size} choices from {action.start}")
    print(f"autoreset    {found.autoreset.value}")
    for warning in found.warnings:
        print(f"warning      {warning}")
    return EXIT_FAILED if found.warnings else 0


def keygen(words: Sequence[str]) -> int:
    """Make key files for a service on tcp: one for the service, one for learner, actors and status."""
    parser = _parser("keygen", keygen)
    parser.add_argument("directory", metavar="DIRECTORY", help="where to; it is made if it is not there")
    parser.add_argument("--force", action="store_true", help="replace key files that are there: old ones stop working")
    chosen = parser.parse_args(words)
    from pathlib import Path

    from rollout_service.control.keys import generate

    service, client = generate(Path(chosen.directory), force=chosen.force)
    print(f"{service}   for the service: {PROGRAM} serve --key-file, stays where it runs")
    print(f"{client}   for learner, actors and status: --key-file; whoever has it may take part")
    return 0


def bench(words: Sequence[str]) -> int:
    """Time the parts and whole runs, each against the plain way to do it."""
    from rollout_service.bench.command import main as run

    return run(words)


def doctor(words: Sequence[str]) -> int:
    """Look at this machine: what a run needs, what is missing, what dead runs left."""
    from rollout_service.launch.doctor import main as run

    return run(words)


COMMANDS: Final[dict[str, Callable[[Sequence[str]], int]]] = {
    "train": train,
    "serve": serve,
    "eval": evaluate,
    "status": status,
    "clean": clean,
    "envs": envs,
    "check-env": check_env,
    "keygen": keygen,
    "bench": bench,
    "doctor": doctor,
}


def _train(config: TrainConfig) -> int:
    from rollout_service.launch.train import train as run

    return _show(run(config), config)


def _show(outcome: Outcome, config: TrainConfig) -> int:
    """Prints what came of a run; returns the exit code."""
    from rollout_service.launch.ending import How
    from rollout_service.observe.progress import result_rows, result_table

    ending = outcome.ending
    if ending.how is How.FAILED:
        _complain(ending.reason)
        return ending.exit_code
    if config.json_output:
        _print_json(outcome.result())
    elif ending.how is How.FINISHED:
        found = outcome.best
        best = None if found is None else (found.path.name, found.return_mean)
        _print(result_table(result_rows(outcome.summary, str(outcome.run_dir), best)))
    return ending.exit_code


def _train_serially(config: TrainConfig) -> int:
    from rollout_service import errors
    from rollout_service.launch.signals import Interrupted
    from rollout_service.launch.train import train_serially as run

    try:
        return _show(run(config), config)
    except (errors.ConfigError, errors.SpaceNotSupported, errors.SegmentError, errors.CheckpointError, Interrupted):
        raise
    except errors.RolloutServiceError:
        # A role failed, and in this process: its own traceback says where.
        import traceback

        traceback.print_exc()
        return EXIT_FAILED


def _exit_code(error: Exception) -> int:
    """Mistakes in the settings, and settings that do not fit this machine, are the user's: 2."""
    from rollout_service import errors

    users = (errors.ConfigError, errors.SpaceNotSupported, errors.SegmentError, errors.CheckpointError, errors.EnvFault)
    if isinstance(error, users):
        return EXIT_USAGE
    interruption = getattr(error, "interruption", None)
    return EXIT_FAILED if interruption is None else int(interruption.exit_code)


def _parser(name: str, command: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser:
    """The small commands take few options: the standard parser starts faster than the one of `train`."""
    import argparse

    return argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=command.__doc__)


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def _print_json(fields: dict[str, Any]) -> None:
    import json

    _print(json.dumps(fields))


def _print(text: str) -> None:
    """A result. Raises RunFailed if standard output does not take it: a full disk must not look like a success."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        from rollout_service.errors import RunFailed

        sys.stdout = None  # what is left in its buffer would fail again at exit
        raise RunFailed(f"the result could not be written to standard output: {error.strerror}") from None


def _complain(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
