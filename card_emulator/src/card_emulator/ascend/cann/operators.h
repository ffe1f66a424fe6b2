// How to write an operator for the emulated CANN: its name, its arguments in the order of the documentation, and its
// computation with ATen.
//
//   OPERATOR(Add, (TENSOR(a), TENSOR(b), SCALAR(alpha), TENSOR(out)), put(out, at::add(a, b, alpha)))
//
// creates the two functions that torch_npu looks up, `aclnnAddGetWorkspaceSize` and `aclnnAdd`. In the last part, arguments
// are ATen's: `a` is an at::Tensor on the card's memory, or undefined if it was not passed.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime.h"

struct aclTensor {
  at::Tensor tensor;
};
struct aclScalar {
  at::Scalar scalar;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<at::Tensor> tensors;
};
struct aclScalarList {
  std::vector<at::Scalar> scalars;
};
struct aclOpExecutor {
  std::string name;
  uint64_t workspace;
  cann::Addresses addresses;
  cann::Work work;
};

namespace cann {

at::ScalarType dtype_of(aclDataType type);

// Addresses that the operator being planned uses.
extern thread_local Addresses taken_addresses;

// Takes the contents of an argument, because the argument is destroyed once the operator has been planned.
inline at::Tensor take(const aclTensor* raw) {
  if (raw == nullptr) return {};
  taken_addresses.push_back(raw->tensor.const_data_ptr());
  return raw->tensor;
}
inline std::optional<at::Scalar> take(const aclScalar* raw) {
  return raw == nullptr ? std::nullopt : std::optional<at::Scalar>(raw->scalar);
}
inline std::vector<at::Tensor> take(const aclTensorList* raw) {
  if (raw == nullptr) return {};
  for (const at::Tensor& tensor : raw->tensors)
    if (tensor.defined()) taken_addresses.push_back(tensor.const_data_ptr());
  return raw->tensors;
}
inline std::optional<std::vector<int64_t>> take(const aclIntArray* raw) {
  return raw == nullptr ? std::nullopt : std::optional<std::vector<int64_t>>(raw->values);
}
inline std::string take(const char* raw) { return raw == nullptr ? "" : raw; }

// Stores an operator's result, which must have the shape and dtype that the caller expects.
inline void put(at::Tensor& out, const at::Tensor& value) {
  TORCH_CHECK(out.sizes() == value.sizes(), "a result of ", value.sizes(), " where ", out.sizes(), " is expected");
  out.copy_(value);
}

int plan(const char* name, uint64_t workspace, uint64_t* size, aclOpExecutor** executor, const std::function<Work()>& make);
int launch(const void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream);

}  // namespace cann

#define RAW_TENSOR(name) const aclTensor *name##_raw,
#define RAW_SCALAR(name) const aclScalar *name##_raw,
#define RAW_MAYBE_SCALAR(name) const aclScalar *name##_raw,
#define RAW_TENSORS(name) const aclTensorList *name##_raw,
#define RAW_INTS(name) const aclIntArray *name##_raw,
#define RAW_TEXT(name) const char *name##_raw,
#define RAW_DTYPE(name) int name##_raw,
#define RAW_INT(name) int64_t name##_raw,
#define RAW_INT8(name) int8_t name##_raw,
#define RAW_BOOL(name) bool name##_raw,
#define RAW_DOUBLE(name) double name##_raw,
#define RAW_FLOAT(name) float name##_raw,

#define TAKE_TENSOR(name) name = cann::take(name##_raw),
#define TAKE_SCALAR(name) name = cann::take(name##_raw).value(),
#define TAKE_MAYBE_SCALAR(name) name = cann::take(name##_raw),
#define TAKE_TENSORS(name) name = cann::take(name##_raw),
#define TAKE_INTS(name) name = cann::take(name##_raw),
#define TAKE_TEXT(name) name = cann::take(name##_raw),
#define TAKE_DTYPE(name) name = cann::dtype_of(static_cast<aclDataType>(name##_raw)),
#define TAKE_INT(name) name = name##_raw,
#define TAKE_INT8(name) name = name##_raw,
#define TAKE_BOOL(name) name = name##_raw,
#define TAKE_DOUBLE(name) name = name##_raw,
#define TAKE_FLOAT(name) name = name##_raw,

// EACH(prefix, a, b, ...) expands to prefix##a prefix##b ...
#define PARENS ()
#define EXPAND(...) EXPAND1(EXPAND1(EXPAND1(EXPAND1(__VA_ARGS__))))
#define EXPAND1(...) EXPAND2(EXPAND2(EXPAND2(EXPAND2(__VA_ARGS__))))
#define EXPAND2(...) EXPAND3(EXPAND3(EXPAND3(EXPAND3(__VA_ARGS__))))
#define EXPAND3(...) __VA_ARGS__
#define EACH(prefix, ...) __VA_OPT__(EXPAND(EACH_STEP(prefix, __VA_ARGS__)))
#define EACH_STEP(prefix, first, ...) prefix##first __VA_OPT__(EACH_AGAIN PARENS(prefix, __VA_ARGS__))
#define EACH_AGAIN() EACH_STEP
#define UNWRAP(...) __VA_ARGS__

#define OPERATOR(NAME, ARGUMENTS, ...) CHECKED_OPERATOR(NAME, ARGUMENTS, 0, , __VA_ARGS__)

// `CHECK` throws if the operator's documentation refuses the arguments, before anything is launched. `WORKSPACE` is
// computed from the raw arguments.
#define CHECKED_OPERATOR(NAME, ARGUMENTS, WORKSPACE, CHECK, ...)                                        \
  PLAN(NAME, GetWorkspaceSize, ARGUMENTS, WORKSPACE, CHECK, __VA_ARGS__)                                \
  extern "C" int aclnn##NAME(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) { \
    return cann::launch(workspace, size, executor, stream);                                             \
  }

#define PLAN(NAME, WHAT, ARGUMENTS, WORKSPACE, CHECK, ...)                                              \
  extern "C" int aclnn##NAME##WHAT(EACH(RAW_, UNWRAP ARGUMENTS) uint64_t* size, aclOpExecutor** executor) { \
    return cann::plan("aclnn" #NAME, WORKSPACE, size, executor, [&] {                                   \
      auto work = [EACH(TAKE_, UNWRAP ARGUMENTS) checked = false](bool checking) mutable {              \
        if (checking) {                                                                                 \
          CHECK;                                                                                        \
        } else {                                                                                        \
          __VA_ARGS__;                                                                                  \
        }                                                                                               \
        checked = true;                                                                                 \
      };                                                                                                \
      work(true);                                                                                       \
      return [work]() mutable { work(false); };                                                         \
    });                                                                                                 \
  }
