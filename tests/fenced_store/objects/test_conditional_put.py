"""Objects: what happens between the read and the conditional put."""

from __future__ import annotations

import ast
import csv
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from obstore.store import S3Store

import fenced_store
from fenced_store import StaleTokenError
from fenced_store.objects import FencedObjects, conditional
from fenced_store.objects.fence_tag import SEAL_BYTES
from tests.fenced_store.conftest import Place
from tests.support.s3 import accepted_in_order, bucket
from tests.support.stepwise import Stepwise


@pytest.mark.parametrize("sealed", [True, False])
def test_same_bytes_under_a_newer_token_get_another_version(s3: S3Store, sealed: bool) -> None:
    """S3's ETag identifies the bytes, not their writer. Without the seal, the stale writer is accepted."""
    FencedObjects(s3).put("a", b"the same", fence=5)
    stale, newer = FencedObjects(s3, probe=False), FencedObjects(s3, probe=False)
    for one in (stale, newer):
        assert isinstance(one._protocol, conditional.ConditionalProtocol)
        one._protocol._sealed = sealed
    newer.put("a", b"the same", fence=6)
    writer = Stepwise(stale, lambda objects: objects.put("a", b"stale", fence=7)).until("put")
    newer.put("a", b"the same", fence=8)
    if sealed:
        with pytest.raises(StaleTokenError, match="refuses token 7: token 8"):
            writer.finish()
    else:
        writer.finish()
        found = newer.get("a")
        assert found is not None
        assert (found.data, found.token) == (b"stale", 7), "without the seal the stale value wins"


def test_same_bytes_under_another_write_number_get_another_version(s3: S3Store) -> None:
    objects = FencedObjects(s3)
    objects.put("a", b"the same", fence=7, write=1)
    late = Stepwise(FencedObjects(s3, probe=False), lambda objects: objects.put("a", b"late", fence=7, write=2))
    late.until("put")
    objects.put("a", b"the same", fence=7, write=3)
    with pytest.raises(StaleTokenError, match="a later write of the same holder"):
        late.finish()


@pytest.mark.parametrize("there", [True, False], ids=["replacing", "creating"])
def test_lower_writer_that_read_the_same_version_is_refused(place: Place, there: bool) -> None:
    if there:
        place.objects().put("a", b"first", fence=1)
    lower = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"lower", fence=7)).until("put")
    higher = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"higher", fence=8)).until("put")
    higher.finish()
    with pytest.raises(StaleTokenError, match="refuses token 7: token 8"):
        lower.finish()
    found = place.objects().get("a")
    assert found is not None
    assert found.data == b"higher"


@pytest.mark.parametrize("there", [True, False], ids=["replacing", "creating"])
def test_higher_writer_that_read_the_same_version_stores_last(place: Place, there: bool) -> None:
    if there:
        place.objects().put("a", b"first", fence=1)
    lower = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"lower", fence=7)).until("put")
    higher = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"higher", fence=8)).until("put")
    lower.finish()
    higher.finish()
    found = place.objects().get("a")
    assert found is not None
    assert (found.data, found.token) == (b"higher", 8)


def test_claim_refuses_a_writer_that_has_already_read(place: Place) -> None:
    place.objects().put("a", b"first", fence=1)
    writer = Stepwise(place.objects(probe=False), lambda objects: objects.put("a", b"late", fence=7)).until("put")
    place.objects().claim("a", fence=8)
    with pytest.raises(StaleTokenError):
        writer.finish()
    found = place.objects().get("a")
    assert found is not None
    assert (found.data, found.token) == (b"first", 1)


def test_claim_keeps_a_value_written_between_its_read_and_put(s3: S3Store) -> None:
    objects = FencedObjects(s3)
    objects.put("a", b"first", fence=1)
    claimer = Stepwise(FencedObjects(s3, probe=False), lambda objects: objects.claim("a", fence=8)).until("put")
    objects.put("a", b"second", fence=7)
    claimer.finish()
    found = objects.get("a")
    assert found is not None
    assert (found.data, found.token) == (b"second", 7), "the claim has read the object again"


@pytest.mark.second_stage
def test_sixteen_writers_are_accepted_in_token_order(s3_address: str, s3: S3Store) -> None:
    """Judged by the server's own log of accepted puts."""
    pairs = [(token, number) for token in range(1, 31) for number in range(1, 5)]
    pairs.sort(key=lambda pair: pair[0] + random.gauss(0, 2))
    name = str(s3.config["bucket"])

    def write(writer: int) -> list[tuple[int, int]]:
        objects, mine = FencedObjects(bucket(s3_address, name), probe=False), []
        for token, number in pairs[writer::16]:
            try:
                objects.put("one", f"{token}.{number}".encode(), fence=token, write=number)
                mine.append((token, number))
            except StaleTokenError:
                continue
        return mine

    with ThreadPoolExecutor(16) as threads:
        told = [pair for mine in threads.map(write, range(16)) for pair in mine]
    done = accepted_in_order(s3_address, f"/{name}/one")
    assert done == sorted(set(done)), "accepted pairs strictly rise"
    assert sorted(told) == done, "exactly the writes that were reported as stored were stored"
    assert done[-1] == max(pairs)
    assert len(done) >= 5, "too few were accepted for this to prove much"


RACER = """
import json, sys
from fenced_store import StaleTokenError
from fenced_store.objects import FencedObjects
from tests.support.s3 import bucket
from tests.support.stepwise import Stepwise
objects = FencedObjects(bucket(sys.argv[1], sys.argv[2]), probe=False)
token = int(sys.argv[3])
for path in sys.stdin:
    writer = Stepwise(objects, lambda objects: objects.put(path.strip(), str(token).encode(), fence=token)).until("put")
    print("looked", flush=True)
    sys.stdin.readline()
    try:
        writer.finish()
        print("stored", flush=True)
    except StaleTokenError as error:
        print(error, flush=True)
"""


@pytest.mark.second_stage
def test_two_processes_that_race_for_one_version_end_with_the_higher_token(s3_address: str, s3: S3Store) -> None:
    """Both have read the same ETag and write at the same time. The lower one was first, or is refused."""
    name = str(s3.config["bucket"])
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, s3_address, name, str(token)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for token in (7, 8)
    ]

    def say(racer: Any, word: str) -> None:
        racer.stdin.write(f"{word}\n")
        racer.stdin.flush()

    def hear(racer: Any) -> str:
        return str(racer.stdout.readline()).strip()

    objects, told = FencedObjects(s3), []
    for round_ in range(30):
        path = f"raced/{round_}"
        if round_ % 2:
            objects.put(path, b"first", fence=1)
        for racer in racers:
            say(racer, path)
        assert [hear(racer) for racer in racers] == ["looked", "looked"]
        for racer in racers if round_ % 3 else reversed(racers):
            say(racer, "go on")
        lower, higher = (hear(racer) for racer in racers)
        found = objects.get(path)
        assert found is not None
        assert (found.data, found.token, higher) == (b"8", 8, "stored")
        assert lower == "stored" or "refuses token 7: token 8 was stored" in lower
        order = [token for token, _ in accepted_in_order(s3_address, f"/{name}/{path}")]
        assert order[-2:] == [7, 8] if lower == "stored" else order[-1:] == [8]
        told.append(lower)
    assert "stored" in told
    assert len(set(told)) > 1, "both orders occurred"
    for racer in racers:
        racer.communicate()


def example_of_the_docs() -> list[tuple[str, bytes]]:
    """Return the path and the body of the first put in the guide."""
    guide = (Path(fenced_store.__file__).parent.parent / "docs/guides/objects.md").read_text()
    found = re.findall(r'objects\.put\("([^"]+)", (b(?:"[^"]*"|\'[^\']*\'))', guide)
    return [(path, ast.literal_eval(body)) for path, body in found[:1]]


READERS: dict[str, Callable[[bytes], object]] = {
    "json": json.loads,
    "html": lambda body: [part for part in re.split(rb"\s*(<[^>]+>)\s*", body) if part],
    "svg": lambda body: ElementTree.tostring(ElementTree.fromstring(body)),
    "xml": lambda body: ElementTree.tostring(ElementTree.fromstring(body)),
    "csv": lambda body: list(csv.reader(body.decode().splitlines())),
    "jsonl": lambda body: [json.loads(line) for line in body.splitlines()],
}
"""How a program that knows nothing of fences reads an object of this kind."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("a.json", b'{"total": 140}'),
        ("a.json", b"[1, 2]\n"),
        ("a.xml", b"<a><b>1</b></a>\n"),
        ("a.svg", b'<svg xmlns="http://www.w3.org/2000/svg"/>'),
        ("a.html", b"<p>1</p>"),
        *example_of_the_docs(),
    ],
)
def test_programs_that_bypass_the_fence_read_the_same_value(s3: S3Store, path: str, body: bytes) -> None:
    FencedObjects(s3).put(path, body, fence=34)
    stored = bytes(s3.get(path).bytes())
    assert len(stored) == len(body) + SEAL_BYTES
    read = READERS[path.rpartition(".")[2]]
    assert read(stored) == read(body)


@pytest.mark.parametrize(("path", "body"), [("a.csv", b"a,b\n1,2\n"), ("a.jsonl", b'{"a": 1}\n')])
def test_formats_that_count_lines_are_not_kept_by_a_seal(s3: S3Store, path: str, body: bytes) -> None:
    """The docs name these formats, and recommend pointers for them."""
    FencedObjects(s3).put(path, body, fence=34)
    stored = bytes(s3.get(path).bytes())
    try:
        same = READERS[path.rpartition(".")[2]](stored) == READERS[path.rpartition(".")[2]](body)
    except ValueError:
        same = False
    assert not same
    assert stored[: len(body)] == body
