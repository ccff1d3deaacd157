"""Programs that tests/support/warm_start.py starts look like programs that have just begun."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_start
from tests.support.stages import first
from tests.support.warm_start import Program

pytestmark = pytest.mark.skipif(not warm_start._supported(), reason="every program starts as usual on this system")

PROBE = """
names = sorted(globals())
import json, os, signal, sys, threading
signals = {number.name: str(signal.getsignal(number)) for number in signal.Signals}
status = open("/proc/self/status").read()
facts = {
    "globals": names,
    "name": [__name__, sys.modules["__main__"].__dict__ is globals()],
    "arguments": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "thread": [threading.current_thread().name, threading.get_native_id() == os.getpid(), threading.active_count()],
    "files": sorted(os.listdir("/proc/self/fd")),
    "standard files": [repr(getattr(sys, name)) for name in ("stdin", "stdout", "stderr", "__stdout__")],
    "buffers": [
        [file.line_buffering, file.write_through, type(file.buffer).__name__] for file in (sys.stdout, sys.stderr)
    ],
    "handlers": {name: handler.split(" at ")[0] for name, handler in signals.items()},
    "masks": [line for line in status.splitlines() if line.startswith("Sig") and not line.startswith("SigQ")],
    "warnings": sys.warnoptions,
    "input": sys.stdin.read(),
    "inherited": os.read(int(sys.argv[1]), 10).decode(),
}
print(json.dumps(facts))
"""


@pytest.mark.parametrize("new_session", [False, True])
def test_program_finds_what_one_that_has_just_begun_finds(tmp_path: Path, new_session: bool) -> None:
    found = []
    for kind in (subprocess.Popen, Program):
        reading, writing = os.pipe()
        os.write(writing, b"inherited")
        os.close(writing)
        program: Any = kind(
            [sys.executable, "-c", PROBE, str(reading)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"SPECIAL": "ä\n'"},
            pass_fds=[reading],
            start_new_session=new_session,
        )
        out, _ = program.communicate("typed", timeout=30)
        os.close(reading)
        # Both list the folder of the files with a file of their own.
        found.append(json.loads(out.replace(f'"{reading}"', '"inherited"')))
    assert found[0] == found[1]
    assert found[1]["parent"] == os.getpid()
    assert found[1]["session"] == [new_session, new_session]


INHERITS_NUMBER = """
import os, subprocess, sys
from tests.support import warm_start
run = lambda program, **options: warm_start.run([sys.executable, "-c", program], timeout=30, **options)
run("")  # starts the server, which reads a file whose number is free in this process
number = int(warm_start._server()._process.args[-1])
reading, writing = os.pipe()
os.write(writing, b"inherited")
if reading != number:
    os.dup2(reading, number)
run(f"import os; print(os.read({number}, 10).decode())", pass_fds=[number])
"""


@pytest.mark.second_stage
def test_program_may_inherit_the_number_of_the_file_that_its_server_reads() -> None:
    done = subprocess.run([sys.executable, "-c", INHERITS_NUMBER], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("inherited\n", 0), done.stderr


ENDS = {
    "exit code": "import sys; sys.exit(7)",
    "exit text": "import sys; sys.exit('because')",
    "interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(20)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('last'))).start()",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first', end='')",
    "broken pipe": "import os, sys; r, w = os.pipe(); os.close(r); os.write(w, b'x')",
    "error": "1 / 0",
    "annotation": "x: print('evaluated') = 1",
    "signal by a thread": (
        "import signal as s, threading as t, time\n"
        "t.Thread(target=lambda: s.pthread_kill(t.main_thread().ident, s.SIGTERM)).start(); time.sleep(5)"
    ),
}


@pytest.mark.parametrize("end", first(5, ENDS))
def test_program_ends_as_every_program_does(end: str) -> None:
    command = [sys.executable, "-c", ENDS[end]]
    usual = subprocess.run(command, capture_output=True, text=True, timeout=30)
    done = warm_start.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (usual.returncode, usual.stdout)
    assert done.stderr.splitlines()[-1:] == usual.stderr.splitlines()[-1:]


def test_programs_have_the_imports_but_no_client_and_nothing_in_common() -> None:
    script = "import sys; print('dblock.client' in sys.modules, 'sqlalchemy' in sys.modules, end=' ')\n"
    script += "from dblock._runtime import forks; print(len(forks._known), end=' ')\n"
    script += "import random, uuid; print(random.random(), uuid.uuid4())"
    words = [
        warm_start.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30).stdout.split()
        for _ in range(2)
    ]
    assert words[0][:3] == words[1][:3] == ["True", "False", "0"]
    assert words[0][3] != words[1][3]
    assert words[0][4] != words[1][4]


def test_module_runs_as_main_with_its_own_path_first(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        "import sys; print(__name__, sys.argv, sys.path[0], sys.modules['__main__'].__file__)"
    )
    command = [sys.executable, "-m", "here", "--option", "value"]
    usual = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    done = warm_start.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert done.stdout == usual.stdout
    assert usual.stdout.startswith("__main__ ")


@pytest.mark.parametrize("option", [["-W", "error"], ["-I"]])
def test_program_with_options_of_the_interpreter_starts_as_usual(option: list[str]) -> None:
    script = "import sys; print('dblock' in sys.modules, sys.flags.isolated, sys.warnoptions)"
    command = [sys.executable, *option, "-c", script]
    done = warm_start.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout == subprocess.check_output(command, text=True)
    assert done.stdout.startswith("False")


def test_program_with_variables_of_the_interpreter_starts_as_usual() -> None:
    script = "import sys; print('dblock' in sys.modules, sys.flags.utf8_mode)"
    environment = os.environ | {"PYTHONUTF8": "1"}
    done = warm_start.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, env=environment)
    assert done.stdout == "False 1\n"


@pytest.mark.parametrize(
    "command", [[sys.executable, "-c", "import os; print(os.getpgrp() == os.tcgetpgrp(0))"], ["tty"]]
)
def test_terminal_is_that_of_the_session(command: list[str]) -> None:
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    with Program(command, stdin=slave, stdout=subprocess.PIPE, terminal=True, text=True) as program:
        os.close(slave)
        assert program.stdout is not None
        assert program.stdout.read().strip() == ("True" if command[0] == sys.executable else name)
    os.close(master)


def test_signal_reaches_a_program_that_has_just_been_started() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with Program([sys.executable, "-c", "import time; time.sleep(20)"], stderr=subprocess.DEVNULL) as program:
            program.send_signal(number)
        assert program.returncode == -number


@pytest.mark.second_stage
def test_program_is_killed_if_the_body_fails() -> None:
    program = Program([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(ZeroDivisionError), program:
        raise ZeroDivisionError
    assert program.returncode == -signal.SIGKILL
