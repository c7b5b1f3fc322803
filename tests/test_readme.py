"""The README's Python runs as it stands, one block after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order() -> None:
    code = "\n".join(blocks("python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 blocks on 4 devices" in done.stdout
    assert Path("plan.json").is_file()


def test_first_two_commands_run_the_demo_and_the_tests() -> None:
    commands = [line.split("#")[0].strip() for line in blocks("bash")[0].splitlines()]
    assert commands == ["pip install . && autobalance demo", 'pip install ".[test]" && pytest']
