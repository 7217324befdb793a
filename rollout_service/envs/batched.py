"""What a gymnasium vector env returns for all its envs at once, as rows: checked, cast, and told apart env by env.

Pure functions, but for the arrays they are given to write into. An array of the wrong shape or kind belongs to no env:
Misfit. A number that no transition can hold belongs to its row: the row reads as zeros, and is named. Leaves to others:
whose it was, and what follows (vectorized.py).

Axis letters: E envs of one actor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollout_service.envs.bad_data import Ranges
from rollout_service.envs.reading import (
    SUCCESS_KEYS,
    Misfit,
    ObservationField,
    all_finite,
    fitted,
    short,
    success_of,
)

Array = NDArray[Any]
Rows = NDArray[np.intp]
Complaints = dict[int, str]
"""Row -> what is wrong with what it returned."""

FINAL_KEYS: Final = ("final_obs", "final_observation")
"""Where a vector env that resets in the same step puts final observations; `_` + key is the mask of its rows."""
FINAL_INFO: Final = "final_info"
"""And the infos that came with them."""


def observations_into(
    out: Mapping[str, Array],
    observations: Any,
    fields: Sequence[ObservationField],
    ranges: Ranges,
    rows: Rows | None = None,
) -> Complaints:
    """Copy batched observations into their fields, [E, *shape]: all rows, or only some. Raises Misfit."""
    bad: Complaints = {}
    for of in fields:
        given, place = of.pick(observations), out[of.name]
        try:
            values = fitted(given, place.shape, of)
        except Misfit as misfit:
            if misfit.row is None:
                raise
            values = _what_fits(np.asarray(given), place.shape, of, bad)
        if rows is None:
            place[...] = values
        else:
            place[rows] = values[rows]
    if bad or not ranges.hold(out):
        looked_at = range(len(place)) if rows is None else rows.tolist()
        bad = {e: text for e in looked_at if (text := bad.get(e) or ranges.complaint(out, e)) is not None}
        for values in out.values():
            values[list(bad)] = 0
    return bad


def _what_fits(given: Array, shape: tuple[int, ...], of: ObservationField, bad: Complaints) -> Array:
    """Row by row what of batched observations fits their field; zeros, and an entry in `bad`, where it does not."""
    values = np.zeros(shape, of.dtype)
    for e, row in enumerate(given):
        try:
            values[e] = fitted(row, shape[1:], of)
        except Misfit as misfit:
            bad.setdefault(e, str(misfit))
    return values


def rewards_into(stored: NDArray[np.float32], rewards: Any, ignored: Rows | None) -> tuple[Array, Complaints]:
    """Rewards [E] as float32; 0 where ignored or bad. Returns them as given, but for those, too. Raises Misfit."""
    given = np.asarray(rewards)
    if given.shape != stored.shape or given.dtype.kind not in "fiub":
        raise Misfit(f"rewards are {short(rewards)}, expected {len(stored)} numbers [{len(stored)}]")
    stored[:] = given
    if ignored is not None:
        stored[ignored] = 0.0
    if all_finite(stored):
        return given, {}
    wrong = np.flatnonzero(~np.isfinite(stored)).tolist()
    stored[wrong] = 0.0
    plain = given.astype(np.float64)
    plain[wrong] = 0.0
    return plain, {e: f"reward is {given[e]}, which is not a finite float32" for e in wrong}


def flags_into(stored: NDArray[np.bool_], what: str, flags: Any) -> None:
    """Flags [E]: booleans, or 0 and 1. Raises Misfit."""
    given = np.asarray(flags)
    if given.shape != stored.shape or (given.dtype.kind != "b" and not np.isin(given, (0, 1)).all()):
        raise Misfit(f"{what} is {short(flags)}, expected {len(stored)} times True or False")
    stored[:] = given


def final_observation(infos: Any, e: int) -> Any:
    """The final observation of env e, or None: an array of observations, or observations batched like the envs' own."""
    for key in FINAL_KEYS:
        if not isinstance(infos, Mapping) or infos.get(key) is None:
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and not mask[e]:
            continue
        final = _row(infos[key], e)
        if final is not None:
            return final
    return None


def _row(batched: Any, e: int) -> Any:
    """Row e of batched observations, of whatever structure."""
    if isinstance(batched, Mapping):
        return {key: _row(value, e) for key, value in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_row(value, e) for value in batched)
    return batched[e]


def successes(infos: Any, envs: list[int]) -> list[bool | None]:
    """What the infos of the last step say about the episodes of these envs."""
    facts = infos.get(FINAL_INFO, infos) if isinstance(infos, Mapping) else None
    if isinstance(facts, Mapping):
        for key in SUCCESS_KEYS:
            if key in facts:
                mask = facts.get(f"_{key}")
                return [bool(facts[key][e]) if mask is None or mask[e] else None for e in envs]
        return [None] * len(envs)
    return [None if facts is None else success_of(facts[e]) for e in envs]  # in old vector envs one info per env
