// The FFI handler of products of rows in groups.
#include "common/ffi.h"
#include "grouped/grouped.h"

namespace jspec {

// x, codes, scales, starts, and what may be left out, in whose place any buffer stands: bias,
// taken, put, the norm's scale, weights.
ffi::Error multiply_groups(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                           bool biased, bool takes, bool puts, bool normed, bool weighted,
                           bool gated, bool clamped, float eps, float limit, float alpha) {
  ffi::Error error = check_count(arguments, 9, results, 1);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  enum { kX, kCodes, kScales, kStarts, kBias, kTaken, kPut, kScale, kWeights, kOut };
  const auto x_shape = buffers[kX].dimensions(), shape = buffers[kCodes].dimensions();
  const auto out_shape = buffers[kOut].dimensions();
  if (x_shape.size() != 2 || shape.size() < 2 || out_shape.size() < 1) {
    return invalid("x ", buffers[kX], ", codes ", buffers[kCodes], " and out ", buffers[kOut],
                   " must be [P, in], [E, *out, in / 2] and [P, *out]");
  }
  const int64_t sources = x_shape[0], inputs = x_shape[1], groups = shape[0];
  const int64_t rows = out_shape[0], sides = gated ? 2 : 1;
  int64_t columns = 1;
  for (size_t i = 1; i + 1 < shape.size(); ++i) columns *= shape[i];
  if (groups < 1 || groups > kMostGroups || rows < 1 || rows > kMostEach * groups ||
      inputs < 1 || inputs > kMostInputs || inputs % kBlock || columns < 1 ||
      columns > INT32_MAX / kSmallInputs || columns % sides || columns * inputs > INT32_MAX * 32L ||
      sources < 1 || rows % sources || (!takes && rows != sources) ||
      sources * inputs > INT32_MAX) {
    return invalid("x ", buffers[kX], ", codes ", buffers[kCodes], ", out ", buffers[kOut],
                   ", gated=", gated, " must be 1 to ", kMostGroups, " groups of 1 to ", kMostEach,
                   " rows in the mean, a multiple of those of x if they are taken, of inputs, a "
                   "multiple of ", kBlock, " up to ", kMostInputs);
  }
  const auto BF16 = ffi::DataType::BF16, F32 = ffi::DataType::F32;
  const auto U8 = ffi::DataType::U8, S32 = ffi::DataType::S32;
  const bool wide = buffers[kOut].element_type() == F32;
  // Whether a buffer that is there holds so many numbers of a type.
  const auto check = [&](bool there, size_t i, const char* name, ffi::DataType dtype,
                         int64_t count) {
    if (error.failure() || !there) return;
    if (int64_t(buffers[i].element_count()) != count || buffers[i].element_type() != dtype) {
      error = invalid(name, " ", buffers[i], " must be ", count, " of ", dtype);
    }
  };
  check(true, kX, "x", BF16, sources * inputs);
  check(true, kCodes, "codes", U8, groups * columns * (inputs / 2));
  check(true, kScales, "scales", U8, groups * columns * (inputs / kBlock));
  check(true, kStarts, "starts", S32, groups + 1);
  check(biased, kBias, "bias", BF16, groups * columns);
  check(takes, kTaken, "taken", S32, rows);
  check(puts, kPut, "put", S32, rows);
  check(normed, kScale, "scale", BF16, inputs);
  check(weighted, kWeights, "weights", F32, rows);
  check(true, kOut, "out", wide ? F32 : BF16, rows * (columns / sides));
  if (error.failure()) return error;
  const auto values = [&](size_t i) { return buffers.data<uint16_t>(i); };
  const auto numbers = [&](size_t i) { return buffers.data<int32_t>(i); };
  Linear linear{};
  linear.x = values(kX);
  linear.kernel = buffers.data<void>(kCodes);
  linear.block_scale = buffers.data<uint8_t>(kScales);
  linear.bias = biased ? values(kBias) : nullptr;
  linear.scale = normed ? values(kScale) : nullptr;
  linear.out = buffers.data<void>(kOut);
  linear.rows = static_cast<int32_t>(rows);
  linear.inputs = static_cast<int32_t>(inputs);
  linear.outputs = static_cast<int32_t>(columns / sides);
  linear.eps = eps;
  linear.gated = gated;
  linear.transposed = true;
  linear.wide = wide;
  const Groups found{numbers(kStarts), takes ? numbers(kTaken) : nullptr,
                     puts ? numbers(kPut) : nullptr,
                     weighted ? buffers.data<float>(kWeights) : nullptr,
                     static_cast<int32_t>(sources), static_cast<int32_t>(groups), limit, alpha,
                     clamped};
  return launched(grouped_linear(linear, found, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_grouped_linear, jspec::multiply_groups,
                              JSPEC_BIND()
                                  .Attr<bool>("biased")
                                  .Attr<bool>("takes")
                                  .Attr<bool>("puts")
                                  .Attr<bool>("normed")
                                  .Attr<bool>("weighted")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("clamped")
                                  .Attr<float>("eps")
                                  .Attr<float>("limit")
                                  .Attr<float>("alpha"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
