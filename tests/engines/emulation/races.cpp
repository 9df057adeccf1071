// Runs kernels under ThreadSanitizer, which can't be loaded into Python, on memory that another process shares.
//
//     races DESCRIPTOR ADDRESS NBYTES
//
// The memory is mapped at the same address as there, so that tables of addresses mean the same. Each line of standard
// input is a launch (kernel, grid, threads, seed, arguments) and is answered by a line: what is wrong, or nothing.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "scheduler.hpp"

int main(int count, char **words) {
    if (count != 4) {
        fprintf(stderr, "usage: races DESCRIPTOR ADDRESS NBYTES\n");
        return 2;
    }
    void *const address = (void *)strtoull(words[2], nullptr, 10);
    const int flags = MAP_SHARED | MAP_FIXED_NOREPLACE;
    void *const mapped =
        mmap(address, strtoull(words[3], nullptr, 10), PROT_READ | PROT_WRITE, flags, atoi(words[1]), 0);
    if (mapped != address) {
        perror("the memory can't be mapped");
        return 2;
    }
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream launch(line);
        std::string kernel;
        unsigned grid = 0, threads = 0, seed = 0;
        launch >> kernel >> grid >> threads >> seed;
        std::vector<uint64_t> arguments;
        for (uint64_t argument; launch >> argument;) arguments.push_back(argument);
        std::cout << emulation::run_grid(kernel, grid, threads, seed, arguments) << std::endl;
    }
}
