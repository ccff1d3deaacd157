"""Start Python programs that need not import dblock and psycopg, which is most of the work of a short program.

A server process has imported them, and forks a child for each program that a test starts. The child is a child of this
process, not of the server, and looks like a program that has just begun: it has its own arguments, environment, folder,
files, session, signal handlers and `__main__`, and it ends as the interpreter ends any program. But `ps` shows the
server's command line and first environment. Where those or the start itself matter, start the program with subprocess.

Programs that the server cannot start in this way start as usual: programs other than Python, options of the interpreter
other than -m and -c, other values of the interpreter's own variables, systems other than Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from tests.support import isolation

IMPORTED = (
    "psycopg",
    "dblock.async_client",
    "dblock.client",
    "dblock.cli.elect.command",
    "dblock.cli.inspect",
    "dblock.cli.migrate.command",
    "dblock.cli.once.command",
    "dblock.cli.run.command",
    "dblock.cli.watch.command",
)
"""What the server imports. It has none of the modules whose presence dblock looks for, such as SQLAlchemy."""

LONGEST = 100_000
"""The longest request, in bytes: every socket accepts one of this length."""

_SERVER = "exec(__import__('tests.support.warm_start', fromlist=['serve']).serve())"
_ROOT = Path(__file__).parents[2]
_READ_AT_THE_START = ("PYTHON", "LC_", "LANG", "PSYCOPG_", "MALLOC_", "LD_")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID, _PR_GET_TID_ADDRESS = 0x8000, 0x200000, 0x1000000, 40


class Program(subprocess.Popen[Any]):
    """A program, started as subprocess.Popen starts it, but with its imports done if that is possible.

    With `terminal`, its standard input is a terminal, and becomes the terminal of its new session.
    """

    def __init__(self, command: Sequence[str], *, terminal: bool = False, **options: Any) -> None:
        self._terminal = terminal
        super().__init__(command, **({"start_new_session": terminal} | options))

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()  # a body that fails may not have ended it
        super().__exit__(kind, *rest)

    def _execute_child(self, *arguments: Any) -> None:
        as_usual = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(as_usual).bind(*arguments).arguments
        request = _request(given, self._terminal)
        if request is None:
            if self._terminal:
                given["preexec_fn"] = _take_terminal
            as_usual(*given.values())
            return
        files = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        inherited = [number if file == -1 else file for number, file in enumerate(files)]
        self.pid = _server().start(request, [*inherited, *given["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))  # type: ignore[attr-defined]


def run(
    command: Sequence[str], *, timeout: float, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as subprocess.run does, and return its output."""
    typed = options.pop("input", None)
    if typed is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program(command, **options) as program:
        try:
            out, err = program.communicate(typed, timeout=timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(command, program.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _request(given: Mapping[str, Any], terminal: bool) -> bytes | None:
    """Return what the server has to do, or None if it cannot start this program."""
    command = list(given["args"])
    special = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    usual = not any(given[name] not in (None, False) for name in special) and given["umask"] < 0 and given["close_fds"]
    if not usual or command[0] != sys.executable or command[1:2] not in (["-m"], ["-c"]) or not _supported():
        return None
    environment = dict(os.environ if given["env"] is None else given["env"])
    if _read_at_the_start(environment) != _server().variables:
        return None
    request = {
        "command": command,
        "environment": environment,
        "folder": os.fspath(given["cwd"] or os.getcwd()),
        "session": given["start_new_session"],
        "group": given.get("process_group", -1),
        "terminal": terminal,
        "descriptors": list(given["pass_fds"]),
    }
    try:
        encoded = json.dumps(request).encode()
    except TypeError:  # bytes
        return None
    return encoded if len(encoded) <= LONGEST and os.path.isdir(request["folder"]) else None


def _read_at_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program reads while it starts: the server has read its own."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_THE_START)}


@functools.cache
def _supported() -> bool:
    return _CLONE is not None and _address_of_thread_id() is not None


class _Server:
    """The server of this process."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process_id = os.getpid()
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.variables = _read_at_the_start(os.environ)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                cwd=_ROOT,
            )
        atexit.register(self._close)

    def start(self, request: bytes, files: list[int]) -> int:
        """Start a program with these files, the first three of which are its standard files; return its process ID."""
        with self._one_at_a_time:
            socket.send_fds(self._channel, [request], files)
            reply = self._channel.recv(100)
        if not reply:
            raise RuntimeError("the process that starts the programs of the tests has ended")
        return int(reply)

    def _close(self) -> None:
        if os.getpid() == self._process_id:
            self._channel.close()
            self._process.wait()


@functools.cache
def _server() -> _Server:
    with isolation.kept():
        return _Server()


def serve() -> CodeType:
    """Start programs until there are no more requests. In the child, return what its interpreter has to run."""
    # Ctrl-C in a terminal is for the process that runs the tests, which then has no more requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, files, _, _ = socket.recv_fds(channel, LONGEST, 100)
        if not request:
            sys.exit()
        if _fork_sibling() == 0:
            asked = json.loads(request)
            # Out of the way of the program's own files, which have the numbers that the program expects.
            above = max(2, *files, *asked["descriptors"]) + 1
            channel = socket.socket(fileno=fcntl.fcntl(channel.detach(), fcntl.F_DUPFD, above))
            code = _become(asked, files, keep=channel.fileno())
            channel.send(str(os.getpid()).encode())
            channel.close()
            return code
        for file in files:
            os.close(file)


def _fork_sibling() -> int:
    """Fork, and return 0 in the child, which is a child of this process's parent."""
    interpreter = ctypes.pythonapi
    address = _address_of_thread_id()
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID | signal.SIGCHLD
    zero = ctypes.c_long(0)
    interpreter.PyOS_BeforeFork()
    # Where the fourth and fifth argument are the other way round, the one that is not the address is not used either.
    pid = interpreter.syscall(ctypes.c_long(_CLONE or 0), ctypes.c_long(flags), zero, zero, address, address)
    if pid == 0:
        interpreter.PyOS_AfterFork_Child()
    else:
        interpreter.PyOS_AfterFork_Parent()
    return int(pid)


def _address_of_thread_id() -> ctypes.c_void_p | None:
    """Return where the C library keeps the ID of this thread, which a fork has to set."""
    address = ctypes.c_void_p()
    found = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return address if found == 0 and address.value else None


def _become(request: dict[str, Any], files: list[int], keep: int) -> CodeType:
    """Turn this process into a program that has just begun, and return its code."""
    _place_files(files, [0, 1, 2, *request["descriptors"]], keep)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    if request["terminal"]:
        _take_terminal()
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["folder"])
    _open_standard_files()

    option, what, *arguments = request["command"][1:]
    sys.orig_argv = request["command"]
    sys.argv = [option, *arguments]
    sys.path[0] = os.getcwd() if option == "-m" else ""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The interpreter's own name for the code of a -c.
    if option == "-c":
        return compile(what, "<string>", "exec", dont_inherit=True)
    return compile(f"__import__('runpy')._run_module_as_main({what!r})", "<string>", "exec", dont_inherit=True)


def _place_files(files: list[int], numbers: list[int], keep: int) -> None:
    """Give the files these numbers, and close all others but one."""
    above = max(*files, *numbers, keep) + 1
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    assert keep not in numbers, "the number of a file that the server uses"
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*numbers, keep):
            with contextlib.suppress(OSError):  # the file of the listing is closed already
                os.close(int(name))


def _open_standard_files() -> None:
    """Open the standard files as the interpreter does at its start."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        former = getattr(sys, name)
        raw: Any = io.FileIO(number, "wb" if number else "rb", closefd=False)
        raw.name = f"<{name}>"
        if not number or not unbuffered:
            raw = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        opened = io.TextIOWrapper(
            raw,
            encoding=former.encoding,
            errors=former.errors,
            newline="\n" if number else None,
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=bool(number) and unbuffered,
        )
        opened.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)


def _take_terminal() -> None:
    """Make the terminal of the standard input that of this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
