// Reports operations that torch_npu runs on the host because it has no kernel for them. All of them call torch's function
// `at::native::cpu_fallback`. This library is loaded before torch_npu, so its version of the function is found first.

#include <ATen/native/CPUFallback.h>
#include <dlfcn.h>

#include <atomic>

namespace {

using Fallback = void (*)(const c10::OperatorHandle&, torch::jit::Stack*, bool, c10::DispatchKey);

std::atomic<void (*)(const char*)> report{nullptr};

}  // namespace

// Sets the function in `card.py` that is called with the name of each operation before it runs.
extern "C" void emulated_cann_on_fallback(void (*callback)(const char*)) { report = callback; }

namespace at::native {

void cpu_fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack, bool error_on_views,
                  c10::DispatchKey cpu_dispatch_key) {
  static const auto torchs =
      reinterpret_cast<Fallback>(dlsym(RTLD_NEXT, "_ZN2at6native12cpu_fallbackERKN3c1014OperatorHandleE"
                                                  "PSt6vectorINS1_6IValueESaIS6_EEbNS1_11DispatchKeyE"));
  TORCH_CHECK(torchs != nullptr, "this torch has another cpu_fallback");
  if (const auto callback = report.load()) callback(c10::toString(operation.operator_name()).c_str());
  torchs(operation, stack, error_on_views, cpu_dispatch_key);
}

}  // namespace at::native
