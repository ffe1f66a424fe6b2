// The objects that operators take as arguments, and the launch of a planned operator.

#include "operators.h"

namespace cann {
namespace {

constexpr int kBadParameter = 561002;  // ACLNN_ERR_INNER_TILING_ERROR, which the fused operators return for most errors

}  // namespace

thread_local Addresses taken_addresses;

at::ScalarType dtype_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_BOOL: return at::kBool;
    default: TORCH_CHECK(false, "dtype ", static_cast<int>(type), " is not emulated");
  }
}

int plan(const char* name, uint64_t workspace, uint64_t* size, aclOpExecutor** executor,
         const std::function<Work()>& make) {
  try {
    taken_addresses.clear();
    const Work work = make();
    *executor = new aclOpExecutor{name, workspace, taken_addresses, work};
    *size = workspace;
    return ACL_SUCCESS;
  } catch (const c10::Error& error) {
    return refuse(kBadParameter, std::string(name) + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return refuse(kBadParameter, std::string(name) + ": " + error.what());
  }
}

int launch(const void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  const std::unique_ptr<aclOpExecutor> own(executor);
  REFUSE_IF(size < own->workspace || (own->workspace != 0 && workspace == nullptr), kBadParameter,
            own->name + ": a workspace of " + std::to_string(size) + " bytes where " + std::to_string(own->workspace) +
                " are needed");
  // An error on the card names the operator that failed.
  if (workspace != nullptr) own->addresses.push_back(workspace);
  return submit(stream, own->name, own->addresses, [name = own->name, work = std::move(own->work)] {
    const c10::InferenceMode guard;
    try {
      work();
    } catch (const c10::Error& error) {
      throw std::runtime_error(name + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw std::runtime_error(name + ": " + error.what());
    }
  });
}

}  // namespace cann

using namespace cann;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t num_sizes, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* data) {
  const c10::InferenceMode guard;  // tensors are created as they are used, whatever mode the caller is in
  const auto dtype = dtype_of(type);
  char* start = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions(dtype);
  return new aclTensor{at::from_blob(start, {sizes, num_sizes}, {strides, num_sizes}, options)};
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  switch (type) {  // no dispatcher call, which the caller's modes would intercept
    case ACL_DOUBLE: return new aclScalar{*static_cast<double*>(value)};
    case ACL_FLOAT: return new aclScalar{*static_cast<float*>(value)};
    case ACL_FLOAT16: return new aclScalar{static_cast<float>(*static_cast<c10::Half*>(value))};
    case ACL_BF16: return new aclScalar{static_cast<float>(*static_cast<c10::BFloat16*>(value))};
    case ACL_INT64: return new aclScalar{*static_cast<int64_t*>(value)};
    case ACL_INT32: return new aclScalar{*static_cast<int32_t*>(value)};
    case ACL_BOOL: return new aclScalar{*static_cast<bool*>(value)};
    default: TORCH_CHECK(false, "a scalar of dtype ", static_cast<int>(type), " is not emulated");
  }
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) { return new aclIntArray{{values, values + size}}; }
aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) { return new aclBoolArray{{values, values + size}}; }

// The list owns its elements.
aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  auto* made = new aclTensorList;
  for (uint64_t i = 0; i < size; ++i) {
    made->tensors.push_back(take(tensors[i]));
    delete tensors[i];
  }
  return made;
}

aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  auto* made = new aclScalarList;
  for (uint64_t i = 0; i < size; ++i) {
    made->scalars.push_back(scalars[i]->scalar);
    delete scalars[i];
  }
  return made;
}

int aclDestroyTensor(const aclTensor* it) { return delete it, ACL_SUCCESS; }
int aclDestroyScalar(const aclScalar* it) { return delete it, ACL_SUCCESS; }
int aclDestroyIntArray(const aclIntArray* it) { return delete it, ACL_SUCCESS; }
int aclDestroyFloatArray(const aclFloatArray* it) { return delete it, ACL_SUCCESS; }
int aclDestroyBoolArray(const aclBoolArray* it) { return delete it, ACL_SUCCESS; }
int aclDestroyTensorList(const aclTensorList* it) { return delete it, ACL_SUCCESS; }
int aclDestroyScalarList(const aclScalarList* it) { return delete it, ACL_SUCCESS; }
int aclDestroyAclOpExecutor(aclOpExecutor* it) { return delete it, ACL_SUCCESS; }

}  // extern "C"
