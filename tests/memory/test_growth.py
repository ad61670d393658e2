"""What an iteration leaves behind: planted leaks are named, what only looks like one is none."""

import contextlib
import dataclasses
import os
import textwrap

import numpy as np
import pytest

from megatron_prism.core.programs.ops import BEGUN
from megatron_prism.core.programs.program import Builder
from megatron_prism.memory import peaks

MIB = 1 << 20


class Device:
    """Plays train steps; the last one is recorded as the recorder does it."""

    def __init__(self):
        self.rows, self.notes, self.alive, self.builder = [], [], {}, None

    def new(self, size, note=""):
        self.notes.append(note)
        return self.grow(len(self.notes) - 1, size)

    def grow(self, storage, size):
        self.alive[storage] = self.alive.get(storage, 0) + size
        self._moved(storage, size)
        return storage

    def free(self, storage):
        self._moved(storage, -self.alive.pop(storage))

    def _moved(self, storage, change):
        self.rows.append((storage, change, 0, 0))
        if self.builder is not None:
            self.builder.memory(storage, change, self.notes[storage] if change > 0 else "")

    def begin(self, last):
        self.rows.append((BEGUN, 0, 0, 0))
        if last:
            self.builder = Builder()
            for storage, size in self.alive.items():
                self.builder.memory(storage, size, self.notes[storage])

    def kernel(self, phase):
        if self.builder is not None:
            self.builder.add("compute", phase=phase, kernels=1)


class Job:
    """A job that leaves nothing behind; kinds override a moment of its train step."""

    def __init__(self):
        self.device = Device()
        self.kept, self.number = [], 0
        self.build()

    def build(self):
        self.weights = self.device.new(8 * MIB, "param:decoder")

    def zero_grad(self): ...
    def forward(self): ...
    def backward(self): ...
    def step(self): ...
    def between(self): ...

    def run(self, iterations):
        device = self.device
        for self.number in range(1, iterations + 1):
            device.begin(last=self.number == iterations)
            self.zero_grad()
            device.kernel("forward")
            self.forward()
            act = device.new(5 * MIB, "decoder.layers.0.mlp @core/mlp.py:5")
            device.kernel("forward")
            device.free(act)
            self.backward()
            device.kernel("backward")
            self.step()
            device.kernel("optimizer")
            self.between()
        program = device.builder.build(0)
        return dataclasses.replace(program, history=np.array(device.rows, dtype=np.int64))


class MainGradients(Job):
    """fp32 copies that the step makes and the next zero_grad drops."""

    grads = ()

    def zero_grad(self):
        for one in self.grads:
            self.device.free(one)

    def step(self):
        made = "grad:main parameters @core/optimizer.py:7"
        self.grads = [self.device.new(size * MIB, made) for size in (3, 4)]


class States(MainGradients):
    def step(self):
        super().step()
        if self.number == 1:
            self.device.new(16 * MIB, "optim:exp_avg")


class Fills(States):
    """A buffer that is filled once, in one iteration."""

    def __init__(self, at, moment, site="@core/rotary.py:9"):
        self.at, self.moment, self.site = at, moment, site
        super().__init__()

    def fill(self, moment):
        if (moment, self.number) == (self.moment, self.at):
            self.device.new(6 * MIB, self.site)

    def forward(self):
        self.fill("forward")

    def between(self):
        self.fill("between")


class DoubleBuffer(States):
    """A gathered buffer replaces the one before it, a step later."""

    def forward(self):
        self.kept.append(self.device.new(6 * MIB, "@core/buffers.py:3"))
        if len(self.kept) > 2:
            self.device.free(self.kept.pop(0))


class BuildGarbage(States):
    def build(self):
        super().build()
        self.garbage = self.device.new(64 * MIB)

    def forward(self):
        if self.number == 2:
            self.device.free(self.garbage)


class Evaluates(States):
    def between(self):
        self.device.free(self.device.new(40 * MIB, "@training/training.py:30"))


INNOCENT = [Job, MainGradients, States, DoubleBuffer, BuildGarbage, Evaluates]
FILLS = [(1, "forward"), (2, "forward"), (4, "forward"), (2, "between"), (4, "between")]


def keeps(moment, site, *sizes, of=States):
    """A kind of job that keeps tensors of these MiB at a moment of every iteration."""

    def keep(self):
        getattr(of, moment)(self)
        for size in sizes:
            self.device.new(size * MIB, f"decoder @{site}")

    return type("Keeps", (of,), {moment: keep, "site": site, "size": sum(sizes) * MIB})


class GrowingCache(States):
    """An entry more in every iteration, each in a buffer of its own."""

    site, size = "core/cache.py:4", 4 * MIB
    buffer = None

    def forward(self):
        entries = self.number
        if self.buffer is not None:
            self.device.free(self.buffer)
        self.buffer = self.device.new(entries * self.size, f"@{self.site}")


class GrowingStorage(States):
    site, size = "core/cache.py:5", 4 * MIB
    buffer = None

    def forward(self):
        if self.buffer is None:
            self.buffer = self.device.new(self.size, f"@{self.site}")
        else:
            self.device.grow(self.buffer, self.size)


class KeepsZeroedGradients(MainGradients):
    """zero_grad drops one of two only."""

    site, size = "core/optimizer.py:7", 4 * MIB

    def zero_grad(self):
        for one in self.grads[:1]:
            self.device.free(one)


KEPT = keeps("forward", "core/mlp.py:6", 3, 3)
PLANTED = [
    KEPT,
    keeps("between", "training/training.py:8", 2),
    keeps("backward", "core/hooks.py:2", 3, 4),  # as the main gradients, of another line
    keeps("step", "core/optimizer.py:90", 3),
    keeps("backward", "core/mlp.py:6", 5, of=BuildGarbage),
    keeps("backward", "core/mlp.py:6", 5, of=Job),
    GrowingCache,
    GrowingStorage,
    KeepsZeroedGradients,
]


@pytest.mark.parametrize("kind", INNOCENT)
def test_what_leaves_nothing_behind_is_no_leak(kind):
    assert peaks.growth(kind().run(4)).num_bytes <= 0


@pytest.mark.parametrize(("at", "moment"), FILLS)
def test_a_buffer_that_is_filled_once_is_no_leak(at, moment):
    assert peaks.growth(Fills(at, moment).run(4)).num_bytes <= 0


@pytest.mark.parametrize("iterations", [2, 3, 4])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_leak_is_named_by_its_bytes_and_its_line(kind, iterations):
    program = kind().run(iterations)
    left = peaks.growth(program)
    if iterations == 2 and issubclass(kind, BuildGarbage):  # goes in the only iteration there is
        assert left.num_bytes == kind.size - 64 * MIB
        return
    assert left.num_bytes == kind.size
    assert (left.origins[0].num_bytes, left.origins[0].site) == (kind.size, kind.site)
    assert len(left.origins) == 1


@pytest.mark.parametrize("kind", [States, KEPT])
def test_the_first_iteration_says_nothing(kind):
    assert peaks.growth(kind().run(1)) is None
    program = dataclasses.replace(kind().run(3), history=np.empty((0, 4), np.int64))
    assert peaks.growth(program) is None


# -- real jobs, with no GPU ------------------------------------------------------------------------
PLACES = [  # of a hook that keeps 2, 3, ... MiB and 7 B each time
    ("transformer.mlp", "MLP.forward"),
    ("transformer.attention", "Attention.forward"),
    ("transformer.transformer_layer", "TransformerLayer.forward"),
    ("models.gpt.gpt_model", "GPTModel.forward"),
    ("models.common.embeddings.language_model_embedding", "LanguageModelEmbedding.forward"),
    ("distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_grad_sync"),
    ("distributed.distributed_data_parallel", "DistributedDataParallel.zero_grad_buffer"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer._copy_model_grads_to_main_grads"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.zero_grad"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.step_with_ready_grads"),
]
KEEPER = """
    import importlib.machinery, sys

    PLACES, kept = {places}, []

    def keeping(original, size):
        def call(*args, **kwargs):
            import torch
            kept.append(torch.empty((size << 20) + 7, dtype=torch.uint8, device="cuda"))
            return original(*args, **kwargs)
        return call

    class Finder:
        def find_spec(self, name, path=None, target=None):
            mine = [(size, where) for size, (module, where) in enumerate(PLACES, 2)
                    if name == "megatron.core." + module]
            if not mine:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            plain = spec.loader.exec_module
            def exec_module(module):
                plain(module)
                for size, where in mine:
                    owner, method = where.split(".")
                    owner = getattr(module, owner)
                    setattr(owner, method, keeping(vars(owner)[method], size))
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
"""
SMALL = ["prism.tier=meta", "bf16=true", "data_path=null", "world_size=2",
         "hidden_size=512", "num_attention_heads=8", "num_layers=2",
         "global_batch_size=4", "micro_batch_size=1"]  # fmt: skip


@pytest.fixture
def server():
    pytest.importorskip("megatron.core")
    from megatron_prism.features.sweep.recipe_server import CaptureServer

    with contextlib.closing(CaptureServer()) as started:
        yield started


def captured(server, folder, *settings):
    from megatron_prism.core.jobs import recipe as recipes
    from megatron_prism.core.programs.program import load
    from megatron_prism.core.programs.slices import SliceStore

    recipe = recipes.load("tiny-gpt_1cpu", [*SMALL, *settings])
    store = SliceStore(folder, recipe.world, {})
    server.capture(recipe, 0, folder)
    return load(store.path(0)).programs[0]


REAL = {
    "bf16 gradients": ["grad_reduce_in_bf16=true", "use_distributed_optimizer=false"],
    "sharded": ["grad_reduce_in_bf16=true", "use_distributed_optimizer=true"],
    "overlapped": ["grad_reduce_in_bf16=true", "use_distributed_optimizer=true",
                   "overlap_grad_reduce=true", "overlap_param_gather=true"],
    "fp32": ["bf16=false"],
    "recomputed": ["grad_reduce_in_bf16=true", "recompute_granularity=selective"],
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.megatron
def test_real_jobs_leave_nothing_behind(server, tmp_path):
    for name, settings in REAL.items():
        left = peaks.growth(captured(server, tmp_path / name, *settings))
        assert left.num_bytes <= 64, name


@pytest.mark.slow
@pytest.mark.megatron
def test_ten_planted_leaks_of_one_job_are_named(tmp_path, monkeypatch, request):
    """Beside the main gradients, which are as large as they were."""
    text = textwrap.dedent(KEEPER).format(places=PLACES)
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    server = request.getfixturevalue("server")
    program = captured(server, tmp_path / "s", "grad_reduce_in_bf16=true",
                       "use_distributed_optimizer=true")  # fmt: skip
    left = peaks.growth(program)
    rows = program.history[np.flatnonzero(program.history[:, 0] == BEGUN)[-1] :]
    sizes = rows[rows[:, 1] > 0, 1]
    planted = {one: int((sizes == one).sum()) for one in ((n << 20) + 7 for n in range(2, 12))}
    assert all(planted.values()), planted
    assert left.num_bytes == sum(size * n for size, n in planted.items())
    named = [one for one in left.origins if one.num_bytes > 64]  # but for the last losses
    assert sum(one.num_bytes for one in named) == left.num_bytes
    assert sum(one.count for one in named) == sum(planted.values())
