// Makes plain C++ of blocks.cu: the threads of a thread block are fibers that take turns at barriers, the thread blocks
// of a grid run one after the other. So a CPU runs the very text that the GPU does, with shared memory and atomics.
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct Index { unsigned x; };
static Index blockIdx, threadIdx;

static unsigned atomicXor(unsigned *at, unsigned value) { unsigned old = *at; *at ^= value; return old; }
static unsigned atomicOr(unsigned *at, unsigned value) { unsigned old = *at; *at |= value; return old; }

struct Fiber {
    ucontext_t context;
    bool done = false;
    std::unique_ptr<char[]> stack{new char[kStackNbytes]};
    static const unsigned kStackNbytes = 64 << 10;
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers(THREADS);
static std::function<void()> body;

static void enter() {
    body();
    fibers[threadIdx.x].done = true;
}

static void __syncthreads() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

// Runs a grid. Returns 0, or 1 where only some of the threads of a thread block came to a barrier.
static int run_grid(unsigned grid, std::function<void()> kernel) {
    body = kernel;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (Fiber &fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = Fiber::kStackNbytes;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, enter, 0);
            fiber.done = false;
        }
        for (unsigned finished = 0; finished == 0;) {
            for (unsigned i = 0; i < fibers.size(); ++i) {
                threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].context);
                finished += fibers[i].done;
            }
            if (finished != 0 && finished != fibers.size()) return 1;
        }
    }
    return 0;
}

#include "blocks.cu"

#define ENTRY(name, parameters, arguments) \
    extern "C" int cpu_##name parameters { return run_grid(grid, [=] { name arguments; }); }

ENTRY(inspect_blocks,
      (u32 grid, const BlockRow *rows, const u32 *tiles, const u32 *stride, const u32 *powers, u32 *crc, u32 *seen),
      (rows, tiles, stride, powers, crc, seen))
ENTRY(split_blocks, (u32 grid, const BlockRow *rows, const u32 *tiles, const u32 *seen, u32 *flags),
      (rows, tiles, seen, flags))
ENTRY(merge_blocks, (u32 grid, const BlockRow *rows, const u32 *tiles), (rows, tiles))
ENTRY(copy_pieces, (u32 grid, const CopyRow *rows, const u32 *tiles), (rows, tiles))
