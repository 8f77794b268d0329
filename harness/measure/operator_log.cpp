// A log of what torch runs while steps are traced: the outermost operators of each thread, collectives, and the marks
// of phases, by torch's own callbacks for profilers (at::RecordFunction).
//
// torch's profiler lists every operator with much about it, which costs several microseconds an operator. To divide a
// step's time, only the times of the outermost operators are needed.
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ATen/record_function.h>

namespace {

// One line of the log. harness/measure/operator_log.py relies on this layout.
struct Span {
  std::int64_t name; // the number of a name
  std::int64_t start; // in nanoseconds
  std::int64_t end;
  std::int64_t thread; // in which it started: a collective ends in another one
};

struct Log {
  std::mutex mutex;
  std::vector<std::string> outermost; // prefixes of names that are logged unless they are inside such another one
  std::vector<std::string> every; // prefixes of names that are always logged
  std::unordered_map<std::string, std::int64_t> numbers;
  std::vector<const char*> names;
  std::vector<Span> spans;
  bool logging = false;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

  // Return the number of a name, whose characters the map keeps in place.
  std::int64_t number(const char* name) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto [entry, is_new] = numbers.try_emplace(name, static_cast<std::int64_t>(names.size()));
    if (is_new) {
      names.push_back(entry->first.c_str());
    }
    return entry->second;
  }

  // A collective may end after the log.
  void write(const Span& span) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (logging) {
      spans.push_back(span);
    }
  }
};

// The instance is never destroyed, because threads of a communication backend may outlive main().
Log& log() {
  static auto* const instance = new Log;
  return *instance;
}

thread_local bool inside_operator = false; // whether this thread is inside an operator of `outermost`

struct Started final : at::ObserverContext {
  std::int64_t name = 0;
  std::int64_t moment = 0;
  bool is_operator = false;
};

bool starts_with_any(std::string_view name, const std::vector<std::string>& prefixes) {
  for (const auto& prefix : prefixes) {
    if (name.substr(0, prefix.size()) == prefix) {
      return true;
    }
  }
  return false;
}

std::int64_t now() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  const bool is_operator = starts_with_any(function.name(), log().outermost);
  if (is_operator ? inside_operator : !starts_with_any(function.name(), log().every)) {
    return nullptr;
  }
  auto started = std::make_unique<Started>();
  started->is_operator = is_operator;
  started->name = log().number(function.name());
  inside_operator = inside_operator || is_operator;
  started->moment = now();
  return started;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto end = now();
  if (const auto* const started = static_cast<const Started*>(context)) {
    inside_operator = inside_operator && !started->is_operator;
    log().write({started->name, started->moment, end, static_cast<std::int64_t>(function.threadId())});
  }
}

std::vector<std::string> strings(const char* const* values, std::int64_t count) {
  return {values, values + count};
}

} // namespace

extern "C" {

// Log from now on what this thread runs, and what it causes other threads to run.
void begin_operator_log(
    const char* const* outermost,
    std::int64_t outermost_count,
    const char* const* every,
    std::int64_t every_count) {
  log().outermost = strings(outermost, outermost_count);
  log().every = strings(every, every_count);
  log().spans.clear();
  log().logging = true;
  log().handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&on_start, &on_end).scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

// Stop logging, in the thread that began. The log stays unchanged until it is begun anew.
void end_operator_log() {
  at::removeCallback(log().handle);
  const std::lock_guard<std::mutex> guard(log().mutex);
  log().logging = false;
}

const Span* operator_log_lines() {
  return log().spans.data();
}

std::int64_t operator_log_length() {
  return static_cast<std::int64_t>(log().spans.size());
}

std::int64_t operator_name_count() {
  return static_cast<std::int64_t>(log().names.size());
}

const char* operator_name(std::int64_t number) {
  return log().names.at(static_cast<std::size_t>(number));
}
}
