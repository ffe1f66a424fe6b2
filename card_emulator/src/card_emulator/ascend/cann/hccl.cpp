// HCCL in the emulated CANN. Ranks are processes on one machine, which exchange pieces of data through shared memory.
//
// A collective is queued in its stream like other work. Because other ranks wait for it, it starts without waiting for the
// program to need the stream's results. If ranks call different collectives, or use different sizes, the run ends with an
// error that shows both calls.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace cann {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMostRanks = 8;
constexpr size_t kPiece = 1 << 20;  // the number of bytes that a rank shares at a time
constexpr size_t kDescription = 128;
// On a card, each communicator has two buffers of HCCL_BUFFSIZE (200 MB) each.
constexpr size_t kBuffers = 2ull * HCCL_COMM_DEFAULT_BUFFSIZE * 1000 * 1000;
constexpr auto kPatience = std::chrono::seconds(1836);  // the default of HCCL_EXEC_TIMEOUT

struct Shared {
  struct Rank {
    std::atomic<uint64_t> shown, read;  // the number of the last round
    std::atomic<int32_t> process;       // 0 until the rank has joined
    char what[kDescription];
  } ranks[kMostRanks];
};

constexpr size_t kHeader = (sizeof(Shared) + 4095) / 4096 * 4096;

struct Root {
  int32_t process, file;
};

struct Communicator {
  uint32_t rank, size;
  std::string name;
  Shared* shared = nullptr;
  uint64_t rounds = 0;

  ~Communicator() { munmap(shared, kHeader + size * kPiece); }

  char* piece(uint32_t of) const { return reinterpret_cast<char*>(shared) + kHeader + of * kPiece; }

  void wait(const char* what, const std::function<bool(const Shared::Rank&)>& ready) const {
    const auto end = Clock::now() + kPatience;
    auto look = Clock::now() + std::chrono::seconds(1);
    for (uint32_t of = 0; of < size; ++of) {
      for (int turn = 0; !ready(shared->ranks[of]); ++turn) {
        if (turn < 100) {
          std::this_thread::yield();
          continue;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (Clock::now() < look) continue;
        look = Clock::now() + std::chrono::seconds(1);
        const int32_t process = shared->ranks[of].process;
        if (process != 0 && kill(process, 0) != 0)
          throw std::runtime_error(std::string(what) + ": the process of rank " + std::to_string(of) + " has ended");
        if (Clock::now() > end)
          throw std::runtime_error(std::string(what) + ": rank " + std::to_string(of) + " did not come");
      }
    }
  }

  // Runs one round: this rank shares `bytes`, and `use` may read what the other ranks share.
  void round(const std::string& what, const void* bytes, size_t count, const std::function<void()>& use) {
    const uint64_t now = ++rounds;
    Shared::Rank& own = shared->ranks[rank];
    wait(what.c_str(), [now](const Shared::Rank& of) { return of.read >= now - 1; });
    if (count != 0) std::memcpy(piece(rank), bytes, count);
    std::snprintf(own.what, kDescription, "%s", what.c_str());
    own.shown = now;
    wait(what.c_str(), [now](const Shared::Rank& of) { return of.shown >= now; });
    for (uint32_t of = 0; of < size; ++of) {
      if (std::strncmp(shared->ranks[of].what, own.what, kDescription) != 0)
        throw std::runtime_error(std::string("rank ") + std::to_string(rank) + " calls " + own.what + ", rank " +
                                 std::to_string(of) + " " + shared->ranks[of].what);
    }
    use();
    own.read = now;
  }

  // Exchanges data in pieces. `send` is null if the rank has nothing to share. `use(offset, count)` takes bytes.
  void exchange(const std::string& what, const void* send, size_t bytes,
                const std::function<void(size_t, size_t)>& use) {
    size_t offset = 0;
    do {
      const size_t count = std::min(kPiece, bytes - offset);
      const char* from = static_cast<const char*>(send);
      round(what, from == nullptr ? from : from + offset, from == nullptr ? 0 : count, [&] { use(offset, count); });
      offset += count;
    } while (offset < bytes);
  }

  // Reduces the pieces in rank order, so that all ranks get the same bits.
  void reduce(void* to, size_t bytes, at::ScalarType dtype, HcclReduceOp op) const {
    const auto count = static_cast<int64_t>(bytes / c10::elementSize(dtype));
    at::Tensor sum = at::from_blob(to, {count}, dtype);
    sum.copy_(at::from_blob(piece(0), {count}, dtype));
    for (uint32_t of = 1; of < size; ++of) {
      const at::Tensor other = at::from_blob(piece(of), {count}, dtype);
      switch (op) {
        case HCCL_REDUCE_SUM: sum.add_(other); break;
        case HCCL_REDUCE_PROD: sum.mul_(other); break;
        case HCCL_REDUCE_MAX: at::maximum_out(sum, sum, other); break;
        default: at::minimum_out(sum, sum, other);
      }
    }
  }
};

using Handle = std::shared_ptr<Communicator>;

const Handle& of(HcclComm comm) { return *static_cast<Handle*>(comm); }

HcclResult refused(HcclResult code, const std::string& why) {
  refuse(code, why);
  return code;
}

at::ScalarType dtype_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return at::kChar;
    case HCCL_DATA_TYPE_INT16: return at::kShort;
    case HCCL_DATA_TYPE_INT32: return at::kInt;
    case HCCL_DATA_TYPE_INT64: return at::kLong;
    case HCCL_DATA_TYPE_UINT8: return at::kByte;
    case HCCL_DATA_TYPE_FP16: return at::kHalf;
    case HCCL_DATA_TYPE_FP32: return at::kFloat;
    case HCCL_DATA_TYPE_FP64: return at::kDouble;
    case HCCL_DATA_TYPE_BFP16: return at::kBFloat16;
    default: TORCH_CHECK(false, "collectives of dtype ", static_cast<int>(type), " are not emulated");
  }
}

using Run = std::function<void(Communicator&, const std::string& what, size_t bytes)>;

HcclResult start(const char* name, Addresses addresses, uint64_t count, HcclDataType type, HcclComm comm,
                 aclrtStream stream, Run run) {
  at::ScalarType dtype;
  try {
    dtype = dtype_of(type);
  } catch (const c10::Error& error) {
    return refused(HCCL_E_NOT_SUPPORT, std::string(name) + ": " + error.what_without_backtrace());
  }
  const size_t bytes = count * c10::elementSize(dtype);
  const std::string what = std::string(name) + " of " + std::to_string(count) + " " + c10::toString(dtype);
  const aclError error = submit_for_ranks(stream, name, addresses, [run, what, bytes, communicator = of(comm)] {
    const c10::InferenceMode guard;
    run(*communicator, what, bytes);
  });
  return error == ACL_SUCCESS ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

// hccl.h lists the dtypes that can be reduced.
std::optional<HcclResult> why_not_reduced(const char* name, HcclDataType type, HcclReduceOp op) {
  if (op > HCCL_REDUCE_MIN) return refused(HCCL_E_PARA, std::string(name) + " by " + std::to_string(op));
  const std::string why = std::string(name) + " reduces no values of dtype " + std::to_string(type);
  const bool other = type == HCCL_DATA_TYPE_INT64 || type == HCCL_DATA_TYPE_UINT8 || type == HCCL_DATA_TYPE_FP64;
  if (other && !is_allowed(why)) return refused(HCCL_E_NOT_SUPPORT, why);
  return std::nullopt;
}

}  // namespace
}  // namespace cann

using namespace cann;

extern "C" {

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }  // sums are always deterministic
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  // The file has no name, so it disappears when the last rank closes it.
  const int file = memfd_create("hccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kHeader + kMostRanks * kPiece) != 0)
    return refused(HCCL_E_MEMORY, "HcclGetRootInfo: no memory that ranks can share");
  std::memset(info, 0, sizeof *info);
  new (info->internal) Root{getpid(), file};
  return HCCL_SUCCESS;
}

// Returns once all ranks have joined.
HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
  if (size == 0 || size > kMostRanks || rank >= size)
    return refused(HCCL_E_PARA, "HcclCommInitRootInfo of " + std::to_string(size) + " ranks");
  Root root;
  std::memcpy(&root, info->internal, sizeof root);
  const bool own = root.process == getpid();
  const std::string path = "/proc/" + std::to_string(root.process) + "/fd/" + std::to_string(root.file);
  const int file = own ? root.file : open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return refused(HCCL_E_OPEN_FILE_FAILURE, "HcclCommInitRootInfo: the root's process has ended");
  void* found = mmap(nullptr, kHeader + size * kPiece, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (!own) close(file);
  if (found == MAP_FAILED) return refused(HCCL_E_MEMORY, "HcclCommInitRootInfo: no memory");
  if (const aclError error = take_memory("HcclCommInitRootInfo", kBuffers)) {
    munmap(found, kHeader + size * kPiece);
    return error == ACL_ERROR_RT_MEMORY_ALLOCATION ? HCCL_E_OOM : HCCL_E_RUNTIME;
  }
  auto made = std::make_shared<Communicator>();
  made->rank = rank;
  made->size = size;
  made->name = "hccl-" + std::to_string(root.process) + "-" + std::to_string(root.file);
  made->shared = static_cast<Shared*>(found);
  made->shared->ranks[rank].process = getpid();
  try {
    made->wait("HcclCommInitRootInfo", [](const Shared::Rank& of) { return of.process != 0; });
  } catch (const std::runtime_error& error) {
    return refused(HCCL_E_TIMEOUT, error.what());
  }
  if (own) close(file);
  *comm = new Handle(std::move(made));
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* comm) {
  return HcclCommInitRootInfo(size, info, rank, comm);
}

// Pending collectives keep the shared memory alive.
HcclResult HcclCommDestroy(HcclComm comm) {
  release_memory(kBuffers);
  delete static_cast<Handle*>(comm);
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::strcpy(name, of(comm)->name.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;  // a failure is reported as an error of the stream
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  if (const auto refusal = why_not_reduced("HcclAllReduce", type, op)) return *refusal;
  const Addresses used{from, to};
  return start("HcclAllReduce", used, count, type, comm, stream, [=](Communicator& ranks, const std::string& what, size_t size) {
    ranks.exchange(what + " by " + std::to_string(op), from, size, [&](size_t offset, size_t bytes) {
      ranks.reduce(static_cast<char*>(to) + offset, bytes, dtype_of(type), op);
    });
  });
}

HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream) {
  const char* const name = "HcclReduceScatter";
  if (const auto refusal = why_not_reduced(name, type, op)) return *refusal;
  return start(name, {from, to}, count, type, comm, stream, [=](Communicator& ranks, const std::string& what, size_t size) {
    for (uint32_t target = 0; target < ranks.size; ++target) {
      const char* const part = static_cast<char*>(from) + target * size;
      ranks.exchange(what + " by " + std::to_string(op), part, size, [&](size_t offset, size_t bytes) {
        if (target == ranks.rank) ranks.reduce(static_cast<char*>(to) + offset, bytes, dtype_of(type), op);
      });
    }
  });
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  const Addresses used{from, to};
  return start("HcclAllGather", used, count, type, comm, stream, [=](Communicator& ranks, const std::string& what, size_t size) {
    ranks.exchange(what, from, size, [&](size_t offset, size_t bytes) {
      for (uint32_t rank = 0; rank < ranks.size; ++rank)
        std::memcpy(static_cast<char*>(to) + rank * size + offset, ranks.piece(rank), bytes);
    });
  });
}

HcclResult HcclBroadcast(void* at, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  if (root >= of(comm)->size) return refused(HCCL_E_PARA, "HcclBroadcast from rank " + std::to_string(root));
  return start("HcclBroadcast", {at}, count, type, comm, stream, [=](Communicator& ranks, const std::string& what, size_t size) {
    const bool sends = ranks.rank == root;
    ranks.exchange(what + " from rank " + std::to_string(root), sends ? at : nullptr, size, [&](size_t offset, size_t bytes) {
      if (!sends) std::memcpy(static_cast<char*>(at) + offset, ranks.piece(root), bytes);
    });
  });
}

}  // extern "C"
