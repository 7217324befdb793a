"""Messages that are wrong in every way: what the fuzzer throws at a service. All drawn from one seed.

Who uses it: `bench.fuzz`. Left to others: who says them, and what must not follow.
"""

from __future__ import annotations

import random
from typing import Any, Final

import msgpack

from rollout_service.control.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGES,
    Commit,
    Heartbeat,
    Hello,
    Join,
    Ready,
    Role,
    Status,
    encode,
)
from rollout_service.runspec import PROTOCOL_VERSION, RunSpec

EDGES: Final = (0, 1, -1, 2, 7, 8, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
REMEMBERED: Final = 500
"""Messages of others that are said again."""


class Hostile:
    """Draws messages that are wrong in every way, and some that are right but in the wrong place."""

    def __init__(self, seed: int, spec: RunSpec) -> None:
        self.random = random.Random(seed)
        self._places = spec.num_actors
        self._join = Join(
            spaces=spec.spaces,
            autoreset=spec.autoreset,
            run_digest=spec.digest(),
            state_strategy=spec.state_strategy,
        )
        self._seen: list[bytes] = [encode(self._join), encode(Status()), encode(Ready(version=3))]
        self._kinds = (
            self._noise, self._bent, self._cut, self._wrong_values, self._wrong_values, self._again, self._again,
            self._nested, self._long, self._other_version, self._no_type, self._hello, self._hello, self._right_join,
            self._commit, self._commit, self._heartbeat, self._right_name_wrong_fields,
        )  # fmt: skip

    def remember(self, data: bytes) -> None:
        """Somebody said this: it will come again, from others and out of order."""
        if len(self._seen) < REMEMBERED:
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

    def _right_join(self) -> bytes:
        """Who has got a place gets slots for it."""
        return encode(self._join)

    def _hello(self) -> bytes:
        role = self.random.choice(list(Role))
        digest = self.random.choice((None, "another run"))
        place = self.random.choice((None, 0, 1, self._places, 2**40))
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
