"""A session of SQLAlchemy's ORM that commits only under its lease.

python examples/sqlalchemy_guard.py              # on $DBLOCK_DSN, or on the embedded Postgres
"""

from __future__ import annotations

import os

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import dblock
from dblock import embedded
from dblock.admin import schema
from dblock.integrations.sqlalchemy import guard

DSN = os.environ.get("DBLOCK_DSN") or embedded.start().url


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "example_guarded_accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


def main() -> None:
    schema.install(DSN)
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(DSN))
    Base.metadata.create_all(engine)
    with dblock.Client(DSN) as client, Session(engine) as session:
        # Without a keep-alive, the lease expires as that of a process which was stopped.
        lease = client.lock("example:account:1", ttl=2, keep_alive=False).acquire()
        unguard = guard(session, lease)
        account = session.merge(Account(id=1, balance=100))
        session.commit()
        print("under the lease, stored:", account.balance)
        with client.lock("example:account:1"):  # waits until the lease has expired
            account.balance = 0
            try:
                session.commit()
            except dblock.LeaseLost:
                session.rollback()
                print("without it, not stored:", account.balance)
        unguard()
    engine.dispose()


if __name__ == "__main__":
    main()
