"""etcd's own lock service, v3lock, over gRPC.

No maintained Python client has this service: the etcd clients on PyPI lock by transactions and watches of their own. So
this adapter calls it through grpcio and encodes the five messages by hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from bench.harness.contender import TTL, Release


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(fields: dict[int, int | bytes]) -> bytes:
    """Encode a message whose fields are numbers and bytes."""
    out = b""
    for number, value in fields.items():
        if isinstance(value, bytes):
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
        else:
            out += _varint(number << 3) + _varint(value)
    return out


def decode(message: bytes) -> dict[int, int | bytes]:
    """Decode such a message."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            shift += 7
            at += 1
            if message[at - 1] < 0x80:
                return value, at

    def fields() -> Iterator[tuple[int, int | bytes]]:
        at = 0
        while at < len(message):
            key, at = number(at)
            value, at = number(at)
            if key & 7 == 2:
                yield key >> 3, message[at : at + value]
                at += value
            else:
                yield key >> 3, value

    return dict(fields())


class Etcd:
    """A client of v3lock, with one lease for each thread: waiters that share a lease are one waiter to etcd."""

    def __init__(self, where: str, *, ttl: float = TTL) -> None:
        import grpc

        self._channel = grpc.insecure_channel(where)
        self._ttl, self._own = int(ttl), threading.local()

        def call(path: str) -> Any:
            return self._channel.unary_unary(path, request_serializer=encode, response_deserializer=decode)

        self._grant = call("/etcdserverpb.Lease/LeaseGrant")
        self._lock, self._unlock = call("/v3lockpb.Lock/Lock"), call("/v3lockpb.Lock/Unlock")

    def acquire(self, name: str) -> Release:
        # A lease that is not kept alive ends. A new one now and then costs less than a keep-alive.
        if getattr(self._own, "until", 0.0) < time.monotonic():
            self._own.lease = self._grant({1: self._ttl})[2]
            self._own.until = time.monotonic() + self._ttl / 3
        key = self._lock({1: name.encode(), 2: self._own.lease})[2]
        return lambda: self._unlock({1: key})

    def close(self) -> None:
        self._channel.close()
