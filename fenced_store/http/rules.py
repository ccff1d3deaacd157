"""Rules: which request writes which resource.

A rule must match whenever the application's own router would call the handler, so paths are read as Starlette reads
them: with the same converters for parameters, and relative to the application's root path. A path that has the shape of
a rule but fails the rule's converters is refused, because a handler might still accept it.
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
_PARAMETER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([a-z]+))?\}")
_CONVERTERS: dict[str, tuple[str, Callable[[str], str]]] = {
    "str": ("[^/]+", str),
    "path": (".*", str),
    # Each value has one spelling in the resource's name: 7 and 07 are the same to a handler.
    "int": ("[0-9]+", lambda value: value.lstrip("0") or "0"),
    "float": (r"[0-9]+(?:\.[0-9]+)?", lambda value: str(float(value))),
    "uuid": (
        "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}",
        lambda value: str(uuid.UUID(value)),
    ),
}


class _Rule(NamedTuple):
    """One rule, compiled."""

    methods: set[str] | None
    pattern: re.Pattern[str]
    shape: re.Pattern[str]
    """The pattern with any text for its parameters."""
    converters: dict[str, str]
    resource: str | None

    def match(self, method: str, path: str) -> re.Match[str] | None:
        if method not in self.methods if self.methods is not None else method in _SAFE:
            return None
        if self.pattern.fullmatch(path) is None and self.shape.fullmatch(path) is not None:
            raise Refusal(
                400,
                "bad-resource",
                "This path names no resource",
                f"{path!a:.200} has a part with another type than its parameter needs.",
            )
        return self.pattern.fullmatch(path)

    def resource_of(self, found: re.Match[str]) -> str | None:
        if self.resource is None:
            return None
        return _PARAMETER.sub(
            lambda parameter: _CONVERTERS[self.converters[parameter[1]]][1](found[parameter[1]]), self.resource
        )


def compile_rules(rules: Mapping[str, str | None]) -> Callable[[Scope], str | None]:
    """Return a function that returns the resource that a request writes under these rules, or None."""
    if not isinstance(rules, Mapping) or not rules:
        raise InvalidArgument(
            f"Rules are a mapping, like {{'PUT /ledgers/{{ledger}}': 'ledger:{{ledger}}'}}, or a function; got "
            f"{type(rules).__name__}{' that is empty' if isinstance(rules, Mapping) else ''}."
        )
    compiled = [_rule(request, resource) for request, resource in rules.items()]

    def resource_of(scope: Scope) -> str | None:
        path = _path(scope)
        # A router whose patterns end in $ also matches a path with a line break at its end.
        spellings = (path, path[:-1]) if path.endswith("\n") else (path,)
        for rule in compiled:
            for spelling in spellings:
                found = rule.match(scope["method"].upper(), spelling)
                if found is not None:
                    return rule.resource_of(found)
        return None

    return resource_of


def _rule(request: str, resource: str | None) -> _Rule:
    methods, _, path = request.partition(" ") if isinstance(request, str) else ("", "", "")
    method_names = methods.upper().split(",")
    if (
        not (resource is None or isinstance(resource, str))
        or resource == ""
        or not path.startswith("/")
        or path != path.strip()
        or not (methods == "*" or all(method in METHODS for method in method_names))
    ):
        raise InvalidArgument(
            f"A rule maps methods and a path, like 'PUT,PATCH /ledgers/{{ledger}}' or '* /ledgers/{{ledger}}', to the "
            f"name of a resource, or to None for no fence; got {request!r:.80}: {resource!r:.80}."
        )
    converters: dict[str, str] = {}
    pattern, shape, end = "", "", 0
    for found in _PARAMETER.finditer(path):
        name, converter = found[1], found[2] or "str"
        if converter not in _CONVERTERS or name in converters:
            raise InvalidArgument(
                f"The path {path!r:.80} has {found[0]}: each name is used once, and its converter is one of "
                f"{', '.join(_CONVERTERS)}."
            )
        converters[name] = converter
        before = re.escape(path[end : found.start()])
        pattern += before + f"(?P<{name}>{_CONVERTERS[converter][0]})"
        shape += before + _CONVERTERS["path" if converter == "path" else "str"][0]
        end = found.end()
    for where in (_PARAMETER.sub("", path), _PARAMETER.sub("", resource or "")):
        if "{" in where or "}" in where:
            raise InvalidArgument(f"The rule {request!r:.80}: {resource!r:.80} has braces that are no parameter.")
    wanted = {found[1] for found in _PARAMETER.finditer(resource or "")}
    if wanted - set(converters):
        raise InvalidArgument(
            f"The resource {resource!r:.80} uses {', '.join(sorted(wanted - set(converters)))}, which its path "
            f"{path!r:.80} does not have."
        )
    if "GET" in method_names:
        method_names.append("HEAD")  # a HEAD request calls the same handler
    rest = re.escape(path[end:])
    return _Rule(
        None if methods == "*" else set(method_names),
        re.compile(pattern + rest, re.DOTALL),
        re.compile(shape + rest, re.DOTALL),
        converters,
        resource,
    )


def _path(scope: Scope) -> str:
    """Return the path relative to the application's root path, as its routes see it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not root or not path.startswith(root):
        return path
    below = path[len(root) :]
    return below if not below or below.startswith("/") else path
