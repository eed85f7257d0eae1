"""The command line, as a shell sees it: texts, exit codes, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtcheckpoint import _commands, cli
from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.errors import ConfigError

COMMANDS = tuple(cli.COMMANDS)
LIMIT_SECONDS = 60.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mtcheckpoint", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert result.stderr == ""


def test_every_command_has_a_module_and_every_module_a_command() -> None:
    folder = Path(_commands.__path__[0])
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules == set(cli.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"mtcheckpoint {command}" in capsys.readouterr().out


def test_help_imports_neither_jax_nor_rich() -> None:
    code = (
        "import sys; from mtcheckpoint import cli\n"
        "try: cli.main(['demo', '--help'])\n"
        "except SystemExit: print([n for n in ('jax', 'orbax', 'rich') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("no-such-command",),
        ("demo", "--no-such-option"),
        ("demo", "--json"),
        ("replicator",),
        ("replicator", "--node", "/nowhere", "--timeout", "soon"),
        ("replicator", "--node", "/nowhere", "--timeout", "0"),
    ],
)
def test_arguments_without_sense_exit_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: mtcheckpoint" in capsys.readouterr().err


def raising(error: BaseException) -> object:
    """A command that fails, in the place of a real one."""

    class Command:
        @staticmethod
        def add_arguments(parser: object) -> None: ...

        @staticmethod
        def run(arguments: object) -> int:
            raise error

    return Command


def test_our_errors_are_one_message_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("steps: expected more than 0, found 0")
    monkeypatch.setitem(sys.modules, "mtcheckpoint._commands.demo", raising(error))
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "mtcheckpoint demo: steps: expected more than 0, found 0\n"


def test_ctrl_c_exits_130_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mtcheckpoint._commands.demo", raising(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mtcheckpoint._commands.demo", raising(KeyError("bug")))
    with pytest.raises(KeyError):
        cli.main(["demo"])


def test_replicator_serves_until_it_is_told_to_stop(volume_root: Path) -> None:
    nodes = [volume_root / "node-0", volume_root / "node-1"]
    arguments = [part for node in nodes for part in ("--node", str(node))]
    log = volume_root / "log.txt"
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "mtcheckpoint", "replicator", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(
            lambda: "serving" in log.read_text() or None,
            Deadline.after(LIMIT_SECONDS),
            "its first line",
        )
        assert all(node.is_dir() for node in nodes)
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(LIMIT_SECONDS) == 0
    finally:
        child.kill()
        child.wait()
    assert "stopped" in log.read_text()
