// The fused operators for large language models, which accept exactly what their documentation allows, and also float32 in
// attention and KV writes, so that code that uses them can be compared element by element.

#include "operators.h"

namespace {

// A rule from the documentation, which a test can disable.
#define RULE(condition, ...) TORCH_CHECK((condition) || cann::is_allowed(c10::str(__VA_ARGS__)), __VA_ARGS__)

constexpr int64_t kCompressedMask = 2048;

bool is_float(const at::Tensor& a) {
  return a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kFloat;
}

// Returns (normalized, reciprocal of the root mean square).
std::pair<at::Tensor, at::Tensor> rms_norm(const at::Tensor& a, const at::Tensor& gamma, double eps) {
  std::vector<int64_t> dims;
  for (int64_t i = -gamma.dim(); i < 0; ++i) dims.push_back(i);
  const at::Tensor wide = a.to(at::kFloat), inverse = at::rsqrt(wide.square().mean(dims, true) + eps);
  return {wide * inverse * gamma.to(at::kFloat), inverse};
}

at::Tensor rotate(const at::Tensor& a, const at::Tensor& cos, const at::Tensor& sin, int64_t mode) {
  const int64_t width = a.size(-1);
  at::Tensor turned;
  if (mode == 0) {
    turned = at::cat({-a.narrow(-1, width / 2, width / 2), a.narrow(-1, 0, width / 2)}, -1);
  } else {
    const auto first = a.slice(-1, 0, width, 2), second = a.slice(-1, 1, width, 2);
    turned = at::stack({-second, first}, -1).flatten(-2);
  }
  return a * cos + turned * sin;
}

void check_scatter(const at::Tensor& key, const at::Tensor& keys, const at::Tensor& slots, const at::Tensor& value,
                   const at::Tensor& values, const std::string& mode) {
  RULE(mode == "Norm", "cache_mode ", mode, " is for the layout NZ");
  for (const at::Tensor& it : {key, keys, slots, value, values}) RULE(it.is_contiguous(), "not contiguous");
  RULE(slots.scalar_type() == at::kInt || slots.scalar_type() == at::kLong, "slots are ", slots.scalar_type());
  RULE(key.scalar_type() == keys.scalar_type() && value.scalar_type() == values.scalar_type(),
              "one dtype for tokens and cache");
  RULE(key.dim() == 3 && keys.dim() == 4 && slots.dim() == 1 && slots.size(0) == key.size(0), "shapes");
  RULE(key.size(0) <= keys.size(0) * keys.size(1), "more tokens than slots");
}

void write_slots(const at::Tensor& cache, const at::Tensor& slots, const at::Tensor& tokens) {
  const int64_t block = cache.size(1);
  const at::Tensor wide = slots.to(at::kLong);
  const at::Tensor real = wide.numel() > block ? wide.masked_select(wide >= block) : wide;
  TORCH_CHECK(wide.min().item<int64_t>() >= 0 && wide.max().item<int64_t>() < cache.size(0) * block, "a slot outside");
  // Writing a slot twice is undefined. Only padding may do so, because it can exceed the slots of the first block.
  RULE(std::get<0>(at::_unique(real)).numel() == real.numel(), "two tokens for one slot");
  cache.flatten(0, 1).index_copy_(0, wide, tokens);
}

// A call to the fused attention.
struct Attention {
  at::Tensor query, mask, table, out;
  std::vector<at::Tensor> keys, values;
  std::optional<std::vector<int64_t>> query_lengths, key_lengths;
  int64_t heads, pre, next, kv_heads, sparse, inner, block;
  double scale;
  std::string layout;

  bool tnd() const { return layout == "TND"; }
  int64_t kv() const { return kv_heads == 0 ? heads : kv_heads; }
  // Whether keys are in blocks. Otherwise, all rows follow each other in one tensor, which only TND supports.
  bool paged() const { return table.defined(); }
  int64_t rows() const { return paged() ? table.size(0) : int64_t(query_lengths->size()); }
  int64_t queries() const { return query.size(layout == "BNSD" ? 2 : 1); }
  static int64_t step(const std::vector<int64_t>& sums, int64_t row) {
    return sums[row] - (row == 0 ? 0 : sums[row - 1]);
  }
  int64_t count_of(int64_t row) const { return tnd() ? step(*query_lengths, row) : queries(); }
  int64_t length_of(int64_t row) const { return paged() ? (*key_lengths)[row] : step(*key_lengths, row); }
  bool single() const { return !tnd() && queries() == 1; }

  void check() const {
    const auto type = query.scalar_type();
    RULE(layout == "BSND" || layout == "BNSD" || tnd(), "input_layout ", layout, " is not emulated");
    RULE(keys.size() == 1 && values.size() == 1 && (paged() || tnd()), "only paged keys are emulated, and TND");
    RULE(!tnd() || query_lengths, "TND has actual_seq_lengths");
    RULE(is_float(query) && keys[0].scalar_type() == type && values[0].scalar_type() == type, "dtypes");
    RULE(out.scalar_type() == type && out.sizes() == query.sizes(), "the result has not the form of the query");
    RULE(query.is_contiguous() && keys[0].is_contiguous() && values[0].is_contiguous(), "not contiguous");
    RULE(sparse == 0 || sparse == 3 || sparse == 4, "sparse_mode ", sparse, " is not emulated");
    RULE(inner >= 0 && inner < (single() ? 2 : 4), "inner_precise ", inner);
    RULE(kv() > 0 && heads % kv() == 0 && heads / kv() <= 64 && heads <= 256, heads, " heads over ", kv());
    const int64_t size = query.size(-1);
    RULE(size % 16 == 0 && size <= 512 && kv() * size <= 65535, "head size ", size);
    RULE(key_lengths && int64_t(key_lengths->size()) == rows(), "actual_seq_lengths_kv has an entry for a row");
    if (paged())
      check_pages(size);
    else
      check_keys(size);
    if (tnd()) {
      RULE(int64_t(query_lengths->size()) == rows() && query_lengths->back() == query.size(0),
                  "actual_seq_lengths ends with the number of queries");
      if (int64_t(query_lengths->size()) != rows()) return check_mask();
      RULE(std::is_sorted(query_lengths->begin(), query_lengths->end()), "actual_seq_lengths falls");
    } else {
      RULE(query.size(0) == rows() && !query_lengths, "lengths of queries are not emulated here");
    }
    for (int64_t row = 0; row < rows(); ++row)  // the kernel refuses these late (InternLM/lmdeploy #4316)
      RULE(length_of(row) > 0 || count_of(row) == 0, "a row of queries without keys");
    check_mask();
  }

  void check_keys(int64_t size) const {
    for (const at::Tensor& it : {keys[0], values[0]})
      RULE(it.dim() == 3 && it.size(1) == kv() && it.size(2) == size, "keys are [", it.sizes(), "]");
    RULE(key_lengths->back() == keys[0].size(0) && values[0].size(0) == keys[0].size(0),
                "actual_seq_lengths_kv ends with the number of keys");
  }

  void check_pages(int64_t size) const {
    RULE(table.scalar_type() == at::kInt && table.dim() == 2 && table.is_contiguous(), "block_table");
    RULE(keys[0].dim() == 3 && keys[0].size(1) == block && keys[0].size(2) == kv() * size, "paged keys are [",
                keys[0].sizes(), "]");
    RULE(block % 128 == 0 && block <= 512, "block_size ", block);
    int64_t used = 0;
    for (const int64_t length : *key_lengths) {
      RULE(length <= table.size(1) * block, length, " keys in a table for ", table.size(1) * block);
      used += (length + block - 1) / block;
    }
    RULE(used <= keys[0].size(0), "rows of ", used, " blocks together, and there are ", keys[0].size(0));
    RULE(!single() || table.size(1) * block <= 262144, "one query a row: 262144 keys at most");
  }

  void check_mask() const {
    if (sparse != 0) {
      RULE(mask.defined() && mask.numel() == kCompressedMask * kCompressedMask, "a mask of 2048 x 2048");
      if (!mask.defined() || mask.numel() != kCompressedMask * kCompressedMask) return;
      RULE(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kChar || mask.scalar_type() == at::kByte,
           "a compressed mask is ", mask.scalar_type());
      return;
    }
    if (!mask.defined()) return;
    RULE(!tnd(), "TND takes a mask in sparse_mode 3 and 4 only");
    RULE(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kChar || mask.scalar_type() == at::kByte,
                "atten_mask is ", mask.scalar_type());
    RULE(mask.is_contiguous() && mask.dim() == 4 && mask.size(0) == rows() && mask.size(1) == 1 &&
                    mask.size(2) == queries() && mask.size(3) >= table.size(1) * block,
                "a mask of ", mask.sizes());
  }

  void run() {
    const at::Tensor by_row = paged() ? table.to(at::kLong) : at::Tensor();
    int64_t start = 0, first_key = 0, blocks_read = 0;
    for (int64_t row = 0; row < rows(); ++row) {
      const int64_t count = count_of(row), length = length_of(row);
      at::Tensor part, target;
      if (tnd()) {
        part = query.narrow(0, start, count), target = out.narrow(0, start, count);
      } else {
        part = query[row], target = out[row];
        if (layout == "BNSD") part = part.transpose(0, 1), target = target.transpose(0, 1);
      }
      start += count;
      const int64_t begin = first_key;
      first_key += length;
      if (count == 0) continue;
      if (length <= 0) {
        target.zero_();
        continue;
      }
      if (!paged()) {
        const at::Tensor key = keys[0].narrow(0, begin, length).to(at::kFloat);
        target.copy_(row_of(part, key, values[0].narrow(0, begin, length).to(at::kFloat), hidden(row, count, length)));
        continue;
      }
      const at::Tensor blocks = by_row[row].narrow(0, 0, (length + block - 1) / block);
      blocks_read += blocks.numel();
      TORCH_CHECK(blocks.min().item<int64_t>() >= 0 && blocks.max().item<int64_t>() < keys[0].size(0), "a block outside");
      target.copy_(row_of(part, taken(keys[0], blocks, length), taken(values[0], blocks, length), hidden(row, count, length)));
    }
    cann::count_kv_read(2 * blocks_read * keys[0][0].nbytes());
  }

  // Returns [keys, KV heads, head size].
  at::Tensor taken(const at::Tensor& source, const at::Tensor& blocks, int64_t length) const {
    return source.index_select(0, blocks).view({-1, kv(), query.size(-1)}).narrow(0, 0, length).to(at::kFloat);
  }

  // Returns [queries, keys].
  at::Tensor hidden(int64_t row, int64_t count, int64_t length) const {
    const at::Tensor column = at::arange(length).unsqueeze(0), line = at::arange(count).unsqueeze(1);
    const at::Tensor aligned = line + (length - count);
    if (sparse != 0) {
      // The mask decides what is hidden. Checking its second element is sufficient.
      const bool hides_later = mask.flatten()[1].to(at::kBool).item<bool>();
      const at::Tensor later = hides_later ? column > aligned + (sparse == 4 ? next : 0) : at::zeros({count, length}, at::kBool);
      return sparse == 4 ? later.logical_or(column < aligned - pre) : later;
    }
    at::Tensor result = mask.defined() ? mask[row][0].narrow(1, 0, length).to(at::kBool)
                                       : at::zeros({count, length}, at::kBool);
    if (!single()) result = result.logical_or(column > line + next).logical_or(column < line - pre);
    return result;
  }

  at::Tensor row_of(const at::Tensor& part, const at::Tensor& key, const at::Tensor& value, const at::Tensor& hidden) const {
    const at::Tensor query_NQD = part.to(at::kFloat).transpose(0, 1).unflatten(0, {kv(), heads / kv()});
    at::Tensor scores = at::matmul(query_NQD, key.permute({1, 2, 0}).unsqueeze(1)) * scale;
    scores = scores.masked_fill(hidden, std::numeric_limits<float>::lowest());
    at::Tensor result = at::matmul(at::softmax(scores, -1), value.transpose(0, 1).unsqueeze(1)).flatten(0, 1).transpose(0, 1);
    // A query that sees no keys attends to all keys equally, unless the correction for such rows was requested.
    if (inner >= 2) result = result.masked_fill(hidden.all(1).unsqueeze(1).unsqueeze(1), 0.0);
    return result;
  }
};

// Multiplies the rows of each group by the group's matrix.
void multiply_groups(at::Tensor& out, const at::Tensor& rows, const at::Tensor& matrices, const at::Tensor& counts) {
  int64_t start = 0;
  for (int64_t group = 0; group < counts.numel(); ++group) {
    const int64_t count = counts[group].item<int64_t>();
    TORCH_CHECK(count >= 0 && start + count <= rows.size(0), "groups of more rows than there are");
    out.narrow(0, start, count).copy_(at::matmul(rows.narrow(0, start, count), matrices[group]));
    start += count;
  }
}

// The size grows with the number of queries. The real size is not published.
uint64_t attention_workspace(const aclTensor* query) { return query->tensor.numel() * 4 + 4096; }

// Refuses quantized forms, rope as a separate input, shared prefixes, and padding on the left.
void check_absent(std::initializer_list<const at::Tensor*> tensors) {
  for (const at::Tensor* tensor : tensors) TORCH_CHECK(!tensor->defined() || tensor->numel() == 0, "a form that is not emulated");
}

}  // namespace

using cann::put;

CHECKED_OPERATOR(RmsNorm, (TENSOR(a), TENSOR(gamma), DOUBLE(eps), TENSOR(out), TENSOR(rstd)), 0, {
  TORCH_CHECK(is_float(a) && a.dim() >= 2, "a is ", a.scalar_type(), " in ", a.dim(), " dimensions");
  TORCH_CHECK(gamma.scalar_type() == a.scalar_type() || gamma.scalar_type() == at::kFloat, "gamma's dtype");
}, {
  const auto [normed, inverse] = rms_norm(a, gamma, eps);
  put(out, normed);
  rstd.copy_(inverse.view(rstd.sizes()));
})

CHECKED_OPERATOR(AddRmsNorm, (TENSOR(a), TENSOR(b), TENSOR(gamma), DOUBLE(eps), TENSOR(out), TENSOR(rstd), TENSOR(sum)),
                 0, {
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.scalar_type() == gamma.scalar_type(), "one dtype for all");
  TORCH_CHECK(is_float(a) && a.sizes() == b.sizes(), "one shape for both");
}, {
  put(sum, a + b);
  const auto [normed, inverse] = rms_norm(sum, gamma, eps);
  put(out, normed);
  rstd.copy_(inverse.view(rstd.sizes()));
})

CHECKED_OPERATOR(RotaryPositionEmbedding, (TENSOR(a), TENSOR(cos), TENSOR(sin), INT(mode), TENSOR(out)), 0, {
  TORCH_CHECK(is_float(a) && cos.scalar_type() == a.scalar_type() && sin.scalar_type() == a.scalar_type(), "dtypes");
  TORCH_CHECK(a.dim() >= 3 && a.dim() <= 4 && cos.sizes() == sin.sizes() && cos.dim() == a.dim(), "3 or 4 dimensions");
  TORCH_CHECK(a.size(-1) % 2 == 0 && a.size(-1) < 896 && cos.size(-1) == a.size(-1), "a width of ", a.size(-1));
  TORCH_CHECK(mode == 0 || mode == 1, "mode ", mode, " is not emulated");
}, put(out, rotate(a, cos, sin, mode)))

CHECKED_OPERATOR(SwiGlu, (TENSOR(a), INT(dim), TENSOR(out)), 0, {
  TORCH_CHECK(is_float(a) && a.numel() > 0 && a.size(dim) % 2 == 0, "a is ", a.sizes());
}, {
  const auto parts = a.chunk(2, dim);
  put(out, at::silu(parts[0].to(at::kFloat)) * parts[1].to(at::kFloat));
})

// Only the form for experts is emulated: one tensor of rows, one of matrices, and the group sizes. If CANN has V5, torch_npu
// calls it instead, with one more list for tuning.
CHECKED_OPERATOR(GroupedMatmulV4, (TENSORS(rows), TENSORS(matrices), TENSORS(bias), TENSORS(scale), TENSORS(offset),
                 TENSORS(q1), TENSORS(q2), TENSORS(row_scale), TENSOR(groups), TENSORS(a1), TENSORS(a2), TENSORS(a3),
                 INT(split), INT(type), INT(list_type), INT(activation), TENSORS(out), TENSORS(o1), TENSORS(o2)), 0, {
  TORCH_CHECK(rows.size() == 1 && matrices.size() == 1 && out.size() == 1 && bias.empty() && scale.empty() &&
                  row_scale.empty() && q1.empty() && split >= 2 && type == 0 && list_type == 1 && activation == 0,
              "a form that is not emulated");
  RULE(is_float(rows[0]) && matrices[0].scalar_type() == rows[0].scalar_type(), "one dtype for both");
  RULE(groups.scalar_type() == at::kLong && groups.dim() == 1 && groups.size(0) == matrices[0].size(0), "group_list");
}, multiply_groups(out[0], rows[0], matrices[0], groups))

CHECKED_OPERATOR(ScatterPaKvCache, (TENSOR(key), TENSOR(keys), TENSOR(slots), TENSOR(value), TENSOR(values),
                 TENSOR(lengths), TENSOR(offsets), TENSOR(ends), TEXT(mode), TEXT(scatter), INTS(strides), INTS(starts)), 0, {
  check_scatter(key, keys, slots, value, values, mode);
  check_absent({&lengths, &offsets, &ends});
}, {
  write_slots(keys, slots, key);
  write_slots(values, slots, value);
})

#define ATTENTION_ARGUMENTS                                                                                     \
  (TENSOR(query), TENSORS(keys), TENSORS(values), TENSOR(pse), TENSOR(mask), INTS(query_lengths), INTS(key_lengths), \
   TENSOR(q1), TENSOR(q2), TENSOR(q3), TENSOR(q4), TENSOR(q5), TENSOR(q6), TENSOR(q7), TENSOR(table),           \
   TENSOR(query_padding), TENSOR(kv_padding), TENSOR(q8), TENSOR(q9), TENSOR(q10), TENSOR(q11), TENSOR(key_prefix), \
   TENSOR(value_prefix), INTS(prefix), TENSOR(query_rope), TENSOR(key_rope), TENSOR(rope_scale), INT(heads),    \
   DOUBLE(scale), INT(pre), INT(next), TEXT(layout), INT(kv_heads), INT(sparse), INT(inner), INT(block),        \
   INT(antiquant), BOOL(lse), INT(key_antiquant), INT(value_antiquant), TENSOR(out), TENSOR(sums))
#define ATTENTION_CHECK                                                                                         \
  check_absent({&pse, &q1, &q2, &q3, &q4, &q5, &q6, &q7, &q8, &q9, &q10, &q11, &query_padding, &kv_padding,      \
                &key_prefix, &value_prefix, &query_rope, &key_rope, &rope_scale});                              \
  TORCH_CHECK(!lse && !prefix, "a form that is not emulated");                                                  \
  ATTENTION.check()
#define ATTENTION                                                                                               \
  (Attention{query, mask, table, out, keys, values, query_lengths, key_lengths, heads, pre, next, kv_heads, sparse, \
             inner, block, scale, layout})

CHECKED_OPERATOR(FusedInferAttentionScoreV3, ATTENTION_ARGUMENTS, attention_workspace(query_raw), ATTENTION_CHECK,
                 ATTENTION.run())
PLAN(FusedInferAttentionScoreV3, GetMaxWorkspaceSize, ATTENTION_ARGUMENTS, attention_workspace(query_raw), ,
     ATTENTION.run())
