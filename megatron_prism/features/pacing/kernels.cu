// Two kernels that make a device wait until a virtual peer would have answered.
//
// device.py puts the limits before this text as macros: RING, LAUNCH, TIMEOUT, PATIENCE,
// ADDED, COPY, SUM and CHUNK; and says what the kernels do.
#define TILE 4
typedef long long i64;
struct Clock { i64 offset, at; double rate; i64 round_trip; };
struct Table {
  const int* part;       // launch -> slice of members
  const int* member;     // interactions of each launch
  const int* mine;       // and this rank's seat in each, an index of ``here``
  const int* with;       // and slices of ``whom``
  const int* whom;       // seats of other local ranks
  const i64* own;        // per interaction
  const int* start;      // per interaction: slice of terms
  const int* cause;
  const int* back;
  const i64* weight;
  volatile i64* end;     // [RING][interactions]
  volatile int* tag;     // [RING][interactions]: iteration + 1 once ``end`` holds
  volatile i64* here;    // [RING][seats]: when a local rank came to an interaction
  volatile int* seen;    // [RING][seats]: iteration + 1 once ``here`` holds
  volatile int* gone;    // iterations before this one are not waited for
  volatile i64* came;    // [RING][launches]
  i64* went;             // [RING][launches]: when the last block had moved its part
  volatile i64* from;    // [RING][launches]: when the call begins to run
  volatile i64* until;   // [RING][launches]: when it ends
  volatile int* ready;   // [RING][launches]: iteration + 1 once both hold
  int* stuck;            // the first launch that waited for longer than TIMEOUT, + 1
  Clock* clocks;         // [2]
  volatile int* clock;   // which of them holds
  int interactions, launches, seats, shared;
};
struct Call {
  Table* t;
  char* to; const char* source; i64 size, period;  // as moves.py says
  const char* read; i64 seen;                      // read besides
  int launch, iteration, first, fresh, kind, scale;
};
static __device__ __forceinline__ i64 now() {
  i64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t;
}
static __device__ __forceinline__ void hold(i64 until) {
  while (now() < until) __nanosleep(20);
}
// What to add to a time of this device to have it in everybody's time.
static __device__ i64 shift(Table* t, i64 time) {
  if (!t->shared) return 0;
  Clock c = t->clocks[*t->clock];
  return c.offset + (i64)((double)(time - c.at) * c.rate);
}
static __device__ __forceinline__ void fence(Table* t) {
  if (t->shared) __threadfence_system(); else __threadfence();
}
// False: it did not come, or nobody waits for that iteration any more.  Who waited in vain says so
// to all, so a rank that died costs one TIMEOUT an iteration.
static __device__ bool there(const Call& c, volatile int* word, int then, i64 begin) {
  Table* t = c.t;
  while (*word != then + 1) {
    if (now() - begin > TIMEOUT && *t->gone <= c.iteration) {
      atomicCAS(t->stuck, 0, c.launch + 1); *t->gone = c.iteration + 1;
    }
    if (*t->gone > then) return false;
    __nanosleep(100);
  }
  fence(t);
  return true;
}
// Tell the other local ranks that this one came to every interaction of the launch.
static __device__ void publish(const Call& c, i64 begin) {
  Table* t = c.t;
  if (!t->shared) return;
  int base = (c.iteration % RING) * t->seats;
  begin += shift(t, begin);
  for (int m = t->part[c.launch]; m < t->part[c.launch + 1]; ++m)
    t->here[base + t->mine[m]] = begin;
  fence(t);
  for (int m = t->part[c.launch]; m < t->part[c.launch + 1]; ++m)
    t->seen[base + t->mine[m]] = c.iteration + 1;
}
// What a call moves while it runs: ``to[i] = scale * source[i mod period]`` for every byte i below
// ``size``, or, from kind ADDED on, the sum of ``scale`` chunks of ``source``, each ``period`` bytes
// long; and ``seen`` bytes are read.  What is moved last is there when the call ends: it begins
// earlier by what one tile takes.
struct alignas(16) Word16 { unsigned w[4]; };

static __device__ float of_half(unsigned short h) {
  float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f;
}
static __device__ unsigned short to_half(float f) {
  unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
}
static __device__ unsigned short to_bfloat(float f) {
  unsigned short h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
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
      if (w < words) held[k] = source[period == words ? w : (unsigned)w % (unsigned)period];
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
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a), "=r"(b), "=r"(d), "=r"(e) : "l"(c.read + 16 * w));
    }
  }
}

// The first warp of block 0: when does each interaction of the launch end?
static __device__ void settle(const Call& c, i64 begin) {
  Table* t = c.t;
  int lane = threadIdx.x, ring = c.iteration % RING, n = t->interactions;
  int slot = ring * t->launches + c.launch;
  if (c.fresh && lane == 0) { t->came[slot] = begin; publish(c, begin); }
  i64 arrived = c.fresh ? begin : t->came[slot];
  arrived = __shfl_sync(0xffffffffu, arrived, 0);
  i64 until = 0, own = 0, ours = shift(t, arrived);  // ends are in everybody's time
  for (int m = t->part[c.launch]; m < t->part[c.launch + 1]; ++m) {
    int j = t->member[m];
    i64 best = arrived + ours + t->own[j];
    for (int k = t->with[m] + lane; k < t->with[m + 1]; k += 32) {
      int at = (c.iteration % RING) * t->seats + t->whom[k];
      if (!there(c, &t->seen[at], c.iteration, begin)) continue;
      i64 other = t->here[at] + t->own[j];
      if (other > best) best = other;
    }
    for (int k = t->start[j] + lane; k < t->start[j + 1]; k += 32) {
      int then = c.iteration - t->back[k];
      if (then < c.first) continue;
      int at = (then % RING) * n + t->cause[k];
      if (!there(c, &t->tag[at], then, begin)) continue;
      i64 other = t->end[at] + t->weight[k];
      if (other > best) best = other;
    }
    for (int o = 16; o; o >>= 1) {
      i64 other = __shfl_xor_sync(0xffffffffu, best, o);
      if (other > best) best = other;
    }
    if (lane == 0) {
      t->end[ring * n + j] = best;
      fence(t);
      t->tag[ring * n + j] = c.iteration + 1;
    }
    if (best - ours > until) { until = best - ours; own = t->own[j]; }
  }
  if (lane == 0) {
    t->from[slot] = until - own;
    t->until[slot] = until;
    t->went[slot] = 0;
    __threadfence();
    t->ready[slot] = c.iteration + 1;
  }
}
extern "C" __global__ void __launch_bounds__(512) prism_call(Call c) {
  i64 begin = now() - LAUNCH;
  Table* t = c.t;
  int slot = (c.iteration % RING) * t->launches + c.launch;
  if (c.kind < 0) {  // only its turn has come
    t->came[slot] = begin;
    if (c.kind == -1) publish(c, begin);
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x < 32) settle(c, begin);
  if (threadIdx.x == 0)
    while (t->ready[slot] != c.iteration + 1 && now() - begin < TIMEOUT) __nanosleep(100);
  __syncthreads();
  __threadfence();
  i64 from = t->from[slot], until = t->until[slot];
  if (until - begin > TIMEOUT) from = until = begin;  // nonsense that must not hold the job
  i64 odd = (i64)c.to | (i64)c.source | c.size | c.period;
  if (c.kind >= ADDED) added(c, from, until, odd % 16 == 0);
  else if (odd % 16 == 0) move<Word16>(c, from, until);
  else if (odd % 8 == 0) move<i64>(c, from, until);
  else if (odd % 4 == 0) move<int>(c, from, until);
  else if (odd % 2 == 0) move<short>(c, from, until);
  else move<char>(c, from, until);
  if (c.seen && (i64)c.read % 16 == 0) look(c, from, until);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax((unsigned long long*)&t->went[slot], (unsigned long long)now());
  hold(until);
}
// Side 0 asks, the others answer in turn; ``number`` is of this measurement, from 1.
// area: per side [asked, answered, its time then, offset, round trip, done]
struct Ping { Table* t; volatile i64* area; int side, sides, number, rounds; };
static __device__ bool comes(volatile i64* word, i64 wanted, i64 begin) {
  while (*word != wanted) if (now() - begin > PATIENCE) return false;
  __threadfence_system();
  return true;
}
static __device__ void ask(const Ping& p, volatile i64* area, i64 begin) {
  i64 best = 1LL << 62, offset = 0, from = (i64)p.number * p.rounds;
  for (int r = 0; r < p.rounds; ++r) {
    i64 sent = now();
    area[0] = from + r;
    if (!comes(&area[1], from + r, begin)) return;
    i64 back = now();
    if (back - sent < best) { best = back - sent; offset = sent + best / 2 - area[2]; }
  }
  area[3] = offset; area[4] = best;
  __threadfence_system();
  area[5] = p.number;
}
extern "C" __global__ void prism_ping(Ping p) {
  i64 begin = now();
  if (p.side == 0) {
    for (int side = 1; side < p.sides; ++side) ask(p, p.area + 8 * side, begin);
    return;
  }
  volatile i64* area = p.area + 8 * p.side;
  i64 from = (i64)p.number * p.rounds;
  for (int r = 0; r < p.rounds; ++r) {
    if (!comes(&area[0], from + r, begin)) return;
    area[2] = now();
    __threadfence_system();
    area[1] = from + r;
  }
  if (!comes(&area[5], p.number, begin)) return;
  Table* t = p.t;
  Clock old = t->clocks[*t->clock], found = {area[3], now(), 0.0, area[4]};
  if (old.at) found.rate = (double)(found.offset - old.offset) / (double)(found.at - old.at);
  if (fabs(found.rate) > 1e-4) found.rate = 0;  // no crystal is that wrong
  int other = 1 - *t->clock;
  t->clocks[other] = found;
  __threadfence();
  *t->clock = other;
}
