"""Transformer Engine's own Python on kernels that only have shapes."""

import ast
import importlib.util
import inspect
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.jobs.megatron_source import engine_version
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.replay.costs.kernels import KERNEL, MeasuredKernel
from megatron_prism.replay.costs.kernels import read as read_ops
from megatron_prism.runtime import devices
from megatron_prism.runtime.devices import kernels, moe_dispatch, triton
from megatron_prism.runtime.devices.live_bytes import History
from megatron_prism.runtime.recorder.shapes_meter import Meter
from megatron_prism.runtime.te_kernels import table

needs_te = pytest.mark.skipif(not engine_version(), reason="transformer-engine is not installed")
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
ROWS = {name: row for name, row in table.TABLE.items() if row.__name__ != "<lambda>"}


def calls():
    """(file, kernel, number of arguments, their names) of every call of the library."""
    package = pathlib.Path(importlib.util.find_spec("transformer_engine").origin).parent
    for file in sorted((package / "pytorch").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("tex."):
                if any(isinstance(a, ast.Starred) for a in node.args):
                    continue
                names = [keyword.arg for keyword in node.keywords if keyword.arg]
                yield file.name, ast.unparse(node.func)[4:], len(node.args), names


@pytest.fixture(scope="module")
def meta():
    """Tier meta of this process, with the installed Transformer Engine."""
    changes = ProcessChanges()
    tier = devices.prepare("meta", changes)
    yield tier.live
    changes.undo()


@pytest.fixture
def te(meta):
    return importlib.import_module("transformer_engine.pytorch")


@pytest.fixture
def requests(meta):
    """Sizes that are asked for while a function runs."""

    def of(run):
        meta.history, before = History(lambda: 0), meta.history
        try:
            kept = run()  # noqa: F841 - alive until the rows are read
            return [int(size) for size in meta.history.rows()[:, 1] if size > 0]
        finally:
            meta.history = before

    return of


@needs_te
def test_calls_of_the_installed_release_fit_their_rows(meta):
    wrong = []
    for file, name, count, names in calls():
        if (row := ROWS.get(name)) is not None:
            try:
                inspect.signature(row).bind_partial(*[None] * count, **dict.fromkeys(names))
            except TypeError as error:
                wrong.append(f"{file}: {name}: {error}")
    assert wrong == []


@needs_te
def test_a_kernel_without_a_row_is_refused_by_its_name(te):
    library = sys.modules["transformer_engine_torch"]
    with pytest.raises(UnsupportedError, match="kernel of_a_later_release has no row"):
        library.of_a_later_release(1)


@needs_te
def test_a_later_release_runs_or_names_the_kernel():
    """Python of 9.9 imports names and calls kernels that no release before it had."""
    code = (
        "import torch\n"
        "from megatron_prism.core.errors import UnsupportedError\n"
        "from megatron_prism.core.process_changes import ProcessChanges\n"
        "from megatron_prism.runtime import devices, te_kernels\n"
        "te_kernels.engine_version = lambda: '9.9.0'\n"
        "devices.prepare('meta', ProcessChanges())\n"
        "import transformer_engine.pytorch as te, transformer_engine_torch as tex\n"
        "x = torch.zeros(16, 2, 64, dtype=torch.bfloat16, device='cuda', requires_grad=True)\n"
        "layer = te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, device='cuda')\n"
        "layer(x).sum().backward()\n"
        "assert tex.LaterKind.SOME == tex.LaterKind.SOME != tex.LaterKind.OTHER\n"
        "for name, call in (('later_kernel', lambda: tex.later_kernel(x)),\n"
        "                   ('fp8_transpose', lambda: tex.fp8_transpose(x, None, later=1)),\n"
        "                   ('generic_gemm', lambda: tex.generic_gemm(x))):\n"
        "    try: call()\n"
        "    except UnsupportedError as error: assert f'kernel {name} ' in error.message, error\n"
        "    else: raise AssertionError(name)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@needs_te
def test_a_parameter_is_asked_for_once(te, requests):
    """``meta`` is not 'not made yet': neither for modules nor, at every pass, for te.ops."""
    size = 512 * 256 * 2
    assert requests(lambda: te.Linear(512, 256, bias=False, **BF16)).count(size) == 1
    layer = te.ops.Linear(512, 256, bias=False, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(64, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    assert requests(lambda: layer(x)).count(size) == 0


@needs_te
def test_operators_of_torch_library_run_in_sight(te, requests):
    """The unfused softmax is a custom operator, whose result is 8 MiB."""
    softmax = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.softmax"
    )
    scores = torch.zeros(2, 4, 512, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    fused = softmax.FusedScaleMaskSoftmax(None)
    assert requests(lambda: fused(scores, None, "no_mask")) == [1 << 23]


@needs_te
def test_products_have_a_workspace_on_the_device(te):
    te.Linear(64, 64, **BF16)(torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda"))
    from megatron_prism.runtime.te_kernels import hooks

    kept = [tensor for whose, tensor in hooks.kept() if whose == "cuBLAS workspace"]
    assert [(t.device.type, t.nbytes) for t in kept if t is not None] == [("meta", 33_555_456)]


@needs_te
def test_wrappers_have_no_memory_of_their_own(te, meta):
    recipe = importlib.import_module("transformer_engine.common.recipe")
    before = meta.now
    with te.fp8_model_init(recipe=recipe.Float8CurrentScaling()):
        layer = te.Linear(1024, 512, bias=False, **BF16)
    assert 2 * 1024 * 512 <= meta.now - before < 2 * 1024 * 512 + 33_555_456 + 4096
    assert {name for name, value in vars(layer.weight).items() if isinstance(value, torch.Tensor)}


@needs_te
def test_experts_in_blocks_of_fp8_share_a_buffer(te, requests):
    """bulk_allocate: one request of data and scales by rows, one by columns."""
    tensor = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    library = sys.modules["transformer_engine_torch"]
    quantizers = [tensor.Float8BlockQuantizer(fp8_dtype=library.DType.kFloat8E4M3, rowwise=True,
                                              columnwise=True, block_scaling_dim=1)
                  for _ in range(2)]  # fmt: skip
    x = torch.zeros(512, 256, dtype=torch.bfloat16, device="cuda")
    data, scales = 512 * 256, 4 * 2 * 256 * 2
    found = requests(lambda: library.split_quantize(x, [256, 256], quantizers))
    assert found == [data + scales + 256, data + scales + 256]


@needs_te
def test_counts_that_are_made_up_are_padded_for_fp8(te, monkeypatch):
    x = torch.zeros(64, 32, dtype=torch.bfloat16, device="cuda")
    padding = te.Fp8Padding(2, align_size=16)
    assert padding(x, [32, 32])[1] == [32, 32]
    monkeypatch.setitem(moe_dispatch.counts, "made_up", True)
    rows, counts = padding(x, [32, 32])
    assert (rows.shape, counts) == ((80, 32), [48, 32])
    assert te.Fp8Unpadding(2, align_size=16)(rows, [32, 32]).shape == x.shape


@needs_te
def test_flash_attention_where_cudnn_is_off(te, monkeypatch, requests):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    dpa = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    )
    dpa._attention_backends["backend_selection_requires_update"] = True
    q, k, v = (torch.zeros(2, 256, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
               for _ in range(3))  # fmt: skip
    attention = te.DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="causal")
    found = requests(lambda: attention(q, k, v).sum().backward())
    dpa._attention_backends["backend_selection_requires_update"] = True
    assert 4 * 2 * 4 * 256 * 64 in found  # the gradient of the queries in fp32
    assert 2 * 4 * 2 * 256 * 256 not in found  # no scores


@needs_te
def test_kernels_say_their_names(te, monkeypatch):
    seen = []
    meter = SimpleNamespace(add=lambda *kernel: seen.append(kernel[:2]))
    monkeypatch.setattr(kernels, "meter", meter)
    layer = te.LayerNormLinear(256, 512, bias=False, **BF16)
    x = torch.zeros(128, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    product = 2 * 128 * 256 * 512
    assert seen == [("norm", 0), ("gemm", product), ("gemm", product), ("gemm_wgrad", product),
                    ("layer_norm_backward", 0)]  # fmt: skip


@needs_te
def test_everything_is_undone():
    before = vars(torch.Tensor).get("is_cuda"), torch.library.custom_op, torch.version.cuda
    code = (
        "import sys, torch; before = torch.Tensor._make_wrapper_subclass, torch.library.custom_op\n"
        "from megatron_prism.core.process_changes import ProcessChanges\n"
        "from megatron_prism.runtime import devices\n"
        "for _ in range(2):\n"
        "    changes = ProcessChanges(); devices.prepare('meta', changes)\n"
        "    import transformer_engine.pytorch as te; te.Linear(8, 8)\n"
        "    changes.undo()\n"
        "left = [n for n, m in sys.modules.items() if m and n.startswith(('transformer_engine',\n"
        "                                                                 'flash_attn'))]\n"
        "assert left == [], left\n"
        "assert (torch.Tensor._make_wrapper_subclass, torch.library.custom_op) == before\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert before == (vars(torch.Tensor).get("is_cuda"), torch.library.custom_op,
                      torch.version.cuda)  # fmt: skip


@needs_te
def test_its_python_alone_is_hidden_from_jobs():
    """It would raise RuntimeError where Megatron expects an ImportError."""
    code = (
        "import torch, importlib.util\n"
        "assert importlib.util.find_spec('transformer_engine') is None\n"
        "try: import transformer_engine\n"
        "except ImportError: print('hidden')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "hidden\n"


@needs_te
def test_another_release_is_refused(meta):
    devices.prepare("meta", ProcessChanges(), engine_release=engine_version())
    with pytest.raises(UsageError, match="2.8.0 is asked for") as refused:
        devices.prepare("meta", ProcessChanges(), engine_release="2.8.0")
    assert refused.value.fix == "pip install --no-deps transformer-engine==2.8.0"


class Kernel:
    def __init__(self, module):
        self.__name__, self.__module__ = "rotate", module


def test_a_kernel_of_triton_is_what_it_reads_and_writes_or_refused():
    """Of shapes whosever it is; of values only with a stand-in."""
    x = torch.zeros(4, device="meta")
    for module in ("transformer_engine.common.triton.pad", "megatron.core"):
        triton._launcher(Kernel(module), (1,))(x, size=4)
        with pytest.raises(UnsupportedError, match="triton kernel rotate needs a GPU"):
            triton._launcher(Kernel(module), (1,))(torch.zeros(4))


@needs_te
@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling"])
def test_products_in_fp8_say_so_and_cost_what_fp8_costs(te, monkeypatch, recipe):
    """Their data are bytes; forward, and both gradients, of columns that are kept turned."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    x = torch.zeros(4096, 2048, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def products(enabled):
        layer = te.Linear(2048, 5120, bias=False, **BF16)
        found = Meter()
        monkeypatch.setattr(kernels, "meter", found)
        with te.autocast(enabled=enabled, recipe=getattr(recipes, recipe)()):
            out = layer(x)
        out.sum().backward()
        return [KERNEL.match(text) for text in found.take().calls if text.startswith("gemm")]

    table = read_ops("h100")
    times = {}
    for enabled in (False, True):
        rows = products(enabled)
        assert len(rows) == 3
        assert all(row["dtype"].startswith("float8") for row in rows) == enabled
        each = [
            (r["name"], r["shapes"], r["dtype"], int(r["flops"]), int(r["bytes"])) for r in rows
        ]
        times[enabled] = [table.ns(MeasuredKernel.parse(*one)) for one in each]
    assert all(fp8 < 0.8 * bf16 for fp8, bf16 in zip(times[True], times[False], strict=True))
