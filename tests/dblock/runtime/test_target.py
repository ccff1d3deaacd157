from __future__ import annotations

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import dblock
from dblock._core.timings import Timings
from dblock._runtime.isolation import is_option_refused
from dblock._runtime.target import resolve


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:s3cret@h:5433/db", "postgresql://u@h:5433/db"),
        ("postgres://u:s3cret@h/db", "postgresql://u@h/db"),
        ("postgresql+psycopg://u:s3cret@h/db", "postgresql://u@h/db"),
        ("postgresql+asyncpg://u:s3cret@h/db", "postgresql://u@h/db"),
        ("host=h dbname=db user=u password=s3cret", "postgresql://u@h/db"),
        ("postgresql://u:s3cret@h1:1,h2:2/db", "postgresql://u@h1:1,h2:2/db"),
        ("host=h1,h2 port=5433 dbname=db password=s3cret", "postgresql://h1:5433,h2:5433/db"),
        ("postgresql:///db?host=/run/pg&password=s3cret", "postgresql:///run/pg/db"),
        ("dbname=db", "postgresql://local/db"),
        ("postgresql://u:s3%40cret@h/db", "postgresql://u@h/db"),
    ],
)
def test_every_spelling_is_read_and_shown_without_the_password(dsn: str, shown: str) -> None:
    target = resolve(dsn)
    assert str(target) == shown
    assert "cret" not in repr(target)
    assert "cret" not in repr(dblock.Client(dsn))
    if "cret" in dsn:
        assert "cret" in target.conninfo()


@pytest.mark.parametrize(
    "dsn", ["postgresql//u:s3cret@h", "u:s3cret@h", "host=h s3cret", "mysql://u:s3cret@h", "", " "]
)
def test_dsn_that_cannot_be_read_is_not_shown(dsn: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match="postgresql://") as caught:
        dblock.Client(dsn)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_several_hosts_select_the_one_that_accepts_writes() -> None:
    assert "target_session_attrs=read-write" in resolve("postgresql://h1,h2/db").conninfo()
    assert "target_session_attrs" not in resolve("postgresql://h1/db").conninfo()
    assert "target_session_attrs=any" in resolve("postgresql://h1,h2/db?target_session_attrs=any").conninfo()


def test_dsn_settings_override_the_defaults() -> None:
    assert "connect_timeout=5" in resolve("dbname=db", timings=Timings()).conninfo()
    assert "connect_timeout=1" in resolve("dbname=db connect_timeout=1").conninfo()


def test_missing_dsn_means_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(dblock.ConfigurationError):
        resolve(None)
    monkeypatch.setenv("DBLOCK_DSN", "postgresql://h/db")
    assert str(resolve(None)) == "postgresql://h/db"


@pytest.mark.parametrize("dsn", ["", " "])
def test_empty_dblock_dsn_is_an_error_and_does_not_select_the_embedded_server(
    monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    monkeypatch.setenv("DBLOCK_DSN", dsn)
    with pytest.raises(dblock.InvalidArgument, match="DSN is empty: DBLOCK_DSN is set"):
        dblock.Client()


@pytest.mark.parametrize("dsn", ["mysql://u:s3cret@h/db", "http://h", "postgresq://u:s3cret@h/db"])
def test_url_of_another_kind_is_named_as_such(dsn: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match="begins with postgresql://"):
        dblock.Client(dsn)


def test_part_of_a_password_is_not_taken_for_a_host_and_shown() -> None:
    with pytest.raises(dblock.InvalidArgument, match="write an @ of the password as %40") as caught:
        dblock.Client("postgresql://u:s3c@ret@host/db")
    assert "ret@host" not in str(caught.value)


@pytest.mark.parametrize("password", ["hun/ter2", "hun/t@er2", "5/hunter2"])
def test_password_is_not_shown_when_it_is_read_as_port_or_database(password: str) -> None:
    with pytest.raises(dblock.InvalidArgument, match="%2F|%40|cannot be read") as refused:
        resolve(f"postgresql://me:{password}@db/app")
    assert "ter2" not in str(refused.value)


def test_engines_url_is_read_and_its_password_not_shown() -> None:
    for engine in (
        create_engine("postgresql+psycopg://u:s3cret@h:5433/db"),
        create_async_engine("postgresql+psycopg://u:s3cret@h:5433/db"),
    ):
        target = resolve(engine)
        assert str(target) == "postgresql://u@h:5433/db"
        assert "s3cret" in target.conninfo()
        assert "s3cret" not in repr(dblock.Client(engine))


def test_engine_for_another_database_is_refused() -> None:
    with pytest.raises(dblock.InvalidArgument, match="speaks to sqlite"):
        dblock.Client(create_engine("sqlite://"))


def test_target_of_another_type_is_refused() -> None:
    with pytest.raises(dblock.InvalidArgument, match="got int"):
        dblock.Client(42)  # type: ignore[arg-type]


SERVER = 'connection to server at "adoption.example" (10.0.0.1), port 5432 failed: '


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (SERVER + "FATAL:  unsupported startup parameter: options", True),
        (SERVER + "FATAL:  unsupported startup parameter in options: default_transaction_isolation", True),
        (SERVER + "FATAL:  This proxy doesn't support command-line options.", True),
        (SERVER + 'FATAL:  password authentication failed for user "options"', False),
        (SERVER + 'FATAL:  database "option_prices" does not exist', False),
        (SERVER + "Connection refused\n- host: 'adoption.example', port: '5432': Connection refused", False),
        ("failed to resolve host 'adoption.example': [Errno -2] Name or service not known", False),
    ],
)
def test_option_counts_as_refused_only_if_the_server_names_it(message: str, refused: bool) -> None:
    assert is_option_refused(psycopg.OperationalError(message)) is refused
