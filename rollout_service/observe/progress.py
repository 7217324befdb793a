"""Progress in the terminal: a live panel on a terminal, plain lines elsewhere. And the table at a run's end.

Writer: the supervisor's main thread. Reader: a person, or a log file.
What must never happen: control characters in a log file, a line per update, progress on stdout (that is for results),
or an end of the run because its progress went to a full disk. Leaves to others: every number (`metrics`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from rollout_service.control.messages import DROPPED_EPISODES
from rollout_service.observe.losses import LostWrites
from rollout_service.observe.metrics import LOG_WRITE_FAILURES, Summary
from rollout_service.observe.stragglers import NOTICED_SHARE
from rollout_service.streams import lenient

if TYPE_CHECKING:
    from rich.panel import Panel

LIVE_INTERVAL_S: Final = 0.5
"""Between two drawings of the live panel; drawing takes a few ms of the interpreter that the coordinator shares."""
PLAIN_INTERVAL_S: Final = 5.0
"""Between two plain lines at first; a tenth of the elapsed time later, at most PLAIN_INTERVAL_MAX_S."""
PLAIN_INTERVAL_MAX_S: Final = 60.0
SHOWN_FIGURES: Final = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "learning_rate",
)
"""Figures of the last update that the panel has room for; the logs hold all."""


class Progress(Protocol):
    """Where a run's progress goes."""

    interval_s: float
    """How often `show` is worth calling."""

    def show(self, summary: Summary) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


def open_progress(title: str, stream: TextIO | None = None, lost: LostWrites | None = None) -> Progress:
    """The live panel if `stream` (stderr by default) is a terminal, plain lines otherwise.

    lost: hears of what the stream did not take.
    """
    told = lost if lost is not None else LostWrites()
    stream = stream if stream is not None else sys.stderr
    stream = lenient(stream, lambda error: told.failed("the progress", error.strerror))
    return LiveProgress(title, stream) if stream.isatty() else PlainProgress(stream)


class PlainProgress:
    """One line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self.interval_s = 1.0
        self._stream = stream
        self._last_shown = 0.0
        self._last_updates = 0
        self._joined = 0
        """Actors that the last line about the start spoke of; it is over once all are there."""

    def show(self, summary: Summary) -> None:
        if self._joined < summary.actors_alive and self._joined < summary.num_actors:
            self._joined = summary.actors_alive
            self.say(joined_line(summary))
        due = self._last_shown + min(max(PLAIN_INTERVAL_S, summary.elapsed_s / 10), PLAIN_INTERVAL_MAX_S)
        if summary.elapsed_s < due or summary.updates == self._last_updates:
            return
        self._last_shown, self._last_updates = summary.elapsed_s, summary.updates
        self.say(plain_line(summary))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to restore."""


class LiveProgress:
    """A panel that is redrawn in place; messages scroll above it."""

    def __init__(self, title: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.interval_s = LIVE_INTERVAL_S
        self._title = title
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, summary: Summary) -> None:
        self._live.update(panel(self._title, summary), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def joined_line(summary: Summary) -> str:
    """How far the start is."""
    return f"{summary.actors_alive} of {_places(summary)} actors ready after {summary.elapsed_s:.1f} s"


def plain_line(summary: Summary) -> str:
    """One line that says how far, how well, how fast."""
    share = summary.env_steps / summary.total_steps if summary.total_steps else 0.0
    parts = [
        f"{summary.env_steps:,}/{summary.total_steps:,} steps ({share:.0%})",
        f"update {summary.updates}/{summary.total_updates}",
        f"return {_number(summary.return_mean)}",
        *([f"success {summary.success_rate:.3f}"] if summary.success_rate is not None else []),
        f"length {_number(summary.length_mean, 1)}",
        f"{_rate(summary.recent_steps_per_second)} steps/s",
        f"eta {_clock(summary.eta_s)}",
        f"actors {summary.actors_alive}/{_places(summary)}",
        *([f"restarts {summary.restarts}"] if summary.restarts else []),
        *(
            [f"{_slow_word(summary)} actor {summary.slowest_actor} {summary.slowest_share:.0%}"]
            if summary.slowest_actor is not None and summary.slowest_share >= NOTICED_SHARE
            else []
        ),
        *([f"learner restarts {summary.learner_restarts}"] if summary.learner_restarts else []),
    ]
    return "  ".join(parts)


def _places(summary: Summary) -> str:
    """How many actors there should be: `2`, or `2..4` where others may join."""
    most = summary.max_actors or summary.num_actors
    return f"{summary.num_actors}..{most}" if most > summary.num_actors else f"{summary.num_actors}"


def _slow_word(summary: Summary) -> str:
    return "behind:" if summary.streaming else "waited for"


def _slowness(summary: Summary) -> str:
    if summary.streaming:
        return f"brings {1 - summary.slowest_share:.0%} of a typical actor's steps"
    return f"waited for {summary.slowest_share:.0%} of the time"


def panel(title: str, summary: Summary) -> Panel:
    """The live panel."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    bar.add_row(
        ProgressBar(total=max(summary.total_steps, 1), completed=summary.env_steps),
        f"{summary.env_steps:,} / {summary.total_steps:,}   {_clock(summary.elapsed_s)} < {_clock(summary.eta_s)}",
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    success = "" if summary.success_rate is None else f"   success {summary.success_rate:.3f}"
    rows.add_row(
        "episodes",
        f"{summary.episodes:,}   return {_number(summary.return_mean)}{success}"
        f"   length {_number(summary.length_mean, 1)}",
    )
    rows.add_row(
        "speed", f"{_rate(summary.recent_steps_per_second)} steps/s   update {summary.updates}/{summary.total_updates}"
    )
    restarts = f"   restarts {summary.restarts}" if summary.restarts else ""
    slowest = (
        f"   slowest {summary.slowest_actor} ({_slowness(summary)})"
        if summary.slowest_actor is not None and (summary.max_actors or summary.num_actors) > 1
        else ""
    )
    rows.add_row("actors", f"{summary.actors_alive}/{_places(summary)}{restarts}{slowest}")
    for label, split in (("actor time", summary.actor_split), ("learner time", summary.learner_split)):
        if split:
            rows.add_row(label, split_text(split))
    if shown := [name for name in SHOWN_FIGURES if name in summary.figures]:
        rows.add_row("update", "   ".join(f"{name.replace('_', ' ')} {summary.figures[name]:.3g}" for name in shown))
    if summary.counters:
        rows.add_row("counted", "   ".join(f"{name} {count}" for name, count in sorted(summary.counters.items())))
    return Panel(Group(bar, rows), title=Text(title), title_align="left", border_style="dim")


def split_text(split: Mapping[str, float]) -> str:
    """Phases by share, largest first."""
    return "   ".join(f"{phase} {share:.0%}" for phase, share in sorted(split.items(), key=lambda item: -item[1]))


def result_table(rows: Mapping[str, str]) -> str:
    """The short table at the end of a run: aligned, no colours, fit for a log file."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def result_rows(summary: Summary, run_dir: str, best: tuple[str, float] | None = None) -> dict[str, str]:
    """What the table says of a finished run. best: name and return_mean of its best checkpoint."""
    return {
        "env steps": f"{summary.env_steps:,}",
        "updates": f"{summary.updates:,}",
        "episodes": f"{summary.episodes:,}",
        "return": _number(summary.return_mean),
        **({} if summary.success_rate is None else {"success": f"{summary.success_rate:.3f}"}),
        "speed": f"{_rate(summary.steps_per_second)} steps/s",
        "time": _clock(summary.elapsed_s),
        **({"restarts": str(summary.restarts)} if summary.restarts else {}),
        **({"learner restarts": str(summary.learner_restarts)} if summary.learner_restarts else {}),
        **({"dropped episodes": f"{dropped:,}"} if (dropped := summary.counters.get(DROPPED_EPISODES)) else {}),
        **({"log entries lost": f"{lost:,}"} if (lost := summary.counters.get(LOG_WRITE_FAILURES)) else {}),
        **({} if best is None else {"best": f"{best[0]}, return {_number(best[1])}"}),
        "run directory": run_dir,
    }


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
