"""What a batch script says of its job: its directives, and the variables that a scheduler sets.

In : the text of a script for sbatch, qsub or bsub, or of any other.  Out: an Allocation, the
variables to run the script with, and those that nobody can know but the user.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.launch_line import BATCH, numbers, split_options

_DIRECTIVE = re.compile(
    r"^#\s?(SBATCH|PBS|BSUB|PJM|flux:|\$)[ \t]+(.*?)(?:[ \t]#.*)?$", re.MULTILINE
)
_PBS = re.compile(r"(?<![-\w])(?:select|nodes|rt_\w+)=(\d+)((?::\w+=\w+)*)")
_PJM = {"node": "nodes", "proc": "ranks", "max-proc-per-node": "each", "gpu": "gpus"}
_PJM_COUNT = re.compile(rf"(?<![-\w])({'|'.join(_PJM)})=(\d+)")
READ = re.compile(r"\$\{?([A-Z_][A-Z0-9_]*)(:?[-=+?])?")
HERE = {  # where a job is, which the script may ask without any effect on its size
    "RANK": "0",
    "LOCAL_RANK": "0",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_RESTART_COUNT": "0",
    "SLURM_ARRAY_JOB_ID": "1",
    "SLURMD_NODENAME": "node1",
    "PBS_JOBID": "1",
    "LSB_JOBID": "1",
    "JOB_ID": "1",
    "PET_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMI_RANK": "0",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_NAME": "job",
    "SLURM_JOB_USER": "user",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "cluster",
    "SLURM_JOB_ACCOUNT": "account",
    "PBS_JOBNAME": "job",
    "PJM_JOBID": "1",
}
_SIZES = re.compile(  # variables that say how large the job is
    r"(SLURM|PBS|LSB|PJM|PET|OMPI|PMI|NHOSTS|NTASKS|NPROCS|NNODES|NUM_NODES|N_NODES|NODE_COUNT|WORLD_SIZE|"
    r"NPROC_PER_NODE|GPUS_PER_NODE|NUM_GPUS|GPU_PER_NODE|NGPUS|N_GPUS|SENSECORE|MLP_WORKER)"
)


@dataclass(frozen=True)
class Allocation:
    """Hosts, tasks in all and on each host, GPUs of each; None where nobody says.

    said : what says so, ``#SBATCH --nodes=4``
    """

    nodes: int | None = None
    ranks: int | None = None
    each: int | None = None
    gpus: int | None = None
    said: str = ""


def allocation(text: str, words: Sequence[str] = ()) -> Allocation:
    """That of a script's directives; ``words`` are the options of sbatch or qsub, which win."""
    found, sources = dict[str, int](), list[str]()
    for kind, line in [*_DIRECTIVE.findall(text), ("", shlex.join(words))]:
        before = f"#{kind} " if kind else ""
        if kind == "PJM":
            counts = {_PJM[key]: int(value) for key, value in _PJM_COUNT.findall(line)}
            found |= counts
            sources += [before + line] if counts else []
            continue
        if resources := _PBS.search(line):
            more = {key: int(value) for key, value in re.findall(r":(\w+)=(\d+)", resources[2])}
            gpus = more.get("ngpus", more.get("gpus"))
            each = more.get("mpiprocs") or more.get("ppn") or more.get("ngpus")
            asked = {"nodes": int(resources[1]), "each": each, "gpus": gpus}
            found |= {key: value for key, value in asked.items() if value}
            sources.append(before + resources[0])
            continue
        with contextlib.suppress(ValueError):  # an open quote
            options, _ = split_options(BATCH, shlex.split(line))
            counted, said, _ = numbers(BATCH, options, {})
            found |= counted
            sources += [before + one.replace(" ", "=") for one in said.values()]
    nodes, ranks, each = (found.get(what) for what in ("nodes", "ranks", "each"))
    gpus = found.get("gpus") or found.get("all_gpus", 0) // (nodes or 1) or None
    if ranks is None and nodes:
        ranks = nodes * (each or 1)  # of SLURM: a task on each node
    if nodes is None and ranks and each:
        nodes = -(-ranks // each)
    return Allocation(nodes, ranks, each, gpus, ", ".join(dict.fromkeys(sources)))


def exported(words: Sequence[str]) -> dict[str, str]:
    """The variables that options of sbatch or qsub set: ``--export=ALL,TP=2``."""
    options, _ = split_options(BATCH, words)
    texts = [text for option in BATCH.sets.split() for text in options.get(option, ())]
    return dict(re.findall(r"(?:^|[,\s])([A-Za-z_]\w*)=([^,]*)", ",".join(texts)))


def manifest_job(text: str) -> tuple[list[str], Allocation, dict[str, str]]:
    """(command, hosts and processes, variables) of the first job in a Kubernetes manifest.

    Jobs, JobSets, PyTorchJobs, MPIJobs, TrainJobs and RayJobs have their numbers in like fields.
    Variables are those of its container and what the training operator sets
    (pkg/controller.v1/pytorch/envvar.go).  UsageError where there is no such job.
    """
    import yaml

    try:
        jobs = list(yaml.safe_load_all(text))
        nodes, container = next(_containers(jobs, 1))
        command = [str(one) for key in ("command", "args") for one in container.get(key, ())]
        if "entrypoint" in container:
            command = ["bash", "-c", str(container["entrypoint"])]
        settings = {
            one["name"]: str(one["value"]) for one in container.get("env", ()) if "value" in one
        }
        each, gpus = (next(_numbers(jobs, names), None) for names in (_EACH, _GPUS))
    except (yaml.YAMLError, StopIteration, LookupError, TypeError, ValueError) as error:
        what = "the manifest has no job whose command is known"
        raise UsageError(what, fix="its container's command: prism … torchrun …") from error
    settings |= {"PET_NNODES": str(nodes), "WORLD_SIZE": str(nodes * (each or 1))}
    settings |= {"PET_NPROC_PER_NODE": str(each)} if each else {}
    ranks = nodes * each if each else None
    return command, Allocation(nodes, ranks, each, gpus, f"{nodes} replicas"), settings


_REPLICAS = ("replicas", "parallelism", "numNodes")  # fields that say how often a template runs
_EACH = ("nprocPerNode", "numProcPerNode", "slotsPerWorker")
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")


def _containers(node: Any, nodes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(how many there are, container) of all that have a command."""
    if isinstance(node, list):
        for one in node:
            yield from _containers(one, nodes)
    elif isinstance(node, dict):
        if {"command", "args", "entrypoint"} & node.keys():
            yield nodes * int(node.get("numNodes", 1)), node
        for name, below in node.items():
            if name.endswith("ReplicaSpecs"):  # by role; the launcher of MPI is none of the nodes
                roles = [one for role, one in below.items() if role != "Launcher"]
                count = sum(int(one.get("replicas", 1)) for one in roles)
                specs = [one.get("template") for one in below.values()]
                yield from _containers(specs, nodes * count)
            else:
                times = [int(node[key]) for key in _REPLICAS if key in node]
                yield from _containers(below, nodes * math.prod(times))


def _numbers(node: Any, names: Collection[str]) -> Iterator[int]:
    """The numbers in fields of one of ``names``."""
    if isinstance(node, list | dict):
        for name, below in node.items() if isinstance(node, dict) else enumerate(node):
            if name in names and str(below).isdigit():
                yield int(below)
            yield from _numbers(below, names)


def variables(alloc: Allocation, hosts_file: str, folder: str) -> dict[str, str]:
    """What the schedulers set on the first host of ``alloc``.

    Args:
        alloc: the hosts and what runs on them.
        hosts_file: a file that names them, one a line.
        folder: where the job was submitted.
    """
    hosts = ",".join(hosts_of(alloc))
    made = dict(HERE)
    made |= dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), hosts)
    made |= dict.fromkeys(("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD"), folder)
    made |= dict.fromkeys(
        ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "SGE_JOB_HOSTLIST", "PJM_O_NODEINF"), hosts_file
    )
    made |= {"LSB_HOSTS": hosts.replace(",", " ")}
    counts = {
        "SLURM_NNODES SLURM_JOB_NUM_NODES PBS_NUM_NODES NHOSTS PJM_NODE": alloc.nodes,
        "SLURM_NTASKS SLURM_NPROCS PBS_NP PJM_MPI_PROC": alloc.ranks,
        "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE PBS_NUM_PPN": alloc.each,
        "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE": alloc.gpus,
        "SLURM_GPUS": (alloc.gpus or 0) * (alloc.nodes or 1) or None,
    }
    for names, count in counts.items():
        made |= dict.fromkeys(names.split(), str(count)) if count is not None else {}
    if alloc.gpus:
        made["SLURM_JOB_GPUS"] = ",".join(map(str, range(alloc.gpus)))
    if alloc.nodes is None:  # asked for
        for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE", "LSB_HOSTS"):
            del made[name]
    return made


def hosts_of(alloc: Allocation) -> list[str]:
    """Return made-up names of the hosts of ``alloc``."""
    return [f"node{index}" for index in range(1, (alloc.nodes or 1) + 1)]


def sourced(text: str, folder: Path) -> str:
    """The text of the files that a script reads with ``source``, as far as they are in ``folder``,
    that of the script, or below here.
    """
    words = re.findall(r"(?:^|[\s;&])(?:source|\.)\s+(.+?)(?=\s*(?:$|[;&|]))", text, re.MULTILINE)
    names = [re.sub(r".*[)}]/|[\"']", "", word) for word in words]  # "$(dirname "$0")/job.env"
    names = [name for name in names if re.fullmatch(r"[\w./-]{1,200}", name)]
    files = (Path(place, name) for name in names for place in (folder, "."))
    return "\n".join(file.read_text(errors="replace") for file in files if file.is_file())


def unknown(text: str, known: Mapping[str, str], settings: str = "") -> list[str]:
    """Variables of the size of the job that the script reads, and that neither it, ``settings``
    (files that it sources) nor ``known`` sets.
    """
    without_comments = re.sub(r"(^|\s)#.*", "", text)
    every = f"{without_comments}\n{settings}"
    sets = set(re.findall(r"(?:^|[\s;(])([A-Z_][A-Z0-9_]*)\+?=", every))
    sets |= {
        name
        for line in re.findall(r"\bread\b([^\n;|]*)", without_comments)
        for name in line.split()
    }
    sets |= {name for name, default in READ.findall(text) if default}
    read = dict.fromkeys(name for name, _ in READ.findall(without_comments))
    return [name for name in read if _SIZES.match(name) and name not in sets and name not in known]
