"""`make figures`, or `python -m bench.chart`: draws bench/results/peers.json as docs/figures/peers.svg.

A panel per setting, a bar per side, ours first; on each bar its rate and how many times as fast ours is. Needs
matplotlib, the extra `charts`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from rollout_service.bench.peers import LOCKSTEP, STREAMING, label_of
from rollout_service.bench.runners import PEERS

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "bench" / "results" / "peers.json"
FIGURE: Final = ROOT / "docs" / "figures" / "peers.svg"
RATE: Final = "_steps_per_s"
OURS: Final = {STREAMING: "ours, streaming", LOCKSTEP: "ours, lockstep"}
COLOURS: Final = {STREAMING: "#1b6ca8", LOCKSTEP: "#7fb2d6"}
PEER_COLOUR: Final = "#b8b8b8"


def bars(case: dict[str, Any]) -> list[tuple[str, str, float]]:
    """(side, its name, env steps per second), ours first, then the peers by speed; what is missing is left out."""
    names = {**OURS, **PEERS}
    rates = [(side, name, case[label_of(side) + RATE]) for side, name in names.items() if label_of(side) + RATE in case]
    return sorted(rates, key=lambda bar: (bar[0] in PEERS, bar[0] == LOCKSTEP, -bar[2]))


def draw(document: dict[str, Any], path: Path) -> None:
    """Raises ValueError if there are no rates in the document."""
    cases = next((report["cases"] for report in document["subjects"] if report["subject"] == "peers"), None)
    if not cases:
        raise ValueError("the results have no rates to draw; run `rollout-service bench peers --results bench/results`")
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same figures give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 9}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(cases), 2.6), layout="constrained")
    for case, axes in zip(cases, figure.subplots(1, len(cases), squeeze=False)[0], strict=True):
        sides, names, rates = zip(*bars(case)[::-1], strict=True)
        axes.barh(names, rates, color=[COLOURS.get(side, PEER_COLOUR) for side in sides])
        for row, (side, rate) in enumerate(zip(sides, rates, strict=True)):
            times = case.get(f"{STREAMING}_over_{label_of(side)}_times")
            axes.text(rate, row, f" {rate / 1000:.1f} k" + (f"  ({times:.1f}x)" if times else ""), va="center")
        axes.set_title(case["case"])
        axes.set_xlim(0, 1.3 * max(rates))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(
        f"env steps per second, training included; in brackets: ours is so many times as fast\n"
        f"{document['machine']}, {document['date']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the results of the comparison with the peers.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE")
    chosen = parser.parse_args()
    try:
        draw(json.loads(chosen.results.read_text()), chosen.figure)
    except (OSError, ValueError, ImportError) as error:
        print(f"bench.chart: {error}", file=sys.stderr)
        return 1
    print(chosen.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
