"""Every message of the control plane, as a frozen schema.

On the wire: one msgpack map `{"v": protocol version, "type": name, **fields}`, at most MAX_MESSAGE_BYTES. Bulk arrays
never travel here; messages carry slot numbers. `decode` validates and raises MessageRejected; the receiver counts and
drops. numpy scalars given to a message become Python values when it is made.

Order of a conversation (a: actor, l: learner, o: observer, s: service):

    any -> s  HELLO     who I am, what I believe the run to be
    s -> any  WELCOME   the RunSpec, the segments, my identity             or REFUSED, naming both values
    a -> s    JOIN      what my own env turned out to be                   resent until GRANT (or REFUSED)
    l -> s    READY     weights of this version are in the bank            resent until BATCH
    s -> a    GRANT     fill this slot                                     sent again with each answer while it holds
    a -> s    COMMIT    filled; asks for the next lease                    resent until GRANT, same answer each time
    s -> a    PREEMPT   commit what is there, once enough is           to the heartbeat's socket; again with each PONG
    s -> a    COMMITTED what became of it
    a -> s    ABORT     this lease will not be filled; asks for the next   resent until GRANT
    s -> l    BATCH     these slots are yours                              sent again with each answer while it holds
    l -> s    RELEASE   its slots will not be read again                   not resent: PUBLISH says so too
    l -> s    PUBLISH   slots released, next ones seeded, weights          resent until BATCH or STOP
                        written, figures of the update
    s -> l    RESTORE   go on from the newest checkpoint: READY once more  sent again with each answer while it holds
    s -> any  STOP      finish, leave                                      also told by PONG
    any -> s  BYE       leaving
    any -> s  HEARTBEAT alive; how far I am                                answered by PONG
    o -> s    STATUS    answered by STATUS_REPORT
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_service.errors import MessageRejected, ProtocolVersionDiffers
from rollout_service.runspec import PROTOCOL_VERSION, AutoresetMode, Spaces, StateStrategy
from rollout_service.tally import TallyRecord

MAX_MESSAGE_BYTES: Final = 1 << 20
"""A control message is a few hundred bytes; WELCOME with a large parameter manifest stays well below 1 MiB."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
ShortText = Annotated[str, Field(max_length=8192)]
LongText = Annotated[str, Field(max_length=512 * 1024)]
FromWire = Field(strict=False)
"""For enums and tuples, which msgpack knows as strings and lists; what is in them stays strict."""


Name = Annotated[str, Field(max_length=64)]
FEW: Final = 64
"""Names that one message may bring along: they become keys of tables that live as long as the run."""
Remark = Annotated[str, Field(max_length=512)]
FEW_REMARKS: Final = 4
DROPPED_EPISODES: Final = "dropped_episodes"
"""Counter of episodes that were dropped for bad data."""


class Role(StrEnum):
    ACTOR = "actor"
    LEARNER = "learner"
    OBSERVER = "observer"


class StartFrom(StrEnum):
    """Where the recurrent state of a lease's row 0 comes from."""

    SEEDED = "seeded"
    """The learner seeded row 0 from this actor's own last commit; the actor compares it with its live state."""
    CARRY = "carry"
    """The actor writes its live state and flags."""
    FRESH = "fresh"
    """The actor writes zeros and carry 1."""


class Message(BaseModel):
    """Base of all messages. Strict: no coercion between str, int, float and bool beyond int -> float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **fields: Any) -> None:
        plain = all(type(value) in _PLAIN for value in fields.values())
        super().__init__(**(fields if plain else _without_numpy(fields)))

    # Pydantic's word for "takes keywords and validates them", without which `model_validate` would call it, too: what
    # comes off the wire holds no numpy values, and goes straight to the compiled validator.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


_PLAIN: Final = frozenset((int, str, bool, float, type(None)))


def _without_numpy(value: Any) -> Any:
    """The same value with numpy scalars as Python ones. Arrays stay, and are then refused by their field's type."""
    if type(value) in _PLAIN:
        return value
    match value:
        case np.generic():
            return value.item()
        case dict():
            return {key: _without_numpy(entry) for key, entry in value.items()}
        case list():
            return [_without_numpy(entry) for entry in value]
        case tuple():
            return tuple([_without_numpy(entry) for entry in value])
        case _:
            return value


class Hello(Message):
    role: Annotated[Role, FromWire]
    pid: Count
    run_digest: str | None = None
    state_strategy: Annotated[StateStrategy | None, FromWire] = None
    requested_actor: Count | None = None
    """A supervised actor names the place it was started for; others get the next free one."""
    incarnation: Count = 0


class Welcome(Message):
    run_id: ShortText
    run_spec: LongText
    config: LongText
    rollout_segment: ShortText
    weights_segment: ShortText
    heartbeat_interval: float
    silence_timeout: float = 10.0
    """Seconds without an answer to heartbeats after which the service is gone."""
    actor_id: Count | None = None
    incarnation: Count = 0
    version: Count = 0
    """Highest weights version published so far (learner: what it must exceed)."""
    updates_done: Count = 0
    env_steps_done: Count = 0


class Refused(Message):
    reason: ShortText
    run_id: ShortText = ""
    """Of the run that refuses: a service that was started anew knows nobody of the run before."""


class Join(Message):
    spaces: Spaces
    autoreset: Annotated[AutoresetMode, FromWire]
    run_digest: str
    state_strategy: Annotated[StateStrategy, FromWire]


class Ready(Message):
    version: Count
    updates_done: Count = 0
    env_steps_done: Count = 0
    metrics: dict[str, float] = {}
    """Figures of the last update, which its checkpoint has kept."""
    tally: TallyRecord = TallyRecord()
    """As of that update."""


class Grant(Message):
    slot: Count
    epoch: Count
    version: Count
    start: Annotated[StartFrom, FromWire]
    update: Count
    reset_envs: bool = False
    barrier_after: bool = False


class Preempt(Message):
    """The lease's actor is to finish its step and commit, as soon as it has `min_steps` steps."""

    slot: Count
    epoch: Count
    min_steps: Count


class Episode(Message):
    """One finished episode, raw: reward sum before any scaling, length in env steps."""

    env: Count
    total_reward: float
    length: Count
    success: bool | None = None
    truncated: bool = False


class Commit(Message):
    slot: Count
    epoch: Count
    valid_steps: Count
    version: Count
    """The weights version that really acted."""
    env_steps: Count | None = None
    """Rows of the first valid_steps that are real transitions; None: all of them, in every env of the slot."""
    episodes: Annotated[tuple[Episode, ...], FromWire] = ()
    seconds: Annotated[dict[Name, float], Field(max_length=FEW)] = {}
    """Time split of the lease: phase -> seconds."""
    counters: Annotated[dict[Name, Count], Field(max_length=FEW)] = {}
    """Counted oddities since the last commit, e.g. seed_mismatches, truncations_without_final_obs."""
    remarks: Annotated[tuple[Remark, ...], Field(max_length=FEW_REMARKS), FromWire] = ()
    """The first of these in words, for people: a line each."""


class Committed(Message):
    slot: Count
    epoch: Count
    accepted: bool


class Abort(Message):
    slot: Count
    epoch: Count
    reason: ShortText


class Batch(Message):
    update: Count
    slots: Annotated[tuple[Count, ...], FromWire]
    """The rollout, in the order of its rows."""
    valid_steps: Annotated[tuple[Count, ...], FromWire]
    """Per slot; 0 for a slot nobody filled."""
    versions: Annotated[tuple[Count, ...], FromWire]
    """Behaviour version per slot."""
    env_steps: Count
    """Valid env steps committed up to and including this batch."""
    last: bool = False
    """The run ends after this update."""
    tally: TallyRecord = TallyRecord()
    """This batch included; for the checkpoint behind it."""
    seed_into: Annotated[tuple[Count | None, ...], FromWire] = ()
    """Per slot the one in which its actor's next rollout starts: the learner seeds row 0 and the carry flag there. None
    where a late actor may still write; () where nobody knows yet which slot that will be."""


class Release(Message):
    """Learner to service: no slot of this batch will be read again. PUBLISH says so too."""

    update: Count


class Publish(Message):
    update: Count
    version: Count
    seeded: Annotated[tuple[Count, ...], FromWire] = ()
    """Slots of BATCH.seed_into whose row 0 and carry flag now come from their actor's own last commit."""
    metrics: dict[str, float] = {}
    seconds: dict[str, float] = {}
    checkpoint: ShortText | None = None
    """Path of the checkpoint written after this update, if one was."""
    checkpoint_failure: ShortText | None = None
    """Why the one that was due could not be written."""


class Restore(Message):
    """The learner goes on from its newest checkpoint, and says so with READY."""

    version: Count
    """Of the weights that it was told so behind: READY has a higher one."""


class Stop(Message):
    reason: ShortText


class Bye(Message):
    reason: ShortText = ""
    traceback: LongText = ""


class Heartbeat(Message):
    role: Annotated[Role, FromWire]
    pid: Count
    actor_id: Count | None = None
    incarnation: Count = 0
    progress: Count = 0
    """Grows with every env step or minibatch; standing still while `phase` is a working one means stuck."""
    phase: ShortText = ""
    lost_writes: Count = 0
    """Writes to this process's own log that its disk did not take, since its start."""


class Pong(Message):
    stopping: bool = False
    run_id: ShortText = ""
    """Of the run that answers: another one than WELCOME's means that the service was started anew."""


class Status(Message):
    pass


class StatusReport(Message):
    report: dict[str, Any]


MESSAGES: Final[dict[str, type[Message]]] = {
    cls.__name__.lower(): cls
    for cls in (
        Hello, Welcome, Refused, Join, Ready, Grant, Preempt, Commit, Committed, Abort, Batch, Release, Publish,
        Restore, Stop, Bye, Heartbeat, Pong, Status, StatusReport,
    )
}  # fmt: skip


_NAMES: Final = {kind: name for name, kind in MESSAGES.items()}


def message_name(kind: type[Message]) -> str:
    """What a message is called on the wire and in texts."""
    return kind.__name__.lower()


def encode(message: Message) -> bytes:
    """One message as bytes. Raises MessageRejected, naming the field, for what is too large or no message can carry."""
    name = _NAMES[type(message)]
    fields = message.__pydantic_serializer__.to_python(message, mode="json")
    packed = _pack(name, {"v": PROTOCOL_VERSION, "type": name, **fields})
    if len(packed) > MAX_MESSAGE_BYTES:
        sizes = {field: len(_pack(name, {field: value})) for field, value in fields.items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise MessageRejected(
            f"{name} is {len(packed)} bytes, the limit is {MAX_MESSAGE_BYTES}; {name}.{largest} alone takes "
            f"{sizes[largest]}: shorten it, bulk goes through shared memory"
        )
    return packed


def _pack(name: str, fields: dict[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageRejected(f"{name} cannot be packed: {type(error).__name__}: {error}") from None
    return packed


def decode(data: bytes) -> Message:
    """The message in `data`. Raises MessageRejected, and nothing else, for anything that is not exactly one message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageRejected(f"message of {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        fields = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError) as error:
        raise MessageRejected(f"not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(fields, dict):
        raise MessageRejected(f"expected a map, got {type(fields).__name__}")
    version, name = fields.pop("v", None), fields.pop("type", None)
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionDiffers(
            f"protocol version {version!r:.80}, this side speaks {PROTOCOL_VERSION}; install the same release"
        )
    kind = MESSAGES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise MessageRejected(f"unknown message type {name!r:.80}")
    try:
        return kind.__pydantic_validator__.validate_python(fields)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MessageRejected(f"{name}.{where}: {first['msg']}") from None
