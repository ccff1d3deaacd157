"""What goes wrong, and when: drawn at random for one run, while the storm lasts."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from psycopg import errors as pg

from dblock._core.listener_failures import ServerState
from tests.robustness.simulation.client import Client

if TYPE_CHECKING:
    from tests.robustness.simulation.run import Run

LONGEST = 4.0
"""Seconds for which a process is stopped or cut off at most: longer than any lease here lasts."""

TERMINATED = 0.5
"""The share of closed connections whose session an administrator has terminated: the server says so and goes on."""

RETURNS_AFTER = 1.001
"""Seconds after which a primary that was frozen is the leader again, at least."""


class Faults:
    """The faults of processes and of the database."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._world = run.world
        chance = run.world.random
        kinds: dict[Callable[[], object], float] = {
            self.stop: 1.5,
            self.cut_off: 1.0,
            self.hang_up: 1.0,
            self.lose_touch: 2.5,
            self.refuse_listener: 1.5,
            self.stop_and_hang_up: 0.7,
            self.give_up: 2.0,
            self.force_release: 1.5,
            self.reap: 1.0,
            self.die: 0.6,
            self.restart: 1.2,
        }
        if run.database.mortal:
            kinds[self.crash] = 0.6
            kinds[self.promote] = 0.8
            kinds[self.promote_sibling] = 0.4
            kinds[self.flip_back] = 0.4
            self._flush()
        kinds.update(run.recipe_faults)
        for _ in range(chance.randrange(0, 14)):
            kind = chance.choices(list(kinds), list(kinds.values()))[0]
            run.world.after(chance.uniform(0.05, run.storm * 0.95), kind)

    def _say(self, who: str, what: str) -> None:
        if self._world.tracing:
            self._world.say(who, what)

    def _any_client(self) -> Client | None:
        living = [client for client in self._run.clients if not client.dead]
        return self._world.random.choice(living) if living else None

    def stop(self) -> None:
        client = self._any_client()
        if client is not None:
            self._stop(client)

    def _stop(self, client: Client) -> None:
        if not client.stopped:
            self._say(client.name, "is stopped")
            client.stop()
            self._world.after(self._world.random.uniform(0.05, LONGEST), self._go_on, client)

    def _go_on(self, client: Client) -> None:
        if client.stopped:
            self._say(client.name, "continues")
            client.go_on()

    def cut_off(self) -> None:
        client = self._any_client()
        if client is not None:
            self._cut_off(client)

    def _cut_off(self, client: Client) -> None:
        if not client.cut_off:
            self._say(client.name, "is cut off")
            client.cut_off = True
            self._world.after(self._world.random.uniform(0.05, LONGEST), self._reconnect, client)

    def _reconnect(self, client: Client) -> None:
        self._say(client.name, "is not cut off any more")
        client.cut_off = False

    def hang_up(self, sessions: Container[int] | None = None) -> Client | None:
        """Close the connection of one listener, only of one with such a session if they are named."""
        connections = [one for one in self._run.network.connections.values() if not one.process.cut_off]
        if sessions is not None:
            connections = [one for one in connections if one.session in sessions]
        if not connections:
            return None
        connection = self._world.random.choice(connections)
        if self._world.chance(TERMINATED):
            self._say(connection.process.name, "its listener's session is terminated by an administrator")
            self._run.network.hang_up(connection, pg.AdminShutdown("terminating connection"))
        else:
            self._say(connection.process.name, "its listener's connection is closed")
            self._run.network.hang_up(connection)
        return next(client for client in self._run.clients if client is connection.process)

    def lose_touch(self) -> None:
        """Close a connection, and cut the process off from the moment on at which its machine knows."""
        client = self.hang_up()
        if client is not None:
            self._world.after(0.011, self._cut_off, client)

    def refuse_listener(self) -> None:
        """Close a listener's connection, and refuse new ones for a while. Calls get through."""
        client = self.hang_up()
        if client is not None:
            self._say(client.name, "gets no new connection for its listener")
            client.refused = True
            self._world.after(self._world.random.uniform(0.05, LONGEST), self._take, client)

    def _take(self, client: Client) -> None:
        client.refused = False

    def stop_and_hang_up(self) -> None:
        """Close a connection while its process is stopped and cannot report that it is alive."""
        client = self.hang_up()
        if client is not None:
            self._stop(client)

    def give_up(self) -> None:
        workers = [worker for worker in self._run.workers if not worker.done and not worker.client.dead]
        if workers:
            worker = self._world.random.choice(workers)
            if not worker.client.stopped:
                self._say(worker.thread, "is cancelled")
                worker.cancel()

    def die(self) -> None:
        client = self._any_client()
        if client is not None and sum(not one.dead for one in self._run.clients) > 1:
            self._say(client.name, "dies")
            client.die()

    def force_release(self) -> None:
        database, chance = self._run.database, self._world.random
        rows = [row for row in database.store.tables.rows.values() if row.expires_at > self._world.now]
        if rows and database.up:
            row, now = chance.choice(rows), chance.random() < 0.4
            self._say("operator", f"force-releases {row.name} under {row.token}{' now' if now else ''}")
            database.call(None, lambda: database.store.force_release(row.name, row.token, now))
            if now and chance.random() < 0.8:
                database.call(None, lambda: database.store.wake_if_free(row.name))

    def reap(self) -> None:
        database, idle = self._run.database, self._world.random.choice([0.0, 0.5, 60.0])
        if database.up:
            gone = database.call(None, lambda: database.store.reap(idle))
            self._say("operator", f"reaps {gone} locks idle for {idle} s")

    def restart(self) -> None:
        """Shut the server down and start it again: all sessions end, at once or after a while."""
        database = self._run.database
        if not database.accepts:
            return
        database.state = ServerState.SHUTTING_DOWN
        if self._world.chance(0.5):
            self._say("database", "waits until its sessions end")
            seconds = self._world.random.uniform(0.05, 3.0)
            self._world.after(seconds / 2 * self._world.random.random(), self._lose_client)
            self._world.after(seconds, self._end_sessions)
        else:
            self._end_sessions()

    def _lose_client(self) -> None:
        """Close both connections of the first client that holds a lock with a queue while the server waits."""
        database, store, now = self._run.database, self._run.store, self._world.now
        if not database.up or database.accepts:
            return
        held = [row for row in store.tables.rows.values() if row.waiting and row.expires_at > now]
        marks = [store.marks.get(row.presence or "") for row in held]
        client = self.hang_up({mark.session for mark in marks if mark is not None})
        if client is None:
            self._world.after(0.1, self._lose_client)
        else:
            client.other_session.end(terminated=False)

    def _end_sessions(self) -> None:
        database, chance = self._run.database, self._world.random
        if not database.up or database.accepts:
            return
        self._say("database", "ends all sessions and shuts down")
        self._run.network.shut_down()
        for client in self._run.clients:
            client.other_session.end(terminated=not client.cut_off)
        database.restart()
        database.up = False
        down_for, starts_for = chance.uniform(0.01, 0.5), chance.uniform(0.01, 0.5)
        if chance.random() < 0.5:
            self._world.after(down_for * chance.random(), self._now_is, ServerState.UNKNOWN)
        self._world.after(down_for, self._now_is, ServerState.STARTING)
        self._world.after(down_for + starts_for, self.come_up)

    def _now_is(self, state: ServerState) -> None:
        if not self._run.database.up:
            self._say("database", f"is {state.value}")
            self._run.database.state = state

    def crash(self) -> None:
        self._replace(self._run.database.crash, "crashes")

    def promote(self) -> None:
        self._replace(self._run.database.promote, "is replaced by its standby")

    def promote_sibling(self) -> None:
        if self._run.database.was_promoted:
            self._replace(self._run.database.promote_sibling, "is replaced by a standby that saw nothing of it")

    def flip_back(self) -> None:
        # Tokens may be a second behind the clock. A cluster manager needs longer to make a node the leader again.
        if self._run.database.was_promoted:
            self._replace(self._run.database.flip_back, "is replaced by the server before it", RETURNS_AFTER)

    def _replace(self, act: Callable[[], None], what: str, least: float = 0.01) -> None:
        database = self._run.database
        if database.up:
            self._say("database", what)
            self._run.network.crash()
            act()
            database.up, database.state = False, ServerState.STARTING
            self._run.checks.database_replaced()
            self._world.after(self._world.random.uniform(least, least + 1.0), self.come_up)

    def come_up(self) -> None:
        if not self._run.database.accepts:
            self._say("database", "is up")
            self._run.database.up, self._run.database.state = True, ServerState.UNKNOWN

    def _flush(self) -> None:
        """Flush asynchronous commits every now and then, as the WAL writer does. The standby follows."""
        if self._world.now < self._run.storm:
            self._run.database.flush()
            if self._world.chance(0.7):
                self._run.database.replicate()
            self._world.after(self._world.random.uniform(0.05, 0.6), self._flush)

    def end(self) -> None:
        """End all faults."""
        self._say("weather", "is calm")
        self.come_up()
        for client in self._run.clients:
            client.cut_off = client.refused = False
            if client.stopped:
                client.go_on()
