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
    raise ModuleNotFoundError("fenced_store.objects needs obstore: pip install 'obstore>=0.9'") from error

from fenced_store._calls import PATIENCE
from fenced_store._postgres.identifiers import check_path, check_resource
from fenced_store.errors import InvalidArgument
from fenced_store.objects.conditional import ConditionalProtocol, FoundObject
from fenced_store.objects.fence_tag import ATTRIBUTE_NAMES, AZURE_ATTRIBUTE_NAMES, FenceTag, check_attributes
from fenced_store.objects.flow import AsyncRunner, Flow, Runner
from fenced_store.objects.pointers import PointedObject, PointerProtocol, check_body_path
from fenced_store.store import AsyncClaims, AsyncFencedStore, Claims, FencedStore
from fenced_store.tokens import HasToken, PresentedToken, check_write, describe_writer, token_of, write_of


@dataclass(frozen=True)
class StoredObject:
    """An accepted write of an object."""

    path: str
    token: int
    write: int
    repeated: bool
    """Whether the same write had been accepted before, so that this one changed nothing."""


@dataclass(frozen=True)
class Object:
    """An object as it was read."""

    path: str
    data: bytes
    token: int
    """The token that its writer carried; 0 if the writer bypassed the fence."""
    stored_at: datetime
    stored_by: str | None
    attributes: Mapping[str, str]


class _ObjectsBase:
    """The part of both classes that does no I/O: the choice of the protocol, and the flow of each operation."""

    def __init__(self, store: Any, pointers: Any, namespace: str, writer: str | None, probe: bool) -> None:
        self._writer = check_resource(writer) if writer is not None else None
        if not hasattr(store, "put") or not hasattr(store, "put_async"):
            raise InvalidArgument(
                "FencedObjects needs a store of obstore, such as LocalStore('/srv/reports') or S3Store('reports'); got "
                f"{type(store).__name__}."
            )
        if pointers is None and namespace != "objects":
            raise InvalidArgument("A namespace is for pointers; give pointers= too, or leave namespace= out.")
        self._attribute_names = AZURE_ATTRIBUTE_NAMES if isinstance(store, AzureStore) else ATTRIBUTE_NAMES
        self._protocol: ConditionalProtocol | PointerProtocol
        if pointers is not None:
            self._protocol = PointerProtocol(namespace, _folder_of(store))
        elif isinstance(store, (S3Store, GCSStore, AzureStore, MemoryStore)):
            # On S3 the version is the ETag, a digest of the body. The other stores give each write a new version.
            self._protocol = ConditionalProtocol(isinstance(store, S3Store), probe)
        else:
            raise InvalidArgument(
                f"{type(store).__name__} has no conditional put that fenced_store knows. Give "
                "pointers=FencedStore(...), so that a fenced row in Postgres points to the current body."
            )

    def _check(self, path: str) -> str:
        check_path(path)
        if isinstance(self._protocol, PointerProtocol):
            check_body_path(path)
        return path

    def _check_all(self, paths: tuple[str, ...]) -> list[str]:
        if not paths:
            raise InvalidArgument("A claim names at least one object; none was given.")
        return sorted({self._check(path) for path in paths})

    def _present(self, fence: int | HasToken) -> PresentedToken:
        return PresentedToken(token_of(fence), self._writer or describe_writer(fence))

    def _put(
        self,
        path: str,
        data: bytes,
        fence: int | HasToken,
        write: int | None,
        attributes: Mapping[str, str] | None,
    ) -> Flow[StoredObject]:
        body, kept, presented = _bytes(data), check_attributes(attributes, self._attribute_names), self._present(fence)
        return self._write(path, body, kept, presented, fence, write)

    def _delete(self, path: str, fence: int | HasToken, write: int | None) -> Flow[StoredObject]:
        return self._write(path, None, {}, self._present(fence), fence, write)

    def _write(
        self,
        path: str,
        data: bytes | None,
        attributes: dict[str, str],
        presented: PresentedToken,
        fence: int | HasToken,
        write: int | None,
    ) -> Flow[StoredObject]:
        number = write_of(fence) if write is None else check_write(write)
        tag = FenceTag.of(presented.token, number, data, presented.writer, attributes)
        repeated = yield from self._protocol.put(self._check(path), tag, data or b"", attributes, presented)
        return StoredObject(path, tag.token, tag.write, repeated)

    def _get(self, path: str) -> Flow[Any]:
        return self._protocol.get(self._check(path))

    def _claim(self, paths: tuple[str, ...], fence: int | HasToken, patience: float) -> Flow[None]:
        return self._protocol.claim(self._check_all(paths), self._present(fence), _check_patience(patience))

    def _sweep(self, prefix: str, fence: int | HasToken | None) -> Flow[list[str]]:
        presented = None
        if fence is not None:
            presented = self._present(fence)
            presented = presented._replace(writer=f"{presented.writer}, sweeping")
        return self._protocol.sweep(_check_prefix(prefix), presented, PATIENCE)

    def _high_water(self, prefix: str) -> Flow[int]:
        return self._protocol.high_water(_check_prefix(prefix))

    @staticmethod
    def _as_object(path: str, found: FoundObject | PointedObject | None) -> Object | None:
        if found is None:
            return None
        if isinstance(found, PointedObject):
            return Object(path, found.body, found.tag.token, found.at, found.by, found.attributes)
        tag = found.tag
        at, by, token = found.meta["last_modified"], None, 0
        if tag is not None:
            token, by = tag.value_pair[0], (tag.value_by if tag.value_token is not None else tag.by) or None
            at = datetime.fromisoformat(tag.value_at) if tag.value_at else at
        return Object(path, found.body, token, at, by, found.attributes)


class FencedObjects(_ObjectsBase):
    """Fenced objects in a store of obstore, for threads."""

    def __init__(
        self,
        store: Any,
        *,
        pointers: FencedStore | None = None,
        namespace: str = "objects",
        writer: str | None = None,
        probe: bool = True,
    ) -> None:
        """Fence the objects of a store of obstore. The store stays yours.

        S3, Google Cloud Storage, Azure and memory have conditional put. Any other store, such as a local folder, needs
        `pointers`: a FencedStore that points to the current body of each object, under keys that begin with
        `namespace`. The first write probes the store: it must keep attributes, give each write a new version, and
        honour conditions. `probe=False` skips the probe.
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
        """Store an object. Raise StaleTokenError if a newer holder has written or claimed it.

        `fence` is a lease or a token. `write` is the number of the write under its token. Give it only to retry a
        write: by default each write gets the next number. `attributes` are the store's, such as Content-Type.
        """
        return self._runner.run(self._put(path, data, fence, write, attributes))

    def delete(self, path: str, *, fence: int | HasToken, write: int | None = None) -> StoredObject:
        """Delete an object under the same conditions as `put`. Its fence stays, as a small object or row."""
        return self._runner.run(self._delete(path, fence, write))

    def get(self, path: str) -> Object | None:
        """Return an object with its whole body, or None if there is none."""
        return self._as_object(path, self._runner.run(self._get(path)))

    def claims(self, *paths: str) -> Claims:
        """Return claims on objects, for `client.lock(…, claims=[objects.claims("a", "b")])`."""
        return Claims(self, self._check_all(paths))

    def claim(self, *paths: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise the fences of these objects to a token, so that all lower tokens are refused.

        On S3, Google Cloud Storage and Azure, each object is read and stored again, one after the other, because the
        object carries its fence. If one raises FenceAhead or ClaimTimeout, the objects before it stay claimed. With
        pointers, either all objects are claimed or none.
        """
        self._runner.run(self._claim(paths, fence, patience))

    def sweep(self, prefix: str = "", *, fence: int | HasToken | None = None) -> list[str]:
        """Remove bodies that no pointer will ever point to, in a folder and below; return their names.

        A sweep is safe while writers run: it removes no body that is in use or may still be used. A body that a dead
        writer has left above the current version is removed by a sweep after the next version, or now if you give a
        `fence`. The token of that fence claims every object in the folder that has bodies, so take it from the lock
        that guards all of them. Objects whose fence is already higher are swept as without a fence.
        """
        return self._runner.run(self._sweep(prefix, fence))

    def high_water(self, prefix: str = "") -> int:
        """Return the highest token that these objects have seen, 0 for none. After a restore, raise tokens above it.

        Reads every object. With pointers it knows only the tokens of existing bodies; `fenced_store.high_water` knows
        those of claims and deletions.
        """
        return self._runner.run(self._high_water(prefix))


class AsyncFencedObjects(_ObjectsBase):
    """Fenced objects in a store of obstore, for asyncio, with the methods of FencedObjects."""

    def __init__(
        self,
        store: Any,
        *,
        pointers: AsyncFencedStore | None = None,
        namespace: str = "objects",
        writer: str | None = None,
        probe: bool = True,
    ) -> None:
        """Fence the objects of a store of obstore. The store stays yours."""
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
        """Store an object. Raise StaleTokenError if a newer holder has written or claimed it."""
        return await self._runner.run(self._put(path, data, fence, write, attributes))

    async def delete(self, path: str, *, fence: int | HasToken, write: int | None = None) -> StoredObject:
        """Delete an object under the same conditions as `put`. Its fence stays, as a small object or row."""
        return await self._runner.run(self._delete(path, fence, write))

    async def get(self, path: str) -> Object | None:
        """Return an object with its whole body, or None if there is none."""
        return self._as_object(path, await self._runner.run(self._get(path)))

    def claims(self, *paths: str) -> AsyncClaims:
        """Return claims on objects, for `client.lock(…, claims=[objects.claims("a", "b")])`."""
        return AsyncClaims(self, self._check_all(paths))

    async def claim(self, *paths: str, fence: int | HasToken, patience: float = PATIENCE) -> None:
        """Raise the fences of these objects to a token, so that all lower tokens are refused."""
        await self._runner.run(self._claim(paths, fence, patience))

    async def sweep(self, prefix: str = "", *, fence: int | HasToken | None = None) -> list[str]:
        """Remove bodies that no pointer will ever point to, in a folder and below; return their names."""
        return await self._runner.run(self._sweep(prefix, fence))

    async def high_water(self, prefix: str = "") -> int:
        """Return the highest token that these objects have seen, 0 for none. After a restore, raise tokens above it."""
        return await self._runner.run(self._high_water(prefix))


def _check_prefix(prefix: str) -> str:
    return check_path(prefix) if prefix else ""


def _check_patience(patience: float) -> float:
    if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 < patience < 86_400:
        raise InvalidArgument(
            f"patience is a number of seconds, more than 0 and less than a day; got {patience!r:.80}."
        )
    return patience


def _bytes(data: Any) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"The data of an object is bytes; got {type(data).__name__}.")
    return bytes(data)


def _folder_of(store: Any) -> Path | None:
    if not isinstance(store, LocalStore):
        return None
    if store.prefix is None:
        raise InvalidArgument("This LocalStore is the whole file system. Give it a folder: LocalStore('/srv/reports').")
    folder = Path(store.prefix)
    if not folder.is_absolute():
        raise InvalidArgument(
            f"The folder {str(folder)!r} is relative to the working directory; give LocalStore an absolute path."
        )
    return folder
