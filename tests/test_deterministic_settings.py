"""What a deterministic run refuses: whatever would make its numbers depend on who was faster, or on who is there."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_service.config import TrainConfig
from rollout_service.errors import ConfigError
from rollout_service.launch.prepare import validated

FASTER = "what is in a batch would depend on who was faster"
ALL = "a batch has to be of all num_actors"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_policy_lag": 1}, f"max_policy_lag 1: {FASTER}"),
        ({"preempt_share": 0.5}, f"preempt_share 0.5: {FASTER}"),
        ({"batch_deadline": 5.0}, f"batch_deadline 5.0: {FASTER}"),
        ({"first_batch_deadline": 60.0}, f"first_batch_deadline 60.0: {FASTER}"),
        ({"min_actors": 1}, f"min_actors 1: {ALL}"),
        ({"num_actors": 2, "max_actors": 4}, f"max_actors 4: {ALL}"),
        ({"num_actors": 2, "max_actors": 2}, f"max_actors 2: {ALL}"),
        ({"on_actor_failure": "continue"}, f"on_actor_failure continue: {ALL}"),
        ({"vectorize": "envpool"}, "vectorize envpool: an envpool cannot be seeded again once it is made"),
    ],
)
def test_it_says_with_what_it_cannot_be_combined_and_why(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validated({"deterministic": True, **settings})
    assert str(refused.value) == f"deterministic cannot be combined with {said}; leave one of them out"


@pytest.mark.parametrize("settings", [{}, {"on_actor_failure": "stop"}, {"serial": True}, {"vectorize": "async"}])
def test_anything_else_it_takes(settings: dict[str, Any]) -> None:
    assert TrainConfig(deterministic=True, **settings).deterministic
