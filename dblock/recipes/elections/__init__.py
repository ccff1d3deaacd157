"""Leader election: terms with fencing tokens, and a log of all of them.

Guarantee: a term ends before the next one begins. The body of the old term has returned, or its trust window has
passed. Every term and every vacancy is in the table `terms`, in the order of their tokens.

The database decides which candidate leads (`dblock/sql/elections/`): a candidate that was granted the lock
`election:NAME` leads once `begin_term` has replied `lead`. This process only assumes the trust window of that grant. If
the leader dies, freezes or is cut off, its lease ends like that of any lock, and an observer or the next leader records
the end.

- `records`: what observers see.
- `flows`: the calls, and the steps of a campaign, shared by both kinds of election.
- `persistence`: when `run` campaigns again, and how it steps back after failures.
- `term`: one term, in the hands of its leader.
- `election`, `async_election`: the candidate, for threads and for asyncio; `base` is what they share.
"""

from dblock.recipes.elections.async_election import AsyncElection
from dblock.recipes.elections.election import Election
from dblock.recipes.elections.records import Leader, Vacancy
from dblock.recipes.elections.term import AsyncTerm, Term

__all__ = ["AsyncElection", "AsyncTerm", "Election", "Leader", "Term", "Vacancy"]
