"""What crosses a socket: every message there and back, and everything else refused in one line."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_service.control.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGES,
    Abort,
    Batch,
    Bye,
    Commit,
    Committed,
    Episode,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Pong,
    Preempt,
    Publish,
    Ready,
    Refused,
    Release,
    Restore,
    Role,
    StartFrom,
    Status,
    StatusReport,
    Stop,
    Welcome,
    decode,
    encode,
)
from rollout_service.errors import MessageRejected
from rollout_service.runspec import PROTOCOL_VERSION, Leaf, SpaceKind, Spaces
from rollout_service.tally import TallyRecord
from tests.control.world import ACTION, make_join, make_spec

WELCOME = Welcome(
    run_id="r", run_spec="{}", config="{}", rollout_segment="a", weights_segment="b", heartbeat_interval=1.0
)
EVERY_MESSAGE = (
    Hello(role=Role.ACTOR, pid=1, run_digest="d", state_strategy="zero", requested_actor=3, incarnation=2),
    WELCOME,
    Refused(reason="no"),
    make_join(make_spec()),
    Ready(version=1),
    Grant(slot=1, epoch=2, version=3, start=StartFrom.SEEDED, update=4),
    Commit(
        slot=1,
        epoch=2,
        valid_steps=3,
        version=4,
        episodes=(Episode(env=1, total_reward=-1.5, length=9, success=True),),
        seconds={"env": 0.5},
        counters={"seed_mismatches": 1},
    ),
    Committed(slot=1, epoch=2, accepted=False),
    Abort(slot=1, epoch=2, reason="why"),
    Batch(update=1, slots=(0, 1), seed_into=(2, None), valid_steps=(8, 0), versions=(1, 0), env_steps=16, last=True),
    Batch(
        update=1,
        slots=(0,),
        valid_steps=(8,),
        versions=(1,),
        env_steps=16,
        tally=TallyRecord(
            episodes=7, returns=(0.5, -1.0), lengths=(3, 4), successes="01", counters={"odd": 2}, policy_lags=(3, 1)
        ),
    ),
    Release(update=1),
    Publish(update=1, version=2, seeded=(2, 3), metrics={"loss": 0.1}, seconds={"gae": 1.0}, checkpoint="c"),
    Restore(version=3),
    Stop(reason="finished"),
    Bye(reason="x", traceback="y"),
    Heartbeat(role=Role.LEARNER, pid=7, progress=9, phase="epoch"),
    Pong(stopping=True),
    Preempt(slot=1, epoch=4, min_steps=32),
    Status(),
    StatusReport(report={"actors": [{"pid": None}], "rates": {"a": 0.5}}),
)


def raw(**fields: object) -> bytes:
    packed: bytes = msgpack.packb({"v": PROTOCOL_VERSION, **fields})
    return packed


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_went(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(message) for message in EVERY_MESSAGE} == set(MESSAGES.values())


def test_numpy_scalars_arrive_as_python_values() -> None:
    publish = Publish(
        update=np.int64(1),
        version=np.uint64(2),
        seeded=(np.int32(3),),
        metrics={"loss": np.float32(0.5), "nan": float("nan"), "inf": np.float64("inf")},
    )
    episode = Episode(env=np.int64(0), total_reward=np.float32(1.5), length=3, success=np.bool_(True))
    back = decode(encode(publish))
    assert isinstance(back, Publish)
    assert [type(value) for value in (back.update, back.version, back.seeded[0])] == [int, int, int]
    assert (back.metrics["loss"], type(back.metrics["loss"])) == (0.5, float)
    assert math.isnan(back.metrics["nan"])
    assert math.isinf(back.metrics["inf"])
    assert (episode.success, episode.total_reward) == (True, 1.5)


def test_numpy_scalars_in_a_report_arrive_as_python_values_however_deep() -> None:
    """A report is JSON, which has no NaN."""
    scalars = {"half": np.float16(0.5), "count": np.int64(3), "on": np.bool_(True), "nan": np.float32("nan")}
    back = decode(encode(StatusReport(report={**scalars, "deep": [{"again": tuple(scalars.values())}]})))
    assert isinstance(back, StatusReport)
    deep = back.report.pop("deep")[0]["again"]
    for values in (list(back.report.values()), deep):
        assert values == [0.5, 3, True, None]
        assert [type(value) for value in values[:3]] == [float, int, bool]


def test_a_flag_is_no_figure_and_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(ValidationError, match=r"metrics\.won"):
        Publish(update=1, version=2, metrics={"won": np.bool_(True)})


def test_an_array_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(ValidationError, match=r"metrics\.loss"):
        Publish(update=1, version=2, metrics={"loss": np.zeros(3)})


def test_a_space_of_200_leaves_fits() -> None:
    leaves = tuple(
        Leaf(path=f"/sensor_{index}", kind=SpaceKind.BOX, shape=(3, 4), dtype="float32") for index in range(200)
    )
    join = make_join(make_spec(), spaces=Spaces(observation=leaves, action=ACTION))
    assert decode(encode(join)) == join


def test_too_much_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(ValidationError, match="traceback"):
        Bye(traceback="x" * 2_000_000)
    with pytest.raises(MessageRejected, match=r"statusreport\.report alone takes 20\d{5}"):
        encode(StatusReport(report={"text": "x" * 2_000_000}))
    with pytest.raises(MessageRejected, match=r"publish is \d+ bytes, the limit is 1048576; publish\.metrics alone"):
        encode(Publish(update=1, version=2, metrics={f"metric_{i:060d}": 0.0 for i in range(20_000)}))


def test_what_msgpack_cannot_carry_is_refused() -> None:
    with pytest.raises(MessageRejected, match="statusreport cannot be packed"):
        encode(StatusReport(report={"big": 2**70}))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1, 2]), "expected a map, got list"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (b"\x81" * 5000, "not msgpack"),
        (b"\x91" * 100_000, "not msgpack"),
        (b"x" * (MAX_MESSAGE_BYTES + 1), "message of 1048577 bytes, the limit is 1048576"),
        (msgpack.packb({"v": 99, "type": "pong"}), f"protocol version 99, this side speaks {PROTOCOL_VERSION}"),
        (msgpack.packb({"type": "pong"}), "protocol version None"),
        (raw(type="pickle"), "unknown message type 'pickle'"),
        (raw(type=7), "unknown message type 7"),
        (raw(type="ready"), "ready.version: Field required"),
        (raw(type="ready", version="1"), "ready.version: Input should be a valid integer"),
        (raw(type="ready", version=1.0), "ready.version"),
        (raw(type="ready", version=True), "ready.version"),
        (raw(type="ready", version=-1), "ready.version: Input should be greater than or equal to 0"),
        (raw(type="ready", version=1, more=1), "ready.more: Extra inputs"),
        (raw(type="refused", reason=b"bytes"), "refused.reason: Input should be a valid string"),
        (raw(type="refused", reason="x" * 9000), "refused.reason: String should have at most 8192"),
        (raw(type="pong", stopping=1), "pong.stopping: Input should be a valid boolean"),
        (raw(type="hello", role="boss", pid=1), "hello.role"),
        (raw(type="batch", update=1, slots=[0], valid_steps=["8"], versions=[1], env_steps=1), "batch.valid_steps.0"),
    ],
)
def test_what_is_no_message_is_refused_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(MessageRejected) as refusal:
        decode(data)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


ATOMS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8
)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_make_decode_raise_anything_else(data: bytes) -> None:
    with pytest.raises(MessageRejected):
        decode(data)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(MESSAGES)),
    fields=st.dictionaries(st.sampled_from(["slot", "epoch", "report", "metrics", "role", "pid"]) | st.text(), VALUES),
)
def test_no_map_makes_decode_raise_anything_else(name: str, fields: dict[str, object]) -> None:
    try:
        message = decode(msgpack.packb({**fields, "v": PROTOCOL_VERSION, "type": name}))
    except MessageRejected:
        return
    assert isinstance(message, MESSAGES[name])
