// The CPU engine for AVX2, FMA and F16C.
#include "backward.h"
#include "forward.h"

namespace flashtile {

extern const EnginePasses kAvx2Passes = {forward_pass,
                                         {preprocess_pass, main_pass, reduce_pass, bias_pass, sinks_pass}};

}  // namespace flashtile
