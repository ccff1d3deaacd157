"""Run mixed traffic for an hour, and check whether anything grew.

    python -m tests.robustness.soak --minutes 60 --out FOLDER

FOLDER then has samples.json (all measurements), soak.svg (a picture of them) and soak.md (a short section with the
verdict). The exit code is 0 if all figures stayed flat, the checkers found nothing and the traffic met no trouble.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fenced_store
from dblock.admin import schema
from tests.robustness.soak import flatness, measures
from tests.robustness.soak.drawing import svg_of
from tests.robustness.soak.flatness import Verdict, all_series, judge
from tests.robustness.soak.roles import EVERY
from tests.robustness.soak.rolling import Windows
from tests.robustness.traffic.worker import WorkerConfig
from tests.support.servers import private_server

ROOT = Path(__file__).parents[3]

PROCESSES = (
    ("few", "sync"),
    ("few", "async"),
    ("many", "sync"),
    ("many", "async"),
    ("fenced", "sync"),
    ("visitor", "sync"),
    ("operator", "sync"),
)
"""The processes that run from the beginning to the end. Besides, one process is killed repeatedly and replaced."""

KILL_INTERVAL = 20.0
"""Seconds that the process to be killed lives."""


PLATEAU = 10.0
"""Fewest minutes of a soak in which tables stop growing before the period that counts as its beginning."""


class RoleProcess:
    """One traffic process, and the thread that reads its reports."""

    def __init__(self, name: str, kind: str, dsn: str, folder: Path, seed: int, windows: Windows) -> None:
        self.name = f"{name} ({kind})"
        threads = 1 if name == "operator" else 2
        config = WorkerConfig(
            name, dsn, dsn, str(folder / f"{name}-{kind}.log"), seed, kind=kind, options={"threads": threads}
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.robustness.soak.roles", name, json.dumps(config._asdict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(folder / f"{name}-{kind}.err", "a"),  # noqa: SIM115 - the process's own
            text=True,
            cwd=ROOT,
        )
        self._windows = windows
        self._begun = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._begun.set()
            if line.endswith("\n"):
                self._windows.report(f"{self.name} {self.process.pid}", json.loads(line))

    def wait_for(self) -> None:
        """Return once the process has begun."""
        assert self._begun.wait(60), f"{self.name} did not begin"

    def kill(self) -> None:
        """Kill the process and drop its unfinished operations."""
        self.process.kill()
        self._end()

    def stop(self) -> bool:
        """Stop the process; return False if it had to be killed or failed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._end()
        return self.process.returncode == 0

    def _end(self) -> None:
        self.process.wait()
        self._listener.join(10)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdout.close()
        self.process.stdin.close()
        self._windows.forget(f"{self.name} {self.process.pid}")


class Soak:
    """One run of the soak."""

    def __init__(self, minutes: float, out: Path) -> None:
        self.minutes = minutes
        self.out = out
        self.samples: list[dict[str, Any]] = []
        self.windows = Windows()
        self.totals: Counter[str] = Counter()
        self.trouble: Counter[str] = Counter()
        self.doctor: Counter[str] = Counter()
        self.unknown = self.killed = 0

    def run(self) -> None:
        """Run the traffic, and take a sample every few seconds."""
        logs = self.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            server = stack.enter_context(private_server())
            schema.install(server.url)
            fenced_store.install(server.url)
            sampler = measures.ServerSampler(server.url)
            stack.callback(sampler.close)
            members: list[RoleProcess] = []
            stack.callback(_kill, members)
            for number, (name, kind) in enumerate(PROCESSES):
                members.append(RoleProcess(name, kind, server.url, logs, number, self.windows))
            victim = RoleProcess("few", "sync", server.url, logs, 1000, self.windows)
            members.append(victim)
            for member in members:
                member.wait_for()
            began = last = time.monotonic()
            kill_at = began + KILL_INTERVAL
            while (now := time.monotonic()) < began + self.minutes * 60:
                time.sleep(min(EVERY, max(began + self.minutes * 60 - now, 0.01)))
                now = time.monotonic()
                self._sample(now - began, now - last, members, victim, sampler)
                last = now
                if now >= kill_at:
                    kill_at = now + KILL_INTERVAL
                    victim.kill()
                    members.remove(victim)
                    self.killed += 1
                    victim = RoleProcess("few", "sync", server.url, logs, 1000 + self.killed, self.windows)
                    members.append(victim)
            for member in members:
                if not member.stop():
                    self.trouble[f"{member.name} did not stop cleanly"] += 1
            self._add(self.windows.next())
            self._add(self.windows.next())

    def _sample(
        self,
        at: float,
        seconds: float,
        members: list[RoleProcess],
        victim: RoleProcess,
        sampler: measures.ServerSampler,
    ) -> None:
        window = self.windows.next()
        self._add(window)
        processes = {}
        for member in members:
            seen = measures.of_process(member.process.pid)
            if seen is None:
                self.trouble[f"{member.name} has exited"] += 1
            elif member is not victim:
                processes[member.name] = seen
        traffic = measures.of_operations(window, seconds)
        self.unknown += traffic["unknown"]
        sample: dict[str, Any] = {
            "minute": at / 60,
            "seconds": seconds,
            "processes": processes,
            "server": sampler.sample(),
            "traffic": traffic,
        }
        self.samples.append(sample)
        if len(self.samples) % 12 == 1 or self.minutes <= 2:
            memory = sum(one["memory"] for one in processes.values())
            print(
                f"{at / 60:5.1f} min  {traffic['rate']:6.0f} operations/s  p50 {traffic['p50'] or 0:.2f} ms  "
                f"p99 {traffic['p99'] or 0:.1f} ms  {memory:.0f} MB  {sample['server']['connections']} connections  "
                f"{sum(self.totals[kind] for kind in measures.COUNTED)} in all  "
                f"{len(self.windows.violations)} violations  {sum(self.trouble.values())} troubles",
                file=sys.stderr,
                flush=True,
            )

    def _add(self, window: list[Any]) -> None:
        self.totals.update(one.kind for one in window)
        self.trouble.update(str(one.details.get("what")) for one in window if one.kind == "trouble")
        for one in window:
            if one.kind == "doctor":
                self.doctor.update(one.details["found"])

    def verdicts(self) -> list[Verdict]:
        """Judge every figure."""
        judged = [judge(series, self.minutes) for series in all_series(self.samples)]
        return [one for one in judged if one is not None]

    def write(self) -> bool:
        """Write the measurements; return whether the soak passed."""
        verdicts = self.verdicts()
        series = all_series(self.samples)
        passed = (
            bool(verdicts) and all(one.flat for one in verdicts) and not self.windows.violations and not self.trouble
        )
        (self.out / "samples.json").write_text(
            json.dumps(
                {
                    "minutes": self.minutes,
                    "totals": self.totals,
                    "violations": list(self.windows.violations),
                    "trouble": self.trouble,
                    "samples": self.samples,
                }
            )
        )
        (self.out / "soak.svg").write_text(svg_of(series, self.minutes, f"{self.minutes:g} minutes of mixed traffic"))
        (self.out / "soak.md").write_text(self.markdown(verdicts))
        return passed

    def markdown(self, verdicts: list[Verdict]) -> str:
        """Return a short section for a page."""
        locking = sum(self.totals[kind] for kind in measures.COUNTED)
        lines = [
            f"## A soak of {self.minutes:g} minutes",
            "",
            "![The measurements over time](soak.svg)",
            "",
            f"{locking:,} operations on locks ({self.totals['acquire']:,} acquisitions, {self.totals['renew']:,} "
            f"explicit renewals, {self.totals['release']:,} releases), {self.totals['put']:,} fenced writes, "
            f"{self.totals['visit']:,} clients that came and went, {self.killed} processes killed, "
            f"{self.totals['force']} force-releases, {self.totals['reap']} rounds of the reaper. "
            f"{self.unknown} operations had an unknown outcome.",
            "",
            *(f"- {name}: {count:,} checked" for name, count in self.windows.checked.items()),
            f"- violations: {len(self.windows.violations)}",
            *(f"  - {what.splitlines()[0]}" for what in list(self.windows.violations)[:10]),
            f"- trouble: {sum(self.trouble.values())}",
            *(f"  - {count} times: {what}" for what, count in self.trouble.most_common(10)),
            f"- findings of the doctor: {'; '.join(self.doctor) or 'none'}",
            "",
            "| | beginning | end | end / beginning | slope over all | limit | flat |",
            "|---|---|---|---|---|---|---|",
            *map(_row, _interesting(verdicts)),
            "",
            f"Compared: the median of minutes {flatness.WARM_UP * self.minutes:.3g} to "
            f"{flatness.EARLY * self.minutes:.3g} with that of the last {(1 - flatness.LATE) * self.minutes:.3g}.",
            "",
        ]
        if self.minutes < PLATEAU:
            lines += [f"In a soak shorter than {PLATEAU:g} minutes, tables have not yet reached a plateau.", ""]
        return "\n".join(lines)


def _kill(members: list[RoleProcess]) -> None:
    for member in members:
        if member.process.poll() is None:
            member.kill()


def _interesting(verdicts: list[Verdict]) -> list[Verdict]:
    """Leave out the tables that are too small to judge."""
    return [
        one
        for one in verdicts
        if not one.flat or not one.name.startswith(("size", "indexes", "dead")) or max(one.early, one.late) > 0.1
    ]


def _row(one: Verdict) -> str:
    rule = one.rule
    limit = f"{'≥' if rule.falls else '≤'} {rule.factor:g}" + (f" (+ {rule.slack:g})" if rule.slack else "")
    unit = f" {one.unit}" if one.unit else ""
    return (
        f"| {one.name} | {one.early:.4g}{unit} | {one.late:.4g}{unit} | {one.ratio:.2f} | {one.slope:+.3g}{unit} | "
        f"{limit} | {'yes' if one.flat else '**no**'} |"
    )


def main() -> int:
    """Run a soak and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.soak")
    parser.add_argument("--minutes", type=float, default=60, help="duration of the soak (default: 60)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    args = parser.parse_args()
    soak = Soak(args.minutes, args.out)
    soak.run()
    passed = soak.write()
    print((args.out / "soak.md").read_text())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
