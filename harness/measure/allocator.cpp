// A CPU allocator for torch that counts requested bytes: those that are live, and the most that ever were. It can also
// log every allocation and free with a peak of its own, and refuse allocations that would exceed a limit.
//
// Each block is preceded by one alignment unit that holds its size and its neighbors in the list of live blocks. So the
// data pointer keeps torch's alignment of 64 bytes, and a block can be freed by its pointer alone (raw_deleter). The
// header is not counted. One mutex guards the list, the counters and the log, so that they always agree.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace {

struct Header {
  std::size_t bytes;
  Header* before;
  Header* after;
  bool foreign; // requested by another thread than the one that installed the allocator: a communication backend's
};
constexpr std::size_t kHeaderBytes = c10::gAlignment;
constexpr std::int64_t kNoLimit = INT64_MAX;
static_assert(sizeof(Header) <= kHeaderBytes);

// One line of the log. harness/measure/native_allocator.py relies on this layout.
struct Event {
  std::int64_t address;
  std::int64_t bytes; // negative if freed
  std::int64_t foreign; // 1 or 0: see Header
};

std::int64_t address_of(const Header* header) {
  return reinterpret_cast<std::int64_t>(header) + static_cast<std::int64_t>(kHeaderBytes);
}

struct Blocks {
  std::mutex mutex;
  std::thread::id owner;
  std::int64_t live_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t limit_bytes = kNoLimit;
  Header* newest = nullptr;
  bool logging = false;
  bool log_paused = false; // lines are written, and do not count towards the log's peak
  std::int64_t log_peak_bytes = 0;
  std::vector<Event> log; // in malloc's memory, which is not counted

  // Add a block. Throw and change nothing if that would exceed the limit.
  void add(Header* block) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto bytes = static_cast<std::int64_t>(block->bytes);
    if (bytes > limit_bytes - live_bytes) { // live bytes may exceed a limit that was set later
      C10_THROW_ERROR(
          OutOfMemoryError,
          c10::str(bytes, " bytes requested, ", live_bytes, " allocated, of a budget of ", limit_bytes, " bytes"));
    }
    block->before = newest;
    block->after = nullptr;
    if (newest != nullptr) {
      newest->after = block;
    }
    newest = block;
    block->foreign = std::this_thread::get_id() != owner;
    live_bytes += bytes;
    if (live_bytes > peak_bytes) {
      peak_bytes = live_bytes;
    }
    write(block, 1);
  }

  void remove(Header* block) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (block->before != nullptr) {
      block->before->after = block->after;
    }
    (block->after != nullptr ? block->after->before : newest) = block->before;
    live_bytes -= static_cast<std::int64_t>(block->bytes);
    write(block, -1);
  }

  void write(const Header* block, std::int64_t sign) {
    if (logging) {
      log.push_back({address_of(block), sign * static_cast<std::int64_t>(block->bytes), block->foreign ? 1 : 0});
      if (!log_paused && live_bytes > log_peak_bytes) {
        log_peak_bytes = live_bytes;
      }
    }
  }

  // Start the log with every live block, from the oldest to the newest. Return the number of their lines.
  std::int64_t begin_log() {
    const std::lock_guard<std::mutex> guard(mutex);
    log.clear();
    logging = true;
    log_paused = false;
    log_peak_bytes = live_bytes;
    Header* block = newest;
    while (block != nullptr && block->before != nullptr) {
      block = block->before;
    }
    for (; block != nullptr; block = block->after) {
      write(block, 1);
    }
    return static_cast<std::int64_t>(log.size());
  }

  // Exclude the lines from now on from the log's peak, or include them again. Return the number of the next line.
  // Nothing can be allocated between the change and the number, by no thread.
  std::int64_t pause_log(bool pauses) {
    const std::lock_guard<std::mutex> guard(mutex);
    log_paused = pauses;
    return static_cast<std::int64_t>(log.size());
  }

  // Stop logging. Return the log's peak. The log is complete and stays unchanged until begin_log().
  std::int64_t end_log() {
    const std::lock_guard<std::mutex> guard(mutex);
    logging = false;
    return log_peak_bytes;
  }
};

// The instance is never destroyed, because threads may still free tensors while the process exits.
Blocks& blocks() {
  static auto* const instance = new Blocks;
  return *instance;
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  void* const block = static_cast<std::byte*>(data) - kHeaderBytes;
  c10::profiledCPUMemoryReporter().Delete(data); // torch's own allocator also reports to its profiler
  blocks().remove(static_cast<Header*>(block)); // before another block can reuse the memory
  c10::free_cpu(block);
}

// Allocate memory. If none is left, torch throws a plain error on a CPU. Throw torch.OutOfMemoryError as on a GPU, so
// that the type of the exception identifies a run that ran out of memory.
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
    // A size that would overflow is passed on unchanged, so that alloc_cpu rejects it with torch's message.
    const bool fits = bytes <= static_cast<std::size_t>(PTRDIFF_MAX) - kHeaderBytes;
    // obtain() throws if no memory is left. Untouched memory costs nothing, so what the limit refuses is just freed.
    std::unique_ptr<void, decltype(&c10::free_cpu)> block(obtain(fits ? bytes + kHeaderBytes : bytes), &c10::free_cpu);
    auto* const header = static_cast<Header*>(block.get());
    header->bytes = bytes;
    blocks().add(header);
    void* const data = static_cast<std::byte*>(block.release()) + kHeaderBytes;
    c10::profiledCPUMemoryReporter().New(data, bytes);
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

// Make torch take its CPU memory from this allocator. Return 1, or 0 if another allocator has a higher priority. Memory
// that was allocated before is neither counted nor touched: its own deleter frees it.
int install() {
  static auto* const allocator = new CountingAllocator;
  blocks().owner = std::this_thread::get_id();
  c10::SetCPUAllocator(allocator, 1);
  return c10::GetCPUAllocator() == allocator ? 1 : 0;
}

std::int64_t live_bytes() {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  return blocks().live_bytes;
}

std::int64_t peak_bytes() {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  return blocks().peak_bytes;
}

void reset_peak() {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  blocks().peak_bytes = blocks().live_bytes;
}

// Make requests fail that would make more bytes live than this. Live blocks stay. 0 is no limit.
void set_limit(std::int64_t bytes) {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  blocks().limit_bytes = bytes > 0 ? bytes : kNoLimit;
}

std::int64_t begin_log() {
  return blocks().begin_log();
}

std::int64_t log_length() {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  return static_cast<std::int64_t>(blocks().log.size());
}

std::int64_t pause_log(int pauses) {
  return blocks().pause_log(pauses != 0);
}

std::int64_t end_log() {
  return blocks().end_log();
}

// Return the lines of the log. Call end_log() first.
const Event* log_lines() {
  const std::lock_guard<std::mutex> guard(blocks().mutex);
  return blocks().log.data();
}
}
