"""Bugs in elections: terms that have no beginning or no end, stale leaders, and observers that miss something."""

from __future__ import annotations

from typing import Any

from tests.robustness.mutations import Bug, Edit

BEGIN, END, TERMS, LIST = "11_begin_term.sql", "12_end_term.sql", "01_terms.sql", "21_list_terms.sql"


def _lead_without_asking() -> None:
    """Take a grant for a term, without asking whether the term has begun."""
    from dblock.recipes.elections import flows

    kind: Any = flows.ElectionFlows
    original = kind.__init__

    def changed(self: Any, *args: Any) -> None:
        original(self, *args)
        self._begin = b"SELECT 'lead' FROM (SELECT $1::text, $2::text, $3::text, $4::text) AS ignored"

    kind.__init__ = changed


BUGS = (
    Bug(
        "term without a beginning",
        "lets a candidate lead that was granted the lock and has not begun a term",
        ("term log", "term fence"),
        workload="election",
        client=_lead_without_asking,
    ),
    Bug(
        "earlier term left open",
        "begins a term and does not end the one before it",
        ("term log",),
        workload="election",
        fault="kill",
        strikes=2,
        edits=(
            Edit(BEGIN, "    PERFORM end_terms_below(begin_term.name, begin_term.token);\n", ""),
            Edit(TERMS, "    IF NOT FOUND THEN\n        RETURN NULL;\n    END IF;\n", "    RETURN NULL;\n"),
        ),
    ),
    Bug(
        "release without an end",
        "releases the lock of a term and records no end, so that the next leader records it too late",
        ("term log",),
        workload="election",
        edits=(
            Edit(
                END,
                "    IF released THEN\n",
                "    IF released AND random() < 0.5 THEN\n        PERFORM 1;\n    ELSIF released THEN\n",
            ),
            Edit(
                TERMS, "        SELECT least(\n", "        SELECT greatest(clock_timestamp() + interval '1 minute',\n"
            ),
        ),
    ),
    Bug(
        "observer skips vacancies",
        "shows an observer only the terms after the last one that it has seen, and not the end of that one",
        ("observers",),
        workload="election",
        edits=(Edit(LIST, "t.token = list_terms.since AND t.ended_at IS NOT NULL AND NOT list_terms.ended", "false"),),
    ),
    Bug(
        "observer shows the newest term only",
        "shows an observer the newest term, as a watch without a log does",
        ("observers",),
        workload="election",
        edits=(Edit(LIST, "ORDER BY t.token LIMIT list_terms.max_rows", "ORDER BY t.token DESC LIMIT 1"),),
    ),
    Bug(
        "stale leader accepted",
        "proves a term without a look at the deadline and the token of its lock",
        ("term fence",),
        workload="election",
        fault="freeze-past",
        strikes=8,
        edits=(
            Edit(
                "50_assert_held.sql",
                "WHERE l.name = assert_held.name AND l.token = assert_held.token",
                "WHERE l.name = assert_held.name AND l.token >= assert_held.token",
            ),
        ),
    ),
)
