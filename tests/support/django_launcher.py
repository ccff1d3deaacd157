"""Starts `manage.py` many times at the price of one: a process that has imported Django forks for each command.

Most of what a short command needs is the time to import. A test of faults starts dozens of them. Each is a process of
its own, with its own pid, settings and connections, and can be stopped and killed.

Run as a program, this reads requests from its standard input, one JSON object in a line: `argv`, `cwd`, `env`, and the
files `out` and `code`. It replies with the pid, and writes the exit code to `code` when that process has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "django.core.management",
    "django.core.management.commands.migrate",
    "django.contrib.postgres.operations",
    "django.db.backends.postgresql.base",
    "dblock.recipes.migrations.gate",
    "dblock.recipes.migrations.blockers",
    "dblock.recipes.migrations.retry",
    "dblock.recipes.migrations.invalid_indexes",
    "dblock.recipes.migrations.version_fence",
)


def main() -> None:
    """Serve requests until standard input ends."""
    for module in PRELOADED:
        __import__(module)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    codes: dict[int, Path] = {}
    inbox = b""
    while True:
        ready = select.select([0, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1024)
            _reap(codes)
        if 0 in ready:
            part = os.read(0, 65536)
            if not part:
                return
            *lines, inbox = (inbox + part).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _run(request, (wake, woken))
                codes[pid] = Path(request["code"])
                os.write(1, f"{pid}\n".encode())


def _reap(codes: dict[int, Path]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            path = codes.pop(pid)
            written = path.with_suffix(".new")
            written.write_text(str(os.waitstatus_to_exitcode(status)))
            written.rename(path)


def _run(request: dict[str, Any], pipe: tuple[int, int]) -> NoReturn:
    """Become manage.py."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, number)
        for number in pipe:
            os.close(number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path.insert(0, request["cwd"])
        sys.argv = ["manage.py", *request["argv"]]
        runpy.run_path("manage.py", run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
