"""What two sides of a handshake disagree about, as one line that names both values. Pure.

Used by the coordinator on HELLO and JOIN. The run's value comes first, the peer's second.
"""

from __future__ import annotations

from rollout_service.control.messages import Hello, Join
from rollout_service.runspec import Leaf, RunSpec


def hello_mismatch(spec: RunSpec, hello: Hello) -> str | None:
    """None if everything HELLO states agrees with the run; what it leaves out is not compared."""
    if hello.state_strategy is not None and hello.state_strategy is not spec.state_strategy:
        return _differ("state_strategy", spec.state_strategy, hello.state_strategy)
    if hello.run_digest is not None and hello.run_digest != spec.digest():
        return _differ("run digest", spec.digest(), hello.run_digest)
    return None


def join_mismatch(spec: RunSpec, join: Join) -> str | None:
    """None if the actor's own environment is the run's. The plainest difference is named first, the digest last."""
    ours, theirs = spec.spaces, join.spaces
    paths = tuple(leaf.path for leaf in ours.observation)
    if paths != (their_paths := tuple(leaf.path for leaf in theirs.observation)):
        return _differ("observation leaves", paths, their_paths)
    for leaf, other in zip(ours.observation, theirs.observation, strict=True):
        if leaf != other:
            return _differ(f"observation space {leaf.path}".rstrip(), _leaf(leaf), _leaf(other))
    if ours.action != theirs.action:
        return _differ("action space", _leaf(ours.action), _leaf(theirs.action))
    if join.autoreset is not spec.autoreset:
        return _differ("autoreset", spec.autoreset, join.autoreset)
    if join.state_strategy is not spec.state_strategy:
        return _differ("state_strategy", spec.state_strategy, join.state_strategy)
    if join.run_digest != spec.digest():
        return _differ("run digest", spec.digest(), join.run_digest)
    return None


def _differ(what: str, ours: object, theirs: object) -> str:
    return f"{what}: the run has {ours}, this peer has {theirs}; start it with the run's own settings"


def _leaf(leaf: Leaf) -> str:
    choices = "" if leaf.size is None else f" n={leaf.size} start={leaf.start}"
    return f"{leaf.kind} {leaf.dtype} {leaf.shape}{choices}"
