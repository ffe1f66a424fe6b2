// The runtime of an emulated CANN, as torch_npu calls it: memory, streams, events, captured graphs and task groups.
//
// A stream is a queue. Nothing runs until somebody waits for it, and then only the work that it depends on, by stream
// order and events. A missing event between two streams, or a pinned buffer that is reused too early, therefore gives a
// wrong result. A captured graph runs in the order of its calls, so a missing event in it has no effect, unless a stream
// is never joined. New memory is filled with ones (NaN in floating point).
//
// Graphs keep addresses. A run is refused if memory that its tasks use was freed. A task update and a run of its graph are
// refused if neither stream waited for the other, because a card would do both at once.

#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "acl/acl_mdl.h"
#include "acl/acl_op_compiler.h"
#include "acl/error_codes/rt_error_codes.h"

namespace cann {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMostPending = 4096;  // per stream; beyond this, the oldest work runs although nothing waits
constexpr size_t kAlignment = 512;
constexpr int kCards = 8;
constexpr size_t kMemory = static_cast<size_t>(60.97 * (1ull << 30));  // the memory that a 64 GB card reports
const char* const kName = "Ascend910B3";
const char* const kCopy = "memcpyAsync";

// What the card did, in the order of the fields in `card.py`.
struct Counters {
  uint64_t launches, replays, replayed, captures, uploads, upload_bytes, downloads, download_bytes, syncs, task_updates,
      memory, graphs, collectives, kv_bytes_read;
};

// Counts for a captured graph, which are kept after it is destroyed.
struct GraphCounts {
  uint64_t tasks = 0, replays = 0;
};

struct Stream;

// For each stream, how much of its work precedes a given point.
using Past = std::map<Stream*, uint64_t>;

// A position in a stream's queue; during a capture, the number of its operations so far.
struct Mark {
  Stream* stream = nullptr;
  uint64_t position = 0;
  std::shared_ptr<Clock::time_point> time;
};

struct Task {
  Work run;
  Mark after;  // work in another stream that must be done first
};

struct Group {
  std::vector<std::string> names;
  std::vector<Work> works;
  std::vector<Addresses> addresses;
  std::string lost;   // a task whose memory was freed, until an update provides different memory
  Mark ran, updated;  // the graph's last run, and this group's last update
};

struct Node {
  std::string name;
  Work run;
  std::shared_ptr<Group> group;
  Addresses addresses;
};

struct Graph {
  uint32_t id;
  std::vector<Node> nodes;
  uint64_t collectives = 0;
  GraphCounts* counts = nullptr;
  std::string lost;  // a task whose memory was freed
  // Used only during the capture:
  Stream* origin = nullptr;
  std::set<Stream*> streams;
  uint64_t operations = 0;
  std::map<Stream*, uint64_t> unjoined;  // with the last operation that the origin does not wait for
  std::thread::id thread;
  aclmdlRICaptureMode mode;
  std::shared_ptr<Group> open;
};

struct Stream {
  int32_t id;
  std::deque<Task> tasks;
  uint64_t submitted = 0, done = 0;
  Past past;  // the work in other streams that its next work follows
  Graph* capture = nullptr;
  std::shared_ptr<Group> updating;
  Mark ran_before_update;
  std::vector<std::string> names;  // collected in the current update
  std::vector<Work> works;
  std::vector<Addresses> addresses;
};

struct Event {
  Mark mark;
  Past past;
  Graph* captured = nullptr;
};

struct Card {
  std::mutex mutex;
  std::condition_variable wanted_changed, progress;
  std::deque<Mark> wanted;
  std::map<int32_t, Stream*> streams;
  std::map<const void*, size_t> memory, pinned, given_back;
  std::map<Graph*, std::shared_ptr<Graph>> graphs;
  std::set<Graph*> capturing;
  std::map<aclrtTaskGrp, std::weak_ptr<Group>> groups;
  Stream default_stream{};
  Counters counts{};
  std::deque<GraphCounts> captured;
  Past waited;  // the work that the host has waited for; everything that it requests later follows this work
  std::string fault;  // the error of an operator that failed; every later wait reports it
  int device = -1;
  int32_t next_stream = 1;
  uint32_t next_graph = 1;
  bool started = false;
  size_t limit = kMemory;
  bool traces = false;
  std::string trace;     // a line for each graph and each operator, while tracing
  bool computes = true;  // if false, operators do nothing, so that only sizes are right; copies still run
};

Card& card() {
  static Card* const it = new Card;  // never destroyed, because other threads may end later
  return *it;
}

thread_local std::string recent_error;
std::string allowed;  // text from the reasons of disabled refusals
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

void merge(Past& into, const Past& other) {
  for (const auto& [stream, position] : other) into[stream] = std::max(into[stream], position);
}

void host_waited_for(Stream* stream, uint64_t position, const Past& past) {
  merge(card().waited, past);
  merge(card().waited, {{stream, position}});
}

// Returns whether work that is added to the stream now follows the mark.
bool follows(Stream* stream, const Mark& mark) {
  const auto has = [&](const Past& past) {
    const auto found = past.find(mark.stream);
    return found != past.end() && found->second >= mark.position;
  };
  return mark.stream == nullptr || mark.stream == stream || has(stream->past) || has(card().waited);
}

// Runs a stream up to a position, after the work that it waits for. Called on the card's thread with the lock held.
void advance(Stream* stream, uint64_t position, std::unique_lock<std::mutex>& lock) {
  while (stream->done < position) {
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    if (task.after.stream != nullptr) advance(task.after.stream, task.after.position, lock);
    if (task.run && card().fault.empty()) {
      lock.unlock();
      std::string fault;
      try {
        task.run();
      } catch (const std::exception& error) {
        fault = error.what();
      }
      task.run = nullptr;
      lock.lock();
      if (!fault.empty()) card().fault = fault;
    }
    ++stream->done;
    card().progress.notify_all();
  }
}

void work_for_ever() {
  std::unique_lock<std::mutex> lock(card().mutex);
  for (;;) {
    card().wanted_changed.wait(lock, [] { return !card().wanted.empty(); });
    const Mark mark = card().wanted.front();
    card().wanted.pop_front();
    advance(mark.stream, mark.position, lock);
  }
}

void want(const Mark& mark) {
  if (!card().started) {
    std::thread(work_for_ever).detach();
    card().started = true;
  }
  card().wanted.push_back(mark);
  card().wanted_changed.notify_one();
}

aclError fault() {
  if (card().fault.empty()) return ACL_SUCCESS;
  return refuse(ACL_ERROR_RT_AICORE_EXCEPTION, card().fault);
}

aclError wait_for(const Mark& mark, std::unique_lock<std::mutex>& lock) {
  if (mark.stream->done < mark.position) {
    want(mark);
    card().progress.wait(lock, [&] { return mark.stream->done >= mark.position; });
  }
  return fault();
}

aclError wait_for_stream(Stream* stream, std::unique_lock<std::mutex>& lock) {
  const uint64_t position = stream->submitted;
  const Past past = stream->past;
  const aclError error = wait_for({stream, position, nullptr}, lock);
  host_waited_for(stream, position, past);
  return error;
}

aclError wait_for_all(std::unique_lock<std::mutex>& lock) {
  std::vector<Stream*> streams{&card().default_stream};
  for (auto& [id, stream] : card().streams) streams.push_back(stream);
  aclError error = ACL_SUCCESS;
  for (Stream* stream : streams) {
    const aclError now = wait_for_stream(stream, lock);
    error = error == ACL_SUCCESS ? now : error;
  }
  return error;
}

// Lets the card run one more piece of work after an unsuccessful poll, so that polling eventually succeeds.
void nudge(Stream* stream) {
  if (stream->done < stream->submitted) want({stream, stream->done + 1, nullptr});
}

Stream* stream_of(aclrtStream handle) {
  return handle == nullptr ? &card().default_stream : static_cast<Stream*>(handle);
}

Mark push(Stream* stream, Work run, Mark after = {}) {
  stream->tasks.push_back({std::move(run), after});
  ++stream->submitted;
  if (stream->submitted - stream->done > kMostPending) want({stream, stream->submitted - kMostPending, nullptr});
  return {stream, stream->submitted, nullptr};
}

// Returns the capture that this thread must not disturb: its own, or any in global mode.
Graph* guarding() {
  if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return nullptr;
  for (Graph* graph : card().capturing) {
    const bool own = graph->thread == std::this_thread::get_id();
    if (graph->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL || (graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && own))
      return graph;
  }
  return nullptr;
}

aclError refuse_in_capture(const char* name) {
  REFUSE_IF(guarding() != nullptr, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
            std::string(name) + " while a stream is captured");
  return ACL_SUCCESS;
}

void note(const std::string& line) {
  if (card().traces) card().trace += line + "\n";
}

aclError add(Stream* stream, const std::string& name, Addresses addresses, Work work) {
  if (!card().computes && name != kCopy) work = [] {};
  if (stream->updating != nullptr) {
    stream->names.push_back(name);
    stream->works.push_back(std::move(work));
    stream->addresses.push_back(std::move(addresses));
  } else if (stream->capture != nullptr) {
    Graph& graph = *stream->capture;
    ++graph.operations;
    if (stream != graph.origin) graph.unjoined[stream] = graph.operations;
    if (graph.open != nullptr) {
      graph.open->names.push_back(name);
      graph.open->works.push_back(std::move(work));
      graph.open->addresses.push_back(std::move(addresses));
    } else {
      graph.nodes.push_back({name, std::move(work), nullptr, std::move(addresses)});
    }
  } else {
    ++card().counts.launches;
    note(name);
    push(stream, std::move(work));
  }
  return fault();
}

bool within(const std::map<const void*, size_t>& regions, const void* address) {
  auto after = regions.upper_bound(address);
  if (after == regions.begin()) return false;
  --after;
  return static_cast<const char*>(address) < static_cast<const char*>(after->first) + after->second;
}

bool on_card(const void* address) { return within(card().memory, address); }

bool is_gone(const void* address) {
  return within(card().given_back, address) && !on_card(address) && !within(card().pinned, address);
}

// Marks the graphs that use freed memory, which cannot run any more.
void lose(const char* start, size_t size) {
  const auto uses = [&](const Addresses& addresses) {
    return std::any_of(addresses.begin(), addresses.end(), [&](const void* address) {
      return address >= start && address < start + size;
    });
  };
  for (auto& [key, graph] : card().graphs)
    for (const Node& node : graph->nodes) {
      if (uses(node.addresses)) graph->lost = node.name;
      if (node.group == nullptr) continue;
      for (size_t i = 0; i < node.group->addresses.size(); ++i)
        if (uses(node.group->addresses[i])) node.group->lost = node.group->names[i];
    }
}

void* map_memory(size_t size) {
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

size_t rounded(size_t size) { return (std::max<size_t>(size, 1) + 4095) / 4096 * 4096; }

aclError allocate(void** address, size_t size) {
  std::unique_lock<std::mutex> lock(card().mutex);
  Counters& counts = card().counts;
  if (size == 0) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc of nothing");
  if (counts.memory + size > card().limit || (*address = map_memory(rounded(size))) == nullptr)
    return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMalloc: no memory for " + std::to_string(size) + " bytes");
  std::memset(*address, 0xFF, size);
  card().memory[*address] = size;
  counts.memory += size;
  return ACL_SUCCESS;
}

void count_copy(const void* to, const void* from, size_t size) {
  Counters& counts = card().counts;
  const bool up = on_card(to) && !on_card(from), down = !on_card(to) && on_card(from);
  counts.uploads += up;
  counts.upload_bytes += up ? size : 0;
  counts.downloads += down;
  counts.download_bytes += down ? size : 0;
}

// Waits if host memory is not page-locked, because it may be freed before the stream runs.
aclError copy_async(void* to, size_t room, const void* from, size_t size, aclrtStream handle) {
  std::unique_lock<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  REFUSE_IF(size > room, ACL_ERROR_RT_PARAM_INVALID, "a copy of more bytes than there is room for");
  const bool paged = (!on_card(to) && !within(card().pinned, to)) || (!on_card(from) && !within(card().pinned, from));
  REFUSE_IF(paged && stream->capture != nullptr, ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC,
            "a captured copy of host memory that is not page-locked");
  count_copy(to, from, size);
  const aclError error = add(stream, kCopy, {to, from}, [=] { std::memcpy(to, from, size); });
  if (error != ACL_SUCCESS || !paged) return error;
  ++card().counts.syncs;
  return wait_for_stream(stream, lock);
}

// Runs a call that blocks.
aclError blocking(const char* name, const std::function<aclError(std::unique_lock<std::mutex>&)>& run) {
  std::unique_lock<std::mutex> lock(card().mutex);
  if (const aclError error = refuse_in_capture(name)) return error;
  ++card().counts.syncs;
  return run(lock);
}

aclError synchronize(Stream* stream, const char* name) {
  return blocking(name, [=](auto& lock) -> aclError {
    REFUSE_IF(stream->capture != nullptr, ACL_ERROR_RT_STREAM_CAPTURED, std::string(name) + ": it is captured");
    return wait_for_stream(stream, lock);
  });
}

aclError destroy_stream(aclrtStream handle) {
  std::unique_lock<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  REFUSE_IF(stream->capture != nullptr, ACL_ERROR_RT_STREAM_CAPTURED, "aclrtDestroyStream: it is captured");
  const aclError error = wait_for_stream(stream, lock);
  card().streams.erase(stream->id);  // the queue is kept, because events point to it
  return error;
}

aclError create_event(aclrtEvent* event) {
  *event = new Event;
  return ACL_SUCCESS;
}

Graph* graph_of(aclmdlRI model) {
  const auto found = card().graphs.find(static_cast<Graph*>(model));
  return found == card().graphs.end() ? nullptr : found->first;
}

}  // namespace

bool is_allowed(const std::string& why) { return !allowed.empty() && why.find(allowed) != std::string::npos; }

aclError refuse(aclError code, const std::string& why) {
  recent_error = "emulated CANN: " + why;
  return code;
}

aclError submit(aclrtStream stream, const std::string& name, Addresses addresses, Work work) {
  std::lock_guard<std::mutex> lock(card().mutex);
  return add(stream_of(stream), name, std::move(addresses), std::move(work));
}

aclError submit_for_ranks(aclrtStream handle, const std::string& name, Addresses addresses, Work work) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  REFUSE_IF(stream->updating != nullptr, ACL_ERROR_STREAM_TASK_GROUP_STATUS, name + " in a task update");
  if (stream->capture != nullptr) {
    REFUSE_IF(stream->capture->open != nullptr, ACL_ERROR_STREAM_TASK_GROUP_STATUS, name + " in a task group");
    ++stream->capture->collectives;
    return add(stream, name, std::move(addresses), std::move(work));
  }
  ++card().counts.collectives;
  const aclError error = add(stream, name, std::move(addresses), std::move(work));
  want({stream, stream->submitted, nullptr});
  return error;
}

aclError take_memory(const char* name, size_t size) {
  std::lock_guard<std::mutex> lock(card().mutex);
  if (const aclError error = refuse_in_capture(name)) return error;
  REFUSE_IF(card().counts.memory + size > card().limit, ACL_ERROR_RT_MEMORY_ALLOCATION,
            std::string(name) + ": no memory for " + std::to_string(size) + " bytes");
  card().counts.memory += size;
  return ACL_SUCCESS;
}

void count_kv_read(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(card().mutex);
  card().counts.kv_bytes_read += bytes;
}

void release_memory(size_t size) {
  std::lock_guard<std::mutex> lock(card().mutex);
  card().counts.memory -= size;
}

}  // namespace cann

using namespace cann;

extern "C" {

// Functions for `card.py`.
void emulated_cann_counters(uint64_t* to) {
  std::lock_guard<std::mutex> lock(card().mutex);
  card().counts.graphs = card().graphs.size();
  std::memcpy(to, &card().counts, sizeof(Counters));
}

// Starts or stops tracing launches.
void emulated_cann_trace(bool on) {
  std::lock_guard<std::mutex> lock(card().mutex);
  card().traces = on;
  if (on) card().trace.clear();
}

// Copies as much of the trace as fits, and returns its full size.
uint64_t emulated_cann_traced(char* to, uint64_t room) {
  std::lock_guard<std::mutex> lock(card().mutex);
  const uint64_t size = card().trace.size();
  std::memcpy(to, card().trace.data(), std::min(room, size));
  if (room >= size) card().trace = {};
  return size;
}

// Copies (tasks, replays) for as many captured graphs as fit, in capture order, and returns the number of graphs.
uint64_t emulated_cann_graphs(uint64_t* to, uint64_t room) {
  std::lock_guard<std::mutex> lock(card().mutex);
  const auto& captured = card().captured;
  for (uint64_t i = 0; i < std::min<uint64_t>(room, captured.size()); ++i) {
    to[2 * i] = captured[i].tasks;
    to[2 * i + 1] = captured[i].replays;
  }
  return captured.size();
}

// For tests: limits the card's memory.
void emulated_cann_limit_memory(uint64_t limit) {
  std::lock_guard<std::mutex> lock(card().mutex);
  card().limit = limit;
}

// For tests: disables the refusals whose reason contains these words. Without words, it enables all of them.
void emulated_cann_allow(const char* words) { allowed = words; }

void emulated_cann_compute(bool computes) {
  std::unique_lock<std::mutex> lock(card().mutex);
  wait_for_all(lock);
  card().computes = computes;
}

// ---- process and device ----

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() { return recent_error.c_str(); }

void aclAppLog(aclLogLevel level, const char*, const char*, uint32_t, const char* format, ...) {
  if (level < ACL_WARNING) return;
  va_list arguments;
  va_start(arguments, format);
  std::fputs("emulated CANN: torch_npu logs: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
}

aclError aclrtSetDevice(int32_t device) {
  std::lock_guard<std::mutex> lock(card().mutex);
  REFUSE_IF(device < 0 || device >= kCards, ACL_ERROR_RT_INVALID_DEVICEID, "there is no such card");
  REFUSE_IF(card().device >= 0 && card().device != device, ACL_ERROR_RT_INVALID_DEVICEID,
            "a process of this emulator has one card");
  card().device = device;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (card().device < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "no card was set");
  *device = card().device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = kCards;
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() { return kName; }

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  *active = device == card().device;
  return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (card().device < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "no card was set");
  *context = &card();
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext) { return ACL_SUCCESS; }

aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, "9.1.0");
  return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strcpy(version->version, "9.1.0");
  std::strcpy(version->majorVersion, "9");
  std::strcpy(version->minorVersion, "1");
  std::strcpy(version->releaseVersion, "0");
  return ACL_SUCCESS;
}

aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *list = all;
  *count = std::size(all);
  return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  *value = 1;
  return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
  *value = what == ACL_DEVICE_INFO_L2_SIZE ? 192 << 20 : what == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 40 : 20;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t* value) {
  switch (what) {
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 20; return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = kMemory; return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192 << 20; return ACL_SUCCESS;
    default: return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtGetDeviceInfo of " + std::to_string(what));
  }
}

// Options for the operator compiler, which does not exist here.
size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof "disable"; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  std::snprintf(value, length, "disable");
  return ACL_SUCCESS;
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  *actual = timeout;
  return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

// ---- memory ----

aclError aclrtMalloc(void** address, size_t size, aclrtMemMallocPolicy) { return allocate(address, size); }
aclError aclrtMallocAlign32(void** address, size_t size, aclrtMemMallocPolicy) { return allocate(address, size); }
aclError aclrtMallocWithCfg(void** address, size_t size, aclrtMemMallocPolicy, aclrtMallocConfig*) {
  return allocate(address, size);
}

aclError aclrtFree(void* address) {
  std::unique_lock<std::mutex> lock(card().mutex);
  const auto found = card().memory.find(address);
  if (found == card().memory.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree of what was not allocated");
  wait_for_all(lock);
  lose(static_cast<const char*>(address), found->second);
  munmap(address, rounded(found->second));
  card().counts.memory -= found->second;
  card().given_back[address] = std::max(card().given_back[address], found->second);
  card().memory.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** address, size_t size) {
  std::lock_guard<std::mutex> lock(card().mutex);
  if ((*address = map_memory(rounded(size))) == nullptr)
    return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocHost: no memory");
  card().pinned[*address] = rounded(size);
  return ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void** address, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(address, size);
}

aclError aclrtFreeHost(void* address) {
  std::unique_lock<std::mutex> lock(card().mutex);
  const auto found = card().pinned.find(address);
  if (found == card().pinned.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost of what was not allocated");
  wait_for_all(lock);
  munmap(address, found->second);
  card().pinned.erase(found);
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> lock(card().mutex);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->location.type = on_card(address)                   ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : within(card().pinned, address) ? ACL_MEM_LOCATION_TYPE_HOST
                                                               : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(card().mutex);
  *total = card().limit;
  *free = card().limit - std::min<size_t>(card().limit, card().counts.memory);
  return ACL_SUCCESS;
}

// Waits for no stream. Callers that copy a stream's results wait for the stream first.
aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind) {
  return blocking("aclrtMemcpy", [=](auto&) -> aclError {
    REFUSE_IF(size > room, ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy of more bytes than there is room for");
    count_copy(to, from, size);
    std::memcpy(to, from, size);
    return fault();
  });
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind, aclrtStream stream) {
  return copy_async(to, room, from, size, stream);
}

aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind,
                                       aclrtStream stream) {
  return copy_async(to, room, from, size, stream);
}

aclError aclrtMemset(void* at, size_t room, int32_t value, size_t size) {
  return blocking("aclrtMemset", [=](auto& lock) -> aclError {
    REFUSE_IF(size > room, ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset of more bytes than there is room for");
    const aclError error = wait_for_all(lock);
    std::memset(at, value, size);
    return error;
  });
}

aclError aclrtMemsetAsync(void* at, size_t room, int32_t value, size_t size, aclrtStream stream) {
  REFUSE_IF(size > room, ACL_ERROR_RT_PARAM_INVALID, "aclrtMemsetAsync of more bytes than there is room for");
  return submit(stream, "memsetAsync", {at}, [=] { std::memset(at, value, size); });
}

// ---- streams and events ----

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  std::lock_guard<std::mutex> lock(card().mutex);
  auto* made = new Stream;
  made->id = card().next_stream++;
  card().streams[made->id] = made;
  *stream = made;
  return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) { return destroy_stream(stream); }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return destroy_stream(stream); }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_of(stream)->id;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream_of(stream), "aclrtSynchronizeStream"); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
aclError aclrtSynchronizeDevice() {
  return blocking("aclrtSynchronizeDevice", [](auto& lock) { return wait_for_all(lock); });
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  REFUSE_IF(stream->capture != nullptr, ACL_ERROR_RT_STREAM_CAPTURED, "aclrtStreamQuery: it is captured");
  const bool done = stream->done >= stream->submitted;
  *status = done ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  if (done) host_waited_for(stream, stream->submitted, stream->past);
  nudge(stream);
  return fault();
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return create_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return create_event(event); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(stream_handle);
  auto* event = static_cast<Event*>(handle);
  event->captured = stream->capture;
  if (stream->capture != nullptr) {
    event->mark = {stream, stream->capture->operations, nullptr};
    return ACL_SUCCESS;
  }
  auto time = std::make_shared<Clock::time_point>();
  event->mark = push(stream, [time] { *time = Clock::now(); });
  event->mark.time = time;
  event->past = stream->past;
  return fault();
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(stream_handle);
  const auto* event = static_cast<Event*>(handle);
  if (event->captured != nullptr) {  // this stream joins the capture, or the capture joins this stream
    REFUSE_IF(card().capturing.count(event->captured) == 0, ACL_ERROR_RT_EVENT_CAPTURED,
              "aclrtStreamWaitEvent: the event is of a capture that ended");
    REFUSE_IF(stream->capture != nullptr && stream->capture != event->captured, ACL_ERROR_STREAM_CAPTURE_CONFLICT,
              "aclrtStreamWaitEvent: the event is of another capture");
    Graph& graph = *event->captured;
    graph.streams.insert(stream);
    stream->capture = &graph;
    const auto joined = graph.unjoined.find(event->mark.stream);
    if (stream == event->mark.stream || joined == graph.unjoined.end() || joined->second > event->mark.position)
      return ACL_SUCCESS;
    graph.unjoined.erase(joined);
    if (stream != graph.origin) graph.unjoined[stream] = ++graph.operations;  // this stream now has to be joined
    return ACL_SUCCESS;
  }
  REFUSE_IF(stream->capture != nullptr && event->mark.stream != nullptr, ACL_ERROR_RT_CAPTURE_DEPENDENCY,
            "aclrtStreamWaitEvent: captured work waits for what is outside");
  if (event->mark.stream != nullptr) {
    push(stream, nullptr, event->mark);
    merge(stream->past, event->past);
    merge(stream->past, {{event->mark.stream, event->mark.position}});
  }
  return fault();
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  std::unique_lock<std::mutex> lock(card().mutex);
  const auto* event = static_cast<Event*>(handle);
  if (event->captured != nullptr) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "aclrtSynchronizeEvent: it is captured");
  if (const aclError error = refuse_in_capture("aclrtSynchronizeEvent")) return error;
  ++card().counts.syncs;
  const Mark mark = event->mark;  // during the wait, other threads may record the event again or destroy it
  const Past past = event->past;
  if (mark.stream == nullptr) return ACL_SUCCESS;
  const aclError error = wait_for(mark, lock);
  host_waited_for(mark.stream, mark.position, past);
  return error;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  std::lock_guard<std::mutex> lock(card().mutex);
  const auto* event = static_cast<Event*>(handle);
  if (event->captured != nullptr) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "aclrtQueryEventStatus: it is captured");
  const Mark& mark = event->mark;
  const bool done = mark.stream == nullptr || mark.stream->done >= mark.position;
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  if (!done) nudge(mark.stream);
  if (done && mark.stream != nullptr) host_waited_for(mark.stream, mark.position, event->past);
  return fault();
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  aclrtEventRecordedStatus recorded;
  const aclError error = aclrtQueryEventStatus(handle, &recorded);
  *status = recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE ? ACL_EVENT_WAIT_STATUS_COMPLETE
                                                           : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return error;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start_handle, aclrtEvent end_handle) {
  std::unique_lock<std::mutex> lock(card().mutex);
  const Mark start = static_cast<Event*>(start_handle)->mark, end = static_cast<Event*>(end_handle)->mark;
  if (start.time == nullptr || end.time == nullptr)
    return refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime of events that were not recorded");
  wait_for(start, lock);
  const aclError error = wait_for(end, lock);
  *milliseconds = std::chrono::duration<float, std::milli>(*end.time - *start.time).count();
  return error;
}

// ---- graphs ----

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  REFUSE_IF(stream == &card().default_stream, ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT,
            "aclmdlRICaptureBegin on the default stream");
  REFUSE_IF(stream->capture != nullptr, ACL_ERROR_RT_STREAM_CAPTURED, "aclmdlRICaptureBegin: it is captured");
  auto graph = std::make_shared<Graph>();
  graph->id = card().next_graph++;
  graph->origin = stream;
  graph->streams = {stream};
  graph->thread = std::this_thread::get_id();
  graph->mode = mode;
  stream->capture = graph.get();
  card().capturing.insert(graph.get());
  card().graphs[graph.get()] = graph;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* model) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Graph* graph = stream_of(handle)->capture;
  if (graph == nullptr) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "aclmdlRICaptureEnd: the stream is not captured");
  REFUSE_IF(graph->origin != stream_of(handle), ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
            "aclmdlRICaptureEnd on a stream that joined later");
  for (Stream* stream : graph->streams) stream->capture = nullptr;
  card().capturing.erase(graph);
  *model = graph;
  REFUSE_IF(!graph->unjoined.empty(), ACL_ERROR_RT_STREAM_UNJOINED,
            "aclmdlRICaptureEnd: a stream was not joined again");
  REFUSE_IF(graph->open != nullptr, ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group was not ended");
  ++card().counts.captures;
  graph->counts = &card().captured.emplace_back(GraphCounts{graph->nodes.size(), 0});
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Graph* graph = stream_of(handle)->capture;
  *status = graph == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
  if (model != nullptr) *model = graph;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t* id) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Graph* graph = graph_of(model);
  if (graph == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIGetId of a graph that is gone");
  *id = graph->id;
  return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Graph* graph = graph_of(model);
  if (graph == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIExecuteAsync of a graph that is gone");
  Stream* stream = stream_of(handle);
  REFUSE_IF(card().capturing.count(graph) != 0 || stream->capture != nullptr, ACL_ERROR_RT_MODEL_CAPTURED,
            "aclmdlRIExecuteAsync while it, or the stream, is captured");
  REFUSE_IF(graph->counts == nullptr, ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIExecuteAsync of a capture that failed");
  REFUSE_IF(!graph->lost.empty(), ACL_ERROR_RT_AICORE_EXCEPTION,
            "aclmdlRIExecuteAsync: memory that " + graph->lost + " uses was given back");
  for (const Node& node : graph->nodes) {
    if (node.group == nullptr) continue;
    REFUSE_IF(!node.group->lost.empty(), ACL_ERROR_RT_AICORE_EXCEPTION,
              "aclmdlRIExecuteAsync: memory that " + node.group->lost + " uses was given back");
    REFUSE_IF(!follows(stream, node.group->updated), ACL_ERROR_RT_MODEL_EXECUTE,
              "aclmdlRIExecuteAsync on a stream that did not wait for the last update of its tasks");
  }
  ++card().counts.replays;
  card().counts.replayed += graph->nodes.size();
  ++graph->counts->replays;
  note("graph");
  for (const Node& node : graph->nodes) {
    if (node.group == nullptr) note("  " + node.name);
    if (node.group != nullptr)
      for (const std::string& name : node.group->names) note("  " + name);
  }
  card().counts.collectives += graph->collectives;
  const Mark run = push(stream, [graph = card().graphs[graph]] {
    for (const Node& node : graph->nodes) {
      if (node.group == nullptr) {
        node.run();
      } else {
        for (const Work& work : node.group->works) work();
      }
    }
  });
  for (const Node& node : graph->nodes)
    if (node.group != nullptr) node.group->ran = run;
  if (graph->collectives != 0) want(run);
  return fault();
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  std::lock_guard<std::mutex> lock(card().mutex);
  if (const aclError error = refuse_in_capture("aclmdlRIDestroy")) return error;
  Graph* graph = graph_of(model);
  if (graph == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "aclmdlRIDestroy of a graph that is gone");
  card().graphs.erase(graph);  // runs in progress keep the graph
  return ACL_SUCCESS;
}

// ---- task groups ----

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Graph* graph = stream_of(handle)->capture;
  if (graph == nullptr) return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group on a stream that is not captured");
  REFUSE_IF(graph->open != nullptr, ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group in another");
  graph->open = std::make_shared<Group>();
  graph->nodes.push_back({"task group", nullptr, graph->open, {}});
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Graph* graph = stream_of(handle)->capture;
  if (graph == nullptr || graph->open == nullptr)
    return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the end of a task group that did not begin");
  *group = graph->open.get();
  card().groups[*group] = graph->open;
  graph->open = nullptr;
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  REFUSE_IF(stream->capture != nullptr, ACL_ERROR_RT_STREAM_CAPTURED, "a task update on a captured stream");
  REFUSE_IF(stream->updating != nullptr, ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task update in another");
  const auto found = card().groups.find(group);
  std::shared_ptr<Group> live = found == card().groups.end() ? nullptr : found->second.lock();
  if (live == nullptr) return refuse(ACL_ERROR_RT_PARAM_INVALID, "a task update of a group that is gone");
  REFUSE_IF(!follows(stream, live->ran), ACL_ERROR_RT_MODEL_UPDATE_FAILED,
            "a task update on a stream that did not wait for the last run of its graph");
  stream->ran_before_update = live->ran;
  stream->updating = std::move(live);
  stream->names.clear();
  stream->works.clear();
  stream->addresses.clear();
  return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  std::lock_guard<std::mutex> lock(card().mutex);
  Stream* stream = stream_of(handle);
  const std::shared_ptr<Group> group = std::move(stream->updating);
  stream->updating = nullptr;
  if (group == nullptr) return refuse(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the end of a task update that did not begin");
  REFUSE_IF(stream->names != group->names, ACL_ERROR_RT_MODEL_UPDATE_FAILED,
            "a task update is not of the tasks of its group");
  const Mark& before = stream->ran_before_update;
  REFUSE_IF(group->ran.stream != before.stream || group->ran.position != before.position,
            ACL_ERROR_RT_MODEL_UPDATE_FAILED, "its graph ran during a task update");
  ++card().counts.task_updates;
  group->updated = push(stream, [group, works = std::move(stream->works)] { group->works = works; });
  group->addresses = std::move(stream->addresses);
  group->lost.clear();
  for (size_t i = 0; i < group->addresses.size(); ++i)
    if (std::any_of(group->addresses[i].begin(), group->addresses[i].end(), is_gone)) group->lost = group->names[i];
  return fault();
}

}  // extern "C"
