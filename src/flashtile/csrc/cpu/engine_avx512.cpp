// The CPU engine for AVX-512 F, BW, DQ and VL.
#include "backward.h"
#include "forward.h"

namespace flashtile {

extern const EnginePasses kAvx512Passes = {forward_pass,
                                           {preprocess_pass, main_pass, reduce_pass, bias_pass, sinks_pass}};

}  // namespace flashtile
