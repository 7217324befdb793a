"""handover: from an actor's COMMIT to rows that the learner can read, against a pickle through a pipe.

    actor's process   --COMMIT-->  service (a thread here)  --BATCH-->   learner's process      rows stay where they are
    actor's process   --pickled arrays through a socket pair-->          learner's process      rows travel

Two real child processes (handover_role) play actor and learner over the real server, coordinator, sockets and shared
memory; every second rollout goes both ways, one
after the other, the others after a rest. Both clocks are the system's monotonic one, which all
processes share on Linux. What must never happen: a child that outlives the measurement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from typing import Final

from rollout_service.bench.report import Report
from rollout_service.bench.rig import paper_spec, rollout_memory
from rollout_service.bench.timing import Figures, Samples
from rollout_service.control.coordinator import Coordinator
from rollout_service.control.endpoints import remove_socket_directory, socket_endpoint
from rollout_service.control.messages import Role
from rollout_service.control.server import Server
from rollout_service.control.transport import Router
from rollout_service.errors import RunFailed
from rollout_service.lifeline import PARENT_VARIABLE
from rollout_service.memory.schema import Role as FieldRole
from rollout_service.memory.segment import new_run_token
from rollout_service.memory.slots import RolloutMemory
from rollout_service.runspec import RunSpec

REPETITIONS: Final = 50
WARM_UP: Final = 3
SIZES: Final = ((4, 32), (16, 128), (64, 128))
DEADLINE_S: Final = 60.0
ROLE_MODULE: Final = "rollout_service.bench.handover_role"
SIDES: Final = ("shared", "rested", "pickled")

NOTES: Final = (
    "shared: COMMIT through the service to BATCH, header and last row read, as soon as the rows are in place",
    "rested: the same after all three processes have slept for 25 ms; pickled: the same arrays, send to recv",
)


def measure(repetitions: int = REPETITIONS, *, sizes: Sequence[tuple[int, int]] = SIZES) -> Report:
    """One case per (envs, steps). Raises RunFailed with the last words of a child that broke."""
    cases = dict(one_case(repetitions, envs, steps) for envs, steps in sizes)
    return Report("handover", "a rollout from one process to another, until readable", cases, NOTES)


def one_case(repetitions: int, envs: int, steps: int) -> tuple[str, Figures]:
    """The case's name, which holds the size, and its figures."""
    spec = paper_spec(envs, steps)
    with ExitStack() as stack:
        memory = stack.enter_context(rollout_memory(spec))
        endpoint = stack.enter_context(service(spec, memory, 2 * (WARM_UP + repetitions)))
        actors_end, learners_end = Pipe()
        # Closed here once they are inherited, so that a child that dies is an end of file to the other one.
        with actors_end, learners_end:
            actor = stack.enter_context(child(Role.ACTOR, endpoint, actors_end.fileno()))
            learner = stack.enter_context(child(Role.LEARNER, endpoint, learners_end.fileno()))
        sent, readable = stamps(actor, learner)
        travelling = sum(memory.array(f.name)[0].nbytes for f in memory.fields if f.role is not FieldRole.LEARNER)
    samples = Samples(
        {side: [end - begin for begin, end in zip(sent[side], readable[side], strict=True)][WARM_UP:] for side in SIDES}
    )
    figures = samples.medians("us") | samples.ratio("shared", "pickled")
    return f"{envs} envs x {steps}, {travelling / 2**20:.2f} MiB", figures


@contextmanager
def service(spec: RunSpec, memory: RolloutMemory, updates: int, weights_segment: str = "") -> Iterator[str]:
    """The service of a run of that many updates; gives its endpoint."""
    endpoint = socket_endpoint(new_run_token())
    try:
        coordinator = Coordinator(
            spec,
            run_id="bench",
            config_json="{}",
            rollout_segment=memory.name,
            weights_segment=weights_segment,
            total_updates=updates,
            step_timeout=DEADLINE_S,
        )
        server = Server(Router(endpoint), coordinator)
        server.start()
        try:
            yield endpoint
        finally:
            server.stop()
            server.join()
    finally:
        remove_socket_directory(endpoint)


@contextmanager
def child(role: Role, endpoint: str, descriptor: int) -> Iterator[subprocess.Popen[str]]:
    """A process that plays `role` and has its end of the pipe; gone at the end, one way or the other."""
    command = [sys.executable, "-m", ROLE_MODULE, role.value, endpoint, str(descriptor)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(descriptor,),
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def stamps(*processes: subprocess.Popen[str]) -> list[dict[str, list[float]]]:
    """Of each child: side -> the moments that it took down, in order. Raises RunFailed with the words of all."""
    try:
        heard = [process.communicate(timeout=DEADLINE_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise RunFailed(f"a process of the hand-over was not through within {DEADLINE_S:g} s") from None
    codes = [process.returncode for process in processes]
    if any(codes):
        words = "\n".join(words[-4000:].strip() for _, words in heard)
        raise RunFailed(f"the processes of the hand-over ended with exit codes {codes}\n{words}")
    return [json.loads(answer) for answer, _ in heard]
