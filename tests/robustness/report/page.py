"""Write the report: one page of Markdown from the results of all runs."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.robustness.report.results import Result


def write(
    results: Sequence[Result], folder: Path, sections: Iterable[str] = (), not_played: Sequence[str] = ()
) -> Path:
    """Write the page beside the pictures; `sections` are further parts from other programs.

    The page lists the runs in `not_played` with the reason: they have not passed.
    """
    path = folder / "report.md"
    path.write_text(
        "\n".join(
            [
                *_head(results, not_played),
                *_table(results),
                *_violations(results),
                *_missing(not_played),
                *sections,
                *_pictures(results),
            ]
        )
    )
    return path


def _head(results: Sequence[Result], not_played: Sequence[str]) -> list[str]:
    bad = [one for one in results if not one.good]
    verdict = f"**{len(bad)} of {len(results)} runs failed.**" if bad else f"All {len(results)} runs hold."
    if not_played:
        verdict += f" **{len(not_played)} were not played.**"
    return [
        "# Robustness report",
        "",
        f"{verdict} {sum(one.lock_operations for one in results):,} lock operations, "
        f"{sum(one.grants for one in results):,} grants, {sum(one.strikes for one in results):,} faults, "
        f"{sum(one.unknown for one in results):,} operations of unknown outcome, "
        f"{sum(one.refused for one in results):,} writes refused as stale, "
        f"{sum(one.seconds for one in results) / 60:.0f} minutes. "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}.",
        "",
    ]


def _table(results: Sequence[Result]) -> list[str]:
    lines = [
        "| workload | fault | faults | operations | grants | unknown | what was checked | violations |",
        "|---|---|---:|---:|---:|---:|---|---:|",
    ]
    for one in results:
        # A checker that had nothing to check has shown nothing.
        checked = ", ".join(f"{found['checker']} ({found['checked']:,})" for found in one.findings if found["checked"])
        nothing = ", ".join(f"*nothing to check: {found['checker']}*" for found in one.findings if not found["checked"])
        exempt = ", ".join(f"*exempt: {name}*" for name in one.exempt_checkers)
        lines.append(
            f"| {one.workload} | {one.fault} | {one.strikes:,} | {one.operations:,} | {one.grants:,} | {one.unknown:,} "
            f"| {'; '.join(filter(None, (checked, nothing, exempt)))} "
            f"| {one.violations}{' and trouble' if one.trouble else ''} |"
        )
    return [*lines, ""]


def _violations(results: Sequence[Result]) -> list[str]:
    lines: list[str] = []
    for one in results:
        texts = [what for found in one.findings for what in found["first"]] + one.trouble
        if texts:
            lines += [f"## {one.name}, seed {one.seed}", "", "```", *texts, "```", ""]
    reasons = {(one.fault, name, why) for one in results for name, why in one.exempt_checkers.items()}
    if reasons:
        lines += ["## Exempt checkers, and why", ""]
        lines += [f"- under {fault}, **{name}**: {why}" for fault, name, why in sorted(reasons)]
        lines.append("")
    return lines


def _missing(not_played: Sequence[str]) -> list[str]:
    return ["## Runs that were not played", "", *(f"- {one}" for one in not_played), ""] if not_played else []


def _pictures(results: Sequence[Result]) -> list[str]:
    lines = ["## Pictures", ""]
    for one in results:
        if one.pictures:
            lines += [f"### {one.name}", "", *(f"![{one.name}]({picture})" for picture in one.pictures), ""]
    return lines
