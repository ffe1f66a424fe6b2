// What the parts of the emulated CANN share: streams as queues that run late, on a thread of the card's own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_rt.h"

namespace cann {

using Work = std::function<void()>;

// Where work reads and writes.
using Addresses = std::vector<const void*>;

// Puts work into a stream: it runs when somebody waits for it, is recorded while the stream is captured, or replaces
// recorded work during a task update. Returns an error of the documentation, ACL_SUCCESS otherwise.
aclError submit(aclrtStream stream, const std::string& name, Addresses addresses, Work work);

// The same for a collective. Other ranks wait for it, so it begins by itself, with all that it depends on.
aclError submit_for_ranks(aclrtStream stream, const std::string& name, Addresses addresses, Work work);

// Memory of the card that CANN keeps for itself.
aclError take_memory(const char* name, size_t size);
void release_memory(size_t size);

// What an operator reads of paged keys and values, when it runs.
void count_kv_read(uint64_t bytes);

// Remembers why, for aclGetRecentErrMsg, and returns the code.
aclError refuse(aclError code, const std::string& why);

// Whether a test has switched off what is refused for this reason.
bool is_allowed(const std::string& why);

}  // namespace cann

// A rule, without which the program would go on. What could not go on, such as a handle of nothing, calls `refuse`.
#define REFUSE_IF(condition, code, why) \
  if ((condition) && !cann::is_allowed(why)) return cann::refuse(code, why)
