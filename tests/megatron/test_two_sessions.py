"""One process emulates two worlds, one after the other, and is then as it was before."""

import json
import pathlib

import pytest
from helpers import processes

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.ci, pytest.mark.megatron]

ROOT = pathlib.Path(__file__).parents[2]

CODE = """
import gc, importlib, json, os, sys, warnings
import torch
import torch._dynamo
import torch.utils.data
from torch import distributed as dist
from megatron_prism.core.jobs import recipe
from megatron_prism.emulate.jobs import recipe_script
from megatron_prism.emulate.rank.session import Session

OWNERS = {
    "torch": torch, "torch.cuda": torch.cuda, "torch.cuda.memory": torch.cuda.memory,
    "torch.cuda.random": torch.cuda.random, "torch.cuda.nvtx": torch.cuda.nvtx,
    "torch.distributed": dist, "c10d": dist.distributed_c10d, "Backend": dist.Backend,
    "torch.autograd": torch.autograd, "Module": torch.nn.Module, "Tensor": torch.Tensor,
    "functional": torch.nn.functional, "DataLoader": torch.utils.data.DataLoader,
    "Distribution": torch.distributions.Distribution,
    "optimizer": sys.modules["torch.optim.optimizer"],
}
FROZEN = gc.get_freeze_count()  # some of Python 3.12 itself
STATE = {"_default_pg_init_method"}  # of c10d: a text or None
PACKAGES = ("megatron", "triton", "transformer_engine", "scaled_", "fused_weight")


def found():
    ids = {f"{where}.{name}": id(value) for where, owner in OWNERS.items()
           for name, value in list(vars(owner).items()) if name not in STATE}
    modules = {name for name in sys.modules if name.startswith(PACKAGES)}
    values = {
        "sys.exit": id(sys.exit), "sys.excepthook": id(sys.excepthook), "argv": list(sys.argv),
        "meta_path": list(map(id, sys.meta_path)), "environ": dict(os.environ),
        "path": list(sys.path), "filters": list(warnings.filters),
        "gc": gc.isenabled(), "frozen": gc.get_freeze_count() > FROZEN,
        "threads": torch._C._is_multithreading_enabled(),
        "dynamo": torch._dynamo.config.disable, "up": dist.is_initialized(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks": len(torch.nn.modules.module._global_forward_hooks),
        "backends": list(dist.Backend.backend_list),
        "devices": dict(dist.Backend.default_device_backend_map),
        "modules": sorted(m for m in modules if not m.startswith("megatron_prism")),
    }
    return {**ids, **values}


def differences(before, after):
    # a module of torch that is imported later is an attribute of its parent from then on
    new = {key for key in after.keys() - before.keys()
           if id(sys.modules.get(key.replace("c10d.", "torch.distributed.", 1))) == after[key]}
    return sorted(key for key in before.keys() | after.keys() - new
                  if before.get(key) != after.get(key))


def ours():
    # names that other modules copied while ours stood there
    return sorted(f"{name}.{key}" for name, module in list(sys.modules.items())
                  if name.startswith("torch") and module is not None
                  for key, value in list(getattr(module, "__dict__", {}).items())
                  if callable(value)
                  and str(getattr(value, "__module__", "")).startswith("megatron_prism"))


def emulate(tier, rank, *settings):
    made = recipe.load("tiny-gpt_1cpu", [f"prism.tier={tier}", "train_iters=2", *settings])
    with Session() as session:
        summary = recipe_script.run(session, made, rank)
        inside = found()
    return summary, inside


exec(sys.argv[1])
"""

SECOND = """emulate("cpu", 5, "world_size=8", "tp=4")"""
TWICE = f"""
before = found()
one, inside = emulate(*FIRST, "world_size=4", "tp=2", "pp=2")
first = found()
other, _ = {SECOND}
after = found()
kept, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: None
leak = differences(before, found())
torch.cuda.synchronize = kept
print(json.dumps({{
    "while": differences(before, inside), "between": differences(before, first),
    "after": differences(before, after), "leak": leak, "ours": ours(),
    "one": one, "other": other}}))
"""
FAILS = """
before = found()
from megatron_prism.emulate.jobs.recipe_script import RankJob

def broken(job, number):
    with job.monitor.phase("forward"):
        raise MemoryError
RankJob.iterate = broken
try:
    emulate("meta", 1, "world_size=4", "tp=2", "pp=2")
except MemoryError:
    print(json.dumps({"after": differences(before, found()), "ours": ours()}))
"""


def run(code):
    done = processes.python(CODE, code, timeout=600, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


FIRST = {
    "cpu": ("cpu", 1),
    "meta": ("meta", 1),
    "engine": ("meta", 1, "transformer_impl=transformer_engine", "bf16=true"),
}


@pytest.fixture(scope="module", params=sorted(FIRST))
def twice(request):
    return run(f"FIRST = {FIRST[request.param]!r}{TWICE}")


def test_torch_and_megatron_are_as_they_were(twice):
    assert len(twice["while"]) > 50
    assert {"torch.cuda.synchronize", "c10d.new_group", "modules", "up"} <= set(twice["while"])
    assert twice["between"] == []
    assert twice["after"] == []
    assert twice["ours"] == []


def test_a_planted_leak_is_noticed(twice):
    assert twice["leak"] == ["torch.cuda.synchronize"]


@pytest.fixture(scope="module")
def alone():
    return run(f"print(json.dumps({SECOND}[0]))")


def test_the_second_world_trains_as_it_does_alone(twice, alone):
    one, other = twice["one"], twice["other"]
    assert (one["rank"], one["stage"], one["steps"]) == (1, 0, 2)
    assert (other["rank"], other["stage"], other["steps"]) == (5, 0, 2)
    for name in ("losses", "parameters", "communication", "stand_ins", "master_parameter_moved"):
        assert other[name] == alone[name], name


def test_an_emulation_that_fails_leaves_nothing_behind():
    assert run(FAILS) == {"after": [], "ours": []}
