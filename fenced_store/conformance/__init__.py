"""What a fenced resource must promise, and the checks that show whether one does.

Write a Backend for your resource, and let each check open it:

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_my_resource_conforms(check):
        check(lambda: MyBackend("redis://localhost"))

Each raises AssertionError with what was promised and what happened. They know nothing of how a backend works: they look
at what it answers, and when. A check that passes has found nothing; run those with many writers more than once. The
writers are threads of one process: a lock that only this process knows of would pass, and so would a fence that is lost
with it.
"""

from fenced_store.conformance.backend import Backend, Open
from fenced_store.conformance.checks import CHECKS

__all__ = ["CHECKS", "Backend", "Open"]
