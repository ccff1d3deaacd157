"""What a fenced resource must promise, and the checks that test the promise.

Write a Backend for your resource, and run each check on it:

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_my_resource_conforms(check):
        check(lambda: MyBackend("redis://localhost"))

A check raises AssertionError with the promise and what happened instead. It knows nothing of how a backend works: it
judges by the replies and their order. A check that passes has found nothing; run the concurrent checks more than once.
All writers are threads of one process, so the checks cannot detect a lock that works only inside this process, nor a
fence that is lost with it.
"""

from fenced_store.conformance.backend import Backend, Open
from fenced_store.conformance.checks import CHECKS

__all__ = ["CHECKS", "Backend", "Open"]
