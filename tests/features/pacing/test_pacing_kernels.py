"""The pacing kernel's own source, run by one thread on a CPU whose clock the test owns.

What needs many threads is in tests/gpu; here: when calls end, what becomes of those that wait for a
local rank that died, and that every byte is moved once.
"""

import ctypes
import mmap
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.answer_tables import random_table

from megatron_prism.features.pacing.device import (
    CHUNK_NS,
    CLOCK,
    COPY_NS,
    LAUNCH,
    RING,
    SUM_NS,
    TABLE,
    cuda_source,
)
from megatron_prism.features.pacing.moves import ADDED, KINDS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

TIMEOUT = 1_000_000  # ns
PRELUDE = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct Place { unsigned x; };
static const Place threadIdx{0}, blockIdx{0}, blockDim{1}, gridDim{1};
extern "C" { long long ticks = 0; }
static void __syncthreads() {}
static void __threadfence() {}
static void __threadfence_system() {}
static void __nanosleep(int ns) { ticks += ns; }
template <typename T> static T __shfl_sync(unsigned, T value, int) { return value; }
template <typename T> static T __shfl_xor_sync(unsigned, T value, int) { return value; }
static float __uint_as_float(unsigned word) { float f; memcpy(&f, &word, 4); return f; }
static unsigned short nearest(float f) {  // bf16, ties to even
  unsigned w; memcpy(&w, &f, 4); return (w + 0x7fff + ((w >> 16) & 1)) >> 16;
}
static float single(unsigned short h) {  // of fp16
  int exponent = (h >> 10) & 31, part = h & 1023;
  float f = exponent ? ldexpf(1024 + part, exponent - 25) : ldexpf(part, -24);
  return h >> 15 ? -f : f;
}
static unsigned short half(float f) {  // ties to even
  int exponent, sign = std::signbit(f) << 15;
  if (fabsf(f) >= 65520) return sign | 0x7c00;
  frexpf(fabsf(f), &exponent);
  if (exponent < -13) exponent = -13;
  return sign | ((exponent + 14) * 1024 + (int)nearbyintf(ldexpf(fabsf(f), 11 - exponent)) - 1024);
}
typedef unsigned long long u64;
static void atomicCAS(int* at, int old, int to) { if (*at == old) *at = to; }
static void atomicMax(u64* at, u64 to) { if (*at < to) *at = to; }
"""


class Table(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in TABLE] + [
        (name, ctypes.c_int) for name in ("interactions", "launches", "seats", "shared")
    ]


class Call(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), ("to", ctypes.c_void_p), ("source", ctypes.c_void_p),
                ("size", ctypes.c_longlong), ("period", ctypes.c_longlong),
                ("read", ctypes.c_void_p), ("seen", ctypes.c_longlong)]  # fmt: skip
    _fields_ += [(name, ctypes.c_int) for name in
                 ("launch", "iteration", "first", "fresh", "kind", "scale")]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels as functions; one thread does the work of a warp."""
    source = cuda_source(TIMEOUT, TIMEOUT)
    source = re.sub(r'asm volatile\("mov.u64 .*?\);', "t = ticks += 10;", source)
    source = re.sub(r'asm\("cvt.rn.bf16.*?\);', "h = nearest(f);", source)
    source = re.sub(r'asm\("cvt.rn.f16.*?\);', "h = half(f);", source)
    source = re.sub(r'asm\("cvt.f32.f16.*?\);', "f = single(h);", source)
    source = re.sub(r"asm( volatile)?\s*\(.*?\);", ";", source, flags=re.DOTALL)
    source = source.replace("k += 32", "k += 1")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(PRELUDE + source)
    words = ["g++", "-shared", "-fPIC", "-O1", "-w", "-o", "kernel.so", "kernel.cpp"]
    subprocess.run(words, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class Device:
    """One local rank's device; ``shared``: arrays of another that it shares."""

    def __init__(self, library, table, process, shared=None):
        from megatron_prism.features.pacing.device import _columns

        self.library, self.launches = library, [[j] for j in table.of[table.member == process]]
        self.columns = _columns(table, self.launches, process)
        if shared is not None:
            for name in ("end", "tag", "here", "seen", "gone"):
                self.columns[name] = shared.columns[name]
        addresses = [self.columns[name].ctypes.data for name in TABLE]
        several = len(table.local) > 1
        counts = (len(table), len(self.launches), self.columns["here"].shape[1], several)
        self.table = Table(*addresses, *counts)
        self.ticks = ctypes.c_longlong.in_dll(library, "ticks")

    def call(self, launch, iteration, arrive=False):
        """How long it takes, ns."""
        begin = self.ticks.value
        kinds = [(-1, 0), (0, 0)] if arrive else [(0, 1)]
        for kind, fresh in kinds:
            self.library.prism_call(Call(ctypes.addressof(self.table), launch=launch, fresh=fresh,
                                         iteration=iteration, kind=kind, scale=1))  # fmt: skip
        return self.ticks.value - begin


def test_calls_end_when_the_table_says(library):
    table = random_table([0] * 12, range(12), (0,))
    device, before = Device(library, table, 0), []
    for iteration in range(2 * RING):
        for launch in range(12):
            device.call(launch, iteration, arrive=launch % 3 == 0)
        slot = iteration % RING
        ends = table.ends(device.columns["came"][slot], before)
        assert (device.columns["end"][slot] == ends).all()
        assert (device.columns["until"][slot] == ends).all()
        assert device.ticks.value >= ends.max()
        before.insert(0, ends)
    assert device.columns["stuck"][0] == 0


@pytest.mark.parametrize("arrive", [False, True])
def test_a_call_holds_its_stream_for_its_own_time_launch_included(library, arrive):
    table = random_table([0], [0], (0,))
    device = Device(library, table, 0)
    begin = device.ticks.value
    took = device.call(0, 0, arrive)
    assert -LAUNCH <= device.columns["came"][0, 0] - begin < 100 - LAUNCH
    assert 0 <= took - (table.own[0] - LAUNCH) < 1_000


@pytest.mark.parametrize(("kind", "last"), [(0, COPY_NS), (ADDED + 1, SUM_NS + 2 * CHUNK_NS)])
def test_what_is_moved_last_is_there_when_the_call_ends(library, kind, last):
    """A tile takes no time here, so the last one is there by as much earlier as it would take."""
    table = random_table([0], [0], (0,))
    table.own[0] = 60_000
    device = Device(library, table, 0)
    source, to = np.zeros(8_192, np.uint8), np.zeros(4_096, np.uint8)
    places = ctypes.addressof(device.table), to.ctypes.data, source.ctypes.data
    library.prism_call(Call(*places, 4_096, 4_096, fresh=1, kind=kind, scale=2 if kind else 1))
    spare = device.columns["until"][0, 0] - device.columns["went"][0, 0]
    assert last <= spare < last + 60_000 / (4_096 / 64)


def test_a_local_rank_that_died_is_waited_for_once_an_iteration(library):
    """Its GPU holds nobody for longer than that, however many calls the others have issued."""
    both = random_table([0, 1] * 6, [j for j in range(6) for _ in range(2)], (0, 1))
    one = Device(library, both, 0)
    for iteration in range(2):
        times = [one.call(launch, iteration) for launch in range(6)]
        assert TIMEOUT - LAUNCH <= times[0] < TIMEOUT + 500_000
        assert max(times[1:]) < 500_000
        assert one.columns["gone"][0] == iteration + 1  # the host counts it as not paced
    assert one.columns["stuck"][0] == 1


def test_clocks_are_shifted_to_the_first_device(library):
    both = random_table([0, 1] * 3, [j for j in range(3) for _ in range(2)], (0, 1))
    one = Device(library, both, 0)
    two = Device(library, both, 1, one)
    two.columns["clocks"][0] = np.array([(7_000_000, 1, 0.0, 50)], CLOCK)[0]
    assert CLOCK[0][0] == "offset"
    for process, device in enumerate((one, two)):
        device.library.prism_call(Call(ctypes.addressof(device.table), kind=-1))
        seat = int(both.member[:2].tolist().index(process))
        came = device.columns["came"][0, 0]
        assert one.columns["here"][0, seat] == came + 7_000_000 * process
    for device in (one, two):
        device.library.prism_call(Call(ctypes.addressof(device.table), scale=1))
    last = one.columns["here"][0, :2].max() + both.own[0]
    assert one.columns["end"][0, 0] == last
    assert one.columns["until"][0, 0] == last
    assert two.columns["until"][0, 0] == last - 7_000_000


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("size", "period"), [(96, 96), (192, 48), (80, 32), (7, 7), (16, 48), (0, 0)]
)
def test_what_moves_is_every_byte_once(library, size, period, offset):
    table = random_table([0], [0], (0,))
    device = Device(library, table, 0)
    source = np.arange(256, dtype=np.uint8)
    to = np.full(256, 255, np.uint8)
    places = ctypes.addressof(device.table), to.ctypes.data + offset, source.ctypes.data + offset
    library.prism_call(Call(*places, size, period, fresh=1, scale=1))
    expected = np.resize(source[offset : offset + period], size)
    assert (to[offset : offset + size] == expected).all()
    assert (np.delete(to, np.s_[offset : offset + size]) == 255).all()
    assert device.columns["went"][0, 0] <= device.ticks.value


@pytest.mark.parametrize(("kind", "dtype"), [(3, "f4"), (4, "f8"), (5, "i4"), (6, "i8")])
def test_what_is_summed_over_equal_members_is_scaled_where_it_is(library, kind, dtype):
    device = Device(library, random_table([0], [0], (0,)), 0)
    values = np.arange(1, 38).astype(dtype)
    expected = values * 3
    at = values.ctypes.data
    library.prism_call(Call(ctypes.addressof(device.table), at, at, values.nbytes, values.nbytes,
                            fresh=1, kind=kind, scale=3))  # fmt: skip
    assert (values == expected).all()


@pytest.mark.parametrize("chunks", [1, 2, 8])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("count", [1, 8, 37, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_chunks_are_added_up(library, dtype, count, odd, chunks):
    device = Device(library, random_table([0], [0], (0,)), 0)
    generator = torch.Generator().manual_seed(count)
    whole = torch.randn(chunks * count + odd, generator=generator).to(dtype)[odd:]
    out = torch.full((count + odd + 8,), 7, dtype=dtype)
    to, part = out[odd:], count * out.element_size()
    kind = ADDED + KINDS[dtype]
    library.prism_call(Call(ctypes.addressof(device.table), to.data_ptr(), whole.data_ptr(), part,
                            part, fresh=1, kind=kind, scale=chunks))  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.zeros(count, dtype=wide)
    for chunk in whole.view(chunks, count).to(wide):
        expected += chunk
    assert torch.equal(to[:count], expected.to(dtype))
    assert (out[:odd] == 7).all()
    assert (to[count:] == 7).all()


@pytest.mark.parametrize("count", [1, 3, 64])
def test_sums_read_nothing_behind_their_chunks(library, count):
    """What is behind the source may not be read."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    at = ctypes.addressof(ctypes.c_char.from_buffer(area))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + page), page, 0)
    device = Device(library, random_table([0], [0], (0,)), 0)
    part = 4 * count
    out, source = np.ones(count, np.float32), at + page - 2 * part
    try:
        library.prism_call(Call(ctypes.addressof(device.table), out.ctypes.data, source, part,
                                part, fresh=1, kind=ADDED + 3, scale=2))  # fmt: skip
    finally:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + page), page, 3)
    assert not out.any()


def test_the_source_compiles_for_a_gpu(tmp_path):
    """NVRTC needs no GPU, and a kernel that does not compile would end every paced run."""
    pytest.importorskip("nvidia", reason="torch's CUDA libraries are not installed")
    nvrtc = _nvrtc()
    source = cuda_source(TIMEOUT, TIMEOUT)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"prism.cu", 0, None, None
    )
    assert made == 0
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_90")
    status = nvrtc.nvrtcCompileProgram(program, 1, options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()


def _nvrtc():
    """The library that torch's CUDA wheels bring; the test is skipped where there is none."""
    import nvidia  # of those wheels

    for root in nvidia.__path__:
        for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*")):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    return pytest.skip("torch's CUDA libraries are not installed")
