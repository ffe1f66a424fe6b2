// The part of the Ascend Transformer Boost library that torch_npu's custom operators need. libop_plugin_atb.so is linked
// against it and uses its C++ interface. Three operators compute; the others are refused by name.

#include "operators.h"

// The layouts from its headers, as torch_npu's library expects them.
namespace atb {

struct Tensor {
  aclDataType dtype;
  aclFormat format;
  int64_t dims[8];
  uint64_t num_dims;
  void* data;
  void* host;
  uint64_t size;
};

// Up to 64 elements are stored in place, and more in separate memory.
struct Tensors {
  size_t capacity, size;
  Tensor inside[65];
  Tensor* outside;

  const Tensor& operator[](size_t i) const { return outside == nullptr ? inside[i] : outside[i]; }
};

struct VariantPack {
  Tensors in, out;
};

class Context {
 public:
  virtual ~Context() = default;
  virtual int SetExecuteStream(aclrtStream stream) { return stream_ = stream, 0; }
  virtual aclrtStream GetExecuteStream() const { return stream_; }

 private:
  aclrtStream stream_ = nullptr;
};

class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::string GetName() const = 0;
  // Nobody asks an operation for the shapes of its results, because torch_npu provides the output tensors.
  virtual int InferShape(const void*, void*) const { return 1; }
  virtual uint32_t GetInputNum() const { return 5; }
  virtual uint32_t GetOutputNum() const { return 2; }
  virtual int Setup(const VariantPack& tensors, uint64_t& workspace, Context* context) = 0;
  virtual int Execute(const VariantPack& tensors, uint8_t* workspace, uint64_t size, Context* context) = 0;
};

namespace infer {
struct RopeParam {
  int32_t coefficient;
};
struct ReshapeAndCacheParam {
  int compress, caches;
};
struct LinearParam {
  bool transpose_a, transpose_b, has_bias;
};
struct ElewiseParam {};
struct RmsNormParam {};
struct GroupTopkParam {};
struct SelfAttentionParam {};
struct PagedAttentionParam {};
}  // namespace infer

class Utils {
 public:
  static uint64_t GetTensorSize(const Tensor& tensor);
};

uint64_t Utils::GetTensorSize(const Tensor& tensor) {
  uint64_t size = c10::elementSize(cann::dtype_of(tensor.dtype));
  for (uint64_t i = 0; i < tensor.num_dims; ++i) size *= tensor.dims[i];
  return size;
}

int CreateContext(Context** context) { return *context = new Context, 0; }
int DestroyContext(Context* context) { return delete context, 0; }
int DestroyOperation(Operation* operation) { return delete operation, 0; }

}  // namespace atb

namespace {

// torch_npu ignores what `Execute` returns, but raises an error if `Setup` fails, so refusals happen in `Setup`.
constexpr int kRefused = 1;

class Named : public atb::Operation {
 public:
  explicit Named(const char* name) : name_(name) {}

  std::string GetName() const override { return name_; }

  int Setup(const atb::VariantPack& tensors, uint64_t& workspace, atb::Context*) override {
    workspace = 0;
    try {
      check(all(tensors));
      return 0;
    } catch (const c10::Error& error) {
      cann::refuse(kRefused, name_ + ": " + error.what_without_backtrace());
      return kRefused;
    }
  }

  int Execute(const atb::VariantPack& tensors, uint8_t*, uint64_t, atb::Context* context) override {
    const std::vector<at::Tensor> taken = all(tensors);
    cann::Addresses addresses;
    for (const at::Tensor& tensor : taken) addresses.push_back(tensor.const_data_ptr());
    return cann::submit(context->GetExecuteStream(), name_, addresses, [this, taken] {
      const c10::InferenceMode guard;
      compute(taken);
    });
  }

 protected:
  virtual void check(const std::vector<at::Tensor>& tensors) const = 0;
  virtual void compute(const std::vector<at::Tensor>& tensors) const = 0;

 private:
  // The inputs, followed by the outputs.
  static std::vector<at::Tensor> all(const atb::VariantPack& tensors) {
    const c10::InferenceMode guard;
    std::vector<at::Tensor> made;
    for (const atb::Tensors* list : {&tensors.in, &tensors.out})
      for (size_t i = 0; i < list->size; ++i) {
        const atb::Tensor& it = (*list)[i];
        const at::IntArrayRef sizes(it.dims, it.num_dims);
        TORCH_CHECK(it.data != nullptr, "a tensor in memory of the host");
        made.push_back(at::from_blob(it.data, sizes, at::TensorOptions(cann::dtype_of(it.dtype))));
      }
    return made;
  }

  const std::string name_;
};

// Rotates queries and keys [tokens, heads * head size] in place.
class Rope : public Named {
 public:
  explicit Rope(int32_t coefficient) : Named("RopeOperation"), coefficient_(coefficient) {}

 protected:
  void check(const std::vector<at::Tensor>& it) const override {
    TORCH_CHECK(it.size() == 7, it.size(), " tensors");
    const at::Tensor &cos = it[2], &sin = it[3];
    TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.scalar_type() == sin.scalar_type(), "cos and sin");
    const int64_t width = cos.size(1);
    TORCH_CHECK(coefficient_ == 2 || coefficient_ == width, "a coefficient of ", coefficient_, " is not emulated");
    for (const int i : {0, 1}) {
      const at::Tensor &a = it[i], &out = it[5 + i];
      TORCH_CHECK(a.dim() == 2 && a.size(0) == cos.size(0) && a.size(1) % width == 0, a.sizes(), " for heads of ", width);
      TORCH_CHECK(a.scalar_type() == cos.scalar_type() || cos.scalar_type() == at::kFloat, "dtypes");
      TORCH_CHECK(out.sizes() == a.sizes() && out.scalar_type() == a.scalar_type(), "results");
    }
    TORCH_CHECK(it[4].scalar_type() == at::kInt && it[4].numel() == 1, "one row of tokens");
  }

  void compute(const std::vector<at::Tensor>& it) const override {
    const at::Tensor cos = it[2].to(at::kFloat).unsqueeze(1), sin = it[3].to(at::kFloat).unsqueeze(1);
    for (const int i : {0, 1}) {
      const at::Tensor a = it[i].to(at::kFloat).unflatten(1, {-1, cos.size(-1)});
      at::Tensor turned;
      if (coefficient_ == 2) {
        const auto halves = a.chunk(2, -1);
        turned = at::cat({-halves[1], halves[0]}, -1);
      } else {
        turned = at::stack({-a.slice(-1, 1, std::nullopt, 2), a.slice(-1, 0, std::nullopt, 2)}, -1).flatten(-2);
      }
      it[5 + i].copy_((a * cos + turned * sin).flatten(1));
    }
  }

 private:
  const int32_t coefficient_;
};

// Writes keys and values [tokens, heads, size] into slots of the caches [blocks, block size, heads, size].
class ReshapeAndCache : public Named {
 public:
  ReshapeAndCache() : Named("ReshapeAndCacheOperation") {}

 protected:
  void check(const std::vector<at::Tensor>& it) const override {
    TORCH_CHECK(it.size() == 7, it.size(), " tensors");
    TORCH_CHECK(it[4].scalar_type() == at::kInt && it[4].dim() == 1, "slots are int32 in one dimension");
    for (const int i : {0, 1}) {
      const at::Tensor &a = it[i], &cache = it[2 + i];
      TORCH_CHECK(a.dim() == 3 && cache.dim() == 4 && a.size(0) == it[4].size(0), "shapes");
      TORCH_CHECK(a.sizes().slice(1) == cache.sizes().slice(2) && a.scalar_type() == cache.scalar_type(), "a cache of ",
                  cache.sizes(), " for ", a.sizes());
      TORCH_CHECK(it[5 + i].const_data_ptr() == cache.const_data_ptr(), "caches are written where they are");
    }
  }

  void compute(const std::vector<at::Tensor>& it) const override {
    const at::Tensor slots = it[4].to(at::kLong);
    const at::Tensor kept = slots.ge(0).nonzero().flatten();  // nothing is written for a negative slot
    const at::Tensor used = slots.index_select(0, kept);
    if (used.numel() == 0) return;
    TORCH_CHECK(used.max().item<int64_t>() < it[2].size(0) * it[2].size(1), "a slot outside");
    for (const int i : {0, 1}) it[2 + i].flatten(0, 1).index_copy_(0, used, it[i].index_select(0, kept));
  }
};

// Adds a' b to c, in float32. `_npu_matmul_add_fp32` is the only call to this operation in torch_npu.
class Linear : public Named {
 public:
  Linear() : Named("LinearOperation") {}

 protected:
  void check(const std::vector<at::Tensor>& it) const override {
    TORCH_CHECK(it.size() == 4 && it[2].const_data_ptr() == it[3].const_data_ptr(), "a sum where it is");
    TORCH_CHECK(it[0].dim() == 2 && it[1].dim() == 2 && it[0].size(0) == it[1].size(0), "shapes");
    TORCH_CHECK(it[0].scalar_type() == it[1].scalar_type() && it[2].scalar_type() == at::kFloat, "dtypes");
    TORCH_CHECK(it[2].sizes() == at::IntArrayRef({it[0].size(1), it[1].size(1)}), "a sum of ", it[2].sizes());
  }

  void compute(const std::vector<at::Tensor>& it) const override {
    it[3].add_(at::mm(it[0].t().to(at::kFloat), it[1].to(at::kFloat)));
  }
};

// torch_npu raises an error with this name.
class Missing : public Named {
 public:
  explicit Missing(const char* name) : Named(name) {}

 protected:
  void check(const std::vector<at::Tensor>&) const override { TORCH_CHECK(false, "is not emulated"); }
  void compute(const std::vector<at::Tensor>&) const override {}
};

}  // namespace

namespace atb {

template <typename Param>
int CreateOperation(const Param& param, Operation** operation);

template <>
int CreateOperation(const infer::RopeParam& param, Operation** operation) {
  return *operation = new Rope(param.coefficient), 0;
}
template <>
int CreateOperation(const infer::ReshapeAndCacheParam& param, Operation** operation) {
  if (param.compress != 0 || param.caches != 0) return kRefused;
  return *operation = new ReshapeAndCache, 0;
}

template <>
int CreateOperation(const infer::LinearParam& param, Operation** operation) {
  if (!param.transpose_a || param.transpose_b || param.has_bias) return kRefused;
  return *operation = new Linear, 0;
}

#define MISSING(NAME)                                                   \
  template <>                                                           \
  int CreateOperation(const infer::NAME##Param&, Operation** operation) { \
    return *operation = new Missing(#NAME "Operation"), 0;              \
  }
MISSING(Elewise)
MISSING(RmsNorm)
MISSING(GroupTopk)
MISSING(SelfAttention)
MISSING(PagedAttention)

}  // namespace atb
