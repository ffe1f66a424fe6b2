// What the parts of the emulated CANN share: streams as queues that run late, on a thread of the card's own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "acl/acl.h"
#include "acl/acl_rt.h"

namespace cann {

using Work = std::function<void()>;

// Puts work into a stream: it runs when somebody waits for it, is recorded while the stream is captured, or replaces
// recorded work during a task update. Returns an error of the documentation, ACL_SUCCESS otherwise.
aclError submit(aclrtStream stream, const std::string& name, Work work);

// Remembers why, for aclGetRecentErrMsg, and returns the code.
aclError refuse(aclError code, const std::string& why);

}  // namespace cann
