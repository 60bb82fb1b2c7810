"""The documentation's pages that are made from the program, help texts, and shell completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from legato.cluster.cli.app import COMMANDS
from legato.cluster.cli.reference import PAGES

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "legato.cluster.cli.main")
# Never to be loaded for a help text or a question to a service.
HEAVY = ("ray", "torch", "transformers", "numpy", "huggingface_hub", "pandas")


def legato(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_say_what_the_program_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run `make docs`"


def test_every_command_has_examples() -> None:
    page = PAGES["cli.md"]()
    for name in COMMANDS:
        _, _, text = page.partition(f"## legato {name}\n")
        text = text.partition("\n## ")[0]
        assert re.search(rf"Examples?:\n\n    .*legato {name}", text), name


@pytest.mark.parametrize("width", [40, 80, 120])
def test_help_is_cut_nowhere(width: int) -> None:
    columns = {"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}
    shown = [legato(*words, **columns).stdout for words in (["serve", "--help"], ["--help"])]
    for text in shown:
        assert "--help" in text
        assert "…" not in re.sub(r"NAME=AMOUNT,…", "", text)
    for option in ("--autoscale-down-after", "--no-deterministic", "--prefill-chunk-tokens"):
        assert option in shown[0]


@pytest.mark.parametrize("words", [("--help",), ("status", "--port", "1"), ("serve", "--help")])
def test_a_command_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from legato.cluster.cli.main import main\n"
        f"sys.argv = ['legato', *{words!r}]\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("status",), "typer"),
        (("status",), "legato.cluster.cli.status"),
        (("serve", "--model", "m"), "pydantic"),
        (("generate", "hi"), "legato.protos.common_pb2"),
    ],
)
def test_an_early_interrupt_is_quiet(words: tuple[str, ...], module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"sys.argv = ['legato', *{words!r}]\n"
        "from legato.cluster.cli.main import main\n"
        "main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr.strip()) == (130, "", "")


def test_a_misspelt_command_and_option_get_the_right_one() -> None:
    wrong = legato("serv")
    assert wrong.returncode == 2
    assert "Did you mean 'serve'" in wrong.stderr
    wrong = legato("serve", "--kv-memry", "1")
    assert (wrong.returncode, "--kv-memory" in wrong.stderr) == (2, True)


# What the shell asks the program, by the script that it was given.


def complete(line: str, shell: str = "bash") -> list[str]:
    words = line.split(" ")
    variables = {
        "_LEGATO_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    ran = legato(**variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_commands_options_and_values_are_completed() -> None:
    assert complete("legato st") == ["status", "stop"]
    assert "--kv-memory" in complete("legato serve --kv-")
    assert complete("legato serve --kv-wire b") == ["bfloat16"]
    assert "drain" in " ".join(complete("legato dr", "zsh"))
    assert "doctor" in " ".join(complete("legato doc", "fish"))


SCRIPTS = {
    # Loads the script as the shell would, and has it complete `legato sta`.
    "bash": (
        "source {script}; "
        "spec=$(complete -p legato); func=${{spec#*-F }}; func=${{func%% *}}; "
        "COMP_WORDS=(legato sta); COMP_CWORD=1; $func legato sta legato; echo ${{COMPREPLY[@]}}"
    ),
    "zsh": "autoload -Uz compinit; compinit -u -D; source {script}; whence _legato_completion",
    "fish": "source {script}; complete -C 'legato sta'",
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_each_shell_works(shell: str, tmp_path: Path) -> None:
    shown = legato("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0, shown.stderr
    assert "legato" in shown.stdout
    assert "_LEGATO_COMPLETE" in shown.stdout
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed: its script was made, and not run")
    command = tmp_path / "legato"  # what the script calls
    command.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(shown.stdout)
    ran = subprocess.run(
        [found, "-c", SCRIPTS[shell].format(script=script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert "status" in ran.stdout or "_legato_completion" in ran.stdout, ran.stderr


def test_completion_is_installed_for_the_shell(tmp_path: Path) -> None:
    done = legato(
        "--install-completion",
        "bash",
        HOME=str(tmp_path),
        _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1",
    )
    assert done.returncode == 0, done.stderr
    assert "bash completion installed in" in done.stdout
    assert "legato" in (tmp_path / ".bashrc").read_text()
