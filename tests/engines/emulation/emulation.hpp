// What CUDA means on a CPU: included before the text of kernels, it makes plain C++ of them.
//
// Each thread of a CUDA grid is a fiber with a stack of its own. Fibers change only where threads wait for each other,
// in an order that the launch's seed decides: forward (0), backward (1), shuffled (any other). The shared memory of a
// thread block is thread-local memory of the thread that runs the block, and poisoned before it begins.
//
// There are two builds:
//
// - Fast: thread blocks one after the other. Finds wrong results, undefined behaviour (UBSan), values that a missing
//   barrier or an uninitialised __shared__ makes depend on the order of threads, and threads that wait in vain.
// - Races (-DEMULATION_RACES -fsanitize=thread): ThreadSanitizer, for which each fiber is a thread with a clock of its
//   own. Several thread blocks run at the same time. A race is found in whatever order threads happen to run, if in the
//   cases that are run two threads access the same byte, one of them writes, not both by an atomic, and nothing orders
//   the two. Only what CUDA promises orders accesses to memory: launches, __syncthreads*, and __syncwarp within a warp.
//   Shuffles and ballots wait for all lanes, as on a GPU, but order nothing, nor do atomics, which are relaxed, nor the
//   switch between fibers. So a missing __syncwarp is found beside a shuffle too.
//
// Checked in both: all threads of a thread block wait at the same barrier, all lanes of a warp at the same line. That
// is stricter than CUDA, where equal barriers in two branches may meet.
//
// Not found: what the cases do not reach; a race whose accesses lie so far apart that ThreadSanitizer, which keeps the
// last four accesses to each eight bytes, has forgotten the first; order by __syncthreads_count and the like that
// nothing needs but the count; whatever NVCC or the GPU does differently, such as stale reads through the read-only
// cache; deadlocks between thread blocks, as all of a group run to their end; races between launches on different
// streams; accesses outside of a buffer that hit other mapped memory (tests put canaries and guard pages around
// theirs); how fast it is.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace emulation {

struct Index {
    unsigned x;
};
extern __thread Index thread_index, block_index;

// A place in a kernel's source where threads synchronise.
struct Site {
    const char *file;
    int line;
};

void wait_for_block(Site site);
unsigned count_in_block(Site site, bool value);
void wait_for_warp(Site site, unsigned mask);
uint64_t from_lane(Site site, unsigned mask, uint64_t value, unsigned lane);
unsigned ballot(Site site, unsigned mask, bool value);

template <class T, class Update>
T update(T *at, Update updated) {
#ifdef EMULATION_RACES
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &old, updated(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
#else
    const T old = *at;
    *at = updated(old);
#endif
    return old;
}

template <class T>
T shuffle(Site site, unsigned mask, T value, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = from_lane(site, mask, bits, lane);
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned lane() { return thread_index.x % 32; }

// A kernel, as a launch finds it by its name. Its arguments are 64-bit words.
struct Kernel {
    const char *name;
    unsigned arguments;
    void (*run)(const uint64_t *arguments);
    const Kernel *next;
};
void add_kernel(Kernel &kernel);

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), const uint64_t *arguments, std::index_sequence<I...>) {
    kernel((Parameters)arguments[I]...);
}

template <auto kernel, class... Parameters>
Kernel described(const char *name, void (*)(Parameters...)) {
    const auto run = [](const uint64_t *words) { call(kernel, words, std::index_sequence_for<Parameters...>()); };
    return {name, sizeof...(Parameters), run, nullptr};
}

}  // namespace emulation

#define EMULATED_KERNEL(name)                                                            \
    static emulation::Kernel described_##name = emulation::described<name>(#name, name); \
    static const bool added_##name = (emulation::add_kernel(described_##name), true)

#define __global__
#define __device__
#define __shared__ static __thread
#define __launch_bounds__(threads)

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index

#define EMULATION_SITE (emulation::Site{__FILE__, __LINE__})
#define __syncthreads() emulation::wait_for_block(EMULATION_SITE)
#define __syncthreads_count(value) (int)emulation::count_in_block(EMULATION_SITE, (value) != 0)
#define __syncthreads_or(value) (int)(emulation::count_in_block(EMULATION_SITE, (value) != 0) != 0)
// its mask may be left out
#define __syncwarp(...) emulation::wait_for_warp(EMULATION_SITE, __VA_ARGS__ + 0 ? __VA_ARGS__ + 0 : 0xFFFFFFFF)

#define EMULATED_SHUFFLE(mask, value, from) emulation::shuffle(EMULATION_SITE, mask, value, from)
#define EMULATED_LANE emulation::lane()
#define __shfl_sync(mask, value, from) EMULATED_SHUFFLE(mask, value, (from) % 32)
#define __shfl_up_sync(mask, value, distance) \
    EMULATED_SHUFFLE(mask, value, EMULATED_LANE - (EMULATED_LANE < (distance) ? 0 : (distance)))
#define __shfl_down_sync(mask, value, distance) \
    EMULATED_SHUFFLE(mask, value, EMULATED_LANE + (EMULATED_LANE + (distance) > 31 ? 0 : (distance)))
#define __shfl_xor_sync(mask, value, bits) EMULATED_SHUFFLE(mask, value, (EMULATED_LANE ^ (bits)) % 32)
#define __ballot_sync(mask, value) emulation::ballot(EMULATION_SITE, mask, (value) != 0)
#define __any_sync(mask, value) (int)(emulation::ballot(EMULATION_SITE, mask, (value) != 0) != 0)
#define __all_sync(mask, value) (int)(emulation::ballot(EMULATION_SITE, mask, (value) == 0) == 0)

#define EMULATED_ATOMIC(at, operand, expression)                                                    \
    emulation::update(at, [given = (std::remove_reference_t<decltype(*(at))>)(operand)](auto old) { \
        return (decltype(old))(expression);                                                         \
    })
#define atomicAdd(at, value) EMULATED_ATOMIC(at, value, old + given)
#define atomicOr(at, value) EMULATED_ATOMIC(at, value, old | given)
#define atomicAnd(at, value) EMULATED_ATOMIC(at, value, old & given)
#define atomicXor(at, value) EMULATED_ATOMIC(at, value, old ^ given)
#define atomicMax(at, value) EMULATED_ATOMIC(at, value, old > given ? old : given)
#define atomicMin(at, value) EMULATED_ATOMIC(at, value, old < given ? old : given)
#define atomicExch(at, value) EMULATED_ATOMIC(at, value, ((void)old, given))

static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static inline int __ffs(unsigned value) { return __builtin_ffs((int)value); }
