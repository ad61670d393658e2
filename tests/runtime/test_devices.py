"""Tiers without a CUDA device: each case in a process of its own, since a tier cannot be undone."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

START = """import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
tier = tiers.prepare({name!r}, ProcessChanges())
"""


def run(name, code, expect=0):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START.format(name=name) + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


CPU = """
x = torch.ones(4, device="cuda")
assert x.device.type == "cpu" and x.cuda().device.type == "cpu"
assert x.to("cuda:3").device.type == "cpu" and torch.zeros(2, device=0).device.type == "cpu"
assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
assert x.sum().item() == 4.0 and bool((x > 0).all()) and x.is_cuda
assert x.half().type(torch.cuda.FloatTensor).dtype == torch.float32
assert torch.cuda.is_available() and torch.cuda.current_device() == 0
with torch.cuda.stream(torch.cuda.Stream()):
    event = torch.cuda.Event(enable_timing=True); event.record(); event.synchronize()
x.record_stream(torch.cuda.current_stream())
aside = torch.cuda.Stream(); context = torch.cuda.stream(aside)
for _ in range(2):  # torch's may be entered again
    with context:
        assert torch.cuda.current_stream() is aside
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
try:
    torch.cuda.memory._record_memory_history(max_entries=5)
except Exception as error:
    assert type(error).__name__ == "UnsupportedError" and "--record-memory-history" in error.fix
import fused_weight_gradient_mlp_cuda as apex
kept = torch.ones(3, 2); rows = torch.arange(8.0).view(4, 2)
apex.wgrad_gemm_accum_fp32(rows, torch.ones(4, 3), kept)
assert kept.tolist() == [[13.0, 17.0]] * 3
import scaled_masked_softmax_cuda as masked, scaled_upper_triang_masked_softmax_cuda as causal
import scaled_softmax_cuda as plain
scores, half = torch.randn(4, 8, 8, requires_grad=True), torch.tensor(0.5)
above = torch.ones(8, 8).triu(1).bool(); none = above & ~above
for kernel, mask, args in ((causal, above, ()), (masked, above, (above,)), (plain, none, ())):
    wanted = torch.softmax((scores * 0.5).masked_fill(mask, -10000.0), -1)
    found = kernel.forward(scores.detach(), *args, half)
    assert torch.allclose(found, wanted)
    grad, scores.grad = torch.randn(4, 8, 8), None
    wanted.backward(grad)
    assert kernel.backward(grad, found, half) is grad  # in place
    assert torch.allclose(grad, scores.grad, atol=1e-6)
assert [masked.get_batch_per_block(n, n, 1, 8) for n in (16, 64, 256)] == [16, 8, 4]
loader = torch.utils.data.DataLoader([1, 2], pin_memory=True)
assert [int(v) for v in loader] == [1, 2]
assert torch.cuda.temperature() == torch.cuda.power_draw() == torch.cuda.clock_rate() == 0
state = torch.cuda.get_rng_state(); a = torch.rand(3); torch.cuda.set_rng_state(state)
assert torch.equal(a, torch.rand(3))

class Ask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        return g + torch.ones(1, device=torch.cuda.current_device()) + g.new_zeros(1, device="cuda")
for call in (lambda y: y.backward(), lambda y: torch.autograd.backward([y]),
             lambda y: torch.autograd.grad(y, leaf)):
    leaf = torch.ones(1, device="cuda", requires_grad=True)
    call(Ask.apply(leaf))

class Recompute(torch.autograd.Function):  # of a function that returns its bias, too
    @staticmethod
    def forward(ctx, x): ctx.save_for_backward(x); return x * 2, bias
    @staticmethod
    def backward(ctx, *grads):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(): torch.autograd.backward((x * 2, bias), grads)
        return x.grad
bias = torch.nn.Parameter(torch.ones(1, device="cuda"))
try: sum(Recompute.apply(torch.ones(1, device="cuda", requires_grad=True))).backward()
except Exception as error: assert "starts itself without end" in str(error), error
else: raise AssertionError
"""

META = """
from megatron_prism.runtime.known_values import Unknown
x = torch.ones(4, 8, device="cuda")
assert x.is_meta and x.cuda().is_meta and x.is_cuda and not torch.ones(2, device="cpu").is_cuda
assert x.sum().item() == 2.0 and bool((x > 0).all()) and not bool((x > 0).any())
alike = (x > 0).all()  # as an assertion expects, but nothing follows from it
assert alike.item() and torch.all(x).bool() and isinstance((alike * 3.0).item(), Unknown)
many = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
places = sorted(one.data_ptr() for one in many)  # no place in one is one in another
assert min(after - before for before, after in zip(places, places[1:])) >= 1 << 20
assert many[0][4096:].data_ptr() == many[0].data_ptr() + 4096
assert x.tolist() == [[2.0] * 8] * 4 and x.long().tolist() == [[0] * 8] * 4
assert x.cpu().shape == (4, 8) and x.to("cpu").device.type == "cpu"
assert torch.tensor([[x.sum()], [x.sum()]]).shape == (2, 1)
host = torch.zeros(4, 8); host.copy_(x); assert float(host.sum()) == 0
assert f"{x.sum().item() / 3 + 1:.3E} {x.sum().item() ** .5:9.1f}|" == "unknown   unknown|"
rate = torch.tensor([1e-4], device="cuda")  # made of a number of the host: not of data
least = torch.tensor([1e-9], device="cuda")
scale = (torch.max(rate.double() * 2, least) * 0.5).reciprocal().float()
assert abs(rate.item() - 1e-4) < 1e-9 and abs(scale.item() - 1e4) < 1 and float(scale) > 9999
view, zero = rate.view(()), torch.tensor(0, device="cuda")
view.mul_(4)
assert abs(rate.item() - 4e-4) < 1e-9 and not zero and zero.tolist() == 0 and rate.cpu() > 0
for write in (lambda t: t.add_(x.sum()), lambda t: t.copy_(x[0, :1]), lambda t: t.fill_(x[0, 0]),
              lambda t: t.__setitem__(0, x[0, 0]), lambda t: torch.add(t, x[0, :1], out=t),
              lambda t: torch._amp_foreach_non_finite_check_and_unscale_([t], x[0, 0], x[0, 0])):
    known = torch.tensor([3.0], device="cuda")
    write(known)
    assert isinstance(known.item(), Unknown), write
assert isinstance(torch.tensor([x.sum().item()], device="cuda").item(), Unknown)
assert torch.tensor([3, 5]).to(device="cuda").tolist() == [3, 5]  # tokens of experts
assert torch.tensor([[3, 5]]).to(device="cuda").tolist() == [[0, 0]]  # tokens
ends = torch.tensor([[0, 3, 8, 8, 8]], dtype=torch.int32).cuda()  # documents of 3 and 5 tokens
row = ends[0]
hits = (row == 8).nonzero(as_tuple=True)[0]
valid = row[:hits[0].item() + 1]
assert ends.is_meta and valid.is_meta and valid.shape == (3,) and valid.cpu().tolist() == [0, 3, 8]
lengths = valid[1:] - valid[:-1]
assert lengths.tolist() == [3, 5] and int(lengths.max()) == 5 and lengths.to("cpu").sum() == 8
assert torch.cat([valid, valid[1:] + 8]).tolist() == [0, 3, 8, 11, 16]
assert torch.repeat_interleave(lengths, lengths).shape == (8,)
lengths.mul_(2)
assert lengths.tolist() == [6, 10] and valid.tolist() == [0, 3, 8]
ends.copy_(x[:1, :5])  # unknown now, of its views, too
assert row.tolist() == [0] * 5 and not any(valid.tolist())
ragged = torch.nested.as_nested_tensor([torch.ones(5), torch.ones(3)], layout=torch.jagged)
for moved in ragged.cuda(), ragged.to(0):  # its Python reads lengths
    lengths = moved.offsets().diff()
    assert lengths.tolist() == [5, 3] and [len(one) for one in moved.unbind()] == [5, 3]
    assert moved[1].shape == (3,) and moved.to_padded_tensor(0.0).shape == (2, 5)
spread = torch.repeat_interleave(x[0, :2], lengths)  # its length is known, its values are not
assert spread.shape == (8,) and isinstance(spread.sum().item(), Unknown)
ragged = torch.nested.as_nested_tensor([spread[:6], spread[6:]], layout=torch.jagged)
assert ragged.offsets().tolist() == [0, 6, 8]
ends = torch.zeros(3, dtype=torch.int32, device="cuda")
ends[1:] = lengths.cumsum(0)
assert ends.tolist() == [0, 5, 8]
ends[1] = x.sum().int()
assert not any(ends.tolist())
tokens = torch.arange(2048).cuda()
try: tokens.nonzero()
except NotImplementedError: pass
else: raise AssertionError("what a token is depends on data")
between = torch.distributions.uniform.Uniform(x[0], 2 * x[0])  # --moe-input-jitter-eps
assert between.rsample((3,)).shape == (3, 8)
one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
other.weight, weight = one.weight, one.weight
weight.sequence_parallel, weight.grad = True, torch.zeros(2, 2)
torch.nn.Sequential(one, other).cuda().bfloat16()
assert one.weight is other.weight is weight and weight.sequence_parallel
assert weight.is_meta and weight.grad.is_meta and weight.dtype == torch.bfloat16
one(torch.ones(4, 2, dtype=torch.bfloat16, device="cuda")).sum().backward()
late, buffer = torch.nn.Linear(2, 2), torch.zeros(8, device="cuda")  # --use-cpu-initialization
weight = late.weight
weight.sequence_parallel = True
weight.data = buffer[:4].view(2, 2)
assert late.weight is weight and weight.is_meta and weight.sequence_parallel
assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
assert weight.data.untyped_storage()._cdata == buffer.untyped_storage()._cdata
"""

# Unknown values are finite, whoever asks for it and however
HEALTH = """
from megatron_prism.runtime import known_values
from megatron_prism.runtime.known_values import Unknown
inf = float("inf")
x, huge = torch.ones(4, 8, device="cuda"), torch.empty(1 << 40, device="cuda")
sick = [
    torch.isnan(x), x.isnan(), torch.isinf(x), x.isneginf(), torch.isposinf(x), torch.isnan(huge),
    x != x, x.ne(x), torch.ne(x, x), x == inf, x < -inf, x.abs() == inf, ~torch.isfinite(x),
    torch.isnan(x) | torch.isinf(x), torch.logical_or(x.isnan(), x.isinf()), x.isnan() & (x > 0),
    torch.isfinite(x).logical_not(), x.isnan().view(-1)[3:], torch.isnan(x.sum()), x[0].isnan(),
    torch.stack([x.isnan(), x.isinf()]), torch.isnan(torch.linalg.norm(x)), x.norm() == inf,
]
for flag in sick:
    assert not flag.any() and not flag.all() and flag.any().item() is False
    assert int(flag.sum()) == 0 and torch.count_nonzero(flag).item() == 0
    assert flag.float().max().item() == 0.0 and flag.any().cpu().item() is False
    assert not flag.float().mean() and not flag.any().float() > 0
for flag in [torch.isfinite(x), x == x, x < inf, x != inf, ~x.isnan(), torch.isfinite(huge)]:
    assert flag.all() and flag.any() and flag.sum().item() == flag.numel()
    assert not (~flag).any() and flag.float().min().item() == 1.0
bad = torch.tensor([float("nan")], device="cuda")  # what is known is what it is
assert torch.isnan(bad) and not torch.isfinite(bad) and bad != bad
assert x[x.isfinite()].shape == (32,) and x[x.isnan()].shape == (0,)
assert isinstance(x[x.isfinite()].sum().item(), Unknown)
flags = torch.full((1,), 0.0, device="cuda")
flags += x.isnan().any()
assert flags.item() == 0
kernel = torch._amp_foreach_non_finite_check_and_unscale_
for before in (0.0, 1.0):
    flag = torch.full((), before, device="cuda")
    kernel([x], flag, torch.ones(1))
    assert flag.item() == before  # it tells of numbers that are not finite
torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0, error_if_nonfinite=True)
mixed = x.isnan()
rows = mixed.view(-1)
mixed[0] = x[0] > 0  # some depend on data now, of views, too
assert isinstance(rows.sum().item(), known_values.UnknownCount) and not mixed.isnan().any()
count = x.isfinite().sum()  # of members of a group, which are as healthy
known_values.summed(count, 3)
assert count.item() == 96
received = torch.empty(2, 4, 8, dtype=torch.bool, device="cuda")
known_values.exchanged([received], [x.isfinite()])
assert received.all() and received.sum().item() == 64
known_values.exchanged([received], [x > 0])
assert isinstance(received.sum().item(), known_values.UnknownCount)
"""

# Copies on the host of what is on the device, as HybridDeviceOptimizer has them: of 2 TiB
HOST_COPIES = """
import gc
host, live, count = tier.live.host, tier.live, 1 << 39
weight = torch.nn.Parameter(torch.empty(count // 512, 512, dtype=torch.bfloat16, device="cuda"))
on_device = live.current()
copy = weight.detach().clone().cpu().pin_memory()
assert not copy.is_cuda and copy.device.type == "cpu" and copy.shape == weight.shape
assert live.current() == on_device and host.now == 2 * count
main = copy.float()
del copy; gc.collect()
assert host.now == 4 * count and main.dtype == torch.float32 and main.view(-1)[3:].sum() == 0
for pinned in True, False:
    options = dict(dtype=main.dtype, pin_memory=pinned, device="cpu")
    grad = torch.empty(main.shape, **options)
    grad.data.copy_(weight, non_blocking=True)
main.requires_grad, main.grad = True, grad
optimizer = torch.optim.AdamW([main], lr=0.1)
optimizer.step(); optimizer.step()
assert host.now == 16 * count and host.high > host.now  # fp32, gradient, states; temporaries
assert optimizer.state[main]["step"] == 2
weight.data.copy_(main.data, non_blocking=True)
assert weight.is_meta and live.current() == on_device
back = main.detach().cuda()
assert back.is_meta and live.current() == on_device + 4 * count
norm = torch.linalg.vector_norm(main.detach())
assert norm.shape == () and norm.item() == 0 and not torch.isnan(main).any()
del optimizer, main, grad, back; gc.collect()
assert host.now == 0 and live.current() == on_device
small = torch.ones(8, device="cuda").cpu()  # real, and so are numbers that somebody has said
small += 1
assert small.tolist() == [1.0] * 8 and torch.ones(1 << 20).sum() == 1 << 20 and host.now == 0
"""

LIVE = """
import gc
live = tier.live
x = torch.empty(1024, device="cuda")           # 4 KiB
assert live.current() == 4096, live.current()
y = x.view(32, 32)                              # no new storage
assert live.current() == 4096
with live.scope(phase="forward", microbatch=3):
    z = x + 1
assert live.peak() == 8192 and live.high.labels == {"phase": "forward", "microbatch": 3}
del z; gc.collect()
assert live.current() == 4096 and live.peak() == 8192
import fused_weight_gradient_mlp_cuda as apex
apex.wgrad_gemm_accum_fp16(y, y, y)
import scaled_upper_triang_masked_softmax_cuda as causal
probs = causal.forward(y, 1.0); assert live.current() == 8192  # the result alone
assert causal.backward(probs, y, 1.0) is probs
del probs; gc.collect()
assert live.current() == 4096 and live.peak() == 8192
live.reset_peak(); assert live.peak() == 4096
w = torch.nn.Linear(16, 16, device="cuda"); before = live.current()
out = w(torch.empty(8, 16, device="cuda")); loss = out.sum(); loss.backward()
del out, loss; gc.collect()
cublas = 2 * (32 << 20)                         # of the main thread's handle and of autograd's
now = before + 4 * (16 * 16 + 16) + cublas      # gradients
assert live.current() == now, (live.current(), before)
host = torch.empty(1000); assert live.current() == now
w(torch.empty(8, 16, device="cuda")).sum().backward(); gc.collect()
assert live.current() == now                    # once each
assert torch.cuda.max_memory_allocated() == live.peak()
now = live.current()
with live.part("iteration"):
    a = torch.empty(1000, device="cuda")            # 4,000 B
    with live.part("step"):
        live.reset_peak()
        b = torch.empty(500, device="cuda"); del b
    del a
    c = torch.empty(10, device="cuda")
with live.part("evaluation"):
    d = torch.empty(250, device="cuda"); del d
found = {"step": now + 6000, "iteration": now + 6000, "evaluation": now + 1040}
assert live.parts == found, live.parts
assert live.peak() == now + 6000, (live.peak(), now)
"""

# As Megatron's DDP: made on a stream of its own, whose hooks add gradients up.
HISTORY = """
from megatron_prism.core.programs.ops import EMPTIED, WAITED
tiers._keep_history(tier, True)
history = tier.live.history
weight = torch.nn.Parameter(torch.empty(256, device="cuda"))
with torch.cuda.stream(torch.cuda.Stream()):
    main = torch.zeros(256, device="cuda")
    hook = weight.expand_as(weight).grad_fn.next_functions[0][0]
def add(*_):
    main.add_(weight.grad.data)
    weight.grad = None
hook.register_hook(add)
torch.cuda.empty_cache()
(weight * 2).sum().backward()
torch.cuda.synchronize(); torch.cuda.synchronize()
other = torch.empty(256, device="cuda"); other.record_stream(torch.cuda.Stream())
other.add_(1)
rows = history.rows().tolist()
assert rows[0][:3] == [0, 1024, 0] and rows[1][:3] == [1, 1024, 1], rows   # streams 0 and 1
assert [row[0] for row in rows if row[1] == 0 and row[0] < 0] == [EMPTIED, WAITED], rows
beside = [row for row in rows if row[1] == 0 and row[0] >= 0]
gradient, recorded = (row[0] for row in beside)
assert [row[2] for row in beside] == [1, 2], beside                         # whose, and both once
made = {row[0]: row[1] for row in rows if row[1] > 0}
assert made[gradient] == made[recorded] == 1024
assert [row[1] for row in rows if row[0] == gradient] == [1024, 0, -1024]
assert rows[-1][3] > rows[0][3] >= 0 and history.launches > rows[-1][3]
"""


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cpu", CPU),
        ("meta", META),
        ("meta", HEALTH),
        ("meta", HOST_COPIES),
        ("meta", LIVE),
        ("meta", HISTORY),
    ],
    ids=["cpu", "meta", "health", "host", "live", "history"],
)
def test_a_device_less_tier_answers_like_cuda(name, code):
    run(name, code)


def test_a_second_tier_in_one_process_is_refused():
    out = run(
        "cpu",
        "tiers.prepare('auto', ProcessChanges())\ntiers.prepare('meta', ProcessChanges())",
        expect=1,
    )
    assert "already runs tier cpu" in out


@pytest.mark.parametrize(
    ("name", "words"), [("tpu", "unknown tier 'tpu'"), ("cuda", "needs a CUDA device")]
)
def test_a_tier_that_is_not_here_says_what_to_use(name, words):
    import torch

    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    out = run(name, "", expect=1)
    assert words in out
    assert "fix:" in out


@pytest.mark.parametrize("target", ["cpu", "meta"])
def test_a_device_by_its_number_is_the_tiers(target):
    import torch

    from megatron_prism.runtime.devices.remap import Remap

    with Remap(target):
        assert torch.device(0) == torch.device("cuda", 0)
        with torch.device(0):  # as Megatron's yarn embedding does
            assert torch.ones(2).device.type == target
        assert torch.device("cpu").type == "cpu"


def test_shapes_of_one_size_are_equal(monkeypatch):
    """As replicas are, whose parameters' hashes Megatron compares."""
    import torch

    from megatron_prism.runtime.devices import cuda
    from megatron_prism.runtime.devices.remap import Remap

    told = []
    monkeypatch.setattr(cuda, "watcher", SimpleNamespace(host_waited=told.append))
    with Remap("meta"):
        a, b = torch.zeros(2, 3, device="cuda"), torch.zeros(2, 4, device="cuda")
        assert torch.equal(a, a)
        assert a.equal(a.clone())
        assert not torch.equal(a, b)
    assert told == ["equal"] * 3
    with Remap("cpu"):
        assert not torch.equal(torch.zeros(2), torch.ones(2))


def test_a_blocking_copy_to_the_device_is_a_wait_of_the_host(monkeypatch):
    import torch

    from megatron_prism.runtime.devices import cuda
    from megatron_prism.runtime.devices.remap import Remap

    told, host = [], torch.ones(3)
    monkeypatch.setattr(cuda, "watcher", SimpleNamespace(host_waited=told.append))
    with Remap("meta"):
        device = torch.zeros(3, device="cuda")
        host.cuda(non_blocking=True)
        host.to("cuda", non_blocking=True)
        host.to("cuda", torch.float16, True)
        device.copy_(host, non_blocking=True)
        torch.tensor([1.0])
        assert told == []
        torch.tensor([1.0], device="cuda")
        host.cuda()
        host.to("cuda", torch.float16)
        device.copy_(host)
    assert told == ["copy"] * 4


@pytest.mark.parametrize(
    ("file", "heard"),
    [("megatron/core/tensor_parallel/random.py", []), ("megatron/training/x.py", ["item", "bool"])],
)
def test_reads_of_what_is_the_hosts_wait_for_no_device(file, heard, monkeypatch):
    """Megatron compares states of the CPU's generator, which no GPU holds."""
    import torch

    from megatron_prism.runtime.devices import cuda
    from megatron_prism.runtime.devices.remap import Remap

    told = []
    monkeypatch.setattr(cuda, "watcher", SimpleNamespace(host_waited=told.append))
    scope = {}
    text = "def read(torch, a):\n    return torch.all(a == a).item(), bool((a == a).all())\n"
    exec(compile(text, f"/somewhere/{file}", "exec"), scope)
    with Remap("cpu"):
        assert scope["read"](torch, torch.zeros(3)) == (True, True)
    assert told == heard
