"""`python -m bench.fuzz`: messages of every wrong kind, against decoder and coordinator, and over a real socket.

    decoder + coordinator   one process, no sockets: honest roles train on between the hostile messages
    server                  a real service; its socket is fed garbage streams, garbage messages and strangers

What must not happen: an exception beyond MessageRejected, a training that stands still, a table that grows with the
number of messages. Prints one JSON document: counts, and how much the resident memory grew after a warm-up. Exit code 1
if something was wrong. Everything is drawn from one seed, so a failure comes again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack
import psutil

from rollout_service.bench.report import record
from rollout_service.bench.rig import paper_spec
from rollout_service.control.client import Client
from rollout_service.control.coordinator import Coordinator, Notify, Send
from rollout_service.control.endpoints import IPC, remove_socket_directory, socket_endpoint
from rollout_service.control.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGES,
    Batch,
    Commit,
    Grant,
    Heartbeat,
    Hello,
    Join,
    Message,
    Publish,
    Ready,
    Role,
    Status,
    StatusReport,
    decode,
    encode,
)
from rollout_service.control.scheduling import Patience, schedule
from rollout_service.control.server import Server
from rollout_service.control.transport import Dealer, Router
from rollout_service.errors import MessageRejected
from rollout_service.memory.segment import new_run_token
from rollout_service.runspec import PROTOCOL_VERSION, RunSpec

RESULTS: Final = Path(__file__).parent / "results" / "fuzz.json"
MESSAGES_DEFAULT: Final = 1_000_000
OVER_A_SOCKET: Final = 20
"""One in so many goes over a real socket."""
IN_FLIGHT: Final = 100
"""Messages that a stranger sends before it waits for the service: fewer than ZeroMQ would keep."""
HONEST_EVERY: Final = 25
TICK_S: Final = 0.001
PATIENCE_S: Final = 10 * HONEST_EVERY * TICK_S
GROWTH_LIMIT_MIB: Final = 50.0
WARM_UP: Final = 0.1
STRANGERS: Final = 100_000
"""Unknown identities that messages claim to come from."""
PLACES: Final = 4
HONEST_ACTORS: Final = 2
EDGES: Final = (0, 1, -1, 2, 7, 8, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
DEADLINE_S: Final = 20.0


@dataclass
class Result:
    """What came of one half."""

    messages: int = 0
    decoded: int = 0
    rejected: int = 0
    updates: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    growth_mib: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Hostile:
    """Draws messages that are wrong in every way, and some that are right but in the wrong place."""

    def __init__(self, seed: int, spec: RunSpec) -> None:
        self.random = random.Random(seed)
        self._join = Join(
            spaces=spec.spaces,
            autoreset=spec.autoreset,
            run_digest=spec.digest(),
            state_strategy=spec.state_strategy,
        )
        self._seen: list[bytes] = [encode(self._join), encode(Status()), encode(Ready(version=3))]
        self._kinds = (
            self._noise, self._bent, self._cut, self._wrong_values, self._wrong_values, self._again, self._again,
            self._nested, self._long, self._other_version, self._no_type, self._hello, self._hello, self._commit,
            self._commit, self._heartbeat, self._right_name_wrong_fields,
        )  # fmt: skip

    def remember(self, data: bytes) -> None:
        """Somebody said this: it will come again, from others and out of order."""
        if len(self._seen) < 500:
            self._seen.append(data)
        else:
            self._seen[self.random.randrange(len(self._seen))] = data

    def message(self) -> bytes:
        return self.random.choice(self._kinds)()

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 5, 40, 300)))

    def _bent(self) -> bytes:
        data = bytearray(self._again())
        for _ in range(self.random.randint(1, 4)):
            if data:
                data[self.random.randrange(len(data))] = self.random.randrange(256)
        return bytes(data)

    def _cut(self) -> bytes:
        data = self._again()
        return data[: self.random.randint(0, len(data))] + self.random.choice((b"", data))

    def _again(self) -> bytes:
        return self.random.choice(self._seen)

    def _nested(self) -> bytes:
        depth = self.random.choice((10, 100, 2000))
        return self.random.choice((b"\x91", b"\x81\xa1v")) * depth + b"\xc0"

    def _long(self) -> bytes:
        if self.random.random() < 0.02:
            return b"\x00" * (MAX_MESSAGE_BYTES + 1)
        length = self.random.choice((0xFFFFFFFF, 1 << 20, 100))
        return b"\xdd" + length.to_bytes(4, "big") + self.random.randbytes(20)

    def _other_version(self) -> bytes:
        version = self.random.choice((None, -1, 1, PROTOCOL_VERSION + 1, "2", [PROTOCOL_VERSION]))
        return _packed({"v": version, "type": "status"})

    def _no_type(self) -> bytes:
        name = self.random.choice((None, 3, "", "__class__", "message", "x" * 5000, ["hello"]))
        return _packed({"v": PROTOCOL_VERSION, "type": name})

    def _right_name_wrong_fields(self) -> bytes:
        name = self.random.choice(list(MESSAGES))
        fields = {self.random.choice(("slot", "x" * 1000, "epoch", "__init__")): self._value(2) for _ in range(3)}
        return _packed({"v": PROTOCOL_VERSION, "type": name, **fields})

    def _wrong_values(self) -> bytes:
        name, kind = self.random.choice(list(MESSAGES.items()))
        fields = {each: self._value(2) for each in kind.model_fields if self.random.random() < 0.9}
        return _packed({"v": PROTOCOL_VERSION, "type": name, **fields})

    def _value(self, depth: int) -> Any:
        draw = self.random.randrange(9 if depth else 6)
        match draw:
            case 0 | 1:
                return self.random.choice([edge for edge in EDGES if edge < 2**64])
            case 2:
                return self.random.choice((float("nan"), float("inf"), -1e308, 0.5))
            case 3:
                return self.random.choice(("", "actor", "learner", "fresh", "x" * 300, "\ud7ff", "zero"))
            case 4:
                return self.random.choice((None, True, False))
            case 5:
                return self.random.randbytes(8)
            case 6:
                return [self._value(depth - 1) for _ in range(self.random.randrange(5))]
            case _:
                return {str(self.random.randrange(10**6)): self._value(depth - 1) for _ in range(3)}

    def _number(self) -> int:
        return self.random.choice((0, 1, 2, 3, 5, 9, 2**31, 2**63 - 1))

    def _hello(self) -> bytes:
        role = self.random.choice(list(Role))
        digest = self.random.choice((None, "another run"))
        place = self.random.choice((None, 0, 1, PLACES, 2**40))
        return encode(
            Hello(
                role=role,
                pid=self._number(),
                run_digest=digest,
                requested_actor=place,
                incarnation=self._number() % 2**31,
            )
        )

    def _commit(self) -> bytes:
        return encode(
            Commit(
                slot=self._number(),
                epoch=self._number(),
                valid_steps=self._number(),
                version=self._number(),
                env_steps=self.random.choice((None, self._number())),
                counters={f"c{self.random.randrange(10**9)}": self._number() for _ in range(3)},
                seconds={f"s{self.random.randrange(10**9)}": float("nan")},
            )
        )

    def _heartbeat(self) -> bytes:
        return encode(
            Heartbeat(
                role=self.random.choice(list(Role)),
                pid=self._number(),
                actor_id=self._number(),
                incarnation=self._number(),
                progress=self._number(),
                phase=self.random.choice(("env.step", "x" * 200)),
            )
        )


def _packed(fields: dict[str, Any]) -> bytes:
    data: bytes = msgpack.packb(fields)
    return data


class Honest:
    """A learner and some actors that do their work between the hostile messages."""

    def __init__(self, coordinator: Coordinator, spec: RunSpec) -> None:
        self.coordinator = coordinator
        self._spec = spec
        self._grants: dict[bytes, Grant] = {}
        self._batch: Batch | None = None
        self._version = 1

    def begin(self, now: float) -> None:
        self.hear(b"learner", Hello(role=Role.LEARNER, pid=1), now)
        for number in range(HONEST_ACTORS):
            peer = b"actor %d" % number
            self.hear(peer, Hello(role=Role.ACTOR, pid=10 + number, requested_actor=number), now)
            self.hear(
                peer,
                Join(
                    spaces=self._spec.spaces,
                    autoreset=self._spec.autoreset,
                    run_digest=self._spec.digest(),
                    state_strategy=self._spec.state_strategy,
                ),
                now,
            )
        self.hear(b"learner", Ready(version=1), now)

    def hear(self, peer: bytes, message: Message, now: float) -> None:
        self.take(self.coordinator.handle(peer, message, now))

    def take(self, effects: Sequence[Send | Notify]) -> None:
        """Every effect can be carried out; what is ours is kept."""
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            encode(effect.message)
            match effect.message:
                case Grant() as grant if effect.peer.startswith(b"actor"):
                    self._grants[effect.peer] = grant
                case Batch() as batch:
                    self._batch = batch
                case _:
                    pass

    def work(self, now: float) -> bytes:
        """One step of whoever can do one. Returns what was said."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            self._version += 1
            said: Message = Publish(update=batch.update, version=self._version)
            self.hear(b"learner", said, now)
            return encode(said)
        for peer, grant in list(self._grants.items()):
            del self._grants[peer]
            said = Commit(
                slot=grant.slot,
                epoch=grant.epoch,
                valid_steps=self._spec.num_steps,
                version=self.coordinator.version or 0,
            )
            self.hear(peer, said, now)
            return encode(said)
        return encode(Status())


def fuzz_coordinator(messages: int, seed: int) -> Result:
    """Decoder and coordinator, no sockets; the clock is the messages' number."""
    spec = paper_spec(2, 8).model_copy(update={"num_actors": PLACES})
    coordinator = make_coordinator(spec)
    hostile, honest = Hostile(seed, spec), Honest(coordinator, spec)
    draw = hostile.random
    result, begun = Result(messages=messages), time.perf_counter()
    kinds: Counter[str] = Counter()
    before = resident_mib()
    honest.begin(0.0)
    now = 0.0
    try:
        for number in range(messages):
            if number == int(messages * WARM_UP):
                before = resident_mib()
            now += TICK_S
            data = hostile.message()
            peer = b"stranger %d" % draw.randrange(STRANGERS if draw.random() < 0.5 else 8)
            try:
                message = decode(data)
            except MessageRejected as error:
                result.rejected += 1
                honest.take(coordinator.reject(peer, str(error)))
            else:
                result.decoded += 1
                kinds[type(message).__name__.lower()] += 1
                honest.take(coordinator.handle(peer, message, now))
            if number % HONEST_EVERY == 0:
                hostile.remember(honest.work(now))
                honest.take(coordinator.tick(now))
                coordinator.next_deadline(now)
                for place in range(HONEST_ACTORS, PLACES):  # a hostile actor that does nothing is killed in the end
                    if draw.random() < 0.02:
                        incarnation = coordinator.report(now)["actors"][place]["incarnation"]
                        honest.take(coordinator.actor_lost(place, incarnation, "killed", now))
    except Exception as error:
        result.problems.append(f"message {number}, {data[:200]!r} of {peer!r}: {type(error).__name__}: {error}")
    result.growth_mib = round(resident_mib() - before, 1)
    result.updates = coordinator.updates_done
    result.counters = bounded_counters(coordinator)
    result.seconds = round(time.perf_counter() - begun, 1)
    if result.updates < messages // (HONEST_EVERY * 20):
        result.problems.append(f"only {result.updates} updates: hostile messages hold up the training")
    if coordinator.stopped is not None:
        result.problems.append(f"a message has stopped the run: {coordinator.stopped}")
    return result


def make_coordinator(spec: RunSpec) -> Coordinator:
    """A run without end, in which a hostile actor that never commits holds nobody up for long."""
    return Coordinator(
        spec,
        run_id="fuzz",
        config_json="{}",
        rollout_segment="",
        weights_segment="",
        total_updates=10**9,
        step_timeout=60.0,
        scheduler=schedule(PLACES, 0, Patience(min_actors=1, deadline_s=PATIENCE_S, first_deadline_s=PATIENCE_S)),
    )


def bounded_counters(coordinator: Coordinator) -> dict[str, int]:
    """The run's own counters; those that hostile actors made up only by their number."""
    counters = {name: count for name, count in coordinator.counters.items() if not name.startswith("c")}
    return {**counters, "names_made_up": len(coordinator.counters) - len(counters)}


def fuzz_server(messages: int, seed: int) -> Result:
    """The same messages and worse through the socket of a real service, which has to answer an observer at the end."""
    spec = paper_spec(2, 8).model_copy(update={"num_actors": PLACES})
    hostile = Hostile(seed, spec)
    draw = hostile.random
    endpoint = socket_endpoint(new_run_token())
    result, begun = Result(messages=messages), time.perf_counter()
    try:
        server = Server(Router(endpoint), make_coordinator(spec))
        server.start()
        try:
            line, before = Line(endpoint), resident_mib()
            for number in range(messages):
                if number == int(messages * WARM_UP):
                    before = resident_mib()
                if draw.random() < 0.02:  # a stranger more
                    line.close()
                    line = Line(endpoint)
                if draw.random() < 0.005:  # not even ZeroMQ
                    garbage_stream(endpoint, draw.randbytes(draw.choice((1, 20, 5000))))
                line.write(hostile.message())
                while not server.events.empty():
                    server.events.get()
            line.close()
            with closing(
                Client(endpoint, Hello(role=Role.OBSERVER, pid=os.getpid()), connect_deadline_s=DEADLINE_S)
            ) as client:
                client.connect()
                answer = client.exchange(Status(), StatusReport, resend_every_s=1.0, deadline_s=DEADLINE_S)
            if answer is None or not server.alive:
                result.problems.append("the service does not answer any more")
            else:
                result.counters = {
                    name: count
                    for name, count in answer.report["counters"].items()
                    if not name.startswith("c") or "_" in name
                }
                result.rejected = result.counters.get("rejected_messages", 0)
            result.growth_mib = round(resident_mib() - before, 1)
        finally:
            server.stop()
            server.join()
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        remove_socket_directory(endpoint)
    result.seconds = round(time.perf_counter() - begun, 1)
    return result


class Line:
    """A stranger's connection to a service. Every IN_FLIGHT messages it waits until the service has read them."""

    def __init__(self, endpoint: str) -> None:
        self._dealer = Dealer(endpoint)
        self._unread = 0

    def write(self, data: bytes) -> None:
        self._dealer.send(data)
        self._unread += 1
        if self._unread >= IN_FLIGHT:
            self._catch_up()

    def close(self) -> None:
        self._catch_up()
        self._dealer.close()

    def _catch_up(self) -> None:
        """Asks for the status and reads what there is up to the answer. Raises TimeoutError."""
        self._dealer.send(encode(Status()))
        deadline, self._unread = time.perf_counter() + DEADLINE_S, 0
        while time.perf_counter() < deadline:
            if (data := self._dealer.receive(1.0)) is not None and isinstance(decode(data), StatusReport):
                return
        raise TimeoutError(f"the service did not answer within {DEADLINE_S:g} s")


def garbage_stream(endpoint: str, data: bytes) -> None:
    """Somebody connects who does not speak ZeroMQ."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(endpoint.removeprefix(IPC))
        with contextlib.suppress(OSError):
            stranger.sendall(data)


def resident_mib() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def fuzz(messages: int, seed: int) -> dict[str, Any]:
    """Both halves; JSON-able. `problems` is empty if all is well."""
    over_a_socket = messages // OVER_A_SOCKET
    halves = {
        "coordinator": fuzz_coordinator(messages - over_a_socket, seed),
        "server": fuzz_server(over_a_socket, seed + 1),
    }
    problems = [f"{name}: {problem}" for name, half in halves.items() for problem in half.problems]
    problems += [
        f"{name}: memory grew by {half.growth_mib} MiB, the limit is {GROWTH_LIMIT_MIB:g}"
        for name, half in halves.items()
        if half.growth_mib > GROWTH_LIMIT_MIB
    ]
    return {"seed": seed, **{name: asdict(half) for name, half in halves.items()}, "problems": problems}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description="Hostile messages against the service.")
    parser.add_argument("--messages", type=int, default=MESSAGES_DEFAULT, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    chosen = parser.parse_args(words)
    found = fuzz(chosen.messages, chosen.seed)
    record(chosen.results, " ".join(["python -m bench.fuzz", *(sys.argv[1:] if words is None else words)]), found)
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
