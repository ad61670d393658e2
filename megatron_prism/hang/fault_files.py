"""Which faults does a file name?  YAML lists, and the words of Megatron's and NVRx's injectors.

In : a path, or what their users write.  Out: ``fault_plan.Fault``s.  And the other way: what was
injected, line by line, for whoever scores verdicts (``truth_line``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_prism.core import guards
from megatron_prism.core.errors import UsageError
from megatron_prism.hang.fault_plan import FIX, Fault, parse

__all__ = ["TRUTH", "load_plan", "of_megatron", "parse_nvrx", "truth_line"]

TRUTH = "prism.fault-truth/1"


def parse_nvrx(text: str) -> Fault:
    """``FAULT:RANK:ITER[:NODES]`` of NVRx's fault-injection loop."""
    match = re.fullmatch(r"([A-Za-z_]+):(\d+):(\d+)(:\d+)?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no FAULT:RANK:ITER:NODES", fix=FIX)
    return parse(f"{match[1].lower()}@rank={match[2]},iter={match[3]}")


def load_plan(path: str | Path) -> tuple[Fault, ...]:
    """A YAML list of faults: texts, or mappings with ``kind``, ``at`` and ``with``-like params."""
    import yaml

    try:
        rows = yaml.safe_load(guards.read_yaml_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the plan {path}: {error}", fix="a YAML list") from error
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path} is no list of faults", fix="- drop@rank=3,group=tp,nth=1")
    found: list[Fault] = []
    for row in rows:
        if isinstance(row, dict) and any(str(k).startswith("fault-injector-") for k in row):
            names = {str(k)[15:].replace("-", "_"): v for k, v in row.items()}
            found += of_megatron(names)
            continue
        if isinstance(row, dict):
            row = dict(row)
            kind, where = row.pop("kind", ""), row.pop("at", "")
            if isinstance(where, dict):
                where = ",".join(f"{k}={v}" for k, v in where.items())
            params = ",".join(f"{k}={v}" for k, v in row.items())
            row = f"{kind}@{where}" + (f":{params}" if params else "")
        if not isinstance(row, str):
            raise UsageError(f"{path}: {row!r} is no fault", fix=FIX)
        found.append(parse(row) if "@" in row else parse_nvrx(row))
    return tuple(found)


def of_megatron(settings: Mapping[str, Sequence[str] | str]) -> tuple[Fault, ...]:
    """Megatron's ``--fault-injector-*`` (core/fault_injector.py @0.18): ranks, fault-types,
    delay-start-iteration.  What is timed in seconds there has no place in an emulated job."""
    anyone = f"any:{settings.get('num_ranks', 1)}"
    given = settings.get("ranks", "")
    words = given.split() if isinstance(given, str) else [str(rank) for rank in given]
    ranks = ",".join(words) or anyone
    kinds = settings.get("fault_types", "exception")
    names = kinds.replace(",", " ").split() if isinstance(kinds, str) else list(kinds)
    after = settings.get("delay_start_iteration")
    where = f"rank={ranks}" + (f",iter={after}" if after else "")
    return tuple(parse(f"{name.lower()}@{where}") for name in names)


def truth_line(**fields: object) -> str:
    """One injected fault as a line of JSON: ``fault`` as it was asked for, its ``kind``, ``where``
    it happened (local, virtual, programs), and the call that was hit as it should have been."""
    return json.dumps({"schema": TRUTH, **fields})
