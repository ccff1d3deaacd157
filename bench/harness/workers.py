"""Run the clients of a contender: as processes, as threads of one process, or as tasks of one event loop.

A team is started once and then runs one block after another, so that connections and statements are warm. All clients
of a block begin at the same moment. Workers are forked from a server that has imported the peers and started nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from bench.harness import loads
from bench.harness.contender import Contender
from bench.harness.servers import die_with_parent, runs

LEAD = 0.03
"""Seconds between an order and the beginning of its block, in which every worker reads it."""

PATIENCE = 600.0
"""Seconds that a block may take."""

LOOK = 1.0
"""Seconds between two looks whether the servers of a contender still run: its clients may retry forever."""

KINDS = ("process", "thread", "task")

PRELOADED = [
    *("bench.harness.workers", "bench.peers.dblock_locks", "psycopg", "sqlalchemy"),
    *("redis", "redis.asyncio", "redis_lock", "kazoo.client", "grpc", "sqlalchemy_dlock"),
]
"""Imported once, as far as they are installed."""


class Done(NamedTuple):
    """What the clients of one worker did in a block."""

    values: list[Any]
    """What the load returned, for each client."""
    cpu: float
    """The processor seconds of the worker."""


class Failed(NamedTuple):
    """The error of a worker."""

    trace: str


class WorkerError(RuntimeError):
    """A worker failed, ended, or did not reply in time."""


class Team:
    """Clients of one contender that run loads together.

    A load is a function of `bench.harness.loads`. It begins at `start` on the monotonic clock.
    """

    def __init__(self, contender: Contender, clients: int = 1, kind: str = "process") -> None:
        self.contender, self.clients, self.kind = contender, clients, kind
        self.warm: set[str] = set()
        """The loads that have run before."""
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        """The workers."""

    def start(self) -> Team:
        """Start the workers, without waiting until they are ready."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        workers = self.clients if self.kind == "process" else 1
        each = 1 if self.kind == "process" else self.clients
        for number in range(workers):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(theirs, self.contender, self.kind, number * each, each), daemon=True
            )
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(worker)
        return self

    def __enter__(self) -> Team:
        try:
            if not self.processes:
                self.start()
            self.collect()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    @property
    def pids(self) -> set[int]:
        """The processes of the workers."""
        return {process.pid for process in self.processes}

    def begin(self, load: str, **arguments: Any) -> float:
        """Give out an order, and return the moment at which its block begins."""
        start, act = time.monotonic() + LEAD, loads.of(self.contender, self.kind, load)
        for pipe in self._pipes:
            pipe.send((act, start, arguments))
        return start

    def done_within(self, seconds: float) -> bool:
        """Return whether the block ends within this time."""
        deadline = time.monotonic() + seconds
        return all(pipe.poll(max(deadline - time.monotonic(), 0)) for pipe in self._pipes)

    def collect(self) -> list[Done]:
        """Wait for the end of the block."""
        deadline = time.monotonic() + PATIENCE
        return [self._result(pipe, deadline) for pipe in self._pipes]

    def _result(self, pipe: Connection, deadline: float) -> Any:
        name = self.contender.name
        while not pipe.poll(LOOK):
            if gone := [pid for pid in self.contender.servers if not runs(pid)]:
                raise WorkerError(f"the server of {name} (pid {gone[0]}) has ended")
            if time.monotonic() > deadline:
                raise WorkerError(f"a client of {name} did not end its block within {PATIENCE:g} s")
        try:
            result = pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise WorkerError(f"a client of {name} has ended") from error
        if isinstance(result, Failed):
            raise WorkerError(f"a client of {name} failed:\n{result.trace}")
        return result

    def run(self, load: str, **arguments: Any) -> list[Done]:
        """Run one block."""
        self.begin(load, **arguments)
        return self.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                if kind is None:
                    pipe.send(None)
                else:
                    process.kill()  # it may wait for a lock that no other client will release
        for process in self.processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        """End the workers that have not ended."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


def _work(pipe: Connection, contender: Contender, kind: str, first: int, clients: int) -> None:
    """Be one worker: run each load that arrives, until None does."""
    die_with_parent()  # also while it waits for a lock
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the benchmark ends its workers
    try:
        if kind == "task" or contender.is_async:
            asyncio.run(_serve_tasks(pipe, contender, first, clients))
        else:
            _serve_threads(pipe, contender, first, clients)
    except EOFError:
        return  # the benchmark has ended
    except BaseException:
        with contextlib.suppress(OSError):  # the benchmark has ended
            pipe.send(Failed(traceback.format_exc()))


def _serve_threads(pipe: Connection, contender: Contender, first: int, clients: int) -> None:
    peer = contender.open()
    runner = _Threads(clients) if clients > 1 else None
    pipe.send(True)
    while (order := pipe.recv()) is not None:
        load, start, arguments = order
        began = time.process_time()
        if runner is None:
            values = [load(peer, first, start, **arguments)]
        else:
            values = runner.run(lambda number, load=load, start=start, arguments=arguments: load(  # type: ignore[misc]
                peer, first + number, start, **arguments))  # fmt: skip
        pipe.send(Done(values, time.process_time() - began))
    peer.close()


class _Threads:
    """Threads that live as long as the worker, because some peers keep a connection for each thread."""

    def __init__(self, number: int) -> None:
        self._values: list[Any] = [None] * number
        self._errors: list[str] = []
        self._act: Callable[[int], Any] = lambda number: None
        self._begin, self._end = threading.Barrier(number + 1), threading.Barrier(number + 1)
        for index in range(number):
            threading.Thread(target=self._serve, args=(index,), daemon=True).start()

    def _serve(self, index: int) -> None:
        while True:
            self._begin.wait()
            try:
                self._values[index] = self._act(index)
            except Exception:
                self._errors.append(traceback.format_exc())
            self._end.wait()

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        self._act = act
        self._begin.wait()
        self._end.wait()
        if self._errors:
            raise RuntimeError(self._errors[0])
        return list(self._values)


async def _serve_tasks(pipe: Connection, contender: Contender, first: int, clients: int) -> None:
    peer = contender.open()
    # The loop runs on between blocks, because a client may have work of its own.
    ordered = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), ordered.set)
    pipe.send(True)
    while True:
        await ordered.wait()
        ordered.clear()
        if not pipe.poll():
            continue  # the loop may report an order twice
        if (order := pipe.recv()) is None:
            break
        load, start, arguments = order
        began = time.process_time()
        values = await asyncio.gather(*(load(peer, first + number, start, **arguments) for number in range(clients)))
        pipe.send(Done(list(values), time.process_time() - began))
    await peer.close()
