"""HTTP: many clients at once, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import psycopg
import pytest

from tests.fenced_store.http.conftest import shows
from tests.support.backends import TABLE
from tests.support.service import running_service


@pytest.fixture
def service(dsn: str, owner: psycopg.Connection) -> Iterator[str]:
    owner.execute(TABLE.format("public.things").encode())
    # Each request waits for all earlier ones, and the machine may be slow.
    with running_service(dsn, patience=50) as address:
        yield address


CLIENTS = 64


@pytest.mark.second_stage
@pytest.mark.parametrize("folder", ["held", pytest.param("stored", marks=pytest.mark.nightly)])
async def test_sixty_four_clients_are_served_in_token_order(
    service: str, owner: psycopg.Connection, folder: str
) -> None:
    """Accepted tokens rise, every refusal has its reason, and no response is a 500."""
    told: Counter[int] = Counter()
    accepted: list[tuple[float, float, int]] = []
    clock = asyncio.get_running_loop().time
    start = clock()

    async def caller(client: httpx.AsyncClient, number: int) -> None:
        for round_ in range(4):
            token = 1 + int((clock() - start) * 400) + random.randint(0, 60)
            headers = {**shows(token), "Fencing-Write": str(round_ * CLIENTS + number + 1)}
            kind = random.randrange(6)
            if kind == 0:
                headers["Fencing-Token"] = random.choice(["-1", "x", "9" * 40, "0"])
            elif kind == 1:
                del headers["Fencing-Token"]
            began = clock()
            answer = await client.put(f"/{folder}/one", content=f"{token}".encode(), headers=headers)
            told[answer.status_code] += 1
            if answer.status_code == 200:
                accepted.append((began, clock(), token))
            else:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["status"] == answer.status_code

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=service, timeout=60, limits=limits) as client:
        await asyncio.gather(*(caller(client, number) for number in range(CLIENTS)))
    assert set(told) <= {200, 400, 409, 428}, told
    assert min(told[status] for status in (200, 400, 409, 428)) > 5, told
    for began, _, token in accepted:
        assert not [one for one in accepted if one[1] < began and one[2] > token], "accepted tokens rise"
    async with httpx.AsyncClient(base_url=service) as client:
        assert int((await client.get(f"/{folder}/one")).content) == max(token for _, _, token in accepted)
