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
from megatron_prism.emulate.command_line.launch_line import BATCH, numbers, split_options

# #$ is Grid Engine's, #PJM that of Fujitsu's scheduler
_DIRECTIVE = re.compile(
    r"^#\s?(SBATCH|PBS|BSUB|PJM|flux:|\$)[ \t]+(.*?)(?:[ \t]#.*)?$", re.MULTILINE
)
_PBS = re.compile(r"(?<![-\w])(?:select|nodes|rt_\w+)=(\d+)((?::\w+=\w+)*)")
_PJM = {"node": "nodes", "proc": "ranks", "max-proc-per-node": "per_host", "gpu": "gpus"}
_PJM_COUNT = re.compile(rf"(?<![-\w])({'|'.join(_PJM)})=(\d+)")
READ = re.compile(r"\$\{?([A-Z_][A-Z0-9_]*)(:?[-=+?])?")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)")
_NAME = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")
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

    source : what says so, ``#SBATCH --nodes=4``
    """

    nodes: int | None = None
    ranks: int | None = None
    per_host: int | None = None
    gpus: int | None = None
    source: str = ""


def allocation(text: str, words: Sequence[str] = ()) -> Allocation:
    """That of a script's directives; ``words`` are the options of sbatch or qsub, which win."""
    counts: dict[str, int] = {}
    sources: list[str] = []
    for kind, line in [*_DIRECTIVE.findall(text), ("", shlex.join(words))]:
        counts_of_line, sources_of_line = _read_directive(kind, line)
        counts |= counts_of_line
        prefix = f"#{kind} " if kind else ""
        sources += [prefix + source for source in sources_of_line]
    nodes = counts.get("nodes")
    ranks = counts.get("ranks")
    per_host = counts.get("per_host")
    # directives say GPUs of a host, or of the whole job
    gpus = counts.get("gpus") or counts.get("all_gpus", 0) // (nodes or 1) or None
    if ranks is None and nodes:
        ranks = nodes * (per_host or 1)  # of SLURM: a task on each node
    # --ntasks and --ntasks-per-node leave the number of hosts to SLURM
    if nodes is None and ranks and per_host:
        nodes = -(-ranks // per_host)
    return Allocation(nodes, ranks, per_host, gpus, ", ".join(dict.fromkeys(sources)))


def _read_directive(kind: str, line: str) -> tuple[dict[str, int], list[str]]:
    """({quantity: how many}, words that say so) of one directive of a scheduler ``kind``."""
    try:
        if kind == "PJM":
            counts = {_PJM[key]: int(value) for key, value in _PJM_COUNT.findall(line)}
            return counts, [line] if counts else []
        resources = _PBS.search(line)
        if resources:
            return _pbs_counts(resources), [resources[0]]
        options, _ = split_options(BATCH, shlex.split(line))
        counts, sources, _ = numbers(BATCH, options, {})
    except ValueError:  # an open quote, or a number of more digits than Python converts
        return {}, []
    return counts, [source.replace(" ", "=") for source in sources.values()]


def _pbs_counts(resources: re.Match[str]) -> dict[str, int]:
    """What ``select=4:ngpus=8:mpiprocs=8`` asks for."""
    written_fields = re.findall(r":(\w+)=(\d+)", resources[2])
    fields = {key: int(value) for key, value in written_fields}
    nodes = int(resources[1])
    # processes on a host; where nobody says them, one for each GPU
    per_host = fields.get("mpiprocs") or fields.get("ppn") or fields.get("ngpus")
    gpus = fields.get("ngpus", fields.get("gpus"))
    asked_counts = {"nodes": nodes, "per_host": per_host, "gpus": gpus}
    return {quantity: count for quantity, count in asked_counts.items() if count}


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
        command = [
            str(word) for word in (*container.get("command", ()), *container.get("args", ()))
        ]
        # a RayJob has one line for a shell, the other kinds have words
        if "entrypoint" in container:
            command = ["bash", "-c", str(container["entrypoint"])]
        # ``valueFrom`` names a secret or a field that the cluster alone knows
        settings = {
            variable["name"]: str(variable["value"])
            for variable in container.get("env", ())
            if "value" in variable
        }
        per_host = next(_numbers(jobs, _PER_HOST), None)
        gpus = next(_numbers(jobs, _GPUS), None)
    except (yaml.YAMLError, StopIteration, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            "the manifest has no job whose command is known",
            fix="its container's command: prism … torchrun …",
        ) from error
    settings["PET_NNODES"] = str(nodes)
    settings["WORLD_SIZE"] = str(nodes * (per_host or 1))
    ranks = None
    if per_host:
        settings["PET_NPROC_PER_NODE"] = str(per_host)
        ranks = nodes * per_host
    return command, Allocation(nodes, ranks, per_host, gpus, f"{nodes} replicas"), settings


_REPLICAS = ("replicas", "parallelism", "numNodes")  # fields that say how often a template runs
_PER_HOST = ("nprocPerNode", "numProcPerNode", "slotsPerWorker")
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")


def _containers(node: Any, nodes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(how many there are, container) of all that have a command."""
    if isinstance(node, list):
        for item in node:
            yield from _containers(item, nodes)
    if not isinstance(node, dict):
        return
    if {"command", "args", "entrypoint"} & node.keys():
        yield nodes * int(node.get("numNodes", 1)), node
    for name, value in node.items():
        if name.endswith("ReplicaSpecs"):  # by role; the launcher of MPI is none of the nodes
            replicas = 0
            for role, spec in value.items():
                if role != "Launcher":
                    replicas += int(spec.get("replicas", 1))
            templates = [spec.get("template") for spec in value.values()]
            yield from _containers(templates, nodes * replicas)
        else:
            repeats = [int(node[key]) for key in _REPLICAS if key in node]
            yield from _containers(value, nodes * math.prod(repeats))


def _numbers(node: Any, names: Collection[str]) -> Iterator[int]:
    """The numbers in fields of one of ``names``."""
    if isinstance(node, list):
        for item in node:
            yield from _numbers(item, names)
    elif isinstance(node, dict):
        for name, value in node.items():
            # a template of Helm or kustomize may still have a placeholder here
            if name in names and str(value).isdigit():
                yield int(value)
            yield from _numbers(value, names)


def variables(alloc: Allocation, hosts_file: str, folder: str) -> dict[str, str]:
    """What the schedulers set on the first host of ``alloc``.

    Args:
        alloc: the hosts and what runs on them.
        hosts_file: a file that names them, one a line.
        folder: where the job was submitted.
    """
    hosts = hosts_of(alloc)
    settings = dict(HERE)
    for name in ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "LS_SUBCWD"):
        settings[name] = folder
    for name in ("LSB_DJOB_HOSTFILE", "SGE_JOB_HOSTLIST", "PJM_O_NODEINF"):
        settings[name] = hosts_file
    if alloc.nodes is not None:  # else the user is asked for them
        settings["SLURM_JOB_NODELIST"] = settings["SLURM_NODELIST"] = ",".join(hosts)
        settings["LSB_HOSTS"] = " ".join(hosts)
        settings["PBS_NODEFILE"] = hosts_file
    counts = {
        "SLURM_NNODES SLURM_JOB_NUM_NODES PBS_NUM_NODES NHOSTS PJM_NODE": alloc.nodes,
        "SLURM_NTASKS SLURM_NPROCS PBS_NP PJM_MPI_PROC": alloc.ranks,
        "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE PBS_NUM_PPN": alloc.per_host,
        "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE": alloc.gpus,
        "SLURM_GPUS": (alloc.gpus or 0) * (alloc.nodes or 1) or None,
    }
    # what no directive settles stays unset, so that the user is asked instead of guessed for
    for names, count in counts.items():
        if count is not None:
            settings |= dict.fromkeys(names.split(), str(count))
    if alloc.gpus:
        settings["SLURM_JOB_GPUS"] = ",".join(map(str, range(alloc.gpus)))
    return settings


def hosts_of(alloc: Allocation) -> list[str]:
    """Return made-up names of the hosts of ``alloc``."""
    return [f"node{index}" for index in range(1, (alloc.nodes or 1) + 1)]


def sourced(text: str, folder: Path) -> str:
    """The text of the files that a script reads with ``source``, as far as they are in ``folder``,
    that of the script, or below here.
    """
    words = re.findall(r"(?:^|[\s;&])(?:source|\.)\s+(.+?)(?=\s*(?:$|[;&|]))", text, re.MULTILINE)
    texts = list[str]()
    for word in words:
        name = re.sub(r".*[)}]/|[\"']", "", word)  # "$(dirname "$0")/job.env"
        # a name with a variable in it is known only to a run of the script
        if not re.fullmatch(r"[\w./-]{1,200}", name):
            continue
        for place in (folder, Path(".")):
            file = place / name
            if file.is_file():
                texts.append(file.read_text(errors="replace"))
    return "\n".join(texts)


def sourced_by_run(scratch: Path) -> str:
    """Return the text of files that a script has read with ``source`` in a dry run.

    Args:
        scratch: folder of the dry run, where the script noted them.
    """
    texts: list[str] = []
    names = scratch / "sourced"
    if names.is_file():
        for name in dict.fromkeys(names.read_text(errors="replace").splitlines()):
            # a file may be gone by now, as that of ``source <(…)``
            with contextlib.suppress(OSError):
                texts.append(Path(name).read_text(errors="replace"))
    return "\n".join(texts)


def is_size(name: str) -> bool:
    """Tell whether a variable says how large the job is, by its name."""
    return bool(_SIZES.match(name))


def unknown(text: str, known: Mapping[str, str], settings: str = "") -> list[str]:
    """Variables of the size of the job that the script reads, and that neither it, ``settings``
    (files that it sources) nor ``known`` sets.
    """
    # what a comment mentions (another cluster's line, a usage) must not be asked for
    without_comments = re.sub(r"(^|\s)#.*", "", text)
    settled = set(known)
    assigned = re.findall(r"(?:^|[\s;(])([A-Z_][A-Z0-9_]*)\+?=", f"{without_comments}\n{settings}")
    settled.update(assigned)
    # `read NNODES < FILE` sets a variable without an equals sign
    for names in re.findall(r"\bread\b([^\n;|]*)", without_comments):
        settled.update(names.split())
    for name, default in READ.findall(text):
        # the script itself says what it takes without it (``:-4``); of ``:?`` Bash says in a run
        # that it lacks, and an attempt gives it
        if default:
            settled.add(name)
    read = dict.fromkeys(name for name, _ in READ.findall(without_comments))
    # $((NNODES * 8)) reads without a $
    for expression in _ARITHMETIC.findall(without_comments):
        read.update(dict.fromkeys(_NAME.findall(expression)))
    return [name for name in read if is_size(name) and name not in settled]
