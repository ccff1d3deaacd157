"""`dblock certify`: try what is guaranteed on this database, and print it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from dblock.cli import exit_codes
from dblock.cli.context import CommandContext, command
from dblock.cli.output import printable, suppress_warnings, table
from dblock.cli.signals import exit_on_first_signal

if TYPE_CHECKING:
    from dblock.admin.probe import Outcome
    from dblock.cli.certify.certificate import Certificate, Guarantee, TrialOutcome

STYLES = {"holds": "green", "weaker": "yellow", "unknown": "yellow", "fails": "red"}


@command(
    "certify",
    epilog="Exit code: 0 if every guarantee holds or is accepted, 3 otherwise. docs/reference/engines.md explains what "
    "is tried.",
)
@click.option(
    "--accept",
    multiple=True,
    metavar="GUARANTEE",
    help="A guarantee that may be weaker here, such as presence behind a pooler; repeat for several.",
)
def certify(context: CommandContext, accept: tuple[str, ...]) -> int:
    """Try which guarantees hold on this database; takes up to 30 s and leaves nothing behind."""
    from dblock.cli.certify.certificate import certify as try_all

    target = context.target()
    with suppress_warnings(), exit_on_first_signal(), _Progress(not context.as_json) as progress:
        certificate = try_all(target, accept=accept, on_trial=progress.show)
    context.output({**_data(certificate)}, lambda: _print(certificate))
    return exit_codes.OK if certificate.complete else exit_codes.DOCTOR_WARNING


def _data(certificate: Certificate) -> dict[str, object]:
    from dblock.cli.output import jsonable

    data: dict[str, object] = jsonable(certificate)
    return {"complete": certificate.complete, **data}


def _print(certificate: Certificate) -> None:
    facts = certificate.facts
    service = f", {facts.service}" if facts.service else ""
    standbys = ", ".join(facts.standbys) or "none attached"
    waits = f", commits wait for {facts.synchronous_standby_names!r}" if facts.synchronous_standby_names else ""
    click.echo(f"database    {printable(certificate.database)}")
    click.echo(f"engine      {printable(facts.engine)}{service}")
    click.echo(f"connection  {facts.connection}, {facts.over}{', encrypted' * facts.clients_encrypted}")
    click.echo(f"commits     fsync {'on' if facts.fsync else 'off'}, synchronous_commit {facts.synchronous_commit}")
    click.echo(f"standbys    {printable(standbys + waits)}\n")
    if certificate.behaviours:
        rows = [[_word(one), one.id, f"{one.seconds * 1000:.1f}", _text(one)] for one in certificate.behaviours]
        table(["BEHAVIOUR", "", "MS", ""], rows, [_style(one) for one in certificate.behaviours])
        click.echo()
    rows = [[_word(one), one.id, f"{one.seconds * 1000:.0f}", _text(one)] for one in certificate.trials]
    table(["TRIAL", "", "MS", ""], rows, [_style(one) for one in certificate.trials])
    click.echo()
    rows = [[_state(one), one.id, one.what, one.why or "-"] for one in certificate.guarantees]
    table(["GUARANTEE", "", "", "WHY NOT"], rows, [STYLES[one.state] for one in certificate.guarantees])
    kept = sum(one.state == "holds" for one in certificate.guarantees)
    accepted = sum(one.accepted for one in certificate.guarantees)
    known = f" ({accepted} of the others accepted)" if accepted else ""
    click.echo(
        f"\n{kept} of {len(certificate.guarantees)} guarantees hold on this database{known}. "
        f"Tried in {certificate.seconds:.1f} s."
    )


def _word(one: Outcome | TrialOutcome) -> str:
    return {True: "holds", False: "fails", None: "not tried"}[one.holds]


def _style(one: Outcome | TrialOutcome) -> str:
    return {True: "green", False: "red", None: "yellow"}[one.holds]


def _text(one: Outcome | TrialOutcome) -> str:
    figures = getattr(one, "figures", {})
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
    return one.seen or shown or one.what


def _state(one: Guarantee) -> str:
    return f"{one.state} (accepted)" if one.accepted else one.state


class _Progress:
    """Shows what is tried on standard error, if that is a terminal."""

    def __init__(self, wanted: bool) -> None:
        self._shows = wanted and sys.stderr is not None and sys.stderr.isatty()

    def show(self, trial: str) -> None:
        """Show what is tried now."""
        if self._shows:
            click.echo(f"\r\x1b[KTrying {trial}…", err=True, nl=False)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            click.echo("\r\x1b[K", err=True, nl=False)
