"""Writes ``worlds/*.txt``: what Megatron's ranks call, captured on shapes, without memory.

PYTHONPATH=. python tests/helpers/make_worlds.py            # captures with the megatron-core here
PYTHONPATH=. python tests/helpers/make_worlds.py NAME DIR   # a folder that --prism-capture wrote
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from megatron_prism.core.programs import slices  # noqa: E402
from megatron_prism.core.programs.program import Program  # noqa: E402
from megatron_prism.core.programs.program_text import dump  # noqa: E402

RECIPES = """
moe: world=16 tp=2 pp=2 ep=4 etp=1 moe sp zero1 m=2
interleaved: world=16 pp=4 vpp=2 layers=8 m=4 zero1 overlap
"""


def stripped(programs):
    """The same calls, without allocations, shapes and what computing costs."""
    bare = {"shape": "", "note": "", "flops": -1, "traffic": -1, "kernels": -1, "ns": -1}
    made = []
    for program in programs.programs:
        ops = [dataclasses.replace(op, **(bare | {"note": op.note * (op.name == "host_wait")}))
               for op in program]  # fmt: skip
        made.append(Program.from_ops(program.rank, ops))
    kept = ("megatron_core", "tier")
    source = {key: programs.source[key] for key in kept if key in programs.source}
    return dataclasses.replace(programs, programs=tuple(made), source=source)


def write(name, folder):
    text = dump(stripped(slices.assemble(folder)))
    (HERE.parent / "features" / "hang" / "worlds" / f"{name}.txt").write_text(
        text, encoding="utf-8"
    )
    print(f"worlds/{name}.txt: {len(text):,} bytes")


def captured(lines, folder):
    """Folders of slices of the recipes in ``lines``, by name."""
    from helpers import forks
    from helpers.healthy_jobs import LOADED, recipe_of

    from megatron_prism.emulate.jobs import recipe_job

    jobs, folders = [], {}
    for line in filter(None, lines.splitlines()):
        name, recipe = recipe_of(line, LOADED)
        folders[name] = folder / name
        shutil.rmtree(folders[name], ignore_errors=True)
        jobs += [(recipe, rank, folders[name]) for rank in recipe_job.ranks_of(recipe)]
    wrong = [answer["error"] for answer in forks.capture(jobs).values() if "error" in answer]
    assert not wrong, wrong[0]
    return folders


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as place:
            for name, folder in captured(RECIPES, pathlib.Path(place)).items():
                write(name, folder)
