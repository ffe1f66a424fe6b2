// The operators for torch's own functions.

#include "operators.h"

namespace {

at::IntArrayRef dims(const std::optional<std::vector<int64_t>>& list) {
  return list ? at::IntArrayRef(*list) : at::IntArrayRef();
}

// As on a card, an empty list of dimensions means all of them.
at::Tensor over(const at::Tensor& a, const std::optional<std::vector<int64_t>>& list, bool keep, bool all) {
  at::Tensor result = a.to(at::kBool);
  std::vector<int64_t> named = list ? *list : std::vector<int64_t>();
  if (named.empty())
    for (int64_t i = 0; i < a.dim(); ++i) named.push_back(i);
  for (int64_t& dim : named) dim = at::maybe_wrap_dim(dim, a.dim());
  std::sort(named.rbegin(), named.rend());
  for (const int64_t dim : named) result = all ? result.all(dim, keep) : result.any(dim, keep);
  return result;
}

at::Tensor extreme(const at::Tensor& a, const std::optional<std::vector<int64_t>>& list, bool keep, bool largest) {
  return largest ? at::amax(a, dims(list), keep) : at::amin(a, dims(list), keep);
}

std::optional<at::Tensor> maybe(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// torch_npu passes an empty index for a dimension without an index. An index without entries looks the same, but such a
// call has nothing to do.
c10::List<std::optional<at::Tensor>> given(const std::vector<at::Tensor>& indices) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& index : indices) list.push_back(index.defined() && index.numel() ? maybe(index) : std::nullopt);
  return list;
}

bool given_any(const std::vector<at::Tensor>& indices) {
  return std::any_of(indices.begin(), indices.end(), [](const at::Tensor& it) { return it.defined() && it.numel(); });
}

// The result has one entry per element found. The caller waits, and reads the shape from the handle (`aclGetViewShape`).
int find(const char* name, const aclTensor* of, const aclTensor* to, uint64_t* size, aclOpExecutor** executor, bool rows) {
  return cann::plan(name, 0, size, executor, [&] {
    const at::Tensor a = cann::take(of), out = cann::take(to);
    TORCH_CHECK(out.scalar_type() == at::kLong && out.is_contiguous() && out.numel() == a.numel() * a.dim(), "out");
    return [a, out, handle = const_cast<aclTensor*>(to), rows] {
      const at::Tensor found = rows ? at::nonzero(a) : at::nonzero(a).t();
      handle->tensor = out.flatten().narrow(0, 0, found.numel()).view(found.sizes());
      handle->tensor.copy_(found);
    };
  });
}

}  // namespace

using cann::put;

extern "C" {

int aclnnNonzeroGetWorkspaceSize(const aclTensor* a, const aclTensor* out, uint64_t* size, aclOpExecutor** executor) {
  return find("aclnnNonzero", a, out, size, executor, true);
}
int aclnnNonzeroV2GetWorkspaceSize(const aclTensor* a, const aclTensor* out, uint64_t* size, aclOpExecutor** executor) {
  return find("aclnnNonzeroV2", a, out, size, executor, false);
}
int aclnnNonzero(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return cann::launch(workspace, size, executor, stream);
}
int aclnnNonzeroV2(void* workspace, uint64_t size, aclOpExecutor* executor, aclrtStream stream) {
  return cann::launch(workspace, size, executor, stream);
}

// The caller deletes the sizes.
int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* num_sizes) {
  *num_sizes = tensor->tensor.dim();
  *sizes = new int64_t[*num_sizes];
  std::copy_n(tensor->tensor.sizes().begin(), *num_sizes, *sizes);
  return ACL_SUCCESS;
}

}  // extern "C"

#define UNARY(NAME, FUNCTION)                                                 \
  OPERATOR(NAME, (TENSOR(a), TENSOR(out)), put(out, FUNCTION(a)))             \
  OPERATOR(Inplace##NAME, (TENSOR(a)), a.copy_(FUNCTION(a)))
#define BINARY(NAME, FUNCTION)                                                \
  OPERATOR(NAME, (TENSOR(a), TENSOR(b), TENSOR(out)), put(out, FUNCTION(a, b))) \
  OPERATOR(Inplace##NAME, (TENSOR(a), TENSOR(b)), a.copy_(FUNCTION(a, b)))
#define BY_SCALAR(NAME, FUNCTION)                                             \
  OPERATOR(NAME, (TENSOR(a), SCALAR(b), TENSOR(out)), put(out, FUNCTION(a, b))) \
  OPERATOR(Inplace##NAME, (TENSOR(a), SCALAR(b)), a.copy_(FUNCTION(a, b)))
#define SCALED(NAME, KIND, FUNCTION)                                          \
  OPERATOR(NAME, (TENSOR(a), KIND(b), SCALAR(alpha), TENSOR(out)), put(out, FUNCTION(a, b, alpha))) \
  OPERATOR(Inplace##NAME, (TENSOR(a), KIND(b), SCALAR(alpha)), a.copy_(FUNCTION(a, b, alpha)))
#define COMPARED(NAME, FUNCTION)                                              \
  BINARY(NAME##Tensor, FUNCTION)                                              \
  BY_SCALAR(NAME##Scalar, FUNCTION)

SCALED(Add, TENSOR, at::add)
SCALED(Adds, SCALAR, at::add)
SCALED(Sub, TENSOR, at::sub)
SCALED(Subs, SCALAR, at::sub)
BINARY(Mul, at::mul)
BY_SCALAR(Muls, at::mul)
BINARY(Div, at::div)
BY_SCALAR(Divs, at::div)
BINARY(FloorDivide, at::floor_divide)
BY_SCALAR(FloorDivides, at::floor_divide)
BINARY(RemainderTensorTensor, at::remainder)
BY_SCALAR(RemainderTensorScalar, at::remainder)
BINARY(Maximum, at::maximum)
BINARY(Minimum, at::minimum)
BINARY(RightShift, at::bitwise_right_shift)
BINARY(LeftShift, at::bitwise_left_shift)
BINARY(LogicalAnd, at::logical_and)
BINARY(LogicalOr, at::logical_or)
BINARY(PowTensorTensor, at::pow)
BY_SCALAR(PowTensorScalar, at::pow)
COMPARED(Eq, at::eq)
COMPARED(Ne, at::ne)
COMPARED(Lt, at::lt)
COMPARED(Le, at::le)
COMPARED(Gt, at::gt)
COMPARED(Ge, at::ge)
COMPARED(BitwiseAnd, at::bitwise_and)
COMPARED(BitwiseOr, at::bitwise_or)
COMPARED(BitwiseXor, at::bitwise_xor)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(LogicalNot, at::logical_not)
UNARY(Neg, at::neg)
UNARY(Abs, at::abs)
UNARY(Exp, at::exp)
UNARY(Log, at::log)
UNARY(Log1p, at::log1p)
UNARY(Sqrt, at::sqrt)
UNARY(Rsqrt, at::rsqrt)
UNARY(Reciprocal, at::reciprocal)
UNARY(Sigmoid, at::sigmoid)
UNARY(Tanh, at::tanh)
UNARY(Cos, at::cos)
UNARY(Sin, at::sin)
UNARY(Floor, at::floor)
UNARY(Ceil, at::ceil)
UNARY(Round, at::round)
UNARY(Trunc, at::trunc)
UNARY(Sign, at::sign)
UNARY(Relu, at::relu)
UNARY(Silu, at::silu)
UNARY(Erf, at::erf)
OPERATOR(Softplus, (TENSOR(a), SCALAR(beta), SCALAR(threshold), TENSOR(out)), put(out, at::softplus(a, beta, threshold)))
OPERATOR(NanToNum, (TENSOR(a), FLOAT(nan), FLOAT(high), FLOAT(low), TENSOR(out)), put(out, at::nan_to_num(a, nan, high, low)))
OPERATOR(InplaceNanToNum, (TENSOR(a), FLOAT(nan), FLOAT(high), FLOAT(low)), a.nan_to_num_(nan, high, low))
OPERATOR(IsFinite, (TENSOR(a), TENSOR(out)), put(out, at::isfinite(a)))
OPERATOR(Gelu, (TENSOR(a), TENSOR(out)), put(out, at::gelu(a)))
OPERATOR(GeluV2, (TENSOR(a), INT(approximate), TENSOR(out)),
         put(out, at::gelu(a, approximate == 1 ? "tanh" : "none")))
OPERATOR(Pows, (TENSOR(a), SCALAR(b), TENSOR(out)), put(out, at::pow(a, b)))
OPERATOR(PowScalarTensor, (SCALAR(a), TENSOR(b), TENSOR(out)), put(out, at::pow(a, b)))
OPERATOR(DivMod, (TENSOR(a), TENSOR(b), INT(mode), TENSOR(out)),
         put(out, mode == 0 ? at::div(a, b) : at::div(a, b, mode == 1 ? "trunc" : "floor")))
OPERATOR(DivMods, (TENSOR(a), SCALAR(b), INT(mode), TENSOR(out)),
         put(out, mode == 0 ? at::div(a, b) : at::div(a, b, mode == 1 ? "trunc" : "floor")))
OPERATOR(Rsubs, (TENSOR(a), SCALAR(b), SCALAR(alpha), TENSOR(out)), put(out, at::rsub(a, b, alpha)))
OPERATOR(Rsub, (TENSOR(a), TENSOR(b), SCALAR(alpha), TENSOR(out)), put(out, at::rsub(a, b, alpha)))
// A null pointer means that there is no bound.
OPERATOR(Clamp, (TENSOR(a), MAYBE_SCALAR(low), MAYBE_SCALAR(high), TENSOR(out)), put(out, at::clamp(a, low, high)))
OPERATOR(ClampTensor, (TENSOR(a), TENSOR(low), TENSOR(high), TENSOR(out)),
         put(out, at::clamp(a, maybe(low), maybe(high))))
OPERATOR(ClampMin, (TENSOR(a), SCALAR(low), TENSOR(out)), put(out, at::clamp_min(a, low)))
OPERATOR(ClampMinTensor, (TENSOR(a), TENSOR(low), TENSOR(out)), put(out, at::clamp_min(a, low)))
OPERATOR(ClampMaxTensor, (TENSOR(a), TENSOR(high), TENSOR(out)), put(out, at::clamp_max(a, high)))
OPERATOR(ClampMax, (TENSOR(a), SCALAR(high), TENSOR(out)), put(out, at::clamp_max(a, high)))
OPERATOR(SWhere, (TENSOR(condition), TENSOR(a), TENSOR(b), TENSOR(out)), put(out, at::where(condition, a, b)))
OPERATOR(Lerps, (TENSOR(a), TENSOR(b), SCALAR(weight), TENSOR(out)), put(out, at::lerp(a, b, weight)))
OPERATOR(Addcmul, (TENSOR(a), TENSOR(b), TENSOR(c), SCALAR(value), TENSOR(out)), put(out, at::addcmul(a, b, c, value)))

OPERATOR(All, (TENSOR(a), INTS(list), BOOL(keep), TENSOR(out)), put(out, over(a, list, keep, true)))
OPERATOR(Any, (TENSOR(a), INTS(list), BOOL(keep), TENSOR(out)), put(out, over(a, list, keep, false)))
OPERATOR(Amax, (TENSOR(a), INTS(list), BOOL(keep), TENSOR(out)), put(out, extreme(a, list, keep, true)))
OPERATOR(Amin, (TENSOR(a), INTS(list), BOOL(keep), TENSOR(out)), put(out, extreme(a, list, keep, false)))
OPERATOR(Max, (TENSOR(a), TENSOR(out)), put(out, at::max(a)))
OPERATOR(Min, (TENSOR(a), TENSOR(out)), put(out, at::min(a)))
OPERATOR(MaxDim, (TENSOR(a), INT(dim), BOOL(keep), TENSOR(out), TENSOR(index)), {
  const auto [values, indices] = at::max(a, dim, keep);
  put(out, values);
  put(index, indices);
})
OPERATOR(MinDim, (TENSOR(a), INT(dim), BOOL(keep), TENSOR(out), TENSOR(index)), {
  const auto [values, indices] = at::min(a, dim, keep);
  put(out, values);
  put(index, indices);
})
OPERATOR(ArgMax, (TENSOR(a), INT(dim), BOOL(keep), TENSOR(out)), put(out, at::argmax(a, dim, keep)))
OPERATOR(ArgMin, (TENSOR(a), INT(dim), BOOL(keep), TENSOR(out)), put(out, at::argmin(a, dim, keep)))
OPERATOR(ReduceSum, (TENSOR(a), INTS(list), BOOL(keep), DTYPE(type), TENSOR(out)),
         put(out, at::sum(a, dims(list), keep, type)))
OPERATOR(Mean, (TENSOR(a), INTS(list), BOOL(keep), DTYPE(type), TENSOR(out)),
         put(out, at::mean(a, dims(list), keep, type)))
OPERATOR(MeanV2, (TENSOR(a), INTS(list), BOOL(keep), BOOL(none), TENSOR(out)),
         put(out, at::mean(a, dims(list), keep)))
OPERATOR(Std, (TENSOR(a), INTS(list), INT(correction), BOOL(keep), TENSOR(out)),
         put(out, at::std(a, dims(list), at::Scalar(correction), keep)))
OPERATOR(Norm, (TENSOR(a), SCALAR(p), INTS(list), BOOL(keep), TENSOR(out)), put(out, at::norm(a, p, dims(list), keep)))
OPERATOR(LinalgVectorNorm, (TENSOR(a), SCALAR(p), INTS(list), BOOL(keep), DTYPE(type), TENSOR(out)),
         put(out, at::linalg_vector_norm(a, p, dims(list), keep, type)))
OPERATOR(Cumsum, (TENSOR(a), INT(dim), DTYPE(type), TENSOR(out)), put(out, at::cumsum(a, dim, type)))
OPERATOR(Cumprod, (TENSOR(a), SCALAR(dim), DTYPE(type), TENSOR(out)), put(out, at::cumprod(a, dim.toLong(), type)))
OPERATOR(LogSumExp, (TENSOR(a), INTS(list), BOOL(keep), TENSOR(out)), put(out, at::logsumexp(a, dims(list), keep)))
OPERATOR(Softmax, (TENSOR(a), INT(dim), TENSOR(out)), put(out, at::softmax(a, dim, out.scalar_type())))
OPERATOR(LogSoftmax, (TENSOR(a), INT(dim), TENSOR(out)), put(out, at::log_softmax(a, dim, out.scalar_type())))
OPERATOR(Topk, (TENSOR(a), INT(k), INT(dim), BOOL(largest), BOOL(sorted), TENSOR(out), TENSOR(index)), {
  const auto [values, indices] = at::topk(a, k, dim, largest, sorted);
  put(out, values);
  put(index, indices);
})
OPERATOR(Sort, (TENSOR(a), BOOL(stable), INT(dim), BOOL(descending), TENSOR(out), TENSOR(index)), {
  const auto [values, indices] = at::sort(a, stable, dim, descending);
  put(out, values);
  put(index, indices);
})
OPERATOR(Argsort, (TENSOR(a), INT(dim), BOOL(descending), TENSOR(out)), put(out, at::argsort(a, dim, descending)))

OPERATOR(Arange, (SCALAR(start), SCALAR(end), SCALAR(step), TENSOR(out)),
         put(out, at::arange(start, end, step, out.options())))
OPERATOR(Cat, (TENSORS(list), INT(dim), TENSOR(out)), put(out, at::cat(list, dim)))
OPERATOR(Stack, (TENSORS(list), INT(dim), TENSOR(out)), put(out, at::stack(list, dim)))
OPERATOR(Repeat, (TENSOR(a), INTS(times), TENSOR(out)), put(out, a.repeat(*times)))
OPERATOR(RepeatInterleaveInt, (TENSOR(a), INT(times), INT(size), TENSOR(out)),
         put(out, at::repeat_interleave(a.flatten(), times)))
OPERATOR(RepeatInterleaveIntWithDim, (TENSOR(a), INT(times), INT(dim), INT(size), TENSOR(out)),
         put(out, at::repeat_interleave(a, times, dim)))
OPERATOR(RepeatInterleave, (TENSOR(a), TENSOR(times), INT(size), TENSOR(out)),
         put(out, at::repeat_interleave(a.flatten(), times)))
OPERATOR(RepeatInterleaveWithDim, (TENSOR(a), TENSOR(times), INT(dim), INT(size), TENSOR(out)),
         put(out, at::repeat_interleave(a, times, dim)))
OPERATOR(Roll, (TENSOR(a), INTS(shifts), INTS(list), TENSOR(out)), put(out, at::roll(a, *shifts, dims(list))))
OPERATOR(Flip, (TENSOR(a), INTS(list), TENSOR(out)), put(out, at::flip(a, dims(list))))
OPERATOR(Tril, (TENSOR(a), INT(diagonal), TENSOR(out)), put(out, at::tril(a, diagonal)))
OPERATOR(Triu, (TENSOR(a), INT(diagonal), TENSOR(out)), put(out, at::triu(a, diagonal)))
OPERATOR(ConstantPadNd, (TENSOR(a), INTS(pad), SCALAR(value), TENSOR(out)),
         put(out, at::constant_pad_nd(a, *pad, value)))
OPERATOR(Embedding, (TENSOR(weight), TENSOR(index), TENSOR(out)), put(out, at::embedding(weight, index)))
OPERATOR(Gather, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(out)), put(out, at::gather(a, dim, index)))
OPERATOR(IndexSelect, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(out)), put(out, at::index_select(a, dim, index)))
OPERATOR(Index, (TENSOR(a), TENSORS(indices), TENSOR(out)), {
  if (out.numel()) put(out, at::index(a, given(indices)));
})
OPERATOR(IndexPutImpl, (TENSOR(a), TENSORS(indices), TENSOR(values), BOOL(accumulate), BOOL(unsafe)), {
  if (values.numel() && given_any(indices)) a.index_put_(given(indices), values, accumulate);
})
OPERATOR(InplaceIndexCopy, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(source)), a.index_copy_(dim, index, source))
OPERATOR(InplaceIndexFill, (TENSOR(a), INT(dim), TENSOR(index), SCALAR(value)), a.index_fill_(dim, index, value))
OPERATOR(IndexFillTensor, (TENSOR(a), INT(dim), INTS(index), SCALAR(value), TENSOR(out)),
         put(out, at::index_fill(a, dim, at::tensor(*index), value)))
OPERATOR(InplaceIndexFillTensor, (TENSOR(a), INT(dim), INTS(index), SCALAR(value)),
         a.index_fill_(dim, at::tensor(*index), value))
OPERATOR(IndexAdd, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(source), SCALAR(alpha), TENSOR(out)),
         put(out, at::index_add(a, dim, index, source, alpha)))
OPERATOR(ScatterAdd, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(source), TENSOR(out)),
         put(out, at::scatter_add(a, dim, index, source)))
OPERATOR(Scatter, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(source), INT(reduction), TENSOR(out)), {
  TORCH_CHECK(reduction == 0, "a reduction is not emulated");
  put(out, at::scatter(a, dim, index, source));
})
OPERATOR(InplaceScatter, (TENSOR(a), INT(dim), TENSOR(index), TENSOR(source), INT(reduction)), {
  TORCH_CHECK(reduction == 0, "a reduction is not emulated");
  a.scatter_(dim, index, source);
})
OPERATOR(ScatterValue, (TENSOR(a), INT(dim), TENSOR(index), SCALAR(value), INT(reduction), TENSOR(out)), {
  TORCH_CHECK(reduction == 0, "a reduction is not emulated");
  put(out, at::scatter(a, dim, index, value));
})
OPERATOR(InplaceScatterValue, (TENSOR(a), INT(dim), TENSOR(index), SCALAR(value), INT(reduction)), {
  TORCH_CHECK(reduction == 0, "a reduction is not emulated");
  a.scatter_(dim, index, value);
})
OPERATOR(InplaceMaskedFillScalar, (TENSOR(a), TENSOR(mask), SCALAR(value)), a.masked_fill_(mask, value))
OPERATOR(InplaceMaskedFillTensor, (TENSOR(a), TENSOR(mask), TENSOR(value)), a.masked_fill_(mask, value))
OPERATOR(InplaceCopy, (TENSOR(a), TENSOR(b)), a.copy_(b))
OPERATOR(Cast, (TENSOR(a), DTYPE(type), TENSOR(out)), put(out, a.to(type)))
OPERATOR(InplaceFillScalar, (TENSOR(a), SCALAR(value)), a.fill_(value))
OPERATOR(InplaceFillTensor, (TENSOR(a), TENSOR(value)), a.fill_(value))
OPERATOR(InplaceZero, (TENSOR(a)), a.zero_())
OPERATOR(InplaceOne, (TENSOR(a)), a.fill_(1))
OPERATOR(ForeachCopy, (TENSORS(from), TENSORS(to)), {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
})

OPERATOR(Matmul, (TENSOR(a), TENSOR(b), TENSOR(out), INT8(precision)), put(out, at::matmul(a, b)))
OPERATOR(Mm, (TENSOR(a), TENSOR(b), TENSOR(out), INT8(precision)), put(out, at::mm(a, b)))
OPERATOR(BatchMatMul, (TENSOR(a), TENSOR(b), TENSOR(out), INT8(precision)), put(out, at::bmm(a, b)))
OPERATOR(Addmm, (TENSOR(bias), TENSOR(a), TENSOR(b), SCALAR(beta), SCALAR(alpha), TENSOR(out), INT8(precision)),
         put(out, at::addmm(bias, a, b, beta, alpha)))
OPERATOR(Baddbmm, (TENSOR(bias), TENSOR(a), TENSOR(b), SCALAR(beta), SCALAR(alpha), TENSOR(out), INT8(precision)),
         put(out, at::baddbmm(bias, a, b, beta, alpha)))
OPERATOR(LayerNorm, (TENSOR(a), INTS(shape), TENSOR(weight), TENSOR(bias), DOUBLE(eps), TENSOR(out), TENSOR(mean),
                     TENSOR(rstd)), {
  const auto [value, means, rstds] = at::native_layer_norm(a, *shape, maybe(weight), maybe(bias), eps);
  put(out, value);
  if (mean.defined()) mean.copy_(means.view(mean.sizes()));
  if (rstd.defined()) rstd.copy_(rstds.view(rstd.sizes()));
})
