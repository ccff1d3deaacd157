"""Execute the statements of dblock.recipes.elections on the store."""

from __future__ import annotations

import json
from collections.abc import Callable

from dblock._core.effects import Row
from dblock.testing.database.columns import boolean, items, number, text
from dblock.testing.database.elections.store import Elections

Args = tuple["str | None", ...]


def _join(elections: Elections, args: Args, again: bool) -> Row:
    name, attempt, holder, rank = args
    elections.join_election(text(name), text(attempt), text(holder), tuple(map(int, items(rank))))
    return ("",)


def _leave(elections: Elections, args: Args, again: bool) -> Row:
    return (boolean(elections.leave_election(text(args[0]), text(args[1]))),)


def _begin(elections: Elections, args: Args, again: bool) -> Row:
    name, token, attempt, value = args
    return (elections.begin_term(text(name), int(text(token)), attempt, value),)


def _end(elections: Elections, args: Args, again: bool) -> Row:
    released = elections.end_term(text(args[0]), int(text(args[1])), text(args[2]))
    return (boolean(None if again and not released else released),)


def _publish(elections: Elections, args: Args, again: bool) -> Row:
    return (boolean(elections.publish_value(text(args[0]), int(text(args[1])), args[2])),)


def _transfer(elections: Elections, args: Args, again: bool) -> Row:
    return (elections.transfer_term(text(args[0]), int(text(args[1])), text(args[2])),)


def _demand(elections: Elections, args: Args, again: bool) -> Row:
    return (elections.term_demand(text(args[0]), int(text(args[1]))),)


def _leader(elections: Elections, args: Args, again: bool) -> Row:
    token, holder, value, began_at, doubt = elections.election_leader(text(args[0]))
    return number(token), holder, value, number(began_at), number(doubt)


def _terms(elections: Elections, args: Args, again: bool) -> Row:
    name, since, ended, most = args
    token = None if since is None else int(since)
    rows, forgotten = elections.list_terms(text(name), token, ended == "t", int(text(most)))
    for row in rows:
        row["value"] = None if row["value"] is None else json.loads(row["value"])
    return json.dumps(rows) if rows else None, boolean(forgotten)


FUNCTIONS: dict[str, Callable[[Elections, Args, bool], Row]] = {
    "join_election": _join,
    "leave_election": _leave,
    "begin_term": _begin,
    "end_term": _end,
    "publish_value": _publish,
    "transfer_term": _transfer,
    "term_demand": _demand,
    "election_leader": _leader,
    "list_terms": _terms,
}
