// torch's flash attention operators with flashtile's kernels (integrations/torch_flash.py).
#pragma once

#include <torch/csrc/stable/c/shim.h>

namespace flashtile {

// Puts C++ kernels in place of torch's for this dispatch key, until the library is deleted. Null where torch refuses.
TorchLibraryHandle override_torch_flash(const char* key);

}  // namespace flashtile
