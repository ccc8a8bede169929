// The FFI handlers of a matmul of a few rows, and of several in a row.
#include "exchange/bind.h"
#include "linear/chain.h"

namespace jspec {
namespace {

// Where the buffers of a matmul are, and what is said of it. The scales of weights, bias, the
// norm's scale and what is added may be left out: any buffer then stands in their place. Weights of
// 8 bits have a scale for each column, those of 4 bits one for each block of inputs, and 16 are
// bfloat16 without.
struct Matmul {
  size_t x, kernel, weight_scale, bias, scale, add, out;
  int32_t bits;
  bool biased, normed, added, gated, transposed, exact;
  float eps;

  // Checks the buffers, and fills `linear`.
  ffi::Error read(const Buffers& buffers, Linear& linear) const {
    const auto x_shape = buffers[x].dimensions(), shape = buffers[kernel].dimensions();
    if (!x_shape.size() || shape.size() < 2) {
      return invalid("x ", buffers[x], " and kernel ", buffers[kernel],
                     " must be [..., in] and a matrix");
    }
    if (bits != 4 && bits != 8 && bits != 16) return invalid("bits=", bits, " is not 4, 8 or 16");
    const bool quantized = bits < 16;
    const int64_t inputs = x_shape.back(), sides = gated ? 2 : 1;
    int64_t rows = 1, columns = 1;
    for (size_t i = 0; i + 1 < x_shape.size(); ++i) rows *= x_shape[i];
    for (size_t i = 0; i + 1 < shape.size(); ++i) columns *= shape[transposed ? i : i + 1];
    const int64_t group = bits == 4 ? kBlock : bits == 8 ? kInt8Group : kGroup;
    const bool is_small = rows <= kSmallRows && inputs <= kSmallInputs;
    const bool fits = exact        ? !quantized && !transposed && columns % (8 * sides) == 0
                      : quantized  ? transposed
                      : transposed ? !gated && is_small
                                   : columns % (8 * sides) == 0;
    const int64_t most_rows = exact                     ? kExactRows
                              : quantized || transposed ? kMostRows
                                                        : kTileRows;
    const int64_t most_inputs = exact || rows > kMostRows ? kTileInputs : kMostInputs;
    if (rows < 1 || rows > most_rows || inputs < 1 || inputs > most_inputs || inputs % group ||
        columns < 1 || columns > INT32_MAX / kSmallInputs || columns % sides || !fits) {
      return invalid("x ", buffers[x], ", kernel ", buffers[kernel], ", bits=", bits,
                     ", gated=", gated, ", transposed=", transposed, ", exact=", exact,
                     " must be 1 to ", most_rows,
                     " rows of inputs, a multiple of ", group, " up to ", most_inputs,
                     ", and columns in eights unless transposed, as those of 4 and 8 bits are; "
                     "others are transposed for up to ", kSmallRows, " rows of ", kSmallInputs,
                     " inputs, and neither gated nor exact");
    }
    const auto BF16 = ffi::DataType::BF16, F32 = ffi::DataType::F32, U8 = ffi::DataType::U8;
    const bool wide = buffers[out].element_type() == F32;
    std::vector<int64_t> weights(shape.begin(), shape.end());
    weights[transposed ? shape.size() - 1 : 0] = bits == 4 ? inputs / 2 : inputs;
    ffi::Error error = buffers.check(x, rows, {{"x", BF16, {inputs}}});
    if (error.failure()) return error;
    error = buffers.check(kernel, 1,
                          {{"kernel", bits == 4 ? U8 : bits == 8 ? ffi::DataType::S8 : BF16,
                            weights}});
    if (error.failure()) return error;
    const auto flat = [&](size_t i, const char* name, ffi::DataType dtype, int64_t count) {
      return int64_t(buffers[i].element_count()) == count && buffers[i].element_type() == dtype
                 ? ffi::Error::Success()
                 : invalid(name, " ", buffers[i], " must be ", count, " of ", dtype);
    };
    const int64_t outputs = columns / sides;
    if (bits == 8) error = flat(weight_scale, "weight_scale", F32, columns);
    if (bits == 4) error = flat(weight_scale, "weight_scale", U8, columns * (inputs / kBlock));
    if (error.failure()) return error;
    if (biased && (error = flat(bias, "bias", BF16, columns)).failure()) return error;
    if (normed && (error = flat(scale, "scale", BF16, inputs)).failure()) return error;
    if (added && (error = flat(add, "add", BF16, rows * outputs)).failure()) return error;
    error = flat(out, "out", wide ? F32 : BF16, rows * outputs);
    if (error.failure()) return error;
    const auto values = [&](size_t i) { return buffers.data<uint16_t>(i); };
    linear = Linear{values(x), buffers.data<void>(kernel),
                    bits == 8 ? buffers.data<float>(weight_scale) : nullptr,
                    bits == 4 ? buffers.data<uint8_t>(weight_scale) : nullptr,
                    biased ? values(bias) : nullptr, normed ? values(scale) : nullptr,
                    added ? values(add) : nullptr, buffers.data<void>(out),
                    static_cast<int32_t>(rows), static_cast<int32_t>(inputs),
                    static_cast<int32_t>(outputs), eps, gated, transposed, wide, exact};
    return ffi::Error::Success();
  }
};

// Checks that the rows of `linear` can be scaled for its norm in the buffers `first` and the next,
// with so many sums of squares for each.
ffi::Error check_scaled(const Buffers& buffers, size_t first, const Linear& linear, int64_t parts) {
  const ffi::AnyBuffer &scaled = buffers[first], &squares = buffers[first + 1];
  if (scaled.element_type() != ffi::BF16 || squares.element_type() != ffi::F32 ||
      int64_t(scaled.element_count()) < int64_t(linear.rows) * linear.inputs ||
      int64_t(squares.element_count()) < linear.rows * parts) {
    return invalid("scaled ", scaled, " and squares ", squares, " must have room for ", linear.rows,
                   " rows of ", linear.inputs, " of ", ffi::BF16, ", and of ", parts, " of ",
                   ffi::F32);
  }
  return ffi::Error::Success();
}

// Lets a kernel of its own scale the rows of `linear` in those buffers.
ffi::Error scale_in(const Buffers& buffers, size_t first, Linear& linear) {
  if (!linear.scale) return invalid("rows are scaled for no norm");
  linear.scaled = buffers.data<uint16_t>(first), linear.squares = buffers.data<float>(first + 1);
  linear.square_parts = 1;
  return check_scaled(buffers, first, linear, 1);
}

}  // namespace

ffi::Error multiply_rows(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                         int32_t bits, bool biased, bool normed, bool added, bool gated,
                         bool transposed, bool exact, float eps) {
  const bool scales = results.size() > 1;  // rows for the norm, in memory of its own
  ffi::Error error = check_count(arguments, 6, results, scales ? 3 : 1);
  if (error.failure()) return error;
  const Matmul matmul{0, 1, 2, 3, 4, 5, 6, bits, biased, normed, added, gated,
                      transposed, exact, eps};
  const Buffers buffers(arguments, results);
  Linear found;
  error = matmul.read(buffers, found);
  if (!error.failure() && scales) error = scale_in(buffers, 7, found);
  return error.failure() ? error : launched(linear(found, stream));
}

// x, then the kernel, its scales, bias, the norm's scale and what is added of each matmul; the
// result of each, and then what each that is summed gives on this device, float32; last, if there
// is any, memory for rows that are scaled for a norm by a kernel ahead: by the matmul ahead where it
// can, or where a matmul is `scaled` by a kernel of its own. `bits`, `exact`, `ranks` and `patience`
// are those of all, and each other attribute has a value for each matmul;
// `added`: the number of the result that is added, or of its own argument where that is -1, or
// nothing where it is -2; `summed`: whether it is summed over the ranks, before anything is added.
ffi::Error multiply_in_chain(Stream stream, int32_t device, ffi::RemainingArgs arguments,
                             ffi::RemainingRets results, int32_t bits, bool exact, int64_t ranks,
                             int64_t patience, ffi::Span<const int32_t> biased,
                             ffi::Span<const int32_t> normed, ffi::Span<const int32_t> scaled,
                             ffi::Span<const int32_t> added,
                             ffi::Span<const int32_t> gated, ffi::Span<const int32_t> summed,
                             ffi::Span<const float> eps) {
  const size_t links = gated.size();
  for (const size_t size :
       {biased.size(), normed.size(), scaled.size(), added.size(), summed.size(), eps.size()}) {
    if (size != links) {
      return invalid("an attribute has ", size, " values for ", links, " matmuls");
    }
  }
  const auto count_of = [](ffi::Span<const int32_t> flags) -> size_t {
    return std::count_if(flags.begin(), flags.end(), [](int32_t x) { return x != 0; });
  };
  const size_t sums = count_of(summed);
  const bool scales = count_of(scaled) || results.size() > links + sums;
  ffi::Error error = check_count(arguments, 1 + 5 * links, results, links + sums + 2 * scales);
  if (error.failure()) return error;
  const Buffers buffers(arguments, results);
  const Group group = group_of(device, ranks, patience);
  std::vector<Link> found(links);
  const size_t scratch = buffers.size() - 2;  // if it scales
  size_t part = arguments.size() + links;
  for (size_t i = 0; i < links; ++i) {
    if (added[i] < -2 || added[i] >= int64_t(i)) {
      return invalid("added[", i, "]=", added[i], " is no matmul before it, -1 or -2");
    }
    const size_t at = 1 + 5 * i, first = arguments.size();
    const size_t add = added[i] < 0 ? at + 4 : first + added[i];
    const bool adds = added[i] != -2, sum = summed[i] != 0;
    const Matmul matmul{i ? first + i - 1 : 0, at, at + 1, at + 2, at + 3,
                        add, sum ? part : first + i,
                        bits, biased[i] != 0, normed[i] != 0, adds && !sum, gated[i] != 0,
                        bits < 16, exact, eps[i]};
    error = matmul.read(buffers, found[i].matmul);
    if (!error.failure() && scaled[i]) error = scale_in(buffers, scratch, found[i].matmul);
    if (!error.failure() && scales && i > 0 && normed[i] && !exact) {
      const Linear& matmul = found[i].matmul;
      error = check_scaled(buffers, scratch, matmul, squares_of_row(matmul.inputs));
    }
    if (error.failure()) return error;
    if (!sum) continue;
    const int64_t count = buffers[part].element_count();
    for (const size_t buffer : {first + i, adds ? add : first + i}) {
      if (int64_t(buffers[buffer].element_count()) != count ||
          buffers[buffer].element_type() != ffi::BF16) {
        return invalid("sum ", buffers[buffer], " must be ", count, " of ", ffi::BF16);
      }
    }
    if (!found[i].matmul.wide || !group.ranks || biased[i] || count % 2 ||
        count * int64_t{sizeof(float)} > kMostBytes) {
      return invalid("device ", device, " of ", ranks, " ranks cannot sum ", buffers[part],
                     " with biased=", biased[i]);
    }
    found[i].sum = {buffers.data<float>(part), adds ? buffers.data<char>(add) : nullptr,
                    buffers.data<char>(first + i), count, true, group};
    ++part;
  }
  ScaledRows memory{};
  if (scales && !exact) {
    memory = {buffers.data<uint16_t>(scratch), buffers.data<float>(scratch + 1)};
  }
  return launched(linear_chain(found, memory, stream));
}

}  // namespace jspec

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_linear, jspec::multiply_rows,
                              JSPEC_BIND()
                                  .Attr<int32_t>("bits")
                                  .Attr<bool>("biased")
                                  .Attr<bool>("normed")
                                  .Attr<bool>("added")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("exact")
                                  .Attr<float>("eps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});

// As jspec_open_exchange, for the sums of chains: those of a library are messages of their own.
extern "C" const char* jspec_open_sums(int count) { return jspec::open_exchange(count); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jspec_linear_chain, jspec::multiply_in_chain,
                              JSPEC_BIND_MESSAGE()
                                  .Attr<int32_t>("bits")
                                  .Attr<bool>("exact")
                                  .Attr<int64_t>("ranks")
                                  .Attr<int64_t>("patience")
                                  .Attr<jspec::ffi::Span<const int32_t>>("biased")
                                  .Attr<jspec::ffi::Span<const int32_t>>("normed")
                                  .Attr<jspec::ffi::Span<const int32_t>>("scaled")
                                  .Attr<jspec::ffi::Span<const int32_t>>("added")
                                  .Attr<jspec::ffi::Span<const int32_t>>("gated")
                                  .Attr<jspec::ffi::Span<const int32_t>>("summed")
                                  .Attr<jspec::ffi::Span<const float>>("eps"),
                              {jspec::ffi::Traits::kCmdBufferCompatible});
