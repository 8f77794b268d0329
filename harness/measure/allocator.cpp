// A CPU allocator for torch that counts what is asked of it: bytes live now, and the most there ever were.
//
// Each block is preceded by one alignment unit that holds its size, so the data pointer keeps torch's alignment of 64
// bytes and a block can be freed by its pointer alone (raw_deleter). The header is not counted. One mutex guards
// every figure: a new peak is then one moment on which anything else kept under the mutex agrees.
#include <cstddef>
#include <cstdint>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

namespace {

struct Header {
  std::size_t bytes;
};
constexpr std::size_t kHeaderBytes = c10::gAlignment;
static_assert(sizeof(Header) <= kHeaderBytes);

struct Counters {
  std::mutex mutex;
  std::int64_t live_bytes = 0;
  std::int64_t peak_bytes = 0;

  void add(std::size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex);
    live_bytes += static_cast<std::int64_t>(bytes);
    if (live_bytes > peak_bytes) {
      peak_bytes = live_bytes;
    }
  }

  void remove(std::size_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex);
    live_bytes -= static_cast<std::int64_t>(bytes);
  }
};

// Never destroyed: threads may still free tensors while the process ends.
Counters& counters() {
  static auto* const instance = new Counters;
  return *instance;
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  void* const block = static_cast<std::byte*>(data) - kHeaderBytes;
  const std::size_t bytes = static_cast<Header*>(block)->bytes;
  c10::profiledCPUMemoryReporter().Delete(data); // as torch's own allocator does, for its profiler
  c10::free_cpu(block);
  counters().remove(bytes);
}

// torch raises a plain error where a CPU has no memory. Here it is torch.OutOfMemoryError, as on a GPU, so that a run
// that ran out of memory is known by the type of its exception.
void* obtain(std::size_t bytes) {
  try {
    return c10::alloc_cpu(bytes);
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(OutOfMemoryError, error.what_without_backtrace());
  }
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    // A size that wraps round is passed on as it is, so that alloc_cpu refuses it in torch's words.
    const bool fits = bytes <= static_cast<std::size_t>(PTRDIFF_MAX) - kHeaderBytes;
    void* const block = obtain(fits ? bytes + kHeaderBytes : bytes); // raises if there is no memory
    static_cast<Header*>(block)->bytes = bytes;
    void* const data = static_cast<std::byte*>(block) + kHeaderBytes;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    counters().add(bytes);
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

} // namespace

extern "C" {

// 1 if torch now takes its CPU memory here, 0 if another allocator of higher priority stands in the way. Memory
// allocated before is neither counted nor touched: its own deleter frees it.
int install() {
  static auto* const allocator = new CountingAllocator;
  c10::SetCPUAllocator(allocator, 1);
  return c10::GetCPUAllocator() == allocator ? 1 : 0;
}

std::int64_t live_bytes() {
  const std::lock_guard<std::mutex> guard(counters().mutex);
  return counters().live_bytes;
}

std::int64_t peak_bytes() {
  const std::lock_guard<std::mutex> guard(counters().mutex);
  return counters().peak_bytes;
}

void reset_peak() {
  const std::lock_guard<std::mutex> guard(counters().mutex);
  counters().peak_bytes = counters().live_bytes;
}
}
