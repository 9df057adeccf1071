// How programs start kernels on the emulation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulation.hpp"

namespace emulation {

// Runs a grid. Returns what is wrong, or nothing.
std::string run_grid(const std::string &kernel, unsigned grid, unsigned threads, uint32_t seed,
                     const std::vector<uint64_t> &arguments);

}  // namespace emulation
