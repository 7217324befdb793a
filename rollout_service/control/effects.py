"""What follows from a message or a moment: messages to send, events to tell.

Made by the coordinator, carried out by the server. Values only: nothing here acts.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout_service.control.events import Event
from rollout_service.control.messages import Message


@dataclass(frozen=True)
class Send:
    """This message to this peer."""

    peer: bytes
    message: Message


@dataclass(frozen=True)
class Notify:
    """This event to the rest of the process."""

    event: Event


Effect = Send | Notify
