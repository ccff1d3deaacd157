"""Which request writes which resource.

A rule must fit whenever the application's own router would come to the handler, so paths are read as Starlette reads
them: the same kinds of parameters, and the path below that of the application.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

from fenced_store.errors import InvalidArgument

Scope = MutableMapping[str, Any]

_SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([a-z]+))?\}")
_KINDS: dict[str, tuple[str, Callable[[str], str]]] = {
    "str": ("[^/]+", str),
    "path": (".*", str),
    # As one name for one value, however it is written: 7 and 07 are the same to a handler.
    "int": ("[0-9]+", lambda value: str(int(value))),
    "float": (r"[0-9]+(?:\.[0-9]+)?", lambda value: str(float(value))),
    "uuid": (
        "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}",
        lambda value: str(uuid.UUID(value)),
    ),
}


class _Rule(NamedTuple):
    methods: set[str] | None
    pattern: re.Pattern[str]
    kinds: dict[str, str]
    resource: str

    def resource_of(self, method: str, path: str) -> str | None:
        if method not in self.methods if self.methods is not None else method in _SAFE:
            return None
        found = self.pattern.fullmatch(path)
        if found is None:
            return None
        return _NAME.sub(lambda name: _KINDS[self.kinds[name[1]]][1](found[name[1]]), self.resource)


def compiled(rules: Mapping[str, str]) -> Callable[[Scope], str | None]:
    """Return a function that says which resource a request writes, by these rules."""
    ready = [_rule(request, resource) for request, resource in rules.items()]

    def resource_of(scope: Scope) -> str | None:
        path = _path(scope)
        # A router whose patterns end in $ takes a path with a line break at its end for the one without.
        for one in (path, path[:-1]) if path.endswith("\n") else (path,):
            for rule in ready:
                resource = rule.resource_of(scope["method"], one)
                if resource is not None:
                    return resource
        return None

    return resource_of


def _rule(request: str, resource: str) -> _Rule:
    methods, _, path = request.partition(" ") if isinstance(request, str) else ("", "", "")
    named = methods.upper().split(",")
    if (
        not isinstance(resource, str)
        or not resource
        or not path.startswith("/")
        or path != path.strip()
        or not (methods == "*" or all(re.fullmatch("[A-Z]+", method) for method in named))
    ):
        raise InvalidArgument(
            f"A rule goes from methods and a path, like 'PUT,PATCH /ledgers/{{ledger}}' or '* /ledgers/{{ledger}}', to "
            f"the name of a resource; got {request!r:.80}: {resource!r:.80}."
        )
    kinds: dict[str, str] = {}
    pattern, end = "", 0
    for found in _NAME.finditer(path):
        name, kind = found[1], found[2] or "str"
        if kind not in _KINDS or name in kinds:
            raise InvalidArgument(
                f"The path {path!r:.80} has {found[0]}: a name is used once, and its kind is one of "
                f"{', '.join(_KINDS)}."
            )
        kinds[name] = kind
        pattern += re.escape(path[end : found.start()]) + f"(?P<{name}>{_KINDS[kind][0]})"
        end = found.end()
    for where in (_NAME.sub("", path), _NAME.sub("", resource)):
        if "{" in where or "}" in where:
            raise InvalidArgument(f"The rule {request!r:.80}: {resource!r:.80} has braces that name nothing.")
    asked = {found[1] for found in _NAME.finditer(resource)}
    if asked - set(kinds):
        raise InvalidArgument(
            f"The resource {resource!r:.80} speaks of {', '.join(sorted(asked - set(kinds)))}, which its path "
            f"{path!r:.80} does not have."
        )
    if "GET" in named:
        named.append("HEAD")  # which comes to the same handler
    return _Rule(
        None if methods == "*" else set(named), re.compile(pattern + re.escape(path[end:]), re.DOTALL), kinds, resource
    )


def _path(scope: Scope) -> str:
    """Return the path below that of the application, where its own routes begin."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if not root or not path.startswith(root):
        return path
    below = path[len(root) :]
    return below if not below or below.startswith("/") else path
