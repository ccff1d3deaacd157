"""Which request writes which resource.

A rule must fit whenever the application's own router would come to the handler, so paths are read as Starlette reads
them: the same kinds of parameters, and the path below that of the application. Where a path has the shape of a rule's
and a part of it is not of the kind that the rule says, the request is refused: a handler might read it all the same.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from fenced_store.errors import InvalidArgument
from fenced_store.http.problems import Refusal

Scope = MutableMapping[str, Any]

_SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
METHODS = _SAFE | {
    "CONNECT", "DELETE", "PATCH", "POST", "PUT", "ACL", "COPY", "LINK", "LOCK", "MERGE", "MKCOL", "MOVE", "PROPFIND",
    "PROPPATCH", "PURGE", "QUERY", "REPORT", "SEARCH", "UNLINK", "UNLOCK",
}  # fmt: skip
_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([a-z]+))?\}")
_KINDS: dict[str, tuple[str, Callable[[str], str]]] = {
    "str": ("[^/]+", str),
    "path": (".*", str),
    # As one name for one value, however it is written: 7 and 07 are the same to a handler.
    "int": ("[0-9]+", lambda value: value.lstrip("0") or "0"),
    "float": (r"[0-9]+(?:\.[0-9]+)?", lambda value: str(float(value))),
    "uuid": (
        "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}",
        lambda value: str(uuid.UUID(value)),
    ),
}


class _Rule(NamedTuple):
    methods: set[str] | None
    pattern: re.Pattern[str]
    shape: re.Pattern[str]
    """The pattern with any text for its parts, whatever their kinds."""
    kinds: dict[str, str]
    resource: str | None

    def fits(self, method: str, path: str) -> re.Match[str] | None:
        if method not in self.methods if self.methods is not None else method in _SAFE:
            return None
        if self.pattern.fullmatch(path) is None and self.shape.fullmatch(path) is not None:
            raise Refusal(
                400,
                "bad-resource",
                "This path names no resource",
                f"{path!a:.200} has a part of another kind than it needs.",
            )
        return self.pattern.fullmatch(path)

    def named(self, found: re.Match[str]) -> str | None:
        if self.resource is None:
            return None
        return _NAME.sub(lambda name: _KINDS[self.kinds[name[1]]][1](found[name[1]]), self.resource)


def compiled(rules: Mapping[str, str | None]) -> Callable[[Scope], str | None]:
    """Return a function that says which resource a request writes, by these rules."""
    if not isinstance(rules, Mapping) or not rules:
        raise InvalidArgument(
            f"Rules are a mapping, like {{'PUT /ledgers/{{ledger}}': 'ledger:{{ledger}}'}}, or a function; got "
            f"{type(rules).__name__}{' that is empty' if isinstance(rules, Mapping) else ''}."
        )
    ready = [_rule(request, resource) for request, resource in rules.items()]

    def resource_of(scope: Scope) -> str | None:
        path = _path(scope)
        # A router whose patterns end in $ takes a path with a line break at its end for the one without.
        ways = (path, path[:-1]) if path.endswith("\n") else (path,)
        for rule in ready:
            for way in ways:
                found = rule.fits(scope["method"].upper(), way)
                if found is not None:
                    return rule.named(found)
        return None

    return resource_of


def _rule(request: str, resource: str | None) -> _Rule:
    methods, _, path = request.partition(" ") if isinstance(request, str) else ("", "", "")
    named = methods.upper().split(",")
    if (
        not (resource is None or isinstance(resource, str))
        or resource == ""
        or not path.startswith("/")
        or path != path.strip()
        or not (methods == "*" or all(method in METHODS for method in named))
    ):
        raise InvalidArgument(
            f"A rule goes from methods and a path, like 'PUT,PATCH /ledgers/{{ledger}}' or '* /ledgers/{{ledger}}', to "
            f"the name of a resource, or None to let it by; got {request!r:.80}: {resource!r:.80}."
        )
    kinds: dict[str, str] = {}
    pattern, shape, end = "", "", 0
    for found in _NAME.finditer(path):
        name, kind = found[1], found[2] or "str"
        if kind not in _KINDS or name in kinds:
            raise InvalidArgument(
                f"The path {path!r:.80} has {found[0]}: a name is used once, and its kind is one of "
                f"{', '.join(_KINDS)}."
            )
        kinds[name] = kind
        before = re.escape(path[end : found.start()])
        pattern += before + f"(?P<{name}>{_KINDS[kind][0]})"
        shape += before + _KINDS["path" if kind == "path" else "str"][0]
        end = found.end()
    for where in (_NAME.sub("", path), _NAME.sub("", resource or "")):
        if "{" in where or "}" in where:
            raise InvalidArgument(f"The rule {request!r:.80}: {resource!r:.80} has braces that name nothing.")
    asked = {found[1] for found in _NAME.finditer(resource or "")}
    if asked - set(kinds):
        raise InvalidArgument(
            f"The resource {resource!r:.80} speaks of {', '.join(sorted(asked - set(kinds)))}, which its path "
            f"{path!r:.80} does not have."
        )
    if "GET" in named:
        named.append("HEAD")  # which comes to the same handler
    rest = re.escape(path[end:])
    return _Rule(
        None if methods == "*" else set(named),
        re.compile(pattern + rest, re.DOTALL),
        re.compile(shape + rest, re.DOTALL),
        kinds,
        resource,
    )


def _path(scope: Scope) -> str:
    """Return the path below that of the application, where its own routes begin."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not root or not path.startswith(root):
        return path
    below = path[len(root) :]
    return below if not below or below.startswith("/") else path
