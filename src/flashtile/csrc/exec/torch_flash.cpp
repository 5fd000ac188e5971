// The operators that scaled_dot_product_attention calls with FLASH_ATTENTION, as calls of the dense overloads: no
// Python, and one dispatch. Calls with dropout go to Python, through ops that integrations/torch_flash.py defines. It
// also checks that torch's schemas are the ones below.
#include "torch_flash.h"

#include <stdexcept>
#include <string_view>

#include "ops.h"
#include "tensor.h"

namespace flashtile {
namespace {

namespace stable = torch::stable::detail;

// Returns the dense mode of a call of scaled_dot_product_attention, whose causal mask starts in the top left corner.
i64 mode_of(bool is_causal) {
  using argument::kDenseField;
  constexpr i64 kTopLeft = 1;
  static_assert(std::string_view(kDenseField<argument::kCausal>.texts[kTopLeft]) == "top_left");
  return (is_causal ? kTopLeft : 0) << kDenseField<argument::kCausal>.shift |
         i64{is_deterministic()} << kDenseField<argument::kDeterministic>.shift |
         i64{1} << kDenseField<argument::kNeedsGrad>.shift;
}

bool is_for_python(StableIValue dropout_p) { return !is_usable() || borrow<double>(dropout_p) != 0.0; }

// Makes an empty tensor without an axis, or with one of that size.
Owned make_empty(i32 dim, int64_t size, i32 dtype, Device device) {
  constexpr int64_t kStride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, &size, &kStride, dtype, device.type, device.index, &handle) != 0)
    throw std::runtime_error("no memory for a result");
  return Owned(handle);
}

// aten::_scaled_dot_product_flash_attention: (query, key, value, dropout_p, is_causal, return_debug_mask, scale) ->
// (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask)
void sdpa_forward(StableIValue* stack, uint64_t, uint64_t) {
  enum : i32 { kQuery, kKey, kValue, kDropoutP, kIsCausal, kReturnDebugMask, kScale };
  View query, key;
  i32 dtype = 0;
  Owner owner([&] {
    for (i32 index : {kQuery, kKey, kValue}) release<AtenTensorHandle>(stack[index]);
    release<std::optional<double>>(stack[kScale]);
  });
  view_of(borrow<AtenTensorHandle>(stack[kQuery]), query);
  view_of(borrow<AtenTensorHandle>(stack[kKey]), key);
  aoti_torch_get_dtype(borrow<AtenTensorHandle>(stack[kQuery]), &dtype);
  // All that may fail comes before the call: what it returns has no owner
  Owned none[] = {Owned::undefined(), Owned::undefined()};
  Owned rng_state, unused = make_empty(0, 1, aoti_torch_dtype_uint64(), query.device),
                   debug_mask = make_empty(1, 0, dtype, query.device);
  if (is_for_python(stack[kDropoutP])) {
    owner.pass_on();
    call_python("flashtile::sdpa_forward_fallback", stack, 3);
    stack[6] = stack[2];
  } else {
    rng_state = make_empty(1, 2, aoti_torch_dtype_uint64(), query.device);
    StableIValue dense[] = {stack[kQuery], stack[kKey], stack[kValue], stack[kScale],
                            stable::from(mode_of(borrow<bool>(stack[kIsCausal])))};
    owner.pass_on();
    forward_dense(dense);
    stack[0] = dense[0], stack[1] = dense[1];
    stack[6] = stable::from(rng_state.release());
  }
  stack[2] = stable::from(none[0].release()), stack[3] = stable::from(none[1].release());
  stack[4] = stable::from(query.size(-2)), stack[5] = stable::from(key.size(-2));
  stack[7] = stable::from(unused.release()), stack[8] = stable::from(debug_mask.release());
}

// aten::_scaled_dot_product_flash_attention_backward: (grad_out, query, key, value, out, logsumexp, cum_seq_q,
// cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale) -> (grad_query, grad_key,
// grad_value)
void sdpa_backward(StableIValue* stack, uint64_t, uint64_t num_outputs) {
  enum : i32 {
    kGradOut,
    kQuery,
    kKey,
    kValue,
    kOut,
    kLogsumexp,
    kCumSeqQ,
    kCumSeqK,
    kMaxQ,
    kMaxK,
    kDropoutP,
    kIsCausal,
    kPhiloxSeed,
    kPhiloxOffset,
    kScale
  };
  if (is_for_python(stack[kDropoutP])) return call_python("flashtile::sdpa_backward_fallback", stack, num_outputs);
  Owner others([&] {
    for (i32 index : {kCumSeqQ, kCumSeqK, kPhiloxSeed, kPhiloxOffset}) release<AtenTensorHandle>(stack[index]);
  });
  Owner passed([&] {
    for (i32 index : {kGradOut, kQuery, kKey, kValue, kOut, kLogsumexp}) release<AtenTensorHandle>(stack[index]);
    release<std::optional<double>>(stack[kScale]);
  });
  i64 mode = mode_of(borrow<bool>(stack[kIsCausal]));
  StableIValue dense[] = {stack[kGradOut], stack[kQuery],      stack[kKey], stack[kValue],
                          stack[kScale],   stable::from(mode), stack[kOut], stack[kLogsumexp]};
  passed.pass_on();
  backward_dense(dense);
  others.free();
  for (uint64_t index = 0; index < num_outputs; ++index) stack[index] = dense[index];
}

}  // namespace

TorchLibraryHandle override_torch_flash(const char* key) {
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_impl("aten", key, __FILE__, __LINE__, &library) != 0) return nullptr;
  if (torch_library_impl(library, "_scaled_dot_product_flash_attention", sdpa_forward, TORCH_ABI_VERSION) == 0 &&
      torch_library_impl(library, "_scaled_dot_product_flash_attention_backward", sdpa_backward, TORCH_ABI_VERSION) ==
          0)
    return library;
  aoti_torch_delete_library_object(library);
  return nullptr;
}

}  // namespace flashtile
