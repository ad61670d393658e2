"""What a paced call moves while it runs, in CUDA C++: a part of ``pace_source``.

``to[i] = scale * source[i mod period]`` for every byte i below ``size``, or, from kind ADDED on,
the sum of ``scale`` chunks of ``source``, each ``period`` bytes long; and ``seen`` bytes are read.
What is moved last is there when the call ends: it begins earlier by what one tile takes.
"""

from __future__ import annotations

__all__ = ["ADDED", "CHUNK_NS", "COPY_NS", "MOVES", "SUM_NS"]

ADDED = 16  # what is added to a kind of number whose chunks are added up
# ns from the beginning of a tile until it is written: copied or rewritten (1 x H200, 2026-11-23:
# .8 to 1.8 us), and added up (2, 4, 8 chunks of 4 MiB in all: .9, 1.3, 2.3 us; of 32 MiB: 1.8, 2.8,
# 4.4; two of 64 MiB beside a product: 2.6)
COPY_NS, SUM_NS, CHUNK_NS = 1_800, 1_200, 400

MOVES = (
    f"#define ADDED {ADDED}\n#define COPY {COPY_NS}LL\n"
    + f"#define SUM {SUM_NS}LL\n#define CHUNK {CHUNK_NS}LL"
    + r"""
struct alignas(16) Word16 { unsigned w[4]; };

static __device__ float of_half(unsigned short h) {
  float f; asm("cvt.f32.f16 %%0, %%1;" : "=f"(f) : "h"(h)); return f;
}
static __device__ unsigned short to_half(float f) {
  unsigned short h; asm("cvt.rn.f16.f32 %%0, %%1;" : "=h"(h) : "f"(f)); return h;
}
static __device__ unsigned short to_bfloat(float f) {
  unsigned short h; asm("cvt.rn.bf16.f32 %%0, %%1;" : "=h"(h) : "f"(f)); return h;
}
template <typename W> static __device__ __forceinline__ W scaled(W word, int kind, int scale) {
  if (kind == 0) return word;
  unsigned short* h = (unsigned short*)&word; float* f = (float*)&word; double* d = (double*)&word;
  int* i = (int*)&word; i64* l = (i64*)&word;
  float by = scale;
  switch (kind) {
    case 1:
      for (int k = 0; k < sizeof(W) / 2; ++k) h[k] = to_bfloat(__uint_as_float(h[k] << 16) * by);
      break;
    case 2: for (int k = 0; k < sizeof(W) / 2; ++k) h[k] = to_half(of_half(h[k]) * by); break;
    case 3: for (int k = 0; k < sizeof(W) / 4; ++k) f[k] *= by; break;
    case 4: for (int k = 0; k < sizeof(W) / 8; ++k) d[k] *= scale; break;
    case 5: for (int k = 0; k < sizeof(W) / 4; ++k) i[k] *= scale; break;
    case 6: for (int k = 0; k < sizeof(W) / 8; ++k) l[k] *= scale; break;
  }
  return word;
}
// What numbers of a kind are added up in.
struct Half { unsigned short bits; };
struct Bfloat { unsigned short bits; };
static __device__ float wide(Half h) { return of_half(h.bits); }
static __device__ float wide(Bfloat h) { return __uint_as_float(h.bits << 16); }
static __device__ float wide(float f) { return f; }
static __device__ double wide(double d) { return d; }
static __device__ void narrow(float f, Half& to) { to.bits = to_half(f); }
static __device__ void narrow(float f, Bfloat& to) { to.bits = to_bfloat(f); }
static __device__ void narrow(float f, float& to) { to = f; }
static __device__ void narrow(double d, double& to) { to = d; }

template <typename W> static __device__ __forceinline__ void fetch(
    W (&held)[TILE], const W* source, i64 at, i64 words) {
  #pragma unroll
  for (int k = 0; k < TILE; ++k) {
    i64 w = at + k * blockDim.x;
    if (w < words) held[k] = source[w];
  }
}
// ns from tile to tile, if the last one takes ``last``.
static __device__ double pace(i64 time, i64 tiles, i64 last) {
  if (last > time / 2) last = time / 2;
  return tiles ? (double)(time - last) / tiles : 0;
}
// Sums of words of as many chunks as ``scale`` says, tile by tile.  All words of two chunks are on
// their way at once: one after the other they took 270 us beside a product, where NCCL takes 180.
template <typename T, typename W> static __device__ void add_up(
    const Call& c, i64 from, i64 until) {
  const int count = sizeof(W) / sizeof(T);
  const W* source = (const W*)c.source; W* to = (W*)c.to;
  i64 words = c.size / sizeof(W), apart = c.period / sizeof(W);
  i64 step = (i64)blockDim.x * TILE, tiles = (words + step - 1) / step;
  double each = pace(until - from, tiles, SUM + c.scale * CHUNK);
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    hold(from + (i64)(each * tile));
    i64 at = tile * step + threadIdx.x;
    decltype(wide(T())) all[TILE][count] = {};
    W held[TILE] = {}, next[TILE] = {};
    fetch(held, source, at, words);
    for (int chunk = 1; chunk <= c.scale; ++chunk) {
      if (chunk < c.scale) fetch(next, source + chunk * apart, at, words);
      #pragma unroll
      for (int k = 0; k < TILE; ++k) {
        #pragma unroll
        for (int n = 0; n < count; ++n) all[k][n] += wide(((const T*)&held[k])[n]);
        held[k] = next[k];
      }
    }
    #pragma unroll
    for (int k = 0; k < TILE; ++k) {
      W word;
      #pragma unroll
      for (int n = 0; n < count; ++n) narrow(all[k][n], ((T*)&word)[n]);
      i64 w = at + k * blockDim.x;
      if (w < words) to[w] = word;
    }
  }
}
// Number by number where words of 16 bytes do not ``fit``.
template <typename T> static __device__ void add(const Call& c, i64 from, i64 until, bool fit) {
  if (fit) add_up<T, Word16>(c, from, until);
  else add_up<T, T>(c, from, until);
}
static __device__ void added(const Call& c, i64 from, i64 until, bool fit) {
  switch (c.kind - ADDED) {
    case 1: add<Bfloat>(c, from, until, fit); break;
    case 2: add<Half>(c, from, until, fit); break;
    case 3: add<float>(c, from, until, fit); break;
    case 4: add<double>(c, from, until, fit); break;
  }
}
// Tile by tile, each at its time: this thread's words of one tile are ``blockDim.x`` apart.
// What changes nothing (rewriting, reading) is left when the call is over.
template <typename W> static __device__ void move(const Call& c, i64 from, i64 until) {
  const W* source = (const W*)c.source; W* to = (W*)c.to;
  i64 words = c.size / sizeof(W), period = c.period / sizeof(W);
  i64 step = (i64)blockDim.x * TILE, tiles = (words + step - 1) / step;
  bool same = c.to == c.source && c.kind == 0;
  double each = pace(until - from, tiles, COPY);
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    hold(from + (i64)(each * tile));
    if (same && now() >= until) return;
    i64 at = tile * step + threadIdx.x;
    W held[TILE];
    #pragma unroll
    for (int k = 0; k < TILE; ++k) {
      i64 w = at + k * blockDim.x;
      if (w < words) held[k] = source[period == words ? w : (unsigned)w %% (unsigned)period];
    }
    #pragma unroll
    for (int k = 0; k < TILE; ++k) {
      i64 w = at + k * blockDim.x;
      if (w < words) to[w] = scaled(held[k], c.kind, c.scale);
    }
  }
}
static __device__ void look(const Call& c, i64 from, i64 until) {
  i64 words = c.seen / 16, step = (i64)blockDim.x * TILE, tiles = (words + step - 1) / step;
  double each = pace(until - from, tiles, COPY);
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    hold(from + (i64)(each * tile));
    if (now() >= until) return;
    #pragma unroll
    for (int k = 0; k < TILE; ++k) {
      i64 w = tile * step + threadIdx.x + k * blockDim.x;
      unsigned a, b, d, e;  // nobody asks for them
      if (w < words)
        asm volatile("ld.global.v4.u32 {%%0,%%1,%%2,%%3}, [%%4];"
                     : "=r"(a), "=r"(b), "=r"(d), "=r"(e) : "l"(c.read + 16 * w));
    }
  }
}
"""
)
