"""The prose uses today's words and fits its lines; test names have a subject; no file names a folder of one machine."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OLD_WORDS = re.compile(
    r"\b(whoever|nobody|somebody|anew|lest|befell|meanwhile|in\s+vain|so\s+wanted|is\s+to\s+be\s+had|all\s+the\s+same)\b",
    re.IGNORECASE,
)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/wor[k]/")
WIDTH = 100
NO_SUBJECT = ("it", "what", "one", "that", "nor", "so", "who", "they", "this")
"""First words of test names that leave open what the test is about."""

PYTHON = ("dblock", "fenced_store", "alembic", "bench", "spec", "tests", "examples")
FOLDERS_OF_PROSE = ("docs", "examples", ".github")


def _tracked() -> list[Path]:
    """Return the files of the repository, or of the source distribution."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        pytest.skip("not a git repository")
    return [path for name in found.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _is_markdown(path: Path) -> bool:
    inside = path.relative_to(ROOT).parts
    return path.suffix == ".md" and (len(inside) == 1 or inside[0] in FOLDERS_OF_PROSE)


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PYTHON and path != Path(__file__)


def _python_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and strings of a module, with the lines that they begin on."""
    middle = getattr(tokenize, "FSTRING_MIDDLE", -1)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, middle):
            yield token.start[0], token.string


def _sql_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and the quoted text of a file of SQL."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for found in re.finditer(r"--.*|'(?:[^']|'')*'", line):
            yield number, found[0]


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file with the lines that it begins on, unless no old word is anywhere in the file."""
    if not (_is_python(path) or _is_markdown(path) or path.suffix in (".sql", ".pml")):
        return
    if not OLD_WORDS.search(path.read_text()):
        return  # to tell prose from code would take far longer
    if _is_python(path):
        yield from _python_prose(path)
    elif path.suffix == ".sql":
        yield from _sql_prose(path)
    else:
        # Two lines at a time: a phrase may be broken.
        lines = path.read_text().splitlines()
        yield from enumerate(map("\n".join, zip(lines, [*lines[1:], ""], strict=True)), 1)


def old_words(path: Path) -> Iterator[str]:
    """Yield each old word in the prose of a file, with its line."""
    for number, text in _prose(path):
        for found in OLD_WORDS.finditer(text):
            before, after = text[: found.start()][-1:], text[found.end() :][:1]
            if before == after and before in {"'", '"', "`"}:
                continue  # a value, such as the account of that name
            if "\n" not in text[: found.start()] or path.suffix == ".py":
                yield f"{number + text[: found.start()].count(chr(10))}: {found[0]!r}"


def long_lines(path: Path) -> Iterator[str]:
    """Yield each line of Markdown or of a comment in SQL that is too long and could have been broken."""
    if not _is_markdown(path) and path.suffix != ".sql":
        return
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if path.suffix == ".sql":
            if line.lstrip().startswith("--") and len(line) > WIDTH:
                yield f"{number}: {len(line)} columns"
            continue
        in_code ^= line.lstrip().startswith("```")
        if in_code or len(line) <= WIDTH or line.lstrip().startswith(("|", "!", "<")):
            continue
        # A link is not broken, and a line is not broken after its first word.
        whole = re.sub(r"!?\[[^\]]*\](\([^)]*\))?:?", lambda link: link[0].replace(" ", "_"), line.strip())
        if " " in whole.removeprefix("- ")[:WIDTH]:
            yield f"{number}: {len(line)} columns"


def names_without_subject(path: Path) -> Iterator[str]:
    """Yield the tests whose name does not say what the test is about."""
    if not _is_python(path) or not path.name.startswith("test_"):
        return
    text = path.read_text()
    if not any(_lacks_subject(name) for name in re.findall(r"\bdef\s+(test_\w+)", text)):
        return  # to parse the module would take far longer
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _lacks_subject(node.name):
            yield f"{node.lineno}: {node.name}"


def _lacks_subject(name: str) -> bool:
    words = name.split("_")[1:]
    return name.startswith("test_") and (len(words) < 3 or words[0] in NO_SUBJECT)


def machine_paths(path: Path) -> Iterator[str]:
    """Yield the lines that name a folder which is only on the machine of a developer."""
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return
    if not MACHINE_PATH.search(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"{number}: {line.strip()[:80]}"


@pytest.mark.parametrize("check", [old_words, long_lines, names_without_subject, machine_paths])
def test_prose_of_the_repository_follows_the_house_style(check: Callable[[Path], Iterator[str]]) -> None:
    found = [f"{path.relative_to(ROOT).as_posix()}:{what}" for path in _tracked() for what in check(path)]
    assert not found, f"{len(found)} to rewrite:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "check", "found"),
    [
        ("a.md", "It is Nobody's.", old_words, ["1: 'Nobody'"]),
        ("a.md", "It was in\nvain.", old_words, ["1: 'in\\nvain'"]),
        ("a.md", "Run it as `nobody`.", old_words, []),
        ("dblock/a.py", 'x = 1  # lest it be\n"""So\nmeanwhile."""\n', old_words, ["1: 'lest'", "3: 'meanwhile'"]),
        ("dblock/a.py", "nobody = meanwhile\nuser = 'nobody'\n", old_words, []),
        ("a.sql", "SELECT nobody; -- anew\n", old_words, ["1: 'anew'"]),
        ("a.md", "word " * 21, long_lines, ["1: 105 columns"]),
        ("a.md", f"```\n{'word ' * 21}\n```\n| {'word ' * 21}|\n[a b]({'x' * 99})", long_lines, []),
        ("a.sql", "-- " + "x" * 98, long_lines, ["1: 101 columns"]),
        ("tests/test_a.py", "def test_it_is_so_now(): ...\n", names_without_subject, ["1: test_it_is_so_now"]),
        ("tests/test_a.py", "async def test_two_words(): ...\n", names_without_subject, ["1: test_two_words"]),
        ("tests/test_a.py", "def test_lease_is_renewed(): ...\n", names_without_subject, []),
        ("a.txt", "See /wo" + "rk/x.", machine_paths, ["1: See /wo" + "rk/x."]),
        ("a.txt", "See /srv/work/x.", machine_paths, []),
    ],
)
def test_style_checks_find_what_they_look_for(
    name: str,
    text: str,
    check: Callable[[Path], Iterator[str]],
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert list(check(path)) == found
