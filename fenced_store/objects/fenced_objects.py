"""FencedObjects and AsyncFencedObjects: check the arguments, choose the protocol that the store needs, and run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

try:
    from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("fenced_store.objects needs obstore: pip install 'dblock[objects]'") from error

from fenced_store._postgres.identifiers import check_path, check_resource
from fenced_store.errors import InvalidArgument
from fenced_store.objects.conditional import Conditional, Found
from fenced_store.objects.fence_tag import AZURE_NAMES, NAMES, Mark, check_attributes
from fenced_store.objects.flow import AsyncRunner, Runner
from fenced_store.objects.pointers import Pointed, Read, check_body_path
from fenced_store.store import PATIENCE, AsyncClaims, AsyncFencedStore, Claims, FencedStore
from fenced_store.tokens import HasToken, Shown, check_write, token_of, who, write_of


@dataclass(frozen=True)
class StoredObject:
    """A write of an object that was accepted."""

    path: str
    token: int
    write: int
    repeated: bool
    """Whether it had been accepted before, and this was the same one again."""


@dataclass(frozen=True)
class Object:
    """An object as it was read."""

    path: str
    data: bytes
    token: int
    """The token that its writer carried; 0 if it was written around the fence."""
    stored_at: datetime
    stored_by: str | None
    attributes: Mapping[str, str]


class _ObjectsBase:
    """What both kinds know: which way a store goes, and what goes into it."""

    def __init__(self, store: Any, pointers: Any, namespace: str, writer: str | None, probe: bool) -> None:
        self._writer = check_resource(writer) if writer is not None else None
        if not hasattr(store, "put") or not hasattr(store, "put_async"):
            raise InvalidArgument(
                f"FencedObjects needs a store of obstore's, such as LocalStore('/srv/reports') or S3Store('reports'); "
                f"got "
                f"{type(store).__name__}."
            )
        if pointers is None and namespace != "objects":
            raise InvalidArgument("A namespace is that of pointers, and there are none.")
        self._names = AZURE_NAMES if isinstance(store, AzureStore) else NAMES
        self._way: Conditional | Pointed
        if pointers is not None:
            self._way = Pointed(namespace, _folder_of(store))
        elif isinstance(store, (S3Store, GCSStore, AzureStore, MemoryStore)):
            # S3's ETag is a digest of the body; the others' is new with every write.
            self._way = Conditional(isinstance(store, S3Store), probe)
        else:
            raise InvalidArgument(
                f"{type(store).__name__} has no conditional put, or none that is known here. Give "
                "pointers=FencedStore(...), so that a fenced row in Postgres says which body counts."
            )

    def _check(self, path: str) -> str:
        check_path(path)
        if isinstance(self._way, Pointed):
            check_body_path(path)
        return path

    def _shown(self, fence: int | HasToken) -> Shown:
        return Shown(token_of(fence), self._writer or who(fence))

    def _sweeping(self, fence: int | HasToken | None) -> Shown | None:
        if fence is None:
            return None
        shown = self._shown(fence)
        return shown._replace(who=f"{shown.who}, sweeping")

    def _mark(
        self,
        data: bytes | None,
        shown: Shown,
        fence: int | HasToken,
        write: int | None,
        attributes: dict[str, str] | None = None,
    ) -> Mark:
        number = write_of(fence) if write is None else check_write(write)
        return Mark.of(shown.token, number, data, shown.who, attributes)

    def _read(self, path: str, found: Found | Read | None) -> Object | None:
        if found is None:
            return None
        if isinstance(found, Read):
            return Object(path, found.body, found.mark.token, found.at, found.by, found.attributes)
        mark = found.mark
        at, by, token = found.meta["last_modified"], None, 0
        if mark is not None:
            token, by = mark.value_pair[0], (mark.value_by if mark.value_token is not None else mark.by) or None
            at = datetime.fromisoformat(mark.value_at) if mark.value_at else at
        return Object(path, found.body, token, at, by, found.attributes)

    def _paths(self, paths: tuple[str, ...]) -> list[str]:
        if not paths:
            raise InvalidArgument("A claim names at least one object; none was given.")
        return sorted({self._check(path) for path in paths})


class FencedObjects(_ObjectsBase):
    """Objects of an obstore store, for threads."""

    def __init__(
        self,
        store: Any,
        *,
        pointers: FencedStore | None = None,
        namespace: str = "objects",
        writer: str | None = None,
        probe: bool = True,
    ) -> None:
        """Name the store, of obstore's; it stays the user's.

        S3, Google Cloud Storage, Azure and memory compare by themselves. Any other, such as a local folder, needs
        `pointers`: a FencedStore that says which body counts, under keys that begin with `namespace`. With the first
        write it is tried once whether the store heeds conditions and keeps attributes; `probe=False` takes it on trust.
        """
        if pointers is not None and not isinstance(pointers, FencedStore):
            raise InvalidArgument(f"FencedObjects needs a FencedStore for its pointers; got {type(pointers).__name__}.")
        super().__init__(store, pointers, namespace, writer, probe)
        self._runner = Runner(store, pointers)

    def put(
        self,
        path: str,
        data: bytes,
        *,
        fence: int | HasToken,
        write: int | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> StoredObject:
        """Store an object; raise StaleTokenError when a newer holder has written or claimed it.

        `fence` is a lease or a token. `write` numbers the writes under a token; by default it comes by itself, and is
        given only to send the same write again. `attributes` are the store's, such as Content-Type.
        """
        body, kept, shown = _bytes(data), check_attributes(attributes, self._names), self._shown(fence)
        mark = self._mark(body, shown, fence, write, kept)
        repeated = self._runner.run(self._way.put(self._check(path), mark, body, kept, shown))
        return StoredObject(path, mark.token, mark.write, repeated)

    def delete(self, path: str, *, fence: int | HasToken, write: int | None = None) -> StoredObject:
        """Delete an object on the same terms as `put`. Its fence stays, as a small object or row."""
        shown = self._shown(fence)
        mark = self._mark(None, shown, fence, write)
        repeated = self._runner.run(self._way.put(self._check(path), mark, b"", {}, shown))
        return StoredObject(path, mark.token, mark.write, repeated)

    def get(self, path: str) -> Object | None:
        """Return an object, whole, or None."""
        return self._read(path, self._runner.run(self._way.get(self._check(path))))

    def claims(self, *paths: str) -> Claims:
        """Name objects for `client.lock(…, claims=[objects.claims("a", "b")])`."""
        return Claims(self, self._paths(paths))

    def claim(self, *paths: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise the fences of these objects to a token, and refuse all lower ones from now on.

        On S3, Google Cloud Storage and Azure each object is read and stored again, because that is where its fence is:
        one after the other, and FenceAhead or ClaimTimeout of one leaves those before it claimed. With pointers it is
        all of them or none.
        """
        self._runner.run(self._way.claim(self._paths(paths), self._shown(fence), _patience(patience)))

    def sweep(self, prefix: str = "", *, fence: int | HasToken | None = None) -> list[str]:
        """Remove bodies that no pointer will ever point to, in a folder and below; return their names.

        Takes nothing that is in use or may yet be, whoever is at work. What a writer that died has left above the
        current version goes with the next version; with a `fence` it goes now. Its token claims every object there that
        has bodies, so let the lock that it comes from be the one that guards all of them; those whose fence is higher
        already are swept as without it.
        """
        return self._runner.run(self._way.sweep(_prefix(prefix), self._sweeping(fence), PATIENCE))

    def high_water(self, prefix: str = "") -> int:
        """Return the highest token that these objects have seen, 0 for none: after a restore, tokens must be above it.

        Looks at every object. With pointers it knows the tokens of the bodies that are there; `fenced_store.high_water`
        knows those of claims and deletions.
        """
        return self._runner.run(self._way.high_water(_prefix(prefix)))


class AsyncFencedObjects(_ObjectsBase):
    """Objects of an obstore store, for asyncio. Each word means what it means in FencedObjects."""

    def __init__(
        self,
        store: Any,
        *,
        pointers: AsyncFencedStore | None = None,
        namespace: str = "objects",
        writer: str | None = None,
        probe: bool = True,
    ) -> None:
        """Name the store, of obstore's; it stays the user's."""
        if pointers is not None and not isinstance(pointers, AsyncFencedStore):
            raise InvalidArgument(
                f"AsyncFencedObjects needs an AsyncFencedStore for its pointers; got {type(pointers).__name__}."
            )
        super().__init__(store, pointers, namespace, writer, probe)
        self._runner = AsyncRunner(store, pointers)

    async def put(
        self,
        path: str,
        data: bytes,
        *,
        fence: int | HasToken,
        write: int | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> StoredObject:
        """Store an object; raise StaleTokenError when a newer holder has written or claimed it."""
        body, kept, shown = _bytes(data), check_attributes(attributes, self._names), self._shown(fence)
        mark = self._mark(body, shown, fence, write, kept)
        repeated = await self._runner.run(self._way.put(self._check(path), mark, body, kept, shown))
        return StoredObject(path, mark.token, mark.write, repeated)

    async def delete(self, path: str, *, fence: int | HasToken, write: int | None = None) -> StoredObject:
        """Delete an object on the same terms as `put`. Its fence stays, as a small object or row."""
        shown = self._shown(fence)
        mark = self._mark(None, shown, fence, write)
        repeated = await self._runner.run(self._way.put(self._check(path), mark, b"", {}, shown))
        return StoredObject(path, mark.token, mark.write, repeated)

    async def get(self, path: str) -> Object | None:
        """Return an object, whole, or None."""
        return self._read(path, await self._runner.run(self._way.get(self._check(path))))

    def claims(self, *paths: str) -> AsyncClaims:
        """Name objects for `client.lock(…, claims=[objects.claims("a", "b")])`."""
        return AsyncClaims(self, self._paths(paths))

    async def claim(self, *paths: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise the fences of these objects to a token, and refuse all lower ones from now on."""
        await self._runner.run(self._way.claim(self._paths(paths), self._shown(fence), _patience(patience)))

    async def sweep(self, prefix: str = "", *, fence: int | HasToken | None = None) -> list[str]:
        """Remove bodies that no pointer will ever point to, in a folder and below; return their names."""
        return await self._runner.run(self._way.sweep(_prefix(prefix), self._sweeping(fence), PATIENCE))

    async def high_water(self, prefix: str = "") -> int:
        """Return the highest token that these objects have seen, 0 for none: after a restore, tokens must be above
        it.
        """
        return await self._runner.run(self._way.high_water(_prefix(prefix)))


def _prefix(prefix: str) -> str:
    return check_path(prefix) if prefix else ""


def _patience(patience: float) -> float:
    if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 86_400:
        raise InvalidArgument(f"The patience of a claim is more than 0 s and less than a day; got {patience!r:.80}.")
    return patience


def _bytes(data: Any) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"An object is bytes; got {type(data).__name__}.")
    return bytes(data)


def _folder_of(store: Any) -> Path | None:
    if not isinstance(store, LocalStore):
        return None
    if store.prefix is None:
        raise InvalidArgument("This LocalStore is the whole file system. Give it a folder: LocalStore('/srv/reports').")
    folder = Path(store.prefix)
    if not folder.is_absolute():
        raise InvalidArgument(
            f"The folder {str(folder)!r} depends on where the program runs; give LocalStore all of it."
        )
    return folder
