// Declarations shared by the emulated CANN: streams are queues that run late, on the card's own thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_rt.h"

namespace cann {

using Work = std::function<void()>;

// The addresses that a piece of work reads and writes.
using Addresses = std::vector<const void*>;

// Adds work to a stream. It runs when somebody waits for it, is recorded while the stream is captured, or replaces
// recorded work during a task update. Returns a documented error, or ACL_SUCCESS.
aclError submit(aclrtStream stream, const std::string& name, Addresses addresses, Work work);

// Adds a collective. Because other ranks wait for it, it starts by itself, after the work that it depends on.
aclError submit_for_ranks(aclrtStream stream, const std::string& name, Addresses addresses, Work work);

// Memory on the card that CANN itself uses.
aclError take_memory(const char* name, size_t size);
void release_memory(size_t size);

// Counts the paged keys and values that an operator reads when it runs.
void count_kv_read(uint64_t bytes);

// Stores the reason for aclGetRecentErrMsg, and returns the code.
aclError refuse(aclError code, const std::string& why);

// Returns whether a test has disabled refusals for this reason.
bool is_allowed(const std::string& why);

}  // namespace cann

// A rule that a test can disable, after which the program continues. Use `refuse` where it could not continue, as with
// an invalid handle.
#define REFUSE_IF(condition, code, why) \
  if ((condition) && !cann::is_allowed(why)) return cann::refuse(code, why)
