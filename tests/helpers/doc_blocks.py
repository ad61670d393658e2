"""Run the command blocks of a page and compare what they print with what the page shows.

``console`` blocks have commands behind ``$ `` and their output below.  The output of an ``sh``
block is the plain block right behind it, if there is one.  In what is shown, a line ``…`` stands
for any lines and ``…`` in a line for any text; spaces may differ.  What stands behind a prompt
``(prism)`` there is typed, on a terminal.  A comment
``<!-- not run: why -->`` before a block leaves it out.

    PYTHONPATH=tests python -m helpers.doc_blocks PAGE WORD LOG    # does PAGE show it?
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from helpers import terminal

FENCE = re.compile(
    r"^(?P<skip><!-- not run: .*? -->\n+)?^```(?P<kind>sh|console|python)\n(?P<body>.*?)^```\n"
    r"(?:\n*^```\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
TYPED = re.compile(r"\(prism\) (.+)")
FINDING = (0, 1, 3)  # exit statuses that are no bad usage


@dataclass(frozen=True)
class Step:
    """A command and the lines that it is shown to print; None: not shown."""

    command: str
    shown: list[str] | None


def steps(page: str, skipped: bool = False) -> list[Step]:
    """The commands of a page, in order; ``skipped``: those that are not run here too."""
    found = []
    for block in FENCE.finditer(page):
        if block["skip"] and not skipped:
            continue
        if block["kind"] == "console":
            for part in re.split(r"^\$ ", block["body"], flags=re.MULTILINE)[1:]:
                lines = part.splitlines()
                count = 1
                while lines[count - 1].endswith("\\"):
                    count += 1
                found.append(Step("\n".join(lines[:count]), lines[count:]))
        elif block["kind"] == "python":
            found.append(Step(f"python - <<'END'\n{block['body']}END", None))
        else:
            shown = block["output"]
            found.append(Step(block["body"], None if shown is None else shown.splitlines()))
    return found


def differences(shown: list[str], printed: list[str]) -> str | None:
    """The first shown line that was not printed in its place, or None."""
    places = {0}  # where in what was printed the shown lines so far may end
    anywhere = False
    for line in shown:
        if line.strip() == "…":
            anywhere = True
            continue
        words = [re.escape(part) for part in " ".join(line.split()).split("…")]
        pattern = re.compile(".*".join(words))
        found = set()
        for place in places:
            last = len(printed) if anywhere else place + 1
            found |= {
                number + 1
                for number, text in enumerate(printed[place:last], place)
                if pattern.fullmatch(" ".join(text.split()))
            }
        if not found:
            return line
        places, anywhere = found, False
    if not anywhere and len(printed) not in places:
        return f"(nothing more, but {printed[max(places)]!r})"
    return None


class Runner:
    """Run steps in folders; what ``prism capture`` wrote is kept for the next page that asks."""

    def __init__(self, kept: Path):
        self.kept = kept
        self.captured: dict[str, tuple[str, str]] = {}  # command -> its folder, what it printed

    def run(self, step: Step, folder: Path) -> str:
        """What a step printed; AssertionError with it for bad usage."""
        words = step.command.split()
        capture = words[:2] == ["prism", "capture"] and "-o" in words and "&&" not in words
        if capture and step.command.strip() in self.captured:
            kept, printed = self.captured[step.command.strip()]
            shutil.copytree(kept, folder / words[words.index("-o") + 1])
            return printed
        here = Path(sys.executable).parent
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PRISM_", "GITHUB_"))}
        env |= {"PATH": f"{here}:{env['PATH']}", "COLUMNS": "180", "OMP_NUM_THREADS": "1"}
        command = ["bash", "-ec", step.command]
        asked = [found[1] for found in map(TYPED.fullmatch, step.shown or ()) if found]
        if asked:
            status, printed = terminal.typed(command, asked, folder, env)
        else:
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=600,
            )
            status, printed = done.returncode, done.stdout
        assert status in FINDING, f"{step.command}\n{printed}"
        if capture:
            kept = self.kept / f"captured-{len(self.captured)}"
            shutil.copytree(folder / words[words.index("-o") + 1], kept)
            self.captured[step.command.strip()] = str(kept), printed
        return printed


def check(page: str, runner: Runner, folder: Path) -> int:
    """Run a page's steps in order; how many.  AssertionError for the first that differs."""
    found = steps(page)
    for step in found:
        printed = runner.run(step, folder)
        if step.shown is not None:
            lines = [one for one in printed.splitlines() if not one.startswith("prism: … ")]
            line = differences(step.shown, lines)
            assert line is None, f"{step.command}\nshown, not printed: {line}\n\n{printed}"
    return len(found)


def main() -> None:
    """Compare a log with what a page shows."""
    page, word, log = sys.argv[1:]
    found = steps(Path(page).read_text(encoding="utf-8"), skipped=True)
    step = next(step for step in found if word in step.command)
    printed = Path(log).read_text(encoding="utf-8").splitlines()
    line = differences(step.shown or [], printed)
    if line is not None:
        sys.exit(f"{page} shows what {word} does not print: {line}")


if __name__ == "__main__":
    main()
