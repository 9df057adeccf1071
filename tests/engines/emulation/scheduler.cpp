// Runs grids of fibers; emulation.hpp says what for. Never compiled with -fsanitize=thread: what happens here is not
// what a kernel does, so ThreadSanitizer is told of nothing but barriers.
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "emulation.hpp"
#include "scheduler.hpp"

#ifdef EMULATION_RACES
#include <sanitizer/tsan_interface.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulation {

__thread Index thread_index, block_index;

namespace {

const unsigned kMaxThreads = 1024, kLanes = 32;

#ifdef EMULATION_RACES
const size_t kStackNbytes = 128 << 10;  // reports are written on them too
const unsigned kResident = 4;           // thread blocks that run at the same time
#else
const size_t kStackNbytes = (64 << 10) + 9 * 64;  // at powers of two, all stacks would share a few lines of the caches
#endif

const Kernel *kernels;

// ---- fibers ---------------------------------------------------------------------------------------------------------

#ifdef __x86_64__
// swapcontext does the same, but with two system calls for the mask of signals.
extern "C" void emulation_switch(void **from, void *to);
asm(".text\n.globl emulation_switch\n.type emulation_switch, @function\nemulation_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

struct Context {
    void *top;
    void prepare(char *stack, void (*entry)()) {
        void **end = (void **)((uintptr_t)(stack + kStackNbytes) / 16 * 16) - 1;
        *--end = (void *)entry;
        top = end - 6;
    }
    void switch_to(Context &other) { emulation_switch(&top, other.top); }
};
#else
struct Context {
    ucontext_t context;
    void prepare(char *stack, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = kStackNbytes;
        makecontext(&context, entry, 0);
    }
    void switch_to(Context &other) { swapcontext(&context, &other.context); }
};
#endif

struct Barrier {
    unsigned waiting = 0, generation = 0;
    Site site{};
    // What ThreadSanitizer knows the barrier by, in turns: a thread may come to the next barrier before another has
    // left this one, and must not be ordered before it.
    char order[2];
};

struct Warp {
    Barrier barrier;
    uint64_t values[2][kLanes];  // in turns, for the same reason
};

struct Fiber {
    Context context;
    bool done = false;
    const Barrier *waits_for = nullptr;
    unsigned generation = 0;
    void *clock = nullptr;  // ThreadSanitizer's
};

// ---- what ThreadSanitizer is told -----------------------------------------------------------------------------------

char launch_order;

#ifdef EMULATION_RACES
// One for each thread of a grid: thread blocks must not share any, as none is ordered before another. A megabyte each,
// so they are kept for the next launch, which is ordered behind this one anyway.
std::vector<void *> clocks;

void make_clocks(size_t count) {
    while (clocks.size() < count) clocks.push_back(__tsan_create_fiber(0));
}
void *clock_of(size_t thread) { return clocks[thread]; }
void *current_clock() { return __tsan_get_current_fiber(); }
void use_clock(void *clock) { __tsan_switch_to_fiber(clock, __tsan_switch_to_fiber_no_sync); }
void before(char &order) { __tsan_release(&order); }
void after(char &order) { __tsan_acquire(&order); }
#else
void *clock_of(size_t) { return nullptr; }
void *current_clock() { return nullptr; }
void use_clock(void *) {}
void before(char &) {}
void after(char &) {}
#endif

// ---- thread blocks --------------------------------------------------------------------------------------------------

struct Random {
    uint32_t state;
    explicit Random(uint32_t seed) : state(seed * 2654435761u | 1) {}
    uint32_t operator()() {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        return state;
    }
    uint32_t operator()(uint32_t below) { return (uint32_t)((uint64_t)(*this)() * below >> 32); }
};

std::vector<unsigned> ordered(unsigned count, uint32_t seed, Random &random) {
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    if (seed == 1) std::reverse(order.begin(), order.end());
    if (seed > 1)
        for (unsigned i = count; i > 1; --i) std::swap(order[i - 1], order[random(i)]);
    return order;
}

struct Launch {
    const Kernel *kernel;
    unsigned grid, threads;
    uint32_t seed;
    const uint64_t *arguments;
};

bool is_same(Site site, Site other) { return site.line == other.line && strcmp(site.file, other.file) == 0; }
std::string place(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

// Thread-local memory of the program or library that this function is part of: all __shared__ variables, and ours.
int find_shared(dl_phdr_info *info, size_t, void *found) {
    for (unsigned i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) &header = info->dlpi_phdr[i];
        const uintptr_t own = (uintptr_t)&find_shared - info->dlpi_addr;
        if (header.p_type == PT_LOAD && own >= header.p_vaddr && own < header.p_vaddr + header.p_memsz)
            for (unsigned k = 0; k < info->dlpi_phnum; ++k)
                if (info->dlpi_phdr[k].p_type == PT_TLS) {
                    *(std::pair<void *, size_t> *)found = {info->dlpi_tls_data, info->dlpi_phdr[k].p_memsz};
                    return 1;
                }
    }
    return 0;
}

class Block;
__thread Block *current;

class Block {
public:
    explicit Block(const Launch &launch)
        : launch_(launch),
          stacks_(new char[launch.threads * kStackNbytes]),
          fibers_(launch.threads),
          warps_(launch.threads / kLanes) {}

    // Runs one thread block on the calling thread. Returns what is wrong, or nothing.
    std::string run(unsigned number) {
        Random random(launch_.seed + number);
        std::vector<unsigned> order = ordered(launch_.threads, launch_.seed, random);
        error_.clear();
        start(number, random);
        for (unsigned finished = 0; finished < launch_.threads && error_.empty();) {
            unsigned ran = 0;
            // shuffled: every round in another order, and about half of the warps at a time, so that some fall behind
            if (launch_.seed > 1)
                for (unsigned i = launch_.threads; i > 1; --i) std::swap(order[i - 1], order[random(i)]);
            const uint32_t resting = launch_.seed > 1 ? random() : 0;
            for (unsigned i : order) {
                Fiber &fiber = fibers_[i];
                if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) continue;
                ++ran;
                if (resting >> i / kLanes & 1) continue;
                resume(i);
                finished += fiber.done;
                if (!error_.empty()) break;
            }
            if (!ran) error_ = stuck();
        }
        return error_;
    }

    void wait(Barrier &barrier, unsigned expected, Site site, bool orders_memory) {
        const unsigned generation = barrier.generation;
        if (barrier.waiting && !is_same(site, barrier.site))
            fail(place(site) + ": other threads wait at " + place(barrier.site));
        barrier.site = site;
        if (orders_memory) before(barrier.order[generation % 2]);
        if (++barrier.waiting == expected) {
            barrier.waiting = 0;
            ++barrier.generation;
        }
        Fiber &fiber = fibers_[thread_index.x];
        fiber.waits_for = &barrier;
        fiber.generation = generation;
        leave();
        if (orders_memory) after(barrier.order[generation % 2]);
    }

    void wait_for_block(Site site) { wait(barrier_, launch_.threads, site, true); }

    void wait_for_warp(Site site, unsigned mask, bool orders_memory) {
        if (mask != 0xFFFFFFFF) fail(place(site) + ": only whole warps are emulated");
        wait(warp().barrier, kLanes, site, orders_memory);
    }

    unsigned count(Site site, bool value) {
        // read after the barrier and reset by the last that comes to the next one, by when all have read it
        counting_ += value;
        if (barrier_.waiting + 1 == launch_.threads) {
            counted_ = counting_;
            counting_ = 0;
        }
        wait_for_block(site);
        return counted_;
    }

    const uint64_t *exchange(Site site, unsigned mask, uint64_t value) {
        uint64_t *values = warp().values[warp().barrier.generation % 2];
        values[thread_index.x % kLanes] = value;
        wait_for_warp(site, mask, false);
        return values;
    }

private:
    Warp &warp() { return warps_[thread_index.x / kLanes]; }

    void start(unsigned number, Random &random) {
        block_index.x = number;  // also makes sure that this thread has its thread-local memory
        if (!shared_.first) dl_iterate_phdr(find_shared, &shared_);
        memset(shared_.first, 0x80 | (int)random(128), shared_.second);
        current = this;
        block_index.x = number;
        barrier_ = {};
        counting_ = 0;
        for (Warp &warp : warps_) warp = {};
        scheduler_clock_ = current_clock();
        for (unsigned i = 0; i < launch_.threads; ++i) {
            Fiber &fiber = fibers_[i];
            fiber.context.prepare(&stacks_[i * kStackNbytes], [] { current->enter(); });
            fiber.done = false;
            fiber.waits_for = nullptr;
            fiber.clock = clock_of((size_t)number * launch_.threads + i);
        }
        before(beginning_);
    }

    void enter() {
        after(beginning_);
        launch_.kernel->run(launch_.arguments);
        before(launch_order);
        fibers_[thread_index.x].done = true;
        leave();
        abort();
    }

    void resume(unsigned thread) {
        thread_index.x = thread;
        fibers_[thread].waits_for = nullptr;
        use_clock(fibers_[thread].clock);
        scheduler_.switch_to(fibers_[thread].context);
    }

    void leave() {
        Fiber &fiber = fibers_[thread_index.x];
        use_clock(scheduler_clock_);
        fiber.context.switch_to(scheduler_);
    }

    void fail(const std::string &error) {
        error_ = "thread " + std::to_string(thread_index.x) + ", " + error;
        leave();
    }

    std::string stuck() const {
        size_t waiting = 0;
        while (fibers_[waiting].done) ++waiting;
        return "thread " + std::to_string(waiting) + " waits at " + place(fibers_[waiting].waits_for->site) +
               ", where others never come";
    }

    const Launch launch_;
    const std::unique_ptr<char[]> stacks_;
    std::pair<void *, size_t> shared_{};  // where it is, and how long
    std::vector<Fiber> fibers_;
    std::vector<Warp> warps_;
    Barrier barrier_;
    unsigned counting_ = 0, counted_ = 0;
    char beginning_ = 0;
    Context scheduler_;
    void *scheduler_clock_ = nullptr;
    std::string error_;
};

#ifdef EMULATION_RACES
std::string run_blocks(const Launch &launch, const std::vector<unsigned> &order) {
    make_clocks((size_t)launch.grid * launch.threads);
    // All of them end after the launch: to give memory back is to write there, and what a thread block did, no other
    // may be ordered behind. Their stacks and shared memory are new to ThreadSanitizer for the same reason.
    std::deque<Block> blocks;
    std::vector<std::string> errors(launch.grid);
    for (size_t first = 0; first < order.size(); first += kResident) {
        std::vector<std::thread> running;
        for (size_t i = first; i < std::min(first + kResident, order.size()); ++i) {
            Block &block = blocks.emplace_back(launch);
            running.emplace_back([&, i] { errors[i] = block.run(order[i]); });
        }
        for (std::thread &thread : running) thread.join();
    }
    after(launch_order);
    for (const std::string &error : errors)
        if (!error.empty()) return error;
    return "";
}
#else
std::string run_blocks(const Launch &launch, const std::vector<unsigned> &order) {
    Block block(launch);
    for (unsigned number : order) {
        const std::string error = block.run(number);
        if (!error.empty()) return error;
    }
    return "";
}
#endif

}  // namespace

void wait_for_block(Site site) { current->wait_for_block(site); }

unsigned count_in_block(Site site, bool value) { return current->count(site, value); }

void wait_for_warp(Site site, unsigned mask) { current->wait_for_warp(site, mask, true); }

uint64_t from_lane(Site site, unsigned mask, uint64_t value, unsigned lane) {
    return current->exchange(site, mask, value)[lane];
}

unsigned ballot(Site site, unsigned mask, bool value) {
    const uint64_t *values = current->exchange(site, mask, value);
    unsigned found = 0;
    for (unsigned i = 0; i < kLanes; ++i) found |= (unsigned)values[i] << i;
    return found;
}

void add_kernel(Kernel &kernel) {
    kernel.next = kernels;
    kernels = &kernel;
}

std::string run_grid(const std::string &name, unsigned grid, unsigned threads, uint32_t seed,
                     const std::vector<uint64_t> &arguments) {
    const Kernel *kernel = kernels;
    while (kernel && name != kernel->name) kernel = kernel->next;
    if (!kernel) return "there is no kernel " + name;
    if (kernel->arguments != arguments.size())
        return name + " takes " + std::to_string(kernel->arguments) + " arguments";
    if (threads == 0 || threads > kMaxThreads || threads % kLanes) return "a thread block has whole warps, 32 at most";
    const Launch launch{kernel, grid, threads, seed, arguments.data()};
    Random random(seed);
    const std::string error = run_blocks(launch, ordered(grid, seed, random));
    return error.empty() ? "" : name + ": " + error;
}

}  // namespace emulation

// For ctypes: puts what is wrong into `error`, or nothing.
extern "C" void emulation_launch(const char *name, unsigned grid, unsigned threads, uint32_t seed,
                                 const uint64_t *arguments, unsigned count, char *error, size_t error_nbytes) {
    const std::string found = emulation::run_grid(name, grid, threads, seed, {arguments, arguments + count});
    snprintf(error, error_nbytes, "%s", found.c_str());
}
