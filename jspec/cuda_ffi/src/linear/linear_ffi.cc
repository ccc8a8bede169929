// The FFI handler of a product of a few rows.
#include "common/ffi.h"
#include "linear/linear.h"

namespace jspec {

// The scales of columns, bias, the norm's scale and what is added may be left out: any buffer then
// stands in their place. With scales of columns, weights have 8 bits.
ffi::Error multiply_rows(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                         bool quantized, bool biased, bool normed, bool added, bool gated,
                         bool transposed, float eps) {
  ffi::Error error = check_count(arguments, 6, results, 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const auto x = buffers[0].dimensions(), kernel = buffers[1].dimensions();
  if (!x.size() || kernel.size() < 2) {
    return invalid("x ", buffers[0], " and kernel ", buffers[1], " must be [..., in] and a matrix");
  }
  const int64_t inputs = x.back(), sides = gated ? 2 : 1;
  int64_t rows = 1, columns = 1;
  for (size_t i = 0; i + 1 < x.size(); ++i) rows *= x[i];
  for (size_t i = 0; i + 1 < kernel.size(); ++i) columns *= kernel[transposed ? i : i + 1];
  const int64_t group = quantized ? kInt8Group : kGroup;
  const bool is_small = rows <= kSmallRows && inputs <= kSmallInputs;
  const bool fits = quantized    ? transposed
                    : transposed ? !gated && is_small
                                 : columns % (8 * sides) == 0;
  if (rows < 1 || rows > kMostRows || inputs < 1 || inputs > kMostInputs || inputs % group ||
      columns < 1 || columns > INT32_MAX / kSmallInputs || columns % sides || !fits) {
    return invalid("x ", buffers[0], ", kernel ", buffers[1], ", quantized=", quantized,
                   ", gated=", gated, ", transposed=", transposed, " must be 1 to ", kMostRows,
                   " rows of inputs, a multiple of ", group, " up to ", kMostInputs,
                   ", and columns in eights unless transposed, as quantized ones are; others are "
                   "transposed for up to ", kSmallRows, " rows of ", kSmallInputs,
                   " inputs, and not gated");
  }
  const auto BF16 = ffi::DataType::BF16;
  const bool wide = buffers[6].element_type() == ffi::DataType::F32;
  std::vector<int64_t> weights(kernel.begin(), kernel.end());
  weights[transposed ? kernel.size() - 1 : 0] = inputs;
  error = buffers.check(0, rows, {{"x", BF16, {inputs}}});
  if (error.failure()) return error;
  error = buffers.check(1, 1, {{"kernel", quantized ? ffi::DataType::S8 : BF16, weights}});
  if (error.failure()) return error;
  const auto flat = [&](size_t i, const char* name, ffi::DataType dtype, int64_t count) {
    return int64_t(buffers[i].element_count()) == count && buffers[i].element_type() == dtype
               ? ffi::Error::Success()
               : invalid(name, " ", buffers[i], " must be ", count, " of ", dtype);
  };
  const int64_t outputs = columns / sides;
  const auto F32 = ffi::DataType::F32;
  if (quantized && (error = flat(2, "column_scale", F32, columns)).failure()) return error;
  if (biased && (error = flat(3, "bias", BF16, columns)).failure()) return error;
  if (normed && (error = flat(4, "scale", BF16, inputs)).failure()) return error;
  if (added && (error = flat(5, "add", BF16, rows * outputs)).failure()) return error;
  error = flat(6, "out", wide ? ffi::DataType::F32 : BF16, rows * outputs);
  if (error.failure()) return error;
  const auto values = [&](size_t i) { return buffers.data<uint16_t>(i); };
  return launched(linear(Linear{values(0), buffers.data<void>(1),
                                quantized ? buffers.data<float>(2) : nullptr,
                                biased ? values(3) : nullptr, normed ? values(4) : nullptr,
                                added ? values(5) : nullptr, buffers.data<void>(6),
                                static_cast<int32_t>(rows),
                                static_cast<int32_t>(inputs), static_cast<int32_t>(outputs), eps,
                                gated, transposed, wide},
                         stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_linear, jspec::multiply_rows,
                              JSPEC_BIND()
                                  .Attr<bool>("quantized")
                                  .Attr<bool>("biased")
                                  .Attr<bool>("normed")
                                  .Attr<bool>("added")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("transposed")
                                  .Attr<float>("eps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
