// The parts of CUDA that the kernels use, on one thread of a CPU. cuda_emulator.py puts this file in front of their sources.
//
// Blocks run one after another. The threads of a block are fibers, which only switch at __syncthreads and at shuffles. Shared
// memory is full of NaN before every block. These are errors: threads of a block that wait at different barriers, or end while
// others wait; accesses beyond shared memory, or at addresses that are no multiple of the size. With -fsanitize=thread, races
// are errors, too: a thread that reads or writes what another one writes between the same two barriers of the block.

#include <math.h>
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>
#include <type_traits>

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __launch_bounds__(threads, blocks)
#define __shared__ static

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) double2 {
  double x, y;
};
static uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum { WARP = 32, MAX_THREADS = 512, MAX_SHARED = 227 << 10, GUARD = 1 << 10, STACK = 1 << 16 };
enum { READY = 0, DONE = -1 };  // else a fiber waits at a barrier: twice its line, and 1 more if it is one of a warp

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool started;
  int waits;
  char given[2][sizeof(double)];  // what the lane gives in this shuffle, and in the last one
  int turn;
};
static Fiber fibers[MAX_THREADS];
alignas(64) static char stacks[MAX_THREADS][STACK];
static jmp_buf scheduler;
static Fiber *current;
static void (*body)();
static const char *failure;

alignas(64) static unsigned char memory[GUARD + MAX_SHARED + GUARD];
static unsigned char *const shared_memory = memory + GUARD;
static unsigned shared_bytes;

__attribute__((noinline)) static void leave() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

static void live() {
  for (;;) {
    body();
    current->waits = DONE;
    leave();
  }
}

__attribute__((noinline)) static void enter(unsigned thread) {
  current = fibers + thread;
  threadIdx.x = thread;
  if (_setjmp(scheduler)) return;
  if (current->started) _longjmp(current->at, 1);
  current->started = true;
  getcontext(&current->start);
  current->start.uc_stack.ss_sp = stacks[thread];
  current->start.uc_stack.ss_size = STACK;
  makecontext(&current->start, live, 0);
  setcontext(&current->start);
}

static void fail(const char *why) {
  failure = why;
  leave();
}

static void wait(int barrier) {
  current->waits = barrier;
  leave();
}

static bool wait_at_the_same(unsigned from, unsigned to) {
  for (unsigned t = from; t < to; ++t)
    if (fibers[t].waits != fibers[from].waits) return false;
  return true;
}

static void release(unsigned from, unsigned to) {
  for (unsigned t = from; t < to; ++t) fibers[t].waits = READY;
}

// The last accesses to a word of shared memory. Barriers of the block count the time. `reader` is MANY for several threads.
struct Accesses {
  int written, writer, read, reader;
};
enum { MANY = -1 };
static Accesses accesses[MAX_SHARED / 4];
static int now = 1;

__attribute__((no_sanitize("thread"))) static void access(const void *pointer, unsigned size, bool writes) {
  const long at = static_cast<const unsigned char *>(pointer) - shared_memory;
  if (at < 0 || at + size > shared_bytes) return;
  const int thread = threadIdx.x;
  for (long word = at / 4; word <= (at + size - 1) / 4; ++word) {
    Accesses &last = accesses[word];
    const bool read_by_others = last.read == now && last.reader != thread;
    if ((last.written == now && last.writer != thread) || (writes && read_by_others))
      failure = "two threads used a word of shared memory between two barriers, and one of them wrote it";
    if (writes) last.written = now, last.writer = thread;
    else last.read = now, last.reader = read_by_others ? MANY : thread;
  }
}

// Run a block. Every other block runs its threads in reverse order, because a missing barrier may go unnoticed in one order.
static void run_block(unsigned threads, bool reverse) {
  release(0, threads), ++now;
  for (;;) {
    for (unsigned k = 0; k < threads; ++k) {
      const unsigned t = reverse ? threads - 1 - k : k;
      if (fibers[t].waits == READY) enter(t);
      if (failure) return;
    }
    bool released = false;
    for (unsigned t = 0; t < threads; t += WARP)
      if (fibers[t].waits > 0 && fibers[t].waits % 2 && wait_at_the_same(t, t + WARP)) release(t, t + WARP), released = true;
    if (released) continue;
    if (!wait_at_the_same(0, threads)) {
      failure = "threads of a block wait at different barriers, or some have ended";
      return;
    }
    if (fibers[0].waits == DONE) return;
    release(0, threads), ++now;
  }
}

// Run a kernel; return what went wrong, or null.
template <typename Arguments>
const char *launch(void (*kernel)(Arguments), const Arguments *arguments, const unsigned (&blocks)[3], unsigned threads,
                   unsigned bytes) {
  static void (*called)(Arguments);
  static const Arguments *given;
  called = kernel, given = arguments, body = [] { called(*given); };
  failure = threads % WARP || threads > MAX_THREADS || bytes > MAX_SHARED ? "the launch is too large" : nullptr;
  gridDim = {blocks[0], blocks[1], blocks[2]}, blockDim = {threads, 1, 1}, shared_bytes = bytes;
  const unsigned count = blocks[0] * blocks[1] * blocks[2];
  memset(memory, 0xff, sizeof(memory));
  for (unsigned block = 0; block < count && !failure; ++block) {
    blockIdx = {block % blocks[0], block / blocks[0] % blocks[1], block / blocks[0] / blocks[1]};
    memset(shared_memory, 0xff, bytes);
    run_block(threads, block % 2);
    for (int i = 0; i < GUARD; ++i)
      if (memory[i] != 0xff || shared_memory[bytes + i] != 0xff) failure = "a thread wrote beyond shared memory";
  }
  if (failure)
    for (Fiber &fiber : fibers) fiber.started = false;
  return failure;
}

template <typename T>
T &at(unsigned address) {
  if (address % sizeof(T) || address + sizeof(T) > shared_bytes)
    fail("a thread used an address that is not in shared memory, or not aligned");
  return *reinterpret_cast<T *>(shared_memory + address);
}

template <typename T>
T shuffle(T value, unsigned distance, int line) {
  current->turn ^= 1;  // the partner may not have read the last value yet
  memcpy(current->given[current->turn], &value, sizeof(T));
  wait(2 * line + 1);
  memcpy(&value, fibers[threadIdx.x ^ distance].given[current->turn], sizeof(T));
  return value;
}

static float widen(unsigned short bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static unsigned short narrow(float value) {
  const _Float16 rounded = (_Float16)value;
  unsigned short bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}

}  // namespace emulator

// What the compiler calls with -fsanitize=thread.
#define OF_SIZE(size) \
  void __tsan_read##size(void *pointer) { emulator::access(pointer, size, false); } \
  void __tsan_write##size(void *pointer) { emulator::access(pointer, size, true); }
extern "C" {
OF_SIZE(1);
OF_SIZE(2);
OF_SIZE(4);
OF_SIZE(8);
OF_SIZE(16);
void __tsan_read_range(void *pointer, unsigned long size) { emulator::access(pointer, size, false); }
void __tsan_write_range(void *pointer, unsigned long size) { emulator::access(pointer, size, true); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

#define __syncthreads() emulator::wait(2 * __LINE__)
#define __shfl_xor_sync(mask, value, distance) emulator::shuffle(value, distance, __LINE__)

static float2 make_float2(float x, float y) { return {x, y}; }
static double2 make_double2(double x, double y) { return {x, y}; }
static size_t __cvta_generic_to_shared(const void *pointer) {
  return static_cast<const unsigned char *>(pointer) - emulator::shared_memory;
}
static unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fadd_rd(float a, float b) {  // the rounding error of a sum is a float itself (TwoSum)
  const float sum = a + b, part = sum - a, lost = (a - (sum - part)) + (b - part);
  return lost < 0.0f ? nextafterf(sum, -INFINITY) : sum;
}
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static float __ll2float_rn(long long value) { return (float)value; }
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}
