"""What the parts of one server share: its settings, its database, the requests that wait, and the feed of snapshots."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import HTTPConnection
from starlette.responses import Response

from dblock._core.outage import Outage
from dblock.server.database import Database
from dblock.server.feed import Feed
from dblock.server.ids import Signer
from dblock.server.problems import problem_of
from dblock.server.settings import Settings
from dblock.server.waits import Waits

logger = logging.getLogger("dblock")


class Service:
    """The parts of one server. Handlers find it as `request.app.state.service`, or with `service_of`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings)
        self.stopping = asyncio.Event()
        """Set when the server stops. Waits and streams then end at once."""
        self.waits = Waits(self.database, settings.limits, self.stopping)
        self.feed = Feed(self.database, self.stopping)
        self._signer: Signer | None = None
        self._outage = Outage("server: the database replies again", logging.WARNING)

    async def signer(self) -> Signer:
        """Return the signer of this installation's IDs."""
        if self._signer is None:
            self._signer = Signer(await self.database.installation())
        return self._signer

    def refusal(self, error: Exception) -> Response:
        """Return the reply to a request that failed, and log what the reply leaves out."""
        problem = problem_of(error)
        if problem.status == 500:
            logger.exception("server: unexpected error, the request failed", exc_info=error)
        elif problem.kind == "database-away":
            self._outage.failed("server: the database is not available, requests get 503: %s", error)
        return problem.response()

    def worked(self) -> None:
        """Log that the database replies again, if an outage was logged."""
        self._outage.worked()

    async def close(self) -> None:
        """End all waits and streams, and close the connections. Leases stay held."""
        self.stopping.set()
        await self.waits.ended()
        await self.feed.close()
        await self.database.close()


def service_of(connection: HTTPConnection) -> Service:
    """Return the service that a request belongs to."""
    service: Service = connection.app.state.service
    return service
