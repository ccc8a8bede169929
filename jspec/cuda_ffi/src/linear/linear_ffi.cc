// The FFI handler of a chain of products, each of which takes what the one before gives.
//
// Arguments: the first x [..., inputs], then for each link its kernel and, as its flags say, scale,
// bias and add. Results: what each link gives; then, for each link with a norm, what it multiplies.
// All are bfloat16.
#include "common/ffi.h"
#include "linear/linear.h"

namespace jspec {

enum Flag : int64_t { kNorm = 1, kBias = 2, kGated = 4, kAdd = 8, kAddSecondLast = 16 };

struct Link {
  Norm norm;  // without a scale where there is none
  Product product;
};

// The buffers of a chain: arguments one after the other, results by link.
class Chain {
 public:
  Chain(const Buffers& buffers, size_t results, size_t links, int64_t rows)
      : buffers_(buffers), results_(results), normed_(results + links), rows_(rows) {}

  ffi::Error read(int64_t flags, int64_t splits, int64_t stages, float eps) {
    const size_t at = links_.size(), result = results_ + at, first = next_;
    const auto shape = buffers_[first].dimensions();
    if (shape.size() < 2) return invalid("kernel ", buffers_[first], " must be [in, *out]");
    int64_t columns = 1;
    for (size_t i = 1; i < shape.size(); ++i) columns *= shape[i];
    const int64_t inputs = shape[0], outputs = flags & kGated ? columns / 2 : columns;
    if (inputs % 8 || outputs % 8 || inputs < 1 || outputs < 1 ||
        std::max(inputs, columns) > INT32_MAX) {
      return invalid("kernel ", buffers_[first], " must be of inputs and outputs by eights");
    }
    if (splits < 1 || splits > kMostSplits) {
      return invalid("splits=", splits, " must be in 1..", kMostSplits);
    }
    Link link = {};
    Product& p = link.product;
    const size_t from = at == 0 ? 0 : result - 1;
    ffi::Error error = take(from, "x", rows_ * inputs, &p.x);
    take(next_++, "kernel", inputs * columns, &p.kernel, &error);
    if (flags & kNorm) take(next_++, "scale", inputs, &link.norm.scale, &error);
    if (flags & kBias) take(next_++, "bias", columns, &p.bias, &error);
    if (flags & kAdd) take(next_++, "add", rows_ * outputs, &p.add, &error);
    take(result, "result", rows_ * outputs, &p.out, &error);
    if (flags & kNorm) take(normed_++, "normed", rows_ * inputs, &link.norm.out, &error);
    if (flags & kAddSecondLast) {
      if (at < 2 || links_[at - 2].product.outputs != outputs) {
        return invalid("link ", at, " cannot add what the one before the last gives");
      }
      p.add = links_[at - 2].product.out;
    }
    p.rows = link.norm.rows = static_cast<int32_t>(rows_);
    p.inputs = link.norm.width = static_cast<int32_t>(inputs);
    p.outputs = static_cast<int32_t>(outputs);
    p.splits = static_cast<int32_t>(splits);
    p.stages = static_cast<int32_t>(stages);
    p.gated = flags & kGated;
    if (flags & kNorm) {
      link.norm.x = p.x;
      link.norm.eps = eps;
      p.x = link.norm.out;
    }
    links_.push_back(link);
    return error;
  }

  ffi::Error run(Stream stream) const {
    const char* failed = nullptr;
    bool chained = false;
    for (const Link& link : links_) {
      if (!failed && link.norm.scale) {
        failed = norm(link.norm, chained, stream);
        chained = true;
      }
      if (!failed) failed = multiply(link.product, chained, stream);
      chained = true;
    }
    return launched(failed);
  }

 private:
  template <typename T>
  ffi::Error take(size_t at, const char* name, int64_t size, T** to) const {
    ffi::Error error = ffi::Error::Success();
    take(at, name, size, to, &error);
    return error;
  }

  // Points `to` at a buffer of `size` elements; the first that is none leaves its `error`.
  template <typename T>
  void take(size_t at, const char* name, int64_t size, T** to, ffi::Error* error) const {
    int64_t count = 1;
    for (int64_t extent : buffers_[at].dimensions()) count *= extent;
    *to = buffers_.data<T>(at);
    if (error->success() && (count != size || buffers_[at].element_type() != ffi::DataType::BF16)) {
      *error = invalid(name, " ", buffers_[at], " of link ", links_.size(), " must be bfloat16 of ",
                       size, " elements");
    }
  }

  const Buffers& buffers_;
  const size_t results_;
  size_t normed_, next_ = 1;
  const int64_t rows_;
  std::vector<Link> links_;
};

ffi::Error linear_chain(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        ffi::Span<const int64_t> flags, ffi::Span<const int64_t> splits,
                        ffi::Span<const int64_t> stages, ffi::Span<const float> eps) {
  const size_t links = flags.size();
  size_t inputs = 1 + links, outputs = links;
  for (int64_t flag : flags) {
    for (int64_t extra : {kNorm, kBias, kAdd}) inputs += (flag & extra) != 0;
    outputs += (flag & kNorm) != 0;
  }
  ffi::Error error = check_count(arguments, inputs, results, outputs);
  if (error.failure()) return error;
  if (links == 0 || splits.size() != links || stages.size() != links || eps.size() != links) {
    return invalid(links, " flags, ", splits.size(), " splits and ", eps.size(), " eps differ");
  }
  const Buffers buffers(arguments, results);
  int64_t rows = 1;
  const auto shape = buffers[0].dimensions();
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  if (rows < 1 || rows > kMostRows) return invalid(rows, " rows are not in 1..", kMostRows);
  Chain chain(buffers, inputs, links, rows);
  for (size_t link = 0; link < links; ++link) {
    error = chain.read(flags[link], splits[link], stages[link], eps[link]);
    if (error.failure()) return error;
  }
  return chain.run(stream);
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_linear_chain, jspec::linear_chain,
                              JSPEC_BIND()
                                  .Attr<jspec::ffi::Span<const int64_t>>("flags")
                                  .Attr<jspec::ffi::Span<const int64_t>>("splits")
                                  .Attr<jspec::ffi::Span<const int64_t>>("stages")
                                  .Attr<jspec::ffi::Span<const float>>("eps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
