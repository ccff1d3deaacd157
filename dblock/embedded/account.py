"""The account that the embedded server runs under.

An ordinary user's server runs as that user. Postgres refuses to run as root, so root's server runs under a user ID that
no account has. Then no other account on the machine can read its files or reach its socket. The customary account
`nobody` would not ensure that, because other programs share it.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dblock.errors import EmbeddedError

FIRST_UNUSED = 64_213


@dataclass(frozen=True)
class Account:
    """The user ID of the server's processes and files; None for the current user."""

    uid: int | None

    def popen_options(self) -> dict[str, Any]:
        """Return the subprocess options that run a program under this account."""
        return {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}

    def initdb_options(self) -> dict[str, Any]:
        """Return the subprocess options for initdb, which needs an account with a name."""
        return {} if self.uid is None else {"user": _named().pw_uid, "group": self.uid, "extra_groups": []}

    def admit_alone(self, folder: Path) -> None:
        """Let only this account through a folder of root's; other programs of `nobody` cannot enter either."""
        if self.uid is not None:
            os.chown(folder, 0, self.uid)
            folder.chmod(0o710)

    def lend_to_initdb(self, folder: Path) -> None:
        """Give a new folder to the account that initdb runs under, until `own` takes it back."""
        if self.uid is not None:
            os.chown(folder, _named().pw_uid, self.uid)

    def own(self, top: Path) -> None:
        """Give a file, or a folder with its contents, to this account."""
        if self.uid is None:
            return
        for folder, folders, files in os.walk(top):
            for name in folders + files:
                os.lchown(os.path.join(folder, name), self.uid, self.uid)
        os.chown(top, self.uid, self.uid)

    def check_reach(self, folder: Path) -> None:
        """Raise EmbeddedError unless this account can reach the folder."""
        if self.uid is None:
            return
        for parent in folder.parents:
            if parent.exists() and not parent.stat().st_mode & 0o001:
                raise EmbeddedError(
                    f"The embedded Postgres cannot use {folder}: started by root, it runs under a separate account, "
                    f"which may not enter {parent}. Set DBLOCK_HOME to a folder that this account can reach, such as "
                    "/var/lib/dblock."
                )


def account_for(data: Path) -> Account:
    """Return the account for this data folder: its owner, or an unused user ID."""
    if os.geteuid() != 0:
        return Account(None)
    # A folder that root owns is no cluster of dblock's; it will be moved aside.
    if data.exists() and data.stat().st_uid != 0:
        return Account(data.stat().st_uid)
    taken = {user.pw_uid for user in pwd.getpwall()} | {group.gr_gid for group in grp.getgrall()}
    return Account(next(uid for uid in range(FIRST_UNUSED, 65_000) if uid not in taken))


def readable_copy(source: Path, copy: Path) -> None:
    """Copy a folder so that every account can read it and run its programs. The copy is atomic."""
    half = copy.with_name(f"{copy.name}.new-{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(source, half, symlinks=True)
    for folder, _, files in os.walk(half):
        os.chmod(folder, 0o755)  # noqa: S103 - a copy of public files, for every account to read
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
    half.rename(copy)


def _named() -> pwd.struct_passwd:
    for name in ("nobody", "daemon"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedError(
        "There is no account 'nobody' or 'daemon' to run initdb under. Run as an ordinary user instead."
    )
