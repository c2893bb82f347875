// An allocator for torch's CPU tensors that counts live bytes on all threads. torch's profiler misses what threads free
// that it did not start in, as those of gloo do.
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

// never destroyed: torch frees tensors after the end of main
std::mutex& guard = *new std::mutex;
std::unordered_map<void*, std::size_t>& sizes = *new std::unordered_map<void*, std::size_t>;
std::int64_t live = 0, highest = 0;

void release(void* address) {
  if (address == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(guard);
    auto entry = sizes.find(address);
    if (entry != sizes.end()) {
      live -= static_cast<std::int64_t>(entry->second);
      sizes.erase(entry);
    }
  }
  std::free(address);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* address = nullptr;
    if (bytes != 0 && posix_memalign(&address, 64, bytes) != 0) throw std::bad_alloc();
    if (address != nullptr) {
      std::lock_guard<std::mutex> lock(guard);
      sizes[address] = bytes;
      live += static_cast<std::int64_t>(bytes);
      if (live > highest) highest = live;
    }
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Counting& counting = *new Counting;

}  // namespace

extern "C" {
void start_counting() { c10::SetCPUAllocator(&counting, 255); }
void restart_highest() {
  std::lock_guard<std::mutex> lock(guard);
  highest = live;
}
std::int64_t highest_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return highest;
}
std::int64_t live_bytes() {
  std::lock_guard<std::mutex> lock(guard);
  return live;
}
}
