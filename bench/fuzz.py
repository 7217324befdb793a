"""`python -m bench.fuzz`: messages of every wrong kind, against decoder and coordinator, and over a real socket.

    decoder + coordinator   one process, no sockets: honest roles train on between the hostile messages, over real
                            shared memory, in which every byte that changes has to be one that may (fuzz_memory)
    server                  a real service; its socket is fed garbage streams, garbage messages and strangers

What must not happen: an exception beyond MessageRejected, a training that stands still, a table that grows with the
number of messages, a slot with two writers, a write out of place. Prints one JSON document: counts, and how much the
resident memory grew after a warm-up. Exit code 1 if something was wrong. Everything is drawn from one seed, so a
failure comes again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench.fuzz_memory import Ground, laid_out
from bench.hostile import Hostile
from rollout_service.bench.report import record
from rollout_service.bench.rig import paper_spec
from rollout_service.bench.waiting import connected
from rollout_service.control.coordinator import Coordinator, Notify, Send
from rollout_service.control.endpoints import IPC, remove_socket_directory, socket_endpoint
from rollout_service.control.events import ServerFailed
from rollout_service.control.messages import (
    Abort,
    Batch,
    Commit,
    Grant,
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
from rollout_service.runspec import RunSpec

RESULTS: Final = Path(__file__).parent / "results" / "fuzz.json"
MESSAGES_DEFAULT: Final = 1_000_000
LEARNER: Final = b"learner"
REPEATED: Final = 200
"""Words of the honest ones that may be said again."""
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
DEADLINE_S: Final = 20.0


@dataclass
class Result:
    """What came of one half."""

    messages: int = 0
    decoded: int = 0
    rejected: int = 0
    updates: int = 0
    fills: int = 0
    """Slots that honest actors have filled."""
    scribbles: int = 0
    """Times that a hostile one wrote noise over the slot that it held."""
    counters: dict[str, int] = field(default_factory=dict)
    growth_mib: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Honest:
    """A learner and some actors that do their work between the hostile messages, in memory of their own."""

    def __init__(self, coordinator: Coordinator, spec: RunSpec, ground: Ground) -> None:
        self.coordinator = coordinator
        self.peers = (LEARNER, *(b"actor %d" % number for number in range(HONEST_ACTORS)))
        self._spec = spec
        self._ground = ground
        self._grants: dict[bytes, Grant] = {}
        self._batch: Batch | None = None
        self._version = 1
        self._said: deque[tuple[bytes, Message]] = deque(maxlen=REPEATED)

    def begin(self, now: float) -> None:
        self.say(LEARNER, Hello(role=Role.LEARNER, pid=1), now)
        join = Join(
            spaces=self._spec.spaces,
            autoreset=self._spec.autoreset,
            run_digest=self._spec.digest(),
            state_strategy=self._spec.state_strategy,
        )
        for number, peer in enumerate(self.peers[1:]):
            self.say(peer, Hello(role=Role.ACTOR, pid=10 + number, requested_actor=number), now)
            self.say(peer, join, now)
        self.say(LEARNER, Ready(version=1), now)

    def say(self, peer: bytes, message: Message, now: float) -> bytes:
        """One of them says this. Returns it as it went."""
        self._said.append((peer, message))
        self.hear(peer, message, now)
        return encode(message)

    def repeat(self, draw: random.Random, now: float) -> None:
        """One of them says again what it has said before: late, twice, or in another order."""
        self.hear(*draw.choice(self._said), now)

    def hear(self, peer: bytes, message: Message, now: float) -> None:
        """The coordinator hears a message of anyone, and everybody what follows."""
        if isinstance(message, Commit | Abort):
            self._ground.let_go(peer, message.slot, message.epoch)
        self.take(self.coordinator.handle(peer, message, now))

    def take(self, effects: Sequence[Send | Notify]) -> None:
        """Every effect can be carried out; what is ours is kept."""
        self._ground.take_part(self.coordinator.peers())
        for effect in effects:
            if not isinstance(effect, Send):
                continue
            encode(effect.message)
            match effect.message:
                case Grant() as grant:
                    self._ground.granted(effect.peer, grant)
                    if effect.peer in self.peers:
                        self._grants[effect.peer] = grant
                case Batch() as batch:
                    self._batch = batch
                case _:
                    pass

    def work(self, now: float) -> bytes:
        """One step of whoever can do one. Returns what was said."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            self._ground.learn(batch)
            self._version += 1
            seeded = tuple(slot for slot in batch.seed_into if slot is not None)
            return self.say(LEARNER, Publish(update=batch.update, version=self._version, seeded=seeded), now)
        for peer, grant in list(self._grants.items()):
            commit = self._commit(grant)
            del self._grants[peer]
            self._ground.fill(grant, commit.version)
            return self.say(peer, commit, now)
        return encode(Status())

    def forged(self) -> Message:
        """What one of the actors is about to say, for somebody else to say it first."""
        return next(map(self._commit, self._grants.values()), Status())

    def _commit(self, grant: Grant) -> Commit:
        version = self.coordinator.version or 0
        return Commit(slot=grant.slot, epoch=grant.epoch, valid_steps=self._spec.num_steps, version=version)


def fuzz_coordinator(messages: int, seed: int) -> Result:
    """Decoder and coordinator, no sockets; the clock is the messages' number."""
    spec = paper_spec(2, 8).model_copy(update={"num_actors": PLACES})
    result, begun = Result(messages=messages), time.perf_counter()
    with laid_out(spec, seed) as ground:
        # A hostile actor that never commits holds nobody up for long.
        impatient = Patience(min_actors=1, deadline_s=PATIENCE_S, first_deadline_s=PATIENCE_S)
        coordinator = make_coordinator(spec, ground, impatient)
        talk(coordinator, Honest(coordinator, spec, ground), ground, Hostile(seed, spec), result)
    result.updates, result.fills, result.scribbles = coordinator.updates_done, ground.fills, ground.scribbles
    result.counters = bounded_counters(coordinator)
    result.seconds = round(time.perf_counter() - begun, 1)
    if result.updates < messages // (HONEST_EVERY * 20):
        result.problems.append(f"only {result.updates} updates: hostile messages hold up the training")
    if coordinator.stopped is not None:
        result.problems.append(f"a message has stopped the run: {coordinator.stopped}")
    return result


def talk(coordinator: Coordinator, honest: Honest, ground: Ground, hostile: Hostile, result: Result) -> None:
    """All messages; what goes wrong is in `result` afterwards."""
    draw = hostile.random
    before, now, number = resident_mib(), 0.0, 0
    data = peer = b""
    try:
        honest.begin(now)
        for number in range(result.messages):
            if number == int(result.messages * WARM_UP):
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
                honest.hear(peer, message, now)
            if number % HONEST_EVERY == 0:
                hostile.remember(honest.work(now))
                honest.repeat(draw, now)
                honest.hear(peer, honest.forged(), now)
                ground.scribble(honest.peers)
                honest.take(coordinator.tick(now))
                coordinator.next_deadline(now)
                for place in range(HONEST_ACTORS, PLACES):  # a hostile actor that does nothing is killed in the end
                    if draw.random() < 0.02:
                        incarnation = coordinator.report(now)["actors"][place]["incarnation"]
                        honest.take(coordinator.actor_lost(place, incarnation, "killed", now))
                ground.check()
    except Exception as error:
        result.problems.append(f"message {number}, {data[:200]!r} of {peer!r}: {type(error).__name__}: {error}")
    result.growth_mib = round(resident_mib() - before, 1)


def make_coordinator(spec: RunSpec, ground: Ground, patience: Patience) -> Coordinator:
    """A run without end."""
    return Coordinator(
        spec,
        run_id="fuzz",
        config_json="{}",
        rollout_segment=ground.memory.name,
        weights_segment="",
        total_updates=10**9,
        step_timeout=60.0,
        scheduler=schedule(PLACES, 0, patience),
    )


def bounded_counters(coordinator: Coordinator) -> dict[str, int]:
    """The run's own counters; those that hostile actors made up only by their number."""
    counters = {name: count for name, count in coordinator.counters.items() if not name.startswith("c")}
    return {**counters, "names_made_up": len(coordinator.counters) - len(counters)}


def fuzz_server(messages: int, seed: int) -> Result:
    """The same messages and worse through the socket of a real service, which has to answer an observer at the end."""
    spec = paper_spec(2, 8).model_copy(update={"num_actors": PLACES})
    endpoint = socket_endpoint(new_run_token())
    result, begun = Result(messages=messages), time.perf_counter()
    try:
        with laid_out(spec, seed) as ground:
            server = Server(Router(endpoint), make_coordinator(spec, ground, Patience()))
            server.start()
            try:
                with closing(connected(endpoint, Role.LEARNER)):  # who is trusted, and could end the run
                    pester(server, endpoint, Hostile(seed, spec), result)
            finally:
                server.stop()
                server.join()
            ground.check()
    except Exception as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        remove_socket_directory(endpoint)
    result.seconds = round(time.perf_counter() - begun, 1)
    return result


def pester(server: Server, endpoint: str, hostile: Hostile, result: Result) -> None:
    """All messages, by strangers that come and go; then an observer asks how the service is."""
    draw = hostile.random
    line, before = Line(endpoint), resident_mib()
    for number in range(result.messages):
        if number == int(result.messages * WARM_UP):
            before = resident_mib()
        if draw.random() < 0.02:  # a stranger more
            line.close()
            line = Line(endpoint)
        if draw.random() < 0.005:  # not even ZeroMQ
            garbage_stream(endpoint, draw.randbytes(draw.choice((1, 20, 5000))))
        line.write(hostile.message())
        take_events(server, result)
    line.close()
    with closing(connected(endpoint, Role.OBSERVER)) as client:
        answer = client.exchange(Status(), StatusReport, resend_every_s=1.0, deadline_s=DEADLINE_S)
    take_events(server, result)
    if answer is None or not server.alive:
        result.problems.append("the service does not answer any more")
    else:
        counters = answer.report["counters"]
        result.counters = {name: count for name, count in counters.items() if not name.startswith("c") or "_" in name}
        result.rejected = counters.get("rejected_messages", 0)
    result.growth_mib = round(resident_mib() - before, 1)


def take_events(server: Server, result: Result) -> None:
    """What the service tells its process; of interest is only whether it has failed."""
    while not server.events.empty():
        if isinstance(event := server.events.get(), ServerFailed):
            result.problems.append(event.traceback)


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
